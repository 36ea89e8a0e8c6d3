// This file implements the reading endpoint, which waits for records and turns them into objects.
#include "endpoint.hpp"

#include <fcntl.h>
#include <structmember.h>

#include <algorithm>
#include <utility>

namespace endpoint {
namespace {

using codec::Decoder;
using codec::expect_arguments;
using codec::Ref;
using ring::Ring;

// While a message comes in parts, a reader polls at least this long for the next part. The writer is filling it at that moment,
// and this takes less time than a sleep.
constexpr uint64_t kNextPartNs = 60 * 1000;
// A call interrupts the copying of a long message after this time to check for signals and deadlines.
constexpr uint64_t kLongestCallNs = 50 * 1000 * 1000;

PyObject* corrupt(Endpoint* end, const char* what) {
    refuse_corrupt(end, what);
    return nullptr;
}

// Waits until `done()` is true, the queue has ended or the term is over. Returns 1 if `done()` is true, 0 if not,
// and -1 with the exception of a signal handler, or in a forked child.
template <typename Done>
int wait_until(Endpoint* end, const Term& term, Done done) {
    Ring& ring = *end->ring;
    if (done()) {
        end->arrived_ns = ring.writer().stamp_ns.load(std::memory_order_relaxed);
        return 1;
    }
    if (!term.waits()) return 0;
    const auto ready = [&] { return done() || ring.ended(end->index); };
    const uint64_t start = ring::now_ns();
    uint64_t now = start;
    int status = 0;
    while (status == 0 && now < term.until && !ready() && !end->is_closed) {
        const uint64_t spin = now < term.spin_until ? std::min(term.spin_until - now, kSliceNs) : 0;
        const uint64_t park = now + spin < term.spin_until ? 0 : std::min(term.until - now - spin, kSliceNs);
        Py_BEGIN_ALLOW_THREADS
        ring.wait(end->index, spin, park, ready);
        Py_END_ALLOW_THREADS
        now = ring::now_ns();
        if (!ready() && !check_signals(end)) status = -1;
    }
    end->waited_ns += now - start;
    if (status < 0) return -1;
    if (!done()) return 0;
    // Use the time at which the message was published, because a reader that slept has lost some time since then.
    const uint64_t stamp = ring.writer().stamp_ns.load(std::memory_order_relaxed);
    end->arrived_ns = stamp > start && stamp < now ? stamp : now;
    return 1;
}

void give_back(Endpoint* end, const ring::RecordHeader& record, uint64_t nbytes) {
    end->ring->release(end->index, record);
    end->messages += 1;
    end->nbytes += nbytes;
    end->tag = record.tag;
}

// Asks Python what becomes of a message whose decoding has raised the current exception. Returns what takes
// its place, or nullptr with the exception set if the message is not at fault and stays the next one.
PyObject* judged(Endpoint* end) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    Ref held_type(type), error(value), held_traceback(traceback);
    Ref verdict(answer(end, kUndecodable, value));
    if (verdict.get() != Py_None) return verdict.release();
    PyErr_Restore(held_type.release(), error.release(), held_traceback.release());
    return nullptr;
}

// Returns the object of a message whose record was given back. An exception in its place is raised.
PyObject* delivered(Ref& outcome) {
    if (!PyExceptionInstance_Check(outcome.get())) return outcome.release();
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(outcome.get())), outcome.get());
    return nullptr;
}

// Decodes a message of one record and gives the record back. If a signal handler raises, or a hook raises an exception that is
// not an `Exception`, the record stays in the ring, so that no message is lost.
PyObject* take_whole(Endpoint* end, const ring::RecordHeader& record, const unsigned char* payload) {
    const Ref memory = Ref::borrowed(end->memory), hook = Ref::borrowed(end->hook);
    Decoder decoder({payload, record.payload_bytes}, memory.get(), hook.get(), true);
    Ref result(decoder.run());
    const bool is_decoded = static_cast<bool>(result);
    if (!is_decoded) result = Ref(judged(end));
    if (!result || !check_signals(end)) return nullptr;
    give_back(end, record, record.payload_bytes);
    return is_decoded ? result.release() : delivered(result);
}

