/* Ordered address ranges: hands out addresses and finds the range that holds one by binary search.
 *
 * Addresses matter: torch's allocator prefers, among free blocks of one size, the lowest address. First fit from
 * a fixed base gives the same addresses, so the same numbers, in every run.
 */
#include "sim.h"
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

pthread_mutex_t sim_lock = PTHREAD_MUTEX_INITIALIZER;

int sim_space_open(struct sim_space *space, uintptr_t wish, size_t bytes)
{
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    /* readable, so that code which looks at a device address from the host finds zeros instead of a signal;
     * a machine that accounts every writable page gets address space without access instead */
    void *base = mmap((void *)wish, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (base == MAP_FAILED)
        base = mmap((void *)wish, bytes, PROT_NONE, flags, -1, 0);
    if (base == MAP_FAILED)
        return -1;
    madvise(base, bytes, MADV_DONTDUMP);
    madvise(base, bytes, MADV_NOHUGEPAGE); /* a stray access must not cost 2 MiB of the machine */
    space->base = (uintptr_t)base;
    space->bytes = bytes;
    return 0;
}

/* Index of the first range that starts above the address. */
static size_t sim_space_above(const struct sim_space *space, uintptr_t address)
{
    size_t low = 0, high = space->count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (space->items[middle].start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static int sim_space_insert(struct sim_space *space, size_t at, struct sim_range range)
{
    if (space->count == space->room) {
        size_t room = space->room ? space->room * 2 : 64;
        struct sim_range *items = realloc(space->items, room * sizeof *items);
        if (!items)
            return -1;
        space->items = items;
        space->room = room;
    }
    memmove(space->items + at + 1, space->items + at, (space->count - at) * sizeof range);
    space->items[at] = range;
    space->count++;
    return 0;
}

uintptr_t sim_space_take(struct sim_space *space, size_t bytes, size_t align, int device)
{
    uintptr_t free_from = space->base;
    size_t at = 0;
    for (; at < space->count; at++) {
        if (space->items[at].start >= free_from + bytes)
            break;
        free_from = (space->items[at].start + space->items[at].bytes + align - 1) & ~(uintptr_t)(align - 1);
    }
    if (free_from + bytes > space->base + space->bytes)
        return 0;
    return sim_space_insert(space, at, (struct sim_range){free_from, bytes, device}) ? 0 : free_from;
}

int sim_space_add(struct sim_space *space, uintptr_t start, size_t bytes, int device)
{
    return sim_space_insert(space, sim_space_above(space, start), (struct sim_range){start, bytes, device});
}

struct sim_range *sim_space_find(const struct sim_space *space, uintptr_t address)
{
    size_t above = sim_space_above(space, address);
    struct sim_range *range = above ? &space->items[above - 1] : NULL;
    return range && address - range->start < range->bytes ? range : NULL;
}

int sim_space_drop(struct sim_space *space, uintptr_t start, struct sim_range *dropped)
{
    size_t above = sim_space_above(space, start);
    if (!above || space->items[above - 1].start != start)
        return -1;
    if (dropped)
        *dropped = space->items[above - 1];
    memmove(space->items + above - 1, space->items + above, (space->count - above) * sizeof *space->items);
    space->count--;
    return 0;
}
