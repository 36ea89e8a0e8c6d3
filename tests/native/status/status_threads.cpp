// One thread writes records of a status page and others copy the page. Every word of a record comes from one write, so a copy in
// which they differ mixes two. Usage: `status_threads COPIES`. Exit status: 0, or 1 with a text.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "lane.hpp"

namespace {

std::atomic<bool> over{false};

int fail(const char* what) {
    std::fprintf(stderr, "FAILED: %s\n", what);
    return 1;
}

// Each call brings as many bytes as its number says, so that all words of its record follow from one of them.
void write(status::Page& page) {
    status::Lane lane({&page, uint64_t{1} << 32}, 3);
    for (uint64_t number = 1; !over.load(std::memory_order_relaxed); ++number) {
        lane.begin({.kind = 1, .root = static_cast<uint32_t>(number), .number = number, .count = number, .detail = number, .nbytes = number},
                   number);
        lane.set_state(status::State::kPosted);
        status::End end;
        end.last = static_cast<uint16_t>(number);
        end.is_last = true;
        end.late = end.waited = number % 1000;
        lane.end(end, number);
    }
}

int check(const status::Page& page, uint64_t& records) {
    const status::LaneCall& call = page.lanes[3].call;
    const uint32_t sequence = call.sequence.load(std::memory_order_relaxed);
    if (sequence % 2 == 0 && (call.count != call.number || call.begin != call.number || call.nbytes != call.number ||
                              call.detail != call.number || call.root != static_cast<uint32_t>(call.number))) {
        return fail("a lane mixes two calls");
    }
    for (const status::CounterRecord& counters : page.counters) {
        if (counters.lane == 0 || counters.sequence.load(std::memory_order_relaxed) % 2 == 1) continue;
        uint64_t waits = 0;
        for (const uint64_t bucket : counters.waits) waits += bucket;
        if (waits != counters.calls || counters.last != counters.calls) return fail("counters mix two calls");
        if (counters.nbytes != counters.calls * (counters.calls + 1) / 2) return fail("the bytes are those of another call");
    }
    for (size_t i = 0; i < status::kRecords; ++i) {
        const status::CallRecord& record = page.records[i];
        const uint64_t commit = record.commit.load(std::memory_order_relaxed);
        if (commit == 0) continue;
        ++records;
        if ((commit - 1) % status::kRecords != i || record.number != commit || record.count != commit || record.begin != commit ||
            record.end != commit || record.root != static_cast<uint32_t>(commit) || record.waited_ns != commit % 1000) {
            return fail("a record mixes two calls");
        }
    }
    return 0;
}

}  // namespace

int main(int count, char** words) {
    const int copies = count > 1 ? std::atoi(words[1]) : 0;
    auto page = std::make_unique<status::Page>();
    page->header.magic = status::kMagic;
    std::thread writer([&] { write(*page); });
    auto copy = std::make_unique<status::Page>();
    int found = 0;
    uint64_t records = 0;
    for (int i = 0; i < copies && found == 0; ++i) {
        status::copy_page(reinterpret_cast<unsigned char*>(copy.get()), reinterpret_cast<const unsigned char*>(page.get()));
        found = check(*copy, records);
    }
    over.store(true);
    writer.join();
    if (found != 0) return found;
    if (records == 0) return fail("no copy held a record");
    // A process that is killed in the middle of a write leaves the record torn.
    page->groups[5].sequence.store(7);
    status::copy_page(reinterpret_cast<unsigned char*>(copy.get()), reinterpret_cast<const unsigned char*>(page.get()));
    if (copy->groups[5].sequence.load() % 2 == 0) return fail("a torn record looks whole");
    std::printf("ok: %d copies\n", copies);
    return 0;
}
