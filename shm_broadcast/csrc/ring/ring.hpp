// This file holds the ring's protocol: one writer sends records of any length to many readers through one shared mapping.
// It contains no Python, so that tests can run it as threads under a sanitizer. DESIGN.md holds the layout and the proof.
#pragma once

#include <sched.h>
#include <time.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "bell.hpp"

namespace ring {

inline constexpr uint64_t kMagic = 0x31474e4952434721;  // "!GCRING1" in memory order
inline constexpr uint32_t kVersion = 2;
inline constexpr size_t kLine = 64;          // a cache line; counters that one side writes often have one of their own
inline constexpr size_t kPage = 4096;
inline constexpr size_t kRecordHeader = 64;  // gives payloads the alignment of the codec's buffers
inline constexpr uint32_t kMaxReaders = 1024;
// A reader polls this long for an announced message: encoding takes 1 to 30 us, copying a whole record up to 200 us.
inline constexpr uint64_t kAnnouncedNs = 160 * 1000;

// The creator writes this line once, before any other process maps the segment.
struct alignas(kLine) Identity {
    uint64_t magic;
    uint32_t version;
    uint32_t readers;
    uint64_t data_offset;
    uint64_t data_bytes;
    uint64_t generation;
};

// The writer writes this line, and all processes read it. A reader changes `sequence` when it leaves, and to stop a thread of its own.
struct alignas(kLine) WriterLine {
    std::atomic<uint64_t> published;  // bytes of records that readers may read; never decreases
    std::atomic<uint64_t> messages;   // number of whole messages in these bytes
    std::atomic<uint64_t> stamp_ns;   // CLOCK_MONOTONIC time of the latest publication
    std::atomic<uint32_t> sequence;   // futex word that changes with every publication, announcement, close, leave and stir
    std::atomic<uint32_t> closed;     // 1 once the writer has closed the queue
    std::atomic<uint64_t> filled;     // position up to which the latest streamed record is filled in
};

// The writer waits for room with these words. A reader changes `word` to wake it.
struct alignas(kLine) SpaceLine {
    std::atomic<uint32_t> word;     // futex word that wakes a waiting writer: there is room, a reader came or left, or the queue was closed
    std::atomic<uint32_t> waiting;  // 1 while the writer waits or is about to wait
};

// One reader writes this line, and the writer reads it.
struct alignas(kLine) ReaderLine {
    std::atomic<uint64_t> consumed;     // bytes that this reader has given back; never decreases
    std::atomic<uint64_t> messages;     // number of whole messages in these bytes
    std::atomic<uint64_t> progress_ns;  // CLOCK_MONOTONIC time of the latest release
    std::atomic<uint32_t> parked;       // a flag and a number, see Parked
    std::atomic<uint32_t> state;        // a value of ReaderState
};

// Says who must be woken: a flag for the thread that signals a descriptor, and a count of the reader's
// threads that sleep on `sequence` or are about to. It is a count because several may sleep, as waiting for
// several rings takes no turn: the first of them to wake would clear a flag for all.
enum Parked : uint32_t { kSleeper = 1, kAwaitsSignal = 1U << 31 };

enum ReaderState : uint32_t { kAbsent = 0, kAttached = 1, kLeft = 2 };

enum RecordFlags : uint32_t { kWhole = 0, kSkip = 1, kPart = 2, kLastPart = 3, kStreamed = 4 };

// This header precedes each payload. A streamed record is published before its payload is complete: readers copy the bytes up
// to `filled` while the writer adds more. A skip record fills the end of the data area, and its payload has no content.
struct RecordHeader {
    uint64_t payload_bytes;
    uint32_t flags;
    uint32_t tag;          // a number from the application, equal in all parts of a message
    uint64_t message;      // number of the message; the first is 1
    uint64_t total_bytes;  // length of the whole message, which may travel in parts
};
static_assert(sizeof(RecordHeader) <= kRecordHeader);

struct Header {
    Identity identity;
    WriterLine writer;
    SpaceLine space;
    ReaderLine readers[1];  // the segment holds identity.readers of these lines
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

// Lets another thread of this core run. If that is a process that never sleeps, it keeps the core for a time slice of 3 ms.
// After a yield of more than 0.2 ms the calling thread does not yield again for 0.1 s, so such slices cost at most 3 % of its
// time.
inline void yield_core() {
    constexpr uint64_t kLongNs = 200 * 1000, kRefusalNs = 100 * 1000 * 1000;
    static thread_local uint64_t refused_until = 0;
    const uint64_t before = now_ns();
    if (before < refused_until) return;
    sched_yield();
    const uint64_t after = now_ns();
    if (after - before > kLongNs) refused_until = after + kRefusalNs;
}

// This class is one process's view of the segment. It checks offsets that the other side wrote before it uses them. It reads
// the identity only once, so that a later change of that memory cannot lead outside of the mapping.
class Ring {
public:
    Ring(unsigned char* base, size_t bytes) : header_(reinterpret_cast<Header*>(base)), base_(base), bytes_(bytes) {
        if (bytes >= kPage) identity_ = header_->identity;
    }

