// Stresses the expert-parallel kernels: every rank of a group is a thread, which runs its kernels as threads. Dispatches
// and combines of changing shapes follow each other without any other meeting of the ranks, with pauses and stalls, and
// while the epochs wrap. Every row and every sum is compared bit by bit with what is computed here from the numbers of
// rank, token and launch alone. Exits with 1 at the first difference.
#include <algorithm>

#include "shim.hpp"
#include KERNELS
#include "host_launch.hpp"

namespace {

#if DTYPE == 0
using Bits = u32;
float value_of(Bits bits) { return std::bit_cast<float>(bits); }
Bits bits_from(float value) { return std::bit_cast<u32>(value); }
#elif DTYPE == 2
using Bits = u16;
float value_of(Bits bits) { return std::bit_cast<float>(static_cast<u32>(bits) << 16); }
Bits bits_from(float value) {
    const u32 bits = std::bit_cast<u32>(value), cut = bits & 0xFFFF, kept = bits >> 16;
    return static_cast<Bits>(kept + (cut > 0x8000 || (cut == 0x8000 && kept & 1)));
}
#else
#error "the sums are checked for float32 and bfloat16"
#endif

constexpr u32 GRID = 3;  // one number for all launches of a group
constexpr u64 ARENA_BYTES = 1 << 20;
constexpr u32 EXPERT_COUNT = 2 * WORLD_SIZE + 1;
std::atomic<bool> failed{false};

u32 mixed(u32 value) {
    value = (value ^ value >> 16) * 0x7FEB352Du;
    value = (value ^ value >> 15) * 0x846CA68Bu;
    return value ^ value >> 16;
}

// A launch's shape, which all ranks know.
struct Shape {
    u32 number, topk, capacity, vectors, extra_words, id_bytes, tokens[WORLD_SIZE];
    bool is_compact, is_weighted;
    u32 hidden() const { return vectors * ELEMENTS; }
};

Shape shape_of(u32 number) {
    Shape s = {};
    const u32 any = mixed(number * 7 + 1);
    s.number = number;
    s.topk = 1 + any % 4;
    s.vectors = 1 + any / 4 % 3;
    s.extra_words = 1 + any / 12 % 5;
    s.id_bytes = any / 60 % 2 ? 8 : 4;
    s.is_compact = any / 120 % 2;
    s.is_weighted = any / 240 % 2;
    u32 most = 1;
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        s.tokens[r] = mixed(any + r) % 16;
        // Now and then a block has more tokens than it holds at a time.
        if (number % 64 == 7 && r == number / 64 % WORLD_SIZE) s.tokens[r] = GRID * STEP + 100;
        most = std::max(most, s.tokens[r]);
    }
    s.capacity = any / 480 % 4 ? most : std::max(1u, most / 2);  // now and then some do not fit
    return s;
}

u32 owner(u32 expert) { return expert * 5 % EXPERT_COUNT % WORLD_SIZE; }
// -2 is no expert, -1 stands for none.
int id_of(const Shape& s, u32 rank, u32 token, u32 k) {
    const u32 any = mixed(s.number * 977 + rank * 131 + token * 31 + k);
    return any % 97 == 0 ? -2 : static_cast<int>(any % (EXPERT_COUNT + 1)) - 1;
}
Bits hidden_of(const Shape& s, u32 rank, u32 token, u32 e) {
    return static_cast<Bits>(mixed(s.number + rank * 8191 + token * 131071 + e * 17));
}
float weight_of(const Shape& s, u32 rank, u32 token, u32 k) {
    return static_cast<float>(mixed(s.number + rank + token * 7 + k) % 1000) * 0.0173f - 3.1f;
}
u32 extra_of(const Shape& s, u32 rank, u32 token, u32 w) { return mixed(s.number * 3 + rank + token * 11 + w); }
// What expert slot k of a token gives on its rank; -0 now and then, on all ranks.
Bits result_of(const Shape& s, u32 rank, u32 token, u32 at, u32 k, u32 e) {
    const u32 any = mixed(s.number * 13 + token * 101 + e * 7);
    if (any % 5 == 0) return bits_from(-0.0f);
    return bits_from((static_cast<int>(mixed(any + at * 3 + k + rank * 41) % 20011) - 10005) * 0.37f);
}

u32 mask_of(const Shape& s, u32 rank, u32 token) {
    u32 mask = 0;
    for (u32 k = 0; k < s.topk; ++k) {
        const int id = id_of(s, rank, token, k);
        if (id >= 0) mask |= 1u << owner(id);
    }
    return mask;
}

