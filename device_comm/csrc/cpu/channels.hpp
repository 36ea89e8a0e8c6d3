// The channels of a group: a bell for each rank, a word per rank for having left, and one with the state of each ordered pair.
// No Python here, so that threads can run it under a sanitizer. DESIGN.md holds the layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace channels {

inline constexpr uint32_t kMaxRanks = 256;

// A missing channel is created by the first of its two ranks that needs it.
enum State : uint32_t { kNone = 0, kMaking = 1, kReady = 2 };

// The bells (shm_broadcast/csrc/ring/bell.hpp) come first, each in a cache line of its own.
inline constexpr size_t kBellBytes = 64;

inline size_t table_bytes(uint32_t ranks) {
    return kBellBytes * ranks + sizeof(std::atomic<uint32_t>) * (static_cast<size_t>(ranks) * ranks + ranks);
}

// The table as one rank sees it, in initially zeroed memory.
class Table {
public:
    Table(unsigned char* base, uint32_t ranks)
        : words_(reinterpret_cast<std::atomic<uint32_t>*>(base + kBellBytes * ranks)), ranks_(ranks) {}

    // Returns the channel's previous state: after kNone the caller must create it.
    State claim(uint32_t from, uint32_t to) {
        uint32_t seen = kNone;
        // SYNC channel->peer (acquire): a rank that sees kReady sees the initialised ring.
        word(from, to).compare_exchange_strong(seen, kMaking, std::memory_order_acquire, std::memory_order_acquire);
        return static_cast<State>(seen);
    }

    // Marks a claimed channel as ready, or as missing if it could not be created.
    void settle(uint32_t from, uint32_t to, bool made) {
        // SYNC channel->peer (release): after the ring was initialised.
        // SYNC ready->left (seq_cst): either we see that the peer has left, or it sees this channel and ends it.
        word(from, to).store(made ? kReady : kNone, std::memory_order_seq_cst);
    }

    State state(uint32_t from, uint32_t to) const {
        // SYNC channel->peer (acquire), SYNC ready->left (seq_cst)
        return static_cast<State>(words_[index(from, to)].load(std::memory_order_seq_cst));
    }

    // Marks `rank` as having left; what it wrote to its channels can still be read.
    void leave(uint32_t rank) { words_[rank].store(1, std::memory_order_seq_cst); }  // SYNC ready->left (seq_cst)

    // Whether `rank` has left; call it after `settle`.
    bool has_left(uint32_t rank) const {
        return words_[rank].load(std::memory_order_seq_cst) != 0;  // SYNC ready->left (seq_cst)
    }

private:
    size_t index(uint32_t from, uint32_t to) const { return ranks_ + static_cast<size_t>(from) * ranks_ + to; }
    std::atomic<uint32_t>& word(uint32_t from, uint32_t to) { return words_[index(from, to)]; }

    std::atomic<uint32_t>* words_;
    uint32_t ranks_;
};
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace channels
