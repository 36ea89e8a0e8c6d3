// Push all-reduce, reduce-scatter and all-gather, and pull all-reduce. kernel_base.cu holds what they share.

// ---- push: sums ----------------------------------------------------------------------------------------------

// Replaces words that equal the sentinel, which must never be sent.
DEVICE Vector sendable(Vector v) {
#pragma unroll
    for (u32 w = 0; w < 4; ++w) {
        if (v.word[w] == SENTINEL) v.word[w] = SENTINEL_SENT_AS;
    }
    return v;
}

DEVICE bool is_complete(const Vector& v) {
    return v.word[0] != SENTINEL && v.word[1] != SENTINEL && v.word[2] != SENTINEL && v.word[3] != SENTINEL;
}

// Waits for the vectors at `first + r * stride` of every peer r and clears them; `own` is this rank's entry.
DEVICE bool receive(const Params& p, Call& call, u64 first, u64 stride, const Vector& own,
                    Vector (&received)[WORLD_SIZE]) {
    Spin spin = {0, 0};
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) received[r] = own;
    for (;;) {
        u32 missing = 0;
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (r != p.rank) received[r] = ld_relaxed_sys_v4(first + r * stride);
        }
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (r != p.rank && !is_complete(received[r])) missing |= 1u << r;
        }
        if (!missing) break;
        if (!may_wait(p, call, spin, missing)) return false;
    }
    const Vector idle = {{SENTINEL, SENTINEL, SENTINEL, SENTINEL}};
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        if (r != p.rank) st_relaxed_sys_v4(first + r * stride, idle);
    }
    return true;
}

// Stores a vector at the same offset in every peer's workspace.
DEVICE void push_to_all(const Params& p, u64 offset, const Vector& v) {
    const Vector sent = sendable(v);
#pragma unroll
    for (u32 k = 1; k < WORLD_SIZE; ++k) st_relaxed_sys_v4(p.workspace[peer(p, k)] + offset, sent);
}

// Pushes vectors first, first + step, ... below `end` of `in`, four at a time so that their loads overlap.
DEVICE void push_range(const Params& p, u64 slot, const char* in, u64 bytes, u64 first, u64 end, u64 step) {
    const u64 whole = end < bytes / 16 ? end : bytes / 16;
    u64 i = first;
    for (; i + 3 * step < whole; i += 4 * step) {
        Vector v[4];
#pragma unroll
        for (u32 k = 0; k < 4; ++k) v[k] = ld_vector(in + (i + k * step) * 16);
#pragma unroll
        for (u32 k = 0; k < 4; ++k) push_to_all(p, slot + (i + k * step) * 16, v[k]);
    }
    for (; i < end; i += step) push_to_all(p, slot + i * 16, load(in, i, bytes, true));
}

#if HAS(FAMILY_ONE_SHOT)
// in and out: aligned to 16 bytes, may be equal. Every slot holds the whole input.
KERNEL push_one_shot(PARAMS, EACH(const void*) inputs, EACH(void*) outputs, u64 count) {
    OWN_PARAMS;
    Call call = enter_push(p, PUSH_ONE_SHOT);
    const char* in = static_cast<const char*>(OWN(inputs));
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES, vectors = vectors_of(bytes), stride = vectors * 16;
    const u64 first = thread_index(), slot = call.arena + p.rank * stride;
    if (call.alive) push_range(p, slot, in, bytes, first, vectors, all_threads());
    for (u64 i = first; call.alive && i < vectors; i += all_threads()) {
        Vector received[WORLD_SIZE];
        const Vector own = load(in, i, bytes, true);
        if (!receive(p, call, call.own + call.arena + i * 16, stride, own, received)) break;
        store(out, i, bytes, sum_in_rank_order(received));
    }
    leave_push(p, call);
}
#endif

// Loads vector i of every peer's shard.
DEVICE void load_shards(const Params& p, const char* in, u64 shard_bytes, u64 bytes, u64 i, bool aligned,
                        Vector (&v)[WORLD_SIZE]) {
#pragma unroll
    for (u32 k = 1; k < WORLD_SIZE; ++k) {
        const u64 begin = peer(p, k) * shard_bytes;
        const u64 left = begin < bytes ? bytes - begin : 0;
        v[k] = load(in + begin, i, left < shard_bytes ? left : shard_bytes, aligned);
    }
}

