// Dispatch of tokens to the ranks of their experts, and the sum of what these return. Counts stay on the device.
// DESIGN.md, "Expert parallel on CUDA", describes and proves the protocol; expert_layout.py packs the arguments.

#define FAMILY_EXPERT 10

#if HAS(FAMILY_EXPERT)
enum ExpertKernel : u32 { EXPERT_DISPATCH = 21, EXPERT_COMBINE };
constexpr Reason OVERFLOWED = static_cast<Reason>(4);  // more rows came than the output has

constexpr u64 SOURCE_FLAGS_BYTES = MAX_BLOCKS * 4;
constexpr u64 PHASE_FLAGS_BYTES = 8 * SOURCE_FLAGS_BYTES;
static_assert(2 * PHASE_FLAGS_BYTES <= FLAGS_BYTES, "the flags end before the arenas");
constexpr u32 MOST_COLUMNS = 6;
constexpr u32 STEP = 128;  // tokens whose ranks a block holds at a time
constexpr u32 IS_WRONG = 1u << 31;  // in a mask of ranks: the token has an id that is no expert

// A block's counts of rows for each rank, and the masks of the tokens that it holds.
struct SharedWords {
    u32 word[8 + STEP];
};

// A tensor with a row for each token. Rows are a multiple of 16 bytes and begin at one, or else of 4.
struct Column {
    u64 in;
    u64 out;
    u64 offset;  // of place 0 in a slot
    u32 row_bytes;
    u32 unit;  // 16 or 4
};

struct ExpertDispatch {
    Column columns[MOST_COLUMNS];
    u64 ids;        // [tokens, topk], integers of id_bytes
    u64 ids_out;    // [rows, topk], the same
    u64 local_out;  // [rows, topk] int64: indices into the experts of this rank, or -1
    u64 owners;     // [experts] int64: the rank of each expert
    u64 local;      // [experts] int64: its index on this rank, or -1
    u64 places;     // [tokens, WORLD_SIZE] int32, written
    u64 lost;       // [tokens] bytes, written
    u64 received;   // [WORLD_SIZE + 1] int32, written: rows from each rank, and their number
    u64 slot_bytes;
    u64 ids_offset;
    u32 column_count;
    u32 tokens;
    u32 topk;
    u32 experts;
    u32 capacity;
    u32 rows;
    u32 id_bytes;
    u32 is_compact;
};
static_assert(sizeof(ExpertDispatch) == 304, "expert_layout.py packs 304 bytes");

struct ExpertCombine {
    u64 results;   // [rows, vectors of 16 bytes], or with weights [rows, topk, vectors]
    u64 weights;   // [rows, topk] float32, or 0
    u64 local;     // [rows, topk] int64, as ExpertDispatch wrote them
    u64 received;  // the same
    u64 places;    // the same
    u64 lost;      // the same
    u64 out;       // [tokens, vectors]
    u64 slot_bytes;
    u32 tokens;
    u32 topk;
    u32 capacity;
    u32 rows;
    u32 vectors;
    u32 is_compact;
};
static_assert(sizeof(ExpertCombine) == 88, "expert_layout.py packs 88 bytes");

#ifdef EMULATE
#define EXPERT_CALL(type) const type* call_table
#define OWN_EXPERT_CALL(type) const type& a = call_table[blockIdx.y]
#else
#define EXPERT_CALL(type) const __grid_constant__ type call_arguments
#define OWN_EXPERT_CALL(type) const type& a = call_arguments
#endif
#ifdef GC_HOST_BUILD
DEVICE void add_shared(u32* word, u32 value) {
    std::atomic_ref<u32>(*word).fetch_add(value, std::memory_order_relaxed);
}
#else
DEVICE void add_shared(u32* word, u32 value) { atomicAdd(word, value); }
#endif

template <class Type>
DEVICE Type& at(u64 base, u64 index) {
    return reinterpret_cast<Type*>(base)[index];
}

