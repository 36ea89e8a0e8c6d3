// The table of kernels that each level offers to the dispatch, and the headers that the kernels need.

#pragma once

// A level's source file includes these before its `#pragma GCC target`: the linker keeps one copy of each inline function
// of the standard library, which must not be one that is compiled for that level.
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "reduce.hpp"

// Other compilers ignore `#pragma GCC target` and would compile every level for the same instructions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define REDUCE_X86_LEVELS 1
#endif

namespace reduce {

struct Table {
    const char* name;
    std::size_t element_bytes[kTypes];
    Kernel kernels[2][kOps][kTypes];  // first index: whether stores bypass the caches
};

namespace baseline {
extern const Table kTable;
}
#ifdef REDUCE_X86_LEVELS
namespace avx2 {
extern const Table kTable;
}
namespace avx512 {
extern const Table kTable;
}
#endif

}  // namespace reduce
