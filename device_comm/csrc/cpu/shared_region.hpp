// The shared region of one group of ranks, and the step from which every collective is built. No Python here, so that
// threads can run it under a sanitizer. DESIGN.md holds the layout and the proof.
#pragma once

#include "../../../shm_broadcast/csrc/ring/ring.hpp"

#include <unistd.h>

#include <algorithm>

namespace region {

using ring::futex_wait;
using ring::futex_wake_all;
using ring::now_ns;
using ring::pause;
using ring::rounded;

inline constexpr uint64_t kMagic = 0x31425246434721;  // "!GCFRB1" in memory order
inline constexpr uint32_t kVersion = 1;
inline constexpr size_t kLine = 64;
inline constexpr size_t kPage = 4096;
inline constexpr uint32_t kMaxRanks = 256;

// Written once, before any other rank maps the segment.
struct alignas(kLine) Identity {
    uint64_t magic;
    uint32_t version;
    uint32_t ranks;
    uint64_t slot_bytes;
    uint64_t data_offset;
    uint64_t generation;
};

// Written by any rank that finds the group broken.
struct alignas(kLine) State {
    std::atomic<uint32_t> broken;
};

// A rank's description of its call. Ranks compare their views before they touch any data.
struct View {
    uint64_t number;  // of the call
    uint64_t code;    // kind, dtype, reduction, root
    uint64_t count;   // elements, or bytes
    uint64_t detail;  // hash of further parameters that must be equal
    bool operator==(const View&) const = default;
};

// Written by one rank and read by all; each rank has one for even steps and one for odd steps.
struct alignas(kLine) Post {
    std::atomic<uint64_t> step;  // number of the step that was posted
    View view;
    uint64_t steps;  // number of steps that this rank needs for its part of the call
    std::atomic<int32_t> core;  // core on which the rank ran; a hint
};

// The futex word on which one rank sleeps, and its flags.
struct alignas(kLine) Bell {
    std::atomic<uint32_t> word;    // futex word: changes when a peer posts while the rank sleeps
    std::atomic<uint32_t> parked;  // the rank sleeps, or is about to
    std::atomic<uint32_t> closed;  // the rank has left the group and posts nothing more
};

struct RankBlock {
    Post posts[2];
    Bell bell;
};
static_assert(sizeof(Identity) == kLine && sizeof(State) == kLine && sizeof(Post) == kLine && sizeof(Bell) == kLine);
static_assert(sizeof(RankBlock) == 3 * kLine);

inline size_t data_offset(uint32_t ranks) { return rounded(2 * kLine + ranks * sizeof(RankBlock), kPage); }
inline size_t segment_bytes(uint32_t ranks, size_t slot_bytes) { return data_offset(ranks) + 2 * ranks * slot_bytes; }

enum class Wait { kDone, kTime, kSignal, kClosed, kLeft, kMore };  // kMore: only inside of `wait`

// The segment as one rank sees it. In each step of a call a rank fills its slot, posts, waits until all have posted, and
// reads the other slots. Slots and posts are double-buffered: a rank fills those of step s after all have posted step
// s-1, and a rank that has posted step s-1 has finished with step s-2.
class SharedRegion {
public:
    SharedRegion(unsigned char* base, size_t bytes, uint32_t rank) : base_(base), bytes_(bytes), rank_(rank) {
        if (bytes >= kPage) identity_ = *reinterpret_cast<Identity*>(base);
    }

    // Initialises a fresh, zeroed mapping; returns false if the sizes do not fit.
    static bool format(unsigned char* base, size_t bytes, uint32_t ranks, size_t slot_bytes, uint64_t generation) {
        if (!fits(ranks, slot_bytes, bytes)) return false;
        *reinterpret_cast<Identity*>(base) = {kMagic, kVersion, ranks, slot_bytes, data_offset(ranks), generation};
        return true;
    }

    bool valid() const {
        return identity_.magic == kMagic && identity_.version == kVersion && rank_ < identity_.ranks &&
               fits(identity_.ranks, identity_.slot_bytes, bytes_) &&
               identity_.data_offset == data_offset(identity_.ranks);
    }

    uint32_t ranks() const { return identity_.ranks; }
    uint32_t rank() const { return rank_; }
    size_t slot_bytes() const { return identity_.slot_bytes; }