// ---- meeting -------------------------------------------------------------------------------------------------

// Tells all ranks that this block has stored its rows, and waits until all blocks of all ranks have done so.
DEVICE void meet(const Params& p, Call& call) {
    const u32 value = call.epoch + 1;
    const u64 phase = (call.epoch & 1) * PHASE_FLAGS_BYTES;
    __syncthreads();
    const u64 line = phase + p.rank * SOURCE_FLAGS_BYTES + blockIdx.x * 4ull;
    for (u32 r = threadIdx.x; call.alive && r < WORLD_SIZE; r += blockDim.x) {
        // SYNC rows->flag (release): after all rows that this block has stored, by the barrier above.
        // SYNC reads->rows (release): and after what earlier launches of this rank have read from their arenas.
        st_release_sys(p.workspace[r] + line, value);
    }
    for (u32 b = threadIdx.x; call.alive && b < gridDim.x; b += blockDim.x) {
        Spin spin = {0, 0};
        for (;;) {
            u32 missing = 0;
#pragma unroll
            for (u32 r = 0; r < WORLD_SIZE; ++r) {
                // SYNC rows->flag (acquire): before all reads of rows, by the barrier below.
                // SYNC reads->rows (acquire): before the stores of this rank's next launches.
                const u32 flag = ld_acquire_sys(call.own + phase + r * SOURCE_FLAGS_BYTES + b * 4ull);
                if (flag != value) missing |= 1u << r;
            }
            if (!missing || !may_wait(p, call, spin, missing)) break;
        }
    }
    __syncthreads();
}

// ---- rows ----------------------------------------------------------------------------------------------------

// Which rows of the output came from which rank.
struct Arrivals {
    u32 first[WORLD_SIZE];
    u32 count[WORLD_SIZE];
    u32 total;
};

DEVICE void arrange(Arrivals& rows, u32 capacity, bool is_compact) {
    rows.total = 0;
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        rows.first[r] = is_compact ? rows.total : r * capacity;
        rows.total += rows.count[r];
    }
}

// Returns whether row q of the output is a token, and finds its source and place.
DEVICE bool find(const Arrivals& rows, u32 q, u32& source, u32& place) {
    bool found = false;
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        if (q - rows.first[r] < rows.count[r]) {
            source = r;
            place = q - rows.first[r];
            found = true;
        }
    }
    return found;
}

// ---- dispatch ------------------------------------------------------------------------------------------------

DEVICE long long id_of(const ExpertDispatch& a, u64 index) {
    const long long id = a.id_bytes == 8 ? at<const long long>(a.ids, index) : at<const int>(a.ids, index);
    return id < static_cast<long long>(a.experts) ? id : -2;
}

// The mask of the ranks that have an expert of the token.
DEVICE u32 ranks_of(const ExpertDispatch& a, u32 token) {
    u32 mask = 0;
#pragma unroll 1
    for (u32 k = 0; k < a.topk; ++k) {
        const long long id = id_of(a, static_cast<u64>(token) * a.topk + k);
        if (id >= 0) mask |= 1u << at<const u64>(a.owners, id);
        if (id < -1) mask |= IS_WRONG;
    }
    return mask;
}

// words[r] becomes the number of rows for rank r of all tokens before `begin`.
DEVICE void count_before(const ExpertDispatch& a, u32 begin, u32* words) {
    u32 before[WORLD_SIZE] = {};
    for (u32 token = threadIdx.x; token < begin; token += blockDim.x) {
        const u32 mask = ranks_of(a, token);
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) before[r] += mask >> r & 1;
    }
    for (u32 r = threadIdx.x; r < WORLD_SIZE; r += blockDim.x) words[r] = 0;
    __syncthreads();
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) add_shared(words + r, before[r]);
    __syncthreads();
}

