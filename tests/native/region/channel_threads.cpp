// The table of channels for the sanitizers, with threads instead of processes. In each round two ranks use a new table.
// They open the channel between them, which the first of them makes. Then they pass messages, for which the reader sleeps on the
// ring or listens to its bell, or one of them leaves while the other opens the channel. Usage: `channel_threads ROUNDS SEED`.
// Exit status: 0, or 1 with a text for a wrong message or a rank that waits at a channel whose peer is gone.
#include <sched.h>
#include <sys/mman.h>

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "../../../shm_broadcast/csrc/ring/ring.hpp"
#include "channels.hpp"

namespace {

using channels::Table;
using ring::Ring;

constexpr uint32_t kRanks = 2;
constexpr size_t kChannel = 3 * ring::kPage;        // the header, and two pages of records
constexpr uint64_t kLost = 10'000'000'000;          // a rank that waits this long was forgotten
constexpr uint64_t kSpin = 5'000;
constexpr uint64_t kMessages = 8;
constexpr size_t kLongest = 3000;                   // several do not fit at once, which makes the writer wait for room

std::atomic<bool> failed{false};

bool fail(const char* what, uint32_t rank, uint64_t round) {
    failed.store(true);
    std::fprintf(stderr, "FAILED: %s on rank %u in round %llu\n", what, rank, static_cast<unsigned long long>(round));
    return false;
}

unsigned char expected(uint64_t round, uint64_t message, size_t index) {
    return static_cast<unsigned char>(round * 31 + message * 131 + index * 7);
}

size_t length_of(uint64_t round, uint64_t message) { return 1 + (round * 977 + message * 1597) % kLongest; }

// What the two ranks share. The number of the round decides which rank sends, which one leaves, and what goes wrong.
struct Shared {
    unsigned char* base;
    uint64_t seed;
    std::barrier<> all{kRanks};
    bool maker_saw = false;   // the maker saw that the other one has left
    bool leaver_saw = false;  // the leaver saw that the channel is ready
    bool makes = false;       // the channel was opened at all

    unsigned char* channel() { return base + ring::kPage; }
    Table table() { return Table(base, kRanks); }
    void clear() {
        std::memset(base, 0, ring::kPage + kChannel);
        maker_saw = leaver_saw = makes = false;
    }
};

// One of the two ranks in one round.
class Rank {
public:
    Rank(Shared& shared, uint32_t rank, uint64_t round)
        : shared_(shared), table_(shared.table()), rank_(rank), round_(round),
          random_(shared.seed * 1'000'003 + round * kRanks + rank), from_(round % kRanks), to_(1 - from_) {}

    void run() {
        dawdle();
        const bool someone_leaves = round_ % 3 == 0;
        if (!someone_leaves) return pass_messages();
        if (rank_ == (round_ / 3) % kRanks) return leave();
        find_the_other_gone();
    }

private:
    bool writes() const { return rank_ == from_; }
    ring::Bell& bell() { return *reinterpret_cast<ring::Bell*>(shared_.base + channels::kBellBytes * to_); }

    // Waits up to some microseconds, which lets the two ranks come in every order.
    void dawdle() {
        for (uint64_t i = random_() % 400; i > 0; --i) ring::pause();
        if (random_() % 8 == 0) sched_yield();
    }

    // Opens the channel as the product does: it makes the channel or waits until the other rank has made it.
    bool open() {
        const uint64_t until = ring::now_ns() + kLost;
        bool may_fail = random_() % 4 == 0;
        while (ring::now_ns() < until) {
            const channels::State found = table_.claim(from_, to_);
            if (found == channels::kReady) return true;
            if (found == channels::kNone) {
                if (!Ring::format(shared_.channel(), kChannel, 1, round_)) return fail("no room", rank_, round_);
                dawdle();
                table_.settle(from_, to_, !may_fail);
                if (!may_fail) return true;
                may_fail = false;  // the next rank that claims it may make it, and writes over what this one wrote
            }
            while (table_.state(from_, to_) == channels::kMaking && ring::now_ns() < until) sched_yield();
        }
        return fail("nobody made the channel", rank_, round_);
    }

    void pass_messages() {
        if (!open()) return;
        Ring ring(shared_.channel(), kChannel);
        if (!ring.valid() || ring.generation() != round_) return void(fail("no ring in the channel", rank_, round_));
        ring.set_bell(&bell());
        for (uint64_t message = 1; message <= kMessages; ++message) {
            if (!(writes() ? write(ring, message) : read(ring, message))) return;
        }
    }

