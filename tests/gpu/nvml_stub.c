/* A libnvidia-ml.so.1 for the contract test of marshalling: the C interface of NVML, written from its public header,
 * with one device whose every number differs from every other, so that fields which are taken for one another show. */

#include <string.h>

typedef int Return;
typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { int tag; } Opaque;

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10,
       IN_USE = 19, INSUFFICIENT_RESOURCES = 23 };
#define MIB 1048576ULL

static Opaque board = {1}, mig_device = {2}, gpu_instance = {3}, compute_instance = {4}, event_set = {5};
static int has_instance, has_compute, instance_start, events_left = 2;

Return nvmlInit_v2(void) { return SUCCESS; }
Return nvmlInitWithFlags(uint flags) { (void)flags; return SUCCESS; }
Return nvmlShutdown(void) { return SUCCESS; }

static Return text(char *out, uint size, const char *what) {
    if (strlen(what) + 1 > size) return INSUFFICIENT_SIZE;
    strcpy(out, what);
    return SUCCESS;
}

Return nvmlSystemGetDriverVersion(char *out, uint size) { return text(out, size, "580.95.05"); }
Return nvmlSystemGetNVMLVersion(char *out, uint size) { return text(out, size, "13.580.95.05"); }
Return nvmlSystemGetCudaDriverVersion_v2(int *out) { *out = 13000; return SUCCESS; }
Return nvmlDeviceGetCount_v2(uint *out) { *out = 1; return SUCCESS; }

Return nvmlDeviceGetHandleByIndex_v2(uint index, Opaque **out) {
    if (index) return INVALID_ARGUMENT;
    *out = &board;
    return SUCCESS;
}
Return nvmlDeviceGetHandleByUUID(const char *uuid, Opaque **out) {
    if (strcmp(uuid, "GPU-stub")) return NOT_FOUND;
    *out = &board;
    return SUCCESS;
}
Return nvmlDeviceGetUUID(Opaque *device, char *out, uint size) {
    return text(out, size, device == &board ? "GPU-stub" : "MIG-stub");
}
Return nvmlDeviceGetName(Opaque *device, char *out, uint size) { (void)device; return text(out, size, "NVIDIA H200"); }
Return nvmlDeviceGetIndex(Opaque *device, uint *out) { (void)device; *out = 0; return SUCCESS; }
Return nvmlDeviceGetArchitecture(Opaque *device, uint *out) { (void)device; *out = 9; return SUCCESS; }
Return nvmlDeviceGetCudaComputeCapability(Opaque *device, int *major, int *minor) {
    (void)device; *major = 9; *minor = 0; return SUCCESS;
}
Return nvmlDeviceGetNumGpuCores(Opaque *device, uint *out) { (void)device; *out = 132 * 128; return SUCCESS; }
Return nvmlDeviceGetMaxPcieLinkGeneration(Opaque *device, uint *out) { (void)device; *out = 5; return SUCCESS; }
Return nvmlDeviceGetMaxPcieLinkWidth(Opaque *device, uint *out) { (void)device; *out = 16; return SUCCESS; }
Return nvmlDeviceGetNvLinkState(Opaque *device, uint link, uint *out) {
    (void)device;
    if (link > 1) return INVALID_ARGUMENT;
    *out = 1;
    return SUCCESS;
}
Return nvmlDeviceGetNumaNodeId(Opaque *device, uint *out) { (void)device; *out = 1; return SUCCESS; }
Return nvmlDeviceGetCpuAffinity(Opaque *device, uint words, unsigned long *out) {
    (void)device;
    memset(out, 0, words * sizeof *out);
    out[0] = 0x8000000000000001UL;
    if (words > 1) out[1] = 2;
    return SUCCESS;
}

