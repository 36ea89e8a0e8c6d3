// The level that every machine of the architecture supports: SSE2 on x86-64, NEON on aarch64.

#define REDUCE_LEVEL baseline
#if defined(__aarch64__)
#define REDUCE_NAME "neon"
#else
#define REDUCE_NAME "baseline"
#endif
#define REDUCE_WIDTH 16
#include "reduce_kernels.hpp"