// Decodes the assembled message, unless an interrupted call has done so. Returns false, with an exception set, if that is
// interrupted.
bool settle(Endpoint* end, const ring::RecordHeader& record) {
    codec::Assembly& assembly = *end->assembly;
    if (assembly.outcome() != nullptr) return true;
    const Ref hook = Ref::borrowed(end->hook);
    Ref result(assembly.finish(hook.get()));
    const bool is_decoded = static_cast<bool>(result);
    if (!is_decoded) result = Ref(judged(end));
    if (result) {
        assembly.settle(std::move(result), is_decoded);
        return true;
    }
    // The functions that have run may have changed the buffers, so they are copied again if all of them are still in the ring.
    if (record.flags == ring::kStreamed) assembly.clear();
    return false;
}

// Decodes the assembled message and gives back `record`, its last one. As in `take_whole`, the record stays in the ring if
// anything other than an `Exception` is raised.
PyObject* take_assembled(Endpoint* end, const ring::RecordHeader& record) {
    if (!check_signals(end) || !settle(end, record) || !check_signals(end)) return nullptr;
    codec::Assembly& assembly = *end->assembly;
    const uint64_t nbytes = assembly.total();
    const bool is_decoded = assembly.is_decoded();
    Ref result = Ref::borrowed(assembly.outcome());
    assembly.clear();
    give_back(end, record, nbytes);
    return is_decoded ? result.release() : delivered(result);
}

// Copies the available bytes of a streamed record. Returns the object when the record is complete, and `nothing` before that.
PyObject* take_streamed(Endpoint* end, const ring::RecordHeader& record, const unsigned char* payload) {
    codec::Assembly& assembly = *end->assembly;
    if (!assembly.active()) assembly.begin(record.message, record.payload_bytes);
    const uint64_t taken = assembly.total() - assembly.missing();
    const uint64_t available = end->ring->available(end->index, record);
    if (assembly.total() != record.payload_bytes || available < taken) return corrupt(end, "a streamed record changed");
    assembly.feed(payload + taken, available - taken);
    return available < record.payload_bytes ? none_yet() : take_assembled(end, record);
}

// Adds one part to the message that is being assembled. Returns the object after the last part, and `nothing` before that.
PyObject* take_part(Endpoint* end, const ring::RecordHeader& record, const unsigned char* payload) {
    codec::Assembly& assembly = *end->assembly;
    if (!assembly.active()) {
        if (record.total_bytes == 0 || record.total_bytes > PY_SSIZE_T_MAX) return corrupt(end, "a message of no length");
        assembly.begin(record.message, record.total_bytes);
    }
    if (record.message != assembly.message() || record.total_bytes != assembly.total()) {
        return corrupt(end, "a message ends before its last part");
    }
    // Nothing is missing if the decoding was interrupted after the last part.
    if (assembly.missing() > 0) {
        if (record.payload_bytes > assembly.missing()) return corrupt(end, "parts of a message do not fit together");
        assembly.feed(payload, record.payload_bytes);
    }
    if ((assembly.missing() == 0) != (record.flags == ring::kLastPart)) {
        return corrupt(end, "parts of a message do not fit together");
    }
    if (record.flags == ring::kLastPart) return take_assembled(end, record);
    end->ring->release(end->index, record);
    return none_yet();
}

// Takes the available bytes of the next record, of which at least a part is there.
PyObject* take(Endpoint* end, const ring::RecordHeader& record, const unsigned char* payload) {
    switch (record.flags) {
        case ring::kWhole:
            if (end->assembly->active()) return corrupt(end, "a message ends before its last part");
            return take_whole(end, record, payload);
        case ring::kStreamed: return take_streamed(end, record, payload);
        default: return take_part(end, record, payload);
    }
}

