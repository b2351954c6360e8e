/* The driver's entry points that torch calls directly or looks up by name. */
#include "sim.h"
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

CUresult cuInit(unsigned flags) { (void)flags; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDART_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int *count) { *count = sim_devices; return CUDA_SUCCESS; }

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    *device = ordinal;
    return ordinal >= 0 && ordinal < sim_devices ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

/* driver and runtime number the attributes alike; those of virtual memory only the driver knows */
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute name, CUdevice device)
{
    if (name == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
        *value = 1;
        return CUDA_SUCCESS;
    }
    return (CUresult)cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)name, device);
}

CUresult cuDeviceGetName(char *name, int room, CUdevice device)
{
    (void)device;
    snprintf(name, (size_t)room, "Simulated GPU");
    return CUDA_SUCCESS;
}

/* ---- contexts: one per device, its handle is the device's number plus one ---- */

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(device + 1); }

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    struct sim_usage usage;
    if (device < 0 || device >= sim_devices)
        return CUDA_ERROR_INVALID_DEVICE;
    sim_usage(device, &usage);
    *flags = 0;
    *active = usage.awake;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    sim_wake(device);
    *context = context_of(device);
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(CUdevice device) { (void)device; return CUDA_SUCCESS; }

CUresult cuCtxGetCurrent(CUcontext *context)
{
    struct sim_usage usage;
    sim_usage(sim_current, &usage);
    *context = usage.awake ? context_of(sim_current) : NULL;
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    if (context)
        sim_current = (int)(uintptr_t)context - 1;
    return CUDA_SUCCESS;
}

CUresult cuCtxPushCurrent(CUcontext context) { return cuCtxSetCurrent(context); }

CUresult cuCtxPopCurrent(CUcontext *context)
{
    if (context)
        *context = context_of(sim_current);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice *device) { *device = sim_current; return CUDA_SUCCESS; }

CUresult cuCtxSetLimit(CUlimit name, size_t value) { (void)name, (void)value; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit name) { (void)name; *value = (size_t)8 << 20; return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *out, CUpointer_attribute name, CUdeviceptr address)
{
    struct cudaPointerAttributes known;
    cudaPointerGetAttributes(&known, (const void *)(uintptr_t)address);
    if (known.type == cudaMemoryTypeUnregistered)
        return CUDA_ERROR_INVALID_VALUE;
    switch (name) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)out = context_of(known.device); break;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE: *(unsigned *)out = (unsigned)known.type; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_POINTER: *(CUdeviceptr *)out = address; break;
    case CU_POINTER_ATTRIBUTE_HOST_POINTER: *(void **)out = known.hostPointer; break;
    case CU_POINTER_ATTRIBUTE_IS_MANAGED: *(unsigned *)out = 0; break;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)out = known.device; break;
    default: return CUDA_ERROR_NOT_SUPPORTED;
    }
    return CUDA_SUCCESS;
}

CUresult cuStreamWriteValue32(CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags)
{
    (void)address, (void)value, (void)flags;
    return (CUresult)sim_work((cudaStream_t)stream);
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status)
{
    return (CUresult)cudaStreamIsCapturing((cudaStream_t)stream, (enum cudaStreamCaptureStatus *)status);
}

CUresult cuGetErrorString(CUresult error, const char **text)
{
    *text = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : cudaGetErrorString((cudaError_t)error);
    return CUDA_SUCCESS;
}

/* ---- look-up by name ---- */

/* torch asks for all it knows or uses none, so every name must be found; headers rename some to NAME_v2 */
static void *entry_point(const char *name)
{
    char versioned[128];
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD); /* this library, by its soname */
    void *found = self ? dlsym(self, name) : NULL;
    if (self && !found) {
        snprintf(versioned, sizeof versioned, "%s_v2", name);
        found = dlsym(self, versioned);
    }
    return found;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result)
{
    (void)version, (void)flags;
    *out = entry_point(name);
    if (result)
        *result = *out ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
cudaError_t cudaGetDriverEntryPoint(const char *name, void **out, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *result)
{
    return cudaGetDriverEntryPointByVersion(name, out, CUDART_VERSION, flags, result);
}
#endif