// Writes places and `lost` of `count` tokens from `first` on, whose masks are in words[8], words[9], ...
DEVICE void find_places(const ExpertDispatch& a, u32 first, u32 count, const u32* words) {
    for (u32 x = threadIdx.x; x < count * WORLD_SIZE; x += blockDim.x) {
        const u32 i = x / WORLD_SIZE, r = x % WORLD_SIZE;
        u32 place = words[r];
        for (u32 j = 0; j < i; ++j) place += words[8 + j] >> r & 1;
        const bool fits = (words[8 + i] >> r & 1) && place < a.capacity;
        at<int>(a.places, static_cast<u64>(first) * WORLD_SIZE + x) = fits ? static_cast<int>(place) : -1;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
        const u32 mask = words[8 + i];
        bool lost = mask & IS_WRONG;
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            const int place = at<const int>(a.places, static_cast<u64>(first + i) * WORLD_SIZE + r);
            lost = lost || ((mask >> r & 1) && place < 0);
        }
        at<unsigned char>(a.lost, first + i) = lost;
    }
}

// Stores a unit of a token's row, or an id, at its place on each rank that the token goes to.
template <class Unit>
DEVICE void push_unit(const Params& p, const ExpertDispatch& a, u64 slot, u32 token, u64 row_bytes, u64 at_byte,
                      const Unit& unit) {
#pragma unroll
    for (u32 k = 0; k < WORLD_SIZE; ++k) {
        const u32 r = peer(p, k);
        const int place = at<const int>(a.places, static_cast<u64>(token) * WORLD_SIZE + r);
        if (place < 0) continue;
        const u64 to = p.workspace[r] + slot + place * row_bytes + at_byte;
        if constexpr (sizeof(Unit) == 16) {
            st_vector(reinterpret_cast<void*>(to), unit);
        } else {
            at<Unit>(to, 0) = unit;
        }
    }
}

DEVICE void push_columns(const Params& p, const ExpertDispatch& a, u64 slot, u32 first, u32 count) {
    for (u32 c = 0; c < a.column_count; ++c) {
        const Column& column = a.columns[c];
        const u32 units = column.row_bytes / column.unit;
        for (u32 x = threadIdx.x; x < count * units; x += blockDim.x) {
            const u32 token = first + x / units, at_byte = x % units * column.unit;
            const u64 from = column.in + static_cast<u64>(token) * column.row_bytes + at_byte;
            const u64 into = slot + column.offset;
            if (column.unit == 16) {
                push_unit(p, a, into, token, column.row_bytes, at_byte, ld_vector(reinterpret_cast<const void*>(from)));
            } else {
                push_unit(p, a, into, token, column.row_bytes, at_byte, at<const u32>(from, 0));
            }
        }
    }
    for (u32 x = threadIdx.x; x < count * a.topk; x += blockDim.x) {
        const u32 token = first + x / a.topk, k = x % a.topk;
        const long long id = id_of(a, static_cast<u64>(token) * a.topk + k);
        push_unit(p, a, slot + a.ids_offset, token, a.topk * 4ull, k * 4ull, static_cast<int>(id < 0 ? -1 : id));
    }
}

// Sends this block's consecutive tokens; the last block also sends the numbers of rows. No order_pushes():
// earlier launches cleared nothing, and the release and acquire of the flags order what is stored.
DEVICE void push_tokens(const Params& p, const Call& call, const ExpertDispatch& a, u32* words) {
    const u32 each = (a.tokens + gridDim.x - 1) / gridDim.x;
    const u32 begin = blockIdx.x * each < a.tokens ? blockIdx.x * each : a.tokens;
    const u32 end = a.tokens - begin < each ? a.tokens : begin + each;
    const u64 slot = call.arena + p.rank * a.slot_bytes;
    count_before(a, begin, words);
    for (u32 first = begin; first < end; first += STEP) {
        const u32 count = end - first < STEP ? end - first : STEP;
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) words[8 + i] = ranks_of(a, first + i);
        __syncthreads();
        find_places(a, first, count, words);
        if (call.alive) push_columns(p, a, slot, first, count);
        __syncthreads();
        for (u32 r = threadIdx.x; r < WORLD_SIZE; r += blockDim.x) {
            for (u32 i = 0; i < count; ++i) words[r] += words[8 + i] >> r & 1;
        }
        __syncthreads();
    }
    if (blockIdx.x != gridDim.x - 1) return;
    for (u32 r = threadIdx.x; call.alive && r < WORLD_SIZE; r += blockDim.x) {
        at<u32>(p.workspace[r] + slot, 0) = words[r] < a.capacity ? words[r] : a.capacity;
    }
}

