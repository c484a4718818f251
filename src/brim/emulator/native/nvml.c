/* NVML: the functions that torch's out-of-memory message, torch.cuda.utilization, nvidia-ml-py and monitoring tools call. As in NVML, all cards
 * of the session are visible, independent of CUDA_VISIBLE_DEVICES. */
#include "cuda_api.h"
#include "device.h"
#include <stdio.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7 };
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Rates;
typedef struct { unsigned pid; unsigned long long used; } ProcessV1;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct { char legacy[16]; unsigned domain, bus, device, pci_id, subsystem_id; char bus_id[32]; } Pci;

static int physical(void *device) { return (int)(uintptr_t)device - 1; }
static int text(char *to, unsigned length, const char *from) {
    if (strlen(from) >= length) return SMALL;
    strcpy(to, from);
    return SUCCESS;
}

int nvmlInit(void) { return SUCCESS; }
int nvmlInit_v2(void) { return SUCCESS; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int error) {
    switch (error) {
    case SUCCESS: return "Success";
    case INVALID: return "Invalid Argument";
    case NOT_SUPPORTED: return "Not Supported";
    case NOT_FOUND: return "Not Found";
    case SMALL: return "Insufficient Size";
    default: return "Unknown Error";
    }
}
int nvmlSystemGetDriverVersion(char *to, unsigned length) { return text(to, length, CUDA_MAJOR >= 13 ? "580.65.06" : "570.86.15"); }
int nvmlSystemGetNVMLVersion(char *to, unsigned length) { return text(to, length, CUDA_MAJOR >= 13 ? "13.580.65.06" : "12.570.86.15"); }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = CUDA_VERSION; return SUCCESS; }

/* ---- devices */
int nvmlDeviceGetCount_v2(unsigned *n) { *n = (unsigned)physical_count(); return SUCCESS; }
int nvmlDeviceGetCount(unsigned *n) { return nvmlDeviceGetCount_v2(n); }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if ((int)index >= physical_count()) return INVALID;
    *device = (void *)(uintptr_t)(index + 1);
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex(unsigned index, void **device) { return nvmlDeviceGetHandleByIndex_v2(index, device); }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, void **device) {
    unsigned domain, bus;
    if (sscanf(bus_id, "%x:%x", &domain, &bus) != 2 || !bus) return INVALID;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, device) ? NOT_FOUND : SUCCESS;
}
int nvmlDeviceGetUUID(void *device, char *to, unsigned length) {
    unsigned char u[16];
    char uuid[64];
    card_uuid(physical(device), u);
    snprintf(uuid, sizeof uuid, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4], u[5], u[6], u[7],
             u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
    return text(to, length, uuid);
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    char own[64];
    for (int d = 0; d < physical_count(); d++) {
        *device = (void *)(uintptr_t)(d + 1);
        nvmlDeviceGetUUID(*device, own, sizeof own);
        if (!strcmp(own, uuid)) return SUCCESS;
    }
    return NOT_FOUND;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) { *index = (unsigned)physical(device); return SUCCESS; }
int nvmlDeviceGetMinorNumber(void *device, unsigned *number) { *number = (unsigned)physical(device); return SUCCESS; }
int nvmlDeviceGetName(void *device, char *to, unsigned length) { (void)device; return text(to, length, card()->name); }
int nvmlDeviceGetPciInfo_v3(void *device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = (unsigned)physical(device) + 1;
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return SUCCESS;
}
int nvmlDeviceGetPciInfo(void *device, Pci *pci) { return nvmlDeviceGetPciInfo_v3(device, pci); }
int nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) { (void)device; *major = card()->major; *minor = card()->minor; return SUCCESS; }
int nvmlDeviceGetMemoryBusWidth(void *device, unsigned *bits) { (void)device; *bits = (unsigned)card()->bus_bits; return SUCCESS; }

/* ---- memory and processes */
int nvmlDeviceGetMemoryInfo(void *device, Memory *m) {
    unsigned long long used = bytes_held(physical(device));
    *m = (Memory){card()->memory, card()->memory - used, used};
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *m) {
    m->total = card()->memory;
    m->reserved = 0;
    m->used = bytes_held(physical(device));
    m->free = m->total - m->used;
    return SUCCESS;
}
static int processes(void *device, unsigned *n, ProcessV1 *first, Process *list) {
    int pids[PROCESSES], count;
    size_t bytes[PROCESSES];
    count = holders(physical(device), pids, bytes, PROCESSES);
    unsigned room = *n;
    *n = (unsigned)count;
    if (room < (unsigned)count) return SMALL;
    for (int i = 0; i < count; i++) {
        if (first) first[i] = (ProcessV1){(unsigned)pids[i], bytes[i]};
        else list[i] = (Process){(unsigned)pids[i], bytes[i], 0xffffffff, 0xffffffff};
    }
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses(void *d, unsigned *n, ProcessV1 *list) { return processes(d, n, list, NULL); }
int nvmlDeviceGetComputeRunningProcesses_v2(void *d, unsigned *n, Process *list) { return processes(d, n, NULL, list); }
int nvmlDeviceGetComputeRunningProcesses_v3(void *d, unsigned *n, Process *list) { return processes(d, n, NULL, list); }
static int none(unsigned *n) { *n = 0; return SUCCESS; }
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *d, unsigned *n, Process *list) { (void)d; (void)list; return none(n); }

/* ---- load, power and clocks: those of an idle card, because no kernel runs */
int nvmlDeviceGetUtilizationRates(void *device, Rates *r) { (void)device; *r = (Rates){0, 0}; return SUCCESS; }
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) { (void)device; *milliwatts = (unsigned)card()->watts * 1000 / 8; return SUCCESS; }
int nvmlDeviceGetPowerManagementLimit(void *device, unsigned *milliwatts) { (void)device; *milliwatts = (unsigned)card()->watts * 1000; return SUCCESS; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) { return nvmlDeviceGetPowerManagementLimit(device, milliwatts); }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned *celsius) { (void)device; (void)sensor; *celsius = 40; return SUCCESS; }
int nvmlDeviceGetPersistenceMode(void *device, int *mode) { (void)device; *mode = 1; return SUCCESS; }
int nvmlDeviceGetComputeMode(void *device, int *mode) { (void)device; *mode = 0; return SUCCESS; }
int nvmlDeviceGetPerformanceState(void *device, int *state) { (void)device; *state = 8; return SUCCESS; }
int nvmlDeviceGetFanSpeed(void *device, unsigned *percent) { (void)device; (void)percent; return NOT_SUPPORTED; }
int nvmlDeviceGetClockInfo(void *device, int type, unsigned *mhz) { (void)device; (void)type; *mhz = 300; return SUCCESS; }
int nvmlDeviceGetMaxClockInfo(void *device, int type, unsigned *mhz) { (void)device; (void)type; *mhz = 1500; return SUCCESS; }
int nvmlDeviceGetTotalEnergyConsumption(void *device, unsigned long long *millijoules) { (void)device; (void)millijoules; return NOT_SUPPORTED; }
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *pending) { (void)device; (void)now; (void)pending; return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *state) { (void)device; (void)link; (void)state; return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, unsigned *type) { (void)device; (void)link; (void)type; return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, Pci *pci) { (void)device; (void)link; (void)pci; return NOT_SUPPORTED; }
