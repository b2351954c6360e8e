/* Streams and events: all work is done at once, so every wait ends at once. */
#include "sim.h"
#include <stdlib.h>
#include <time.h>

static struct sim_stream default_streams[SIM_MAX_DEVICES];

struct sim_stream *sim_stream_of(cudaStream_t handle)
{
    if (handle > (cudaStream_t)2) /* 0, 1 and 2 name the default stream of the current device */
        return (struct sim_stream *)handle;
    default_streams[sim_current].device = sim_current;
    return &default_streams[sim_current];
}

static cudaError_t create(cudaStream_t *out, unsigned flags, int priority)
{
    struct sim_stream *stream = calloc(1, sizeof *stream);
    if (!stream)
        return sim_fail(cudaErrorMemoryAllocation);
    sim_wake(sim_current);
    stream->device = sim_current;
    stream->flags = flags;
    stream->priority = priority;
    *out = (cudaStream_t)stream;
    return cudaSuccess;
}

cudaError_t cudaStreamCreate(cudaStream_t *out) { return create(out, 0, 0); }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags) { return create(out, flags, 0); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    return create(out, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    struct sim_stream *stream = sim_stream_of(handle);
    if (handle <= (cudaStream_t)2)
        return sim_fail(cudaErrorInvalidResourceHandle);
    sim_capture_forget(stream);
    free(stream);
    return cudaSuccess;
}

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int *priority)
{
    *priority = sim_stream_of(handle)->priority;
    return cudaSuccess;
}

cudaError_t cudaStreamGetFlags(cudaStream_t handle, unsigned *flags)
{
    *flags = sim_stream_of(handle)->flags;
    return cudaSuccess;
}

cudaError_t cudaStreamGetDevice(cudaStream_t handle, int *device)
{
    *device = sim_stream_of(handle)->device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    sim_wake(sim_current);
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) { return sim_wait(handle); }
cudaError_t cudaStreamSynchronize(cudaStream_t handle) { return sim_wait(handle); }

cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void *data, unsigned flags)
{
    cudaError_t error = sim_wait(handle); /* callbacks cannot be captured */
    (void)flags;
    if (!error)
        callback(handle, cudaSuccess, data);
    return error;
}

cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void *data)
{
    cudaError_t error = sim_work(handle);
    if (!error)
        function(data); /* under capture it would run at each replay; here once, so that no waiter hangs */
    return error;
}

/* ---- events ---- */

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    struct sim_event *event = calloc(1, sizeof *event);
    (void)flags;
    if (!event)
        return sim_fail(cudaErrorMemoryAllocation);
    sim_wake(sim_current);
    *out = (cudaEvent_t)event;
    return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t *out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned flags)
{
    struct sim_event *event = (struct sim_event *)handle;
    cudaError_t error = sim_work(stream);
    (void)flags;
    if (error)
        return error;
    event->milliseconds = now();
    sim_capture_record(event, sim_stream_of(stream));
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(handle, stream, 0);
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    const struct sim_event *event = (const struct sim_event *)handle;
    return event->capture ? sim_fail(cudaErrorCapturedEvent) : cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) { return cudaEventQuery(handle); }

cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t start, cudaEvent_t end)
{
    const struct sim_event *from = (const struct sim_event *)start, *to = (const struct sim_event *)end;
    *milliseconds = (float)(to->milliseconds - from->milliseconds);
    return from->milliseconds && to->milliseconds ? cudaSuccess : sim_fail(cudaErrorInvalidResourceHandle);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags)
{
    (void)flags;
    return sim_capture_join(sim_stream_of(stream), (const struct sim_event *)event);
}
