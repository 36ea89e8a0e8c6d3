// The region's protocol for the sanitizers, with threads instead of processes: ranks make the same random collectives,
// and every result is checked, until one rank leaves. Usage: `region_threads RANKS CALLS SEED spin|sleep|mixed`.
// Exit status: 0, or 1 with a text for a wrong result, a lost wake-up or a rank that was told something wrong.
#include <sched.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "call.hpp"

namespace {

using region::Call;
using region::SharedRegion;
using region::Kind;
using region::Plan;
using region::Wait;
using Words = std::vector<uint32_t>;

constexpr size_t kSlot = region::kPage;
constexpr size_t kSlotWords = kSlot / sizeof(uint32_t);
constexpr uint64_t kLost = 10'000'000'000;  // a sleep of this length is a wake-up that never came
constexpr uint64_t kCallsOfALife = 100;     // then one rank leaves, and a fresh region begins
constexpr uint32_t kUntouched = 0xa5a5a5a5;
constexpr uint32_t kNote = 0x600dbead;
constexpr Kind kKinds[] = {Kind::kAllReduceOneShot, Kind::kAllReduceTwoShot, Kind::kReduceScatter,
                           Kind::kAllGather,        Kind::kBroadcast,        Kind::kBarrier,
                           Kind::kGather,           Kind::kScatter,          Kind::kReduce};

std::atomic<bool> failed{false};

bool fail(const char* what, uint32_t rank, uint64_t call) {
    failed.store(true);
    std::fprintf(stderr, "FAILED: %s on rank %u in call %llu\n", what, rank, static_cast<unsigned long long>(call));
    return false;
}

enum class Mode { kSpin, kSleep, kMixed };

// Decides how a rank waits, and delays it at random, which lets each rank come last now and then.
class Habits {
public:
    Habits(uint64_t seed, Mode mode) : random_(seed), mode_(mode) {}
    size_t below(size_t limit) { return random_() % limit; }
    uint64_t spin_ns() {
        if (mode_ == Mode::kSpin) return kLost;
        return mode_ == Mode::kSleep ? 0 : below(30'000);
    }
    // Now and then a wait is interrupted and resumed, as in the product, which looks at signals and deadlines.
    uint64_t slice_ns() { return mode_ == Mode::kMixed && below(4) == 0 ? below(100'000) : kLost; }
    void dawdle() {
        if (mode_ != Mode::kSpin && below(16) == 0) {
            timespec nap{0, static_cast<long>(below(200'000))};
            nanosleep(&nap, nullptr);
        } else if (below(4) == 0) {
            sched_yield();
        }
    }

private:
    std::mt19937_64 random_;
    Mode mode_;
};

// Returns the word at `index` of the input of `rank` to call `number`; every rank computes it.
uint32_t expected(uint64_t number, uint32_t rank, size_t index) {
    return static_cast<uint32_t>(number * 2'654'435'761 + rank * 40'503 + index * 97);
}

uint32_t expected_sum(uint64_t number, uint32_t ranks, size_t index) {
    uint32_t sum = 0;
    for (uint32_t r = 0; r < ranks; ++r) sum += expected(number, r, index);
    return sum;
}

void add(void* out, const void* const* inputs, size_t ranks, size_t elements) {
    for (size_t i = 0; i < elements; ++i) {
        uint32_t sum = 0;
        for (size_t r = 0; r < ranks; ++r) sum += static_cast<const uint32_t*>(inputs[r])[i];
        static_cast<uint32_t*>(out)[i] = sum;
    }
}

// What all ranks do in a call. Each rank draws the same task from the number of the call.
struct Task {
    uint64_t number;
    Kind kind;
    uint32_t root;
    size_t rows;
    Words widths;  // the number of words in a row of each rank's columns
    size_t words;  // the number of words in the whole tensor
    bool in_place;
    bool disagrees;  // the ranks' views differ

    Task(uint64_t call, uint64_t seed, uint32_t ranks) : number(call), words(0) {
        std::mt19937_64 random(seed * 1'000'003 + call);
        kind = kKinds[random() % std::size(kKinds)];
        root = static_cast<uint32_t>(random() % ranks);
        rows = 1 + random() % 3;
        for (uint32_t r = 0; r < ranks; ++r) {
            widths.push_back(static_cast<uint32_t>(length(random) / rows));
            words += widths.back() * rows;
        }
        if (!has_columns()) words = length(random) * (1 + random() % 2);
        in_place = random() % 2 == 0;
        disagrees = random() % 16 == 0;
    }

    // Draws a length: nothing, one element, a few, about a slot, or several slots.
    static size_t length(std::mt19937_64& random) {
        switch (random() % 6) {
            case 0: return 0;
            case 1: return 1;
            case 2: return random() % 64;
            case 3: return kSlotWords - 1 + random() % 3;
            default: return random() % (4 * kSlotWords);
        }
    }
    bool gathers() const { return kind == Kind::kAllGather || kind == Kind::kGather; }
    bool spreads() const { return kind == Kind::kReduceScatter || kind == Kind::kScatter; }
    bool has_columns() const { return gathers() || spreads(); }
    bool gives_to(uint32_t rank) const {  // whether `rank` gets a result
        return rank == root || (kind != Kind::kGather && kind != Kind::kReduce);
    }
    size_t own_words(uint32_t rank) const { return rows * widths[rank]; }
    size_t in_words(uint32_t rank) const { return gathers() ? own_words(rank) : words; }
    size_t out_words(uint32_t rank) const { return spreads() ? own_words(rank) : words; }

    // Returns the index in the whole tensor of element `index` of the part that `rank` owns.
    size_t in_whole(uint32_t rank, size_t index) const {
        size_t start = 0, row = 0;
        for (uint32_t r = 0; r < widths.size(); ++r) {
            if (r == rank) start = row;
            row += widths[r];
        }
        return index / widths[rank] * row + start + index % widths[rank];
    }
};

Plan plan_of(const Task& task, uint32_t rank, Words& in, Words& out) {
    Plan plan;
    plan.kind = task.kind;
    plan.root = task.root;
    plan.in = reinterpret_cast<unsigned char*>(in.data());
    plan.out = reinterpret_cast<unsigned char*>(out.data());
    plan.element = sizeof(uint32_t);
    plan.kernel = add;
    if (task.has_columns()) {
        std::vector<size_t> widths;
        for (const uint32_t width : task.widths) widths.push_back(width * sizeof(uint32_t));
        plan.columns.set(task.rows, widths);
    } else if (task.kind != Kind::kBarrier) {
        plan.bytes = task.words * sizeof(uint32_t);
    }
    plan.view = {task.number, static_cast<uint64_t>(task.kind), task.disagrees ? rank : task.words, task.rows};
    return plan;
}

// Returns the word that the result must have at `index` if it is not gathered from the ranks.
uint32_t right_at(const Task& task, const SharedRegion& own, size_t index) {
    switch (task.kind) {
        case Kind::kBarrier: return kUntouched;
        case Kind::kBroadcast: return expected(task.number, task.root, index);
        case Kind::kScatter: return expected(task.number, task.root, task.in_whole(own.rank(), index));
        case Kind::kReduceScatter: return expected_sum(task.number, own.ranks(), task.in_whole(own.rank(), index));
        default: return expected_sum(task.number, own.ranks(), index);
    }
}

bool is_gathered(const Task& task, const Words& out) {
    for (uint32_t r = 0; r < task.widths.size(); ++r) {
        for (size_t i = 0; i < task.own_words(r); ++i) {
            if (out[task.in_whole(r, i)] != expected(task.number, r, i)) return false;
        }
    }
    return true;
}

bool is_right(const Task& task, const SharedRegion& own, const Words& out) {
    if (!task.gives_to(own.rank())) return out == Words(out.size(), kUntouched);
    if (task.gathers()) return is_gathered(task, out);
    for (size_t i = 0; i < out.size(); ++i) {
        if (out[i] != right_at(task, own, i)) return false;
    }
    return true;
}

// Makes one call and waits for its end; returns false if it failed. In a group that a rank broke it may end with kLeft.
bool make(SharedRegion& own, const Task& task, bool may_break, Habits& habits) {
    const uint32_t rank = own.rank();
    const bool is_reduction = task.kind == Kind::kAllReduceOneShot || task.kind == Kind::kAllReduceTwoShot;
    const bool shares = task.kind == Kind::kBroadcast || (is_reduction && task.in_place);
    Words in(task.in_words(rank)), out(shares ? 0 : task.out_words(rank), kUntouched);
    for (size_t i = 0; i < in.size(); ++i) in[i] = expected(task.number, rank, i);
    const Words before = in;
    Call call(own, plan_of(task, rank, in, shares ? in : out));
    habits.dawdle();
    while (true) {
        const uint64_t slice = habits.slice_ns();
        const Wait wait = call.run(habits.spin_ns(), region::now_ns() + slice);
        if (wait == Wait::kDone) break;
        if (wait == Wait::kLeft && may_break) return true;
        if (wait == Wait::kLeft || wait == Wait::kClosed) return fail("a call ended early", rank, task.number);
        if (slice == kLost && wait == Wait::kTime) return fail("a wake-up was lost", rank, task.number);
    }
    if (call.disagrees() != task.disagrees) return fail("a wrong view of the others", rank, task.number);
    const Words& result = shares ? in : out;
    if (task.disagrees) {
        const bool kept = result == (shares ? before : Words(out.size(), kUntouched));
        return kept || fail("data moved in spite of a disagreement", rank, task.number);
    }
    return is_right(task, own, result) || fail("a wrong result", rank, task.number);
}

// What the ranks share besides the region until one of them leaves.
struct Life {
    unsigned char* base;
    size_t bytes;
    uint64_t seed;
    Mode mode;
    uint64_t calls;
    uint32_t leaver;
    bool breaks;        // the leaver says that the group is broken
    uint32_t note = 0;  // written by the leaver before it leaves, with nothing but `leave->ranks` to guard it
};

// Makes a call that waits for the rank that leaves, and checks that it ends.
void be_left(SharedRegion& own, Life& life, Habits& habits) {
    Words none;
    Task barrier(life.calls + 1, life.seed, own.ranks());
    barrier.kind = Kind::kBarrier;
    barrier.disagrees = false;
    Call call(own, plan_of(barrier, own.rank(), none, none));
    const Wait wait = call.run(habits.spin_ns(), region::now_ns() + kLost);
    if (wait != Wait::kLeft) fail("a rank that left was not seen to", own.rank(), barrier.number);
    // `broken` guards nothing: it only says that calls fail from now on.
    if (!life.breaks && life.note != kNote) fail("a rank left before its last word", own.rank(), barrier.number);
}

void be_rank(Life& life, uint32_t rank) {
    SharedRegion own(life.base, life.bytes, rank);
    Habits habits(life.seed * 64 + rank, life.mode);
    for (uint64_t number = 1; number <= life.calls && !failed.load(); ++number) {
        const bool may_break = life.breaks && number == life.calls && rank != life.leaver;
        if (!make(own, Task(number, life.seed, own.ranks()), may_break, habits)) return own.close(true);
    }
    if (failed.load()) return own.close(true);
    if (rank == life.leaver) {
        habits.dawdle();
        if (!life.breaks) life.note = kNote;
        return own.close(life.breaks);
    }
    be_left(own, life, habits);
    own.close(false);
}

bool live(uint32_t ranks, Life life) {
    life.bytes = region::segment_bytes(ranks, kSlot);
    void* memory = mmap(nullptr, life.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return false;
    life.base = static_cast<unsigned char*>(memory);
    if (!SharedRegion::format(life.base, life.bytes, ranks, kSlot, life.seed)) return false;
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < ranks; ++rank) threads.emplace_back([&life, rank] { be_rank(life, rank); });
    for (std::thread& thread : threads) thread.join();
    munmap(memory, life.bytes);
    return !failed.load();
}

}  // namespace

int main(int count, char** words) {
    if (count != 5) return 2;
    const auto ranks = static_cast<uint32_t>(std::atoi(words[1]));
    const auto calls = static_cast<uint64_t>(std::atoll(words[2]));
    const auto seed = static_cast<uint64_t>(std::atoll(words[3]));
    const std::string name = words[4];
    const Mode mode = name == "spin" ? Mode::kSpin : name == "sleep" ? Mode::kSleep : Mode::kMixed;
    for (uint64_t life = 0; life * kCallsOfALife < calls; ++life) {
        const uint64_t own_calls = std::min(kCallsOfALife, calls - life * kCallsOfALife);
        const auto leaver = static_cast<uint32_t>((seed + life) % ranks);
        if (!live(ranks, {nullptr, 0, seed * 1000 + life, mode, own_calls, leaver, life % 3 == 2})) return 1;
    }
    std::printf("ok: %llu calls of %u ranks\n", static_cast<unsigned long long>(calls), ranks);
    return 0;
}
