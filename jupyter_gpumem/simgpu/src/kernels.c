/* What the name of a kernel tells about the number it leaves behind.
 *
 * No kernel runs, so every number read back is 0. The last kernel's name tells whether a number just read decided a
 * size, and what a truth value should be (truth.c).
 */
#include "sim.h"
#include <string.h>

#define SLOTS 65536u /* torch 2.14 registers some thousands of kernels with such names among 80,000 */

static struct { const void *kernel; struct sim_kernel about; } table[SLOTS];
static unsigned used;
static __thread struct sim_kernel last;
static __thread int last_truth;
static unsigned long long sizes;

static struct sim_kernel about(const char *name)
{
    /* how CUB and Thrust count what they keep: nonzero, unique, masks, coalescing */
    static const char *const counting[] = {"DeviceReduce", "DeviceSelect", "UniqueByKey", "UniqueAgent", "CopyIf"};
    for (size_t i = 0; i < sizeof counting / sizeof *counting; i++)
        if (strstr(name, counting[i]))
            return (struct sim_kernel){KERNEL_COUNTS, 0};
    if (strstr(name, "ReduceOpIi")) /* a reduction to a 32-bit integer */
        return (struct sim_kernel){KERNEL_INTEGER, 0};
    if (strstr(name, "ReduceOpId")) /* to a double, as wide as the integers that may be sizes */
        return (struct sim_kernel){KERNEL_DOUBLE, 0};
    return sim_truth_kind(name);
}

static unsigned slot_of(const void *kernel) { return (unsigned)((uintptr_t)kernel >> 2) % SLOTS; }

/* Called while a library is loaded; launches may go on in other threads, so a slot is filled before it is seen. */
void sim_kernel_register(const void *kernel, const char *name)
{
    const struct sim_kernel known = about(name);
    unsigned slot = slot_of(kernel);
    if (known.kind == KERNEL_PLAIN || used > SLOTS * 3 / 4)
        return;
    while (table[slot].kernel)
        slot = (slot + 1) % SLOTS;
    table[slot].about = known;
    __atomic_store_n(&table[slot].kernel, kernel, __ATOMIC_RELEASE);
    used++;
}

void sim_kernel_launched(const void *kernel, void **arguments)
{
    const void *found;
    last = (struct sim_kernel){KERNEL_PLAIN, 0};
    for (unsigned slot = slot_of(kernel); (found = __atomic_load_n(&table[slot].kernel, __ATOMIC_ACQUIRE));
         slot = (slot + 1) % SLOTS)
        if (found == kernel) {
            last = table[slot].about;
            break;
        }
    last_truth = sim_truth(last, arguments);
}

static int may_be_size(size_t bytes)
{
    switch (bytes) {
    case 1: return last.kind == KERNEL_EQUAL && last_truth; /* "is this the end?" may decide how long a loop goes on */
    case 4: return last.kind == KERNEL_COUNTS || last.kind == KERNEL_INTEGER;
    case 8: return last.kind != KERNEL_DOUBLE;
    default: return 0;
    }
}

void sim_read(void *to, size_t bytes)
{
    memset(to, 0, bytes);
    if (bytes == 1)
        *(unsigned char *)to = (unsigned char)last_truth;
    if (may_be_size(bytes))
        __atomic_add_fetch(&sizes, 1, __ATOMIC_RELAXED);
    if (last.kind == KERNEL_COUNTS) /* a count is read at once: what is read next is another number */
        last = (struct sim_kernel){KERNEL_PLAIN, 0};
}

unsigned long long sim_sizes_read(void) { return __atomic_load_n(&sizes, __ATOMIC_RELAXED); }
