// This file holds the code that both endpoints of a ring share: a thread's turn as the owner, errors, creation and closing.
#include "endpoint.hpp"

#include <pthread.h>
#include <signal.h>
#include <structmember.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <new>

namespace endpoint {

PyObject* nothing = nullptr;
PyObject* read_type = nullptr;

uint64_t forks = 0;

namespace {

using codec::expect_arguments;
using codec::Ref;
using codec::View;
using ring::Ring;

void count_fork() { ++forks; }

}  // namespace

PyObject* answer(Endpoint* end, Reason reason, PyObject* detail) {
    if (end->look_around == nullptr) return PyErr_Format(PyExc_RuntimeError, "the end of a ring is being collected");
    const Ref look_around = Ref::borrowed(end->look_around);
    const Ref number(PyLong_FromLong(reason));
    return number ? PyObject_CallFunctionObjArgs(look_around.get(), number.get(), detail, nullptr) : nullptr;
}

bool look(Endpoint* end, Reason reason, PyObject* detail) { return static_cast<bool>(Ref(answer(end, reason, detail))); }

bool refuse(Endpoint* end, Reason reason, PyObject* detail) {
    if (look(end, reason, detail)) PyErr_SetString(PyExc_RuntimeError, "an error was swallowed");
    return false;
}

bool refuse_error(Endpoint* end, Reason reason) {
    if (!PyErr_ExceptionMatches(PyExc_Exception)) return false;
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyErr_NormalizeException(&type, &value, &traceback);
    const Ref held_type(type), error(value), held_traceback(traceback);
    if (traceback != nullptr) PyException_SetTraceback(value, traceback);
    return refuse(end, reason, value);
}

bool refuse_corrupt(Endpoint* end, const char* what) {
    PyErr_SetString(PyExc_ValueError, what);
    return refuse_error(end, kCorrupt);
}

bool refuse_late(Endpoint* end, const Deadline& deadline, PyObject* total) {
    const Ref detail(Py_BuildValue("(LO)", deadline.timeout_ns, total));
    return detail && refuse(end, kLate, detail.get());
}

bool check_usable(Endpoint* end) {
    if (!end->is_closed && end->cause == nullptr && !is_inherited(end)) return true;
    return refuse(end, kUnusable);
}

bool check_signals(Endpoint* end) {
    if (PyErr_CheckSignals() < 0) return false;
    return !is_inherited(end) || refuse(end, kUnusable);
}

bool enter(Endpoint* end, uint64_t until) {
    const unsigned long me = PyThread_get_thread_ident();
    while (check_usable(end)) {
        if (end->owner == 0) {
            end->owner = me;
            return true;
        }
        if (end->owner == me) {
            end->refused_nested = true;
            return refuse(end, end->is_lent ? kLent : kReentrant);
        }
        const uint64_t now = ring::now_ns();
        if (now >= until) return false;
        const uint32_t seen = end->left->load(std::memory_order_relaxed);
        ++end->queued;
        Py_BEGIN_ALLOW_THREADS
        ring::futex_wait(*end->left, seen, std::min(until - now, kSliceNs));
        Py_END_ALLOW_THREADS
        --end->queued;
        if (PyErr_CheckSignals() < 0) return false;
    }
    return false;
}

void leave(Endpoint* end) {
    end->owner = 0;
    // A listening thread leaves out a ring whose endpoint has an owner. It must look again when the owner
    // leaves, because the owner may have kept a message or left one in the ring.
    if (end->kept != nullptr && end->ring->bell() != nullptr) end->ring->bell()->sound();
    if (end->is_closed) release_memory(end);
    if (end->queued > 0) {
        end->left->fetch_add(1, std::memory_order_relaxed);
        ring::futex_wake_all(*end->left);
    }
}

void begin_copy(Endpoint* end) { end->copying->store(kCopies, std::memory_order_relaxed); }

void end_copy(Endpoint* end) {
    // SYNC copy->close (release): what was published comes before the end of the queue.
    if (end->copying->exchange(kCopiesNothing, std::memory_order_release) == kIsAwaited) ring::futex_wake_all(*end->copying);
}

namespace {

// Waits until no thread copies a record. The caller, which holds the GIL, has closed the endpoint, so that no copy begins.
void await_copy(Endpoint* end) {
    // In a forked child the thread that copied does not exist. It publishes nothing there.
    if (is_inherited(end)) return;
    std::atomic<uint32_t>& word = *end->copying;
    Py_BEGIN_ALLOW_THREADS
    // SYNC copy->close (acquire): the end of the queue comes behind what was published.
    for (uint32_t seen = word.load(std::memory_order_acquire); seen != kCopiesNothing; seen = word.load(std::memory_order_acquire)) {
        if (seen == kIsAwaited || word.compare_exchange_strong(seen, kIsAwaited, std::memory_order_relaxed)) {
            ring::futex_wait(word, kIsAwaited, kSliceNs);
        }
    }
    Py_END_ALLOW_THREADS
}

}  // namespace

Deadline deadline(long long timeout_ns) {
    return {timeout_ns, timeout_ns < 0 ? kForever : ring::now_ns() + static_cast<uint64_t>(timeout_ns)};
}

bool came(Endpoint* end, const Turn& turn, const Deadline& deadline) {
    return turn || (!PyErr_Occurred() && refuse_late(end, deadline));
}

bool read_timeout(PyObject* const* args, Py_ssize_t count, Py_ssize_t at, long long* timeout_ns) {
    *timeout_ns = -1;
    if (count <= at) return true;
    *timeout_ns = PyLong_AsLongLong(args[at]);
    return !(*timeout_ns == -1 && PyErr_Occurred());
}

void settle_signal(Endpoint* end) {
    // A forked child shares the eventfd with its parent, whom it must not disturb.
    // A broken endpoint stays readable: each read raises. `fail` has seen to that.
    if (end->signal < 0 || end->ring == nullptr || end->cause != nullptr || is_inherited(end)) return;
    Ring& ring = *end->ring;
    if (!end->kept->empty()) {
        if (ring.awaits_signal(end->index) && ring.take_signal(end->index)) eventfd_write(end->signal, 1);
        return;
    }
    if (ring.is_readable(end->index)) return;
    // Empty it even if a signal is asked for already: a thread that took an older request may be late.
    eventfd_t ignored = 0;
    eventfd_read(end->signal, &ignored);
    ring.await_signal(end->index);
    if (ring.is_readable(end->index) && ring.take_signal(end->index)) eventfd_write(end->signal, 1);
}

void drop_signal(Endpoint* end) {
    if (end->signal >= 0) ::close(end->signal);
    end->signal = -1;
}

void release_memory(Endpoint* end) {
    // Forgotten first, because the destructor of an object that it keeps may call the endpoint.
    const codec::Assembly* assembly = end->assembly;
    end->assembly = nullptr;
    delete assembly;
    delete end->ring;
    delete end->view;
    delete end->bell_view;
    end->ring = nullptr;
    end->view = nullptr;
    end->bell_view = nullptr;
    Py_CLEAR(end->memory);
}

namespace {

int traverse(PyObject* self, visitproc visit, void* arg) {
    const Endpoint* end = endpoint_of(self);
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(end->hook);
    Py_VISIT(end->cause);
    Py_VISIT(end->look_around);
    if (end->kept != nullptr) {
        for (PyObject* message : *end->kept) Py_VISIT(message);
    }
    return end->assembly == nullptr ? 0 : end->assembly->traverse(visit, arg);
}

int clear(PyObject* self) {
    Endpoint* end = endpoint_of(self);
    Py_CLEAR(end->hook);
    Py_CLEAR(end->cause);
    Py_CLEAR(end->look_around);
    if (end->kept != nullptr) {
        // Emptied first, because a destructor may call the endpoint.
        const std::vector<PyObject*> messages(std::move(*end->kept));
        end->kept->clear();
        for (PyObject* message : messages) Py_DECREF(message);
    }
    if (end->assembly != nullptr) end->assembly->clear();
    return 0;
}

void dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    release_memory(endpoint_of(self));
    drop_signal(endpoint_of(self));
    delete endpoint_of(self)->left;
    delete endpoint_of(self)->copying;
    clear(self);
    delete endpoint_of(self)->kept;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

bool read_mode(const char* name, Mode* mode) {
    const char* const names[] = {"adaptive", "spin", "park"};
    for (int i = 0; i < 3; ++i) {
        if (std::strcmp(name, names[i]) == 0) {
            *mode = static_cast<Mode>(i);
            return true;
        }
    }
    PyErr_Format(PyExc_ValueError, "unknown wait mode: %s", name);
    return false;
}

// Gives the ring of a new endpoint the bell of the reader's process, unless `bell` is None. Returns false with an exception.
bool set_bell(Endpoint* end, PyObject* bell) {
    if (bell == Py_None) return true;
    end->bell_view = new (std::nothrow) View;
    if (end->bell_view == nullptr) return PyErr_NoMemory() != nullptr;
    ring::Bell* found = bell_in(*end->bell_view, bell);
    end->ring->set_bell(found);
    return found != nullptr;
}

// Creates an endpoint of `type` on a mapping. Returns nullptr with an exception if the mapping holds no ring.
Endpoint* make(PyTypeObject* type, PyObject* memory, PyObject* hook, const char* mode, PyObject* look_around, PyObject* bell) {
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == nullptr) return nullptr;
    Ref guard(self);
    Endpoint* end = endpoint_of(self);
    end->signal = -1;
    if (!read_mode(mode, &end->mode)) return nullptr;
    end->view = new (std::nothrow) View;
    end->left = new (std::nothrow) std::atomic<uint32_t>(0);
    end->copying = new (std::nothrow) std::atomic<uint32_t>(kCopiesNothing);
    if (end->view == nullptr || end->left == nullptr || end->copying == nullptr) return reinterpret_cast<Endpoint*>(PyErr_NoMemory());
    if (!end->view->acquire(memory, PyBUF_WRITABLE)) return nullptr;
    end->ring = new (std::nothrow) Ring(end->view->data(), end->view->size());
    if (end->ring == nullptr) return reinterpret_cast<Endpoint*>(PyErr_NoMemory());
    if (!end->ring->valid()) {
        PyErr_SetString(PyExc_ValueError, "the mapping holds no ring of this version");
        return nullptr;
    }
    if (!set_bell(end, bell)) return nullptr;
    end->hook = Py_NewRef(hook);
    end->memory = Py_NewRef(memory);
    end->look_around = Py_NewRef(look_around);
    end->born = forks;
    end->timeout_ns = -1;
    guard.release();
    return end;
}

// WriteEndpoint(mapping, describe, wait, look_around[, bell])
PyObject* write_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *memory = nullptr, *hook = nullptr, *look_around = nullptr, *bell = Py_None;
    const char* mode = nullptr;
    if (!PyArg_ParseTuple(args, "OOsO|O:WriteEndpoint", &memory, &hook, &mode, &look_around, &bell)) return nullptr;
    return reinterpret_cast<PyObject*>(make(type, memory, hook, mode, look_around, bell));
}

