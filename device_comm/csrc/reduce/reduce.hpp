// Reductions of CPU tensors: combine the elements of several ranks in rank order in one pass.
//
// The result equals that of device_comm/reduction.py and has the same bits at every level and for every length and
// alignment: it depends on the values only. Cases that torch leaves open are defined here:
//   - if both operands of a sum or product are NaN, the result is the later rank's NaN, quieted;
//   - a NaN result is 0xffff in bf16; in f16 it keeps its sign and the upper bits of its payload.
// On aarch64 the processor decides which of two NaNs results, and a NaN made of numbers has the other sign.
//
// Nothing here blocks, allocates, throws or makes system calls. The rounding mode must be the default, to nearest.

#pragma once

#include <cstddef>
#include <cstdint>

namespace reduce {

// Python passes these values: add new ones at the end only.
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

// Combines `elements` elements of each of `ranks` >= 1 inputs. No pointer needs alignment. `out` equals one of the inputs
// or overlaps none.
using Kernel = void (*)(void* out, const void* const* inputs, std::size_t ranks, std::size_t elements);

// The kernel for this machine, or nullptr if the operation is undefined for the type or either is unknown. With
// `streaming` its stores bypass the caches, for results larger than them. They are fenced before it returns, so a flag
// that is released afterwards orders them.
Kernel kernel(Op op, Type type, bool streaming);

// Bytes of one element; 0 for an unknown type.
std::size_t element_bytes(Type type);

// The level that kernel() uses on this machine: "avx512", "avx2", "baseline" or "neon".
const char* level();

// For tests: the kernel of a named level, or nullptr if this machine or build lacks the level.
Kernel kernel_at(Op op, Type type, const char* level, bool streaming);

}  // namespace reduce
