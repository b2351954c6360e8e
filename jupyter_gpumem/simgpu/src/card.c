/* The figures of one real card, NVIDIA H100 SXM5 80GB (compute capability 9.0), under the name "Simulated GPU".
 *
 * Only the memory size is the user's. No field may be left zero by accident: kernels' launch code divides by some
 * of them (a zero maxBlocksPerMultiProcessor ended the process with a signal in topk).
 */
#include "sim.h"
#include <stdio.h>
#include <string.h>

static const struct { enum cudaDeviceAttr name; int value; } attributes[] = {
    {cudaDevAttrMaxThreadsPerBlock, 1024}, {cudaDevAttrMaxBlockDimX, 1024}, {cudaDevAttrMaxBlockDimY, 1024},
    {cudaDevAttrMaxBlockDimZ, 64}, {cudaDevAttrMaxGridDimX, 2147483647}, {cudaDevAttrMaxGridDimY, 65535},
    {cudaDevAttrMaxGridDimZ, 65535}, {cudaDevAttrMaxSharedMemoryPerBlock, 49152},
    {cudaDevAttrTotalConstantMemory, 65536}, {cudaDevAttrWarpSize, 32}, {cudaDevAttrMaxPitch, 2147483647},
    {cudaDevAttrMaxRegistersPerBlock, 65536}, {cudaDevAttrClockRate, 1980000}, {cudaDevAttrTextureAlignment, 512},
    {cudaDevAttrGpuOverlap, 1}, {cudaDevAttrMultiProcessorCount, 132}, {cudaDevAttrKernelExecTimeout, 0},
    {cudaDevAttrIntegrated, 0}, {cudaDevAttrCanMapHostMemory, 1}, {cudaDevAttrComputeMode, 0},
    {cudaDevAttrMaxTexture1DWidth, 131072}, {cudaDevAttrMaxTexture2DWidth, 131072},
    {cudaDevAttrMaxTexture2DHeight, 65536}, {cudaDevAttrMaxTexture3DWidth, 16384},
    {cudaDevAttrMaxTexture3DHeight, 16384}, {cudaDevAttrMaxTexture3DDepth, 16384},
    {cudaDevAttrSurfaceAlignment, 512}, {cudaDevAttrConcurrentKernels, 1}, {cudaDevAttrEccEnabled, 1},
    {cudaDevAttrPciDeviceId, 0}, {cudaDevAttrPciDomainId, 0}, {cudaDevAttrTccDriver, 0},
    {cudaDevAttrMemoryClockRate, 2619000}, {cudaDevAttrGlobalMemoryBusWidth, 5120},
    {cudaDevAttrL2CacheSize, 52428800}, {cudaDevAttrMaxThreadsPerMultiProcessor, 2048},
    {cudaDevAttrAsyncEngineCount, 3}, {cudaDevAttrUnifiedAddressing, 1}, {cudaDevAttrTexturePitchAlignment, 32},
    {cudaDevAttrComputeCapabilityMajor, 9}, {cudaDevAttrComputeCapabilityMinor, 0},
    {cudaDevAttrStreamPrioritiesSupported, 1}, {cudaDevAttrGlobalL1CacheSupported, 1},
    {cudaDevAttrLocalL1CacheSupported, 1}, {cudaDevAttrMaxSharedMemoryPerMultiprocessor, 233472},
    {cudaDevAttrMaxRegistersPerMultiprocessor, 65536}, {cudaDevAttrManagedMemory, 1},
    {cudaDevAttrIsMultiGpuBoard, 0}, {cudaDevAttrHostNativeAtomicSupported, 0},
    {cudaDevAttrSingleToDoublePrecisionPerfRatio, 2}, {cudaDevAttrPageableMemoryAccess, 0},
    {cudaDevAttrConcurrentManagedAccess, 1}, {cudaDevAttrComputePreemptionSupported, 1},
    {cudaDevAttrCanUseHostPointerForRegisteredMem, 1}, {cudaDevAttrCooperativeLaunch, 1},
    {cudaDevAttrMaxSharedMemoryPerBlockOptin, 232448}, {cudaDevAttrCanFlushRemoteWrites, 0},
    {cudaDevAttrHostRegisterSupported, 1}, {cudaDevAttrMaxBlocksPerMultiprocessor, 32},
    {cudaDevAttrMaxPersistingL2CacheSize, 32768000}, {cudaDevAttrMaxAccessPolicyWindowSize, 134213632},
    {cudaDevAttrReservedSharedMemoryPerBlock, 1024}, {cudaDevAttrHostRegisterReadOnlySupported, 1},
    {cudaDevAttrMemoryPoolsSupported, 1}, {cudaDevAttrClusterLaunch, 1}, {cudaDevAttrIpcEventSupport, 0},
};

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device)
{
    if (device < 0 || device >= sim_devices)
        return sim_fail(cudaErrorInvalidDevice);
    *value = 0;
    if (name == cudaDevAttrPciBusId)
        *value = device + 1;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if (attributes[i].name == name)
            *value = attributes[i].value;
    return cudaSuccess;
}