// ReadEndpoint(mapping, reader, build, wait, look_around[, bell])
PyObject* read_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *memory = nullptr, *hook = nullptr, *look_around = nullptr, *bell = Py_None;
    const char* mode = nullptr;
    Py_ssize_t index = 0;
    if (!PyArg_ParseTuple(args, "OnOsO|O:ReadEndpoint", &memory, &index, &hook, &mode, &look_around, &bell)) return nullptr;
    Endpoint* end = make(type, memory, hook, mode, look_around, bell);
    if (end == nullptr) return nullptr;
    Ref guard(reinterpret_cast<PyObject*>(end));
    if (index < 0 || index >= static_cast<Py_ssize_t>(end->ring->readers())) {
        PyErr_Format(PyExc_ValueError, "reader %zd of %u", index, end->ring->readers());
        return nullptr;
    }
    end->index = static_cast<uint32_t>(index);
    end->assembly = new (std::nothrow) codec::Assembly;
    end->kept = new (std::nothrow) std::vector<PyObject*>;
    if (end->assembly == nullptr || end->kept == nullptr) return PyErr_NoMemory();
    return guard.release();
}

PyObject* get_assembling(PyObject* self, void*) {
    const Endpoint* end = endpoint_of(self);
    return PyBool_FromLong(end->assembly != nullptr && end->assembly->active());
}

