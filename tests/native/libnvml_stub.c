// A stand-in for libnvidia-ml.so.1 with three devices, of which the first two are connected by NVLink.
#include <stdio.h>
#include <string.h>

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int status) { return status == 6 ? "Not Found" : "an error of the stub"; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(long)(index + 1); return 0; }
int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    snprintf(uuid, length, "GPU-0000000%ld-0000-0000-0000-0000000000AB", (long)device);
    return 0;
}
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    if (strncmp(uuid, "GPU-0000000", 11) || uuid[11] < '1' || uuid[11] > '3') return 6;
    *device = (void *)(long)(uuid[11] - '0');
    return 0;
}
// Device 3 cannot be written to; NVLink is capability 2.
int nvmlDeviceGetP2PStatus(void *one, void *other, int kind, int *status) {
    const long pair = (long)one + (long)other;
    *status = kind == 2 && pair != 3 ? 5 : kind == 1 && pair != 3 ? 1 : 0;
    return 0;
}