// The tokens of `source` that come to `to`, in order, without those that do not fit.
std::vector<u32> sent(const Shape& s, u32 source, u32 to) {
    std::vector<u32> tokens;
    for (u32 t = 0; t < s.tokens[source] && tokens.size() < s.capacity; ++t) {
        if (mask_of(s, source, t) >> to & 1) tokens.push_back(t);
    }
    return tokens;
}

bool is_lost(const Shape& s, u32 rank, u32 token) {
    for (u32 k = 0; k < s.topk; ++k) {
        if (id_of(s, rank, token, k) == -2) return true;
    }
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        const std::vector<u32> tokens = sent(s, rank, r);
        const bool goes = mask_of(s, rank, token) >> r & 1;
        if (goes && std::find(tokens.begin(), tokens.end(), token) == tokens.end()) return true;
    }
    return false;
}

struct Rank {
    std::vector<u32> memory, state = std::vector<u32>(1024), error = std::vector<u32>(16);
    std::vector<long long> owners, local;
    Params params = {};
    u64 base() const { return (reinterpret_cast<u64>(memory.data()) + 127) / 128 * 128; }
};
std::vector<std::unique_ptr<Rank>> ranks;

void set_up(u32 first_epoch, u64 deadline_ns) {
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        ranks.push_back(std::make_unique<Rank>());
        Rank& rank = *ranks.back();
        rank.memory.assign((FLAGS_BYTES + 2 * ARENA_BYTES + 128) / 4, 0x5A5A5A5A);
        std::fill_n(reinterpret_cast<u32*>(rank.base()), FLAGS_BYTES / 4, first_epoch - 1);
        std::fill_n(rank.state.begin(), 2 * MAX_BLOCKS, first_epoch);
        long long here = 0;
        for (u32 e = 0; e < EXPERT_COUNT; ++e) {
            rank.owners.push_back(owner(e));
            rank.local.push_back(owner(e) == r ? here++ : -1);
        }
    }
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        Params& params = ranks[r]->params;
        for (u32 other = 0; other < WORLD_SIZE; ++other) params.workspace[other] = ranks[other]->base();
        params.state = reinterpret_cast<u64>(ranks[r]->state.data());
        params.error = reinterpret_cast<u64>(ranks[r]->error.data());
        params.deadline_ns = deadline_ns;
        params.arena_bytes = ARENA_BYTES;
        params.rank = r;
    }
}

bool complain(const char* what, u32 rank, u32 number, u64 place, long long got, long long wanted) {
    if (!failed.exchange(true)) {
        std::printf("%s: rank %u, shape %u: %llu is %llx instead of %llx\n", what, rank, number, place, got, wanted);
    }
    return false;
}

template <class Type>
u64 address(std::vector<Type>& values) {
    return reinterpret_cast<u64>(values.data());
}
// Vectors begin at a multiple of 16.
template <class Type>
struct Aligned {
    std::vector<Type> memory;
    Type* first;
    explicit Aligned(u64 count) : memory(count + 16 / sizeof(Type)) {
        first = reinterpret_cast<Type*>((reinterpret_cast<u64>(memory.data()) + 15) / 16 * 16);
        std::fill_n(first, count, static_cast<Type>(0x5A5A5A5A));
    }
    u64 at() const { return reinterpret_cast<u64>(first); }
};
u64 up(u64 nbytes, u64 unit) { return (nbytes + unit - 1) / unit * unit; }

// One dispatch of a rank with all that it wrote, until its combine.
struct Open {
    Shape s;
    u32 rank, rows;
    Aligned<Bits> hidden;
    std::vector<float> weights;
    std::vector<u32> extra;
    std::vector<long long> ids, local;
    std::vector<int> places, received = std::vector<int>(WORLD_SIZE + 1);
    std::vector<unsigned char> lost;

    // The source and token of each row; tokens of -1 are idle rows.
    std::vector<std::pair<u32, int>> wanted;

