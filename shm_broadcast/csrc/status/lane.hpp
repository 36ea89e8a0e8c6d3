// How a process writes what it does: one lane for each plane of each group. No Python here.
#pragma once

#include <bit>

#include "clock.hpp"
#include "page.hpp"

namespace status {

// The name of a capsule that holds a `Lane`.
inline constexpr const char* kCapsule = "shm_broadcast._core.StatusLane";

// What a call is.
struct Call {
    uint8_t kind = 0;
    uint8_t dtype = 0;
    uint8_t op = 0;
    uint32_t root = 0;
    uint64_t number = 0;
    uint64_t count = 0;
    uint64_t detail = 0;
    uint64_t nbytes = 0;
};

// How it ended, and how it waited.
struct End {
    Outcome outcome = Outcome::kDone;
    uint16_t last = kNobody;  // the rank in the group that came last
    bool is_last = false;     // whether that is this rank
    uint64_t late = 0;        // ticks by which it came after the one before
    uint64_t waited = 0;      // ticks for which this rank waited for it
    uint32_t sleeps = 0;
    uint64_t polled_ns = 0;
};

// A page, and the rate of its clock.
struct Written {
    Page* page;
    uint64_t rate;

    // The counters of a kind of call in a lane, which get a place with the first call; nullptr if there is no room.
    CounterRecord* claim_counters(uint32_t lane, uint8_t kind) {
        for (CounterRecord& record : page->counters) {
            if (record.lane != 0) continue;
            Writing<CounterRecord> writing(record);
            put(record.kind, static_cast<uint32_t>(kind));
            put(record.lane, lane + 1);
            return &record;
        }
        return nullptr;
    }
};

// A page that nobody reads; a closed lane writes here.
inline Page nowhere{};

// A lane of this process's page. Its owner calls it with the GIL held, except for `set_state`.
class Lane {
public:
    Lane(Written written, uint32_t index) : written_(written), call_(&written.page->lanes[index].call), index_(index) {}

    // Stops writing into the page: the group has left its place, or this is a forked child, which must not
    // write its parent's page. Another thread may be inside of a call.
    void close() {
        call_.store(&nowhere.lanes[index_].call, std::memory_order_relaxed);
        written_.page = &nowhere;
        std::fill(std::begin(counters_), std::end(counters_), nullptr);
    }

    void begin(const Call& call, uint64_t now, State state = State::kComputing) {
        LaneCall& own = *call_.load(std::memory_order_relaxed);
        Writing<LaneCall> writing(own);
        own.state.store(static_cast<uint8_t>(state), std::memory_order_relaxed);
        put(own.kind, call.kind);
        put(own.dtype, call.dtype);
        put(own.op, call.op);
        put(own.number, call.number);
        put(own.count, call.count);
        put(own.begin, now);
        put(own.detail, call.detail);
        put(own.nbytes, call.nbytes);
        put(own.root, call.root);
        // The ring of records is larger than a first-level cache: its next line is fetched while the call goes on.
        const Page& page = *written_.page;
        __builtin_prefetch(&page.records[page.header.records.load(std::memory_order_relaxed) % kRecords], 1);
    }

    // From any thread that is in the call, also without the GIL.
    void set_state(State state) {
        call_.load(std::memory_order_relaxed)->state.store(static_cast<uint8_t>(state), std::memory_order_relaxed);
    }

    void end(const End& end, uint64_t now) {
        LaneCall& own = *call_.load(std::memory_order_relaxed);
        if (CounterRecord* counters = counters_of(own.kind)) count(*counters, end, own.nbytes);
        record(own, end, now);
        Writing<LaneCall> writing(own);
        own.state.store(static_cast<uint8_t>(State::kIdle), std::memory_order_relaxed);
        put(own.end, now);
    }

private:
    CounterRecord* counters_of(uint8_t kind) {
        CounterRecord*& found = counters_[kind % kKinds];
        if (found == nullptr) found = written_.claim_counters(index_, kind % kKinds);
        return found;
    }

    void count(CounterRecord& to, const End& end, uint64_t nbytes) {
        const uint64_t waited_ns = nanoseconds(end.waited, written_.rate);
        const int bits = static_cast<int>(std::bit_width(waited_ns));
        const int bucket = std::clamp(bits - 8, 0, static_cast<int>(kBuckets) - 1);
        Writing<CounterRecord> writing(to);
        put(to.calls, to.calls + 1);
        put(to.nbytes, to.nbytes + nbytes);
        put(to.waited_ns, to.waited_ns + waited_ns);
        put(to.waits[bucket], to.waits[bucket] + 1);
        if (end.outcome != Outcome::kDone) put(to.errors, to.errors + 1);
        if (end.is_last) {
            put(to.last, to.last + 1);
            put(to.late_ns, to.late_ns + nanoseconds(end.late, written_.rate));
        }
        if (end.sleeps != 0) put(to.sleeps, to.sleeps + end.sleeps);
        if (end.polled_ns != 0) put(to.polled_ns, to.polled_ns + end.polled_ns);
    }

    void record(const LaneCall& call, const End& end, uint64_t now) {
        std::atomic<uint64_t>& records = written_.page->header.records;
        const uint64_t before = records.load(std::memory_order_relaxed);
        CallRecord& to = written_.page->records[before % kRecords];
        to.commit.store(0, std::memory_order_relaxed);
        // SYNC odd->copier (release): a reader of a word that is written below also sees the 0.
        std::atomic_thread_fence(std::memory_order_release);
        put(to.number, call.number);
        put(to.count, call.count);
        put(to.begin, call.begin);
        put(to.end, now);
        put(to.lane, static_cast<uint16_t>(index_));
        put(to.last, end.last);
        put(to.kind, call.kind);
        put(to.dtype, call.dtype);
        put(to.op, call.op);
        put(to.outcome, static_cast<uint8_t>(end.outcome));
        put(to.root, call.root);
        put(to.detail, static_cast<uint32_t>(call.detail ^ call.detail >> 32));
        put(to.waited_ns, saturated(end.waited));
        put(to.late_ns, saturated(end.late));
        // SYNC words->copier (release): a reader of this number also sees all words that were written before.
        to.commit.store(before + 1, std::memory_order_release);
        records.store(before + 1, std::memory_order_relaxed);
    }

    uint32_t saturated(uint64_t count) const {
        return static_cast<uint32_t>(std::min<uint64_t>(nanoseconds(count, written_.rate), UINT32_MAX));
    }

    Written written_;
    std::atomic<LaneCall*> call_;
    uint32_t index_;
    CounterRecord* counters_[kKinds] = {};
};

}  // namespace status
