// This file declares the two endpoints of a ring. Each is a state machine with an owner: the thread that is inside a call.
// Everything between a call and its message is native, because after a sleep all caches are cold and every line of code or
// data costs up to 100 ns. An endpoint calls Python only while no message is there: `look_around` handles dead peers, closing,
// warnings and the text of every error.
#pragma once

#include <atomic>
#include <vector>

#include "assembly.hpp"
#include "../codec/encoder.hpp"
#include "pacer.hpp"
#include "ring.hpp"

namespace endpoint {

// The reasons for a call of `look_around(reason, detail)`. From kLate on it must raise, except for kUndecodable. _core exports the values as LOOK_BEGIN
// and so on.
enum Reason : int {
    kBegin,       // a wait begins; `detail` is the size in bytes of the message that is being written
    kWaiting,     // a slice of the wait has passed, or a message is expected now; `detail` is the same
    kLate,        // the deadline has passed; `detail` is (time-out in ns, size in bytes of the message or None)
    kUnusable,    // the endpoint is closed, broken, or inherited by a forked child
    kReentrant,   // the calling thread is already inside a call
    kLent,        // the calling thread has a message on loan
    kCorrupt,     // the ring's own words are invalid; `detail` is an exception
    kUndecodable,  // a message cannot be decoded; `detail` is an exception. Here `look_around` must return
                   // what takes the message's place, which is raised if it is an exception; or None if the
                   // message is not at fault, for example because a signal handler raised `detail`. After
                   // None, `detail` is raised and the message stays the next one.
    kUnencodable,  // an object cannot be encoded, and nothing was sent; `detail` is an exception
};

// This is the latest possible deadline; a wait without a time-out has it.
inline constexpr uint64_t kForever = UINT64_MAX;

struct Deadline {
    long long timeout_ns;  // negative if there is none
    uint64_t until;        // the time at which the wait ends
};

// A waiting call checks for signals at least this often: Ctrl-C must interrupt within 0.2 s, and a signal that comes just
// before a sleep does not end that sleep.
inline constexpr uint64_t kSliceNs = 100 * 1000 * 1000;

// The fields that a short message needs come first and lie in two cache lines.
struct Endpoint {
    PyObject_HEAD
    PyObject* hook;  // the codec's, for objects that are not of a builtin type
    ring::Ring* ring;
    uint64_t born;        // the fork count when the endpoint was created
    unsigned long owner;  // the thread that is inside a call or has a message on loan; 0 if there is none
    PyObject* cause;      // the error that broke the endpoint, or nullptr
    bool is_closed;
    bool is_lent;
    bool is_cut;  // only a part of a message is written
    bool refused_nested;  // a call of the owner was refused, since this was last set to false
    Mode mode;
    uint32_t index;    // the reader's place
    unsigned int tag;  // in a reader that of the latest message that was received, in a writer that of whole messages it sends
    unsigned long long messages;
    unsigned long long nbytes;
    unsigned long long completes;   // length of the message whose last record is being published and that is not counted yet, or 0
    unsigned long long arrived_ns;  // when the last message came
    codec::Assembly* assembly;      // nullptr in a writer
    // Messages that were taken out of the ring and that Python has not taken over yet, the next one first; nullptr in a writer.
    std::vector<PyObject*>* kept;
    PyObject* look_around;
    PyObject* memory;
    codec::View* view;
    codec::View* bell_view;  // holds the memory of the ring's bell; nullptr if there is none
    std::atomic<uint32_t>* left;  // futex word that changes when a call ends while other threads wait for their turn
    uint32_t queued;              // number of threads that wait for their turn
    std::atomic<uint32_t>* copying;  // futex word, a value of Copying
    uint64_t loans;               // number of loans so far
    unsigned long long lent_bytes;  // length of the message on loan, once the application has it
    Pacer pacer;
    unsigned long long noted_ns;  // the latest arrival that the pacer was told
    unsigned long long waits;
    unsigned long long waited_ns;
    long long timeout_ns;  // time-out of `exchange`; negative if there is none
    int signal;            // the reader's: its own descriptor of the eventfd that tells whether there is a message, or -1
};

// What a writer's call does without the GIL: no copy, the copy of a record, or a copy that `close` awaits.
enum Copying : uint32_t { kCopiesNothing = 0, kCopies = 1, kIsAwaited = 2 };

inline Endpoint* endpoint_of(PyObject* self) { return reinterpret_cast<Endpoint*>(self); }

// `receive_within` returns this object when there is no whole message.
extern PyObject* nothing;

inline PyObject* none_yet() { return Py_NewRef(nothing); }

// Calls `look_around` and returns what it returned.
PyObject* answer(Endpoint* end, Reason reason, PyObject* detail);
// Calls `look_around`. Returns false, with its exception set, if it raised.
bool look(Endpoint* end, Reason reason, PyObject* detail);
// Calls `look_around` for a reason that must raise. Always returns false, with an exception set.
bool refuse(Endpoint* end, Reason reason, PyObject* detail = Py_None);
// Refuses with the current exception as `detail` if it is an `Exception`. Any other exception stays set as it is.
bool refuse_error(Endpoint* end, Reason reason);
bool refuse_corrupt(Endpoint* end, const char* what);
// Refuses because `deadline` has passed. `total` is the size in bytes of the message that is being written, or None.
bool refuse_late(Endpoint* end, const Deadline& deadline, PyObject* total = Py_None);
// Returns whether this process can use the endpoint. If not, an exception is set.
bool check_usable(Endpoint* end);
// The number of forks between the process that loaded this module and this one.
extern uint64_t forks;
// Returns whether this process is a forked child of the one whose endpoint this is. It changes nothing in shared memory.
inline bool is_inherited(const Endpoint* end) { return end->born != forks; }
// Runs the handlers of pending signals. Returns false, with an exception, if one raises, or if this process
// is now a forked child because a handler or a hook has forked.
bool check_signals(Endpoint* end);

// Waits until the endpoint has no owner and makes the calling thread the owner. Returns false with an exception set, or
// without one if `until` has passed.
bool enter(Endpoint* end, uint64_t until);
void leave(Endpoint* end);

// Makes the calling thread the owner of an endpoint for the length of a scope.
class Turn {
public:
    Turn(Endpoint* end, uint64_t until) : end_(end), is_mine_(enter(end, until)) {}
    ~Turn() {
        if (is_mine_) leave(end_);
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    explicit operator bool() const { return is_mine_; }
    // Lets the thread stay the owner after the scope, until the loan ends.
    void keep() { is_mine_ = false; }

private:
    Endpoint* const end_;
    bool is_mine_;
};

// Tell `close` that the calling thread publishes a record in between, without the GIL. That waits for nobody.
void begin_copy(Endpoint* end);
void end_copy(Endpoint* end);
// Counts the message that `completes` tells of. The writing thread does this, or `close` if that comes first.
inline void count_message(Endpoint* end) {
    if (end->completes == 0) return;
    end->messages += 1;
    end->nbytes += end->completes;
    end->completes = 0;
}

// Returns the deadline of a call that begins now.
Deadline deadline(long long timeout_ns);
// Returns whether `turn` came in time. If not, an exception is set.
bool came(Endpoint* end, const Turn& turn, const Deadline& deadline);
// Reads the optional argument `timeout_ns`, which has index `at`.
bool read_timeout(PyObject* const* args, Py_ssize_t count, Py_ssize_t at, long long* timeout_ns);

// Makes the eventfd of `set_signal` readable if a message is kept here. If none is here or in the ring, makes it unreadable and asks
// for the next one to make it readable. Calls no Python code; the caller holds the GIL.
void settle_signal(Endpoint* end);

// Returns how many bytes were copied of the message that comes in parts.
uint64_t copied(const Endpoint* end);
// Holds the memory of a bell in `view`. Returns the bell, or nullptr with an exception.
ring::Bell* bell_in(codec::View& view, PyObject* memory);
// The attribute `has_news`.
PyObject* get_has_news(PyObject* self, void*);

// Closes the endpoint's own descriptor of the eventfd.
void drop_signal(Endpoint* end);
// Frees the mapping and everything that keeps it in use.
void release_memory(Endpoint* end);

extern PyMethodDef write_methods[];
extern PyMethodDef read_methods[];
extern PyMethodDef bell_functions[];
// The type ReadEndpoint, which lives as long as the module.
extern PyObject* read_type;
// Adds the type LoanBlock. Returns false with an exception.
bool add_loan_block(PyObject* module);
PyObject* close(PyObject* self, PyObject* refusing);
PyObject* fail(PyObject* self, PyObject* error);

}  // namespace endpoint
