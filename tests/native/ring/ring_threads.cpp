// The ring's protocol for the sanitizers, with threads instead of processes: one writer sends records of random
// lengths, whole or streamed, to several readers, which check every byte.
// Usage: `ring_threads READERS RECORDS SEED spin|park|mixed`.
// Exit status: 0, or 1 with a text for a torn, lost, doubled or reordered record or a lost wake-up.
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include RING_HEADER

namespace {

using ring::Ring;

constexpr size_t kData = 4 * ring::kPage;
constexpr uint64_t kLost = 5'000'000'000;  // a sleep of this length is a wake-up that never came
constexpr uint64_t kSpin = 20'000;
constexpr size_t kStreamed = 256;

std::atomic<bool> failed{false};

void fail(const char* what, uint64_t record) {
    failed.store(true);
    std::fprintf(stderr, "FAILED: %s at record %llu\n", what, static_cast<unsigned long long>(record));
}

enum class Mode { kSpin, kPark, kMixed };

// Decides how a thread waits, and delays it at random, which makes the ring sometimes empty and sometimes full.
class Habits {
public:
    Habits(uint64_t seed, Mode mode) : random_(seed), mode_(mode) {}
    size_t below(size_t limit) { return random_() % limit; }
    bool parks() { return mode_ == Mode::kPark || (mode_ == Mode::kMixed && below(2) == 0); }
    void dawdle() {
        if (mode_ != Mode::kSpin && below(256) == 0) {
            timespec nap{0, static_cast<long>(below(200'000))};
            nanosleep(&nap, nullptr);
        } else if (below(8) == 0) {
            sched_yield();
        }
    }

private:
    std::mt19937_64 random_;
    Mode mode_;
};

// Returns the byte at `index` of record `number`; writer and readers compute it.
unsigned char expected(uint64_t number, size_t index) {
    return static_cast<unsigned char>(number * 131 + index * 7 + (index >> 8));
}

size_t length_of(uint64_t number, uint64_t seed, size_t longest) {
    std::mt19937_64 random(seed * 1'000'003 + number);
    const uint64_t kind = random() % 8;
    if (kind == 0) return longest;
    if (kind == 1) return longest - random() % 100;
    return 1 + random() % (kind < 5 ? 200 : longest);
}

// Returns whether a record is published before it is filled; this holds for about half of the long records.
bool is_streamed(uint64_t number, size_t length) { return length >= kStreamed && number % 2 == 0; }

template <typename Call>
void timed(Call call, uint64_t record) {
    const uint64_t start = ring::now_ns();
    call();
    if (ring::now_ns() - start >= kLost) fail("a wake-up was lost", record);
}

void stream(Ring& ring, unsigned char* payload, size_t length, uint64_t number, Habits& habits) {
    ring.begin_stream(length);
    for (size_t done = 0; done < length;) {
        const size_t step = std::min(1 + habits.below(length), length - done);
        for (size_t i = done; i < done + step; ++i) payload[i] = expected(number, i);
        done += step;
        ring.fill(done);
        habits.dawdle();
    }
    ring.end_stream();
}

void write_all(Ring ring, uint64_t records, uint64_t seed, Mode mode) {
    Habits habits(seed, mode);
    for (uint64_t number = 1; number <= records && !failed.load(); ++number) {
        const size_t length = length_of(number, seed, ring.longest_payload());
        if (number % 3 == 0) ring.announce();
        while (!ring.has_room(length) && !failed.load()) {
            if (habits.parks()) {
                timed([&] { ring.wait_for_room(length, kLost); }, number);
            } else {
                sched_yield();
            }
        }
        unsigned char* payload = ring.reserve(length);
        if (is_streamed(number, length)) {
            stream(ring, payload, length, number, habits);
        } else {
            for (size_t i = 0; i < length; ++i) payload[i] = expected(number, i);
            ring.publish(length, ring::kWhole, length, true);
        }
        habits.dawdle();
    }
    ring.close();
}

// Waits until `done` returns true, whose result changes with the sequence word.
template <typename Done>
void await(Ring& ring, uint32_t index, uint64_t record, Habits& habits, Done done) {
    while (!failed.load() && !done()) {
        if (habits.parks()) {
            timed([&] { ring.park(index, kLost, done); }, record);
        } else {
            ring.spin(done, ring::now_ns() + kSpin);
        }
    }
}

// Returns whether there is a record; false at the end of the queue.
bool await_record(Ring& ring, uint32_t index, uint64_t record, Habits& habits) {
    while (!failed.load()) {
        const bool ended = ring.ended(index);
        if (ring.has_data(index)) return true;
        if (ended) return false;
        await(ring, index, record, habits, [&] { return ring.ready(index); });
    }
    return false;
}

void read_all(Ring ring, uint32_t index, uint64_t records, uint64_t seed, Mode mode) {
    Habits habits(seed + 77 + index, mode);
    uint64_t number = 0;
    while (await_record(ring, index, number + 1, habits)) {
        ++number;
        ring::RecordHeader record{};
        unsigned char* payload = nullptr;
        if (!ring.next(index, &record, &payload)) return fail("an unreadable record", number);
        if (record.message != number) return fail("a record lost, doubled or reordered", number);
        if (record.payload_bytes != length_of(number, seed, ring.longest_payload())) return fail("a wrong length", number);
        const bool streams = record.flags == ring::kStreamed;
        if (streams != is_streamed(number, record.payload_bytes)) return fail("a wrong flag", number);
        habits.dawdle();
        for (uint64_t taken = 0; taken < record.payload_bytes && !failed.load();) {
            await(ring, index, number, habits, [&] { return ring.available(index, record) > taken; });
            const uint64_t available = ring.available(index, record);
            for (; taken < available; ++taken) {
                if (payload[taken] != expected(number, taken)) return fail("a torn record", number);
            }
        }
        ring.release(index, record);
    }
    if (number != records) fail("records are missing at the end", number);
}

}  // namespace

int main(int count, char** words) {
    if (count != 5) return 2;
    const auto readers = static_cast<uint32_t>(std::atoi(words[1]));
    const auto records = static_cast<uint64_t>(std::atoll(words[2]));
    const auto seed = static_cast<uint64_t>(std::atoll(words[3]));
    const std::string name = words[4];
    const Mode mode = name == "spin" ? Mode::kSpin : name == "park" ? Mode::kPark : Mode::kMixed;
    const size_t bytes = ring::data_offset(readers) + kData;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    auto* base = static_cast<unsigned char*>(memory);
    if (!Ring::format(base, bytes, readers, 1)) return 2;
    Ring ring(base, bytes);
    std::vector<std::thread> threads;
    for (uint32_t index = 0; index < readers; ++index) {
        threads.emplace_back(read_all, ring, index, records, seed, mode);
    }
    write_all(ring, records, seed, mode);
    for (std::thread& thread : threads) thread.join();
    munmap(memory, bytes);
    if (!failed.load()) {
        std::printf("ok: %llu records to %u readers\n", static_cast<unsigned long long>(records), readers);
    }
    return failed.load() ? 1 : 0;
}