    // Writes the layout into a new, zeroed mapping. Returns false if the mapping is too small or `readers` is out of range.
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
    // The bell of the reader's process: the writer sounds it whenever it wakes readers, and the reader when it lets others read.
    Bell* bell() { return bell_; }
    void set_bell(Bell* bell) { bell_ = bell; }
    WriterLine& writer() { return header_->writer; }
    SpaceLine& space() { return header_->space; }
    ReaderLine& reader(uint32_t index) { return header_->readers[index]; }

    // Returns the longest payload that travels in one record: half of the ring less a header. The writer may have to skip the
    // end of the data area first, and with this limit the skipped end and the record always fit into an empty ring together.
    size_t longest_payload() const { return (capacity() / 2) / kLine * kLine - kRecordHeader; }

    // ---------------------------------------------------------------- writer

    // Returns the bytes that the slowest reader has not given back yet. A reader that left or died counts too: the writer
    // raises an error instead of waiting for it, and nothing is dropped silently.
    uint64_t outstanding() {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        uint64_t most = 0;
        for (uint32_t i = 0; i < readers(); ++i) {
            // SYNC room->writer (acquire): the reader has finished with the bytes that the writer overwrites next.
            const uint64_t lag = published - reader(i).consumed.load(std::memory_order_acquire);
            if (lag > most) most = lag;
        }
        return most;
    }

    // Returns whether `published` is a position that a writer can have stored.
    bool is_aligned() { return writer().published.load(std::memory_order_relaxed) % kLine == 0; }

    // Returns where the next record begins. The result lies inside the data area even if `published` was overwritten.
    uint64_t position() { return writer().published.load(std::memory_order_relaxed) % capacity() / kLine * kLine; }

    // Returns the bytes to publish for a payload at the present position, including the skipped end of the data area.
    uint64_t needed(size_t payload) {
        const uint64_t at = position();
        const uint64_t record = record_bytes(payload);
        return at + record <= capacity() ? record : capacity() - at + record;
    }

    // Returns whether there is room for `payload`. Each reader's line costs a cache miss, so this function reads the lines only
    // if the room that it already knows of is not enough.
    bool has_room(size_t payload) {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        const uint64_t end = published + needed(payload);
        if (end <= room_end_) return true;
        const uint64_t most = outstanding();
        room_end_ = most <= capacity() ? published - most + capacity() : published;
        return end <= room_end_;
    }

    // Returns whether it is useless to wait for room, because the queue was closed or a reader has left.
    bool hopeless() {
        bool found = writer().closed.load(std::memory_order_relaxed) != 0;
        for (uint32_t i = 0; i < readers() && !found; ++i) {
            found = reader(i).state.load(std::memory_order_relaxed) == kLeft;
        }
        return found;
    }