DEVICE void take_column(const Call& call, const ExpertDispatch& a, const Arrivals& rows, const Column& column) {
    const u32 units = column.row_bytes / column.unit;
    for (u32 x = thread_index(); x < a.rows * units; x += all_threads()) {
        const u32 q = x / units, at_byte = x % units * column.unit;
        u32 source = 0, place = 0;
        const bool found = find(rows, q, source, place);
        const u64 from = call.own + call.arena + source * a.slot_bytes + column.offset +
                         static_cast<u64>(place) * column.row_bytes + at_byte;
        const u64 to = column.out + static_cast<u64>(q) * column.row_bytes + at_byte;
        if (column.unit == 16) {
            st_vector(reinterpret_cast<void*>(to), found ? ld_vector(reinterpret_cast<const void*>(from)) : Vector());
        } else {
            at<u32>(to, 0) = found ? at<const u32>(from, 0) : 0;
        }
    }
}

DEVICE void take_ids(const Call& call, const ExpertDispatch& a, const Arrivals& rows) {
    for (u32 x = thread_index(); x < a.rows * a.topk; x += all_threads()) {
        u32 source = 0, place = 0;
        const bool found = find(rows, x / a.topk, source, place);
        const u64 from = call.own + call.arena + source * a.slot_bytes + a.ids_offset;
        const int id = found ? at<const int>(from, static_cast<u64>(place) * a.topk + x % a.topk) : -1;
        if (a.id_bytes == 8) {
            at<long long>(a.ids_out, x) = id;
        } else {
            at<int>(a.ids_out, x) = id;
        }
        // After a failure the arena may hold anything.
        const bool is_expert = id >= 0 && static_cast<u32>(id) < a.experts;
        at<long long>(a.local_out, x) = is_expert ? at<const long long>(a.local, id) : -1;
    }
}

// Copies the rows that came out of the arena.
DEVICE void take_rows(const Params& p, const Call& call, const ExpertDispatch& a) {
    Arrivals rows;
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        const u32 sent = at<const u32>(call.own + call.arena + r * a.slot_bytes, 0);
        rows.count[r] = sent < a.capacity ? sent : a.capacity;
    }
    arrange(rows, a.capacity, a.is_compact);
    for (u32 c = 0; c < a.column_count; ++c) take_column(call, a, rows, a.columns[c]);
    take_ids(call, a, rows);
    if (thread_index() != 0) return;
    u32 beyond = 0;
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        at<u32>(a.received, r) = rows.count[r];
        if (rows.count[r] && rows.first[r] + rows.count[r] > a.rows) beyond |= 1u << r;
    }
    at<u32>(a.received, WORLD_SIZE) = rows.total;
    if (beyond) report(p, call, OVERFLOWED, beyond);
}

KERNEL expert_dispatch(PARAMS, EXPERT_CALL(ExpertDispatch)) {
    OWN_PARAMS;
    OWN_EXPERT_CALL(ExpertDispatch);
    SHARED(SharedWords, shared);
    wait_for_the_stream();
    Call call = call_of(p, EXPERT_DISPATCH);
    push_tokens(p, call, a, shared.word);
    meet(p, call);
    if (call.alive) take_rows(p, call, a);
    leave_push(p, call);
}

// ---- combine -------------------------------------------------------------------------------------------------

