/* Devices: how many, which is current, who holds how much of each, and what a test has set. */
#include "sim.h"
#include <string.h>
#include <unistd.h>

struct device {
    unsigned long long total, used, others;
    int awake; /* the primary context exists */
};

static struct device devices[SIM_MAX_DEVICES];
static struct sim_other others[SIM_MAX_OTHERS];
static int other_count;
static enum sim_fault nvml_fault;
static unsigned utilization;
static unsigned long long context_bytes;
static unsigned owner;
static __thread cudaError_t last_error;

int sim_devices;
__thread int sim_current;

/* ---- the settings; jupyter_gpumem.simgpu calls these through ctypes ---- */

static void lock_for_fork(void) { pthread_mutex_lock(&sim_lock); }
static void unlock_after_fork(void) { pthread_mutex_unlock(&sim_lock); }

int sim_start(int count, unsigned long long total, unsigned long long context)
{
    sim_devices = count;
    for (int device = 0; device < count; device++)
        devices[device].total = total;
    context_bytes = context;
    owner = (unsigned)getpid();
    pthread_atfork(lock_for_fork, unlock_after_fork, unlock_after_fork);
    return sim_memory_open();
}

void sim_set_context(unsigned long long bytes) { context_bytes = bytes; }
void sim_set_nvml_fault(int fault) { nvml_fault = (enum sim_fault)fault; }
void sim_set_utilization(unsigned percent) { utilization = percent; }

void sim_set_others(const struct sim_other *list, int count)
{
    pthread_mutex_lock(&sim_lock);
    for (int device = 0; device < SIM_MAX_DEVICES; device++)
        devices[device].others = 0;
    for (other_count = 0; other_count < count && other_count < SIM_MAX_OTHERS; other_count++) {
        others[other_count] = list[other_count];
        devices[list[other_count].device].others += list[other_count].bytes;
    }
    pthread_mutex_unlock(&sim_lock);
}

/* ---- what the other files ask ---- */

cudaError_t sim_fail(cudaError_t error)
{
    if (error != cudaSuccess)
        last_error = error;
    return error;
}

static unsigned long long mine(const struct device *device)
{
    return device->used + (device->awake ? context_bytes : 0);
}

void sim_wake(int device)
{
    if (!__atomic_load_n(&devices[device].awake, __ATOMIC_RELAXED))
        __atomic_store_n(&devices[device].awake, 1, __ATOMIC_RELAXED);
}

int sim_take(int device, size_t bytes)
{
    struct device *d = &devices[device];
    pthread_mutex_lock(&sim_lock);
    int full = mine(d) + d->others + bytes > d->total;
    if (!full)
        d->used += bytes;
    pthread_mutex_unlock(&sim_lock);
    return full ? -1 : 0;
}

void sim_give(int device, size_t bytes)
{
    pthread_mutex_lock(&sim_lock);
    devices[device].used -= bytes;
    pthread_mutex_unlock(&sim_lock);
}

void sim_usage(int device, struct sim_usage *out)
{
    pthread_mutex_lock(&sim_lock);
    const struct device *d = &devices[device];
    out->total = d->total;
    out->process = mine(d);
    out->used = out->process + d->others;
    if (out->used > out->total)
        out->used = out->total;
    out->awake = d->awake;
    pthread_mutex_unlock(&sim_lock);
}

int sim_device_count(void) { return sim_devices; }
unsigned sim_owner(void) { return owner; }
enum sim_fault sim_nvml_fault(void) { return nvml_fault; }
unsigned sim_utilization(void) { return utilization; }

int sim_others(struct sim_other *out)
{
    pthread_mutex_lock(&sim_lock);
    memcpy(out, others, sizeof others);
    int count = other_count;
    pthread_mutex_unlock(&sim_lock);
    return count;
}

/* ---- the runtime's own functions ---- */

cudaError_t cudaGetDeviceCount(int *count) { *count = sim_devices; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = sim_current; return cudaSuccess; }

cudaError_t cudaSetDevice(int device)
{
    if (device < 0 || device >= sim_devices)
        return sim_fail(cudaErrorInvalidDevice);
    sim_current = device;
    sim_wake(device); /* since CUDA 12 the call itself creates the context */
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *available, size_t *total)
{
    struct sim_usage usage;
    sim_wake(sim_current);
    sim_usage(sim_current, &usage);
    *total = usage.total;
    *available = usage.total - usage.used;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void) { return last_error; }

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    if (device < 0 || peer < 0 || device >= sim_devices || peer >= sim_devices)
        return sim_fail(cudaErrorInvalidDevice);
    *can = device != peer;
    return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    (void)peer, (void)flags;
    sim_wake(sim_current);
    return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize(void)
{
    sim_wake(sim_current);
    return sim_wait_device();
}
