// The two ends of a ring as objects that keep what a message needs: an ordinary message costs one call on each side.
// After a sleep all caches are cold and every line of code or data that is touched costs up to 100 ns: through the
// general way, 15 Python frames, a tiny object took about 10 us to a polling reader, this way about 2 us.
#pragma once

#include "assembly.hpp"
#include "ring.hpp"

namespace port {

// What `send` needs stands at the beginning, in two cache lines.
struct Port {
    PyObject_HEAD
    PyObject* hook;  // the codec's, for what is no builtin type
    ring::Ring* ring;
    uint64_t born;  // `forks` when it was made
    unsigned long long messages;
    unsigned long long nbytes;
    unsigned int tag;  // of the next message that is sent; of the latest that was received
    int source;        // the writer's rank in its group
    bool is_held;      // a general call is under way, or a message is lent out
    bool is_busy;      // inside of `receive`, which may run without the GIL
    bool is_closed;
    bool reads;         // this is the reading end
    PyObject* general;  // what the direct call ends in where it is no ordinary one; see direct.cpp
    PyObject* memory;
    codec::View* view;
    // Readers only:
    uint32_t index;
    unsigned long long waited_ns;
    unsigned long long arrived_ns;
    codec::Assembly* assembly;
    PyObject* next_stage;  // how to wait
    PyObject* refuse;      // raises for an error
};

inline Port* port_of(PyObject* self) { return reinterpret_cast<Port*>(self); }

// How long a call waits for each record: see `Ring::wait`.
struct Patience {
    uint64_t spin_ns;
    uint64_t park_ns;
};

// What `receive` returns when there is no whole message.
extern PyObject* nothing;
// Raised when the ring's own words make no sense.
extern PyObject* ring_corrupt;

// Whether a message may pass through the port now.
bool usable(const Port* port);
void release_memory(Port* port);

// Whether an object was sent: 1; 0 leaves it to the general way, as nothing was changed; -1 with an exception.
int send(Port* port, PyObject* object);
// The next object, or `nothing`; nullptr with an exception. The port must be usable, and is busy meanwhile.
PyObject* receive(Port* port, Patience patience);

// Methods, written down where the types are made.
PyObject* read_port_receive(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* port_direct(PyObject* self, PyObject* args);
PyObject* write_port_broadcast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);
PyObject* read_port_broadcast(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* names);

}  // namespace port
