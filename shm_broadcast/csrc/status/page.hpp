// The layout of the status page, the sequence lock of its records, and a reader's consistent copy. There is no Python in here, so
// that tests can run it as threads. DESIGN.md has the table of the layout, which `shm_broadcast/status/layout.py` states too.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace status {

inline constexpr uint64_t kMagic = 0x3154415453434721;  // "!GCSTAT1" in memory order
inline constexpr uint32_t kVersion = 1;
inline constexpr uint32_t kGroups = 64, kQueues = 64, kLanes = 128, kCounters = 192, kRecords = 4096;
inline constexpr uint32_t kKinds = 64;    // kinds of calls; see `shm_broadcast/status/kinds.py`
inline constexpr uint32_t kBuckets = 30;  // bucket i counts waits below 2^(i + 8) ns, the last one all longer ones
inline constexpr uint16_t kNobody = 0xFFFF;

// What a rank does in a lane.
enum class State : uint8_t { kIdle = 0, kComputing = 1, kPosted = 2, kAsleep = 3 };

// How a call ended.
enum class Outcome : uint8_t { kDone = 0, kFailed = 1, kDisagreed = 2 };

// Written before the page is shared, except for the words at the end.
struct Header {
    uint64_t magic;
    uint32_t version;
    uint32_t clock;        // a value of `Clock`
    uint64_t page_bytes;
    uint64_t ticks;        // the page's clock at `monotonic_ns`
    uint64_t monotonic_ns; // CLOCK_MONOTONIC
    uint64_t rate;         // nanoseconds per tick, times 2^32
    int64_t realtime_ns;   // CLOCK_REALTIME minus CLOCK_MONOTONIC
    uint64_t pid;
    uint64_t start_ticks;     // of the process, in clock ticks since boot
    uint64_t pid_namespace;   // inode
    uint64_t time_namespace;  // inode
    char boot_id[40];
    char hostname[64];
    std::atomic<int32_t> rank;  // the process's rank in the world, or -1
    std::atomic<uint32_t> world_size;
    std::atomic<uint32_t> stack_signal;  // makes the process write its stacks; 0: none does
    std::atomic<uint32_t> refused;       // groups, queues and lanes for which there was no room
    std::atomic<uint64_t> records;       // calls that were recorded so far
};

// The records below begin with a sequence number, which is odd while the owner writes. The owner is one process, and all writes are
// made with the GIL held, but for the state of a lane.
struct alignas(64) GroupRecord {
    std::atomic<uint32_t> sequence;
    uint32_t state;  // a value of `GroupState` in `layout.py`; 0: the place is free
    uint32_t epoch;
    uint32_t rank;   // of this process in the group
    uint32_t world_size;
    uint32_t reserved;
    uint64_t created_ns;  // CLOCK_MONOTONIC
    char name[160];
    uint16_t ranks[256];  // global ranks of the first 256 members
    char cause[320];      // why it is broken
};

struct alignas(64) QueueRecord {
    std::atomic<uint32_t> sequence;
    uint32_t state;      // 1: open; 0: the place is free
    uint64_t inode;      // of the segment with the ring
    uint64_t offset;     // of the ring in the segment
    int32_t reader;      // the reader's place in the ring, or -1 for the writer
    uint32_t descriptor; // of the segment in this process
    char name[96];
};

// What does not change while the lane is in use.
struct alignas(64) LaneName {
    std::atomic<uint32_t> sequence;
    uint32_t group;  // place of the group, plus 1; 0: the place is free
    char plane[24];
    char algorithm[32];
};

// The last call, which goes on unless the state is idle.
struct alignas(64) LaneCall {
    std::atomic<uint32_t> sequence;
    std::atomic<uint8_t> state;  // changes without the sequence number, as it is one byte
    uint8_t kind;
    uint8_t dtype;
    uint8_t op;
    uint64_t number;
    uint64_t count;  // elements, or bytes
    uint64_t begin;  // ticks
    uint64_t end;    // ticks; of the last call that has ended
    uint64_t detail; // hash of what else must be equal on all ranks
    uint64_t nbytes; // that this rank brings
    uint32_t root;   // or the other rank of a call between two
    uint32_t reserved;
};

struct LaneRecord {
    LaneName name;
    LaneCall call;
};

struct alignas(64) CounterRecord {
    std::atomic<uint32_t> sequence;
    uint32_t lane;  // plus 1; 0: the place is free
    uint32_t kind;
    uint32_t reserved;
    uint64_t calls;
    uint64_t errors;
    uint64_t nbytes;
    uint64_t waited_ns;  // for the last rank to come
    uint64_t last;       // calls to which this rank came last
    uint64_t late_ns;    // in these, how long after the one before
    uint64_t sleeps;
    uint64_t polled_ns;  // in waits of more than some microseconds
    uint64_t waits[kBuckets];
};

// A call that has ended.
struct alignas(64) CallRecord {
    std::atomic<uint64_t> commit;  // 1 more than the number of records before this one; 0 while it is written
    uint64_t number;
    uint64_t count;
    uint64_t begin;  // ticks, when the rank came
    uint64_t end;    // ticks
    uint16_t lane;
    uint16_t last;   // the rank in the group that came last, or `kNobody`
    uint8_t kind;
    uint8_t dtype;
    uint8_t op;
    uint8_t outcome;
    uint32_t root;
    uint32_t detail;
    uint32_t waited_ns;  // these two end at 2^32 - 1
    uint32_t late_ns;
};