// Returns the next object, or `nothing` if it has not come within `term`. If more of a message keeps coming
// at once, this goes on after `term`, for at most kLongestCallNs and not beyond `deadline`.
PyObject* receive_within(Endpoint* end, const Term& term, uint64_t deadline = kForever) {
    Ring& ring = *end->ring;
    const uint32_t index = end->index;
    uint64_t until = 0;
    ring::RecordHeader record{};
    int found = wait_until(end, term, [&] { return ring.has_data(index); });
    while (found > 0) {
        unsigned char* payload = nullptr;
        if (!ring.next(index, &record, &payload)) return corrupt(end, "the ring holds no readable record");
        PyObject* result = take(end, record, payload);
        if (result != nothing) return result;
        Py_DECREF(result);
        const uint64_t now = ring::now_ns();
        if (until == 0) until = std::min(now + kLongestCallNs, deadline);
        if (!term.waits() || now >= until || end->is_closed) break;
        // Wait for more of a streamed record, or for the next part.
        const uint64_t taken = end->assembly->total() - end->assembly->missing();
        const bool streams = record.flags == ring::kStreamed;
        found = wait_until(end, term.polling(std::min(now + kNextPartNs, deadline)), [&] {
            return streams ? ring.available(index, record) > taken : ring.has_data(index);
        });
    }
    return found < 0 ? nullptr : none_yet();
}

// Waits until `take(term)` returns something other than `nothing`, and calls `look_around` in between. Returns nullptr with
// an exception.
template <typename Take>
PyObject* await(Endpoint* end, const Deadline& deadline, Take take) {
    if (!look(end, kBegin, Py_None)) return nullptr;
    uint64_t now = ring::now_ns(), look_at = now + kLookNs;
    const uint64_t until = deadline.until;
    if (end->noted_ns != end->arrived_ns) {
        end->noted_ns = end->arrived_ns;
        end->pacer.arrived(static_cast<int64_t>(end->noted_ns));
    }
    ++end->waits;
    for (;;) {
        const Budget budget = end->pacer.budget(end->mode, static_cast<int64_t>(now));
        const uint64_t left = until > now ? until - now : 0;
        // A reader that is awake for an expected message looks around before it polls, and so notices a dead writer then. This
        // also brings the interpreter's code back into the caches: after a sleep of 2 ms a small message took 26 us without
        // this call and 19 us with it, a scheduler's output 57 and 47 us (medians of eight alternating runs).
        if (end->mode == Mode::kAdaptive && budget.spin_ns > kShortSpinNs && !look(end, kWaiting, Py_None)) return nullptr;
        const Term term = left == 0 ? Term() : Term(now, budget).before(until);
        // Python code has run since the turn began, and may have made a forked child of this process.
        if (is_inherited(end)) return refuse(end, kUnusable), nullptr;
        PyObject* result = take(term);
        if (result != nothing) return result;
        Py_DECREF(result);
        if (!check_usable(end)) return nullptr;
        now = ring::now_ns();
        if (now >= look_at || now >= until || end->ring->ended(end->index)) {
            if (!look(end, kWaiting, Py_None)) return nullptr;
            look_at = now + kLookNs;
        }
        if (now >= until) {
            refuse_late(end, deadline);
            return nullptr;
        }
        if (!check_signals(end)) return nullptr;
    }
}

PyObject* receive(Endpoint* end, const Deadline& within) {
    PyObject* result = receive_within(end, Term());
    if (result != nothing) return result;
    Py_DECREF(result);
    return await(end, within, [&](const Term& term) { return receive_within(end, term, within.until); });
}

// receive([timeout_ns]) -> the next object
PyObject* read_receive(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    long long timeout_ns = -1;
    if (!expect_arguments("receive", count == 0 ? 1 : count, 1) || !read_timeout(args, count, 0, &timeout_ns)) return nullptr;
    Endpoint* end = endpoint_of(self);
    const Deadline within = deadline(timeout_ns);
    const Turn turn(end, within.until);
    PyObject* result = came(end, turn, within) ? receive(end, within) : nullptr;
    settle_signal(end);
    return result;
}

// Keeps the next object, which `get` returns, unless one is kept already. Returns false with an exception.
template <typename Get>
bool keep(Endpoint* end, Get get) {
    if (!end->kept->empty()) return true;
    try {
        end->kept->reserve(2);
        Ref object(get());
        if (!object || object.get() == nothing) {
            settle_signal(end);
            return static_cast<bool>(object);
        }
        end->kept->push_back(object.get());
        static_cast<void>(object.release());
        settle_signal(end);
        return true;
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return false;
    }
}

bool fetch(Endpoint* end, const Deadline& within) {
    const Turn turn(end, within.until);
    return came(end, turn, within) && keep(end, [&] { return receive(end, within); });
}