// Sends vector i of every peer's shard to that peer. The same thread later stores the result that returns.
DEVICE void scatter(const Params& p, const Call& call, const char* in, u64 shard_bytes, u64 bytes, u64 shard,
                    bool aligned) {
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) {
        Vector v[WORLD_SIZE] = {};
        load_shards(p, in, shard_bytes, bytes, i, aligned, v);
        const u64 offset = call.arena + (p.rank * shard + i) * 16;
#pragma unroll
        for (u32 k = 1; k < WORLD_SIZE; ++k) {
            st_relaxed_sys_v4(p.workspace[peer(p, k)] + offset, sendable(v[k]));
        }
    }
}

#if HAS(FAMILY_TWO_SHOT)
// in and out: aligned to 16 bytes, may be equal. Shards are equal, padded with zeros: every rank waits for every other
// rank in the first half, so a failure names the missing rank and not a rank that waits for it.
KERNEL push_two_shot(PARAMS, EACH(const void*) inputs, EACH(void*) outputs, u64 count) {
    OWN_PARAMS;
    Call call = enter_push(p, PUSH_TWO_SHOT);
    const char* in = static_cast<const char*>(OWN(inputs));
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES;
    const u64 shard = (vectors_of(bytes) + WORLD_SIZE - 1) / WORLD_SIZE, stride = shard * 16;
    const u64 results = call.arena + WORLD_SIZE * stride;
    scatter(p, call, in, stride, bytes, shard, true);
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) {
        Vector received[WORLD_SIZE];
        const Vector own = load(in, p.rank * shard + i, bytes, true);
        if (!receive(p, call, call.own + call.arena + i * 16, stride, own, received)) break;
        const Vector sum = sum_in_rank_order(received);
        push_to_all(p, results + p.rank * stride + i * 16, sum);
        store(out, p.rank * shard + i, bytes, sum);
    }
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) {
        Vector received[WORLD_SIZE];
        if (!receive(p, call, call.own + results + i * 16, stride, Vector(), received)) break;
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (r != p.rank) store(out, r * shard + i, bytes, received[r]);
        }
    }
    leave_push(p, call);
}
#endif

#if HAS(FAMILY_SHARDS)
// count: elements of the output. in: WORLD_SIZE consecutive shards of count elements. Both are aligned to 16 bytes. Shards
// that are not a multiple of 16 bytes are read element by element. out may be this rank's shard of in.
KERNEL push_reduce_scatter(PARAMS, EACH(const void*) inputs, EACH(void*) outputs, u64 count) {
    OWN_PARAMS;
    Call call = enter_push(p, PUSH_REDUCE_SCATTER);
    const char* in = static_cast<const char*>(OWN(inputs));
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES, vectors = vectors_of(bytes);
    const bool aligned = bytes % 16 == 0;
    scatter(p, call, in, bytes, bytes * WORLD_SIZE, vectors, aligned);
    for (u64 i = thread_index(); call.alive && i < vectors; i += all_threads()) {
        Vector received[WORLD_SIZE];
        const Vector own = load(in + p.rank * bytes, i, bytes, aligned);
        if (!receive(p, call, call.own + call.arena + i * 16, vectors * 16, own, received)) break;
        store(out, i, bytes, sum_in_rank_order(received));
    }
    leave_push(p, call);
}
#endif

// ---- push: all-gather ----------------------------------------------------------------------------------------

#if HAS(FAMILY_SHARDS)
// Raw data may hold any bits, including the sentinel. Every 32 bits of data therefore travel with a 32-bit flag in one
// atomic access of 64 bits.
constexpr u64 FLAG = 1ull << 32;

DEVICE Pairs load_raw(const unsigned char* in, u64 i, u64 bytes, bool aligned) {
    Pairs v = {{FLAG, FLAG}};
    if (aligned) {
        v.pair[0] |= reinterpret_cast<const u32*>(in)[2 * i];
        v.pair[1] |= reinterpret_cast<const u32*>(in)[2 * i + 1];
        return v;
    }
#pragma unroll
    for (u32 b = 0; b < 8; ++b) {
        if (i * 8 + b < bytes) v.pair[b / 4] |= static_cast<u64>(in[i * 8 + b]) << b % 4 * 8;
    }
    return v;
}

