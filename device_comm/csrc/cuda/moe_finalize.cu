// The weighted sum of each token's experts, alone and while it is pushed to the peers.
//
// DESIGN.md, "Finalize and all-reduce", defines each bit.

#if HAS(FAMILY_FINALIZE)
struct Experts {
    const char *outputs, *shared;  // shared: null, or an addend for each token
    const int* rows;               // [tokens, k]: rows of `outputs`, negative where a token has no expert here
    const float* weights;          // [tokens, k]
    u32 tokens, vectors, k, count;  // vectors: of a token; count: rows of `outputs`
};

// Experts whose vectors a thread loads before it adds them, so that the loads overlap.
constexpr u32 EXPERTS_AHEAD = 4;

// Vector i of the sums of all tokens. A row number beyond the last row gives NaN, and reads no memory.
DEVICE Vector finalized(const Experts& t, u64 i) {
    const u64 token = i / t.vectors, place = i % t.vectors;
    float total[ELEMENTS] = {}, values[ELEMENTS];
    for (u32 first = 0; first < t.k; first += EXPERTS_AHEAD) {
        int row[EXPERTS_AHEAD];
        float weight[EXPERTS_AHEAD];
        Vector v[EXPERTS_AHEAD];
#pragma unroll
        for (u32 j = 0; j < EXPERTS_AHEAD; ++j) {
            const u64 at = token * t.k + first + j;
            row[j] = first + j < t.k ? t.rows[at] : -1;
            weight[j] = row[j] < 0 ? 0.0f : t.weights[at];
        }
#pragma unroll
        for (u32 j = 0; j < EXPERTS_AHEAD; ++j) {
            v[j] = Vector();
            if (row[j] < 0) continue;
            if (static_cast<u32>(row[j]) < t.count) {
                v[j] = ld_vector(t.outputs + (static_cast<u64>(row[j]) * t.vectors + place) * 16);
            } else {
                weight[j] = float_of(0x7FFFFFFFu);
            }
        }
#pragma unroll
        for (u32 j = 0; j < EXPERTS_AHEAD; ++j) {
            if (row[j] < 0) continue;
            unpack(v[j], values);
#pragma unroll
            for (u32 e = 0; e < ELEMENTS; ++e) total[e] = add_rn(total[e], multiply_rn(weight[j], values[e]));
        }
    }
    if (t.shared) {
        unpack(ld_vector(t.shared + i * 16), values);
#pragma unroll
        for (u32 e = 0; e < ELEMENTS; ++e) total[e] = add_rn(total[e], values[e]);
    }
    return pack(total);
}

#define EXPERT_ARGUMENTS                                                                                          \
    EACH(const void*) outputs_of_experts, EACH(const void*) rows_of_tokens, EACH(const void*) weights_of_tokens,  \
        EACH(const void*) addends, EACH(void*) outputs, u32 tokens, u32 hidden, u32 k, u32 count
#define EXPERTS                                                                                                   \
    const Experts t = {static_cast<const char*>(OWN(outputs_of_experts)), static_cast<const char*>(OWN(addends)), \
                       static_cast<const int*>(OWN(rows_of_tokens)),                                              \
                       static_cast<const float*>(OWN(weights_of_tokens)), tokens, hidden / ELEMENTS, k, count};   \
    char* out = static_cast<char*>(OWN(outputs));                                                                 \
    const u64 vectors = static_cast<u64>(t.tokens) * t.vectors

// hidden: a multiple of a vector's elements. Tensors of elements are aligned to 16 bytes. out must be none of
// the other tensors, because it keeps this rank's sums until those of the peers have come.
KERNEL push_moe_finalize(PARAMS, EXPERT_ARGUMENTS) {
    OWN_PARAMS;
    Call call = enter_push(p, PUSH_MOE_FINALIZE);
    EXPERTS;
    const u64 first = thread_index(), stride = vectors * 16, slot = call.arena + p.rank * stride;
    for (u64 i = first; call.alive && i < vectors; i += all_threads()) {
        const Vector own = finalized(t, i);
        push_to_all(p, slot + i * 16, own);
        st_vector(out + i * 16, own);
    }
    for (u64 i = first; call.alive && i < vectors; i += all_threads()) {
        Vector received[WORLD_SIZE];
        const Vector own = ld_vector(out + i * 16);
        if (!receive(p, call, call.own + call.arena + i * 16, stride, own, received)) break;
        st_vector(out + i * 16, sum_in_rank_order(received));
    }
    leave_push(p, call);
}

KERNEL moe_finalize(EXPERT_ARGUMENTS) {
    wait_for_the_stream();
    let_the_next_kernel_begin();
    EXPERTS;
    for (u64 i = thread_index(); i < vectors; i += all_threads()) st_vector(out + i * 16, finalized(t, i));
}
#endif