    // The slot of `rank` for the current step; after `begin`, for the new step.
    unsigned char* slot(uint32_t rank) {
        return base_ + identity_.data_offset + (2 * rank + (next_ & 1)) * identity_.slot_bytes;
    }

    // Begins a step; from now on `slot` returns slots of the new step.
    void begin() { next_ = step_ + 1; }

    // Posts the step, after this rank has filled its slot, and wakes sleeping peers.
    void post(const View& view, uint64_t steps) {
        step_ = next_;
        Post& own = block(rank_).posts[step_ & 1];
        own.view = view;
        own.steps = steps;
        own.core.store(sched_getcpu(), std::memory_order_relaxed);
        // SYNC slot->ranks (release): slot and view are visible before the step is; and our reads of other slots in
        // the previous step happen before their owners fill them again.
        own.step.store(step_, std::memory_order_release);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC post->parked (seq_cst)
        for (uint32_t r = 0; r < ranks(); ++r) {
            if (r != rank_ && block(r).bell.parked.load(std::memory_order_relaxed) != 0) ring_bell(r);
        }
    }

    bool has_posted(uint32_t rank) {
        // SYNC slot->ranks (acquire): that rank's slot is visible, and it has finished reading our previous one.
        return block(rank).posts[step_ & 1].step.load(std::memory_order_acquire) >= step_;
    }

    // The lowest rank, starting at `from`, that has not posted the step; `ranks()` if all have.
    uint32_t first_missing(uint32_t from) {
        while (from < ranks() && has_posted(from)) ++from;
        return from;
    }

    // The post of a rank for the current step.
    const Post& posted(uint32_t rank) { return block(rank).posts[step_ & 1]; }

    bool is_closed() { return block(rank_).bell.closed.load(std::memory_order_relaxed) != 0; }

    // Whether a rank found the group broken. A call that could still complete must not do so then, because it failed on
    // other ranks. A rank that leaves an intact group has completed its part.
    bool is_broken() { return state().broken.load(std::memory_order_relaxed) != 0; }

    // Leaves the group: ends this rank's waiting, and the waiting of others for this rank, for good.
    void close(bool breaks) {
        if (breaks) state().broken.store(1, std::memory_order_relaxed);
        // SYNC leave->ranks (release): after the last post.
        block(rank_).bell.closed.store(1, std::memory_order_release);
        for (uint32_t r = 0; r < ranks(); ++r) ring_bell(r);
    }

    // Whether a rank has left without posting the step.
    bool is_left_alone() {
        for (uint32_t r = 0; r < ranks(); ++r) {
            // SYNC leave->ranks (acquire): a rank that sees `closed` also sees that rank's last post.
            if (block(r).bell.closed.load(std::memory_order_acquire) != 0 && !has_posted(r)) return true;
        }
        return false;
    }

    // Polls for a few microseconds; returns whether all have posted the step.
    bool poll() {
        uint32_t missing = first_missing(0);
        for (int i = 0; missing != ranks() && i < polls(); ++i) {
            pause();
            missing = first_missing(missing);
        }
        return missing == ranks();
    }

    // Whether there is a core for each rank. (A rank that an engine has pinned may run on one core only, so the number of
    // cores that this thread may use does not tell.)
    bool has_core_each() const {
        static const long cores = sysconf(_SC_NPROCESSORS_ONLN);
        return static_cast<long>(ranks()) <= cores;
    }

