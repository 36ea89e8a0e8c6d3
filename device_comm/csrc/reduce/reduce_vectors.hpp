// Vectors of one level's width, and the few operations that the compiler's vector extension lacks.
//
// One source file per level includes this; it defines REDUCE_LEVEL, REDUCE_NAME and REDUCE_WIDTH (bytes).

#pragma once

#include "reduce_table.hpp"

#ifndef __has_builtin
#define __has_builtin(name) 0
#endif

namespace reduce::REDUCE_LEVEL {
namespace {

inline constexpr std::size_t kWidth = REDUCE_WIDTH;

template <typename Lane, std::size_t bytes>
struct VectorOf {
    typedef Lane type __attribute__((vector_size(bytes)));
};
template <typename Lane, std::size_t bytes = kWidth>
using Vector = typename VectorOf<Lane, bytes>::type;

using F32 = Vector<float>;
using U32 = Vector<std::uint32_t>;
using I32 = Vector<std::int32_t>;

template <typename V>
inline V get(const char* from) {
    V value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
}

// Stores a vector. With `streaming` the store bypasses the caches, and `to` must be aligned to the vector.
template <typename V>
inline void put(char* to, V value, [[maybe_unused]] bool streaming) {
#if defined(__x86_64__)
    if (streaming) {
#if REDUCE_WIDTH >= 64
        if constexpr (sizeof(V) == 64) return _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)value);
#endif
#if REDUCE_WIDTH >= 32
        if constexpr (sizeof(V) == 32) return _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)value);
#endif
        if constexpr (sizeof(V) == 16) return _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)value);
        if constexpr (sizeof(V) == 8) return _mm_stream_si64(reinterpret_cast<long long*>(to), (long long)value);
    }
#endif
    __builtin_memcpy(to, &value, sizeof value);
}

// Whether any lane of either vector is NaN.
inline bool has_nan(F32 one, F32 other) {
#if defined(__x86_64__) && REDUCE_WIDTH >= 64
    return _mm512_cmp_ps_mask((__m512)one, (__m512)other, _CMP_UNORD_Q) != 0;
#elif defined(__x86_64__) && REDUCE_WIDTH >= 32
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)one, (__m256)other, _CMP_UNORD_Q)) != 0;
#elif defined(__x86_64__)
    return _mm_movemask_ps(_mm_cmpunord_ps((__m128)one, (__m128)other)) != 0;
#else
    const I32 found = (one != one) | (other != other);
    std::int32_t any = 0;
    for (std::size_t lane = 0; lane < sizeof(I32) / sizeof(any); ++lane) any |= found[lane];
    return any != 0;
#endif
}

// `value` plus 1 in the lanes where `of` has `bit` set.
inline U32 add_odd(U32 value, U32 of, std::uint32_t bit) {
#if defined(__x86_64__) && REDUCE_WIDTH >= 64
    const __mmask16 odd = _mm512_test_epi32_mask((__m512i)of, _mm512_set1_epi32(static_cast<int>(bit)));
    return (U32)_mm512_mask_add_epi32((__m512i)value, odd, (__m512i)value, _mm512_set1_epi32(1));
#else
    return value - (U32)((of & bit) != 0);  // a true lane is -1
#endif
}

inline void end_of_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// Sum and product of floating-point vectors. For two NaNs the processor returns its first operand, and the compiler may
// swap the operands of `+` and `*`. Explicit instructions always return `later`. They also keep the compiler from
// contracting a product and a sum into one rounding.
#if defined(__x86_64__)
#if REDUCE_WIDTH > 16
#define REDUCE_FLOAT_INSTRUCTION(name)                                                       \
    V result;                                                                                \
    if constexpr (sizeof(sofar[0]) == 4) {                                                   \
        asm("v" name "ps %2, %1, %0" : "=v"(result) : "v"(later), "v"(sofar));               \
    } else {                                                                                 \
        asm("v" name "pd %2, %1, %0" : "=v"(result) : "v"(later), "v"(sofar));               \
    }                                                                                        \
    return result
#else
#define REDUCE_FLOAT_INSTRUCTION(name)                                                       \
    if constexpr (sizeof(sofar[0]) == 4) {                                                   \
        asm(name "ps %1, %0" : "+x"(later) : "x"(sofar));                                    \
    } else {                                                                                 \
        asm(name "pd %1, %0" : "+x"(later) : "x"(sofar));                                    \
    }                                                                                        \
    return later
#endif

template <typename V>
inline V add(V sofar, V later) {
    REDUCE_FLOAT_INSTRUCTION("add");
}

template <typename V>
inline V multiply(V sofar, V later) {
    REDUCE_FLOAT_INSTRUCTION("mul");
}
#undef REDUCE_FLOAT_INSTRUCTION
#else
template <typename V>
inline V add(V sofar, V later) {
    return later + sofar;
}

template <typename V>
inline V multiply(V sofar, V later) {
    V product = later * sofar;
#if defined(__aarch64__)
    asm("" : "+w"(product));
#endif
    return product;
}
#endif

// For lanes (a b c d), duplicated<0> is (a a c c), duplicated<1> is (b b d d), and swapped is (b a d c).
template <std::size_t odd, typename V, std::size_t... i>
inline V pairwise(V value, std::index_sequence<i...>) {
    constexpr auto source = [](std::size_t lane) { return odd == 2 ? lane ^ 1 : (lane & ~std::size_t{1}) | odd; };
#if __has_builtin(__builtin_shufflevector)
    return __builtin_shufflevector(value, value, source(i)...);
#else
    return V{value[source(i)]...};
#endif
}

template <typename V>
inline constexpr std::size_t kLanes = sizeof(V) / sizeof(std::declval<V>()[0]);

template <typename V>
inline V swapped(V value) {
    return pairwise<2>(value, std::make_index_sequence<kLanes<V>>());
}

template <std::size_t odd, typename V>
inline V duplicated(V value) {
    return pairwise<odd>(value, std::make_index_sequence<kLanes<V>>());
}

template <typename V, std::size_t... i>
inline V lane_numbers(std::index_sequence<i...>) {
    return V{static_cast<std::remove_cvref_t<decltype(std::declval<V>()[0])>>(i)...};
}

}  // namespace
}  // namespace reduce::REDUCE_LEVEL
