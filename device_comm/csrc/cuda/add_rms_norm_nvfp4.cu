// The norms of add_rms_norm.cu with an output of 4-bit floats (e2m1) and an 8-bit scale (e4m3fn) for each 16 of them.
//
// DESIGN.md, "An output of 4-bit floats", defines each bit.

#if HAS(FAMILY_NORM_NVFP4)
constexpr u32 BLOCK_ELEMENTS = 16;  // that share a scale
constexpr u32 BLOCK_VECTORS = BLOCK_ELEMENTS / ELEMENTS;
constexpr float FP4_LARGEST = 6.0f;
constexpr u32 FP4_NAN = 7;  // the format has no NaN: its largest number

// Rounds to nearest, ties to even, and to 6 at most. The sizes are 0, 0.5, 1, 1.5, 2, 3, 4 and 6.
DEVICE u32 e2m1_of(float value) {
    const float size = size_of(value);
    if (size != size) return FP4_NAN;
    const u32 code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) + (size >= 3.5f) +
                     (size > 5.0f);
    return bits_of(value) >> 28 & 8u | code;
}

DEVICE float float_of_e4m3(u32 bits) {
    const u32 size = bits & 0x7Fu;
    if (size == FP8_NAN) return float_of(0x7FFFFFFFu);
    // Below 2^-6 the fraction counts multiples of 2^-9.
    const float value = size < 8 ? multiply_rn(static_cast<float>(size), 1.0f / 512.0f) : float_of((size << 20) + (120u << 23));
    return float_of(bits_of(value) | (bits & 0x80u) << 24);
}

// Quantises vectors i, i + 1, ... of a row, which share a scale. Returns the codes, the first one in the lowest bits.
DEVICE u64 quantised_block(const Rows& t, u64 row, u64 i, float factor, const Kept& kept, float global_scale, u32& scale) {
    float values[BLOCK_VECTORS][ELEMENTS], largest = 0.0f;
#pragma unroll
    for (u32 v = 0; v < BLOCK_VECTORS; ++v) {
        unpack(normalised(t, row, i + v, factor, kept), values[v]);
#pragma unroll
        for (u32 e = 0; e < ELEMENTS; ++e) largest = larger_size(largest, size_of(values[v][e]));
    }
    scale = e4m3_of(multiply_rn(divide_rn(largest, FP4_LARGEST), global_scale));
    const float divisor = float_of_e4m3(scale), multiplier = divisor == 0.0f ? 0.0f : divide_rn(global_scale, divisor);
    u64 codes = 0;
#pragma unroll
    for (u32 v = 0; v < BLOCK_VECTORS; ++v) {
#pragma unroll
        for (u32 e = 0; e < ELEMENTS; ++e) {
            const u64 code = e2m1_of(multiply_rn(values[v][e], multiplier));
            codes |= code << 4 * (v * ELEMENTS + e);
        }
    }
    return codes;
}

// One thread quantises a block of elements. Its other vectors were added by the next threads of the same block of threads,
// as a group has a multiple of BLOCK_VECTORS lanes; the barrier in sum_of_row orders their stores to residual_out.
DEVICE void store_nvfp4_row(const Share& share, const Rows& t, u64 row, float squares, const Kept& kept, float global_scale,
                            unsigned char* scales) {
    const float factor = factor_of(t, squares);
    for (u32 k = threadIdx.x; k < share.lanes; k += blockDim.x) {
        for (u64 i = lane_of(share, k); i < t.vectors; i += NORM_LANES) {
            if (i % BLOCK_VECTORS) continue;
            u32 scale;
            const u64 at = (row * t.vectors + i) / BLOCK_VECTORS;
            const u64 codes = quantised_block(t, row, i, factor, kept, global_scale, scale);
            *reinterpret_cast<u64*>(t.out + at * (BLOCK_ELEMENTS / 2)) = codes;
            scales[at] = static_cast<unsigned char>(scale);
        }
    }
}

#define STORE_NVFP4_ROW                                                                                                \
    const float* const global_scale = static_cast<const float*>(OWN(given_scales));                                    \
    unsigned char* const scales = static_cast<unsigned char*>(OWN(row_scales));                                        \
    const auto store = [&](const Share& share, const Rows& t, u64 row, float squares, const Kept& kept, NormShared&,   \
                           u32&) { store_nvfp4_row(share, t, row, squares, kept, *global_scale, scales); }

// hidden: a multiple of 16. given_scales: the scale of the tensor. row_scales: one byte for each block of a row.
KERNEL push_add_rms_norm_nvfp4(PARAMS, SCALED_ARGUMENTS) {
    OWN_PARAMS;
    SHARED(NormShared, shared);
    ROWS;
    STORE_NVFP4_ROW;
    push_norm(p, PUSH_ADD_RMS_NORM_NVFP4, t, shared, store);
}

// residual_out is not residual, as for 8 bits.
KERNEL push_two_shot_add_rms_norm_nvfp4(PARAMS, SCALED_ARGUMENTS) {
    OWN_PARAMS;
    SHARED(NormShared, shared);
    ROWS;
    STORE_NVFP4_ROW;
    push_two_shot_norm(p, PUSH_TWO_SHOT_ADD_RMS_NORM_NVFP4, t, t.residual_out, shared, store);
}

KERNEL add_rms_norm_nvfp4(SCALED_ARGUMENTS) {
    SHARED(NormShared, shared);
    ROWS;
    STORE_NVFP4_ROW;
    local_norm(t, shared, store);
}
#endif
