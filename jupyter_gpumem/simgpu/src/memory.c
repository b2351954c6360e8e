/* Device and host allocations and copies.
 *
 * Copies to and between devices and memset do nothing; a copy to the host fills it with zeros. So the machine's
 * memory is not filled, and two runs of a program see the same values.
 */
#include "sim.h"
#include <string.h>
#include <sys/mman.h>

#define DEVICE_BASE ((uintptr_t)0x100000000000)
#define DEVICE_SPAN ((size_t)1 << 40) /* address space of one device; activate() allows half of it as memory */
#define HOST_MEMORY (-1)

static struct sim_space device_space[SIM_MAX_DEVICES]; /* from cudaMalloc */
static struct sim_space host_space;                    /* pinned by cudaHostAlloc or cudaHostRegister */

int sim_memory_open(void)
{
    for (int device = 0; device < sim_devices; device++)
        if (sim_space_open(&device_space[device], DEVICE_BASE + DEVICE_SPAN * (uintptr_t)device, DEVICE_SPAN))
            return -1;
    return 0;
}

static int find(uintptr_t address, struct sim_range *range)
{
    for (int device = 0; device < sim_devices; device++) {
        const struct sim_space *space = &device_space[device];
        if (address - space->base >= space->bytes)
            continue;
        const struct sim_range *found = sim_space_find(space, address);
        if (found)
            *range = *found;
        return found ? device : -1;
    }
    return sim_virtual_device_of(address, range);
}

int sim_device_of(const void *address)
{
    struct sim_range range;
    pthread_mutex_lock(&sim_lock);
    int device = find((uintptr_t)address, &range);
    pthread_mutex_unlock(&sim_lock);
    return device;
}

/* ---- device memory ---- */

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    const size_t pages = (bytes + SIM_PAGE - 1) & ~(SIM_PAGE - 1);
    const int device = sim_current;
    *out = NULL;
    if (!bytes)
        return cudaSuccess;
    sim_wake(device);
    if (pages < bytes || sim_take(device, pages))
        return sim_fail(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&sim_lock);
    *out = (void *)sim_space_take(&device_space[device], pages, SIM_PAGE, device);
    pthread_mutex_unlock(&sim_lock);
    if (*out)
        return cudaSuccess;
    sim_give(device, pages);
    return sim_fail(cudaErrorMemoryAllocation);
}

cudaError_t cudaFree(void *address)
{
    struct sim_range range;
    int missing = -1;
    sim_wake(sim_current);
    if (!address)
        return cudaSuccess;
    pthread_mutex_lock(&sim_lock);
    for (int device = 0; device < sim_devices && missing; device++)
        missing = sim_space_drop(&device_space[device], (uintptr_t)address, &range);
    pthread_mutex_unlock(&sim_lock);
    if (missing)
        return sim_fail(cudaErrorInvalidValue);
    sim_give(range.device, range.bytes);
    return cudaSuccess;
}

cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t stream)
{
    (void)stream;
    return cudaMalloc(out, bytes);
}

cudaError_t cudaFreeAsync(void *address, cudaStream_t stream)
{
    (void)stream;
    return cudaFree(address);
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr address)
{
    struct sim_range range;
    pthread_mutex_lock(&sim_lock);
    int device = find((uintptr_t)address, &range);
    pthread_mutex_unlock(&sim_lock);
    if (device < 0)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = (CUdeviceptr)range.start;
    if (bytes)
        *bytes = range.bytes;
    return CUDA_SUCCESS;
}

/* ---- host memory ---- */

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    (void)flags;
    *out = NULL;
    if (!bytes)
        return cudaSuccess;
    sim_wake(sim_current);
    void *host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (host == MAP_FAILED)
        return sim_fail(cudaErrorMemoryAllocation);
    pthread_mutex_lock(&sim_lock);
    sim_space_add(&host_space, (uintptr_t)host, bytes, HOST_MEMORY);
    pthread_mutex_unlock(&sim_lock);
    *out = host;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **out, size_t bytes) { return cudaHostAlloc(out, bytes, 0); }

static int drop_host(void *host, struct sim_range *range)
{
    pthread_mutex_lock(&sim_lock);
    int missing = sim_space_drop(&host_space, (uintptr_t)host, range);
    pthread_mutex_unlock(&sim_lock);
    return missing;
}

cudaError_t cudaFreeHost(void *host)
{
    struct sim_range range;
    if (!host)
        return cudaSuccess;
    if (drop_host(host, &range))
        return sim_fail(cudaErrorInvalidValue);
    munmap(host, range.bytes);
    return cudaSuccess;
}

cudaError_t cudaHostRegister(void *host, size_t bytes, unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&sim_lock);
    int known = sim_space_find(&host_space, (uintptr_t)host) != NULL;
    if (!known)
        sim_space_add(&host_space, (uintptr_t)host, bytes, HOST_MEMORY);
    pthread_mutex_unlock(&sim_lock);
    return known ? sim_fail(cudaErrorHostMemoryAlreadyRegistered) : cudaSuccess;
}

cudaError_t cudaHostUnregister(void *host)
{
    return drop_host(host, NULL) ? sim_fail(cudaErrorHostMemoryNotRegistered) : cudaSuccess;
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned flags)
{
    (void)flags;
    *device = host;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *address)
{
    struct sim_range range;
    memset(out, 0, sizeof *out);
    pthread_mutex_lock(&sim_lock);
    int device = find((uintptr_t)address, &range);
    int pinned = device < 0 && sim_space_find(&host_space, (uintptr_t)address);
    pthread_mutex_unlock(&sim_lock);
    out->type = device >= 0 ? cudaMemoryTypeDevice : pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    out->device = device >= 0 ? device : pinned ? sim_current : -2; /* cudaInvalidDeviceId */
    out->devicePointer = device >= 0 || pinned ? (void *)address : NULL;
    out->hostPointer = pinned ? (void *)address : NULL;
    return cudaSuccess;
}

/* ---- copies ---- */

static void copy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    if (kind == cudaMemcpyDefault) {
        int from_device = sim_device_of(from) >= 0, to_device = sim_device_of(to) >= 0;
        kind = to_device ? cudaMemcpyHostToDevice : from_device ? cudaMemcpyDeviceToHost : cudaMemcpyHostToHost;
    }
    if (kind == cudaMemcpyHostToHost)
        memmove(to, from, bytes);
    if (kind == cudaMemcpyDeviceToHost)
        sim_read(to, bytes);
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = sim_work(stream);
    if (!error)
        copy(to, from, bytes, kind);
    return error;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind)
{
    cudaError_t error = sim_wait_device();
    if (!error)
        copy(to, from, bytes, kind);
    return error;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    cudaError_t error = sim_work(stream);
    for (size_t row = 0; row < height && !error; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, kind);
    return error;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                cudaStream_t stream)
{
    (void)to, (void)from, (void)bytes;
    sim_wake(to_device);
    sim_wake(from_device);
    return sim_work(stream);
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream)
{
    (void)to, (void)value, (void)bytes;
    return sim_work(stream);
}

cudaError_t cudaMemset(void *to, int value, size_t bytes)
{
    (void)to, (void)value, (void)bytes;
    return sim_wait_device();
}

CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream)
{
    (void)to, (void)value, (void)count;
    return (CUresult)sim_work((cudaStream_t)stream);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind)
{
    (void)symbol, (void)from, (void)bytes, (void)offset, (void)kind;
    return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    static char anywhere[4096]; /* no kernel reads it */
    (void)symbol;
    *address = anywhere;
    return cudaSuccess;
}