    Open(const Shape& shape, u32 me)
        : s(shape), rank(me), rows(rows_of(shape, me)), hidden(u64{rows} * shape.hidden()), weights(rows * shape.topk),
          extra(rows * shape.extra_words, 0x5A5A5A5A), ids(rows * shape.topk, 0x5A5A5A5A),
          local(rows * shape.topk, 0x5A5A5A5A), places(shape.tokens[me] * WORLD_SIZE + 1), lost(shape.tokens[me] + 1, 7) {
        wanted.assign(rows, {0, -1});
        u32 next = 0;
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            if (!s.is_compact) next = r * s.capacity;
            for (u32 t : sent(s, r, rank)) wanted[next++] = {r, static_cast<int>(t)};
        }
    }

    static u32 rows_of(const Shape& s, u32 me) {
        if (!s.is_compact) return WORLD_SIZE * s.capacity;
        u32 rows = s.number % 3;
        for (u32 r = 0; r < WORLD_SIZE; ++r) rows += sent(s, r, me).size();
        return rows;
    }

    void dispatch(Rank& self, u32 block) {
        const u32 tokens = s.tokens[rank];
        Aligned<Bits> in(u64{tokens} * s.hidden() + 8);
        std::vector<float> weights_in;
        std::vector<u32> extra_in;
        std::vector<long long> long_ids;
        std::vector<int> int_ids;
        for (u32 t = 0; t < tokens; ++t) {
            for (u32 e = 0; e < s.hidden(); ++e) in.first[t * s.hidden() + e] = hidden_of(s, rank, t, e);
            for (u32 w = 0; w < s.extra_words; ++w) extra_in.push_back(extra_of(s, rank, t, w));
            for (u32 k = 0; k < s.topk; ++k) {
                weights_in.push_back(weight_of(s, rank, t, k));
                int_ids.push_back(id_of(s, rank, t, k));
                long_ids.push_back(int_ids.back());
            }
        }
        ExpertDispatch a = {};
        const u32 row_bytes[] = {s.vectors * 16, s.topk * 4, s.extra_words * 4};
        const u64 from[] = {in.at(), address(weights_in), address(extra_in)};
        const u64 to[] = {hidden.at(), address(weights), address(extra)};
        u64 end = 128 + up(s.capacity * s.topk * 4, 16);
        for (u32 c = 0; c < 3; ++c) {
            a.columns[c] = {from[c], to[c], end, row_bytes[c], row_bytes[c] % 16 ? 4u : 16u};
            // Rows of 16 bytes whose memory is not aligned to them move in words.
            if ((from[c] | to[c]) % 16) a.columns[c].unit = 4;
            end += up(u64{s.capacity} * row_bytes[c], 16);
        }
        a.column_count = 3;
        a.ids = s.id_bytes == 8 ? address(long_ids) : address(int_ids);
        a.ids_out = address(ids);
        a.local_out = address(local);
        a.owners = address(self.owners);
        a.local = address(self.local);
        a.places = address(places);
        a.lost = address(lost);
        a.received = address(received);
        a.slot_bytes = up(end, 128);
        a.ids_offset = 128;
        a.tokens = tokens;
        a.topk = s.topk;
        a.experts = EXPERT_COUNT;
        a.capacity = s.capacity;
        a.rows = rows;
        a.id_bytes = s.id_bytes;
        a.is_compact = s.is_compact;
        if (a.slot_bytes * WORLD_SIZE > ARENA_BYTES) std::abort();
        void* args[] = {&self.params, &a};
        host_launch("expert_dispatch", GRID, block, 1, args);
    }

    int id_out(u64 place) const {
        if (s.id_bytes == 8) return static_cast<int>(ids[place]);
        return reinterpret_cast<const int*>(ids.data())[place];
    }

    bool check(const Rank& self) const {
        const u32 n = s.number;
        for (u32 q = 0; q < rows; ++q) {
            const auto [source, token] = wanted[q];
            for (u32 e = 0; e < s.hidden(); ++e) {
                const Bits want = token < 0 ? 0 : hidden_of(s, source, token, e);
                const Bits got = hidden.first[q * s.hidden() + e];
                if (got != want) return complain("hidden", rank, n, q, got, want);
            }
            for (u32 w = 0; w < s.extra_words; ++w) {
                const u32 want = token < 0 ? 0 : extra_of(s, source, token, w), got = extra[q * s.extra_words + w];
                if (got != want) return complain("extra", rank, n, q, got, want);
            }
            for (u32 k = 0; k < s.topk; ++k) {
                const u64 at = u64{q} * s.topk + k;
                const int want = token < 0 ? -1 : std::max(-1, id_of(s, source, token, k));
                if (id_out(at) != want) return complain("id", rank, n, q, id_out(at), want);
                const long long index = want < 0 ? -1 : self.local[want];
                if (local[at] != index) return complain("local id", rank, n, q, local[at], index);
                const float weight = token < 0 ? 0.0f : weight_of(s, source, token, k);
                if (weights[at] != weight) return complain("weight", rank, n, q, bits_of(weights[at]), bits_of(weight));
            }
        }
        int total = 0;
        for (u32 r = 0; r < WORLD_SIZE; ++r) {
            const int want = sent(s, r, rank).size();
            total += want;
            if (received[r] != want) return complain("received", rank, n, r, received[r], want);
        }
        if (received[WORLD_SIZE] != total) return complain("total", rank, n, 0, received[WORLD_SIZE], total);
        for (u32 t = 0; t < s.tokens[rank]; ++t) {
            if (lost[t] != is_lost(s, rank, t)) return complain("lost", rank, n, t, lost[t], is_lost(s, rank, t));
        }
        return true;
    }

    // The part of rank `at` of a token of this rank, rounded once if it is weighted there.
    float part(u32 token, u32 at, u32 e) const {
        if (!s.is_weighted) return value_of(result_of(s, rank, token, at, 9, e));
        float total = 0.0f;
        for (u32 k = 0; k < s.topk; ++k) {
            const int id = id_of(s, rank, token, k);
            if (id < 0 || owner(id) != at) continue;
            const float term = value_of(result_of(s, rank, token, at, k, e)) * weight_of(s, rank, token, k);
            total = total + term;
        }
        return value_of(bits_from(total));
    }

    bool combine(Rank& self, u32 block) {
        const u32 tokens = s.tokens[rank], each = s.is_weighted ? s.topk : 1;
        Aligned<Bits> results(u64{rows} * each * s.hidden() + 8), out(u64{tokens} * s.hidden() + 8);
        for (u32 q = 0; q < rows; ++q) {
            const auto [source, token] = wanted[q];
            if (token < 0) continue;  // an idle row may hold anything
            for (u32 k = 0; k < each; ++k) {
                for (u32 e = 0; e < s.hidden(); ++e) {
                    results.first[(q * each + k) * s.hidden() + e] =
                        result_of(s, source, token, rank, s.is_weighted ? k : 9, e);
                }
            }
        }
        ExpertCombine a = {};
        a.results = results.at();
        a.weights = s.is_weighted ? address(weights) : 0;
        a.local = address(local);
        a.received = address(received);
        a.places = address(places);
        a.lost = address(lost);
        a.out = out.at();
        a.slot_bytes = up(u64{s.capacity} * s.vectors * 16, 128);
        a.tokens = tokens;
        a.topk = s.topk;
        a.capacity = s.capacity;
        a.rows = rows;
        a.vectors = s.vectors;
        a.is_compact = s.is_compact;
        void* args[] = {&self.params, &a};
        host_launch("expert_combine", GRID, block, 1, args);
        for (u32 t = 0; t < tokens; ++t) {
            const bool nan = is_lost(s, rank, t);
            const u32 mask = mask_of(s, rank, t);
            for (u32 e = 0; e < s.hidden(); ++e) {
                const Bits got = out.first[t * s.hidden() + e];
                float total = 0.0f;
                bool is_first = true;
                for (u32 r = 0; r < WORLD_SIZE; ++r) {
                    // A rank without the token counts as +0.
                    const float addend = mask >> r & 1 ? part(t, r, e) : 0.0f;
                    total = is_first ? addend : total + addend;
                    is_first = false;
                }
                const Bits want = bits_from(total);
                if (nan ? value_of(got) == value_of(got) : got != want) {
                    return complain("sum", rank, s.number, t, got, nan ? 0x7FFF : want);
                }
            }
        }
        return true;
    }
};