typedef struct { char legacy[16]; uint domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
Return nvmlDeviceGetPciInfo_v3(Opaque *device, Pci *out) {
    (void)device;
    memset(out, 0, sizeof *out);
    strcpy(out->legacy, "0000:1A:00.0");
    strcpy(out->bus_id, "00000000:1A:00.0");
    return SUCCESS;
}

typedef struct { uint version; ull total, reserved, free, used; } Memory2;
Return nvmlDeviceGetMemoryInfo_v2(Opaque *device, Memory2 *out) {
    (void)device;
    out->total = 1000 * MIB; out->reserved = 40 * MIB; out->free = 700 * MIB; out->used = 260 * MIB;
    return SUCCESS;
}
Return nvmlDeviceGetComputeMode(Opaque *device, int *out) { (void)device; *out = 3; return SUCCESS; }

typedef struct { uint pid; ull used; uint gpu_instance, compute_instance; } Process;
static Return processes(uint *count, Process *out, uint found) {
    uint room = *count;
    *count = found;
    if (room < found) return INSUFFICIENT_SIZE;
    for (uint i = 0; i < found; i++) {
        out[i].pid = 101 + i; out[i].used = (10 + i) * MIB; out[i].gpu_instance = 0xFFFFFFFF;
        out[i].compute_instance = 0xFFFFFFFF;
    }
    return SUCCESS;
}
Return nvmlDeviceGetComputeRunningProcesses_v3(Opaque *device, uint *count, Process *out) {
    (void)device; return processes(count, out, 2);
}
Return nvmlDeviceGetMPSComputeRunningProcesses_v3(Opaque *device, uint *count, Process *out) {
    (void)device; return processes(count, out, 1);
}

/* Health */

Return nvmlDeviceGetRemappedRows(Opaque *device, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    (void)device; *corrected = 7; *uncorrected = 8; *pending = 1; *failed = 0; return SUCCESS;
}
Return nvmlDeviceGetTotalEccErrors(Opaque *device, int type, int counter, ull *out) {
    (void)device; *out = 30 + 2 * (ull)type + (ull)counter; return SUCCESS;
}
Return nvmlDeviceGetTemperature(Opaque *device, int sensor, uint *out) {
    (void)device; (void)sensor; *out = 61; return SUCCESS;
}
Return nvmlDeviceGetTemperatureThreshold(Opaque *device, int which, uint *out) {
    (void)device; *out = 80 + (uint)which; return SUCCESS;
}
typedef struct { uint field, scope; long long at, latency; uint type; Return result; union { double d; uint u; ull l; } value; } Field;
Return nvmlDeviceGetFieldValues(Opaque *device, int count, Field *fields) {
    (void)device;
    for (int i = 0; i < count; i++) { fields[i].result = SUCCESS; fields[i].type = 1; fields[i].value.u = 4; }
    return SUCCESS;
}

typedef struct { Opaque *device; ull type, data; uint gpu_instance, compute_instance; } Event;
Return nvmlEventSetCreate(Opaque **out) { *out = &event_set; return SUCCESS; }
Return nvmlEventSetFree(Opaque *set) { (void)set; return SUCCESS; }
Return nvmlDeviceGetSupportedEventTypes(Opaque *device, ull *out) { (void)device; *out = 0x1F; return SUCCESS; }
Return nvmlDeviceRegisterEvents(Opaque *device, ull types, Opaque *set) {
    (void)device; (void)set; return types & ~0x1FULL ? NOT_SUPPORTED : SUCCESS;
}
Return nvmlEventSetWait_v2(Opaque *set, Event *out, uint ms) {
    (void)set; (void)ms;
    if (!events_left) return TIMEOUT;
    events_left--;
    out->device = &board; out->type = events_left ? 8 : 2; out->data = 109;
    out->gpu_instance = out->compute_instance = 0xFFFFFFFF;
    return SUCCESS;
}

/* MIG */

Return nvmlDeviceGetMigMode(Opaque *device, uint *now, uint *next) { (void)device; *now = 1; *next = 0; return SUCCESS; }
typedef struct { uint version, id, p2p, slices, instances, sms, copy, decoder, encoder, jpeg, ofa; ull mib; char name[96]; } Profile;
Return nvmlDeviceGetGpuInstanceProfileInfoV(Opaque *device, uint profile, Profile *out) {
    (void)device;
    if (profile != 0) return NOT_SUPPORTED;
    out->id = 19; out->p2p = 0; out->slices = 1; out->instances = 7; out->sms = 16; out->mib = 16384;
    strcpy(out->name, "MIG 1g.18gb");
    return SUCCESS;
}
typedef struct { uint start, size; } Place;
Return nvmlDeviceGetGpuInstancePossiblePlacements_v2(Opaque *device, uint id, Place *out, uint *count) {
    (void)device;
    if (id != 19) return INVALID_ARGUMENT;
    for (uint i = 0; i < 7; i++) { out[i].start = i; out[i].size = 1; }
    *count = 7;
    return SUCCESS;
}
Return nvmlDeviceCreateGpuInstanceWithPlacement(Opaque *device, uint id, const Place *place, Opaque **out) {
    (void)device;
    if (id != 19 || place->size != 1) return INVALID_ARGUMENT;
    if (has_instance) return INSUFFICIENT_RESOURCES;
    has_instance = 1; instance_start = (int)place->start; *out = &gpu_instance;
    return SUCCESS;
}
Return nvmlDeviceGetGpuInstances(Opaque *device, uint id, Opaque **out, uint *count) {
    (void)device; (void)id;
    *count = (uint)has_instance;
    if (has_instance) out[0] = &gpu_instance;
    return SUCCESS;
}
Return nvmlDeviceGetGpuInstanceById(Opaque *device, uint id, Opaque **out) {
    (void)device;
    if (!has_instance || id != 5) return NOT_FOUND;
    *out = &gpu_instance;
    return SUCCESS;
}
typedef struct { Opaque *device; uint id, profile; Place place; } Instance;
Return nvmlGpuInstanceGetInfo(Opaque *instance, Instance *out) {
    if (instance != &gpu_instance) return INVALID_ARGUMENT;
    out->device = &board; out->id = 5; out->profile = 19; out->place.start = (uint)instance_start; out->place.size = 1;
    return SUCCESS;
}
Return nvmlGpuInstanceDestroy(Opaque *instance) {
    if (instance != &gpu_instance) return INVALID_ARGUMENT;
    if (has_compute) return IN_USE;
    has_instance = 0;
    return SUCCESS;
}
typedef struct { uint version, id, slices, instances, sms, copy, decoder, encoder, jpeg, ofa; char name[96]; } ComputeProfile;
Return nvmlGpuInstanceGetComputeInstanceProfileInfoV(Opaque *instance, uint profile, uint engine, ComputeProfile *out) {
    (void)engine;
    if (instance != &gpu_instance || profile != 0) return NOT_SUPPORTED;
    out->id = 42; out->slices = 1; out->instances = 1; out->sms = 16;
    return SUCCESS;
}
Return nvmlGpuInstanceCreateComputeInstance(Opaque *instance, uint id, Opaque **out) {
    if (instance != &gpu_instance || id != 42) return INVALID_ARGUMENT;
    has_compute = 1; *out = &compute_instance;
    return SUCCESS;
}
Return nvmlGpuInstanceGetComputeInstances(Opaque *instance, uint id, Opaque **out, uint *count) {
    if (instance != &gpu_instance || id != 42) return INVALID_ARGUMENT;
    *count = (uint)has_compute;
    if (has_compute) out[0] = &compute_instance;
    return SUCCESS;
}
Return nvmlComputeInstanceDestroy(Opaque *instance) {
    if (instance != &compute_instance) return INVALID_ARGUMENT;
    has_compute = 0;
    return SUCCESS;
}
Return nvmlDeviceGetMaxMigDeviceCount(Opaque *device, uint *out) { (void)device; *out = 7; return SUCCESS; }
Return nvmlDeviceGetMigDeviceHandleByIndex(Opaque *device, uint index, Opaque **out) {
    (void)device;
    if (index != 3 || !has_compute) return NOT_FOUND; /* Indexes have holes. */
    *out = &mig_device;
    return SUCCESS;
}
Return nvmlDeviceGetGpuInstanceId(Opaque *device, uint *out) {
    if (device != &mig_device) return NOT_SUPPORTED;
    *out = 5;
    return SUCCESS;
}
typedef struct { uint sms, copy, decoder, encoder, jpeg, ofa, gpu_slices, compute_slices; ull mib; } Attributes;
Return nvmlDeviceGetAttributes_v2(Opaque *device, Attributes *out) {
    if (device != &mig_device) return NOT_SUPPORTED;
    memset(out, 0, sizeof *out);
    out->sms = 16; out->gpu_slices = 1; out->compute_slices = 1; out->mib = 16384;
    return SUCCESS;
}