DEVICE void store_raw(unsigned char* out, u64 i, u64 bytes, bool aligned, const Pairs& v) {
    if (aligned) {
        reinterpret_cast<u32*>(out)[2 * i] = static_cast<u32>(v.pair[0]);
        reinterpret_cast<u32*>(out)[2 * i + 1] = static_cast<u32>(v.pair[1]);
        return;
    }
#pragma unroll
    for (u32 b = 0; b < 8; ++b) {
        if (i * 8 + b < bytes) out[i * 8 + b] = static_cast<unsigned char>(v.pair[b / 4] >> b % 4 * 8);
    }
}

DEVICE bool receive_raw(const Params& p, Call& call, u64 first, u64 stride, Pairs (&received)[WORLD_SIZE]) {
    Spin spin = {0, 0};
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) received[r] = {{FLAG, FLAG}};
    for (;;) {
        u32 missing = 0;
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (r != p.rank) received[r] = ld_relaxed_sys_pairs(first + r * stride);
        }
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            const bool complete = received[r].pair[0] >> 32 == 1 && received[r].pair[1] >> 32 == 1;
            if (r != p.rank && !complete) missing |= 1u << r;
        }
        if (!missing) break;
        if (!may_wait(p, call, spin, missing)) return false;
    }
    const Pairs idle = {{~0ull, ~0ull}};
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        if (r != p.rank) st_relaxed_sys_pairs(first + r * stride, idle);
    }
    return true;
}

// bytes: size of each rank's part. out: the parts in rank order. Any alignment and size; fast if in, out and bytes are
// multiples of 8. in may be this rank's part of out.
KERNEL push_all_gather(PARAMS, EACH(const void*) inputs, EACH(void*) outputs, u64 bytes) {
    OWN_PARAMS;
    Call call = enter_push(p, PUSH_ALL_GATHER);
    const unsigned char* in = static_cast<const unsigned char*>(OWN(inputs));
    unsigned char* out = static_cast<unsigned char*>(OWN(outputs));
    const u64 units = bytes ? (bytes + 7) / 8 : 1, stride = units * 16;
    const bool aligned = bytes && (bytes | reinterpret_cast<u64>(in) | reinterpret_cast<u64>(out)) % 8 == 0;
    for (u64 i = thread_index(); call.alive && i < units; i += all_threads()) {
        const Pairs v = load_raw(in, i, bytes, aligned);
        const u64 offset = call.arena + p.rank * stride + i * 16;
#pragma unroll
        for (u32 k = 1; k < WORLD_SIZE; ++k) st_relaxed_sys_pairs(p.workspace[peer(p, k)] + offset, v);
        store_raw(out + p.rank * bytes, i, bytes, aligned, v);
    }
    for (u64 i = thread_index(); call.alive && i < units; i += all_threads()) {
        Pairs received[WORLD_SIZE];
        if (!receive_raw(p, call, call.own + call.arena + i * 16, stride, received)) break;
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (r != p.rank) store_raw(out + r * bytes, i, bytes, aligned, received[r]);
        }
    }
    leave_push(p, call);
}
#endif

// ---- pull ----------------------------------------------------------------------------------------------------

#if HAS(FAMILY_PULL) || HAS(FAMILY_MULTIMEM) || HAS(FAMILY_SHARDS)
// Each block counts its own barriers, and only when it runs. A peer's flag is therefore at most one barrier away, and
// block_barrier may compare modulo 2^32.
DEVICE Call enter_pull(const Params& p, u32 kernel) {
    wait_for_the_stream();
    Call call;
    call.kernel = kernel;
    call.epoch = ld_state(p, STATE_BARRIER_WORD + blockIdx.x);
    call.alive = ld_relaxed_sys(state_word(p, STATE_POISONED_WORD)) == 0;
    call.own = p.workspace[p.rank];
    call.arena = 0;
    return call;
}

DEVICE void leave_pull(const Params& p, const Call& call) {
    __syncthreads();
    let_the_next_kernel_begin();
    if (threadIdx.x == 0) st_state(p, STATE_BARRIER_WORD + blockIdx.x, call.epoch);
}