    // Waits on the space word for at most `nanoseconds`, unless there is room for `payload` or waiting is useless.
    void wait_for_room(size_t payload, uint64_t nanoseconds) {
        const uint32_t seen = space().word.load(std::memory_order_relaxed);
        // SYNC waiting->room (seq_cst): either the reader sees that the writer waits, or the writer sees its room.
        space().waiting.store(1, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC waiting->room (seq_cst)
        if (!has_room(payload) && !hopeless()) futex_wait(space().word, seen, nanoseconds);
        space().waiting.store(0, std::memory_order_relaxed);
    }

    // Returns the address at which to fill in a payload, for which there must be room. Publishes nothing.
    unsigned char* reserve(size_t payload) {
        uint64_t at = position();
        if (at + record_bytes(payload) > capacity()) at = 0;
        return data() + at + kRecordHeader;
    }

    // Publishes the payload that was filled in at `reserve(payload)`.
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
        // SYNC payload->reader (release): header and payload are complete before readers see the new end.
        writer().published.store(published + record_bytes(payload), std::memory_order_release);
        writer().stamp_ns.store(now_ns(), std::memory_order_relaxed);
        wake_readers();
    }

    // Publishes a record whose payload is filled in afterwards, at the address that `reserve(payload)` returned before this
    // call. There must be room for it.
    void begin_stream(size_t payload, uint32_t tag = 0) {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        stream_start_ = published + needed(payload) - record_bytes(payload) + kRecordHeader;
        // SYNC fill->reader (release): it also covers the streamed record before, as its readers may see only this store.
        writer().filled.store(stream_start_, std::memory_order_release);
        publish(payload, kStreamed, payload, false, tag);
    }

    // Tells the readers that the first `bytes` of the payload are complete.
    void fill(uint64_t bytes) {
        // SYNC fill->reader (release): the bytes are complete before readers see that they are.
        writer().filled.store(stream_start_ + bytes, std::memory_order_release);
    }

    // Counts the message after all of its payload is filled in. Wakes the readers that went to sleep meanwhile.
    void end_stream() {
        const uint64_t messages = writer().messages.load(std::memory_order_relaxed) + 1;
        writer().messages.store(messages, std::memory_order_relaxed);
        wake_readers();
    }

    // Wakes the sleeping readers because a message is about to come: they wake up while it is encoded and copied.
    // This is only a hint: the publication wakes every reader that sleeps then.
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
        // SYNC sequence->parked (seq_cst): either this side sees that a reader is parked, or its futex sees the change.
        // SYNC listeners->sequence (seq_cst): either this side sees that a thread listens, or that thread sees the change.
        writer().sequence.fetch_add(1, std::memory_order_seq_cst);
        bool parked = false;
        for (uint32_t i = 0; i < readers() && !parked; ++i) {
            // SYNC parked->sequence (seq_cst)
            parked = reader(i).parked.load(std::memory_order_seq_cst) != 0;
        }
        if (parked) futex_wake_all(writer().sequence);
        if (bell_ != nullptr) bell_->sound();
    }

    // ---------------------------------------------------------------- reader

    bool has_data(uint32_t index) {
        // SYNC payload->reader (acquire): the reader sees all of the published bytes.
        return writer().published.load(std::memory_order_acquire) !=
               reader(index).consumed.load(std::memory_order_relaxed);
    }

    // Returns whether the queue has ended. Call it before has_data: if it then returns true and has_data false, no message will
    // follow. If it is called after has_data, a last message may have come in between.
    bool ended(uint32_t index) {
        // SYNC end->reader (acquire): a reader that sees the end also sees everything published before it.
        return writer().closed.load(std::memory_order_acquire) != 0 ||
               reader(index).state.load(std::memory_order_relaxed) == kLeft;
    }

