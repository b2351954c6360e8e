/* What a function that is not simulated does: it raises, with its name, what Python sees as RuntimeError. */
#include "sim.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

typedef void check_fail(const char *function, const char *file, uint32_t line, const char *message);

/* TORCH_CHECK's own way out: it throws c10::Error, which torch turns into RuntimeError. Returning the library's
 * status instead would make torch print a status number and advice about a driver that is not there. */
static check_fail *find_check_fail(void)
{
    void *c10 = dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
    return c10 ? (check_fail *)dlsym(c10, "_ZN3c106detail14torchCheckFailEPKcS2_jS2_") : NULL;
}

static const char *library_of(const char *function)
{
    static const char *const names[][2] = {
        {"cusolver", "cuSOLVER"}, {"cufft", "cuFFT"}, {"cusparse", "cuSPARSE"}, {"cuda", "the CUDA runtime"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strncmp(function, names[i][0], strlen(names[i][0])))
            return names[i][1];
    return "the CUDA driver";
}

static int refuse(const char *function, const char *message, int status)
{
    check_fail *fail = find_check_fail();
    if (fail)
        fail(function, __FILE__, __LINE__, message);
    return status;
}

int sim_not_simulated(const char *function, int status)
{
    char message[400];
    snprintf(message, sizeof message,
             "%s is not simulated (%s was called); do this step on the CPU, with tensor.cpu(), or leave it out",
             library_of(function), function);
    return refuse(function, message, status);
}

/* every use of cuDNN begins with it; the real one finds no driver and says only "not initialized" */
int cudnnCreate(void **handle)
{
    *handle = NULL;
    return refuse("cudnnCreate",
                  "cuDNN is not simulated; leave torch.backends.cudnn.enabled = False, as the simulated GPU sets it, and "
                  "torch uses kernels of its own",
                  1);
}