PyObject* get_busy(PyObject* self, void*) { return PyBool_FromLong(endpoint_of(self)->owner != 0); }

PyObject* get_cause(PyObject* self, void*) {
    PyObject* cause = endpoint_of(self)->cause;
    return Py_NewRef(cause == nullptr ? Py_None : cause);
}

PyObject* fork_count(PyObject*, PyObject*) { return PyLong_FromUnsignedLongLong(forks); }

// pacer_step(state, wait, now, arrived) -> (spin_ns, park_ns): runs one step of a `Pacer` whose state is in a bytearray.
PyObject* pacer_step(PyObject*, PyObject* args) {
    PyObject* state = nullptr;
    const char* name = nullptr;
    long long now = 0;
    int has_arrived = 0;
    if (!PyArg_ParseTuple(args, "OsLp:pacer_step", &state, &name, &now, &has_arrived)) return nullptr;
    View view;
    Mode mode{};
    if (!view.acquire(state, PyBUF_WRITABLE) || !read_mode(name, &mode)) return nullptr;
    if (view.size() != sizeof(Pacer)) return PyErr_Format(PyExc_ValueError, "the state of a pacer has %zu bytes", sizeof(Pacer));
    Pacer pacer;
    std::memcpy(&pacer, view.data(), sizeof pacer);
    Budget budget{0, 0};
    if (has_arrived) pacer.arrived(now);
    else budget = pacer.budget(mode, now);
    std::memcpy(view.data(), &pacer, sizeof pacer);
    return Py_BuildValue("(KK)", static_cast<unsigned long long>(budget.spin_ns),
                         static_cast<unsigned long long>(budget.park_ns));
}

