// Chooses once the widest level that the processor and the operating system support.

#include "reduce.hpp"

#include <cstring>

#include "reduce_table.hpp"

namespace reduce {
namespace {

constexpr std::size_t kMostLevels = 3;

// The levels that this machine can run, the widest first.
struct Levels {
    const Table* tables[kMostLevels]{};
    std::size_t count = 0;

    Levels() {
#ifdef REDUCE_X86_LEVELS
        // These builtins check the operating system's support too (XGETBV), not only the processor's.
        __builtin_cpu_init();
        const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
        if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            tables[count++] = &avx512::kTable;
        }
        if (has_avx2) tables[count++] = &avx2::kTable;
#endif
        tables[count++] = &baseline::kTable;
    }
};

const Levels& levels() {
    static const Levels found;
    return found;
}

Kernel entry(const Table& table, Op op, Type type, bool streaming) {
    const auto row = static_cast<std::size_t>(op);
    const auto column = static_cast<std::size_t>(type);
    if (row >= kOps || column >= kTypes) return nullptr;
    return table.kernels[streaming ? 1 : 0][row][column];
}

}  // namespace

Kernel kernel(Op op, Type type, bool streaming) { return entry(*levels().tables[0], op, type, streaming); }

const char* level() { return levels().tables[0]->name; }

Kernel kernel_at(Op op, Type type, const char* level, bool streaming) {
    const Levels& found = levels();
    for (std::size_t i = 0; i < found.count; ++i) {
        if (std::strcmp(found.tables[i]->name, level) == 0) return entry(*found.tables[i], op, type, streaming);
    }
    return nullptr;
}

std::size_t element_bytes(Type type) {
    const auto column = static_cast<std::size_t>(type);
    return column < kTypes ? baseline::kTable.element_bytes[column] : 0;
}

}  // namespace reduce
