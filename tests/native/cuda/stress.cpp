// Stresses the kernels: every rank of a group is a thread, which runs its kernels as threads. Many launches follow
// each other, with changing kernels, sizes and grids, with stalls, and while the epochs wrap. Every result is compared
// bit by bit with a sum in rank order that is computed here from the inputs. Exits with 1 at the first difference.
#include "shim.hpp"
#include KERNELS
#include "host_launch.hpp"

namespace {

using u8 = unsigned char;

constexpr u64 MOST_ELEMENTS = 4096;  // of a rank: a row of the norm that more than one group of lanes adds
constexpr u64 MOST_COUNT = 1024;
constexpr u64 ARENA_BYTES = 2 * WORLD_SIZE * (MOST_ELEMENTS * 4 + 16 * WORLD_SIZE) / 128 * 128 + 128;
constexpr u64 RESULTS_BYTES = MOST_ELEMENTS * 4 + 128;
constexpr u64 STAGING_BYTES = MOST_COUNT * 4;
constexpr u64 AREA_BYTES = MOST_COUNT * 4 + 16 * WORLD_SIZE;
std::atomic<bool> failed{false};

u32 mixed(u32 value) {
    value = (value ^ value >> 16) * 0x7FEB352Du;
    value = (value ^ value >> 15) * 0x846CA68Bu;
    return value ^ value >> 16;
}

// The conversions of numbers for the reference, written independently of the kernels.
#if DTYPE == 0
using Bits = u32;
double value_of(Bits bits) { return std::bit_cast<float>(bits); }
Bits bits_from(float value) { return std::isnan(value) ? 0x7FFFFFFF : std::bit_cast<u32>(value); }
constexpr Bits SPECIAL[] = {0xFFFFFFFF, 0x80000000, 0, 0x7F800000, 0xFF800000, 1, 0x807FFFFF, 0x7F7FFFFF, 0x7FC00001};
#elif DTYPE == 1
using Bits = u16;
double value_of(Bits bits) {
    const int exponent = bits >> 10 & 31, fraction = bits & 1023;
    const double sign = bits >> 15 ? -1.0 : 1.0;
    if (exponent == 31) return fraction ? NAN : sign * INFINITY;
    return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}
Bits bits_from(float value) {
    if (std::isnan(value)) return 0x7FFF;
    const u16 sign = std::signbit(value) ? 0x8000 : 0;
    const double size = std::fabs(static_cast<double>(value));
    if (size >= 65520.0) return sign | 0x7C00;
    if (size < std::ldexp(1, -14)) return sign | static_cast<u16>(std::nearbyint(std::ldexp(size, 24)));
    int exponent = 0;
    std::frexp(size, &exponent);
    // A fraction of 2048 carries into the exponent by itself.
    return sign | static_cast<u16>(((exponent + 14) << 10) + static_cast<int>(std::nearbyint(std::ldexp(size, 11 - exponent))) - 1024);
}
constexpr Bits SPECIAL[] = {0xFFFF, 0xFFFF, 0x8000, 0, 0x7C00, 0xFC00, 1, 0x83FF, 0x7BFF, 0x7E01};
#else
using Bits = u16;
double value_of(Bits bits) { return std::bit_cast<float>(static_cast<u32>(bits) << 16); }
Bits bits_from(float value) {
    if (std::isnan(value)) return 0x7FFF;
    const u32 bits = std::bit_cast<u32>(value), cut = bits & 0xFFFF, kept = bits >> 16;
    return static_cast<Bits>(kept + (cut > 0x8000 || (cut == 0x8000 && kept & 1)));
}
constexpr Bits SPECIAL[] = {0xFFFF, 0xFFFF, 0x8000, 0, 0x7F80, 0xFF80, 1, 0x807F, 0x7F7F, 0x7FC1};
#endif

constexpr u32 FINITE = 1u << 30;  // in a seed: ordinary numbers only, because one NaN is all that a norm shows

Bits element(u32 seed, u32 rank, u64 i) {
    const u32 word = mixed(seed * 977 + rank * 131071 + static_cast<u32>(i) * 8191 + 5);
    const u32 together = mixed(seed * 31 + static_cast<u32>(i) + 3);
    const u32 kind = seed & FINITE ? 31 : mixed(word) % 32;
    // All ranks get the same special value here, because a sum is -0 only if every addend is -0.
    if (!(seed & FINITE) && together % 16 == 0) return SPECIAL[together / 16 % (sizeof SPECIAL / sizeof *SPECIAL)];
    if (kind < 3) return SPECIAL[word % (sizeof SPECIAL / sizeof *SPECIAL)];
    if (kind < 6) return static_cast<Bits>(word);  // any bits
    return bits_from((static_cast<int>(word % 20011) - 10005) * 0.37f);
}

Bits sum_of(u32 seed, u64 i) {
    float total = static_cast<float>(value_of(element(seed, 0, i)));
    for (u32 r = 1; r < WORLD_SIZE; ++r) total = total + static_cast<float>(value_of(element(seed, r, i)));
    return bits_from(total);
}

struct Rank {
    std::vector<u32> memory, state = std::vector<u32>(1024), error = std::vector<u32>(16);
    alignas(16) Bits in[WORLD_SIZE * MOST_ELEMENTS], out[WORLD_SIZE * MOST_ELEMENTS];
    alignas(16) Bits weight[MOST_ELEMENTS], residual[MOST_ELEMENTS], residual_out[MOST_ELEMENTS];
    u64 table[WORLD_SIZE];
    alignas(16) char area_memory[AREA_BYTES] = {};
    MulticastArea area = {};
    Params params = {};
    u64 base() const { return (reinterpret_cast<u64>(memory.data()) + 127) / 128 * 128; }
};
std::vector<std::unique_ptr<Rank>> ranks;

void set_up(u32 first_epoch, u64 deadline_ns) {
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        ranks.push_back(std::make_unique<Rank>());
        Rank& rank = *ranks.back();
        rank.memory.assign((FLAGS_BYTES + 2 * ARENA_BYTES + STAGING_BYTES + RESULTS_BYTES + 128) / 4, SENTINEL);
        std::fill_n(reinterpret_cast<u32*>(rank.base()), FLAGS_BYTES / 4, first_epoch);
        std::fill_n(rank.state.begin(), 2 * MAX_BLOCKS, first_epoch);
    }
    std::vector<HostAddress> areas;
    for (auto& rank : ranks) areas.push_back(reinterpret_cast<HostAddress>(rank->area_memory));
    const HostAddress window = host_make_window(areas, AREA_BYTES);
    for (u32 r = 0; r < WORLD_SIZE; ++r) {
        ranks[r]->area = {areas[r], window};
        Params& params = ranks[r]->params;
        for (u32 other = 0; other < WORLD_SIZE; ++other) {
            params.workspace[other] = ranks[other]->base();
            ranks[r]->table[other] = reinterpret_cast<u64>(ranks[other]->in);
        }
        params.state = reinterpret_cast<u64>(ranks[r]->state.data());
        params.error = reinterpret_cast<u64>(ranks[r]->error.data());
        params.deadline_ns = deadline_ns;
        params.arena_bytes = ARENA_BYTES;
        params.results_offset = FLAGS_BYTES + 2 * ARENA_BYTES + STAGING_BYTES;
        params.rank = r;
    }
}

