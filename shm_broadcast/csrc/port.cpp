// The two ends of a ring as objects that keep what a message needs: an ordinary message costs one call on each side.
// After a sleep all caches are cold and every line of code or data that is touched costs up to 100 ns: through the
// general way, 15 Python frames, a tiny object took about 10 us to a polling reader, this way about 2 us.
#include "assembly.hpp"
#include "draft.hpp"
#include "pieces.hpp"
#include "rehearsal.hpp"
#include "ring.hpp"

#include <pthread.h>
#include <structmember.h>

#include <algorithm>

namespace {

using codec::Decoder;
using codec::Encoder;
using codec::expect_arguments;
using codec::kUnlockedCopy;
using codec::Ref;
using codec::View;
using ring::Ring;

// While a message comes in parts, the writer fills the next one right now: that takes less than a sleep.
constexpr uint64_t kNextPartNs = 60 * 1000;
// A long message is left to Python so often, which looks for signals and deadlines.
constexpr uint64_t kLongestCallNs = 50 * 1000 * 1000;
// A signal that comes just before a sleep does not end it; Ctrl-C must interrupt within 0.2 s.
constexpr uint64_t kSignalsNs = 100 * 1000 * 1000;

PyObject* nothing = nullptr;       // what `receive` returns when there is no whole message
PyObject* ring_corrupt = nullptr;  // raised when the ring's own words make no sense
uint64_t forks = 0;                // between the process that loaded this module and this one

void count_fork() { ++forks; }

struct Port {
    PyObject_HEAD
    PyObject* hook;  // the codec's, for what is no builtin type
    PyObject* memory;
    View* view;
    Ring* ring;
    codec::Assembly* assembly;  // readers only
    uint32_t index;             // readers only
    uint64_t born;              // `forks` when it was made
    uint64_t turn;              // changes with each use of the port that touches the ring; writers only
    unsigned int tag;           // of the next message that is sent; of the latest that was received
    unsigned long long messages;
    unsigned long long nbytes;
    unsigned long long waited_ns;
    unsigned long long arrived_ns;
    codec::Rehearsal* rehearsal;   // readers only
    unsigned long long previewed;  // messages that were decoded ahead; readers only
    unsigned long long rehearsed;  // times that the last message was decoded again; readers only
    uint64_t given_up;             // where a draft came to nothing, so that it is not looked at again; readers only
    bool is_held;  // a general call is under way, or a message is lent out
    bool is_busy;  // inside of `receive`, which may run without the GIL
    bool is_closed;
};

Port* port_of(PyObject* self) { return reinterpret_cast<Port*>(self); }

bool usable(const Port* port) { return !port->is_closed && !port->is_held && !port->is_busy && port->born == forks; }

void release_memory(Port* port) {
    delete port->assembly;
    delete port->rehearsal;
    port->rehearsal = nullptr;
    delete port->ring;
    delete port->view;
    port->assembly = nullptr;
    port->ring = nullptr;
    port->view = nullptr;
    Py_CLEAR(port->memory);
}

void port_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    release_memory(port_of(self));
    Py_CLEAR(port_of(self)->hook);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Makes a port of `type` on a mapping; nullptr with an exception when it holds no ring.
Port* make_port(PyTypeObject* type, PyObject* memory, PyObject* hook) {
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == nullptr) return nullptr;
    Ref guard(self);
    Port* port = port_of(self);
    port->view = new (std::nothrow) View;
    if (port->view == nullptr) return reinterpret_cast<Port*>(PyErr_NoMemory());
    if (!port->view->acquire(memory, PyBUF_WRITABLE)) return nullptr;
    port->ring = new (std::nothrow) Ring(port->view->data(), port->view->size());
    if (port->ring == nullptr) return reinterpret_cast<Port*>(PyErr_NoMemory());
    if (!port->ring->valid()) {
        PyErr_SetString(PyExc_ValueError, "the mapping holds no ring of this version");
        return nullptr;
    }
    port->hook = Ref::borrowed(hook).release();
    port->memory = Ref::borrowed(memory).release();
    port->born = forks;
    guard.release();
    return port;
}

