// This file implements the writing endpoint, which turns objects into whole messages in the ring. Every wait for room ends.
#include <algorithm>

#include "endpoint.hpp"
#include "../codec/pieces.hpp"

namespace endpoint {
namespace {

using codec::Encoder;
using codec::expect_arguments;
using codec::kUnlockedCopy;
using codec::Pieces;
using codec::Ref;
using ring::Ring;

// The writer copies this much of a long message before it tells the readers, which takes some microseconds.
constexpr size_t kStreamedBytes = 32 * 1024;

// A message on its way into the ring.
class Writing {
public:
    Writing(Endpoint* end, const Pieces& pieces, uint32_t tag, size_t done = 0)
        : end_(end), ring_(*end->ring), pieces_(pieces), tag_(tag), total_(pieces.total()),
          is_whole_(total_ <= ring_.longest_payload()), done_(done) {}

    size_t done() const { return done_; }
    bool is_over() const { return done_ == total_; }

    // Returns the length of the next record. A part has a quarter of the ring: the reader copies one while the writer fills the
    // next.
    size_t next() const {
        if (is_whole_) return total_;
        return std::min(ring_.longest_payload() / 2 / ring::kLine * ring::kLine, total_ - done_);
    }
    bool has_room() { return ring_.has_room(next()); }

    // Publishes the next record, for which there is room. The endpoint must not be closed: the caller has looked since it took the
    // GIL, and has run no Python code since.
    void advance() {
        const size_t payload = next();
        end_->completes = done_ + payload == total_ ? total_ : 0;
        if (payload <= kUnlockedCopy) publish(payload);
        else publish_unlocked(payload);
        done_ += payload;
        end_->is_cut = done_ < total_;
        count_message(end_);
    }

    // Polls and then sleeps until there is room, or `budget` is used up.
    void await_room(Budget budget) {
        const auto room = [this] { return has_room(); };
        Py_BEGIN_ALLOW_THREADS
        if (budget.spin_ns > 0) ring_.spin(room, ring::now_ns() + budget.spin_ns);
        if (budget.park_ns > 0 && !has_room()) ring_.wait_for_room(next(), budget.park_ns);
        Py_END_ALLOW_THREADS
    }

private:
    void publish(size_t payload) {
        pieces_.copy(ring_.reserve(payload), done_, payload);
        const bool ends = done_ + payload == total_;
        ring_.publish(payload, is_whole_ ? ring::kWhole : ends ? ring::kLastPart : ring::kPart, total_, ends, tag_);
    }

    // Publishes a long record without the GIL. Readers must not see the end of the queue before it, so `close` waits meanwhile.
    void publish_unlocked(size_t payload) {
        begin_copy(end_);
        Py_BEGIN_ALLOW_THREADS
        if (is_whole_) stream();
        else publish(payload);
        // Before the thread takes the GIL, which it may never get if the interpreter exits.
        end_copy(end_);
        Py_END_ALLOW_THREADS
    }

    // Publishes the record first and then fills it in, while readers copy the part that is already there.
    void stream() {
        unsigned char* to = ring_.reserve(total_);
        ring_.begin_stream(total_, tag_);
        for (size_t done = 0; done < total_;) {
            const size_t bytes = std::min(kStreamedBytes, total_ - done);
            pieces_.copy(to + done, done, bytes);
            done += bytes;
            ring_.fill(done);
        }
        ring_.end_stream();
    }

    Endpoint* const end_;
    Ring& ring_;
    const Pieces& pieces_;
    const uint32_t tag_;
    const size_t total_;
    const bool is_whole_;
    size_t done_;
};

// Holds the refusal of a call that a signal handler made inside of a write on the same thread, and did not
// catch. It must not cut the message, so the write goes on and raises the refusal at its end. A handler that
// runs periodically is refused again and again; only the first refusal is held.
class Refusal {
public:
    explicit Refusal(Endpoint* end) : end_(end) {}
    ~Refusal() {
        Py_XDECREF(type_);
        Py_XDECREF(value_);
        Py_XDECREF(traceback_);
    }
    Refusal(const Refusal&) = delete;
    Refusal& operator=(const Refusal&) = delete;