bool complain(const char* kernel, u32 rank, u32 number, u64 count, u64 i, u32 got, u32 wanted) {
    if (!failed.exchange(true)) {
        std::printf("%s: rank %u, launch %u of %llu elements: element %llu is %x instead of %x\n", kernel, rank, number,
                    count, i, got, wanted);
    }
    return false;
}

float square_sum(const Bits* row, u32 hidden) {
    float lanes[4][256] = {};
    for (u32 v = 0; v < hidden / ELEMENTS; ++v) {
        float& lane = lanes[v / 256 % 4][v % 256];
        for (u32 e = 0; e < ELEMENTS; ++e) {
            const float value = static_cast<float>(value_of(row[v * ELEMENTS + e]));
            lane = lane + value * value;
        }
    }
    for (u32 half = 128; half; half /= 2) {
        for (auto& group : lanes) {
            for (u32 l = 0; l < half; ++l) group[l] = group[l] + group[l + half];
        }
    }
    return (lanes[0][0] + lanes[2][0]) + (lanes[1][0] + lanes[3][0]);
}

// 8 bits, e4m3fn: a bias of 7 and 3 bits of fraction, without infinity.
u8 fp8_from(float value) {
    if (std::isnan(value)) return 0x7F;
    const u8 sign = std::signbit(value) ? 0x80 : 0;
    const double size = std::min(448.0, std::fabs(static_cast<double>(value)));
    if (size < std::ldexp(1, -6)) return sign | static_cast<u8>(std::nearbyint(std::ldexp(size, 9)));
    int exponent = 0;
    std::frexp(size, &exponent);
    // A fraction of 16 carries into the exponent by itself.
    return sign | static_cast<u8>(((exponent + 6) << 3) + static_cast<int>(std::nearbyint(std::ldexp(size, 4 - exponent))) - 8);
}