// WritePort(mapping, describe)
PyObject* write_port_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *memory = nullptr, *hook = nullptr;
    if (!PyArg_ParseTuple(args, "OO:WritePort", &memory, &hook)) return nullptr;
    return reinterpret_cast<PyObject*>(make_port(type, memory, hook));
}

// ReadPort(mapping, reader, build)
PyObject* read_port_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *memory = nullptr, *hook = nullptr;
    Py_ssize_t index = 0;
    if (!PyArg_ParseTuple(args, "OnO:ReadPort", &memory, &index, &hook)) return nullptr;
    Port* port = make_port(type, memory, hook);
    if (port == nullptr) return nullptr;
    Ref guard(reinterpret_cast<PyObject*>(port));
    if (index < 0 || index >= static_cast<Py_ssize_t>(port->ring->readers())) {
        PyErr_Format(PyExc_ValueError, "reader %zd of %u", index, port->ring->readers());
        return nullptr;
    }
    port->index = static_cast<uint32_t>(index);
    port->given_up = draft::kNowhere;
    port->assembly = new (std::nothrow) codec::Assembly;
    port->rehearsal = new (std::nothrow) codec::Rehearsal;
    if (port->assembly == nullptr || port->rehearsal == nullptr) return PyErr_NoMemory();
    return guard.release();
}

// close(): nothing passes any more; the mapping goes when the call that is under way has ended.
PyObject* port_close(PyObject* self, PyObject*) {
    Port* port = port_of(self);
    port->is_closed = true;
    ++port->turn;
    if (!port->is_busy) release_memory(port);
    Py_RETURN_NONE;
}

// hold(flag): while it is set nothing passes.
PyObject* port_hold(PyObject* self, PyObject* flag) {
    const int held = PyObject_IsTrue(flag);
    if (held < 0) return nullptr;
    port_of(self)->is_held = held != 0;
    ++port_of(self)->turn;
    Py_RETURN_NONE;
}

// Puts an encoded message into the ring if it fits in one record and there is room.
bool publish(Port* port, const Encoder& encoder, draft::Draft& draft, uint32_t tag) {
    Ring& ring = *port->ring;
    codec::Pieces pieces;
    if (encoder.nbytes() > ring.longest_payload() || !ring.is_aligned() || ring.hopeless()) return false;
    if (!pieces.acquire({encoder.header().data(), encoder.header().size()}, encoder.buffers())) {
        PyErr_Clear();
        return false;
    }
    const size_t total = pieces.total();
    if (!ring.has_room(total)) return false;
    if (total <= kUnlockedCopy) {
        draft.lay(pieces, encoder.header());
        ++port->turn;  // an older send may end while a newer one encodes
        ring.publish(total, ring::kWhole, total, true, tag);
    } else {
        ++port->turn;
        port->is_busy = true;
        Py_BEGIN_ALLOW_THREADS
        draft::stream(ring, pieces, tag);
        Py_END_ALLOW_THREADS
        port->is_busy = false;
    }
    port->messages += 1;
    port->nbytes += total;
    if (!port->is_closed) return !port->is_held;
    release_memory(port);
    return false;
}

// send(object) -> bool: whether it was sent. False leaves it to the general way, which knows how to wait, how to copy
// without the GIL, and what to raise: here nothing was changed.
PyObject* write_port_send(PyObject* self, PyObject* object) {
    Port* port = port_of(self);
    if (!usable(port)) Py_RETURN_FALSE;
    port->ring->announce();
    ++port->turn;
    const uint32_t tag = port->tag;  // of this message, whatever is sent while it is encoded
    draft::Draft draft(*port->ring, {port->turn, forks});
    Encoder encoder(port->hook, draft::is_worthwhile(*port->ring) ? &draft : nullptr);
    if (!encoder.build(object)) {
        // What is no Exception, such as Ctrl-C, goes to the caller; the rest happens again on the general way.
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return nullptr;
        PyErr_Clear();
        Py_RETURN_FALSE;
    }
    // Describing an object may have run application code.
    return PyBool_FromLong(usable(port) && publish(port, encoder, draft, tag));
}

