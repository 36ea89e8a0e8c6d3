// All-gather of large parts: each rank copies its part into a staging area that the others read. A barrier
// of blocks (all_reduce.cu; DESIGN.md, "Pull") replaces push_all_gather's flags, which double the bytes.

#if HAS(FAMILY_SHARDS)
// Vector i of a part of `bytes` bytes, padded with zeros. `aligned`: base and bytes are multiples of 16.
DEVICE Vector load_bytes(const unsigned char* base, u64 i, u64 bytes, bool aligned) {
    if (aligned) return ld_vector(base + i * 16);
    Vector v = {};
#pragma unroll
    for (u32 b = 0; b < 16; ++b) {
        if (i * 16 + b < bytes) v.word[b / 4] |= static_cast<u32>(base[i * 16 + b]) << b % 4 * 8;
    }
    return v;
}

DEVICE void store_bytes(unsigned char* base, u64 i, u64 bytes, bool aligned, const Vector& v) {
    if (aligned) {
        st_vector(base + i * 16, v);
        return;
    }
#pragma unroll
    for (u32 b = 0; b < 16; ++b) {
        if (i * 16 + b < bytes) base[i * 16 + b] = static_cast<unsigned char>(v.word[b / 4] >> b % 4 * 8);
    }
}

// bytes: size of each rank's part, at least 1. out: the parts in rank order. Any alignment and size; fast if in, out and
// bytes are multiples of 16. in may be this rank's part of out. Bits are moved unchanged.
KERNEL staged_all_gather(PARAMS, EACH(const void*) inputs, EACH(void*) outputs, u64 bytes) {
    OWN_PARAMS;
    Call call = enter_pull(p, STAGED_ALL_GATHER);
    const unsigned char* in = static_cast<const unsigned char*>(OWN(inputs));
    unsigned char* out = static_cast<unsigned char*>(OWN(outputs));
    const u64 vectors = vectors_of(bytes), staging = FLAGS_BYTES + 2 * p.arena_bytes;
    const bool aligned = (bytes | reinterpret_cast<u64>(in) | reinterpret_cast<u64>(out)) % 16 == 0;
    // Behind the last barrier of the previous call no peer reads the staging area.
    for (u64 i = thread_index(); call.alive && i < vectors; i += all_threads()) {
        const Vector v = load_bytes(in, i, bytes, aligned);
        st_relaxed_sys_v4(call.own + staging + i * 16, v);
        store_bytes(out + p.rank * bytes, i, bytes, aligned, v);
    }
    block_barrier(p, call);
    // The blocks that staged these vectors have the index of this one.
    for (u64 i = thread_index(); call.alive && i < vectors; i += all_threads()) {
        Vector v[WORLD_SIZE];
#pragma unroll
        for (u32 k = 1; k < WORLD_SIZE; ++k) v[k] = ld_relaxed_sys_v4(p.workspace[peer(p, k)] + staging + i * 16);
#pragma unroll
        for (u32 k = 1; k < WORLD_SIZE; ++k) store_bytes(out + peer(p, k) * bytes, i, bytes, aligned, v[k]);
    }
    block_barrier(p, call);  // no peer reads our staging area any more
    leave_pull(p, call);
}
#endif
