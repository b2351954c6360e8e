/* Graphs: a count of nodes and the user objects to destroy with them; a launch does nothing. */
#include "sim.h"
#include <stdlib.h>

struct sim_object { cudaHostFn_t destroy; void *data; int holders; };
struct held { struct sim_object *object; int count; struct held *next; };
struct sim_graph { unsigned long long nodes; int holders; struct held *held; }; /* the graph and its executables */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct sim_graph *sim_graph_new(void)
{
    struct sim_graph *graph = calloc(1, sizeof *graph);
    if (graph)
        graph->holders = 1;
    return graph;
}

void sim_graph_add_nodes(struct sim_graph *graph, unsigned long long nodes) { graph->nodes += nodes; }

static void object_release(struct sim_object *object, int count)
{
    pthread_mutex_lock(&lock);
    int left = object->holders -= count;
    pthread_mutex_unlock(&lock);
    if (left > 0)
        return;
    object->destroy(object->data);
    free(object);
}

void sim_graph_release(struct sim_graph *graph)
{
    pthread_mutex_lock(&lock);
    int left = --graph->holders;
    pthread_mutex_unlock(&lock);
    if (left)
        return;
    for (struct held *held = graph->held, *next; held; held = next) {
        next = held->next;
        object_release(held->object, held->count);
        free(held);
    }
    free(graph);
}

cudaError_t cudaGraphCreate(cudaGraph_t *out, unsigned flags)
{
    (void)flags;
    *out = (cudaGraph_t)sim_graph_new();
    return *out ? cudaSuccess : sim_fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    sim_graph_release((struct sim_graph *)graph);
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    (void)flags;
    pthread_mutex_lock(&lock);
    ((struct sim_graph *)graph)->holders++;
    pthread_mutex_unlock(&lock);
    *out = (cudaGraphExec_t)graph;
    return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags)
{
    return cudaGraphInstantiateWithFlags(out, graph, flags);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    sim_graph_release((struct sim_graph *)exec);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    (void)exec;
    return sim_work(stream);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    const struct sim_graph *sim = (const struct sim_graph *)graph;
    const size_t room = nodes ? *count : 0;
    *count = nodes && room < sim->nodes ? room : (size_t)sim->nodes;
    for (size_t i = 0; nodes && i < *count; i++)
        nodes[i] = (cudaGraphNode_t)(uintptr_t)(i + 1);
    return cudaSuccess;
}

cudaError_t cudaUserObjectCreate(cudaUserObject_t *out, void *data, cudaHostFn_t destroy, unsigned holders,
                                 unsigned flags)
{
    struct sim_object *object = malloc(sizeof *object);
    (void)flags;
    if (!object)
        return sim_fail(cudaErrorMemoryAllocation);
    *object = (struct sim_object){destroy, data, (int)holders};
    *out = (cudaUserObject_t)object;
    return cudaSuccess;
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned count)
{
    object_release((struct sim_object *)object, (int)count);
    return cudaSuccess;
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t handle, unsigned count, unsigned flags)
{
    struct sim_object *object = (struct sim_object *)handle;
    struct held *held = malloc(sizeof *held);
    if (!held)
        return sim_fail(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&lock);
    if (!(flags & cudaGraphUserObjectMove))
        object->holders += (int)count;
    *held = (struct held){object, (int)count, ((struct sim_graph *)graph)->held};
    ((struct sim_graph *)graph)->held = held;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}
