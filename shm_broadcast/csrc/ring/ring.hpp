// The ring's protocol: one writer, many readers, records of any length in one shared mapping.
// No Python here, so that it also runs as threads under a sanitizer. DESIGN.md holds the layout and the proof.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace ring {

inline constexpr uint64_t kMagic = 0x31474e4952434721;  // "!GCRING1" in memory order
inline constexpr uint32_t kVersion = 2;
inline constexpr size_t kLine = 64;          // a cache line: what one side writes shares none with the other
inline constexpr size_t kPage = 4096;
inline constexpr size_t kRecordHeader = 64;  // keeps payloads aligned like the codec's buffers
inline constexpr uint32_t kMaxReaders = 1024;
// An announced message is awaited so long: encoding takes 1 to 30 us, the copy of a whole record up to 200 us.
inline constexpr uint64_t kAnnouncedNs = 160 * 1000;

// Written once, before anybody else maps the segment.
struct alignas(kLine) Identity {
    uint64_t magic;
    uint32_t version;
    uint32_t readers;
    uint64_t data_offset;
    uint64_t data_bytes;
    uint64_t generation;
};

// Written by the writer, read by all.
struct alignas(kLine) WriterLine {
    std::atomic<uint64_t> published;  // bytes of records that readers may read, never decreasing
    std::atomic<uint64_t> messages;   // whole messages in them
    std::atomic<uint64_t> stamp_ns;   // CLOCK_MONOTONIC of the latest publication
    std::atomic<uint32_t> sequence;   // futex word: changes with every publication and with every close
    std::atomic<uint32_t> closed;     // the writer has closed the queue
    std::atomic<uint64_t> filled;     // position up to which the streamed record at the end is filled in
};

// How the writer waits for room.
struct alignas(kLine) SpaceLine {
    std::atomic<uint32_t> word;     // futex word: changes when a reader makes room while the writer waits
    std::atomic<uint32_t> waiting;  // the writer waits, or is about to
};

// Written by one reader, read by the writer.
struct alignas(kLine) ReaderLine {
    std::atomic<uint64_t> consumed;     // bytes that this reader has given back, never decreasing
    std::atomic<uint64_t> messages;     // whole messages in them
    std::atomic<uint64_t> progress_ns;  // CLOCK_MONOTONIC of the latest release
    std::atomic<uint32_t> parked;       // sleeps on `sequence`, or is about to
    std::atomic<uint32_t> state;        // ReaderState
};

enum ReaderState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2 };

enum RecordFlags : uint32_t { kWhole = 0, kSkip = 1, kPart = 2, kLastPart = 3, kStreamed = 4 };

// In front of each payload. A streamed record is published before its payload is there: readers copy behind the writer,
// as far as `filled` says. A skip record fills the end of the data area: its payload has no content.
struct RecordHeader {
    uint64_t payload_bytes;
    uint32_t flags;
    uint32_t tag;          // the application's, equal in all parts of a message
    uint64_t message;      // number of the message, from 1
    uint64_t total_bytes;  // of the whole message, where it travels in parts
};
static_assert(sizeof(RecordHeader) <= kRecordHeader);

struct Header {
    Identity identity;
    WriterLine writer;
    SpaceLine space;
    ReaderLine readers[1];  // identity.readers of them
};
static_assert(sizeof(Identity) == kLine && sizeof(WriterLine) == kLine);
static_assert(sizeof(SpaceLine) == kLine && sizeof(ReaderLine) == kLine);
static_assert(offsetof(Header, writer) == 64 && offsetof(Header, space) == 128 && offsetof(Header, readers) == 192);
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free);
static_assert(sizeof(std::atomic<uint32_t>) == 4, "the kernel's futex is 32 bits wide");

inline size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
inline size_t data_offset(uint32_t readers) { return rounded(offsetof(Header, readers) + readers * kLine, kPage); }
inline size_t record_bytes(size_t payload) { return kRecordHeader + rounded(payload, kLine); }

