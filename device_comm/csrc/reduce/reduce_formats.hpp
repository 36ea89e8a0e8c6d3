// Convert the elements of each type to the lanes in which they are combined, and back.
//
// A format loads kBytes of a tensor as a Unit of kParts vectors of Lane, and stores a Unit. Its kKind says how to combine
// lanes: as floating-point numbers, integers, booleans, or pairs that are complex numbers.

#pragma once

#include "reduce_vectors.hpp"

namespace reduce::REDUCE_LEVEL {
namespace {

enum class Kind : std::uint8_t { kFloat, kInteger, kBool, kComplex };

// The types and constants that every format defines.
template <typename LaneType, Kind kind, std::size_t parts, std::size_t bytes>
struct Shape {
    using Lane = LaneType;
    static constexpr Kind kKind = kind;
    static constexpr std::size_t kParts = parts;
    static constexpr std::size_t kBytes = bytes;
    struct Unit {
        Vector<Lane> part[parts];
    };
};

// f32, f64, the integers, and pairs of f32 or f64: combined without conversion.
template <typename Lane, Kind kind>
struct Plain : Shape<Lane, kind, 1, kWidth> {
    using Unit = typename Plain::Shape::Unit;

    static Unit load(const char* from) { return {{get<Vector<Lane>>(from)}}; }
    static void store(char* to, Unit unit, bool streaming) { put(to, unit.part[0], streaming); }
};

// Any nonzero byte is true; a result is 0 or 1.
struct Bool : Plain<std::uint8_t, Kind::kBool> {
    using Bytes = Vector<std::uint8_t>;

    static Unit load(const char* from) { return {{(Bytes)(get<Bytes>(from) != 0) & 1}}; }
};

// bf16, the upper half of an f32. Even and odd elements go to separate vectors, so no bits move between lanes.
struct Bfloat16 : Shape<float, Kind::kFloat, 2, kWidth> {
    static Unit load(const char* from) {
        const U32 pair = get<U32>(from);
        return {{(F32)(pair << 16), (F32)(pair & 0xffff0000u)}};
    }

    // Rounds to nearest, ties to even, in the upper half; the lower half is undefined. For NaN the result is arbitrary;
    // store() corrects it.
    static U32 rounded(F32 value) { return add_odd((U32)value + 0x7fffu, (U32)value, 1u << 16); }

    static void store(char* to, Unit unit, bool streaming) {
        U32 low = rounded(unit.part[0]), high = rounded(unit.part[1]);
        // One check covers both vectors: NaN is rare, and handling it in each would slow a sum of cached data by 15 %.
        if (__builtin_expect(has_nan(unit.part[0], unit.part[1]), 0)) {
            low |= (U32)(unit.part[0] != unit.part[0]);
            high |= (U32)(unit.part[1] != unit.part[1]);
        }
        put(to, (low >> 16) | (high & 0xffff0000u), streaming);
    }
};

enum class Specials : std::uint8_t {
    kIeee,      // the highest exponent means infinity or NaN
    kFinite,    // no infinity; NaN is all ones; overflow gives the largest number
    kUnsigned,  // no infinity, no -0; NaN is the sign bit alone; overflow gives NaN
};

// A floating-point format of at most 16 bits, implemented by integer arithmetic on 32-bit lanes.
template <unsigned exponent_bits, unsigned fraction_bits, unsigned bias, Specials specials>
struct Small {
    static constexpr unsigned kSign = 1u << (exponent_bits + fraction_bits);
    static constexpr unsigned kCode = 2 * kSign - 1;  // all bits
    static constexpr unsigned kShift = 23 - fraction_bits;
    static constexpr unsigned kToSign = 31 - exponent_bits - fraction_bits;
    static constexpr unsigned kTop = ((1u << exponent_bits) - 1) << fraction_bits;  // the highest exponent

    // Bits above the code's are ignored.
    static F32 decoded(U32 code) {
        const U32 magnitude = code & (kSign - 1);
        const U32 sign = (code & kSign) << kToSign;
        // Interpreted with exponent 1, a subnormal number is exactly 2^(1 - bias) plus its value.
        constexpr unsigned one = (127 - bias + 1) << 23;
        const U32 shifted = magnitude << kShift;
        const U32 subnormal = (U32)((F32)(shifted + one) - (F32)(U32{} + one));
        U32 bits = magnitude < (1u << fraction_bits) ? subnormal : shifted + ((127 - bias) << 23);
        if constexpr (specials == Specials::kIeee) {
            const U32 quiet = (U32)(magnitude > kTop) & (1u << 22);
            bits = magnitude < kTop ? bits : shifted | 0x7f800000u | quiet;
        } else if constexpr (specials == Specials::kFinite) {
            bits = magnitude == kSign - 1 ? U32{} + 0x7fc00000u : bits;
        } else {
            bits |= (U32)((code & kCode) == kSign) & 0x7fc00000u;
        }
        return (F32)(bits | sign);
    }

