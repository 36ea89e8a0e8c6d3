// The shared region of one group of ranks, and the step from which every collective is built. No Python here, so that
// threads can run it under a sanitizer. DESIGN.md holds the layout and the proof.
#pragma once

#include "../../../shm_broadcast/csrc/ring/ring.hpp"
#include "../../../shm_broadcast/csrc/status/lane.hpp"

#include <unistd.h>

#include <algorithm>
#include <list>
#include <string>
#include <utility>

namespace region {

using ring::futex_wait;
using ring::futex_wake_all;
using ring::now_ns;
using ring::pause;
using ring::rounded;

inline constexpr uint64_t kMagic = 0x31425246434721;  // "!GCFRB1" in memory order
inline constexpr uint32_t kVersion = 3;
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

// Written by any rank, but seldom: when one sleeps, wakes the others, leaves, or finds the group broken.
struct alignas(kLine) State {
    std::atomic<uint32_t> broken;
    std::atomic<uint32_t> gong;         // futex word on which all ranks sleep: changes when they have to look again
    std::atomic<uint32_t> sleeping[2];  // for even and odd steps: the last one, modulo 2^32, in which a rank went to sleep
};

// A rank's description of its call. Ranks compare their views before they touch any data.
struct View {
    uint64_t number;  // of the call
    uint64_t code;    // kind, dtype, reduction, root
    uint64_t count;   // elements, or bytes
    uint64_t detail;  // hash of further parameters that must be equal, and of the call of which this one is a part
    bool operator==(const View&) const = default;
};

// Written by one rank and read by all; each rank has one for even steps and one for odd steps.
struct alignas(kLine) Post {
    std::atomic<uint64_t> step;  // number of the step that was posted
    View view;
    uint64_t steps;  // number of steps that this rank needs for its part of the call
    std::atomic<int32_t> core;  // core on which the rank ran; a hint
    uint64_t arrived;  // on the clock of the status page, when the rank came to the call; 0 unless this is the call's first step
};

// Written by one rank when it leaves.
struct alignas(kLine) Exit {
    std::atomic<uint32_t> closed;  // the rank has left the group and posts nothing more
};

// The kind in the view of a call that its rank refused; its slot holds the length of the reason and the reason.
inline constexpr uint64_t kRefused = 0xFF;
inline constexpr size_t kReasonBytes = 1024;

struct RankBlock {
    Post posts[2];
    Exit exit;
};
static_assert(sizeof(Identity) == kLine && sizeof(State) == kLine && sizeof(Post) == kLine && sizeof(Exit) == kLine);
static_assert(sizeof(RankBlock) == 3 * kLine);

inline size_t data_offset(uint32_t ranks) { return rounded(2 * kLine + ranks * sizeof(RankBlock), kPage); }
inline size_t segment_bytes(uint32_t ranks, size_t slot_bytes) { return data_offset(ranks) + 2 * ranks * slot_bytes; }

enum class Wait { kDone, kTime, kSignal, kClosed, kLeft };

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

    // Shows in `lane` how this rank waits. Nullptr ends that.
    void report_to(status::Lane* lane) { lane_ = lane; }
    status::Lane* lane() const { return lane_; }

    // What this rank's waits have cost since the last call of this: sleeps, and ns of polling in waits of
    // more than some microseconds.
    std::pair<uint32_t, uint64_t> take_waits() { return {std::exchange(sleeps_, 0), std::exchange(polled_ns_, 0)}; }

    // The slot of `rank` for the current step; after `begin`, for the new step.
    unsigned char* slot(uint32_t rank) {
        return base_ + identity_.data_offset + (2 * rank + (next_ & 1)) * identity_.slot_bytes;
    }

    // Begins a step; from now on `slot` returns slots of the new step.
    void begin() { next_ = step_ + 1; }

    // Numbers of calls that this rank refuses, and why.
    using Refusals = std::list<std::pair<uint64_t, std::string>>;

    // Posts that this rank refuses these calls, each once the previous step is complete on all ranks: now, or
    // in its next call. Waits for no other rank (the others see a view unlike theirs) and allocates nothing.
    void refuse(Refusals& refused) {
        refusals_.splice(refusals_.end(), refused);
        catch_up();
    }

    // Posts the refusals that have not been posted. Returns whether all steps that this rank has posted are complete; if
    // not, `wait` waits for the last one.
    bool catch_up() {
        while (owes_ || !refusals_.empty()) {
            if (owes_ && first_missing(0) != ranks()) return false;
            owes_ = !refusals_.empty();
            if (!owes_) return true;
            const auto [number, reason] = std::move(refusals_.front());
            refusals_.pop_front();
            begin();
            const uint64_t length = std::min(reason.size(), kReasonBytes);
            std::memcpy(slot(rank_), &length, sizeof(length));
            std::memcpy(slot(rank_) + sizeof(length), reason.data(), length);
            post(View{number, kRefused, 0, 0}, 1, 0);
        }
        return true;
    }

