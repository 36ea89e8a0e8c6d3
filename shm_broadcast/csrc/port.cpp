// The types of both ends of a ring, and the writing one.
#include "port.hpp"

#include <pthread.h>
#include <structmember.h>

#include <algorithm>

#include "encoder.hpp"
#include "pieces.hpp"

namespace port {

PyObject* nothing = nullptr;
PyObject* ring_corrupt = nullptr;

namespace {

using codec::Encoder;
using codec::expect_arguments;
using codec::kUnlockedCopy;
using codec::Ref;
using codec::View;
using ring::Ring;

uint64_t forks = 0;  // between the process that loaded this module and this one

void count_fork() { ++forks; }

}  // namespace

bool usable(const Port* port) { return !port->is_closed && !port->is_held && !port->is_busy && port->born == forks; }

void release_memory(Port* port) {
    delete port->assembly;
    delete port->ring;
    delete port->view;
    port->assembly = nullptr;
    port->ring = nullptr;
    port->view = nullptr;
    Py_CLEAR(port->memory);
}

namespace {

// The group behind the calls holds the port, so the collector must see what the port holds.
int port_traverse(PyObject* self, visitproc visit, void* arg) {
    const Port* port = port_of(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(port->hook);
    Py_VISIT(port->general);
    Py_VISIT(port->next_stage);
    Py_VISIT(port->refuse);
    return 0;
}

int port_clear(PyObject* self) {
    Port* port = port_of(self);
    Py_CLEAR(port->hook);
    Py_CLEAR(port->general);
    Py_CLEAR(port->next_stage);
    Py_CLEAR(port->refuse);
    return 0;
}

void port_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    release_memory(port_of(self));
    port_clear(self);
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
    port->reads = true;
    port->index = static_cast<uint32_t>(index);
    port->assembly = new (std::nothrow) codec::Assembly;
    if (port->assembly == nullptr) return PyErr_NoMemory();
    return guard.release();
}

// close(): nothing passes any more; the mapping goes when the call that is under way has ended.
PyObject* port_close(PyObject* self, PyObject*) {
    Port* port = port_of(self);
    port->is_closed = true;
    if (!port->is_busy) release_memory(port);
    // They hold the end that holds the port.
    Py_CLEAR(port->next_stage);
    Py_CLEAR(port->refuse);
    Py_RETURN_NONE;
}

// hold(flag): while it is set nothing passes.
PyObject* port_hold(PyObject* self, PyObject* flag) {
    const int held = PyObject_IsTrue(flag);
    if (held < 0) return nullptr;
    port_of(self)->is_held = held != 0;
    Py_RETURN_NONE;
}

// So much of a long message is copied before readers are told: some microseconds of copying.
constexpr size_t kStreamedBytes = 32 * 1024;

// Copies a long message into the ring, without the GIL; readers copy behind us.
void stream(Ring& ring, const codec::Pieces& pieces, uint32_t tag) {
    const size_t total = pieces.total();
    unsigned char* to = ring.reserve(total);
    ring.begin_stream(total, tag);
    for (size_t done = 0; done < total;) {
        const size_t bytes = std::min(kStreamedBytes, total - done);
        pieces.copy(to + done, done, bytes);
        done += bytes;
        ring.fill(done);
    }
    ring.end_stream();
}

// Puts an encoded message into the ring if it fits in one record and there is room. False: nothing was changed.
bool publish(Port* port, const Encoder& encoder, uint32_t tag) {
    Ring& ring = *port->ring;
    const uint64_t total = encoder.nbytes();
    if (total > ring.longest_payload() || !ring.is_aligned() || ring.hopeless() || !ring.has_room(total)) return false;
    codec::Pieces pieces;
    if (!pieces.acquire({encoder.header().data(), encoder.header().size()}, encoder.buffers())) {
        PyErr_Clear();
        return false;
    }
    if (pieces.total() != total) return false;
    if (total <= kUnlockedCopy) {
        pieces.copy(ring.reserve(total), 0, total);
        ring.publish(total, ring::kWhole, total, true, tag);
    } else {
        port->is_busy = true;
        Py_BEGIN_ALLOW_THREADS
        stream(ring, pieces, tag);
        Py_END_ALLOW_THREADS
        port->is_busy = false;
    }
    port->messages += 1;
    port->nbytes += total;
    if (!port->is_closed) return !port->is_held;
    release_memory(port);
    return false;
}

}  // namespace

int send(Port* port, PyObject* object) {
    if (!usable(port)) return 0;
    port->ring->announce();
    const uint32_t tag = port->tag;  // of this message, whatever is sent while it is encoded
    Encoder encoder(port->hook);
    if (!encoder.build(object)) {
        // What is no Exception, such as Ctrl-C, goes to the caller; the rest happens again on the general way.
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
        return 0;
    }
    // Describing an object may have run application code.
    return usable(port) && publish(port, encoder, tag) ? 1 : 0;
}

namespace {

// send(object) -> bool: whether it was sent. False leaves it to the general way, which knows how to wait, how to copy
// without the GIL, and what to raise: here nothing was changed.
PyObject* write_port_send(PyObject* self, PyObject* object) {
    const int sent = send(port_of(self), object);
    return sent < 0 ? nullptr : PyBool_FromLong(sent);
}

PyObject* read_port_assembling(PyObject* self, void*) {
    const Port* port = port_of(self);
    return PyBool_FromLong(port->assembly != nullptr && port->assembly->active());
}

PyObject* fork_count(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(forks); }

#define METHOD(name, function, flags) {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr}

constexpr char kBroadcastDoc[] = "broadcast_object($self, /, obj=None, src=0, *, timeout_s=None, type=None)\n--\n\n"
                                 "Return rank `src`'s object on every rank; see `GroupCoordinator.broadcast_object`.";

PyMethodDef write_methods[] = {
    METHOD("send", write_port_send, METH_O),
    {"broadcast_object", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(write_port_broadcast)), METH_FASTCALL | METH_KEYWORDS, kBroadcastDoc},
    METHOD("direct", port_direct, METH_VARARGS),
    METHOD("hold", port_hold, METH_O),
    METHOD("close", port_close, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

PyMethodDef read_methods[] = {
    METHOD("receive", read_port_receive, METH_FASTCALL),
    {"broadcast_object", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(read_port_broadcast)), METH_FASTCALL | METH_KEYWORDS, kBroadcastDoc},
    METHOD("direct", port_direct, METH_VARARGS),
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
    {nullptr, 0, 0, 0, nullptr},
};

PyGetSetDef read_attributes[] = {
    {"is_assembling", read_port_assembling, nullptr, "Whether a message has come in part.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot write_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(write_port_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(port_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(port_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(port_clear)},
    {Py_tp_methods, write_methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Slot read_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(read_port_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(port_dealloc)},
    {Py_tp_traverse, reinterpret_cast<void*>(port_traverse)},
    {Py_tp_clear, reinterpret_cast<void*>(port_clear)},
    {Py_tp_methods, read_methods},
    {Py_tp_members, members},
    {Py_tp_getset, read_attributes},
    {0, nullptr},
};

constexpr unsigned int kFlags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
PyType_Spec write_spec = {"shm_broadcast._core.WritePort", sizeof(Port), 0, kFlags, write_slots};
PyType_Spec read_spec = {"shm_broadcast._core.ReadPort", sizeof(Port), 0, kFlags, read_slots};

PyMethodDef functions[] = {
    METHOD("fork_count", fork_count, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

bool add_type(PyObject* module, const char* name, PyType_Spec* spec) {
    Ref type(PyType_FromSpec(spec));
    return type && PyModule_AddObjectRef(module, name, type.get()) == 0;
}

}  // namespace
}  // namespace port

int port_add(PyObject* module) {
    if (PyModule_AddFunctions(module, port::functions) < 0) return -1;
    if (!port::add_type(module, "WritePort", &port::write_spec) || !port::add_type(module, "ReadPort", &port::read_spec)) return -1;
    port::nothing = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
    if (port::nothing == nullptr || PyModule_AddObjectRef(module, "NOTHING", port::nothing) < 0) return -1;
    port::ring_corrupt = PyErr_NewExceptionWithDoc("shm_broadcast._core.RingCorrupt", "The ring's own words make no sense.",
                                             nullptr, nullptr);
    if (port::ring_corrupt == nullptr || PyModule_AddObjectRef(module, "RingCorrupt", port::ring_corrupt) < 0) return -1;
    return pthread_atfork(nullptr, nullptr, port::count_fork);
}
