// The status board of one group on one host: what its ranks report, in memory that outlives each of them. No Python here.
// DESIGN.md holds the layout and the proof.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

namespace status {

inline constexpr size_t kLine = 64;
inline constexpr uint32_t kMaxRanks = 256;
inline constexpr uint32_t kPlanes = 5;
inline constexpr size_t kNameWords = 7;
inline constexpr size_t kNameBytes = kNameWords * sizeof(uint64_t);
inline constexpr size_t kRecordBytes = 3704;

struct alignas(kLine) Head {
    std::atomic<uint32_t> holder;  // 1 + the rank whose record counts, or 0
};

// The call in which a rank waits. Only that rank writes it, while others read: the words are atomic, so a reader sees at
// worst the beginning of one name and the end of another.
struct alignas(kLine) Arrived {
    std::atomic<uint64_t> number;  // twice that of the collective, + 1 when the wait is over; 0 before the first
    std::atomic<uint64_t> name[kNameWords];
};

struct alignas(kLine) Entry {
    std::atomic<uint32_t> left;  // the rank has destroyed the group
    Arrived arrived[kPlanes];
    alignas(kLine) uint64_t length;
    unsigned char record[kRecordBytes];
};
static_assert(sizeof(Head) == kLine && sizeof(Arrived) == kLine && sizeof(Entry) == 4096);

inline size_t board_bytes(uint32_t ranks) { return 4096 + ranks * sizeof(Entry); }

class Board {
public:
    Board(unsigned char* base, uint32_t ranks) : base_(base), ranks_(ranks) {}

    // Writes the record of `rank`, and makes it the one that counts unless there is one. A rank that dies in between has
    // written nothing that anybody reads. One thread at a time calls it for a rank.
    void publish(uint32_t rank, const char* record, size_t bytes) {
        if (head().holder.load(std::memory_order_relaxed) != 0) return;
        Entry& own = entry(rank);
        own.length = std::min(bytes, kRecordBytes);
        std::memcpy(own.record, record, own.length);
        uint32_t nobody = 0;
        // SYNC record->ranks (release): the record is complete before it counts, and is never written again.
        head().holder.compare_exchange_strong(nobody, rank + 1, std::memory_order_release, std::memory_order_relaxed);
    }

    // The record that counts, or an empty text.
    std::string record() {
        // SYNC record->ranks (acquire)
        const uint32_t holder = head().holder.load(std::memory_order_acquire);
        if (holder == 0 || holder > ranks_) return {};
        const Entry& found = entry(holder - 1);
        const size_t length = std::min<size_t>(found.length, kRecordBytes);
        return {reinterpret_cast<const char*>(found.record), length};
    }

    void arrive(uint32_t rank, uint32_t plane, uint64_t number, const char* name, size_t bytes) {
        uint64_t words[kNameWords] = {};
        std::memcpy(words, name, std::min(bytes, kNameBytes));
        Arrived& own = entry(rank).arrived[plane];
        for (size_t i = 0; i < kNameWords; ++i) own.name[i].store(words[i], std::memory_order_relaxed);
        // SYNC arrival->ranks (release): after the name.
        own.number.store(number, std::memory_order_release);
    }

    // The number of the collective in which `rank` waits or waited last, and its name; 0 if it has not waited.
    uint64_t arrival(uint32_t rank, uint32_t plane, std::string* name) {
        const Arrived& seen = entry(rank).arrived[plane];
        // SYNC arrival->ranks (acquire)
        const uint64_t number = seen.number.load(std::memory_order_acquire);
        uint64_t words[kNameWords];
        for (size_t i = 0; i < kNameWords; ++i) words[i] = seen.name[i].load(std::memory_order_relaxed);
        const char* text = reinterpret_cast<const char*>(words);
        name->assign(text, strnlen(text, kNameBytes));
        return number;
    }

    void leave(uint32_t rank) { entry(rank).left.store(1, std::memory_order_relaxed); }

    bool has_left(uint32_t rank) { return entry(rank).left.load(std::memory_order_relaxed) != 0; }

private:
    Head& head() { return *reinterpret_cast<Head*>(base_); }
    Entry& entry(uint32_t rank) { return reinterpret_cast<Entry*>(base_ + 4096)[rank]; }

    unsigned char* base_;
    uint32_t ranks_;
};

}  // namespace status