    // Why `rank` refused its call, if its post for the current step says that it did.
    std::string reason(uint32_t rank) {
        if ((posted(rank).view.code & 0xFF) != kRefused) return {};
        uint64_t length = 0;
        std::memcpy(&length, slot(rank), sizeof(length));
        return {reinterpret_cast<const char*>(slot(rank) + sizeof(length)), std::min<size_t>(length, kReasonBytes)};
    }

    // Posts the step, after this rank has filled its slot. The last rank to post wakes those that sleep, with one system
    // call: if each rank woke them, a step would take up to n^2 / 2 wake-ups.
    void post(const View& view, uint64_t steps, uint64_t arrived) {
        step_ = next_;
        Post& own = block(rank_).posts[step_ & 1];
        own.view = view;
        own.steps = steps;
        own.arrived = arrived;
        own.core.store(sched_getcpu(), std::memory_order_relaxed);
        // SYNC slot->ranks (release): slot and view are visible before the step is; and our reads of other slots in
        // the previous step happen before their owners fill them again.
        own.step.store(step_, std::memory_order_release);
        // SYNC post->sleeping (seq_cst): the rank whose fence comes last sees the posts of all ranks, and
        // sees that a rank sleeps if that rank has missed one of the posts.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        const bool may_sleep = sleeping().load(std::memory_order_relaxed) == static_cast<uint32_t>(step_);
        if (may_sleep && first_missing(0) == ranks()) sound();
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

    // The view that a rank has posted last, or null. No rank can overwrite it until this rank goes on to the
    // next step: a rank that has not posted this step will post it in the other entry of `posts`.
    const View* last_view(uint32_t rank) {
        if (has_posted(rank)) return &posted(rank).view;
        return step_ > 1 ? &block(rank).posts[(step_ - 1) & 1].view : nullptr;
    }

    bool is_closed() { return block(rank_).exit.closed.load(std::memory_order_relaxed) != 0; }

    // Whether a rank found the group broken. A call that could still complete must not do so then, because it failed on
    // other ranks. A rank that leaves an intact group has completed its part.
    bool is_broken() { return state().broken.load(std::memory_order_relaxed) != 0; }

    // Leaves the group: ends this rank's waiting, and the waiting of others for this rank, for good.
    void close(bool breaks) {
        if (breaks) state().broken.store(1, std::memory_order_relaxed);
        // SYNC leave->ranks (release): after the last post.
        block(rank_).exit.closed.store(1, std::memory_order_release);
        sound();
    }

    // Whether a rank has left without posting the step.
    bool is_left_alone() {
        for (uint32_t r = 0; r < ranks(); ++r) {
            // SYNC leave->ranks (acquire): a rank that sees `closed` also sees that rank's last post.
            if (block(r).exit.closed.load(std::memory_order_acquire) != 0 && !has_posted(r)) return true;
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

    // Waits until all have posted the step: polls for `spin_ns`, then sleeps until `until_ns` at most. It
    // yields only to other ranks: an unrelated process that never sleeps would keep the core for a time slice
    // of about 3 ms. With such a process on two cores, an engine's step took 1.21 of the stock engine's time
    // with yields, 0.96 without.
    Wait wait(uint64_t spin_ns, uint64_t until_ns) {
        uint32_t missing = first_missing(0);
        if (missing == ranks()) return Wait::kDone;
        const uint64_t start = now_ns(), spin_until = std::min(start + spin_ns, until_ns);
        if (lane_ != nullptr) lane_->set_state(status::State::kPosted);
        const Wait found = poll_until(start, spin_until, missing);
        polled_ns_ += now_ns() - start;
        return found == Wait::kTime ? sleep(missing, until_ns) : found;
    }

private:
    // Polls, and yields where that helps, until all have posted. Returns kTime when it is better to sleep.
    Wait poll_until(uint64_t start, uint64_t spin_until, uint32_t& missing) {
        while (true) {
            for (int i = 0; i < polls(); ++i) {
                missing = first_missing(missing);
                if (missing == ranks()) return Wait::kDone;
                pause();
            }
            if (is_closed()) return Wait::kClosed;
            if (is_left_alone()) return Wait::kLeft;
            if (now_ns() >= spin_until) return Wait::kTime;
            is_crowded_ = shares_core(missing);
            if (is_crowded_ && start - moved_ns_ >= kMoveNs) {
                moved_ns_ = start;
                return Wait::kTime;
            }
            if ((!has_core_each() || keeps_core(missing)) && !yield_to_ranks()) return Wait::kTime;
        }
    }

    // Whether a mapping of `bytes` has room for a region of this shape.
    static bool fits(uint32_t ranks, uint64_t slot_bytes, size_t bytes) {
        if (ranks == 0 || ranks > kMaxRanks || slot_bytes < kPage || slot_bytes % kPage != 0) return false;
        return slot_bytes <= bytes && segment_bytes(ranks, slot_bytes) <= bytes;
    }

    // Number of looks between two yields. 128 take about 7 us. If the awaited rank needs this core, each
    // further look only delays it.
    int polls() const { return is_crowded_ || !has_core_each() ? 1 : 128; }
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

    // Lets other ranks run, unless an earlier yield has shown that a process which never sleeps shares this
    // core: it gets a time slice of 3 ms for each yield, but none for a sleep. Then this returns false and
    // the rank sleeps instead, for so long that all ranks together try ten times a second. With 16 ranks on
    // two cores and a busy loop on each, the p99 of a barrier is 3 ms, and 16 ms if the ranks go on yielding.
    // Where only ranks share the cores, even 128 on two, a yield takes less than 1 ms.
    bool yield_to_ranks() {
        const uint64_t before = now_ns();
        if (before < refused_until_ns_) return false;
        sched_yield();
        const uint64_t after = now_ns();
        if (after - before > kLongYieldNs) refused_until_ns_ = after + ranks() * kRefusalNs;
        return true;
    }
    static constexpr uint64_t kLongYieldNs = 1000 * 1000, kRefusalNs = 100 * 1000 * 1000;

    State& state() { return *reinterpret_cast<State*>(base_ + kLine); }

    RankBlock& block(uint32_t rank) { return reinterpret_cast<RankBlock*>(base_ + 2 * kLine)[rank]; }

    // There is a word each for even and odd steps: a rank that is slow to go to sleep may store an old step, while others
    // sleep in the next one, but not in the one after that.
    std::atomic<uint32_t>& sleeping() { return state().sleeping[step_ & 1]; }

    // Wakes all ranks that sleep.
    void sound() {
        // SYNC sound->sleeper (release): a sleeper that reads this change has no need to sleep, and sees why.
        state().gong.fetch_add(1, std::memory_order_release);
        futex_wake_all(state().gong);
    }

    // Sleeps until all have posted the step.
    Wait sleep(uint32_t missing, uint64_t until_ns) {
        std::atomic<uint32_t>& gong = state().gong;
        while (true) {
            const uint32_t seen = gong.load(std::memory_order_relaxed);
            sleeping().store(static_cast<uint32_t>(step_), std::memory_order_relaxed);
            // SYNC post->sleeping (seq_cst): if this rank misses a post below, the last rank to post sees `sleeping`.
            // SYNC sound->sleeper (acquire): what was stored before the gong's change that this rank has read is visible.
            std::atomic_thread_fence(std::memory_order_seq_cst);
            missing = first_missing(missing);
            const uint64_t now = now_ns();
            const bool stops = missing == ranks() || is_closed() || is_left_alone() || now >= until_ns;
            if (!stops && lane_ != nullptr) lane_->set_state(status::State::kAsleep);
            const bool signalled = !stops && !futex_wait(gong, seen, until_ns - now);
            sleeps_ += stops ? 0 : 1;
            block(rank_).posts[step_ & 1].core.store(sched_getcpu(), std::memory_order_relaxed);
            missing = first_missing(missing);
            if (missing == ranks()) return Wait::kDone;
            if (is_closed()) return Wait::kClosed;
            if (is_left_alone()) return Wait::kLeft;
            if (signalled) return Wait::kSignal;
            if (now_ns() >= until_ns) return Wait::kTime;
        }
    }

    unsigned char* base_;
    size_t bytes_;
    uint32_t rank_;
    Identity identity_{};
    uint64_t step_ = 0;  // the last step that this rank posted
    uint64_t next_ = 0;  // the step whose slots `slot` returns
    Refusals refusals_;        // those that are not posted yet
    bool owes_ = false;        // the last step was a refusal, and was not complete when this rank last looked
    uint64_t moved_ns_ = 0;    // when this rank last slept to get another core
    uint64_t refused_until_ns_ = 0;  // until then this rank sleeps where it would yield
    bool is_crowded_ = false;  // the last missing rank runs on the same core
    status::Lane* lane_ = nullptr;  // where this rank shows what it does
    uint32_t sleeps_ = 0;
    uint64_t polled_ns_ = 0;
};

}  // namespace region
