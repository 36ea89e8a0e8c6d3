// Makes inputs for the decoders: a valid message with some changes. The same number gives the same input again.
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

struct Random {
    uint64_t state;

    // splitmix64: every 64-bit seed gives another sequence, also neighbouring ones.
    uint64_t next() {
        uint64_t word = state += 0x9E3779B97F4A7C15u;
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
        word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
        return word ^ (word >> 31);
    }

    uint64_t below(uint64_t most) { return most ? next() % most : 0; }
};

const uint64_t kEdges[] = {0, 1, 2, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 0x7FFFFFFF, 0x80000000u,
                           0xFFFFFFFFu, uint64_t(1) << 56, uint64_t(1) << 62, uint64_t(1) << 63, ~uint64_t(0) - 63, ~uint64_t(0)};

// Bytes that begin a value of msgpack.
const uint8_t kTypes[] = {0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xC4, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA,
                          0xCB, 0xCC, 0xCF, 0xD0, 0xD3, 0xD4, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF};

constexpr size_t kHeader = 384;

struct Input {
    uint8_t* bytes;
    size_t size;
    size_t room;

    void change(Random& random, bool is_fixed) {
        // Memory of a fixed size begins with its header, which is short beside the rest.
        const size_t at = random.below(is_fixed && random.below(2) && size > kHeader ? kHeader : size);
        switch (random.below(5)) {
            case 0: bytes[at] ^= uint8_t(1) << random.below(8); break;
            case 1: bytes[at] = uint8_t(random.next()); break;
            case 2: bytes[at] = kTypes[random.below(sizeof kTypes)]; break;
            case 3: bytes[at] = uint8_t(bytes[at] + random.below(9) - 4); break;
            default: put(at, random);
        }
    }

    // Overwrite 2, 4 or 8 bytes by a number at the edge of something, or add a little to the number there.
    void put(size_t at, Random& random) {
        const size_t width = size_t(2) << random.below(3);
        if (size < width) return;
        at = at > size - width ? size - width : at;
        if (random.below(2)) at = at / 8 * 8 + width <= size ? at / 8 * 8 : at;
        uint64_t word = 0;
        std::memcpy(&word, bytes + at, width);
        word = random.below(3) ? kEdges[random.below(sizeof kEdges / sizeof *kEdges)] : word + random.below(17) - 8;
        std::memcpy(bytes + at, &word, width);
    }

    void cut(Random& random) {
        const size_t at = random.below(size), most = size - at < 64 ? size - at : 64, length = random.below(most + 1);
        std::memmove(bytes + at, bytes + at + length, size - at - length);
        size -= length;
    }

    // Insert a piece of another valid message, or of this one.
    void insert(const uint8_t* other, size_t other_size, Random& random) {
        const size_t from = random.below(other_size), left = other_size - from;
        const size_t length = random.below((left < 64 ? left : 64) + 1), at = random.below(size + 1);
        if (!other_size || size + length > room) return;
        std::memmove(bytes + at + length, bytes + at, size - at);
        std::memcpy(bytes + at, other + from, length);
        size += length;
    }
};

}  // namespace

// Write input `number` to `target`, which has `room` bytes, and return its size. `is_fixed`: the size stays.
extern "C" size_t mutate(uint64_t number, const uint8_t* seed, size_t size, const uint8_t* other, size_t other_size,
                         uint8_t* target, size_t room, int is_fixed) {
    Random random{number};
    Input input{target, size < room ? size : room, room};
    std::memcpy(target, seed, input.size);
    for (uint64_t left = 1 + random.below(random.below(4) ? 3 : 12); left && input.size; --left) {
        const uint64_t kind = is_fixed ? 0 : random.below(10);
        if (kind < 7) {
            input.change(random, is_fixed);
        } else if (kind == 7) {
            input.cut(random);
        } else if (kind == 8) {
            input.insert(other, other_size, random);
        } else {
            input.size = random.below(8) ? input.size : random.below(input.size + 1);
        }
    }
    return input.size;
}