// fetch([timeout_ns[, until_ns]]): waits for the next object, which can then be taken out by `message`. The time-out ends at
// `until_ns` of CLOCK_MONOTONIC, if it began before this call.
PyObject* read_fetch(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    long long timeout_ns = -1, until_ns = -1;
    if (!expect_arguments("fetch", count < 2 ? 2 : count, 2) || !read_timeout(args, count, 0, &timeout_ns)) return nullptr;
    if (!read_timeout(args, count, 1, &until_ns)) return nullptr;
    const Deadline within = until_ns < 0 ? deadline(timeout_ns) : Deadline{timeout_ns, static_cast<uint64_t>(until_ns)};
    if (!fetch(endpoint_of(self), within)) return nullptr;
    Py_RETURN_NONE;
}

// exchange(ignored) -> NOTHING: fetches the next object
PyObject* read_exchange(PyObject* self, PyObject*) {
    return fetch(endpoint_of(self), deadline(endpoint_of(self)->timeout_ns)) ? none_yet() : nullptr;
}

bool read_times(PyObject* const* args, uint64_t* times) {
    for (int i = 0; i < 2; ++i) {
        times[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (times[i] == static_cast<uint64_t>(-1) && PyErr_Occurred()) return false;
    }
    return true;
}

// Returns the term of a call that begins now. The wait for its turn is a part of it.
Term term_of(const uint64_t* times) {
    return times[0] == 0 && times[1] == 0 ? Term() : Term(ring::now_ns(), {times[0], times[1]});
}

// fetch_within(spin_ns, park_ns): fetches the next object if it comes within these times
PyObject* read_fetch_within(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    uint64_t times[2];
    if (!expect_arguments("fetch_within", count, 2) || !read_times(args, times)) return nullptr;
    const Term term = term_of(times);
    const Turn turn(end, term.until);
    if (turn ? !keep(end, [&] { return receive_within(end, term); }) : PyErr_Occurred() != nullptr) return nullptr;
    Py_RETURN_NONE;
}

// receive_within(spin_ns, park_ns) -> the next object, or NOTHING
PyObject* read_receive_within(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    uint64_t times[2];
    if (!expect_arguments("receive_within", count, 2) || !read_times(args, times)) return nullptr;
    const Term term = term_of(times);
    const Turn turn(end, term.until);
    if (!turn) return PyErr_Occurred() ? nullptr : none_yet();
    PyObject* result = receive_within(end, term);
    settle_signal(end);
    return result;
}

constexpr const char* kLoanName = "loan";

Endpoint* lender(PyObject* loan) { return endpoint_of(static_cast<PyObject*>(PyCapsule_GetPointer(loan, kLoanName))); }

// Ends the loan that a capsule stands for, unless it has ended already. If a message was read, gives its record back; but not in a forked
// child, whose parent has it on loan. Returns false if there is no readable record.
bool end_loan(Endpoint* end, PyObject* loan) {
    if (!end->is_lent || end->loans != reinterpret_cast<uintptr_t>(PyCapsule_GetContext(loan))) return true;
    const uint64_t nbytes = is_inherited(end) ? 0 : end->lent_bytes;
    ring::RecordHeader record{};
    unsigned char* payload = nullptr;
    const bool is_there = nbytes == 0 || (end->ring->has_whole_record(end->index) && end->ring->next(end->index, &record, &payload));
    if (nbytes > 0 && is_there) {
        end->ring->release(end->index, record);
        end->messages += 1;
        end->nbytes += nbytes;
    }
    end->is_lent = false;
    end->lent_bytes = 0;
    settle_signal(end);
    leave(end);
    return is_there;
}

// The destructor of a loan's capsule.
void drop_loan(PyObject* loan) {
    Endpoint* end = lender(loan);
    end_loan(end, loan);
    Py_DECREF(reinterpret_cast<PyObject*>(end));
}

// The base of a block in which a message is on loan. Its `__exit__` is native, so that no signal handler can raise between the end of the
// block and the end of the loan. What one raises at the beginning of a method in Python keeps the object of that method alive.
struct LoanBlock {
    PyObject_HEAD
    PyObject* hold;  // what the block holds until it ends, such as a loan, or nullptr
};

PyObject* exit_block(PyObject* self, PyObject*) {
    const Ref hold(std::exchange(reinterpret_cast<LoanBlock*>(self)->hold, nullptr));
    if (!hold || !PyCapsule_IsValid(hold.get(), kLoanName)) Py_RETURN_NONE;
    Endpoint* end = lender(hold.get());
    if (!end_loan(end, hold.get())) return corrupt(end, "the ring holds no readable record");
    Py_RETURN_NONE;
}

void drop_block(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_CLEAR(reinterpret_cast<LoanBlock*>(self)->hold);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// lend([timeout_ns]) -> loan: waits until a record is complete. The calling thread then has it on loan until the block ends that holds
// the returned object, or until that object is let go. Then a message of `lent_bytes` was read, or none if that is 0.
PyObject* read_lend(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Endpoint* end = endpoint_of(self);
    long long timeout_ns = -1;
    if (!expect_arguments("lend", count == 0 ? 1 : count, 1) || !read_timeout(args, count, 0, &timeout_ns)) return nullptr;
    const Deadline within = deadline(timeout_ns);
    Turn turn(end, within.until);
    if (!came(end, turn, within)) return nullptr;
    const auto is_there = [end] { return end->ring->has_whole_record(end->index); };
    if (!is_there()) {
        const Ref found(await(end, within, [&](const Term& term) {
            const int status = wait_until(end, term, is_there);
            return status < 0 ? nullptr : status == 0 ? none_yet() : Py_NewRef(Py_None);
        }));
        if (!found) return nullptr;
    }
    Ref loan(PyCapsule_New(self, kLoanName, nullptr));
    if (!loan || PyCapsule_SetContext(loan.get(), reinterpret_cast<void*>(end->loans + 1)) < 0) return nullptr;
    if (PyCapsule_SetDestructor(loan.get(), drop_loan) < 0) return nullptr;
    Py_INCREF(self);
    end->loans += 1;
    end->lent_bytes = 0;
    end->is_lent = true;
    turn.keep();
    return loan.release();
}

// set_signal(eventfd): from now on it is readable while a message is there. A thread must run `ring_signal`. The endpoint has a
// descriptor of its own, so that it never uses a number that others have closed.
PyObject* read_set_signal(PyObject* self, PyObject* descriptor) {
    Endpoint* end = endpoint_of(self);
    const long value = PyLong_AsLong(descriptor);
    if (PyErr_Occurred() || !check_usable(end)) return nullptr;
    const int own = fcntl(static_cast<int>(value), F_DUPFD_CLOEXEC, 0);
    if (own < 0) return PyErr_SetFromErrno(PyExc_OSError);
    drop_signal(end);
    end->signal = own;
    settle_signal(end);
    Py_RETURN_NONE;
}

}  // namespace

#define METHOD(name, function, flags) {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr}

PyMethodDef read_methods[] = {
    METHOD("exchange", read_exchange, METH_O),
    METHOD("fetch", read_fetch, METH_FASTCALL),
    METHOD("fetch_within", read_fetch_within, METH_FASTCALL),
    METHOD("receive", read_receive, METH_FASTCALL),
    METHOD("receive_within", read_receive_within, METH_FASTCALL),
    METHOD("set_signal", read_set_signal, METH_O),
    METHOD("lend", read_lend, METH_FASTCALL),
    METHOD("fail", fail, METH_O),
    METHOD("close", close, METH_O),
    {nullptr, nullptr, 0, nullptr},
};

bool add_loan_block(PyObject* module) {
    static PyMethodDef methods[] = {{"__exit__", exit_block, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
    static PyMemberDef members[] = {{"hold", T_OBJECT, offsetof(LoanBlock, hold), 0, nullptr}, {nullptr, 0, 0, 0, nullptr}};
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(drop_block)}, {Py_tp_methods, methods}, {Py_tp_members, members}, {0, nullptr},
    };
    PyType_Spec spec = {"shm_broadcast._core.LoanBlock", sizeof(LoanBlock), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, slots};
    const Ref type(PyType_FromSpec(&spec));
    return type && PyModule_AddObjectRef(module, "LoanBlock", type.get()) == 0;
}

}  // namespace endpoint