bool launch_and_check(Rank& self, u32 number) {
    const u32 me = self.params.rank, choice = mixed(number * 3 + me);
    if (choice % 4 == 0) usleep(choice / 4 % 300);
    Open first(shape_of(number), me), second(shape_of(number + 1000003), me);
    const bool both = mixed(number) % 3 == 0;
    first.dispatch(self, 1 + choice % 3);
    if (both) second.dispatch(self, 1 + choice / 3 % 3);
    if (!first.check(self)) return false;
    if (both && (!second.check(self) || !second.combine(self, 2))) return false;
    return first.combine(self, 1 + choice / 9 % 3);
}

}  // namespace

// expert_stress LAUNCHES SEED STALLS_PER_MILLION DEADLINE_MS
int main(int argc, char** argv) {
    if (argc < 5) return 2;
    const u32 launches = std::atoi(argv[1]), seed = std::atoi(argv[2]);
    set_limits(8, 8);
    set_stalls(seed, std::atoi(argv[3]));
    set_up(0u - launches, std::atoi(argv[4]) * 1000000ull);  // the epochs wrap on the way
    std::vector<std::thread> threads;
    for (auto& rank : ranks) {
        threads.emplace_back([&, self = rank.get()] {
            for (u32 n = 0; n < launches && !failed; ++n) {
                const bool right = launch_and_check(*self, seed + n);
                const u32 error = host_word<u32>(self->params.error).load();
                if (error && !failed.exchange(true)) std::printf("launch %u: error word %08x\n", n, error);
                if (!right) host_word<u32>(self->params.error + ABORT_OFFSET).store(1);
            }
            if (!failed) return;
            for (auto& other : ranks) host_word<u32>(other->params.error + ABORT_OFFSET).store(1);
        });
    }
    for (auto& thread : threads) thread.join();
    return failed;
}