PyMemberDef members[] = {
    {"messages", T_ULONGLONG, offsetof(Endpoint, messages), READONLY, nullptr},
    {"nbytes", T_ULONGLONG, offsetof(Endpoint, nbytes), READONLY, nullptr},
    {"tag", T_UINT, offsetof(Endpoint, tag), 0, nullptr},
    {"waits", T_ULONGLONG, offsetof(Endpoint, waits), READONLY, nullptr},
    {"waited_ns", T_ULONGLONG, offsetof(Endpoint, waited_ns), READONLY, nullptr},
    {"lent_bytes", T_ULONGLONG, offsetof(Endpoint, lent_bytes), 0, nullptr},
    {"timeout_ns", T_LONGLONG, offsetof(Endpoint, timeout_ns), 0, nullptr},
    {"refused_nested", T_BOOL, offsetof(Endpoint, refused_nested), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

// Reading `message` takes the next kept message out. Python does not check for signals between reading an
// attribute and storing or returning its value, as it does after a call. So when a signal handler runs, the
// message is either still here, or Python has it.
PyObject* take_message(PyObject* self, void*) {
    std::vector<PyObject*>* kept = endpoint_of(self)->kept;
    if (kept == nullptr || kept->empty()) return none_yet();
    PyObject* message = kept->front();
    kept->erase(kept->begin());
    settle_signal(endpoint_of(self));
    return message;
}

// Writing `message` puts it back in front of the others.
int put_back(PyObject* self, PyObject* message, void*) {
    std::vector<PyObject*>* kept = endpoint_of(self)->kept;
    if (kept == nullptr || message == nullptr) {
        PyErr_SetString(PyExc_AttributeError, "only a reader keeps a message, and it cannot be deleted");
        return -1;
    }
    try {
        kept->insert(kept->begin(), message);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    Py_INCREF(message);
    settle_signal(endpoint_of(self));
    return 0;
}

PyObject* get_has_message(PyObject* self, void*) {
    const std::vector<PyObject*>* kept = endpoint_of(self)->kept;
    return PyBool_FromLong(kept != nullptr && !kept->empty());
}

PyGetSetDef attributes[] = {
    {"message", take_message, put_back, "The next message that was fetched; reading it takes it out.", nullptr},
    {"has_message", get_has_message, nullptr, "Whether a message was fetched and not taken out.", nullptr},
    {"has_news", get_has_news, nullptr, "Whether a read can go on: a message or more of it is there, or none will come.", nullptr},
    {"is_busy", get_busy, nullptr, "Whether a thread is inside of a call, or has a message on loan.", nullptr},
    {"is_assembling", get_assembling, nullptr, "Whether a message has come in part.", nullptr},
    {"cause", get_cause, nullptr, "Why the end is broken, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

bool add_type(PyObject* module, const char* name, newfunc make_one, PyMethodDef* methods) {
    PyType_Slot slots[] = {
        {Py_tp_new, reinterpret_cast<void*>(make_one)}, {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
        {Py_tp_traverse, reinterpret_cast<void*>(traverse)}, {Py_tp_clear, reinterpret_cast<void*>(clear)},
        {Py_tp_methods, methods}, {Py_tp_members, members}, {Py_tp_getset, attributes}, {0, nullptr},
    };
    PyType_Spec spec = {name, sizeof(Endpoint), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
    const Ref type(PyType_FromSpec(&spec));
    return type && PyModule_AddObjectRef(module, std::strrchr(name, '.') + 1, type.get()) == 0;
}

// undisturbed(call) -> what the call returns. The kernel gives this thread no signals meanwhile, so that none ends a system
// call of code that does not go on after EINTR. Native, because a handler may run behind Python's own pthread_sigmask, and raise.
PyObject* undisturbed(PyObject*, PyObject* call) {
    sigset_t wanted, before;
    sigfillset(&wanted);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT}) sigdelset(&wanted, fault);
    pthread_sigmask(SIG_BLOCK, &wanted, &before);
    PyObject* result = PyObject_CallNoArgs(call);
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return result;
}

PyMethodDef functions[] = {
    {"fork_count", fork_count, METH_NOARGS, nullptr},
    {"pacer_step", pacer_step, METH_VARARGS, nullptr},
    {"undisturbed", undisturbed, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

struct Constant {
    const char* name;
    long value;
};
constexpr Constant constants[] = {
    {"LOOK_BEGIN", kBegin},         {"LOOK_WAITING", kWaiting},         {"LOOK_LATE", kLate},
    {"LOOK_UNUSABLE", kUnusable},   {"LOOK_REENTRANT", kReentrant},     {"LOOK_LENT", kLent},
    {"LOOK_CORRUPT", kCorrupt},     {"LOOK_UNDECODABLE", kUndecodable}, {"LOOK_UNENCODABLE", kUnencodable},
    {"PACER_BYTES", sizeof(Pacer)},
};

}  // namespace

// close(refusing): calls `refusing` instead of `look_around` from now on. Wakes the threads that wait for
// their turn. Once it has returned, nothing more is published, and what was published is counted: it waits
// for the copy of a record, and that copy waits for nobody. The mapping is released when the owner has left.
PyObject* close(PyObject* self, PyObject* refusing) {
    Endpoint* end = endpoint_of(self);
    end->is_closed = true;
    drop_signal(end);
    const Ref before(end->look_around);
    end->look_around = Py_NewRef(refusing);
    end->left->fetch_add(1, std::memory_order_relaxed);
    ring::futex_wake_all(*end->left);
    await_copy(end);
    count_message(end);
    if (end->owner == 0) release_memory(end);
    Py_CLEAR(end->cause);
    Py_RETURN_NONE;
}

// fail(error): marks the endpoint as broken by `error`, unless it is broken already.
PyObject* fail(PyObject* self, PyObject* error) {
    Endpoint* end = endpoint_of(self);
    if (end->cause == nullptr) end->cause = Py_NewRef(error);
    if (end->signal >= 0 && !is_inherited(end)) eventfd_write(end->signal, 1);
    Py_RETURN_NONE;
}

}  // namespace endpoint

int endpoint_add(PyObject* module) {
    using namespace endpoint;
    if (PyModule_AddFunctions(module, functions) < 0 || PyModule_AddFunctions(module, bell_functions) < 0) return -1;
    if (!add_type(module, "shm_broadcast._core.WriteEndpoint", write_new, write_methods)) return -1;
    if (!add_type(module, "shm_broadcast._core.ReadEndpoint", read_new, read_methods) || !add_loan_block(module)) return -1;
    read_type = PyObject_GetAttrString(module, "ReadEndpoint");
    if (read_type == nullptr) return -1;
    for (const Constant& each : constants) {
        if (PyModule_AddIntConstant(module, each.name, each.value) < 0) return -1;
    }
    nothing = PyObject_CallNoArgs(reinterpret_cast<PyObject*>(&PyBaseObject_Type));
    if (nothing == nullptr || PyModule_AddObjectRef(module, "NOTHING", nothing) < 0) return -1;
    return pthread_atfork(nullptr, nullptr, count_fork);
}