// Compares an output of 8 bits with the norm, quantised after it.
bool quantised(const Rank& self, u32 number, const Bits* normed, u32 rows, u32 hidden, const float* given, const float* scales) {
    const u8* found = reinterpret_cast<const u8*>(self.out);
    for (u32 row = 0; row < rows; ++row) {
        float largest = 0;
        for (u32 h = 0; h < hidden; ++h) {
            const float size = std::fabs(static_cast<float>(value_of(normed[row * hidden + h])));
            largest = std::isnan(size) || size > largest ? size : largest;
            if (std::isnan(largest)) break;
        }
        float scale = largest / 448.0f;
        if (scale < 1.0f / (448.0f * 512.0f)) scale = 1.0f / (448.0f * 512.0f);
        if (!given && bits_of(scale) != bits_of(scales[row]) && !(std::isnan(scale) && std::isnan(scales[row]))) {
            return complain("scale", self.params.rank, number, hidden, row, bits_of(scales[row]), bits_of(scale));
        }
        for (u64 i = row * hidden; i < (row + 1ull) * hidden; ++i) {
            const u8 wanted = fp8_from(static_cast<float>(value_of(normed[i])) / (given ? *given : scale));
            if (found[i] != wanted) return complain("fp8", self.params.rank, number, rows * hidden, i, found[i], wanted);
        }
    }
    return true;
}

