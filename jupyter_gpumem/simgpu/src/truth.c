/* The truth value a comparison leaves, when every number is 0.
 *
 * Loops wait for one ("until all sequences are finished", "until the change is below a limit") and code checks its
 * arguments with one; false for every question would loop for ever and refuse everything. So a comparison answers as
 * 0 does, all() says yes and any() says no.
 *
 * Source: aten/src/ATen/native/cuda/CompareEQKernel.cu and CompareKernels.cu. The kernel's second argument is a
 * functor that begins with the operation, followed by the number on the right where there is one.
 */
#include "sim.h"
#include <string.h>

enum { EQUAL, UNEQUAL };                         /* EqOpType */
enum { AT_LEAST, ABOVE, AT_MOST, BELOW };        /* OpType */

/* Size of the type whose mangled name begins here; a half is compared as a float by "equal" and as itself by "less". */
static unsigned char size_of(const char *type, int half)
{
    switch (*type) {
    case 'l': case 'm': case 'd': return 8;
    case 'i': case 'j': case 'f': return 4;
    case 's': case 't': return 2;
    case 'a': case 'h': case 'b': return 1;
    default: return !strncmp(type, "N3c104Half", 10) || !strncmp(type, "N3c108BFloat16", 14) ? (unsigned char)half : 0;
    }
}

static const char *after(const char *name, const char *part)
{
    const char *found = strstr(name, part);
    return found ? found + strlen(part) : NULL;
}

struct sim_kernel sim_truth_kind(const char *name)
{
    const char *type;
    if (strstr(name, "and_kernel_cuda"))
        return (struct sim_kernel){KERNEL_ALL, 0};
    if (strstr(name, "or_kernel_cuda"))
        return (struct sim_kernel){KERNEL_ANY, 0};
    if (strstr(name, "CompareEqFunctorI")) /* inside AUnaryFunctor where one side is a number */
        return (struct sim_kernel){KERNEL_EQUAL, (type = after(name, "UnaryFunctorI")) ? size_of(type, 4) : 0};
    if ((type = after(name, "compare_scalar_kernelI")))
        return (struct sim_kernel){KERNEL_ORDER, size_of(type, 2)};
    if (strstr(name, "14CompareFunctorI"))
        return (struct sim_kernel){KERNEL_ORDER, 0};
    if (strstr(name, "MulFunctorIbE") || strstr(name, "BitwiseAndFunctorIbE") || strstr(name, "logical_and_kernel"))
        return (struct sim_kernel){KERNEL_AND, 0};
    if (strstr(name, "BitwiseOrFunctorIbE") || strstr(name, "logical_or_kernel"))
        return (struct sim_kernel){KERNEL_OR, 0};
    if (strstr(name, "bitwise_not_kernel_cuda") || strstr(name, "logical_not_kernel"))
        return (struct sim_kernel){KERNEL_NOT, 0};
    return (struct sim_kernel){KERNEL_PLAIN, 0};
}

/* -1, 0 or 1; integers and floating-point numbers alike carry the sign in the highest bit */
static int sign_of(const unsigned char *number, unsigned bytes)
{
    int any = 0;
    for (unsigned i = 0; i < bytes; i++)
        any |= i + 1 < bytes ? number[i] : number[i] & 0x7f;
    if (bytes && number[bytes - 1] & 0x80)
        return -1;
    return any != 0;
}

static int compare(struct sim_kernel kernel, void **arguments)
{
    const unsigned char *functor = arguments[1];
    const int operation = *(const int *)functor;
    const int right = sign_of(functor + (kernel.right_bytes > 4 ? 8 : 4), kernel.right_bytes);
    if (kernel.kind == KERNEL_EQUAL)
        return operation == EQUAL ? right == 0 : right != 0;
    switch (operation) {
    case AT_LEAST: return right <= 0;
    case ABOVE: return right < 0;
    case AT_MOST: return right >= 0;
    default: return right > 0;
    }
}

int sim_truth(struct sim_kernel kernel, void **arguments)
{
    static __thread int last, before; /* the operands of "and" and "or" */
    int truth;
    switch (kernel.kind) {
    case KERNEL_EQUAL: case KERNEL_ORDER: truth = compare(kernel, arguments); break;
    case KERNEL_ALL: truth = 1; break;
    case KERNEL_AND: truth = last & before; break;
    case KERNEL_OR: truth = last | before; break;
    case KERNEL_NOT: truth = !last; break;
    case KERNEL_ANY: truth = 0; break;
    default: return 0;
    }
    before = last;
    return last = truth;
}