PyObject* corrupt(const char* what) {
    PyErr_SetString(ring_corrupt, what);
    return nullptr;
}

PyObject* none_yet() { return Ref::borrowed(nothing).release(); }

// How long a call waits for each record: see `Ring::wait`.
struct Patience {
    uint64_t spin_ns;
    uint64_t park_ns;
    uint64_t nap_ns;
};

// Waits until `done` or the end: 1 when it is done, 0 when not, -1 with the exception of a signal handler.
template <typename Done>
int wait_until(Port* port, Patience patience, Done done) {
    Ring& ring = *port->ring;
    if (done()) {
        port->arrived_ns = ring.writer().stamp_ns.load(std::memory_order_relaxed);
        return 1;
    }
    if (patience.spin_ns == 0 && patience.park_ns == 0) return 0;
    const auto ready = [&] { return done() || ring.ended(port->index); };
    const uint64_t start = ring::now_ns();
    uint64_t now = start;
    const uint64_t parked_from = start + patience.spin_ns, until = parked_from + patience.park_ns;
    int status = 0;
    while (status == 0 && now < until && !ready()) {
        const bool paused = now - port->arrived_ns >= codec::kPauseNs;
        if (paused && now + codec::kShortestPollNs <= parked_from) port->rehearsed += port->rehearsal->perform();
        const uint64_t spin = now < parked_from ? std::min(parked_from - now, codec::kRehearsedNs) : 0;
        const uint64_t park = now + spin < parked_from ? 0 : std::min(until - now - spin, kSignalsNs);
        Py_BEGIN_ALLOW_THREADS
        ring.wait(port->index, spin, park, patience.nap_ns, ready);
        Py_END_ALLOW_THREADS
        now = ring::now_ns();
        if (!ready()) status = PyErr_CheckSignals();
    }
    port->waited_ns += now - start;
    if (status < 0) return -1;
    if (!done()) return 0;
    // When the message was published: a reader that slept has lost some time since then.
    const uint64_t stamp = ring.writer().stamp_ns.load(std::memory_order_relaxed);
    port->arrived_ns = stamp > start && stamp < now ? stamp : now;
    return 1;
}

void count_message(Port* port, const ring::RecordHeader& record, uint64_t nbytes) {
    port->messages += 1;
    port->nbytes += nbytes;
    port->tag = record.tag;
}

PyObject* take_whole(Port* port, const ring::RecordHeader& record, const unsigned char* payload) {
    Decoder decoder({payload, record.payload_bytes}, port->memory, port->hook, true);
    PyObject* result = decoder.run();
    if (result != nullptr) port->rehearsal->remember(payload, record.payload_bytes);
    port->ring->release(port->index, record);
    count_message(port, record, record.payload_bytes);
    return result;
}

// Copies a streamed record as far as it is there; returns the message when that is all, `nothing` before.
PyObject* take_streamed(Port* port, const ring::RecordHeader& record, const unsigned char* payload) {
    codec::Assembly& assembly = *port->assembly;
    if (!assembly.active()) assembly.begin(record.message, record.payload_bytes);
    const uint64_t taken = assembly.total() - assembly.missing();
    const uint64_t available = port->ring->available(port->index, record);
    if (assembly.total() != record.payload_bytes || available < taken) return corrupt("a streamed record changed");
    assembly.feed(payload + taken, available - taken);
    if (available < record.payload_bytes) return none_yet();
    port->ring->release(port->index, record);
    count_message(port, record, record.payload_bytes);
    return assembly.finish(port->hook);
}

