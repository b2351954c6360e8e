/* Kernels compiled at run time: the driver loads and launches them, and nothing happens. */
#include "sim.h"

static CUresult any_module(CUmodule *module) { *module = (CUmodule)0x10; return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *module, const char *file) { (void)file; return any_module(module); }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { (void)image; return any_module(module); }

CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values)
{
    (void)image, (void)count, (void)options, (void)values;
    return any_module(module);
}

CUresult cuModuleUnload(CUmodule module) { (void)module; return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    (void)module, (void)name;
    *function = (CUfunction)0x10;
    return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute name, CUfunction function)
{
    (void)function;
    *value = name == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : name == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute name, int value)
{
    (void)function, (void)name, (void)value;
    return CUDA_SUCCESS;
}

CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    (void)function, (void)config;
    return CUDA_SUCCESS;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared)
{
    return (CUresult)cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared);
}

CUresult cuOccupancyMaxActiveClusters(int *clusters, CUfunction function, const CUlaunchConfig *config)
{
    (void)function, (void)config;
    *clusters = 1;
    return CUDA_SUCCESS;
}

/* triton describes tensors for the copy engine with it; nobody reads the description */
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address,
                                const cuuint64_t *shape, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    (void)map, (void)type, (void)rank, (void)address, (void)shape, (void)strides, (void)box, (void)steps,
        (void)interleave, (void)swizzle, (void)promotion, (void)fill;
    return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **arguments, void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)extra;
    sim_kernel_launched(function, arguments);
    return (CUresult)sim_work((cudaStream_t)stream);
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra)
{
    (void)extra;
    sim_kernel_launched(function, arguments);
    return (CUresult)sim_work((cudaStream_t)config->hStream);
}

CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by, unsigned bz, unsigned shared, CUstream stream, void **arguments)
{
    return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL);
}
