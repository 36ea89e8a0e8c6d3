// The kernels of one level: the operations on lanes, the loop over the elements, and the table of all kernels.
//
// Each level's source file includes this once, after it has defined the three macros for reduce_vectors.hpp.

#pragma once

#include "reduce_formats.hpp"

namespace reduce::REDUCE_LEVEL {
namespace {

template <typename V>
inline V combined_complex(Op op, V sofar, V later) {
    using Lane = std::remove_cvref_t<decltype(sofar[0])>;
    using Word = std::conditional_t<sizeof(Lane) == 4, std::uint32_t, std::uint64_t>;
    using Words = Vector<Word>;
    const Words even = (lane_numbers<Words>(std::make_index_sequence<kLanes<V>>()) & 1) ^ 1;
    const Words minus = even << (8 * sizeof(Word) - 1);  // the sign of each real part
    if (op == Op::kProduct) {
        const V cross = multiply(duplicated<1>(sofar), swapped(later));
        return add(multiply(duplicated<0>(sofar), later), (V)((Words)cross ^ minus));
    }
    // torch adds 1 times `later` as a complex product: an infinite part makes the other part NaN, and -0-0i gives 0-0i.
    const V nothing = multiply(swapped(later), V{});
    return add(sofar, add(later, (V)((Words)nothing ^ minus)));
}

template <Kind kind, Op op, typename V>
inline V combined(V sofar, V later) {
    constexpr bool sums = op == Op::kSum || op == Op::kMean;
    if constexpr (kind == Kind::kComplex) {
        return combined_complex(op, sofar, later);
    } else if constexpr (kind == Kind::kBool) {
        return sums || op == Op::kMax ? (sofar | later) : (sofar & later);
    } else if constexpr (op == Op::kMin || op == Op::kMax) {
        const auto wins = op == Op::kMin ? later < sofar : later > sofar;
        if constexpr (kind == Kind::kFloat) return wins | (later != later) ? later : sofar;
        return wins ? later : sofar;
    } else if constexpr (kind == Kind::kFloat) {
        return sums ? add(sofar, later) : multiply(sofar, later);
    } else {  // unsigned, so that wrap-around is defined; the bits are the same
        using Bits = Vector<std::make_unsigned_t<std::remove_cvref_t<decltype(sofar[0])>>>;
        return (V)(sums ? (Bits)sofar + (Bits)later : (Bits)sofar * (Bits)later);
    }
}

// The number of units that make four vectors, enough to hide the latency of an addition.
template <typename Format>
inline constexpr std::size_t kUnits = 4 / Format::kParts;

// Combines `unit` with the unit of a later rank.
template <typename Format, Op op>
inline void combine(typename Format::Unit& unit, const typename Format::Unit& later) {
    for (std::size_t p = 0; p < Format::kParts; ++p) {
        unit.part[p] = combined<Format::kKind, op>(unit.part[p], later.part[p]);
    }
}

// Stores the combined unit of all ranks; a mean is divided here.
template <typename Format, Op op>
inline void finish(char* to, typename Format::Unit unit, std::size_t ranks, bool streaming) {
    if constexpr (op == Op::kMean) {
        using Lane = typename Format::Lane;
        const Vector<Lane> count = Vector<Lane>{} + static_cast<Lane>(ranks);
        for (std::size_t p = 0; p < Format::kParts; ++p) unit.part[p] /= count;
    }
    Format::store(to, unit, streaming);
}

// Combines `units` units at `offset` of each input into `to`. Everything is loaded before anything is stored, so `to` may
// be in an input.
template <typename Format, Op op, std::size_t units>
inline void step(char* to, const void* const* inputs, std::size_t ranks, std::size_t offset, bool streaming) {
    typename Format::Unit sofar[units];
    const char* from = static_cast<const char*>(inputs[0]) + offset;
    for (std::size_t u = 0; u < units; ++u) sofar[u] = Format::load(from + u * Format::kBytes);
    for (std::size_t rank = 1; rank < ranks; ++rank) {
        from = static_cast<const char*>(inputs[rank]) + offset;
        for (std::size_t u = 0; u < units; ++u) combine<Format, op>(sofar[u], Format::load(from + u * Format::kBytes));
    }
    for (std::size_t u = 0; u < units; ++u) finish<Format, op>(to + u * Format::kBytes, sofar[u], ranks, streaming);
}

// The same for fewer bytes than a unit, in a buffer of one unit. It uses the same instructions as whole units, so that an
// element's result does not depend on its position.
template <typename Format, Op op>
void part(char* out, const void* const* inputs, std::size_t ranks, std::size_t offset, std::size_t bytes) {
    alignas(kWidth) char sofar[Format::kBytes]{};
    alignas(kWidth) char later[Format::kBytes]{};
    const auto lanes = [&](std::size_t rank, char* into) {
        __builtin_memcpy(into, static_cast<const char*>(inputs[rank]) + offset, bytes);
        return Format::load(into);
    };
    typename Format::Unit total = lanes(0, sofar);
    for (std::size_t rank = 1; rank < ranks; ++rank) combine<Format, op>(total, lanes(rank, later));
    finish<Format, op>(sofar, total, ranks, false);
    __builtin_memcpy(out + offset, sofar, bytes);
}

// Inline everything: compilers prefer a call per block for the larger formats, which sets up its constants each time and
// made bf16 and f16 sums take 1.7 times as long.
template <typename Format, Op op>
[[gnu::flatten]] void run(char* out, const void* const* inputs, std::size_t ranks, std::size_t bytes, bool streaming) {
    constexpr std::size_t block = kUnits<Format> * Format::kBytes;
    std::size_t offset = 0;
    if (streaming) {  // up to the first 64-byte line, from which on whole lines are written
        const std::size_t head = -reinterpret_cast<std::uintptr_t>(out) % 64;
        for (std::size_t size; offset < head && offset < bytes; offset += size) {
            size = head - offset < Format::kBytes ? head - offset : Format::kBytes;
            if (size > bytes - offset) size = bytes - offset;
            part<Format, op>(out, inputs, ranks, offset, size);
        }
    }
    for (; bytes - offset >= block; offset += block) {
        step<Format, op, kUnits<Format>>(out + offset, inputs, ranks, offset, streaming);
    }
    for (; bytes - offset >= Format::kBytes; offset += Format::kBytes) {
        step<Format, op, 1>(out + offset, inputs, ranks, offset, streaming);
    }
    if (offset < bytes) part<Format, op>(out, inputs, ranks, offset, bytes - offset);
    if (streaming) end_of_streaming();
}

template <typename Format, Op op, std::size_t element, bool streaming>
void entry(void* out, const void* const* inputs, std::size_t ranks, std::size_t elements) {
    // A line begins between two elements only if `out` is aligned to its element.
    const bool can_stream = streaming && reinterpret_cast<std::uintptr_t>(out) % element == 0;
    run<Format, op>(static_cast<char*>(out), inputs, ranks, elements * element, can_stream);
}

template <typename Format, std::size_t element>
constexpr void fill(Table& table, Type type) {
    const auto column = static_cast<std::size_t>(type);
    table.element_bytes[column] = element;
    const auto put_one = [&]<Op op>() {
        const auto row = static_cast<std::size_t>(op);
        table.kernels[0][row][column] = entry<Format, op, element, false>;
        table.kernels[1][row][column] = entry<Format, op, element, true>;
    };
    constexpr bool divides = Format::kKind == Kind::kFloat || Format::kKind == Kind::kComplex;
    put_one.template operator()<Op::kSum>();
    put_one.template operator()<Op::kProduct>();
    if constexpr (divides) put_one.template operator()<Op::kMean>();
    if constexpr (Format::kKind != Kind::kComplex) {
        put_one.template operator()<Op::kMin>();
        put_one.template operator()<Op::kMax>();
    }
}

constexpr Table filled() {
    Table table{REDUCE_NAME, {}, {}};
    fill<Plain<float, Kind::kFloat>, 4>(table, Type::f32);
    fill<Plain<double, Kind::kFloat>, 8>(table, Type::f64);
    fill<Half<Kind::kFloat>, 2>(table, Type::f16);
    fill<Bfloat16, 2>(table, Type::bf16);
    fill<Byte<Small<4, 3, 7, Specials::kFinite>>, 1>(table, Type::f8e4m3fn);
    fill<Byte<Small<5, 2, 15, Specials::kIeee>>, 1>(table, Type::f8e5m2);
    fill<Byte<Small<4, 3, 8, Specials::kUnsigned>>, 1>(table, Type::f8e4m3fnuz);
    fill<Byte<Small<5, 2, 16, Specials::kUnsigned>>, 1>(table, Type::f8e5m2fnuz);
    fill<Plain<std::int8_t, Kind::kInteger>, 1>(table, Type::i8);
    fill<Plain<std::uint8_t, Kind::kInteger>, 1>(table, Type::u8);
    fill<Plain<std::int16_t, Kind::kInteger>, 2>(table, Type::i16);
    fill<Plain<std::uint16_t, Kind::kInteger>, 2>(table, Type::u16);
    fill<Plain<std::int32_t, Kind::kInteger>, 4>(table, Type::i32);
    fill<Plain<std::uint32_t, Kind::kInteger>, 4>(table, Type::u32);
    fill<Plain<std::int64_t, Kind::kInteger>, 8>(table, Type::i64);
    fill<Bool, 1>(table, Type::boolean);
    fill<Half<Kind::kComplex>, 4>(table, Type::c32);
    fill<Plain<float, Kind::kComplex>, 8>(table, Type::c64);
    fill<Plain<double, Kind::kComplex>, 16>(table, Type::c128);
    return table;
}

}  // namespace

extern constinit const Table kTable = filled();

}  // namespace reduce::REDUCE_LEVEL
