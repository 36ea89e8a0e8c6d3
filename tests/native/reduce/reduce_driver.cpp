// Calls the kernels for a Python test, and sweeps over lengths and alignments, which would be slow in Python.

#include <algorithm>
#include <cstring>
#include <vector>

#include "reduce.hpp"

namespace {

constexpr std::size_t kLongest = 70;
constexpr std::size_t kGuard = 64;
constexpr unsigned char kUntouched = 0xa5;

// A buffer that begins `skew` bytes after a line.
struct Skewed {
    std::vector<unsigned char> memory;
    std::size_t start;

    Skewed(std::size_t bytes, std::size_t skew) : memory(bytes + 3 * kGuard, kUntouched) {
        start = kGuard + (-reinterpret_cast<std::size_t>(memory.data())) % kGuard + skew % kGuard;
    }
    unsigned char* data() { return memory.data() + start; }
    bool only(std::size_t bytes) const {
        const auto touched = [](unsigned char byte) { return byte != kUntouched; };
        return std::none_of(memory.begin(), memory.begin() + start, touched) &&
               std::none_of(memory.begin() + start + bytes, memory.end(), touched);
    }
};

reduce::Kernel found(int op, int type, const char* level, bool streaming) {
    return reduce::kernel_at(static_cast<reduce::Op>(op), static_cast<reduce::Type>(type), level, streaming);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) const char* reduce_level() { return reduce::level(); }

__attribute__((visibility("default"))) std::size_t reduce_element_bytes(int type) {
    return reduce::element_bytes(static_cast<reduce::Type>(type));
}

// 1: the pair has a kernel, 0: it has none, -1: kernel() disagrees with the level's table.
__attribute__((visibility("default"))) int reduce_knows(int op, int type) {
    const auto kernel = reduce::kernel(static_cast<reduce::Op>(op), static_cast<reduce::Type>(type), false);
    const auto streaming = reduce::kernel(static_cast<reduce::Op>(op), static_cast<reduce::Type>(type), true);
    if (kernel != found(op, type, reduce::level(), false)) return -1;
    if (streaming != found(op, type, reduce::level(), true)) return -1;
    return kernel != nullptr;
}

// Returns 1 when it is done, or 0 if there is no such kernel.
__attribute__((visibility("default"))) int reduce_run(int op, int type, const char* level, int streaming, void* out,
                                                      const void* const* inputs, std::size_t ranks,
                                                      std::size_t elements) {
    const reduce::Kernel kernel = found(op, type, level, streaming != 0);
    if (kernel == nullptr) return 0;
    kernel(out, inputs, ranks, elements);
    return 1;
}

// Every length up to 70, each at another alignment of each buffer, out of place and into each rank's input, must give
// the first bytes of `expected`, and no other byte may change. Returns -1, or for a failure length * 100 + the rank
// whose input was the result (99 if the result was apart).
__attribute__((visibility("default"))) long reduce_sweep(int op, int type, const char* level, int streaming,
                                                         const void* const* inputs, std::size_t ranks,
                                                         const void* expected) {
    const reduce::Kernel kernel = found(op, type, level, streaming != 0);
    const std::size_t element = reduce::element_bytes(static_cast<reduce::Type>(type));
    constexpr std::size_t kNone = 99;
    for (std::size_t length = 0; length <= kLongest; ++length) {
        const std::size_t bytes = length * element;
        for (std::size_t into = 0; into <= ranks; ++into) {
            std::vector<Skewed> buffers;
            std::vector<const void*> addresses;
            for (std::size_t rank = 0; rank <= ranks; ++rank) {
                // The alignment is alternately any byte and a whole element, which allows streaming stores.
                buffers.emplace_back(bytes, (length * 7 + rank * 3 + into) * (length % 2 == 0 ? 1 : element));
                if (rank < ranks && bytes > 0) std::memcpy(buffers[rank].data(), inputs[rank], bytes);
                addresses.push_back(buffers[rank].data());
            }
            Skewed& out = buffers[into];
            kernel(out.data(), addresses.data(), ranks, length);
            bool good = bytes == 0 || std::memcmp(out.data(), expected, bytes) == 0;
            for (std::size_t rank = 0; rank < ranks; ++rank) {
                if (rank == into || bytes == 0) continue;
                good = good && std::memcmp(buffers[rank].data(), inputs[rank], bytes) == 0;
            }
            if (!good || !out.only(bytes)) return static_cast<long>(length * 100 + (into == ranks ? kNone : into));
        }
    }
    return -1;
}
}