// Vector i of the weighted sum of a row's experts on this rank, in the order of `topk`, rounded once.
DEVICE Vector weighted(const ExpertCombine& a, u32 q, u32 i) {
    float total[ELEMENTS] = {};
#pragma unroll 1
    for (u32 k = 0; k < a.topk; ++k) {
        const u64 index = static_cast<u64>(q) * a.topk + k;
        if (at<const long long>(a.local, index) < 0) continue;
        const float weight = at<const float>(a.weights, index);
        float result[ELEMENTS];
        unpack(ld_vector(reinterpret_cast<const void*>(a.results + (index * a.vectors + i) * 16)), result);
#pragma unroll
        for (u32 e = 0; e < ELEMENTS; ++e) total[e] = add_rn(total[e], multiply_rn(result[e], weight));
    }
    return pack(total);
}

// Returns the results to the ranks of their tokens, to the places at which the tokens came.
DEVICE void push_results(const Params& p, const Call& call, const ExpertCombine& a) {
    Arrivals rows;
#pragma unroll
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        const u32 came = at<const u32>(a.received, r);
        rows.count[r] = came < a.capacity ? came : a.capacity;
    }
    arrange(rows, a.capacity, a.is_compact);
    const u64 slot = call.arena + p.rank * a.slot_bytes;
    for (u32 x = thread_index(); x < a.rows * a.vectors; x += all_threads()) {
        const u32 q = x / a.vectors, i = x % a.vectors;
        u32 source = 0, place = 0;
        if (!find(rows, q, source, place)) continue;
        const u64 result = a.results + static_cast<u64>(x) * 16;
        const Vector v = a.weights ? weighted(a, q, i) : ld_vector(reinterpret_cast<const void*>(result));
        const u64 to = p.workspace[source] + slot + (static_cast<u64>(place) * a.vectors + i) * 16;
        st_vector(reinterpret_cast<void*>(to), v);
    }
}

// The sum of a token's results in rank order. A rank that did not get the token counts as +0.
DEVICE void sum_results(const Call& call, const ExpertCombine& a) {
    for (u32 x = thread_index(); x < a.tokens * a.vectors; x += all_threads()) {
        const u32 token = x / a.vectors, i = x % a.vectors;
        Vector part[WORLD_SIZE];
        u32 ranks = 0;
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            const int place = at<const int>(a.places, static_cast<u64>(token) * WORLD_SIZE + r);
            const u64 from = call.own + call.arena + r * a.slot_bytes + (static_cast<u64>(place) * a.vectors + i) * 16;
            part[r] = place < 0 ? Vector() : ld_vector(reinterpret_cast<const void*>(from));
            if (place >= 0) ranks |= 1u << r;
        }
        float total[ELEMENTS] = {};
#pragma unroll
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (!(ranks >> r & 1)) continue;
            float addend[ELEMENTS];
            unpack(part[r], addend);
            const bool is_first = (ranks & ((1u << r) - 1)) == 0;
#pragma unroll
            for (u32 e = 0; e < ELEMENTS; ++e) total[e] = is_first ? addend[e] : add_rn(total[e], addend[e]);
        }
        const bool is_everywhere = ranks == (1u << WORLD_SIZE) - 1;
        const bool is_lost = at<const unsigned char>(a.lost, token);
#pragma unroll
        for (u32 e = 0; e < ELEMENTS; ++e) {
            if (!is_everywhere) total[e] = add_rn(total[e], 0.0f);
            if (is_lost) total[e] = float_of(0x7FC00000u);
        }
        st_vector(reinterpret_cast<void*>(a.out + static_cast<u64>(x) * 16), pack(total));
    }
}

KERNEL expert_combine(PARAMS, EXPERT_CALL(ExpertCombine)) {
    OWN_PARAMS;
    OWN_EXPERT_CALL(ExpertCombine);
    wait_for_the_stream();
    Call call = call_of(p, EXPERT_COMBINE);
    if (call.alive) push_results(p, call, a);
    meet(p, call);
    if (call.alive) sum_results(call, a);
    leave_push(p, call);
}
#endif