static void fill_textures(struct cudaDeviceProp *p)
{
    p->maxTexture1D = 131072, p->maxTexture1DMipmap = 32768;
    p->maxTexture2D[0] = 131072, p->maxTexture2D[1] = 65536;
    p->maxTexture2DMipmap[0] = p->maxTexture2DMipmap[1] = 32768;
    p->maxTexture2DLinear[0] = 131072, p->maxTexture2DLinear[1] = 65000, p->maxTexture2DLinear[2] = 2097120;
    p->maxTexture2DGather[0] = p->maxTexture2DGather[1] = 32768;
    p->maxTexture3D[0] = p->maxTexture3D[1] = p->maxTexture3D[2] = 16384;
    p->maxTexture3DAlt[0] = p->maxTexture3DAlt[1] = 8192, p->maxTexture3DAlt[2] = 32768;
    p->maxTextureCubemap = 32768;
    p->maxTexture1DLayered[0] = 32768, p->maxTexture1DLayered[1] = 2048;
    p->maxTexture2DLayered[0] = p->maxTexture2DLayered[1] = 32768, p->maxTexture2DLayered[2] = 2048;
    p->maxTextureCubemapLayered[0] = 32768, p->maxTextureCubemapLayered[1] = 2046;
    p->maxSurface1D = 32768, p->maxSurface2D[0] = 131072, p->maxSurface2D[1] = 65536;
    p->maxSurface3D[0] = p->maxSurface3D[1] = p->maxSurface3D[2] = 16384;
    p->maxSurface1DLayered[0] = 32768, p->maxSurface1DLayered[1] = 2048;
    p->maxSurface2DLayered[0] = p->maxSurface2DLayered[1] = 32768, p->maxSurface2DLayered[2] = 2048;
    p->maxSurfaceCubemap = 32768;
    p->maxSurfaceCubemapLayered[0] = 32768, p->maxSurfaceCubemapLayered[1] = 2046;
}

static void fill_limits(struct cudaDeviceProp *p)
{
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 232448, p->reservedSharedMemPerBlock = 1024;
    p->sharedMemPerMultiprocessor = 233472;
    p->regsPerBlock = p->regsPerMultiprocessor = 65536;
    p->warpSize = 32, p->memPitch = 2147483647, p->totalConstMem = 65536;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 2147483647, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->textureAlignment = p->surfaceAlignment = 512, p->texturePitchAlignment = 32;
    p->l2CacheSize = 52428800, p->persistingL2CacheMaxSize = 32768000, p->accessPolicyMaxWindowSize = 134213632;
    p->multiProcessorCount = 132, p->memoryBusWidth = 5120, p->asyncEngineCount = 3;
}

static void fill_features(struct cudaDeviceProp *p)
{
    p->canMapHostMemory = p->concurrentKernels = p->ECCEnabled = p->unifiedAddressing = 1;
    p->streamPrioritiesSupported = p->globalL1CacheSupported = p->localL1CacheSupported = 1;
    p->managedMemory = p->concurrentManagedAccess = p->computePreemptionSupported = 1;
    p->canUseHostPointerForRegisteredMem = p->cooperativeLaunch = p->hostRegisterSupported = 1;
    p->hostRegisterReadOnlySupported = p->memoryPoolsSupported = p->clusterLaunch = 1;
    p->unifiedFunctionPointers = p->sparseCudaArraySupported = p->timelineSemaphoreInteropSupported = 1;
#if CUDART_VERSION < 13000
    p->clockRate = 1980000, p->memoryClockRate = 2619000, p->deviceOverlap = 1;
    p->singleToDoublePrecisionPerfRatio = 2;
#endif
}

/* the headers of CUDA 12 rename this to cudaGetDeviceProperties_v2, which is what torch then asks for */
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    struct sim_usage usage;
    if (device < 0 || device >= sim_devices)
        return sim_fail(cudaErrorInvalidDevice);
    sim_usage(device, &usage);
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Simulated GPU");
    memcpy(p->uuid.bytes, "jupyter_gpumem", 14);
    p->uuid.bytes[15] = (char)device;
    p->totalGlobalMem = usage.total;
    p->major = 9;
    p->pciBusID = device + 1;
    fill_limits(p);
    fill_textures(p);
    fill_features(p);
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int room, int device)
{
    snprintf(text, (size_t)room, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }

static const struct { cudaError_t error; const char *name, *text; } errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported by the simulated GPU"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
};

const char *cudaGetErrorName(cudaError_t error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].name;
    return "cudaErrorUnknown";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].error == error)
            return errors[i].text;
    return "error of the simulated GPU";
}
