/* What the NVML library reads from the CUDA library; the only header both include. */
#ifndef SIM_USAGE_H
#define SIM_USAGE_H

#define SIM_MAX_DEVICES 16
#define SIM_MAX_OTHERS 16

struct sim_usage {
    unsigned long long total, used, process; /* bytes: of the card, in use by all, in use by this process */
    int awake;                               /* this process has a context on it */
};

struct sim_other { unsigned pid; int device; unsigned long long bytes; };

/* in the order of jupyter_gpumem.simgpu.NVML_FAULTS */
enum sim_fault { FAULT_NONE, FAULT_NOT_SUPPORTED, FAULT_NO_PERMISSION, FAULT_GPU_LOST, FAULT_UNKNOWN_MEMORY,
                 FAULT_NO_PROCESSES };

void sim_usage(int device, struct sim_usage *out);
int sim_device_count(void);
int sim_others(struct sim_other *out); /* how many were written, at most SIM_MAX_OTHERS */
unsigned sim_owner(void);              /* the process that activated; a forked child is not on the card */
enum sim_fault sim_nvml_fault(void);
unsigned sim_utilization(void);

#endif
