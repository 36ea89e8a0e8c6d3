// The norms of add_rms_norm.cu with an output of 8-bit floats (e4m3fn), under a scale of the tensor or one of each row.
//
// DESIGN.md, "An output of 8-bit floats", defines each bit. The norm is rounded to the element type first, so that the
// result is that of the norm and a quantisation after it.

#if HAS(FAMILY_NORM_FP8) || HAS(FAMILY_NORM_NVFP4)
#define SCALED_ARGUMENTS ROW_ARGUMENTS, EACH(const void*) given_scales, EACH(void*) row_scales

constexpr float FP8_LARGEST = 448.0f;
constexpr u32 FP8_NAN = 0x7F;

// Clamps to the largest finite number and rounds to nearest, ties to even; every NaN becomes 0x7F. The format has no
// infinity, a 4-bit exponent with bias 7 and 3 bits of fraction: 2^-6 is its smallest normal number, 2^-9 the smallest.
DEVICE u32 e4m3_of(float value) {
    const u32 bits = bits_of(value), sign = bits >> 24 & 0x80u;
    u32 size = bits & 0x7FFFFFFFu;
    if (size > 0x7F800000u) return FP8_NAN;
    if (size > bits_of(FP8_LARGEST)) size = bits_of(FP8_LARGEST);
    // Below 2^-6 the sum with 2^14, whose last bit is worth 2^-9, rounds as the format does.
    if (size < 0x3C800000u) return sign | (bits_of(add_rn(float_of(size), 16384.0f)) - bits_of(16384.0f));
    // The exponent's bias goes from 127 to 7; a fraction that rounds up to 2 carries into the exponent.
    return sign | (size - (120u << 23) + 0x7FFFFu + (size >> 20 & 1u)) >> 20;
}

// The larger of two sizes; NaN is larger than all numbers. Numbers without a sign have the order of their bits.
DEVICE float larger_size(float a, float b) { return bits_of(a) < bits_of(b) ? b : a; }
DEVICE float size_of(float value) { return float_of(bits_of(value) & 0x7FFFFFFFu); }

#endif

#if HAS(FAMILY_NORM_FP8)
constexpr float FP8_SMALLEST_SCALE = 1.0f / (448.0f * 512.0f);

// The largest lane of a group. All threads of a warp compute it.
DEVICE float largest_of_group(const float* lanes) {
    float largest = 0.0f;
#ifdef GC_HOST_BUILD
    for (u32 l = 0; l < GROUP_LANES; ++l) largest = larger_size(largest, lanes[l]);
#else
#pragma unroll
    for (u32 k = 0; k < GROUP_LANES / 32; ++k) largest = larger_size(largest, lanes[threadIdx.x % 32 + 32 * k]);
#pragma unroll
    for (u32 half = 16; half; half /= 2) largest = larger_size(largest, __shfl_xor_sync(0xFFFFFFFFu, largest, half));
#endif
    return largest;
}

// given: the scale of the tensor, or null; then each row gets its own, which `scales` receives.
struct Fp8Output {
    const float* given;
    float* scales;
};

// Returns the scale of a row to every thread of the cluster, which call it together.
DEVICE float scale_of_row(const Share& share, const Rows& t, u64 row, float factor, const Kept& kept, NormShared& shared,
                          u32 turn) {
    for (u32 k = threadIdx.x; k < share.lanes; k += blockDim.x) {
        float largest = 0.0f;
        for (u64 i = lane_of(share, k); i < t.vectors; i += NORM_LANES) {
            float values[ELEMENTS];
            unpack(normalised(t, row, i, factor, kept), values);
#pragma unroll
            for (u32 e = 0; e < ELEMENTS; ++e) largest = larger_size(largest, size_of(values[e]));
        }
        // The lanes may be overwritten: before this, every thread has waited for the sums of all groups.
        shared.lanes[k] = largest;
    }
    const float* groups = exchange_groups(share, shared, turn, largest_of_group);
    const float scale =
        divide_rn(larger_size(larger_size(groups[0], groups[1]), larger_size(groups[2], groups[3])), FP8_LARGEST);
    return scale < FP8_SMALLEST_SCALE ? FP8_SMALLEST_SCALE : scale;
}

DEVICE void store_fp8_row(const Share& share, const Rows& t, u64 row, float squares, const Kept& kept, NormShared& shared,
                          u32& turn, const Fp8Output& output) {
    const float factor = factor_of(t, squares);
    float scale;
    if (output.given) {
        scale = *output.given;
    } else {
        scale = scale_of_row(share, t, row, factor, kept, shared, turn++);
        if (share.block == 0 && threadIdx.x == 0) output.scales[row] = scale;
    }
    for (u32 k = threadIdx.x; k < share.lanes; k += blockDim.x) {
        for (u64 i = lane_of(share, k); i < t.vectors; i += NORM_LANES) {
            float values[ELEMENTS];
            unpack(normalised(t, row, i, factor, kept), values);
            u32 word[ELEMENTS / 4] = {};
#pragma unroll
            for (u32 e = 0; e < ELEMENTS; ++e) word[e / 4] |= e4m3_of(divide_rn(values[e], scale)) << e % 4 * 8;
            char* at = t.out + (row * t.vectors + i) * ELEMENTS;
#if DTYPE == 0
            *reinterpret_cast<u32*>(at) = word[0];
#else
            *reinterpret_cast<u64*>(at) = word[0] | static_cast<u64>(word[1]) << 32;
#endif
        }
    }
}

#define STORE_FP8_ROW                                                                                                  \
    const Fp8Output output = {static_cast<const float*>(OWN(given_scales)), static_cast<float*>(OWN(row_scales))};     \
    const auto store = [&](const Share& share, const Rows& t, u64 row, float squares, const Kept& kept,                \
                           NormShared& shared, u32& turn) { store_fp8_row(share, t, row, squares, kept, shared, turn, output); }

// As the kernels of add_rms_norm.cu, but out has one byte for each element.
KERNEL push_add_rms_norm_fp8(PARAMS, SCALED_ARGUMENTS) {
    OWN_PARAMS;
    SHARED(NormShared, shared);
    ROWS;
    STORE_FP8_ROW;
    push_norm(p, PUSH_ADD_RMS_NORM_FP8, t, shared, store);
}

// residual_out is not residual: it keeps the sums of this rank's own vectors before the residual is read.
KERNEL push_two_shot_add_rms_norm_fp8(PARAMS, SCALED_ARGUMENTS) {
    OWN_PARAMS;
    SHARED(NormShared, shared);
    ROWS;
    STORE_FP8_ROW;
    push_two_shot_norm(p, PUSH_TWO_SHOT_ADD_RMS_NORM_FP8, t, t.residual_out, shared, store);
}

KERNEL add_rms_norm_fp8(SCALED_ARGUMENTS) {
    SHARED(NormShared, shared);
    ROWS;
    STORE_FP8_ROW;
    local_norm(t, shared, store);
}
#endif