    // Tells the readers that the writer publishes nothing more. Wakes all waiting threads at both ends.
    void close() {
        // SYNC end->reader (release): this store follows the last publication.
        writer().closed.store(1, std::memory_order_release);
        wake_readers();
        wake_writer();
    }

    // Tells the writer that `index` reads nothing more. Wakes the writer and any thread that waits as this reader.
    void leave(uint32_t index) {
        reader(index).state.store(kLeft, std::memory_order_relaxed);
        wake_readers();
        wake_writer();
    }

    // Polls until `done()` is true or `until_ns` has passed. It yields every 1 us, because the writer may be waiting for this
    // very core, and the scheduler would otherwise let the poller finish its slice of some ms first. (A sleeper is woken on
    // the core of its waker, so the two usually share a core.)
    template <typename Done>
    bool spin(Done done, uint64_t until_ns) {
        while (true) {
            for (int i = 0; i < 64; ++i) {
                if (done()) return true;
                pause();
            }
            if (now_ns() >= until_ns) return false;
            yield_core();
        }
    }

    bool ready(uint32_t index) { return has_data(index) || ended(index); }

    // Returns how many bytes of the payload of `record` are complete. `record` is the next one of reader `index`.
    uint64_t available(uint32_t index, const RecordHeader& record) {
        return available_at(reader(index).consumed.load(std::memory_order_relaxed), record);
    }

    // Returns the same for a record that begins at `at`.
    uint64_t available_at(uint64_t at, const RecordHeader& record) {
        if (record.flags != kStreamed) return record.payload_bytes;
        const uint64_t start = at + kRecordHeader;
        // SYNC fill->reader (acquire): the reader sees the bytes that the writer has filled in.
        const uint64_t filled = writer().filled.load(std::memory_order_acquire);
        // If a later streamed record has moved `filled` on, this record is complete.
        return filled < start ? 0 : filled - start < record.payload_bytes ? filled - start : record.payload_bytes;
    }

    // Returns whether the next record is complete. Also returns true for an invalid header, which `next` then
    // refuses. Any thread may call it, as it may call `has_more`.
    bool has_whole_record(uint32_t index) { return has_more(index, UINT64_MAX); }

    // Sleeps until the sequence word changes, a signal comes or `nanoseconds` have passed; `done()` may only change together
    // with that word. Returns false for a signal. After an announcement it polls for the message.
    template <typename Done>
    bool park(uint32_t index, uint64_t nanoseconds, Done done) {
        const uint32_t seen = begin_park(index);
        const bool undisturbed = done() || futex_wait(writer().sequence, seen, nanoseconds);
        end_park(index);
        if (!undisturbed || writer().sequence.load(std::memory_order_relaxed) == seen) return undisturbed;
        spin(done, now_ns() + kAnnouncedNs);
        return true;
    }

    // Waits until `done()` is true: polls for `spin_ns`, then sleeps for at most `park_ns`. Returns false for a signal.
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

    // Begins a park: counts a sleeper of reader `index` and returns the value of the sequence word to sleep on.
    uint32_t begin_park(uint32_t index) {
        const uint32_t seen = writer().sequence.load(std::memory_order_relaxed);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC sequence->parked (seq_cst)
        // SYNC parked->sequence (seq_cst): this store comes before the kernel compares the word.
        reader(index).parked.fetch_add(kSleeper, std::memory_order_seq_cst);
        return seen;
    }

    void end_park(uint32_t index) { reader(index).parked.fetch_sub(kSleeper, std::memory_order_relaxed); }

    // Asks the writer for a signal when a record is complete or the queue has ended. The caller looks afterwards.
    void await_signal(uint32_t index) {
        // SYNC parked->sequence (seq_cst)
        reader(index).parked.fetch_or(kAwaitsSignal, std::memory_order_seq_cst);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC sequence->parked (seq_cst)
    }

    bool awaits_signal(uint32_t index) {
        return (reader(index).parked.load(std::memory_order_relaxed) & kAwaitsSignal) != 0;
    }

