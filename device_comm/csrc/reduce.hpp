// Reductions of CPU tensors: the elements of several ranks, combined in rank order in one pass.
//
// The result is that of device_comm/reduction.py and has the same bits at every level, for every length and
// alignment: only the values decide. What torch leaves to chance is fixed here:
//   - of two NaN that meet in a sum or product the later rank's stays, quieted;
//   - a bf16 result that is NaN is 0xffff, an f16 one keeps its sign and the top of its payload.
//
// Nothing here blocks, allocates, throws or calls the system. Rounding mode: to nearest, as every thread has it
// unless somebody changed it.

#pragma once

#include <cstddef>
#include <cstdint>

namespace reduce {

// The values are what callers outside of C++ pass: add at the end only.
enum class Op : std::uint8_t { kSum, kMean, kProduct, kMin, kMax };
inline constexpr std::size_t kOps = 5;

enum class Type : std::uint8_t {
    f32,
    f64,
    f16,
    bf16,
    f8e4m3fn,
    f8e5m2,
    f8e4m3fnuz,
    f8e5m2fnuz,
    i8,
    u8,
    i16,
    u16,
    i32,
    u32,
    i64,
    boolean,
    c32,   // two f16
    c64,   // two f32
    c128,  // two f64
};
inline constexpr std::size_t kTypes = 19;

// Combine `elements` elements of each of `ranks` >= 1 inputs. No pointer need be aligned. `out` is the address of
// one of the inputs or overlaps none.
using Kernel = void (*)(void* out, const void* const* inputs, std::size_t ranks, std::size_t elements);

// The kernel for this machine, or nullptr where the operation has no meaning for the type (or either is unknown).
Kernel kernel(Op op, Type type);

// The same, writing past the caches, for results that are larger than they are. The stores are complete (fenced)
// on return, so a flag that is released afterwards covers them.
Kernel kernel_streaming(Op op, Type type);

// Bytes of one element; 0 for an unknown type.
std::size_t element_bytes(Type type);

// "avx512", "avx2", "baseline" or "neon": what kernel() chooses from here.
const char* level();

// For tests: the kernel of a named level, or nullptr where this machine or build has no such level.
Kernel kernel_at(Op op, Type type, const char* level, bool streaming = false);

}  // namespace reduce
