// The two ends of a ring as objects, each a state machine with an owner: the thread that is inside of a call. Everything
// between a call and its message is native, as after a sleep all caches are cold and every line of code or data costs up to
// 100 ns. Python is asked only while nothing is there: `look_around` knows dead peers, closing, warnings and every error's text.
#pragma once

#include <atomic>

#include "assembly.hpp"
#include "../codec/encoder.hpp"
#include "pacer.hpp"
#include "ring.hpp"

namespace endpoint {

// Why `look_around(reason, detail)` is called. From kLate on it must raise; the names stand in _core as LOOK_BEGIN and so on.
enum Reason : int {
    kBegin,       // a wait begins; detail: bytes of the message that is written
    kWaiting,     // a part of it has passed; the same detail
    kLate,        // its deadline has passed; the same detail
    kUnusable,    // the end is closed, broken, or inherited by a forked child
    kReentrant,   // the calling thread is inside of a call already
    kLent,        // it has a message on loan
    kCorrupt,     // the ring's own words make no sense; detail: an exception
    kUndecodable,  // a message cannot be decoded, and is gone; detail: an exception
    kUnencodable,  // an object cannot be encoded, and nothing was sent; detail: an exception
};

// The latest that a wait can end, and a time-out that stands for none.
inline constexpr uint64_t kForever = UINT64_MAX;
// Signals are looked for at least this often: Ctrl-C must interrupt within 0.2 s, and one that comes just before a sleep
// does not end it.
inline constexpr uint64_t kSliceNs = 100 * 1000 * 1000;

// What a short message needs stands at the beginning, in two cache lines.
struct Endpoint {
    PyObject_HEAD
    PyObject* hook;  // the codec's, for what is no builtin type
    ring::Ring* ring;
    uint64_t born;        // forks of this process when it was made
    unsigned long owner;  // the thread inside of a call or with a message on loan; 0: none
    PyObject* cause;      // why it is broken, or nullptr
    bool is_closed;
    bool is_lent;
    bool is_cut;  // a message is written in part
    Mode mode;
    uint32_t index;    // the reader's place
    unsigned int tag;  // of the latest message that was received
    unsigned long long messages;
    unsigned long long nbytes;
    unsigned long long arrived_ns;  // when the last message came
    codec::Assembly* assembly;      // readers only
    PyObject* look_around;
    PyObject* memory;
    codec::View* view;
    std::atomic<uint32_t>* left;  // futex word: changes when a call ends while other threads wait for that
    uint32_t queued;              // threads that do
    Pacer pacer;
    unsigned long long noted_ns;  // the arrival that the pacer was told last
    unsigned long long waits;
    unsigned long long waited_ns;
    long long timeout_ns;  // of `exchange`; negative: none
};

inline Endpoint* endpoint_of(PyObject* self) { return reinterpret_cast<Endpoint*>(self); }

// What `receive_within` returns when there is no whole message.
extern PyObject* nothing;

inline PyObject* none_yet() { return Py_NewRef(nothing); }

// Calls `look_around`; false with its exception.
bool look(Endpoint* end, Reason reason, PyObject* detail);
// The same for a reason that must raise; always false, with an exception.
bool refuse(Endpoint* end, Reason reason, PyObject* detail = Py_None);
// The same for the exception that is set, if it is an Exception; any other goes on as it is.
bool refuse_error(Endpoint* end, Reason reason);
bool refuse_corrupt(Endpoint* end, const char* what);
// Whether the end can be used by this process; false with an exception.
bool check_usable(Endpoint* end);

// Makes the calling thread the owner, behind the one that is. False with an exception, or without one if `until` has passed.
bool enter(Endpoint* end, uint64_t until);
void leave(Endpoint* end);

// Ownership of an end within a scope.
class Turn {
public:
    Turn(Endpoint* end, uint64_t until) : end_(end), is_mine_(enter(end, until)) {}
    ~Turn() {
        if (is_mine_) leave(end_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return is_mine_; }
    // Stays the owner behind the scope, until the loan ends.
    void keep() { is_mine_ = false; }

private:
    Endpoint* const end_;
    bool is_mine_;
};

// When a wait of `timeout_ns` from now ends; negative: never.
uint64_t deadline(long long timeout_ns);
// Reads the optional argument `timeout_ns` at `at`.
bool read_timeout(PyObject* const* args, Py_ssize_t count, Py_ssize_t at, long long* timeout_ns);

// Frees what is in the mapping's way.
void release_memory(Endpoint* end);

extern PyMethodDef write_methods[];
extern PyMethodDef read_methods[];
PyObject* close(PyObject* self, PyObject* refusing);
PyObject* fail(PyObject* self, PyObject* error);

}  // namespace endpoint
