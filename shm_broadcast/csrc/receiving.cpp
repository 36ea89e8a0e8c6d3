// The reading end: waits for records, and makes an object of them.
#include <algorithm>

#include "port.hpp"

namespace port {
namespace {

using codec::Decoder;
using codec::expect_arguments;
using codec::Ref;
using ring::Ring;

// While a message comes in parts, the writer fills the next one right now: that takes less than a sleep.
constexpr uint64_t kNextPartNs = 60 * 1000;
// A long message is left to Python so often, which looks for signals and deadlines.
constexpr uint64_t kLongestCallNs = 50 * 1000 * 1000;
// A signal that comes just before a sleep does not end it; Ctrl-C must interrupt within 0.2 s.
constexpr uint64_t kSignalsNs = 100 * 1000 * 1000;

PyObject* corrupt(const char* what) {
    PyErr_SetString(ring_corrupt, what);
    return nullptr;
}

PyObject* none_yet() { return Ref::borrowed(nothing).release(); }

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
        const uint64_t spin = now < parked_from ? std::min(parked_from - now, kSignalsNs) : 0;
        const uint64_t park = now + spin < parked_from ? 0 : std::min(until - now - spin, kSignalsNs);
        Py_BEGIN_ALLOW_THREADS
        ring.wait(port->index, spin, park, ready);
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

PyObject* receive_whole(Port* port, Patience patience) {
    Ring& ring = *port->ring;
    const uint32_t index = port->index;
    const bool waits = patience.spin_ns > 0 || patience.park_ns > 0;
    uint64_t until = 0;
    ring::RecordHeader record{};
    int found = wait_until(port, patience, [&] { return ring.has_data(index); });
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

}  // namespace

PyObject* receive(Port* port, Patience patience) {
    port->is_busy = true;
    PyObject* result = receive_whole(port, patience);
    port->is_busy = false;
    if (port->is_closed) release_memory(port);
    return result;
}

// receive(spin_ns, park_ns) -> the next object, or NOTHING: none came in time, or this end cannot be used.
// Exceptions of signal handlers and of the decoder leave the queue intact; RingCorrupt does not.
PyObject* read_port_receive(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Port* port = port_of(self);
    if (!expect_arguments("receive", count, 2)) return nullptr;
    uint64_t times[2];
    for (int i = 0; i < 2; ++i) {
        times[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (times[i] == static_cast<uint64_t>(-1) && PyErr_Occurred()) return nullptr;
    }
    if (!usable(port)) return none_yet();
    return receive(port, {times[0], times[1]});
}

}  // namespace port
