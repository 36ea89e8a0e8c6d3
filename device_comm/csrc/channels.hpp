// Which channels of a group there are: a word for each ordered pair of ranks, and one for each rank that has left.
// No Python here, so that it also runs as threads under a sanitizer. DESIGN.md holds the layout.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace channels {

inline constexpr uint32_t kMaxRanks = 256;

// A channel that is not there is made by whichever of its two ranks needs it first.
enum State : uint32_t { kNone = 0, kMaking = 1, kReady = 2 };

inline size_t table_bytes(uint32_t ranks) {
    return sizeof(std::atomic<uint32_t>) * (static_cast<size_t>(ranks) * ranks + ranks);
}

// The table as one rank sees it, in memory that was zero at first.
class Table {
public:
    Table(unsigned char* base, uint32_t ranks) : words_(reinterpret_cast<std::atomic<uint32_t>*>(base)), ranks_(ranks) {}

    // Returns what the channel was: after kNone it is the caller who makes it.
    State claim(uint32_t from, uint32_t to) {
        uint32_t seen = kNone;
        // SYNC channel->peer (acquire): who sees kReady sees the ring as it was laid out.
        word(from, to).compare_exchange_strong(seen, kMaking, std::memory_order_acquire, std::memory_order_acquire);
        return static_cast<State>(seen);
    }

    // Says that the channel was made, or could not be.
    void settle(uint32_t from, uint32_t to, bool made) {
        // SYNC channel->peer (release): behind the layout of the ring.
        // SYNC ready->left (seq_cst): either we see that the peer has left, or it sees this channel and ends it.
        word(from, to).store(made ? kReady : kNone, std::memory_order_seq_cst);
    }

    State state(uint32_t from, uint32_t to) const {
        // SYNC channel->peer (acquire), SYNC ready->left (seq_cst)
        return static_cast<State>(words_[index(from, to)].load(std::memory_order_seq_cst));
    }

    // Says that `rank` uses no channel any more; what it wrote can still be read.
    void leave(uint32_t rank) { words_[rank].store(1, std::memory_order_seq_cst); }  // SYNC ready->left (seq_cst)

    // Whether `rank` has left; asked behind `settle`.
    bool has_left(uint32_t rank) const {
        return words_[rank].load(std::memory_order_seq_cst) != 0;  // SYNC ready->left (seq_cst)
    }

    uint32_t ranks() const { return ranks_; }

private:
    size_t index(uint32_t from, uint32_t to) const { return ranks_ + static_cast<size_t>(from) * ranks_ + to; }
    std::atomic<uint32_t>& word(uint32_t from, uint32_t to) { return words_[index(from, to)]; }

    std::atomic<uint32_t>* words_;
    uint32_t ranks_;
};
static_assert(sizeof(std::atomic<uint32_t>) == 4 && std::atomic<uint32_t>::is_always_lock_free);

}  // namespace channels
