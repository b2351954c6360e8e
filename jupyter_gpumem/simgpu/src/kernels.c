/* What the name of a kernel tells about the number it leaves behind.
 *
 * No kernel runs, so every number read back is 0. Two things follow from the name of the last kernel: whether a
 * number just read decided a size, and whether a truth value is the answer of an all().
 */
#include "sim.h"
#include <string.h>

#define SLOTS 32768u /* torch 2.14 registers some 3,000 kernels with such names among 80,000 */

static struct { const void *kernel; enum sim_kernel kind; } table[SLOTS];
static unsigned used;
static __thread enum sim_kernel last;
static unsigned long long sizes;

static enum sim_kernel kind_of(const char *name)
{
    /* how CUB and Thrust count what they keep: nonzero, unique, masks, coalescing */
    static const char *const counting[] = {"DeviceReduce", "DeviceSelect", "UniqueByKey", "UniqueAgent", "CopyIf"};
    for (size_t i = 0; i < sizeof counting / sizeof *counting; i++)
        if (strstr(name, counting[i]))
            return KERNEL_COUNTS;
    if (strstr(name, "and_kernel_cuda"))
        return KERNEL_ALL;
    if (strstr(name, "ReduceOpIi")) /* a reduction to a 32-bit integer */
        return KERNEL_INTEGER;
    if (strstr(name, "ReduceOpId")) /* to a double, as wide as the integers that may be sizes */
        return KERNEL_DOUBLE;
    return KERNEL_PLAIN;
}

static unsigned slot_of(const void *kernel) { return (unsigned)((uintptr_t)kernel >> 2) % SLOTS; }

/* Called while a library is loaded; launches may go on in other threads, so a slot is filled before it is seen. */
void sim_kernel_register(const void *kernel, const char *name)
{
    const enum sim_kernel kind = kind_of(name);
    unsigned slot = slot_of(kernel);
    if (kind == KERNEL_PLAIN || used > SLOTS * 3 / 4)
        return;
    while (table[slot].kernel)
        slot = (slot + 1) % SLOTS;
    table[slot].kind = kind;
    __atomic_store_n(&table[slot].kernel, kernel, __ATOMIC_RELEASE);
    used++;
}

void sim_kernel_launched(const void *kernel)
{
    const void *found;
    last = KERNEL_PLAIN;
    for (unsigned slot = slot_of(kernel); (found = __atomic_load_n(&table[slot].kernel, __ATOMIC_ACQUIRE));
         slot = (slot + 1) % SLOTS)
        if (found == kernel) {
            last = table[slot].kind;
            return;
        }
}

void sim_read(void *to, size_t bytes)
{
    memset(to, 0, bytes);
    if (bytes == 1) /* distributions and solvers check their arguments with all() and raise when it is not so */
        *(unsigned char *)to = last == KERNEL_ALL;
    if ((bytes <= 8 && last == KERNEL_COUNTS) || (bytes == 8 && last != KERNEL_DOUBLE) ||
        (bytes == 4 && last == KERNEL_INTEGER))
        __atomic_add_fetch(&sizes, 1, __ATOMIC_RELAXED);
}

unsigned long long sim_sizes_read(void) { return __atomic_load_n(&sizes, __ATOMIC_RELAXED); }
