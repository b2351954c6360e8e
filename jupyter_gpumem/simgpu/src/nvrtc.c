/* NVRTC, the run-time compiler: whatever it is given compiles at once, to nothing.
 *
 * A library of its own, because torch opens it by its soname. activate() turns torch's cache of compiled kernels off,
 * or this nothing would be found there by a later run on a device.
 */
#include <stddef.h>

/* its header comes with no package that torch always brings; nvrtcResult is an int */
int nvrtcVersion(int *major, int *minor) { *major = SIM_CUDA_MAJOR; *minor = 0; return 0; }
const char *nvrtcGetErrorString(int result) { return result ? "NVRTC_ERROR" : "NVRTC_SUCCESS"; }

int nvrtcCreateProgram(void **program, const char *source, const char *name, int count, const char *const *headers,
                       const char *const *names)
{
    (void)source, (void)name, (void)count, (void)headers, (void)names;
    *program = (void *)0x10;
    return 0;
}

int nvrtcDestroyProgram(void **program) { *program = NULL; return 0; }

int nvrtcCompileProgram(void *program, int count, const char *const *options)
{
    (void)program, (void)count, (void)options;
    return 0;
}

int nvrtcAddNameExpression(void *program, const char *name) { (void)program, (void)name; return 0; }

int nvrtcGetLoweredName(void *program, const char *name, const char **lowered)
{
    (void)program;
    *lowered = name;
    return 0;
}

static int empty_text(char *text) { *text = 0; return 0; }
static int one_byte(size_t *bytes) { *bytes = 1; return 0; }
int nvrtcGetPTXSize(void *program, size_t *bytes) { (void)program; return one_byte(bytes); }
int nvrtcGetCUBINSize(void *program, size_t *bytes) { (void)program; return one_byte(bytes); }
int nvrtcGetProgramLogSize(void *program, size_t *bytes) { (void)program; return one_byte(bytes); }
int nvrtcGetPTX(void *program, char *text) { (void)program; return empty_text(text); }
int nvrtcGetCUBIN(void *program, char *text) { (void)program; return empty_text(text); }
int nvrtcGetProgramLog(void *program, char *text) { (void)program; return empty_text(text); }