    // Waits until all have posted the step: polls for `spin_ns`, then sleeps until `until_ns` at most. It yields only to
    // another rank: an unrelated process that never sleeps would keep the core for a time slice of about 3 ms. A step of an
    // engine on two cores with such a process took 1.21 of stock's time with yields, and 0.96 without.
    Wait wait(uint64_t spin_ns, uint64_t until_ns) {
        uint32_t missing = first_missing(0);
        if (missing == ranks()) return Wait::kDone;
        const uint64_t start = now_ns(), spin_until = std::min(start + spin_ns, until_ns);
        while (true) {
            for (int i = 0; i < polls(); ++i) {
                missing = first_missing(missing);
                if (missing == ranks()) return Wait::kDone;
                pause();
            }
            if (is_closed()) return Wait::kClosed;
            if (is_left_alone()) return Wait::kLeft;
            if (now_ns() >= spin_until) break;
            is_crowded_ = shares_core(missing);
            if (is_crowded_ && start - moved_ns_ >= kMoveNs) {
                moved_ns_ = start;
                const Wait status = sleep(missing, until_ns, true);
                if (status != Wait::kMore) return status;
            }
            if (!has_core_each() || keeps_core(missing)) sched_yield();
        }
        return sleep(missing, until_ns, false);
    }

private:
    // Whether a mapping of `bytes` has room for a region of this shape.
    static bool fits(uint32_t ranks, uint64_t slot_bytes, size_t bytes) {
        if (ranks == 0 || ranks > kMaxRanks || slot_bytes < kPage || slot_bytes % kPage != 0) return false;
        return slot_bytes <= bytes && segment_bytes(ranks, slot_bytes) <= bytes;
    }

    int polls() const { return is_crowded_ ? 1 : 128; }
    // A rank that waits for a rank on the same core sleeps at once, but at most once in this time: the kernel wakes it on
    // an idle core if there is one. If both poll and yield instead, an all-reduce of 1 KB takes 23 us instead of 3, until
    // the kernel moves one of them, after 24 ms on Linux 6.18.
    static constexpr uint64_t kMoveNs = 1000 * 1000;

    // Whether `rank` ran on this core in the previous step.
    bool shares_core(uint32_t rank) {
        const int32_t core = block(rank).posts[(step_ - 1) & 1].core.load(std::memory_order_relaxed);
        return step_ > 1 && core >= 0 && core == sched_getcpu();
    }

    // Whether a rank that has not posted, `from` or a higher one, ran on this core in the previous step. So a rank yields
    // to others also where the group has fewer cores than the machine, as in a container.
    bool keeps_core(uint32_t from) {
        for (uint32_t rank = from; rank < ranks(); ++rank) {
            if (!has_posted(rank) && shares_core(rank)) return true;
        }
        return false;
    }

    State& state() { return *reinterpret_cast<State*>(base_ + kLine); }

    RankBlock& block(uint32_t rank) { return reinterpret_cast<RankBlock*>(base_ + 2 * kLine)[rank]; }

    void ring_bell(uint32_t rank) {
        // SYNC post->parked (seq_cst): after the post that the sleeper waits for.
        block(rank).bell.word.fetch_add(1, std::memory_order_seq_cst);
        futex_wake_all(block(rank).bell.word);
    }

    // Sleeps until all have posted the step. If `moves`, returns kMore once the first missing rank has posted.
    Wait sleep(uint32_t missing, uint64_t until_ns, bool moves) {
        Bell& bell = block(rank_).bell;
        const uint32_t first = missing;
        while (true) {
            const uint32_t seen = bell.word.load(std::memory_order_relaxed);
            bell.parked.store(1, std::memory_order_relaxed);
            // SYNC post->parked (seq_cst): either a poster sees that we sleep, or we see its post.
            std::atomic_thread_fence(std::memory_order_seq_cst);
            missing = first_missing(missing);
            const uint64_t now = now_ns();
            const bool stops = missing == ranks() || is_closed() || is_left_alone() || now >= until_ns;
            const bool signalled = !stops && !futex_wait(bell.word, seen, until_ns - now);
            bell.parked.store(0, std::memory_order_relaxed);
            block(rank_).posts[step_ & 1].core.store(sched_getcpu(), std::memory_order_relaxed);
            missing = first_missing(missing);
            if (missing == ranks()) return Wait::kDone;
            if (is_closed()) return Wait::kClosed;
            if (is_left_alone()) return Wait::kLeft;
            if (signalled) return Wait::kSignal;
            if (now_ns() >= until_ns) return Wait::kTime;
            if (moves && missing != first) return Wait::kMore;
        }
    }

    unsigned char* base_;
    size_t bytes_;
    uint32_t rank_;
    Identity identity_{};
    uint64_t step_ = 0;  // the last step that this rank posted
    uint64_t next_ = 0;  // the step whose slots `slot` returns
    uint64_t moved_ns_ = 0;    // when this rank last slept to get another core
    bool is_crowded_ = false;  // the last missing rank runs on the same core
};

}  // namespace region