    // Calls `step`, which returns false with an exception if it fails. Returns true if `step` succeeded, or
    // if its exception is a refusal, which is now held, or dropped because one is held already.
    template <typename Step>
    bool pass(const Writing& writing, Step step) {
        end_->refused_nested = false;
        if (step()) return true;
        const bool is_ours = end_->refused_nested && writing.done() > 0 && end_->cause == nullptr && !end_->is_closed;
        if (!is_ours || !PyErr_ExceptionMatches(PyExc_Exception)) return false;
        if (type_ == nullptr) PyErr_Fetch(&type_, &value_, &traceback_);
        else PyErr_Clear();
        return true;
    }
    // Raises what is held. Returns whether nothing is.
    bool release() {
        if (type_ == nullptr) return true;
        PyErr_Restore(type_, value_, traceback_);
        type_ = value_ = traceback_ = nullptr;
        return false;
    }

private:
    Endpoint* const end_;
    PyObject *type_ = nullptr, *value_ = nullptr, *traceback_ = nullptr;
};

bool check_position(Endpoint* end) {
    return end->ring->is_aligned() || refuse_corrupt(end, "the position of the ring is not aligned");
}

// Waits for room for the next record. Returns false with an exception.
bool await(Endpoint* end, Writing& writing, Refusal& refusal, PyObject* total, const Deadline& deadline) {
    const bool spins = end->mode != Mode::kPark, parks = end->mode != Mode::kSpin;
    const uint64_t until = deadline.until;
    uint64_t now = ring::now_ns(), look_at = now + kSliceNs;
    while (!writing.has_room()) {
        const uint64_t left = std::min(until > now ? until - now : 0, kSliceNs);
        const uint64_t spin = !spins ? 0 : parks ? std::min<uint64_t>(kShortSpinNs, left) : left;
        writing.await_room({spin, parks ? left : 0});
        if (!refusal.pass(writing, [end] { return check_usable(end) && check_signals(end); })) return false;
        if (writing.has_room()) break;
        now = ring::now_ns();
        if (now >= look_at || now >= until || end->ring->hopeless()) {
            if (!refusal.pass(writing, [&] { return look(end, kWaiting, total); })) return false;
            look_at = now + kSliceNs;
        }
        if (now >= until) return refuse_late(end, deadline, total);
    }
    return true;
}

// Writes all of a message. Returns false with an exception.
bool write_parts(Endpoint* end, Writing& writing, PyObject* total, const Deadline& deadline) {
    Refusal refusal(end);
    uint64_t look_at = 0;
    bool ok = true, has_begun = false;
    while (ok && !writing.is_over()) {
        if (!writing.has_room()) {
            const uint64_t start = ring::now_ns();
            if (!has_begun) {
                has_begun = true;
                ++end->waits;
                ok = refusal.pass(writing, [&] { return look(end, kBegin, total); });
                look_at = start + kSliceNs;
            }
            ok = ok && await(end, writing, refusal, total, deadline);
            end->waited_ns += ring::now_ns() - start;
        }
        // Python code that has run meanwhile may have made a forked child of this process, or have closed the endpoint.
        ok = ok && check_usable(end);
        if (!ok) break;
        writing.advance();
        if (writing.is_over()) break;
        ok = refusal.pass(writing, [end] { return check_usable(end) && check_signals(end); });
        if (ok && look_at > 0 && ring::now_ns() >= look_at) {
            ok = refusal.pass(writing, [&] { return look(end, kWaiting, total); });
            look_at = ring::now_ns() + kSliceNs;
        }
    }
    return ok && refusal.release();
}

// Keeps the current exception as the error that broke the endpoint: parts of a message are published, and no other message
// can follow them.
void break_off(Endpoint* end) {
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (value != nullptr && end->cause == nullptr && !end->is_closed) end->cause = Py_NewRef(value);
    PyErr_Restore(type, value, traceback);
}

bool write(Endpoint* end, const Pieces& pieces, const Deadline& deadline) {
    if (!check_position(end)) return false;
    Writing writing(end, pieces, end->tag);
    if (!writing.has_room() || writing.next() < pieces.total()) {
        const Ref total(PyLong_FromSize_t(pieces.total()));
        if (!total) return false;
        if (!write_parts(end, writing, total.get(), deadline)) {
            if (end->is_cut) break_off(end);
            return false;
        }
    } else {
        writing.advance();
    }
    // Another thread may have closed the queue before this message was in it.
    return !end->is_closed || refuse(end, kUnusable);
}

// Writes a message if it fits into one record and there is room for it. Returns 1 if it was written, 0 if nothing was changed,
// and -1 with an exception.
int write_now(Endpoint* end, const Pieces& pieces, uint32_t tag) {
    if (end->is_cut) return 0;
    if (!check_position(end)) return -1;
    Writing writing(end, pieces, tag);
    if (writing.next() < pieces.total() || !writing.has_room() || end->ring->hopeless()) return 0;
    writing.advance();
    return 1;
}

bool encode(Endpoint* end, Encoder& encoder, Pieces& pieces, PyObject* object) {
    end->ring->announce();
    const Ref hook = Ref::borrowed(end->hook);
    if (!encoder.build(object)) {
        encoder.tell_path();
        return refuse_error(end, kUnencodable);
    }
    if (!pieces.acquire({encoder.header().data(), encoder.header().size()}, encoder.buffers())) {
        return refuse_error(end, kUnencodable);
    }
    // Code of the application may have run meanwhile and closed the endpoint.
    return check_usable(end);
}

bool send(Endpoint* end, PyObject* object, long long timeout_ns) {
    const Deadline within = deadline(timeout_ns);
    const Turn turn(end, within.until);
    if (!came(end, turn, within)) return false;
    Encoder encoder(end->hook);
    Pieces pieces;
    return encode(end, encoder, pieces, object) && write(end, pieces, within);
}

// send(object[, timeout_ns])
PyObject* write_send(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    long long timeout_ns = -1;
    if (!expect_arguments("send", count == 2 ? 1 : count, 1) || !read_timeout(args, count, 1, &timeout_ns)) return nullptr;
    if (!send(endpoint_of(self), args[0], timeout_ns)) return nullptr;
    Py_RETURN_NONE;
}

// exchange(object) -> object
PyObject* write_exchange(PyObject* self, PyObject* object) {
    return send(endpoint_of(self), object, endpoint_of(self)->timeout_ns) ? Py_NewRef(object) : nullptr;
}

// Reads (header, buffers) of an encoded message.
bool read_message(PyObject* const* args, codec::View& header, Pieces& pieces) {
    if (!PyTuple_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "a tuple is needed");
        return false;
    }
    if (!header.acquire(args[0]) || !pieces.acquire({header.data(), header.size()}, args[1])) return false;
    if (pieces.total() > 0) return true;
    PyErr_SetString(PyExc_ValueError, "nothing is left to write");
    return false;
}

bool read_tag(PyObject* object, uint32_t* tag) {
    const unsigned long value = PyLong_AsUnsignedLong(object);
    if (value == static_cast<unsigned long>(-1) && PyErr_Occurred()) return false;
    *tag = static_cast<uint32_t>(value);
    return true;
}

// write(header, buffers[, timeout_ns])
PyObject* write_write(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    long long timeout_ns = -1;
    codec::View header;
    Pieces pieces;
    if (!expect_arguments("write", count == 3 ? 2 : count, 2) || !read_timeout(args, count, 2, &timeout_ns)) return nullptr;
    if (!read_message(args, header, pieces)) return nullptr;
    const Deadline within = deadline(timeout_ns);
    const Turn turn(end, within.until);
    if (!came(end, turn, within) || !write(end, pieces, within)) return nullptr;
    Py_RETURN_NONE;
}

// send_now(object, tag) -> None, or (header, buffers, nbytes) of an object that was encoded but not sent
PyObject* write_send_now(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    uint32_t tag = 0;
    if (!expect_arguments("send_now", count, 2) || !read_tag(args[1], &tag)) return nullptr;
    const Turn turn(end, kForever);
    if (!turn) return nullptr;
    Encoder encoder(end->hook);
    Pieces pieces;
    if (!encode(end, encoder, pieces, args[0])) return nullptr;
    const int written = write_now(end, pieces, tag);
    if (written < 0) return nullptr;
    if (written > 0) Py_RETURN_NONE;
    return encoder.result();
}

// write_now(header, buffers, tag) -> whether it was written
PyObject* write_write_now(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    uint32_t tag = 0;
    codec::View header;
    Pieces pieces;
    if (!expect_arguments("write_now", count, 3) || !read_tag(args[2], &tag) || !read_message(args, header, pieces)) return nullptr;
    const Turn turn(end, kForever);
    if (!turn) return nullptr;
    const int written = write_now(end, pieces, tag);
    return written < 0 ? nullptr : PyBool_FromLong(written);
}

// One call of write_some lasts at most about this long, even if it has more to write: the caller checks for signals between
// calls.
constexpr uint64_t kLongestWriteNs = 50 * 1000 * 1000;

// write_some(header, buffers, done, spin_ns, park_ns, tag) -> bytes of the message published so far
PyObject* write_some(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    uint64_t numbers[3];
    uint32_t tag = 0;
    codec::View header;
    Pieces pieces;
    if (!expect_arguments("write_some", count, 6) || !read_message(args, header, pieces)) return nullptr;
    for (int i = 0; i < 3; ++i) {
        numbers[i] = PyLong_AsUnsignedLongLong(args[2 + i]);
        if (numbers[i] == static_cast<uint64_t>(-1) && PyErr_Occurred()) return nullptr;
    }
    if (!read_tag(args[5], &tag)) return nullptr;
    if (numbers[0] >= pieces.total()) return PyErr_Format(PyExc_ValueError, "nothing is left to write");
    const uint64_t start = ring::now_ns();
    const Turn turn(end, start + numbers[1] + numbers[2] + 1);
    if (!turn) return PyErr_Occurred() ? nullptr : PyLong_FromUnsignedLongLong(numbers[0]);
    if (!check_position(end)) return nullptr;
    Writing writing(end, pieces, tag, numbers[0]);
    bool has_waited = false;
    while (!writing.is_over() && (writing.done() == numbers[0] || ring::now_ns() < start + kLongestWriteNs)) {
        if (!writing.has_room() && !has_waited) {
            writing.await_room({numbers[1], numbers[2]});
            has_waited = true;
        }
        if (end->is_closed || !writing.has_room()) break;
        writing.advance();
        has_waited = false;
    }
    return PyLong_FromSize_t(writing.done());
}

}  // namespace

#define METHOD(name, function, flags) {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr}

PyMethodDef write_methods[] = {
    METHOD("exchange", write_exchange, METH_O),
    METHOD("send", write_send, METH_FASTCALL),
    METHOD("write", write_write, METH_FASTCALL),
    METHOD("send_now", write_send_now, METH_FASTCALL),
    METHOD("write_now", write_write_now, METH_FASTCALL),
    METHOD("write_some", write_some, METH_FASTCALL),
    METHOD("fail", fail, METH_O),
    METHOD("close", close, METH_O),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace endpoint
