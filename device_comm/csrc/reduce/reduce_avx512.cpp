// The kernels for AVX-512 (F, BW, VL, DQ). Only the dispatch may call them.

#include "reduce_table.hpp"

#ifdef REDUCE_X86_LEVELS
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512vl,avx512dq")

#define REDUCE_LEVEL avx512
#define REDUCE_NAME "avx512"
#define REDUCE_WIDTH 64
#include "reduce_kernels.hpp"
#endif