struct Page {
    alignas(4096) Header header;
    alignas(4096) GroupRecord groups[kGroups];
    QueueRecord queues[kQueues];
    LaneRecord lanes[kLanes];
    CounterRecord counters[kCounters];
    alignas(4096) CallRecord records[kRecords];
};
static_assert(sizeof(GroupRecord) == 1024 && sizeof(QueueRecord) == 128 && sizeof(LaneRecord) == 128);
static_assert(sizeof(CounterRecord) == 320 && sizeof(CallRecord) == 64);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint8_t>::is_always_lock_free);

// Marks a record as being written for the life of this object. A process that is killed meanwhile leaves it odd for ever: readers
// then take what is there, and say so.
template <typename Record>
class Writing {
public:
    explicit Writing(Record& record) : record_(record), before_(record.sequence.load(std::memory_order_relaxed) & ~1U) {
        record_.sequence.store(before_ + 1, std::memory_order_relaxed);
        // SYNC odd->copier (release): a reader of a word that is written below also sees the odd number.
        std::atomic_thread_fence(std::memory_order_release);
    }
    ~Writing() {
        // SYNC words->copier (release): a reader of the even number also sees all words written before.
        record_.sequence.store(before_ + 2, std::memory_order_release);
    }
    Writing(const Writing&) = delete;
    Writing& operator=(const Writing&) = delete;

private:
    Record& record_;
    uint32_t before_;
};

// The words of a record are plain, and a reader may copy them while they are written; it then takes the copy
// for torn. In theory a compiler may do anything with such a race, so writers use `put` and readers
// `copy_words`.
template <typename Word>
void put(Word& word, Word value) {
    std::atomic_ref<Word>(word).store(value, std::memory_order_relaxed);
}

// Copies `bytes`, a multiple of 8, from memory that another process may be writing.
inline void copy_words(unsigned char* to, const unsigned char* from, size_t bytes) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
        uint64_t word = __atomic_load_n(reinterpret_cast<const uint64_t*>(from + at), __ATOMIC_RELAXED);
        std::memcpy(to + at, &word, sizeof(word));
    }
}

// How often a reader tries again to copy a record that is being written. Writing one takes less than 0.1 us.
inline constexpr int kTries = 1000;

// Copies a record whose first word is its sequence number; if no try was consistent, it is odd in the copy.
inline void copy_record(unsigned char* to, const unsigned char* from, size_t bytes) {
    const auto* sequence = reinterpret_cast<const uint32_t*>(from);
    for (int i = 0; i < kTries; ++i) {
        // SYNC words->copier (acquire): the words are at least as new as this number.
        const uint32_t before = __atomic_load_n(sequence, __ATOMIC_ACQUIRE);
        copy_words(to, from, bytes);
        // SYNC odd->copier (acquire): if one of the words is newer, so is the number below.
        std::atomic_thread_fence(std::memory_order_acquire);
        const uint32_t after = __atomic_load_n(sequence, __ATOMIC_RELAXED);
        if (before == after && before % 2 == 0) return;
    }
    uint32_t odd = 0;
    std::memcpy(&odd, to, sizeof(odd));
    odd |= 1U;
    std::memcpy(to, &odd, sizeof(odd));
}

// Copies a call's record; if no try was consistent, its `commit` is 0 in the copy.
inline void copy_call(unsigned char* to, const unsigned char* from) {
    const auto* commit = reinterpret_cast<const uint64_t*>(from);
    for (int i = 0; i < kTries; ++i) {
        // SYNC words->copier (acquire): the words are at least as new as this number.
        const uint64_t before = __atomic_load_n(commit, __ATOMIC_ACQUIRE);
        copy_words(to, from, sizeof(CallRecord));
        // SYNC odd->copier (acquire): if one of the words is newer, so is the number below.
        std::atomic_thread_fence(std::memory_order_acquire);
        if (before == __atomic_load_n(commit, __ATOMIC_RELAXED)) return;
    }
    std::memset(to, 0, sizeof(uint64_t));
}

// Copies a whole page, each record by itself. No content of the page decides where the copy reads.
inline void copy_page(unsigned char* to, const unsigned char* from) {
    // SYNC page->finder (acquire): if the magic number is there, so is the rest of the header.
    const uint64_t magic = __atomic_load_n(reinterpret_cast<const uint64_t*>(from), __ATOMIC_ACQUIRE);
    copy_words(to, from, offsetof(Page, groups));
    std::memcpy(to, &magic, sizeof(magic));
    const auto each = [&](size_t offset, size_t bytes, size_t number) {
        for (size_t i = 0; i < number; ++i) copy_record(to + offset + i * bytes, from + offset + i * bytes, bytes);
    };
    each(offsetof(Page, groups), sizeof(GroupRecord), kGroups);
    each(offsetof(Page, queues), sizeof(QueueRecord), kQueues);
    each(offsetof(Page, lanes), sizeof(LaneName), 2 * kLanes);
    each(offsetof(Page, counters), sizeof(CounterRecord), kCounters);
    for (size_t i = 0; i < kRecords; ++i) {
        const size_t at = offsetof(Page, records) + i * sizeof(CallRecord);
        copy_call(to + at, from + at);
    }
}

}  // namespace status
