/* Stream capture: which streams record into which graph, per stream, so that several captures can run at once.
 *
 * A stream joins a capture when it waits for an event recorded in it. As on a device, a joined stream must be joined
 * back before the capture ends, and waiting for a stream under capture is an error that spoils the capture.
 */
#include "sim.h"
#include <stdlib.h>
#include <string.h>

static struct sim_capture *captures;
static unsigned long long last_id;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void add_stream(struct sim_capture *capture, struct sim_stream *stream)
{
    stream->slot = capture->streams++;
    stream->capture = capture;
    capture->joined[stream->slot] = stream;
}

static struct sim_capture *capture_by_id(unsigned long long id)
{
    struct sim_capture *capture = captures;
    while (capture && capture->id != id)
        capture = capture->next;
    return capture;
}

static cudaError_t begin(cudaStream_t handle, struct sim_graph *graph)
{
    struct sim_stream *stream = sim_stream_of(handle);
    struct sim_capture *capture = calloc(1, sizeof *capture);
    if (handle <= (cudaStream_t)2 || stream->capture || !capture) {
        free(capture);
        return sim_fail(cudaErrorStreamCaptureUnsupported);
    }
    sim_wake(stream->device);
    pthread_mutex_lock(&lock);
    capture->id = ++last_id;
    capture->graph = graph ? graph : sim_graph_new();
    capture->next = captures;
    captures = capture;
    add_stream(capture, stream);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    (void)mode;
    return begin(stream, NULL);
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *after,
                                          const cudaGraphEdgeData *edges, size_t count,
                                          enum cudaStreamCaptureMode mode)
{
    (void)after, (void)edges, (void)count, (void)mode;
    return begin(stream, (struct sim_graph *)graph);
}

static cudaError_t check_joined(const struct sim_capture *capture)
{
    if (capture->invalid)
        return cudaErrorStreamCaptureInvalidated;
    for (int slot = 1; slot < capture->streams; slot++)
        if (capture->joined[slot] && capture->clock[0][slot] < capture->clock[slot][slot])
            return cudaErrorStreamCaptureUnjoined;
    return cudaSuccess;
}

static void end(struct sim_capture *capture)
{
    struct sim_capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    for (int slot = 0; slot < capture->streams; slot++)
        if (capture->joined[slot])
            capture->joined[slot]->capture = NULL;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *graph)
{
    pthread_mutex_lock(&lock);
    struct sim_stream *stream = sim_stream_of(handle);
    struct sim_capture *capture = stream->capture;
    *graph = NULL;
    if (!capture || capture->joined[0] != stream) {
        pthread_mutex_unlock(&lock);
        return sim_fail(cudaErrorStreamCaptureUnmatched);
    }
    cudaError_t error = check_joined(capture);
    for (int slot = 0; slot < capture->streams; slot++)
        sim_graph_add_nodes(capture->graph, capture->clock[slot][slot]);
    end(capture);
    pthread_mutex_unlock(&lock);
    if (error)
        sim_graph_release(capture->graph);
    else
        *graph = (cudaGraph_t)capture->graph;
    free(capture);
    return sim_fail(error);
}

static enum cudaStreamCaptureStatus status_of(const struct sim_capture *capture)
{
    if (!capture)
        return cudaStreamCaptureStatusNone;
    return capture->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    *status = status_of(sim_stream_of(stream)->capture);
    return cudaSuccess;
}

static cudaError_t info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                        cudaGraph_t *graph, const cudaGraphNode_t **after, size_t *count)
{
    const struct sim_capture *capture = sim_stream_of(stream)->capture;
    *status = status_of(capture);
    if (id)
        *id = capture ? capture->id : 0;
    if (graph)
        *graph = capture ? (cudaGraph_t)capture->graph : NULL;
    if (after)
        *after = NULL;
    if (count)
        *count = 0;
    return cudaSuccess;
}

#if CUDART_VERSION >= 13000
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                     unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **after,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
    if (edges)
        *edges = NULL;
    return info(stream, status, id, graph, after, count);
}
#else
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **after,
                                        size_t *count)
{
    return info(stream, status, id, graph, after, count);
}

cudaError_t cudaStreamGetCaptureInfo_v3(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **after,
                                        const cudaGraphEdgeData **edges, size_t *count)
{
    if (edges)
        *edges = NULL;
    return info(stream, status, id, graph, after, count);
}
#endif

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static __thread enum cudaStreamCaptureMode current = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode previous = current;
    current = *mode;
    *mode = previous;
    return cudaSuccess;
}

/* ---- what streams and events ask ---- */

cudaError_t sim_work(cudaStream_t handle)
{
    struct sim_stream *stream = sim_stream_of(handle);
    sim_wake(stream->device);
    struct sim_capture *capture = stream->capture;
    if (!capture)
        return cudaSuccess;
    if (capture->invalid)
        return sim_fail(cudaErrorStreamCaptureInvalidated);
    capture->clock[stream->slot][stream->slot]++;
    return cudaSuccess;
}

cudaError_t sim_wait(cudaStream_t handle)
{
    struct sim_capture *capture = sim_stream_of(handle)->capture;
    if (!capture)
        return cudaSuccess;
    capture->invalid = 1;
    return sim_fail(cudaErrorStreamCaptureUnsupported);
}

cudaError_t sim_wait_device(void)
{
    int spoiled = 0;
    pthread_mutex_lock(&lock);
    for (struct sim_capture *capture = captures; capture; capture = capture->next)
        if (capture->joined[0]->device == sim_current)
            spoiled = capture->invalid = 1;
    pthread_mutex_unlock(&lock);
    return spoiled ? sim_fail(cudaErrorStreamCaptureUnsupported) : cudaSuccess;
}

void sim_capture_record(struct sim_event *event, struct sim_stream *stream)
{
    const struct sim_capture *capture = stream->capture;
    event->capture = capture ? capture->id : 0;
    if (capture)
        memcpy(event->clock, capture->clock[stream->slot], sizeof event->clock);
}

cudaError_t sim_capture_join(struct sim_stream *stream, const struct sim_event *event)
{
    cudaError_t error = cudaSuccess;
    sim_wake(stream->device);
    pthread_mutex_lock(&lock);
    struct sim_capture *capture = event->capture ? capture_by_id(event->capture) : NULL;
    if (capture && stream->capture && stream->capture != capture)
        error = cudaErrorStreamCaptureMerge;
    else if (capture && !stream->capture && capture->streams == SIM_MAX_JOINED)
        error = cudaErrorStreamCaptureUnsupported;
    else if (capture) {
        if (!stream->capture)
            add_stream(capture, stream);
        unsigned *seen = capture->clock[stream->slot];
        for (int slot = 0; slot < capture->streams; slot++)
            seen[slot] = event->clock[slot] > seen[slot] ? event->clock[slot] : seen[slot];
    }
    pthread_mutex_unlock(&lock);
    return sim_fail(error);
}

void sim_capture_forget(struct sim_stream *stream)
{
    pthread_mutex_lock(&lock);
    if (stream->capture) {
        stream->capture->invalid = 1;
        if (stream->slot)
            stream->capture->joined[stream->slot] = NULL;
    }
    pthread_mutex_unlock(&lock);
}

/* the order of work inside a capture is not kept, so there is nothing to change */
cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *after,
#if CUDART_VERSION >= 13000
                                                const cudaGraphEdgeData *edges, size_t count, unsigned flags)
{
    (void)edges;
#else
                                                size_t count, unsigned flags)
{
#endif
    (void)stream, (void)after, (void)count, (void)flags;
    return cudaSuccess;
}
