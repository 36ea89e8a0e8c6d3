// The kernels for AVX2 with F16C. Only the dispatch may call them.

#include "reduce_table.hpp"

#ifdef REDUCE_X86_LEVELS
#pragma GCC target("avx2,f16c")

#define REDUCE_LEVEL avx2
#define REDUCE_NAME "avx2"
#define REDUCE_WIDTH 32
#include "reduce_kernels.hpp"
#endif
