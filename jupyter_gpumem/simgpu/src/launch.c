/* Kernels: they are registered, asked about and launched, and do nothing. */
#include "sim.h"
#include <string.h>

static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed;

cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream)
{
    (void)grid, (void)block, (void)shared;
    sim_kernel_launched(kernel, arguments);
    return sim_work(stream);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream)
{
    (void)grid, (void)block, (void)shared;
    sim_kernel_launched(kernel, arguments);
    return sim_work(stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream)
{
    return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *kernel, void **arguments)
{
    sim_kernel_launched(kernel, arguments);
    return sim_work(config->stream);
}

/* ---- what the compiler's own launch code calls ---- */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream)
{
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(void **)stream = pushed.stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

void **__cudaRegisterFatBinary(void *binary)
{
    static void *handle[4];
    (void)binary;
    return handle;
}

void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }
void __cudaUnregisterFatBinary(void **handle) { (void)handle; }
char __cudaInitModule(void **handle) { (void)handle; return 1; }

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp)
{
    (void)handle, (void)device, (void)threads, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    sim_kernel_register(host, name);
}

void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes,
                       int constant, int global)
{
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)bytes, (void)constant, (void)global;
}

/* ---- what launch code asks about a kernel ---- */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *kernel)
{
    (void)kernel;
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->ptxVersion = out->binaryVersion = 90;
    out->maxDynamicSharedSizeBytes = 232448;
    return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute name, int value)
{
    (void)kernel, (void)name, (void)value;
    return cudaSuccess;
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute name, int value, int device)
{
    (void)kernel, (void)name, (void)value, (void)device;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags)
{
    (void)kernel, (void)shared, (void)flags;
    *blocks = threads > 0 && threads <= 1024 ? 2048 / threads : 1;
    if (*blocks > 32)
        *blocks = 32;
    return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *kernel, int threads, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, kernel, threads, shared, 0);
}

#if CUDART_VERSION >= 12080
cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *jit, void **jit_values,
                                unsigned jit_count, enum cudaLibraryOption *options, void **values, unsigned count)
{
    (void)code, (void)jit, (void)jit_values, (void)jit_count, (void)options, (void)values, (void)count;
    *library = (cudaLibrary_t)0x10;
    return cudaSuccess;
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    (void)library, (void)name;
    *kernel = (cudaKernel_t)0x10;
    return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library) { (void)library; return cudaSuccess; }
#endif

cudaError_t cudaProfilerStart(void) { return cudaSuccess; }
cudaError_t cudaProfilerStop(void) { return cudaSuccess; }
