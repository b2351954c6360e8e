/* Notices when the host reads a number that may decide a size. */
#include "sim.h"

static unsigned long long sizes;

unsigned long long sim_sizes_read(void) { return __atomic_load_n(&sizes, __ATOMIC_RELAXED); }

void sim_note_read(size_t bytes, const void *caller)
{
    (void)caller;
    if (bytes == 8)
        __atomic_add_fetch(&sizes, 1, __ATOMIC_RELAXED);
}
