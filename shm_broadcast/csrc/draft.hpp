// Short messages are read while they are written: the writer shows what it has encoded, and a reader that waits decodes
// behind it. A scheduler step of 0.5 KB takes 3 us to encode and 5 to decode after a pause, as caches are cold; now both
// at once. Nothing depends on what is shown: an object is given out when its message is published, if it was made of exactly
// the bytes that were published, and is made anew otherwise.
#pragma once

#include <algorithm>

#include "decoder.hpp"
#include "encoder.hpp"
#include "pieces.hpp"
#include "rehearsal.hpp"
#include "ring.hpp"

namespace draft {

// A reader that saw no more of a message for so long waits for it as if nothing had been shown: 1 KB takes 3 us to encode.
inline constexpr uint64_t kStalledNs = 10 * 1000;

// Behind a shorter pause caches are warm, and showing takes more time than it saves.
inline bool is_worthwhile(ring::Ring& ring) {
    return ring::now_ns() - ring.writer().stamp_ns.load(std::memory_order_relaxed) >= codec::kPauseNs;
}

// Whether a port has been used by anybody else meanwhile, or this is a forked child that must not touch it.
class Turn {
public:
    Turn(const uint64_t& turn, const uint64_t& forks) : turn_(turn), forks_(forks), mine_(turn), born_(forks) {}
    bool is_mine() const { return turn_ == mine_ && forks_ == born_; }

private:
    const uint64_t& turn_;
    const uint64_t& forks_;
    const uint64_t mine_;
    const uint64_t born_;
};

// The writer's side: shows the lines that are complete. While an object is encoded the collector or a mode of torch may run
// code of the application, and other threads: whatever else is done with the port then takes the next turn, and the draft
// touches the ring no more, which may even be gone.
class Draft : public codec::Audience {
public:
    Draft(ring::Ring& ring, Turn turn) : ring_(ring), turn_(turn) {}
    ~Draft() { stop(); }
    Draft(const Draft&) = delete;
    Draft& operator=(const Draft&) = delete;

    bool show(const unsigned char* data, size_t nbytes) override {
        if (!turn_.is_mine()) return false;
        if (place_ == nullptr) place_ = ring_.draft_place();
        const size_t lines = nbytes / ring::kLine * ring::kLine;
        if (place_ == nullptr || lines > ring::kDraftBytes) {
            stop();
            return false;
        }
        ring::put_words(place_, data, shown_, lines);
        shown_ = lines;
        ring_.show(lines);
        return true;
    }

    void stop() override {
        if (shown_ > 0 && turn_.is_mine()) ring_.show(0);
        shown_ = 0;
    }

    // Fills in the payload of a message that consists of `header`, of at most kDraftBytes, of which lines may have been
    // shown. Those are not written again: readers hold them in their caches. The publication ends the draft.
    void lay(const codec::Output& header) {
        const size_t total = header.size();
        if (shown_ > 0 && turn_.is_mine()) {
            ring::put_words(place_, header.data(), 0, sizeof(codec::Prefix));
            ring::put_words(place_, header.data(), shown_, total);
        } else {
            ring::put_words(ring_.reserve(total), header.data(), 0, total);
        }
    }

    // Fills in bytes [from, from + nbytes) of a message at `to`, the beginning of a payload.
    static void lay_anew(unsigned char* to, const codec::Pieces& pieces, size_t from, size_t nbytes) {
        unsigned char words[ring::kDraftBytes];
        const size_t ahead = std::min(nbytes, ring::kDraftBytes);
        pieces.copy(words, from, ahead);
        ring::put_words(to, words, 0, ahead);
        pieces.copy(to + ahead, from + ahead, nbytes - ahead);
    }

private:
    ring::Ring& ring_;
    const Turn turn_;
    unsigned char* place_ = nullptr;
    size_t shown_ = 0;
};

// So much of a long message is copied before readers are told: some microseconds of copying.
inline constexpr size_t kStreamedBytes = 32 * 1024;

// Copies a long message into the ring, without the GIL; readers copy behind us.
inline void stream(ring::Ring& ring, const codec::Pieces& pieces, uint32_t tag) {
    const size_t total = pieces.total();
    unsigned char* to = ring.reserve(total);
    ring.begin_stream(total, tag);
    for (size_t done = 0; done < total;) {
        const size_t bytes = std::min(kStreamedBytes, total - done);
        if (done == 0) Draft::lay_anew(to, pieces, 0, bytes);
        else pieces.copy(to + done, done, bytes);
        done += bytes;
        ring.fill(done);
    }
    ring.end_stream();
}

// No position of a ring.
inline constexpr uint64_t kNowhere = UINT64_MAX;

// Whether a reader that waits has something to look at, other than what came to nothing at `given_up`.
inline bool is_offered(ring::Ring& ring, uint32_t index, uint64_t given_up) {
    unsigned char* payload = nullptr;
    return ring.draft(index, &payload) > 0 && ring.reader(index).consumed.load(std::memory_order_relaxed) != given_up;
}

// A reader's side: a copy of what is shown, of which an object is made.
class Preview : public codec::Source {
public:
    Preview(ring::Ring& ring, uint32_t index) : ring_(ring), index_(index) {}
    Preview(const Preview&) = delete;
    Preview& operator=(const Preview&) = delete;

    const unsigned char* bytes() const { return bytes_; }
    const ring::RecordHeader& record() const { return record_; }

    size_t await(size_t wanted) override {
        const uint64_t until = ring::now_ns() + kStalledNs;
        for (int polls = 1; !is_published_; ++polls) {
            take_shown();
            if (known_ >= wanted) return known_;
            if (ring_.has_data(index_)) return compare() && known_ >= wanted ? known_ : 0;
            if (polls % 64 == 0 && ring::now_ns() >= until) return 0;
            ring::pause();
        }
        return known_ >= wanted ? known_ : 0;
    }

    size_t finish() override {
        await(ring::kDraftBytes + 1);  // more than can be shown: until it is published
        return is_published_ ? known_ : 0;
    }

private:
    void take_shown() {
        unsigned char* payload = nullptr;
        const size_t shown = ring_.draft(index_, &payload);
        if (shown <= known_) return;
        ring::get_words(bytes_, payload, known_, shown);
        known_ = shown;
    }

    // Compares what is known with what was published, and takes the rest; false when it is another message.
    bool compare() {
        unsigned char* payload = nullptr;
        if (!ring_.next(index_, &record_, &payload)) return false;
        const size_t total = record_.payload_bytes;
        constexpr size_t kBegin = sizeof(codec::Prefix);  // filled in last
        if (record_.flags != ring::kWhole || total > ring::kDraftBytes || total < known_ || known_ < kBegin) return false;
        if (std::memcmp(bytes_ + kBegin, payload + kBegin, known_ - kBegin) != 0) return false;
        std::memcpy(bytes_, payload, kBegin);
        std::memcpy(bytes_ + known_, payload + known_, total - known_);
        known_ = total;
        is_published_ = true;
        return true;
    }

    ring::Ring& ring_;
    uint32_t index_;
    size_t known_ = 0;
    bool is_published_ = false;
    ring::RecordHeader record_{};
    alignas(ring::kLine) unsigned char bytes_[ring::kDraftBytes];
};

}  // namespace draft