// Adds one part to the message that is under way; returns it when that was the last, `nothing` before.
PyObject* take_part(Port* port, const ring::RecordHeader& record, const unsigned char* payload) {
    codec::Assembly& assembly = *port->assembly;
    if (!assembly.active()) {
        if (record.total_bytes == 0 || record.total_bytes > PY_SSIZE_T_MAX) return corrupt("a message of no length");
        assembly.begin(record.message, record.total_bytes);
    }
    if (record.message != assembly.message() || record.total_bytes != assembly.total()) {
        return corrupt("a message ends before its last part");
    }
    const bool ends = record.payload_bytes == assembly.missing();
    if (record.payload_bytes > assembly.missing() || ends != (record.flags == ring::kLastPart)) {
        return corrupt("parts of a message do not fit together");
    }
    assembly.feed(payload, record.payload_bytes);
    port->ring->release(port->index, record);
    if (!ends) return none_yet();
    count_message(port, record, assembly.total());
    return assembly.finish(port->hook);
}

// Takes what is there of the next record, which is there in part at least.
PyObject* take(Port* port, const ring::RecordHeader& record, const unsigned char* payload) {
    const bool active = port->assembly->active();
    switch (record.flags) {
        case ring::kWhole: return active ? corrupt("a message ends before its last part") : take_whole(port, record, payload);
        case ring::kStreamed: return take_streamed(port, record, payload);
        default: return take_part(port, record, payload);
    }
}

// Decodes the next message while it is written; nullptr without an exception when it has to be read as any other.
PyObject* take_ahead(Port* port) {
    draft::Preview preview(*port->ring, port->index);
    Decoder decoder({preview.bytes(), ring::kDraftBytes}, &preview);
    const codec::NoCollections guard;
    PyObject* result = decoder.run_ahead();
    if (result == nullptr) {
        PyErr_Clear();
        port->given_up = port->ring->reader(port->index).consumed.load(std::memory_order_relaxed);
        return nullptr;
    }
    port->rehearsal->remember(preview.bytes(), preview.record().payload_bytes);
    port->ring->release(port->index, preview.record());
    count_message(port, preview.record(), preview.record().payload_bytes);
    port->arrived_ns = ring::now_ns();
    port->previewed += 1;
    return result;
}

PyObject* receive(Port* port, Patience patience) {
    Ring& ring = *port->ring;
    const uint32_t index = port->index;
    const bool waits = patience.spin_ns > 0 || patience.park_ns > 0;
    uint64_t until = 0;
    ring::RecordHeader record{};
    const bool looks = waits && !port->assembly->active();
    const uint64_t before = port->arrived_ns;
    int found = wait_until(port, patience, [&] { return ring.has_data(index) || (looks && draft::is_offered(ring, index, port->given_up)); });
    if (found > 0 && !ring.has_data(index)) {
        PyObject* result = take_ahead(port);
        if (result != nullptr) return result;
        // Nothing has arrived yet, or just now.
        port->arrived_ns = ring.has_data(index) ? ring::now_ns() : before;
        if (!ring.has_data(index)) return none_yet();
    }
    while (found > 0) {
        unsigned char* payload = nullptr;
        if (!ring.next(index, &record, &payload)) return corrupt("the ring holds no readable record");
        PyObject* result = take(port, record, payload);
        if (result != nothing) return result;
        Py_DECREF(result);
        const uint64_t now = ring::now_ns();
        if (until == 0) until = now + kLongestCallNs;
        if (!waits || now >= until || port->is_closed) break;
        patience.spin_ns = std::max(patience.spin_ns, kNextPartNs);
        // More of a streamed record, or the next part.
        const uint64_t taken = port->assembly->total() - port->assembly->missing();
        const bool streams = record.flags == ring::kStreamed;
        found = wait_until(port, patience, [&] {
            return streams ? ring.available(index, record) > taken : ring.has_data(index);
        });
    }
    return found < 0 ? nullptr : none_yet();
}