inline uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000ULL + static_cast<uint64_t>(time.tv_nsec);
}

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Sleeps while `word` holds `seen`, for at most `nanoseconds`; returns on any wake-up, signal or change, and false
// for a signal.
inline bool futex_wait(std::atomic<uint32_t>& word, uint32_t seen, uint64_t nanoseconds) {
    timespec limit{static_cast<time_t>(nanoseconds / 1000000000ULL), static_cast<long>(nanoseconds % 1000000000ULL)};
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &limit, nullptr, 0) == 0 ||
           errno != EINTR;
}

inline void futex_wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// One of several words to sleep on; the layout of the kernel's futex_waitv.
struct WaitWord {
    uint64_t seen;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};
static_assert(sizeof(WaitWord) == 24);
inline constexpr size_t kMaxWords = 128;         // FUTEX_WAITV_MAX
inline constexpr uint32_t kWord32 = 2;           // FUTEX2_SIZE_U32; not private, as the words are shared
inline constexpr long kFutexWaitv = 449;         // the same number on every architecture, Linux 5.16
inline constexpr uint64_t kPollNs = 200 * 1000;  // older kernels: look at all words this often

// Sleeps while every word holds what was seen of it, for at most `nanoseconds`.
inline void futex_wait_any(WaitWord* words, size_t count, uint64_t nanoseconds) {
    const uint64_t until = now_ns() + nanoseconds;
    timespec limit{static_cast<time_t>(until / 1000000000ULL), static_cast<long>(until % 1000000000ULL)};
    if (syscall(kFutexWaitv, words, count, 0, &limit, CLOCK_MONOTONIC) < 0 && errno == ENOSYS) {
        timespec nap{0, static_cast<long>(nanoseconds < kPollNs ? nanoseconds : kPollNs)};
        nanosleep(&nap, nullptr);
    }
}

// The segment as one process sees it. Offsets that the other side wrote are checked before they are used, and the
// identity is read once, so that nothing that is written over it later leads outside of the mapping.
class Ring {
public:
    Ring(unsigned char* base, size_t bytes) : header_(reinterpret_cast<Header*>(base)), base_(base), bytes_(bytes) {
        if (bytes >= kPage) identity_ = header_->identity;
    }

    // Lays out a fresh, zeroed mapping.
    static bool format(unsigned char* base, size_t bytes, uint32_t readers, uint64_t generation) {
        const size_t offset = data_offset(readers);
        if (readers == 0 || readers > kMaxReaders || bytes < offset + kPage) return false;
        Header* header = reinterpret_cast<Header*>(base);
        header->identity = {kMagic, kVersion, readers, offset, (bytes - offset) / kLine * kLine, generation};
        return true;
    }

    bool valid() const {
        if (identity_.magic != kMagic || identity_.version != kVersion) return false;
        if (identity_.readers == 0 || identity_.readers > kMaxReaders) return false;
        if (identity_.data_offset != data_offset(identity_.readers) || identity_.data_offset > bytes_) return false;
        return identity_.data_bytes >= kPage && identity_.data_bytes % kLine == 0 &&
               identity_.data_bytes <= bytes_ - identity_.data_offset;
    }

    uint32_t readers() const { return identity_.readers; }
    uint64_t capacity() const { return identity_.data_bytes; }
    uint64_t generation() const { return identity_.generation; }
    WriterLine& writer() { return header_->writer; }
    SpaceLine& space() { return header_->space; }
    ReaderLine& reader(uint32_t index) { return header_->readers[index]; }

    // The longest payload that travels in one record: half of the ring less a header, so that the end of
    // the data area, which may have to be skipped, and the record always fit an empty ring together.
    size_t longest_payload() const { return (capacity() / 2) / kLine * kLine - kRecordHeader; }

    // ---------------------------------------------------------------- writer

    // Bytes that the slowest reader has still to give back. One that left or died counts too: the writer gets
    // an error instead of waiting for it, and nothing is dropped silently.
    uint64_t outstanding() {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        uint64_t most = 0;
        for (uint32_t i = 0; i < readers(); ++i) {
            // SYNC room->writer (acquire): the reader has finished with the bytes that are written next.
            const uint64_t lag = published - reader(i).consumed.load(std::memory_order_acquire);
            if (lag > most) most = lag;
        }
        return most;
    }

