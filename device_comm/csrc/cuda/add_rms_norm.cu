// residual + x, then RMSNorm; alone, and fused behind a push all-reduce. All forms give the same bits.
//
// The order of the norm's sum is a contract (DESIGN.md, "The order of the norm's sum"): of 1024 lanes, lane l adds the
// squares of the elements of vectors l, l + 1024, ... in order, and a tree adds the lanes. The order does not depend on
// the grid, the cluster or the number of threads.

#if HAS(FAMILY_NORM) || HAS(FAMILY_NORM_FP8) || HAS(FAMILY_NORM_NVFP4)
// The shared memory of a block. It has two sets of sums, used in turn, because a block may still read one set
// when another block of its cluster fills the other. Two suffice: that block refills the first set only after
// it has read this block's second sums, sent only when all threads of this block have read the first set.
struct NormShared {
    u64 barriers[2];
    float groups[2][NORM_GROUPS];
    float lanes[NORM_LANES];
};

// The lanes of a block: in a cluster of C blocks, block c has the groups c, c + C, ... of GROUP_LANES lanes each.
struct Share {
    u32 blocks, block, lanes;
    u64 row, rows;  // its cluster handles rows row, row + rows, ...
};

DEVICE Share share_of_block() {
    Share share;
    share.blocks = cluster_blocks();
    share.block = block_in_cluster();
    share.lanes = NORM_LANES / share.blocks;
    share.row = blockIdx.x / share.blocks;
    share.rows = gridDim.x / share.blocks;
    return share;
}

// The k-th lane of the block.
DEVICE u32 lane_of(const Share& share, u32 k) {
    return (share.block + k / GROUP_LANES * share.blocks) * GROUP_LANES + k % GROUP_LANES;
}

