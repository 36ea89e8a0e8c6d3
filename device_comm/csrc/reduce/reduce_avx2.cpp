// The kernels for AVX2 with F16C. Only the dispatch may call them.

// Include the standard library before the pragma: the linker keeps one copy of each of its inline functions, which must
// not be one that is compiled for this level.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "reduce_table.hpp"

#ifdef REDUCE_X86_LEVELS
#include <immintrin.h>

#pragma GCC target("avx2,f16c")

#define REDUCE_LEVEL avx2
#define REDUCE_NAME "avx2"
#define REDUCE_WIDTH 32
#include "reduce_kernels.hpp"
#endif