    // Takes the request back. Returns true to exactly one caller, which must signal.
    bool take_signal(uint32_t index) {
        return (reader(index).parked.fetch_and(~kAwaitsSignal, std::memory_order_relaxed) & kAwaitsSignal) != 0;
    }

    // Returns whether the queue has ended or the next record is complete. Any thread may call it.
    bool is_readable(uint32_t index) { return ended(index) || has_whole_record(index); }

    // Returns whether the next record is complete, or more than `taken` bytes of it are there. Unlike `next`,
    // it changes nothing: it also runs in threads that have no turn, and a store of theirs could set
    // `consumed` back. If the reader moves on at the same time, it may return true in vain.
    bool has_more(uint32_t index, uint64_t taken) {
        if (!has_data(index)) return false;
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        uint64_t at = reader(index).consumed.load(std::memory_order_relaxed);
        RecordHeader record{};
        if (at == published) return false;
        if (!read_header(at, published, &record)) return true;
        if (record.flags == kSkip) {
            at += kRecordHeader + record.payload_bytes;
            if (at == published || !read_header(at, published, &record)) return true;
        }
        const uint64_t there = available_at(at, record);
        return there == record.payload_bytes || there > taken;
    }

    // Returns whether the reader, which has copied `taken` bytes of the next record, can go on: there is more, or everything was
    // read and the queue has ended. This is the look of a thread that listens to the bell.
    bool has_news(uint32_t index, uint64_t taken) {
        // SYNC listeners->sequence (seq_cst): if a writer saw no listener, what it published is visible now.
        static_cast<void>(writer().sequence.load(std::memory_order_seq_cst));
        const bool is_over = ended(index);
        return has_more(index, taken) || (is_over && !has_data(index));
    }

    // Sleeps until a signal is due, `nanoseconds` have passed, or `stop` is not 0; call `stir` after setting
    // `stop`. Returns whether a signal is due.
    bool await_readable(uint32_t index, uint64_t nanoseconds, const unsigned char* stop) {
        const uint64_t until = now_ns() + nanoseconds;
        while (true) {
            // SYNC stop->signal (acquire): a thread that sees the stir also sees that `stop` is set.
            const uint32_t seen = writer().sequence.load(std::memory_order_acquire);
            std::atomic_thread_fence(std::memory_order_seq_cst);  // SYNC sequence->parked (seq_cst)
            if (__atomic_load_n(stop, __ATOMIC_RELAXED) != 0) return false;
            if (awaits_signal(index) && is_readable(index)) return true;
            const uint64_t now = now_ns();
            if (now >= until || !futex_wait(writer().sequence, seen, until - now)) return false;
        }
    }

    // Wakes every thread that sleeps on the sequence word. A thread of this process that is to stop then looks at its `stop`.
    void stir() {
        // SYNC stop->signal (release): `stop` was set before.
        writer().sequence.fetch_add(1, std::memory_order_release);
        futex_wake_all(writer().sequence);
    }

    // Finds the next record of reader `index` and skips the unused end of the data area. Returns false for an invalid header. Only
    // for the thread whose turn it is, or with the GIL.
    bool next(uint32_t index, RecordHeader* record, unsigned char** payload) {
        const uint64_t published = writer().published.load(std::memory_order_relaxed);
        uint64_t at = reader(index).consumed.load(std::memory_order_relaxed);
        if (!read_header(at, published, record)) return false;
        if (record->flags == kSkip) {
            at += kRecordHeader + record->payload_bytes;
            // SYNC room->writer (release): it also covers the records before, as the writer may see only this store.
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
        // SYNC room->writer (release): the reader has finished with the payload before the writer reuses it.
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

    // Fills the end of the data area with a skip record, because the next record does not fit there.
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
    Bell* bell_ = nullptr;
    uint64_t stream_start_ = 0;  // position of the payload of the record that is being streamed
    uint64_t room_end_ = 0;      // position up to which this object knows that there is room
};

}  // namespace ring