u8 fp4_from(float value) {
    constexpr double SIZES[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    if (std::isnan(value)) return 7;
    const double size = std::min(6.0, std::fabs(static_cast<double>(value)));
    int best = 0;
    for (int code = 1; code < 8; ++code) {
        const double gain = std::fabs(SIZES[best] - size) - std::fabs(SIZES[code] - size);
        if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
    }
    return static_cast<u8>(best | (std::signbit(value) ? 8 : 0));
}

// Compares an output of 4 bits in blocks with the norm, quantised after it.
bool quantised_blocks(const Rank& self, u32 number, const Bits* normed, u64 count, float unit, const u8* scales) {
    const u8* found = reinterpret_cast<const u8*>(self.out);
    for (u64 block = 0; block < count / 16; ++block) {
        float values[16], largest = 0;
        for (u32 e = 0; e < 16; ++e) {
            values[e] = static_cast<float>(value_of(normed[block * 16 + e]));
            largest = std::isnan(values[e]) || std::isnan(largest) ? NAN : std::max(largest, std::fabs(values[e]));
        }
        const u8 scale = fp8_from(largest / 6.0f * unit);
        if (scales[block] != scale) {
            return complain("block scale", self.params.rank, number, count, block, scales[block], scale);
        }
        const double size = scale & 0x78 ? std::ldexp(8 + (scale & 7), (scale >> 3) - 10) : std::ldexp(scale, -9);
        const float divisor = scale == 0x7F ? NAN : static_cast<float>(size);
        const float factor = scale == 0 ? 0.0f : unit / divisor;
        for (u32 e = 0; e < 16; ++e) {
            const u8 code = found[block * 8 + e / 2] >> e % 2 * 4 & 15, wanted = fp4_from(values[e] * factor);
            if (code != wanted) return complain("nvfp4", self.params.rank, number, count, block * 16 + e, code, wanted);
        }
    }
    return true;
}

// Compares the fused norm with the same steps one by one, each rounded as the contract says.
bool norm(Rank& self, u32 number, u32 grid, u32 block, std::string kernel) {
    const u32 choice = mixed(number + 4);
    if (kernel.empty()) {
        kernel = choice % 2 ? "push_add_rms_norm" : "push_two_shot_add_rms_norm";
        if (choice / 2 % 2) kernel += choice / 8 % 2 ? "_nvfp4" : "_fp8";
    }
    const bool is_fp8 = kernel.ends_with("_fp8"), is_fp4 = kernel.ends_with("_nvfp4");
    if (number % 8) number |= FINITE;
    const u32 cluster = 1u << mixed(number + 2) % 3;
    // Every rank owns some vectors of a row.
    const bool is_wide = mixed(number + 3) % 16 == 0;
    u32 hidden = ((is_wide ? 257 : WORLD_SIZE) + mixed(number) % 20) * ELEMENTS;
    if (is_fp4) hidden = (hidden + 15) / 16 * 16;
    u32 rows = is_wide ? 1 : 1 + mixed(number + 1) % 3;
    const u64 count = rows * hidden;
    float eps = 1e-5f;
    for (u64 i = 0; i < count; ++i) {
        self.in[i] = element(number, self.params.rank, i);
        self.residual[i] = element(number + 77, 9, i);
        self.weight[i] = element(number + 78, 9, i);
    }
    // out may be in, and residual_out may be residual, unless the output is quantised.
    Bits* const out_bits = number & 4 && !is_fp8 && !is_fp4 ? self.in : self.out;
    Bits* const residual_bits = number & 2 && !is_fp8 && !is_fp4 ? self.residual : self.residual_out;
    Bits added[MOST_ELEMENTS];
    std::memcpy(added, self.residual, sizeof added);
    const void *in = self.in, *residual = self.residual, *weight = self.weight;
    void *out = out_bits, *residual_out = residual_bits;
    float tensor_scale = is_fp4 ? 77.0f : 0.01f, row_scales[MOST_ELEMENTS / 64] = {};
    const void* given = is_fp4 || choice / 4 % 2 ? &tensor_scale : nullptr;
    void* scales = row_scales;
    void* args[] = {&self.params, &in, &residual, &weight, &out, &residual_out, &rows, &hidden, &eps, &given, &scales};
    host_launch(kernel.c_str(), grid * cluster, block, 1, args, cluster);
    Bits sums[MOST_ELEMENTS], normed[MOST_ELEMENTS];
    for (u64 i = 0; i < count; ++i) {
        sums[i] = bits_from(static_cast<float>(value_of(sum_of(number, i))) + static_cast<float>(value_of(added[i])));
        if (residual_bits[i] != sums[i]) {
            return complain("residual_out", self.params.rank, number, count, i, residual_bits[i], sums[i]);
        }
    }
    for (u64 i = 0; i < count; ++i) {
        const float mean = square_sum(sums + i / hidden * hidden, hidden) / static_cast<float>(hidden);
        const float scaled = static_cast<float>(value_of(sums[i])) * (1.0f / std::sqrt(mean + eps));
        normed[i] = bits_from(scaled * static_cast<float>(value_of(self.weight[i % hidden])));
        if (!is_fp8 && !is_fp4 && out_bits[i] != normed[i]) {
            return complain(kernel.c_str(), self.params.rank, number, count, i, out_bits[i], normed[i]);
        }
    }
    if (is_fp4) {
        return quantised_blocks(self, number, normed, count, tensor_scale, reinterpret_cast<const u8*>(row_scales));
    }
    return !is_fp8 || quantised(self, number, normed, rows, hidden, static_cast<const float*>(given), row_scales);
}

// A rank's experts, as a function of the launch. One row in 64 lies behind the last one, which gives NaN.
int row_of(u32 number, u32 rank, u32 place, u32 count) {
    const u32 word = mixed(number * 61 + rank * 7919 + place + 11);
    return word % 64 == 0 && !(number & FINITE) ? static_cast<int>(count) : static_cast<int>(word / 64 % (count + 1)) - 1;
}
float weight_of(u32 number, u32 rank, u32 place) {
    return (static_cast<int>(mixed(number * 67 + rank * 7907 + place + 13) % 2001) - 1000) * 0.013f;
}

Bits finalized_of(u32 number, u32 rank, u64 i, u32 hidden, u32 k, u32 count, bool has_shared) {
    const u32 token = static_cast<u32>(i / hidden);
    float total = 0;
    for (u32 e = 0; e < k; ++e) {
        const int row = row_of(number, rank, token * k + e, count);
        if (row < 0) continue;
        const u64 at = static_cast<u64>(row) * hidden + i % hidden;
        const float value = row < static_cast<int>(count) ? static_cast<float>(value_of(element(number, rank, at))) : NAN;
        const float product = weight_of(number, rank, token * k + e) * value;
        total = total + product;
    }
    if (has_shared) total = total + static_cast<float>(value_of(element(number + 79, rank, i)));
    return bits_from(total);
}

// Compares the sums of experts over the ranks with the same steps one by one.
bool finalize(Rank& self, u32 number, u32 grid, u32 block) {
    if (number % 4) number |= FINITE;
    const u32 me = self.params.rank;
    u32 hidden = (1 + mixed(number) % 9) * ELEMENTS, tokens = 1 + mixed(number + 1) % 5, k = mixed(number + 2) % 7;
    u32 count = 1 + mixed(number + 3) % 4;
    const bool has_shared = mixed(number + 4) % 2;
    int rows[5 * 6];
    float weights[5 * 6];
    for (u32 i = 0; i < tokens * k; ++i) {
        rows[i] = row_of(number, me, i, count);
        weights[i] = weight_of(number, me, i);
    }
    for (u64 i = 0; i < count * hidden; ++i) self.in[i] = element(number, me, i);
    for (u64 i = 0; i < tokens * hidden; ++i) self.residual[i] = element(number + 79, me, i);
    const void *outputs = self.in, *places = rows, *factors = weights, *shared = has_shared ? self.residual : nullptr;
    void* out = self.out;
    void* args[] = {&self.params, &outputs, &places, &factors, &shared, &out, &tokens, &hidden, &k, &count};
    host_launch("push_moe_finalize", grid, block, 1, args);
    for (u64 i = 0; i < tokens * hidden; ++i) {
        float total = static_cast<float>(value_of(finalized_of(number, 0, i, hidden, k, count, has_shared)));
        for (u32 r = 1; r < WORLD_SIZE; ++r) {
            total = total + static_cast<float>(value_of(finalized_of(number, r, i, hidden, k, count, has_shared)));
        }
        const Bits wanted = bits_from(total);
        if (self.out[i] != wanted) return complain("push_moe_finalize", me, number, tokens * hidden, i, self.out[i], wanted);
    }
    return true;
}

// Compares a sum whose order is not defined: the inputs are small integers, so every order gives the exact sum.
bool multimem(Rank& self, u32 number, u32 grid, u32 block, u64 count, const std::string& only) {
    const std::string kernel = !only.empty() ? only : number / 2 % 2 ? "multimem_one_shot" : "multimem_two_shot";
    const auto addend = [&](u32 rank, u64 i) {
        return static_cast<int>(mixed(number * 977 + rank * 131071 + static_cast<u32>(i) * 8191) % 17) - 8;
    };
    for (u64 i = 0; i < count; ++i) self.in[i] = bits_from(static_cast<float>(addend(self.params.rank, i)));
    Bits* result = number % 2 ? self.in : self.out;
    const void* in = self.in;
    void* out = result;
    void* args[] = {&self.params, &self.area, &in, &out, &count};
    host_launch(kernel.c_str(), grid, block, 1, args);
    for (u64 i = 0; i < count; ++i) {
        int sum = 0;
        for (u32 r = 0; r < WORLD_SIZE; ++r) sum += addend(r, i);
        const double got = value_of(result[i]);
        if (got != sum) return complain(kernel.c_str(), self.params.rank, number, count, i, result[i], sum);
    }
    return true;
}

const char* const KERNELS_IN_TURN[] = {"push_one_shot",   "push_two_shot", "push_reduce_scatter",
                                       "push_all_gather", "pull_one_shot", "pull_two_shot",
                                       "staged_all_gather"};

bool launch_and_check(Rank& self, u32 number, const std::string& only) {
    const u32 me = self.params.rank, choice = mixed(number * 3 + 1);
    const u32 grid = 1 + choice % 3, block = 1 + choice / 3 % 3;
    const u32 turn = choice / 9 % 10;
    const u64 most = choice / 63 % 5 ? 64 : MOST_COUNT;
    u64 count = 1 + mixed(number * 5 + 2) % most;
    for (u64 i = 0; i < WORLD_SIZE * count; ++i) self.in[i] = element(number, me, i);
    if (only.find("rms_norm") != only.npos || (only.empty() && turn == 7)) return norm(self, number, grid, block, only);
    if (only == "push_moe_finalize" || (only.empty() && turn == 8)) return finalize(self, number, grid, block);
    if (only.starts_with("multimem") || (only.empty() && turn == 9)) {
        return multimem(self, number, grid, block, count, only);
    }
    const std::string kernel = only.empty() ? KERNELS_IN_TURN[turn] : only;
    const bool pull = kernel.starts_with("pull"), gather = kernel.ends_with("all_gather");
    const bool in_place = choice / 315 % 2 && (kernel == "push_one_shot" || kernel.ends_with("two_shot"));
    const void *in = self.in, *table = self.table;
    void* out = in_place ? self.in : self.out;
    u64 size = gather ? count * sizeof(Bits) : count;
    void* args[] = {&self.params, pull ? static_cast<void*>(&table) : static_cast<void*>(&in), &out, &size};
    host_launch(kernel.c_str(), grid, block, 1, args);
    const Bits* result = in_place ? self.in : self.out;
    const u64 shift = kernel == "push_reduce_scatter" ? me * count : 0;
    for (u64 i = 0; i < (gather ? WORLD_SIZE * count : count); ++i) {
        const Bits wanted =
            gather ? element(number, static_cast<u32>(i / count), i % count) : sum_of(number, i + shift);
        if (result[i] != wanted) return complain(kernel.c_str(), me, number, count, i, result[i], wanted);
    }
    return true;
}

}  // namespace

// stress LAUNCHES SEED STALLS_PER_MILLION DEADLINE_MS [KERNEL]
int main(int argc, char** argv) {
    if (argc < 5) return 2;
    const u32 launches = std::atoi(argv[1]), seed = std::atoi(argv[2]);
    const std::string only = argc > 5 ? argv[5] : "";
    set_limits(8, 8);
    set_stalls(seed, std::atoi(argv[3]));
    set_up(0u - launches / 2, std::atoi(argv[4]) * 1000000ull);  // the epochs wrap half-way
    std::vector<std::thread> threads;
    for (auto& rank : ranks) {
        threads.emplace_back([&, self = rank.get()] {
            for (u32 n = 0; n < launches && !failed; ++n) {
                const bool right = launch_and_check(*self, seed + n, only);
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
