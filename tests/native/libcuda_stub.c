// A libcuda without a device. It shows tests/native/test_cuda_driver.py what the bindings pass on. Every call is
// written to the file in STUB_LOG, if set, with its integer arguments. STUB_FAIL=name:code:nth makes the nth call of name
// fail.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef unsigned long long u64;

static int called(const char *name, const char *format, ...) {
    static FILE *log;
    static int count, is_silent;
    if (is_silent) return 0;
    if (!log) {
        const char *path = getenv("STUB_LOG");
        is_silent = !path;
        if (is_silent) return 0;
        log = fopen(path, "w");
    }
    va_list arguments;
    va_start(arguments, format);
    fprintf(log, "%s", name);
    vfprintf(log, format, arguments);
    fprintf(log, "\n");
    fflush(log);
    va_end(arguments);
    const char *fail = getenv("STUB_FAIL");
    size_t length = strlen(name);
    if (fail && !strncmp(fail, name, length) && fail[length] == ':') {
        int code = atoi(fail + length + 1), nth = atoi(strrchr(fail, ':') + 1);
        if (++count == nth) return code;
    }
    return 0;
}
#define CALL(name, ...) int failed_ = called(name, __VA_ARGS__); if (failed_) return failed_

int cuInit(unsigned flags) { CALL("cuInit", " %u", flags); return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuGetErrorName(int error, const char **text) { *text = error == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : 0; return error == 700 ? 0 : 1; }
int cuGetErrorString(int error, const char **text) { *text = error == 700 ? "an illegal memory access" : 0; return error == 700 ? 0 : 1; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return 0; }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Stub %d", device); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 1ull << 37; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetPCIBusId(char *text, int length, int device) { snprintf(text, length, "0000:%02X:00.0", device); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 18 ? 0 : 1;
    return 0;
}
int cuDeviceCanAccessPeer(int *can, int device, int peer) { CALL("cuDeviceCanAccessPeer", " %d %d", device, peer); *can = 1; return 0; }
int cuDeviceGetP2PAttribute(int *value, int kind, int device, int peer) { CALL("cuDeviceGetP2PAttribute", " %d %d %d", kind, device, peer); *value = 1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { CALL("cuDevicePrimaryCtxRetain", " %d", device); *context = (void *)(uintptr_t)(device * 10); return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { CALL("cuDevicePrimaryCtxRelease", " %d", device); return 0; }
static int depth;
int cuCtxPushCurrent_v2(void *context) { ++depth; return context == (void *)410 ? 0 : 201; }
int cuCtxPopCurrent_v2(void **context) { --depth; *context = (void *)410; return 0; }
int stub_depth(void) { return depth; }
int cuCtxEnablePeerAccess(void *context, unsigned flags) { CALL("cuCtxEnablePeerAccess", " %p %u", context, flags); return 704; }
int cuMemAlloc_v2(u64 *address, size_t bytes) { CALL("cuMemAlloc", " %zu", bytes); *address = (u64)(uintptr_t)calloc(1, bytes); return 0; }
int cuMemFree_v2(u64 address) { CALL("cuMemFree", ""); free((void *)(uintptr_t)address); return 0; }
int cuMemsetD32Async(u64 address, unsigned value, size_t count, void *stream) {
    CALL("cuMemsetD32Async", " %u %zu %p", value, count, stream);
    for (size_t i = 0; i < count; ++i) ((unsigned *)(uintptr_t)address)[i] = value;
    return 0;
}
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, void *stream) { CALL("cuMemcpyDtoHAsync", " %zu %p", bytes, stream); memcpy(to, (void *)(uintptr_t)from, bytes); return 0; }
int cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t bytes, void *stream) { CALL("cuMemcpyHtoDAsync", " %zu %p", bytes, stream); memcpy((void *)(uintptr_t)to, from, bytes); return 0; }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, void *stream) { CALL("cuMemcpyDtoDAsync", " %zu %p", bytes, stream); memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes); return 0; }
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { CALL("cuMemHostAlloc", " %zu %u", bytes, flags); *address = malloc(bytes); memset(*address, 255, bytes); return 0; }
int cuMemHostGetDevicePointer_v2(u64 *device, void *host, unsigned flags) { CALL("cuMemHostGetDevicePointer", " %u", flags); *device = (u64)(uintptr_t)host; return 0; }
int cuMemFreeHost(void *address) { CALL("cuMemFreeHost", ""); free(address); return 0; }
int cuMemGetAddressRange_v2(u64 *base, size_t *bytes, u64 address) { *base = address - 16; *bytes = 4096; return 0; }
int cuPointerGetAttribute(void *data, int attribute, u64 address) { CALL("cuPointerGetAttribute", " %d", attribute); *(unsigned char *)data = 1; return 0; }
int cuIpcGetMemHandle(char *handle, u64 address) { for (int i = 0; i < 64; ++i) handle[i] = i; return 0; }
typedef struct { char bytes[64]; } Handle;
int cuIpcOpenMemHandle_v2(u64 *address, Handle handle, unsigned flags) { CALL("cuIpcOpenMemHandle", " %d %d %u", handle.bytes[0], handle.bytes[63], flags); *address = 4096; return 0; }
int cuIpcCloseMemHandle(u64 address) { CALL("cuIpcCloseMemHandle", " %llu", address); return 0; }
typedef struct { int type, handles; struct { int type, id; } location; } Properties;
int cuMemGetAllocationGranularity(size_t *bytes, const Properties *p, int option) { CALL("cuMemGetAllocationGranularity", " %d %d %d %d", p->type, p->handles, p->location.type, p->location.id); *bytes = 2 << 20; return 0; }
int cuMemCreate(u64 *handle, size_t bytes, const Properties *p, u64 flags) { CALL("cuMemCreate", " %zu %d %d", bytes, p->handles, p->location.id); *handle = 77; return 0; }
int cuMemExportToShareableHandle(int *descriptor, u64 handle, int kind, u64 flags) { CALL("cuMemExportToShareableHandle", " %llu %d", handle, kind); *descriptor = 33; return 0; }
int cuMemImportFromShareableHandle(u64 *handle, void *descriptor, int kind) { CALL("cuMemImportFromShareableHandle", " %d %d", (int)(intptr_t)descriptor, kind); *handle = 78; return 0; }
int cuMemAddressReserve(u64 *address, size_t bytes, size_t alignment, u64 hint, u64 flags) { CALL("cuMemAddressReserve", " %zu", bytes); *address = 8192; return 0; }
int cuMemMap(u64 address, size_t bytes, size_t offset, u64 handle, u64 flags) { CALL("cuMemMap", " %llu %zu %zu %llu", address, bytes, offset, handle); return 0; }
typedef struct { struct { int type, id; } location; int flags; } Access;
int cuMemSetAccess(u64 address, size_t bytes, const Access *access, size_t count) { CALL("cuMemSetAccess", " %llu %zu %d %d %zu", address, bytes, access->location.id, access->flags, count); return 0; }
int cuMemUnmap(u64 address, size_t bytes) { CALL("cuMemUnmap", " %llu %zu", address, bytes); return 0; }
int cuMemAddressFree(u64 address, size_t bytes) { CALL("cuMemAddressFree", " %llu %zu", address, bytes); return 0; }
int cuMemRelease(u64 handle) { CALL("cuMemRelease", " %llu", handle); return 0; }
typedef struct { unsigned devices; size_t bytes; u64 handles, flags; } Multicast;
int cuMulticastGetGranularity(size_t *bytes, const Multicast *p, int option) { CALL("cuMulticastGetGranularity", " %u %zu %llu %llu %d", p->devices, p->bytes, p->handles, p->flags, option); *bytes = 2 << 20; return 0; }
int cuMulticastCreate(u64 *handle, const Multicast *p) { CALL("cuMulticastCreate", " %u %zu %llu %llu", p->devices, p->bytes, p->handles, p->flags); *handle = 79; return 0; }
int cuMulticastAddDevice(u64 handle, int device) { CALL("cuMulticastAddDevice", " %llu %d", handle, device); return 0; }
int cuMulticastBindMem(u64 handle, size_t offset, u64 memory, size_t memory_offset, size_t bytes, u64 flags) { CALL("cuMulticastBindMem", " %llu %zu %llu %zu %zu %llu", handle, offset, memory, memory_offset, bytes, flags); return 0; }
int cuMulticastUnbind(u64 handle, int device, size_t offset, size_t bytes) { CALL("cuMulticastUnbind", " %llu %d %zu %zu", handle, device, offset, bytes); return 0; }
int cuModuleLoadData(void **module, const void *image) { CALL("cuModuleLoadData", " %.5s", (const char *)image); *module = (void *)500; return 0; }
int cuModuleUnload(void *module) { CALL("cuModuleUnload", " %p", module); return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { CALL("cuModuleGetFunction", " %p %s", module, name); *function = (void *)600; return 0; }
int cuFuncLoad(void *function) { CALL("cuFuncLoad", " %p", function); return 0; }
int cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
    CALL("cuLaunchKernel", " %p %u %u %u %u %u %u %u %p %llu %u %p depth %d", function, gx, gy, gz, bx, by, bz, shared, stream, *(u64 *)arguments[0], *(unsigned *)arguments[1], (void *)extra, depth);
    return 0;
}
typedef struct { int id; char pad[4]; union { char bytes[64]; struct { unsigned x, y, z; } cluster; int programmatic; } value; } Attribute;
typedef struct { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; Attribute *attributes; unsigned count; } Launch;
int cuLaunchKernelEx(const Launch *l, void *function, void **arguments, void **extra) {
    char text[200] = "";
    for (unsigned i = 0; i < l->count; ++i) {
        const Attribute *a = l->attributes + i;
        char one[64];
        if (a->id == 4) snprintf(one, sizeof one, " cluster %u %u %u", a->value.cluster.x, a->value.cluster.y, a->value.cluster.z);
        else snprintf(one, sizeof one, " attribute %d %d", a->id, a->value.programmatic);
        strcat(text, one);
    }
    CALL("cuLaunchKernelEx", " %p %u %u %u %u %u %u %u %p %llu %u %p%s", function, l->gx, l->gy, l->gz, l->bx, l->by, l->bz, l->shared, l->stream, *(u64 *)arguments[0], *(unsigned *)arguments[1], (void *)extra, text);
    return 0;
}
int cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments) {
    CALL("cuLaunchCooperativeKernel", " %p %u %u %u %u %p %llu", function, gx, gy, gz, bx, stream, *(u64 *)arguments[0]);
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { CALL("cuStreamCreate", " %u", flags); *stream = (void *)700; return 0; }
int cuStreamDestroy_v2(void *stream) { CALL("cuStreamDestroy", " %p", stream); return 0; }
int cuStreamSynchronize(void *stream) { CALL("cuStreamSynchronize", " %p", stream); return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { CALL("cuStreamWaitEvent", " %p %p", stream, event); return 0; }
// Stream 700 and the per-thread stream are being captured, stream 702 was until its capture became invalid. Meanwhile
// the legacy stream cannot be asked about.
static int is_legacy(void *stream) { return (uintptr_t)stream < 2; }
static int status_of(void *stream) { return stream == (void *)700 || stream == (void *)2 ? 1 : stream == (void *)702 ? 2 : 0; }
int cuStreamIsCapturing(void *stream, int *status) {
    CALL("cuStreamIsCapturing", " %p", stream);
    *status = status_of(stream);
    return is_legacy(stream) ? 906 : 0;
}
int cuStreamGetCaptureInfo_v3(void *stream, int *status, u64 *id, void **graph, void ***dependencies, void **edges, size_t *count) {
    CALL("cuStreamGetCaptureInfo", " %p", stream);
    *status = status_of(stream);
    if (is_legacy(stream)) return 906;
    if (id) *id = 55;
    if (graph) *graph = 0;
    if (dependencies) *dependencies = 0;
    if (edges) *edges = 0;
    if (count) *count = 0;
    return 0;
}
int cuEventCreate(void **event, unsigned flags) { CALL("cuEventCreate", " %u", flags); *event = (void *)800; return 0; }
int cuEventRecord(void *event, void *stream) { CALL("cuEventRecord", " %p %p", event, stream); return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static int current = 0;
    int before = current;
    CALL("cuThreadExchangeStreamCaptureMode", " %d", *mode);
    current = *mode;
    *mode = before;
    return 0;
}
int cuEventQuery(void *event) { CALL("cuEventQuery", " %p", event); return 600; }
int cuEventDestroy_v2(void *event) { CALL("cuEventDestroy", " %p", event); return 0; }
int cuCtxSynchronize(void) { CALL("cuCtxSynchronize", ""); return 0; }

// The bindings ask for every function by its plain name and the version that they were built for.
int cuGetProcAddress_v2(const char *name, void **function, int version, u64 flags, int *found) {
    char versioned[200];
    Dl_info own;
    dladdr((void *)cuInit, &own);
    void *library = dlopen(own.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    const int newest = strcmp(name, "cuStreamGetCaptureInfo") ? 2 : 3;
    snprintf(versioned, sizeof versioned, "%s_v%d", name, newest);
    *function = !strcmp(name, "cuGetProcAddress") ? (void *)cuGetProcAddress_v2 : dlsym(library, versioned);
    if (!*function) *function = dlsym(library, name);
    if (found) *found = *function ? 0 : 1;
    return *function ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **function, int version, u64 flags) { return cuGetProcAddress_v2(name, function, version, flags, 0); }