// receive(spin_ns, park_ns, nap_ns) -> the next object, or NOTHING: none came in time, or this end cannot be used.
// Exceptions of signal handlers and of the decoder leave the queue intact; RingCorrupt does not.
PyObject* read_port_receive(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Port* port = port_of(self);
    if (!expect_arguments("receive", count, 3)) return nullptr;
    uint64_t times[3];
    for (int i = 0; i < 3; ++i) {
        times[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (times[i] == static_cast<uint64_t>(-1) && PyErr_Occurred()) return nullptr;
    }
    if (!usable(port)) return none_yet();
    port->is_busy = true;
    PyObject* result = receive(port, {times[0], times[1], times[2]});
    port->is_busy = false;
    if (port->is_closed) release_memory(port);
    return result;
}

PyObject* read_port_assembling(PyObject* self, void*) {
    const Port* port = port_of(self);
    return PyBool_FromLong(port->assembly != nullptr && port->assembly->active());
}

PyObject* fork_count(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(forks); }

#define METHOD(name, function, flags) {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr}

PyMethodDef write_methods[] = {
    METHOD("send", write_port_send, METH_O),
    METHOD("hold", port_hold, METH_O),
    METHOD("close", port_close, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef read_methods[] = {
    METHOD("receive", read_port_receive, METH_FASTCALL),
    METHOD("hold", port_hold, METH_O),
    METHOD("close", port_close, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"is_busy", T_BOOL, offsetof(Port, is_busy), READONLY, nullptr},
    {"messages", T_ULONGLONG, offsetof(Port, messages), 0, nullptr},
    {"nbytes", T_ULONGLONG, offsetof(Port, nbytes), 0, nullptr},
    {"tag", T_UINT, offsetof(Port, tag), 0, nullptr},
    {"waited_ns", T_ULONGLONG, offsetof(Port, waited_ns), 0, nullptr},
    {"arrived_ns", T_ULONGLONG, offsetof(Port, arrived_ns), READONLY, nullptr},
    {"previewed", T_ULONGLONG, offsetof(Port, previewed), READONLY, nullptr},
    {"rehearsed", T_ULONGLONG, offsetof(Port, rehearsed), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef read_attributes[] = {
    {"is_assembling", read_port_assembling, nullptr, "Whether a message has come in part.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot write_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(write_port_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(port_dealloc)},
    {Py_tp_methods, write_methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Slot read_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(read_port_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(port_dealloc)},
    {Py_tp_methods, read_methods},
    {Py_tp_members, members},
    {Py_tp_getset, read_attributes},
    {0, nullptr},
};

PyType_Spec write_spec = {"shm_broadcast._core.WritePort", sizeof(Port), 0, Py_TPFLAGS_DEFAULT, write_slots};
PyType_Spec read_spec = {"shm_broadcast._core.ReadPort", sizeof(Port), 0, Py_TPFLAGS_DEFAULT, read_slots};

PyMethodDef functions[] = {
    METHOD("fork_count", fork_count, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

bool add_type(PyObject* module, const char* name, PyType_Spec* spec) {
    Ref type(PyType_FromSpec(spec));
    return type && PyModule_AddObjectRef(module, name, type.get()) == 0;
}

}  // namespace

int port_add(PyObject* module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    if (!add_type(module, "WritePort", &write_spec) || !add_type(module, "ReadPort", &read_spec)) return -1;
    nothing = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
    if (nothing == nullptr || PyModule_AddObjectRef(module, "NOTHING", nothing) < 0) return -1;
    ring_corrupt = PyErr_NewExceptionWithDoc("shm_broadcast._core.RingCorrupt", "The ring's own words make no sense.",
                                             nullptr, nullptr);
    if (ring_corrupt == nullptr || PyModule_AddObjectRef(module, "RingCorrupt", ring_corrupt) < 0) return -1;
    return pthread_atfork(nullptr, nullptr, count_fork);
}
