// Prints a checksum of what each kernel makes of the same random bits, so that machines can be compared. Every NaN counts
// as the same one: which NaN comes of two, and the sign of one that comes of numbers, differs between processors.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "reduce.hpp"

namespace {

constexpr std::size_t kRanks = 3, kElements = 4099, kLongestElement = 16;

struct Random {
    std::uint64_t state;
    std::uint64_t operator()() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        return state;
    }
};

// Bytes of a part of an element, and of these bits those of the fraction; 0 where there is no NaN, or only one.
struct Format {
    std::size_t bytes, fraction_bits;
};

Format format(reduce::Type type) {
    switch (type) {
        case reduce::Type::f32:
        case reduce::Type::c64: return {4, 23};
        case reduce::Type::f64:
        case reduce::Type::c128: return {8, 52};
        case reduce::Type::f16:
        case reduce::Type::c32: return {2, 10};
        case reduce::Type::bf16: return {2, 7};
        case reduce::Type::f8e5m2: return {1, 2};
        default: return {1, 0};
    }
}

// Makes every NaN zero.
void drop_nans(reduce::Type type, std::vector<unsigned char>& values) {
    const auto [bytes, fraction_bits] = format(type);
    if (fraction_bits == 0) return;
    const std::uint64_t magnitude = (1ULL << (8 * bytes - 1)) - 1, infinity = magnitude >> fraction_bits << fraction_bits;
    for (std::size_t at = 0; at < values.size(); at += bytes) {
        std::uint64_t value = 0;
        std::memcpy(&value, &values[at], bytes);
        if ((value & magnitude) > infinity) std::memset(&values[at], 0, bytes);
    }
}

std::uint64_t checksum(const std::vector<unsigned char>& bytes) {
    std::uint64_t sum = 0xcbf29ce484222325ULL;  // FNV-1a
    for (const unsigned char byte : bytes) sum = (sum ^ byte) * 0x100000001b3ULL;
    return sum;
}

}  // namespace

int main() {
    Random random{88172645463325252ULL};
    std::vector<unsigned char> parts[kRanks];
    for (auto& part : parts) {
        for (std::size_t i = 0; i < kElements * kLongestElement; ++i) part.push_back(static_cast<unsigned char>(random() >> 32));
    }
    for (std::size_t type = 0; type < reduce::kTypes; ++type) {
        const auto kind = static_cast<reduce::Type>(type);
        std::vector<unsigned char> inputs[kRanks];
        const void* addresses[kRanks];
        for (std::size_t rank = 0; rank < kRanks; ++rank) {
            inputs[rank] = parts[rank];
            // A bool is 0 or 1.
            if (kind == reduce::Type::boolean) for (auto& byte : inputs[rank]) byte &= 1;
            addresses[rank] = inputs[rank].data();
        }
        for (std::size_t op = 0; op < reduce::kOps; ++op) {
            for (const char* level : {"baseline", "neon", "avx2", "avx512"}) {
                for (const bool streaming : {false, true}) {
                    const auto kernel = reduce::kernel_at(static_cast<reduce::Op>(op), kind, level, streaming);
                    if (kernel == nullptr) continue;
                    std::vector<unsigned char> out(kElements * reduce::element_bytes(kind));
                    kernel(out.data(), addresses, kRanks, kElements);
                    drop_nans(kind, out);
                    std::printf("%zu %zu %s %d %016llx\n", type, op, level, streaming,
                                static_cast<unsigned long long>(checksum(out)));
                }
            }
        }
    }
    return 0;
}
