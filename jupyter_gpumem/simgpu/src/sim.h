/* Shared state of the simulated GPU: what one source file needs from another.
 *
 * The library answers the CUDA runtime, the CUDA driver and cuBLAS as torch's libraries call them.
 * Device memory is address space only: no byte of it is ever touched, so a simulated card may be far larger
 * than the memory of the machine.
 */
#ifndef SIM_H
#define SIM_H
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include "usage.h"

#if CUDART_VERSION / 1000 != SIM_CUDA_MAJOR
#error "these CUDA headers are of another major version than the CUDA that torch was built for"
#endif

#define SIM_PAGE ((size_t)2 << 20) /* physical memory is handed out in 2 MiB pages, as on real cards */

/* ---- devices (device.c) ---- */
extern int sim_devices;
extern __thread int sim_current;
cudaError_t sim_fail(cudaError_t error);  /* remember it for cudaGetLastError and return it */
void sim_wake(int device);                /* create the primary context, as the first real use does */
int sim_take(int device, size_t bytes);   /* 0, or -1 when the budget is used up */
void sim_give(int device, size_t bytes);

/* ---- ordered address ranges (space.c); the caller holds sim_lock ---- */
struct sim_range { uintptr_t start; size_t bytes; int device; };
struct sim_space { uintptr_t base; size_t bytes; struct sim_range *items; size_t count, room; };
extern pthread_mutex_t sim_lock;
int sim_space_open(struct sim_space *space, uintptr_t wish, size_t bytes);
uintptr_t sim_space_take(struct sim_space *space, size_t bytes, size_t align, int device);
int sim_space_add(struct sim_space *space, uintptr_t start, size_t bytes, int device);
struct sim_range *sim_space_find(const struct sim_space *space, uintptr_t address);
int sim_space_drop(struct sim_space *space, uintptr_t start, struct sim_range *dropped);

/* ---- memory (memory.c, virtual.c) ---- */
int sim_memory_open(void);
int sim_device_of(const void *address); /* the device that holds it, or -1; takes sim_lock */
int sim_virtual_device_of(uintptr_t address, struct sim_range *range); /* the caller holds sim_lock */

/* ---- streams and capture (stream.c, capture.c) ---- */
#define SIM_MAX_JOINED 64

struct sim_graph;
struct sim_stream { int device, priority, slot; unsigned flags; struct sim_capture *capture; };

/* A capture follows which work each joined stream has seen with vector clocks: that tells whether a stream
 * that was forked off is joined back when the capture ends. */
struct sim_capture {
    unsigned long long id;
    int invalid, streams;
    struct sim_stream *joined[SIM_MAX_JOINED]; /* [0] is the stream the capture began on */
    unsigned clock[SIM_MAX_JOINED][SIM_MAX_JOINED];
    struct sim_graph *graph;
    struct sim_capture *next;
};

struct sim_event {
    double milliseconds;
    unsigned long long capture; /* id of the capture it was recorded in, 0 outside */
    unsigned clock[SIM_MAX_JOINED];
};

struct sim_stream *sim_stream_of(cudaStream_t handle);
cudaError_t sim_work(cudaStream_t handle);  /* one node of work: wakes the device, counts in a capture */
cudaError_t sim_wait(cudaStream_t handle);  /* waiting for a stream under capture is an error */
cudaError_t sim_wait_device(void);          /* so is waiting for a device with one */
void sim_capture_record(struct sim_event *event, struct sim_stream *stream);
cudaError_t sim_capture_join(struct sim_stream *stream, const struct sim_event *event);
void sim_capture_forget(struct sim_stream *stream);

/* ---- graphs (graph.c) ---- */
struct sim_graph *sim_graph_new(void);
void sim_graph_add_nodes(struct sim_graph *graph, unsigned long long nodes);
void sim_graph_release(struct sim_graph *graph);

/* ---- kernels and the numbers they leave (kernels.c, truth.c) ---- */
enum sim_kind {
    KERNEL_PLAIN, KERNEL_COUNTS, KERNEL_INTEGER, KERNEL_DOUBLE, /* what they reduce to */
    KERNEL_EQUAL, KERNEL_ORDER, KERNEL_ALL, KERNEL_ANY, KERNEL_AND, KERNEL_OR, KERNEL_NOT /* truth values */
};
struct sim_kernel { unsigned char kind, right_bytes; }; /* size of the number it compares with, 0: with another tensor */
void sim_kernel_register(const void *kernel, const char *name);
void sim_kernel_launched(const void *kernel, void **arguments);
struct sim_kernel sim_truth_kind(const char *name);
int sim_truth(struct sim_kernel kernel, void **arguments);
void sim_read(void *to, size_t bytes); /* what a copy to the host does */

/* ---- what is not answered (missing.c) ---- */
int sim_not_simulated(const char *function, int status);

#endif