// Barrier between the blocks of the same index on all ranks: their earlier writes are visible, their reads are done.
DEVICE void block_barrier(const Params& p, Call& call) {
    ++call.epoch;
    __syncthreads();
    const u64 line = blockIdx.x * FLAG_LINE_BYTES;
    for (u32 r = threadIdx.x; call.alive && r < WORLD_SIZE; r += blockDim.x) {
        // SYNC flag->peers (release): after all reads and writes of this block, and of earlier work on its stream.
        if (r != p.rank) st_release_sys(p.workspace[r] + line + p.rank * 4, call.epoch);
    }
    for (u32 r = threadIdx.x; call.alive && r < WORLD_SIZE; r += blockDim.x) {
        if (r == p.rank) continue;
        Spin spin = {0, 0};
        // SYNC flag->peers (acquire): compares modulo 2^32, as a peer may already be at its next barrier.
        while (static_cast<int>(ld_acquire_sys(call.own + line + r * 4) - call.epoch) < 0) {
            if (!may_wait(p, call, spin, 1u << r)) break;
        }
    }
    __syncthreads();
}
#endif

#if HAS(FAMILY_PULL)
DEVICE Vector load_peer(u64 base, u64 i, u64 bytes) {
    if (i * 16 + 16 <= bytes) return ld_relaxed_sys_v4(base + i * 16);
    return load(reinterpret_cast<const char*>(base), i, bytes, false);
}

DEVICE Vector sum_of_peers(const u64 (&address)[WORLD_SIZE], u64 i, u64 bytes) {
    Vector v[WORLD_SIZE];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) v[r] = load_peer(address[r], i, bytes);
    return sum_in_rank_order(v);
}

// A graph that is replayed before its inputs were exchanged finds zeros in its table, reports it and reads nothing.
DEVICE void check_registered(const Params& p, Call& call, const u64 (&address)[WORLD_SIZE]) {
    u32 missing = 0;
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        if (address[r] == 0) missing |= 1u << r;
    }
    if (call.alive && missing) {
        report(p, call, UNREGISTERED, missing);
        call.alive = false;
    }
}

// tables: the addresses of every rank's input, in device memory. out must not overlap this rank's input.
KERNEL pull_one_shot(PARAMS, EACH(const u64*) tables, EACH(void*) outputs, u64 count) {
    OWN_PARAMS;
    Call call = enter_pull(p, PULL_ONE_SHOT);
    u64 address[WORLD_SIZE];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) address[r] = OWN(tables)[r];
    check_registered(p, call, address);
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES, vectors = vectors_of(bytes);
    block_barrier(p, call);
    for (u64 i = thread_index(); call.alive && i < vectors; i += all_threads()) {
        store(out, i, bytes, sum_of_peers(address, i, bytes));
    }
    block_barrier(p, call);  // no peer reads our input any more: the stream may continue
    leave_pull(p, call);
}

// out may be this rank's input. After the second barrier no rank reads the inputs any more. The results stay valid until
// the first barrier of the next pull.
KERNEL pull_two_shot(PARAMS, EACH(const u64*) tables, EACH(void*) outputs, u64 count) {
    OWN_PARAMS;
    Call call = enter_pull(p, PULL_TWO_SHOT);
    u64 address[WORLD_SIZE];
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) address[r] = OWN(tables)[r];
    check_registered(p, call, address);
    char* out = static_cast<char*>(OWN(outputs));
    const u64 bytes = count * ELEMENT_BYTES;
    const u64 shard = (vectors_of(bytes) + WORLD_SIZE - 1) / WORLD_SIZE;
    block_barrier(p, call);
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) {
        const Vector sum = sum_of_peers(address, p.rank * shard + i, bytes);
        st_relaxed_sys_v4(call.own + p.results_offset + i * 16, sum);
        store(out, p.rank * shard + i, bytes, sum);
    }
    block_barrier(p, call);
    for (u64 i = thread_index(); call.alive && i < shard; i += all_threads()) {
        Vector v[WORLD_SIZE];
#pragma unroll
        for (u32 k = 1; k < WORLD_SIZE; ++k) {
            v[k] = ld_relaxed_sys_v4(p.workspace[peer(p, k)] + p.results_offset + i * 16);
        }
#pragma unroll
        for (u32 k = 1; k < WORLD_SIZE; ++k) store(out, peer(p, k) * shard + i, bytes, v[k]);
    }
    leave_pull(p, call);
}
#endif
