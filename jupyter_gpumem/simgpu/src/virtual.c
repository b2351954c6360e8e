/* The driver's virtual memory management: what torch's expandable segments are made of.
 *
 * An address reservation costs nothing; physical memory is taken from the budget when its handle is created and
 * given back when its last holder, the handle itself or a mapping, is gone.
 */
#include "sim.h"
#include <stdlib.h>

#define VIRTUAL_BASE ((uintptr_t)0x300000000000)
#define VIRTUAL_SPAN ((size_t)1 << 44) /* each stream and pool reserves more than a whole card */

struct physical { size_t bytes; int device, holders; };
struct mapping { uintptr_t start; struct physical *physical; struct mapping *next; };

static struct sim_space reserved, mapped;
static struct mapping *by_page[4096]; /* which memory is behind a mapping, hashed by its first page */

static struct mapping **bucket(uintptr_t start) { return &by_page[(start / SIM_PAGE) % 4096]; }

static void let_go(struct physical *physical)
{
    pthread_mutex_lock(&sim_lock);
    int left = --physical->holders;
    pthread_mutex_unlock(&sim_lock);
    if (left)
        return;
    sim_give(physical->device, physical->bytes);
    free(physical);
}

int sim_virtual_device_of(uintptr_t address, struct sim_range *range)
{
    const struct sim_range *found = sim_space_find(&mapped, address);
    if (found)
        *range = *found;
    return found ? found->device : -1;
}

CUresult cuMemAddressReserve(CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr wish,
                             unsigned long long flags)
{
    (void)wish, (void)flags;
    pthread_mutex_lock(&sim_lock);
    int closed = !reserved.base && sim_space_open(&reserved, VIRTUAL_BASE, VIRTUAL_SPAN);
    *out = closed ? 0 : (CUdeviceptr)sim_space_take(&reserved, bytes, align > SIM_PAGE ? align : SIM_PAGE, -1);
    pthread_mutex_unlock(&sim_lock);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes)
{
    (void)bytes;
    pthread_mutex_lock(&sim_lock);
    int missing = sim_space_drop(&reserved, (uintptr_t)start, NULL);
    pthread_mutex_unlock(&sim_lock);
    return missing ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *wanted,
                     unsigned long long flags)
{
    const int device = wanted->location.id;
    (void)flags;
    if (device < 0 || device >= sim_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    sim_wake(device);
    struct physical *physical = malloc(sizeof *physical);
    if (!physical || sim_take(device, bytes)) {
        free(physical);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *physical = (struct physical){bytes, device, 1};
    *out = (CUmemGenericAllocationHandle)(uintptr_t)physical;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    let_go((struct physical *)(uintptr_t)handle);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    struct physical *physical = (struct physical *)(uintptr_t)handle;
    struct mapping *mapping = malloc(sizeof *mapping);
    (void)offset, (void)flags;
    if (!mapping)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sim_lock);
    struct mapping **first = bucket((uintptr_t)start);
    *mapping = (struct mapping){(uintptr_t)start, physical, *first};
    *first = mapping;
    physical->holders++;
    sim_space_add(&mapped, (uintptr_t)start, bytes, physical->device);
    pthread_mutex_unlock(&sim_lock);
    return CUDA_SUCCESS;
}

/* Takes the first mapping within a range away; NULL when there is none left. */
static struct physical *unmap_one(uintptr_t start, size_t bytes)
{
    struct physical *physical = NULL;
    pthread_mutex_lock(&sim_lock);
    const struct sim_range *range = NULL;
    for (uintptr_t page = start; page < start + bytes && !range; page += SIM_PAGE)
        range = sim_space_find(&mapped, page);
    if (range) {
        struct mapping **link = bucket(range->start);
        while ((*link)->start != range->start)
            link = &(*link)->next;
        struct mapping *mapping = *link;
        *link = mapping->next;
        physical = mapping->physical;
        free(mapping);
        sim_space_drop(&mapped, range->start, NULL);
    }
    pthread_mutex_unlock(&sim_lock);
    return physical;
}

CUresult cuMemUnmap(CUdeviceptr start, size_t bytes)
{
    struct physical *physical;
    while ((physical = unmap_one((uintptr_t)start, bytes)))
        let_go(physical);
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    (void)start, (void)bytes, (void)access, (void)count;
    return CUDA_SUCCESS;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *wanted,
                                       CUmemAllocationGranularity_flags option)
{
    (void)wanted, (void)option;
    *bytes = SIM_PAGE;
    return CUDA_SUCCESS;
}