    // Rounds to nearest, ties to even; returns the code with zeros above it.
    static U32 encoded(F32 value) {
        const U32 sign = (U32)value & 0x80000000u;
        const U32 magnitude = (U32)value ^ sign;
        // SSE2 has instructions only for signed comparisons; a magnitude is never negative.
        const I32 order = (I32)magnitude;
        // Adding a number whose unit in the last place is the format's smallest subnormal makes the processor round to that
        // unit.
        constexpr unsigned unit = (127 - bias + kShift + 1) << 23;
        const U32 subnormal = (U32)((F32)magnitude + (F32)(U32{} + unit)) - unit;
        const U32 odd = (magnitude >> kShift) & 1u;
        const U32 normal = (magnitude - ((127 - bias) << 23) + ((1u << (kShift - 1)) - 1) + odd) >> kShift;
        U32 code = order < static_cast<int>((127 - bias + 1) << 23) ? subnormal : normal;
        if constexpr (specials == Specials::kIeee) {
            code = order < static_cast<int>((127 + bias + 1) << 23) ? code : U32{} + kTop;
            U32 nan = U32{} + (kSign - 1);
            if constexpr (exponent_bits + fraction_bits > 7) {  // like F16C: quieted, with the payload's upper bits
                nan = ((magnitude >> kShift) & (kSign - 1)) | kTop | (1u << (fraction_bits - 1));
            }
            code = order > 0x7f800000 ? nan : code;
        } else if constexpr (specials == Specials::kFinite) {
            // An exponent of all ones is a number here; only with a fraction of all ones it is NaN.
            constexpr unsigned largest = ((kSign - 2) << kShift) + ((127 - bias) << 23);
            code = order > static_cast<int>(largest) ? U32{} + (kSign - 2) : code;
            code = order > 0x7f800000 ? U32{} + (kSign - 1) : code;
        } else {
            code = order < static_cast<int>((127 + bias) << 23) ? code : U32{} + kSign;
            return code | ((U32)(code != 0) & (sign >> kToSign));
        }
        return code | (sign >> kToSign);
    }
};

// Each 32-bit lane holds four 8-bit elements, which go to separate vectors.
template <typename Code>
struct Byte : Shape<float, Kind::kFloat, 4, kWidth> {
    static Unit load(const char* from) {
        const U32 four = get<U32>(from);
        return {{Code::decoded(four), Code::decoded(four >> 8), Code::decoded(four >> 16), Code::decoded(four >> 24)}};
    }

    static void store(char* to, Unit unit, bool streaming) {
        put(to,
            Code::encoded(unit.part[0]) | (Code::encoded(unit.part[1]) << 8) | (Code::encoded(unit.part[2]) << 16) |
                (Code::encoded(unit.part[3]) << 24),
            streaming);
    }
};

// f16, kept in order so that the two parts of a complex number stay adjacent.
template <Kind kind>
struct Half : Shape<float, kind, 1, kWidth / 2> {
    using Unit = typename Half::Shape::Unit;
    using Halves = Vector<std::uint16_t, kWidth / 2>;
    using Code = Small<5, 10, 15, Specials::kIeee>;
    // The intrinsics without a mask read an undefined vector, about which GCC warns.
    [[maybe_unused]] static constexpr std::uint16_t kAllLanes = 0xffff;

    static Unit load(const char* from) {
        const Halves halves = get<Halves>(from);
#if REDUCE_WIDTH == 64
        return {{(F32)_mm512_maskz_cvtph_ps(kAllLanes, (__m256i)halves)}};
#elif REDUCE_WIDTH == 32
        return {{(F32)_mm256_cvtph_ps((__m128i)halves)}};
#else
        return {{Code::decoded(__builtin_convertvector(halves, U32))}};
#endif
    }

    static void store(char* to, Unit unit, bool streaming) {
        const F32 value = unit.part[0];
#if REDUCE_WIDTH == 64
        const auto halves = (Halves)_mm512_maskz_cvtps_ph(kAllLanes, (__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif REDUCE_WIDTH == 32
        const auto halves = (Halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
        const auto halves = __builtin_convertvector(Code::encoded(value), Halves);
#endif
        put(to, halves, streaming);
    }
};

}  // namespace
}  // namespace reduce::REDUCE_LEVEL
