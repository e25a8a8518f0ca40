/* A libcuda.so.1 for the contract test of isolation/cuda.py: the driver interface's calls with a board of 1,000 MiB. A
 * kernel runs at 8 iterations a microsecond, and what it was given is looked at: pointers to arguments, and a shape. */

#include <string.h>

typedef int Result;
typedef unsigned long long Pointer;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, ILLEGAL_ADDRESS = 700 };
#define MIB 1048576ULL

static unsigned long long used, sizes[64];
static double clock_us, marks[4];
static Result sticky;
static int context, module, functions[3], events, made;

Result cuInit(unsigned flags) { return flags ? INVALID_VALUE : OK; }
Result cuDeviceGetCount(int *out) { *out = 1; return OK; }
Result cuDeviceGet(int *out, int ordinal) { *out = 7; return ordinal ? INVALID_VALUE : OK; }
Result cuDevicePrimaryCtxRetain(void **out, int device) { *out = &context; return device == 7 ? OK : INVALID_VALUE; }
Result cuCtxSetCurrent(void *given) { return given == &context ? OK : INVALID_VALUE; }
Result cuDeviceGetUuid_v2(unsigned char *out, int device) {
    for (int i = 0; i < 16; i++) out[i] = (unsigned char)i;
    return device == 7 ? OK : INVALID_VALUE;
}
Result cuDeviceTotalMem_v2(size_t *out, int device) { *out = 1000 * MIB; return device == 7 ? OK : INVALID_VALUE; }
Result cuDeviceGetAttribute(int *out, int which, int device) {
    *out = which == 16 ? 132 : 0;
    return device == 7 ? OK : INVALID_VALUE;
}
Result cuModuleLoadData(void **out, const char *image) {
    *out = &module;
    return strstr(image, ".visible .entry compute") ? OK : INVALID_VALUE;
}
Result cuModuleGetFunction(void **out, void *given, const char *name) {
    const char *names[] = {"compute", "walk", "stray"};
    for (int i = 0; i < 3; i++)
        if (given == &module && !strcmp(name, names[i])) { *out = &functions[i]; return OK; }
    return INVALID_VALUE;
}
Result cuMemAlloc_v2(Pointer *out, size_t bytes) {
    if (sticky) return sticky;
    if (used + bytes > 1000 * MIB || made == 63) return OUT_OF_MEMORY;
    used += bytes; sizes[++made] = bytes; *out = 0x100000000ULL + (Pointer)made;
    return OK;
}
Result cuMemFree_v2(Pointer pointer) {
    Pointer place = pointer - 0x100000000ULL;
    if (place > 63 || !sizes[place]) return INVALID_VALUE;
    used -= sizes[place]; sizes[place] = 0;
    return OK;
}
Result cuMemGetInfo_v2(size_t *available, size_t *total) {
    *available = 1000 * MIB - used; *total = 1000 * MIB;
    return sticky;
}
Result cuEventCreate(void **out, unsigned flags) { *out = &marks[events++]; return flags ? INVALID_VALUE : OK; }
Result cuEventRecord(double *event, void *stream) { *event = clock_us; return stream ? INVALID_VALUE : sticky; }
Result cuEventSynchronize(double *event) { (void)event; return sticky; }
Result cuEventElapsedTime(float *out, double *from, double *to) { *out = (float)((*to - *from) / 1000); return OK; }
Result cuCtxSynchronize(void) { return sticky; }
Result cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **arguments, void **extra) {
    if (sticky) return sticky;
    if (!x || y != 1 || z != 1 || bx != 1024 || by != 1 || bz != 1 || shared || stream || extra) return INVALID_VALUE;
    if (function == &functions[2]) { sticky = ILLEGAL_ADDRESS; return OK; }
    if (*(Pointer *)arguments[0] < 0x100000000ULL) return INVALID_VALUE;
    if (function == &functions[1] && *(unsigned *)arguments[3] != x * 1024 * 32) return INVALID_VALUE;
    clock_us += *(unsigned *)arguments[1] / 8.0;
    return OK;
}
Result cuGetErrorName(Result code, const char **out) {
    *out = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
         : code == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_INVALID_VALUE";
    return OK;
}
