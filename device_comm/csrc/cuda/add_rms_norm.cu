// residual + x, then RMSNorm; alone, and fused behind a one-shot push all-reduce. Both give the same bits.
//
// The order of the norm's sum is a contract (DESIGN.md, "The order of the norm's sum"): of 256 lanes, lane l adds the
// squares of the elements of vectors l, l + 256, ... in order, and a tree adds the lanes. The order does not depend on
// the grid or the number of threads. 256 threads are the fastest, with one lane each.

#if HAS(FAMILY_NORM)
// Adds lanes 0 and 128, 1 and 129, ...; then 0 and 64, ...; finally 0 and 1. Every thread computes the whole tree.
DEVICE float sum_of_lanes(const float* lanes) {
#ifdef GC_HOST_BUILD
    float part[NORM_LANES];
    for (u32 l = 0; l < NORM_LANES; ++l) part[l] = lanes[l];
    for (u32 half = NORM_LANES / 2; half; half /= 2) {
        for (u32 l = 0; l < half; ++l) part[l] = add_rn(part[l], part[l + half]);
    }
    return part[0];
#else
    const u32 l = threadIdx.x % 32;
    float part[8];
#pragma unroll
    for (u32 k = 0; k < 8; ++k) part[k] = lanes[l + 32 * k];
#pragma unroll
    for (u32 half = 4; half; half /= 2) {
#pragma unroll
        for (u32 k = 0; k < half; ++k) part[k] = add_rn(part[k], part[k + half]);
    }
    // Addition commutes, so both lanes of a pair get the same bits.
#pragma unroll
    for (u32 half = 16; half; half /= 2) part[0] = add_rn(part[0], __shfl_xor_sync(0xFFFFFFFFu, part[0], half));
    return part[0];
#endif
}

// Adds vector i of the residual, stores the rounded sum, and adds its squares to `squares`, element by element.
DEVICE void add_residual(const Vector& x, const char* residual, char* residual_out, u64 i, float& squares) {
    float values[ELEMENTS], addend[ELEMENTS];
    unpack(x, values);
    unpack(ld_vector(residual + i * 16), addend);
#pragma unroll
    for (u32 e = 0; e < ELEMENTS; ++e) values[e] = add_rn(values[e], addend[e]);
    const Vector sum = pack(values);
    st_vector(residual_out + i * 16, sum);
    unpack(sum, values);
#pragma unroll
    for (u32 e = 0; e < ELEMENTS; ++e) squares = add_rn(squares, multiply_rn(values[e], values[e]));
}

// The second pass over a row: each thread reads the vectors that it wrote itself.
DEVICE void scale_row(const char* residual_out, const char* weight, char* out, u64 row, u32 hidden, float squares,
                      float eps) {
    const u32 row_vectors = hidden / ELEMENTS;
    const u64 row_bytes = static_cast<u64>(hidden) * ELEMENT_BYTES;
    const float mean = divide_rn(squares, static_cast<float>(hidden));
    const float scale = divide_rn(1.0f, square_root_rn(add_rn(mean, eps)));
    for (u32 lane = threadIdx.x; lane < NORM_LANES; lane += blockDim.x) {
        for (u32 i = lane; i < row_vectors; i += NORM_LANES) {
            float values[ELEMENTS], factor[ELEMENTS];
            unpack(ld_vector(residual_out + row * row_bytes + i * 16ull), values);
            unpack(ld_vector(weight + i * 16ull), factor);
#pragma unroll
            for (u32 e = 0; e < ELEMENTS; ++e) {
                values[e] = multiply_rn(multiply_rn(values[e], scale), factor[e]);
            }
            st_vector(out + row * row_bytes + i * 16ull, pack(values));
        }
    }
}

// hidden: a multiple of a vector's elements. All tensors are aligned to 16 bytes. residual_out may be residual, and out
// may be in. A block handles one row at a time.
KERNEL push_add_rms_norm(PARAMS, EACH(const void*) inputs, EACH(const void*) residuals, EACH(const void*) weights,
                         EACH(void*) outputs, EACH(void*) residual_outputs, u32 rows, u32 hidden, float eps) {
    OWN_PARAMS;
    SHARED_FLOATS(lanes);
    Call call = enter_push(p, PUSH_ADD_RMS_NORM);
    const char* in = static_cast<const char*>(OWN(inputs));
    const char* residual = static_cast<const char*>(OWN(residuals));
    char* residual_out = static_cast<char*>(OWN(residual_outputs));
    const u64 row_vectors = hidden / ELEMENTS, stride = rows * row_vectors * 16, bytes = stride;
    for (u64 row = blockIdx.x; call.alive && row < rows; row += gridDim.x) {
        for (u32 lane = threadIdx.x; lane < NORM_LANES; lane += blockDim.x) {
            push_range(p, call.arena + p.rank * stride, in, bytes, row * row_vectors + lane,
                       (row + 1) * row_vectors, NORM_LANES);
        }
    }
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        for (u32 lane = threadIdx.x; lane < NORM_LANES; lane += blockDim.x) {
            float squares = 0.0f;
            for (u64 i = row * row_vectors + lane; call.alive && i < (row + 1) * row_vectors; i += NORM_LANES) {
                Vector received[WORLD_SIZE];
                const Vector own = ld_vector(in + i * 16);
                if (!receive(p, call, call.own + call.arena + i * 16, stride, own, received)) break;
                add_residual(sum_in_rank_order(received), residual, residual_out, i, squares);
            }
            lanes[lane] = squares;
        }
        __syncthreads();
        const float squares = sum_of_lanes(lanes);
        scale_row(residual_out, static_cast<const char*>(OWN(weights)), static_cast<char*>(OWN(outputs)), row, hidden,
                  squares, eps);
        __syncthreads();
    }
    leave_push(p, call);
}

KERNEL add_rms_norm(EACH(const void*) inputs, EACH(const void*) residuals, EACH(const void*) weights,
                    EACH(void*) outputs, EACH(void*) residual_outputs, u32 rows, u32 hidden, float eps) {
    SHARED_FLOATS(lanes);
    wait_for_the_stream();
    const char* in = static_cast<const char*>(OWN(inputs));
    const char* residual = static_cast<const char*>(OWN(residuals));
    char* residual_out = static_cast<char*>(OWN(residual_outputs));
    const u64 row_vectors = hidden / ELEMENTS;
    for (u64 row = blockIdx.x; row < rows; row += gridDim.x) {
        for (u32 lane = threadIdx.x; lane < NORM_LANES; lane += blockDim.x) {
            float squares = 0.0f;
            for (u64 i = row * row_vectors + lane; i < (row + 1) * row_vectors; i += NORM_LANES) {
                add_residual(ld_vector(in + i * 16), residual, residual_out, i, squares);
            }
            lanes[lane] = squares;
        }
        __syncthreads();
        const float squares = sum_of_lanes(lanes);
        scale_row(residual_out, static_cast<const char*>(OWN(weights)), static_cast<char*>(OWN(outputs)), row, hidden,
                  squares, eps);
        __syncthreads();
    }
}
#endif
