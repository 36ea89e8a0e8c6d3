// The table of kernels that each level offers to the dispatch.

#pragma once

#include "reduce.hpp"

// Other compilers ignore `#pragma GCC target` and would compile every level for the same instructions.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define REDUCE_X86_LEVELS 1
#endif

namespace reduce {

struct Table {
    const char* name;
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