    // Whether the writer's own position is one that it can have left.
    bool is_aligned() { return writer().published.load(std::memory_order_relaxed) % kLine == 0; }

    // Where the next record begins, and inside of the data area whatever stands in `published`.
    uint64_t position() { return writer().published.load(std::memory_order_relaxed) % capacity() / kLine * kLine; }

    // Bytes to publish for a payload at the present position, with the skipped end of the data area.
    uint64_t needed(size_t payload) {
        const uint64_t at = position();
        const uint64_t record = record_bytes(payload);
        return at + record <= capacity() ? record : capacity() - at + record;
    }

    // Asks the readers' lines, which cost a cache miss each, only when what it knows of them is not enough.
    bool has_room(size_t payload) {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        const uint64_t end = published + needed(payload);
        if (end <= room_end_) return true;
        const uint64_t most = outstanding();
        room_end_ = most <= capacity() ? published - most + capacity() : published;
        return end <= room_end_;
    }

    // Whether waiting for room is in vain: the queue was closed, or a reader has left.
    bool hopeless() {
        bool found = writer().closed.load(std::memory_order_relaxed) != 0;
        for (uint32_t i = 0; i < readers() && !found; ++i) {
            found = reader(i).state.load(std::memory_order_relaxed) == kLeft;
        }
        return found;
    }

