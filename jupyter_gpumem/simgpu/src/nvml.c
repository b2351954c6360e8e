/* NVML over the same figures; a library of its own, because it is found by its soname libnvidia-ml.so.1.
 *
 * NVML's header comes with no package, so the few structures are declared here as its documentation lays them out.
 */
#include "usage.h"
#include <stdio.h>
#include <string.h>

typedef void *device_t;
enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       GPU_IS_LOST = 15 };
#define NOT_AVAILABLE (~0ull) /* NVML_VALUE_NOT_AVAILABLE: the driver does not tell */

static int index_of(device_t device) { return (int)(long)device - 1; }

static int fault(void)
{
    switch (sim_nvml_fault()) {
    case FAULT_NOT_SUPPORTED: return NOT_SUPPORTED;
    case FAULT_NO_PERMISSION: return NO_PERMISSION;
    case FAULT_GPU_LOST: return GPU_IS_LOST;
    default: return OK;
    }
}

int nvmlInit_v2(void) { return OK; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return OK; }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int error)
{
    switch (error) {
    case OK: return "Success";
    case INVALID_ARGUMENT: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case INSUFFICIENT_SIZE: return "Insufficient Size";
    case GPU_IS_LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlSystemGetDriverVersion(char *text, unsigned room) { snprintf(text, room, "simulated"); return OK; }
int nvmlSystemGetNVMLVersion(char *text, unsigned room) { snprintf(text, room, "simulated"); return OK; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = SIM_CUDA_MAJOR * 1000; return OK; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

/* ---- handles ---- */

int nvmlDeviceGetCount_v2(unsigned *count) { *count = (unsigned)sim_device_count(); return OK; }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device_t *device)
{
    *device = (device_t)(long)(index + 1);
    return index < (unsigned)sim_device_count() ? fault() == GPU_IS_LOST ? GPU_IS_LOST : OK : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, device_t *device)
{
    unsigned domain, bus;
    if (sscanf(text, "%x:%x:", &domain, &bus) != 2 || !bus || bus > (unsigned)sim_device_count())
        return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device);
}

static void write_uuid(int index, char *text, unsigned room)
{
    /* the bytes that cudaGetDeviceProperties gives: torch matches the two */
    snprintf(text, room, "GPU-6a757079-7465-725f-6770-756d656d00%02x", index);
}

int nvmlDeviceGetUUID(device_t device, char *text, unsigned room)
{
    write_uuid(index_of(device), text, room);
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *wanted, device_t *device)
{
    char text[80];
    for (int index = 0; index < sim_device_count(); index++) {
        write_uuid(index, text, sizeof text);
        if (!strcmp(text, wanted))
            return nvmlDeviceGetHandleByIndex_v2((unsigned)index, device);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetIndex(device_t device, unsigned *index) { *index = (unsigned)index_of(device); return OK; }

int nvmlDeviceGetName(device_t device, char *text, unsigned room)
{
    (void)device;
    snprintf(text, room, "Simulated GPU");
    return OK;
}

struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };

int nvmlDeviceGetPciInfo_v3(device_t device, struct pci *out)
{
    memset(out, 0, sizeof *out);
    out->bus = (unsigned)index_of(device) + 1;
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
    snprintf(out->text, sizeof out->text, "00000000:%02X:00.0", out->bus);
    return OK;
}

int nvmlDeviceGetCudaComputeCapability(device_t device, int *major, int *minor)
{
    (void)device;
    *major = 9;
    *minor = 0;
    return OK;
}

/* ---- memory and processes ---- */

struct memory { unsigned long long total, available, used; };
struct memory_v2 { unsigned version; unsigned long long total, reserved, available, used; };

int nvmlDeviceGetMemoryInfo(device_t device, struct memory *out)
{
    struct sim_usage usage;
    if (fault())
        return fault();
    sim_usage(index_of(device), &usage);
    *out = (struct memory){usage.total, usage.total - usage.used, usage.used};
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device_t device, struct memory_v2 *out)
{
    struct memory memory;
    int error = nvmlDeviceGetMemoryInfo(device, &memory);
    if (error)
        return error;
    out->reserved = 0;
    out->total = memory.total, out->available = memory.available, out->used = memory.used;
    return OK;
}

struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct process_v1 { unsigned pid; unsigned long long bytes; };

/* This process once it has a context on the device, then the others a test has set. */
static int list_processes(int device, struct process list[SIM_MAX_OTHERS + 1])
{
    struct sim_usage usage;
    struct sim_other others[SIM_MAX_OTHERS];
    int count = 0, hidden = sim_nvml_fault() == FAULT_NO_PROCESSES, blind = sim_nvml_fault() == FAULT_UNKNOWN_MEMORY;
    sim_usage(device, &usage);
    if (usage.awake && !hidden)
        list[count++] = (struct process){sim_owner(), usage.process, ~0u, ~0u};
    for (int i = 0, n = sim_others(others); i < n && !hidden; i++)
        if (others[i].device == device)
            list[count++] = (struct process){others[i].pid, others[i].bytes, ~0u, ~0u};
    for (int i = 0; i < count && blind; i++)
        list[i].bytes = NOT_AVAILABLE;
    return count;
}

static int processes(device_t device, unsigned *room, void *out, size_t size)
{
    struct process list[SIM_MAX_OTHERS + 1];
    if (fault())
        return fault();
    const unsigned count = (unsigned)list_processes(index_of(device), list), space = *room;
    *room = count;
    if (space < count)
        return INSUFFICIENT_SIZE;
    for (unsigned i = 0; i < count; i++)
        memcpy((char *)out + i * size, &list[i], size); /* version 1 is a prefix of version 3 */
    return OK;
}

int nvmlDeviceGetComputeRunningProcesses(device_t device, unsigned *room, struct process_v1 *out)
{
    return processes(device, room, out, sizeof *out);
}

int nvmlDeviceGetComputeRunningProcesses_v2(device_t device, unsigned *room, struct process *out)
{
    return processes(device, room, out, sizeof *out);
}

int nvmlDeviceGetComputeRunningProcesses_v3(device_t device, unsigned *room, struct process *out)
{
    return processes(device, room, out, sizeof *out);
}

static int no_processes(unsigned *room) { *room = 0; return fault(); }

int nvmlDeviceGetGraphicsRunningProcesses_v3(device_t device, unsigned *room, struct process *out)
{
    (void)device, (void)out;
    return no_processes(room);
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(device_t device, unsigned *room, struct process *out)
{
    (void)device, (void)out;
    return no_processes(room);
}

/* ---- other readings: those of an idle H100, so that torch.cuda's own functions answer ---- */

struct utilization { unsigned gpu, memory; };

int nvmlDeviceGetUtilizationRates(device_t device, struct utilization *out)
{
    (void)device;
    out->gpu = sim_utilization();
    out->memory = 0;
    return fault();
}

int nvmlDeviceGetTemperature(device_t device, int sensor, unsigned *degrees)
{
    (void)device, (void)sensor;
    *degrees = 30;
    return fault();
}

struct temperature { unsigned version; int sensor, degrees; };

int nvmlDeviceGetTemperatureV(device_t device, struct temperature *out)
{
    (void)device;
    out->degrees = 30;
    return fault();
}

int nvmlDeviceGetPowerUsage(device_t device, unsigned *milliwatts)
{
    (void)device;
    *milliwatts = 70000;
    return fault();
}

int nvmlDeviceGetClockInfo(device_t device, int kind, unsigned *megahertz)
{
    (void)device;
    *megahertz = kind == 2 ? 2619 : 1980; /* 2: the memory's clock */
    return fault();
}

/* torch asks for it before it makes expandable segments; state 0: this card is in no fabric */
struct fabric { unsigned version; unsigned char uuid[16]; int status; unsigned clique; unsigned char state; };

int nvmlDeviceGetGpuFabricInfoV(device_t device, struct fabric *out)
{
    (void)device;
    out->status = 0;
    out->clique = 0;
    out->state = 0;
    return OK;
}