    bool write(Ring& ring, uint64_t message) {
        const size_t length = length_of(round_, message);
        const uint64_t until = ring::now_ns() + kLost;
        while (!ring.has_room(length)) {
            if (ring::now_ns() >= until) return fail("no room was made", rank_, round_);
            ring.wait_for_room(length, kLost);
        }
        unsigned char* payload = ring.reserve(length);
        for (size_t i = 0; i < length; ++i) payload[i] = expected(round_, message, i);
        ring.publish(length, ring::kWhole, length, true);
        return true;
    }

    bool read(Ring& ring, uint64_t message) {
        ring::RecordHeader record{};
        unsigned char* payload = nullptr;
        if (round_ % 2 == 0) ring.wait(0, kSpin, kLost, [&] { return ring.has_data(0); });
        if (round_ % 2 != 0) listen(ring);
        if (!ring.has_data(0) || !ring.next(0, &record, &payload)) return fail("no message", rank_, round_);
        if (record.payload_bytes != length_of(round_, message)) return fail("a wrong length", rank_, round_);
        for (size_t i = 0; i < record.payload_bytes; ++i) {
            if (payload[i] != expected(round_, message, i)) return fail("a torn message", rank_, round_);
        }
        ring.release(0, record);
        return true;
    }

    // Waits for a message as a thread that listens to the bell of its rank.
    void listen(Ring& ring) {
        const uint64_t until = ring::now_ns() + kLost;
        while (!ring.has_data(0) && ring::now_ns() < until) {
            const uint32_t seen = bell().begin();
            dawdle();
            if (!ring.has_news(0, 0)) ring::futex_wait(bell().word, seen, kLost);
            bell().end();
        }
    }

    // Ends the other rank's side of the channel.
    void end(bool of_writer) {
        Ring ring(shared_.channel(), kChannel);
        if (!ring.valid()) return void(fail("a channel is ready and has no ring", rank_, round_));
        if (of_writer) ring.close();
        if (!of_writer) ring.leave(0);
    }

    void leave() {
        table_.leave(rank_);
        shared_.leaver_saw = table_.state(from_, to_) == channels::kReady;
        if (shared_.leaver_saw) end(writes());
    }

    void find_the_other_gone() {
        if (!open()) return;
        shared_.makes = true;
        shared_.maker_saw = table_.has_left(1 - rank_);
        if (shared_.maker_saw) end(!writes());
        Ring ring(shared_.channel(), kChannel);
        const uint64_t until = ring::now_ns() + kLost;
        const size_t longest = ring.longest_payload();
        // A writer fills the ring until nothing fits any more; a reader has nothing to read.
        while (ring::now_ns() < until && !(writes() ? ring.hopeless() : ring.ended(0))) {
            if (!writes()) {
                ring.wait(0, kSpin, kLost, [&] { return ring.ended(0); });
            } else if (ring.has_room(longest)) {
                ring.publish(longest, ring::kWhole, longest, true);
            } else {
                ring.wait_for_room(longest, kLost);
            }
        }
        if (ring::now_ns() >= until) fail("a rank waits for one that has left", rank_, round_);
    }

    Shared& shared_;
    Table table_;
    uint32_t rank_;
    uint64_t round_;
    std::mt19937_64 random_;
    uint32_t from_, to_;
};

void meet(Shared& shared, uint32_t rank, uint64_t rounds) {
    for (uint64_t round = 1; round <= rounds && !failed.load(); ++round) {
        Rank(shared, rank, round).run();
        shared.all.arrive_and_wait();
        if (rank == 0) {
            if (shared.makes && !shared.maker_saw && !shared.leaver_saw) fail("neither saw the other", rank, round);
            shared.clear();
        }
        shared.all.arrive_and_wait();
    }
}

}  // namespace

int main(int count, char** words) {
    if (count != 3) return 2;
    const auto rounds = static_cast<uint64_t>(std::atoll(words[1]));
    const size_t bytes = ring::kPage + kChannel;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    Shared shared{static_cast<unsigned char*>(memory), static_cast<uint64_t>(std::atoll(words[2]))};
    std::vector<std::thread> threads;
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
        threads.emplace_back([&shared, rank, rounds] { meet(shared, rank, rounds); });
    }
    for (std::thread& thread : threads) thread.join();
    munmap(memory, bytes);
    if (!failed.load()) std::printf("ok: %llu rounds\n", static_cast<unsigned long long>(rounds));
    return failed.load() ? 1 : 0;
}