    // Waits on the space word for at most `nanoseconds`, unless there is room for `payload` or no hope for it.
    void wait_for_room(size_t payload, uint64_t nanoseconds) {
        const uint32_t seen = space().word.load(std::memory_order_relaxed);
        // SYNC waiting->room (seq_cst): either the reader sees that we wait, or we see its room.
        space().waiting.store(1, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC waiting->room (seq_cst)
        if (!has_room(payload) && !hopeless()) futex_wait(space().word, seen, nanoseconds);
        space().waiting.store(0, std::memory_order_relaxed);
    }

    // Where to fill in a payload, once there is room; publishes nothing.
    unsigned char* reserve(size_t payload) {
        uint64_t at = position();
        if (at + record_bytes(payload) > capacity()) at = 0;
        return data() + at + kRecordHeader;
    }

    // Publishes the payload filled in at `reserve(payload)`.
    void publish(size_t payload, uint32_t flags, uint64_t total, bool ends_message, uint32_t tag = 0) {
        uint64_t published = writer().published.load(std::memory_order_relaxed);
        const uint64_t messages = writer().messages.load(std::memory_order_relaxed) + 1;
        uint64_t at = published % capacity() / kLine * kLine;
        if (at + record_bytes(payload) > capacity()) {
            skip_end(at, messages);
            published += capacity() - at;
            at = 0;
        }
        put_header(at, {payload, flags, tag, messages, total});
        if (ends_message) writer().messages.store(messages, std::memory_order_relaxed);
        // SYNC payload->reader (release): header and payload are there before readers see the new end.
        writer().published.store(published + record_bytes(payload), std::memory_order_release);
        writer().stamp_ns.store(now_ns(), std::memory_order_relaxed);
        wake_readers();
    }

    // Publishes a record that is filled in afterwards, at `reserve(payload)` as it was before; there is room.
    void begin_stream(size_t payload, uint32_t tag = 0) {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        stream_start_ = published + needed(payload) - record_bytes(payload) + kRecordHeader;
        // SYNC fill->reader (release): also for the streamed record before, whose readers may see this store only.
        writer().filled.store(stream_start_, std::memory_order_release);
        publish(payload, kStreamed, payload, false, tag);
    }

    // Says that the first `bytes` of the payload are there.
    void fill(uint64_t bytes) {
        // SYNC fill->reader (release): what is announced as filled in is there.
        writer().filled.store(stream_start_ + bytes, std::memory_order_release);
    }

    // Says that the message is whole; all of it is filled in. Wakes the readers that went to sleep meanwhile.
    void end_stream() {
        const uint64_t messages = writer().messages.load(std::memory_order_relaxed) + 1;
        writer().messages.store(messages, std::memory_order_relaxed);
        wake_readers();
    }

    // Wakes the readers that sleep, as a message is about to come: they get up while it is encoded and copied.
    // A hint; whoever sleeps at the publication is woken by that.
    void announce() {
        bool parked = false;
        for (uint32_t i = 0; i < readers() && !parked; ++i) {
            parked = reader(i).parked.load(std::memory_order_relaxed) != 0;
        }
        if (!parked) return;
        writer().sequence.fetch_add(1, std::memory_order_relaxed);
        futex_wake_all(writer().sequence);
    }

    // Changes the sequence word and wakes the readers that sleep on it.
    void wake_readers() {
        // SYNC sequence->parked (seq_cst): either we see that a reader is parked, or its futex sees the change.
        writer().sequence.fetch_add(1, std::memory_order_seq_cst);
        bool parked = false;
        for (uint32_t i = 0; i < readers() && !parked; ++i) {
            // SYNC parked->sequence (seq_cst)
            parked = reader(i).parked.load(std::memory_order_seq_cst) != 0;
        }
        if (parked) futex_wake_all(writer().sequence);
    }

    // ---------------------------------------------------------------- reader

    bool has_data(uint32_t index) {
        // SYNC payload->reader (acquire): what was published is seen whole.
        return writer().published.load(std::memory_order_acquire) !=
               reader(index).consumed.load(std::memory_order_relaxed);
    }

    // Asked before has_data, it tells that nothing will come; asked after it, a last message may have come between.
    bool ended(uint32_t index) {
        // SYNC end->reader (acquire): who sees the end sees everything that was published before it.
        return writer().closed.load(std::memory_order_acquire) != 0 ||
               reader(index).state.load(std::memory_order_relaxed) == kLeft;
    }

    // Says that the writer publishes nothing more; wakes whoever waits at either end.
    void close() {
        // SYNC end->reader (release): behind the last publication.
        writer().closed.store(1, std::memory_order_release);
        wake_readers();
        wake_writer();
    }

    // Says that `index` reads nothing more; wakes the writer, and a thread that waits as this reader.
    void leave(uint32_t index) {
        reader(index).state.store(kLeft, std::memory_order_relaxed);
        wake_readers();
        wake_writer();
    }

    // Polls until `done`, or `until_ns` is past. Yields in between, every 1 us: the writer
    // may wait for this very core, and the scheduler would let the poller finish its slice of some ms first. (A
    // sleeper is woken on the core of its waker, so the two share one more often than not.)
    template <typename Done>
    bool spin(Done done, uint64_t until_ns) {
        while (true) {
            for (int i = 0; i < 64; ++i) {
                if (done()) return true;
                pause();
            }
            if (now_ns() >= until_ns) return false;
            sched_yield();
        }
    }

    bool ready(uint32_t index) { return has_data(index) || ended(index); }

    // How many bytes of the payload of `record`, the next one of `index`, are there.
    uint64_t available(uint32_t index, const RecordHeader& record) {
        if (record.flags != kStreamed) return record.payload_bytes;
        const uint64_t start = reader(index).consumed.load(std::memory_order_relaxed) + kRecordHeader;
        // SYNC fill->reader (acquire): behind what the writer has filled in.
        const uint64_t filled = writer().filled.load(std::memory_order_acquire);
        // A later streamed record has moved it on: then this one is whole.
        return filled < start ? 0 : filled - start < record.payload_bytes ? filled - start : record.payload_bytes;
    }

    // Whether the next record is there as a whole; false also where it makes no sense.
    bool has_whole_record(uint32_t index) {
        RecordHeader record{};
        unsigned char* payload = nullptr;
        return has_data(index) &&
               (!next(index, &record, &payload) || available(index, record) == record.payload_bytes);
    }

    // Sleeps until `done`, which changes with the sequence word, a signal came (then false), or `nanoseconds` have
    // passed. After an announcement it polls for the message.
    template <typename Done>
    bool park(uint32_t index, uint64_t nanoseconds, Done done) {
        const uint32_t seen = begin_park(index);
        const bool undisturbed = done() || futex_wait(writer().sequence, seen, nanoseconds);
        end_park(index);
        if (!undisturbed || writer().sequence.load(std::memory_order_relaxed) == seen) return undisturbed;
        spin(done, now_ns() + kAnnouncedNs);
        return true;
    }

    // Waits until `done`: polls for `spin_ns`, then sleeps for at most `park_ns`. False for a signal.
    template <typename Done>
    bool wait(uint32_t index, uint64_t spin_ns, uint64_t park_ns, Done done) {
        if (spin_ns > 0 && spin(done, now_ns() + spin_ns)) return true;
        const uint64_t until = now_ns() + park_ns;
        for (uint64_t left = park_ns; left > 0 && !done();) {
            if (!park(index, left, done)) return false;
            const uint64_t now = now_ns();
            left = until > now ? until - now : 0;
        }
        return true;
    }

    // The first half of a park: says that `index` sleeps and returns the word's value to sleep on.
    uint32_t begin_park(uint32_t index) {
        const uint32_t seen = writer().sequence.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC sequence->parked (seq_cst)
        // SYNC parked->sequence (seq_cst): before the word is compared, in the kernel.
        reader(index).parked.store(1, std::memory_order_seq_cst);
        return seen;
    }

    void end_park(uint32_t index) { reader(index).parked.store(0, std::memory_order_relaxed); }

    // Finds the next record of `index`, skipping the unused end; false when its header makes no sense.
    bool next(uint32_t index, RecordHeader* record, unsigned char** payload) {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        uint64_t at = reader(index).consumed.load(std::memory_order_relaxed);
        if (!read_header(at, published, record)) return false;
        if (record->flags == kSkip) {
            at += kRecordHeader + record->payload_bytes;
            // SYNC room->writer (release): also for the records before, as the writer may see this store only.
            reader(index).consumed.store(at, std::memory_order_release);
            wake_writer();
            if (at == published || !read_header(at, published, record) || record->flags == kSkip) return false;
        }
        *payload = data() + at % capacity() + kRecordHeader;
        return true;
    }

    // Gives the record that `next` found back to the writer.
    void release(uint32_t index, const RecordHeader& record) {
        ReaderLine& line = reader(index);
        const uint64_t consumed = line.consumed.load(std::memory_order_relaxed);
        if (record.flags != kPart) {
            line.messages.store(record.message, std::memory_order_relaxed);
        }
        line.progress_ns.store(now_ns(), std::memory_order_relaxed);
        // SYNC room->writer (release): we have finished with the payload before the writer reuses it.
        line.consumed.store(consumed + record_bytes(record.payload_bytes), std::memory_order_release);
        wake_writer();
    }

    void wake_writer() {
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC waiting->room (seq_cst)
        if (space().waiting.load(std::memory_order_relaxed) == 0) return;
        space().word.fetch_add(1, std::memory_order_relaxed);
        futex_wake_all(space().word);
    }

private:
    unsigned char* data() { return base_ + identity_.data_offset; }

    // Fills the end of the data area, in which the next record does not fit.
    [[gnu::noinline]] void skip_end(uint64_t at, uint64_t messages) {
        put_header(at, {capacity() - at - kRecordHeader, kSkip, 0, messages, 0});
    }

    void put_header(uint64_t at, const RecordHeader& record) { std::memcpy(data() + at, &record, sizeof record); }

    bool read_header(uint64_t at, uint64_t published, RecordHeader* record) {
        const uint64_t position = at % capacity();
        const uint64_t available = published - at;
        if (position % kLine != 0 || available < kRecordHeader || available > capacity()) return false;
        std::memcpy(record, data() + position, sizeof *record);
        const uint64_t room = capacity() - position - kRecordHeader;
        if (record->flags > kStreamed || record->payload_bytes > room) return false;
        return rounded(record->payload_bytes, kLine) + kRecordHeader <= available;
    }

    Header* header_;
    unsigned char* base_;
    size_t bytes_;
    Identity identity_{};
    uint64_t stream_start_ = 0;  // position of the payload of the record that is being streamed
    uint64_t room_end_ = 0;      // the writer may publish up to here, as far as this object knows
};

}  // namespace ring