// Adds lanes 0 and 128, 1 and 129, ... of a group; then 0 and 64, ...; finally 0 and 1. All threads of a warp compute it.
DEVICE float sum_of_group(const float* lanes) {
#ifdef GC_HOST_BUILD
    float part[GROUP_LANES];
    for (u32 l = 0; l < GROUP_LANES; ++l) part[l] = lanes[l];
    for (u32 half = GROUP_LANES / 2; half; half /= 2) {
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

// Combines the lanes of each group by of_group(lanes), and returns the results of all groups to every thread of the cluster.
// `turn`: number of this exchange among those of the cluster.
template <class OfGroup>
DEVICE const float* exchange_groups(const Share& share, NormShared& shared, u32 turn, OfGroup of_group) {
    u64* barrier = shared.barriers + turn % 2;
    float* groups = shared.groups[turn % 2];
    __syncthreads();
    for (u32 k = threadIdx.x / WARP; k * GROUP_LANES < share.lanes; k += blockDim.x / WARP) {
        const float result = of_group(shared.lanes + k * GROUP_LANES);
        for (u32 b = threadIdx.x % WARP; b < share.blocks; b += WARP) {
            send_float(barrier, groups + share.block + k * share.blocks, b, result);
        }
    }
    await_mail(barrier, sizeof shared.groups[0], turn / 2);
    return groups;
}

// Returns the sum of a row's squares to every thread of the cluster.
DEVICE float sum_of_row(const Share& share, NormShared& shared, u32 turn) {
    const float* groups = exchange_groups(share, shared, turn, sum_of_group);
    return add_rn(add_rn(groups[0], groups[2]), add_rn(groups[1], groups[3]));
}

struct Rows {
    const char *in, *residual, *weight;
    char *out, *residual_out;
    u64 rows;
    u32 vectors;  // of a row
    float hidden, eps;
};

// The last vector of a row that a thread added, kept in registers. Most rows have one for each thread.
struct Kept {
    u64 i;
    Vector sum, weight;
};

// Adds vector i of the residual, rounds, and adds the squares of the result to `squares`, element by element.
DEVICE Vector add_residual(const Vector& x, const Vector& residual, float& squares) {
    float values[ELEMENTS], addend[ELEMENTS];
    unpack(x, values);
    unpack(residual, addend);
#pragma unroll
    for (u32 e = 0; e < ELEMENTS; ++e) values[e] = add_rn(values[e], addend[e]);
    const Vector sum = pack(values);
    unpack(sum, values);
#pragma unroll
    for (u32 e = 0; e < ELEMENTS; ++e) squares = add_rn(squares, multiply_rn(values[e], values[e]));
    return sum;
}

// Returns the factor of a row whose squares have this sum.
DEVICE float factor_of(const Rows& t, float squares) {
    return divide_rn(1.0f, square_root_rn(add_rn(divide_rn(squares, t.hidden), t.eps)));
}

// Returns vector i of a normalised row; the thread reads what it has kept, or wrote itself.
DEVICE Vector normalised(const Rows& t, u64 row, u64 i, float scale, const Kept& kept) {
    float values[ELEMENTS], factor[ELEMENTS];
    unpack(i == kept.i ? kept.sum : ld_vector(t.residual_out + (row * t.vectors + i) * 16), values);
    unpack(i == kept.i ? kept.weight : ld_vector(t.weight + i * 16), factor);
#pragma unroll
    for (u32 e = 0; e < ELEMENTS; ++e) {
        values[e] = multiply_rn(multiply_rn(values[e], scale), factor[e]);
    }
    return pack(values);
}

// A `finish` of norm_rows, called when the sum of a row's squares is known: stores the norm unquantised.
DEVICE void store_row(const Share& share, const Rows& t, u64 row, float squares, const Kept& kept, NormShared&, u32&) {
    const float scale = factor_of(t, squares);
    for (u32 k = threadIdx.x; k < share.lanes; k += blockDim.x) {
        for (u64 i = lane_of(share, k); i < t.vectors; i += NORM_LANES) {
            st_vector(t.out + (row * t.vectors + i) * 16, normalised(t, row, i, scale, kept));
        }
    }
}

// Adds and normalises the rows of the block. reduced(row, i, x) sets x to vector i of a row of the sum over the ranks, or
// returns false; it may wait for peers, so residual and weight are loaded before. `finish` makes the results of a row, and
// counts in `turn` the exchanges that it makes itself.
template <class Reduced, class Finish>
DEVICE void norm_rows(const Share& share, const Rows& t, NormShared& shared, Reduced reduced, Finish finish) {
    bool alive = true;
    u32 turn = 0;
    for (u64 row = share.row; row < t.rows; row += share.rows) {
        Kept kept = {~0ull, {}, {}};
        for (u32 k = threadIdx.x; k < share.lanes; k += blockDim.x) {
            float squares = 0.0f;
            for (u64 i = lane_of(share, k); alive && i < t.vectors; i += NORM_LANES) {
                const u64 at = (row * t.vectors + i) * 16;
                const Vector residual = ld_vector(t.residual + at), weight = ld_vector(t.weight + i * 16);
                Vector x;
                alive = reduced(row, i, x);
                if (!alive) break;
                kept = {i, add_residual(x, residual, squares), weight};
                st_vector(t.residual_out + at, kept.sum);
            }
            shared.lanes[k] = squares;
        }
        const float squares = sum_of_row(share, shared, turn++);
        finish(share, t, row, squares, kept, shared, turn);
    }
}

#define ROWS                                                                                              \
    const Rows t = {static_cast<const char*>(OWN(inputs)),  static_cast<const char*>(OWN(residuals)),     \
                    static_cast<const char*>(OWN(weights)), static_cast<char*>(OWN(outputs)),             \
                    static_cast<char*>(OWN(residual_outputs)), rows, hidden / ELEMENTS,                   \
                    static_cast<float>(hidden), eps}
#define ROW_ARGUMENTS                                                                                     \
    EACH(const void*) inputs, EACH(const void*) residuals, EACH(const void*) weights, EACH(void*) outputs, \
        EACH(void*) residual_outputs, u32 rows, u32 hidden, float eps

// Calls push(row, i, v) for each vector of the block's rows.
template <class Push>
DEVICE void push_rows(const Share& share, const Rows& t, Push push) {
    for (u64 row = share.row; row < t.rows; row += share.rows) {
#pragma unroll 1
        for (u32 k = threadIdx.x; k < share.lanes; k += blockDim.x) {
#pragma unroll 1
            for (u64 i = lane_of(share, k); i < t.vectors; i += NORM_LANES) {
                push(row, i, ld_vector(t.in + (row * t.vectors + i) * 16));
            }
        }
    }
}

template <class Finish>
DEVICE void push_norm(const Params& p, u32 kernel, const Rows& t, NormShared& shared, Finish finish) {
    open_mailboxes(shared.barriers, 2);
    Call call = enter_push(p, kernel);
    const Share share = share_of_block();
    const u64 stride = t.rows * t.vectors * 16, slot = call.arena + p.rank * stride;
    if (call.alive) {
        push_rows(share, t,
                  [&](u64 row, u64 i, const Vector& v) { push_to_all(p, slot + (row * t.vectors + i) * 16, v); });
    }
    join_cluster();
    const auto reduced = [&](u64 row, u64 i, Vector& x) {
        const u64 at = (row * t.vectors + i) * 16;
        Vector received[WORLD_SIZE];
        const Vector own = ld_vector(t.in + at);
        if (!call.alive || !receive(p, call, call.own + call.arena + at, stride, own, received)) return false;
        x = sum_in_rank_order(received);
        return true;
    };
    norm_rows(share, t, shared, reduced, finish);
    leave_push(p, call);
}

// Ranks own a row's vectors in turn, WARP at a time, so that a warp's threads do alike and every block has some.
DEVICE u32 owner_of(u64 i) { return static_cast<u32>(i / WARP % WORLD_SIZE); }
DEVICE u64 place_in_shard(u64 i) { return i / (WARP * WORLD_SIZE) * WARP + i % WARP; }

// Waits for the vector that its owner stores at `address`, and clears it.
DEVICE bool receive_from(const Params& p, Call& call, u64 address, u32 owner, Vector& received) {
    Spin spin = {0, 0};
    for (;;) {
        received = ld_relaxed_sys_v4(address);
        if (is_complete(received)) break;
        if (!may_wait(p, call, spin, 1u << owner)) return false;
    }
    st_relaxed_sys_v4(address, {{SENTINEL, SENTINEL, SENTINEL, SENTINEL}});
    return true;
}

// As push_norm, but with 2 (n - 1) / n times the input over the links instead of n - 1 times. A rank sums the
// vectors that it owns, keeps the sums in `sums` and pushes them; all ranks normalise whole rows. A row has
// at least WARP * WORLD_SIZE vectors, so every rank owns some. A cluster has therefore heard from all peers
// before it waits for sums, and a failure names the rank that is missing, not one that waits for it.
template <class Finish>
DEVICE void push_two_shot_norm(const Params& p, u32 kernel, const Rows& t, char* sums, NormShared& shared, Finish finish) {
    open_mailboxes(shared.barriers, 2);
    Call call = enter_push(p, kernel);
    const Share share = share_of_block();
    const u64 shard = (t.vectors + WARP * WORLD_SIZE - 1) / (WARP * WORLD_SIZE) * WARP, stride = t.rows * shard * 16;
    const u64 results = call.arena + WORLD_SIZE * stride;
    if (call.alive) {
        push_rows(share, t, [&](u64 row, u64 i, const Vector& v) {
            const u64 offset = call.arena + p.rank * stride + (row * shard + place_in_shard(i)) * 16;
            if (owner_of(i) != p.rank) st_relaxed_sys_v4(p.workspace[owner_of(i)] + offset, sendable(v));
        });
        push_rows(share, t, [&](u64 row, u64 i, const Vector& own) {
            Vector received[WORLD_SIZE];
            const u64 first = call.own + call.arena + (row * shard + place_in_shard(i)) * 16;
            if (!call.alive || owner_of(i) != p.rank || !receive(p, call, first, stride, own, received)) return;
            const Vector sum = sum_in_rank_order(received);
            push_to_all(p, results + (row * t.vectors + i) * 16, sum);
            st_vector(sums + (row * t.vectors + i) * 16, sum);
        });
    }
    join_cluster();
    meet_cluster();
    const auto reduced = [&](u64 row, u64 i, Vector& x) {
        const u64 at = (row * t.vectors + i) * 16;
        if (owner_of(i) != p.rank) return call.alive && receive_from(p, call, call.own + results + at, owner_of(i), x);
        x = ld_vector(sums + at);
        return call.alive;
    };
    norm_rows(share, t, shared, reduced, finish);
    leave_push(p, call);
}

template <class Finish>
DEVICE void local_norm(const Rows& t, NormShared& shared, Finish finish) {
    open_mailboxes(shared.barriers, 2);
    wait_for_the_stream();
    let_the_next_kernel_begin();
    join_cluster();
    const auto reduced = [&](u64 row, u64 i, Vector& x) {
        x = ld_vector(t.in + (row * t.vectors + i) * 16);
        return true;
    };
    norm_rows(share_of_block(), t, shared, reduced, finish);
}
#endif

#if HAS(FAMILY_NORM)
// hidden: a multiple of a vector's elements. All tensors are aligned to 16 bytes. residual_out may be residual, and out
// may be in. A cluster handles one row at a time.
KERNEL push_add_rms_norm(PARAMS, ROW_ARGUMENTS) {
    OWN_PARAMS;
    SHARED(NormShared, shared);
    ROWS;
    push_norm(p, PUSH_ADD_RMS_NORM, t, shared, store_row);
}

// Keeps the sums of its own vectors in `out`.
KERNEL push_two_shot_add_rms_norm(PARAMS, ROW_ARGUMENTS) {
    OWN_PARAMS;
    SHARED(NormShared, shared);
    ROWS;
    push_two_shot_norm(p, PUSH_TWO_SHOT_ADD_RMS_NORM, t, t.out, shared, store_row);
}

KERNEL add_rms_norm(ROW_ARGUMENTS) {
    SHARED(NormShared, shared);
    ROWS;
    local_norm(t, shared, store_row);
}
#endif
