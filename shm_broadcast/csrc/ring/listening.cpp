// This file lets a thread wait for any of several reading endpoints at once: it sleeps on the bell of its process, which all of
// their writers sound.
#include <deque>

#include "endpoint.hpp"

namespace endpoint {

using codec::expect_arguments;
using codec::Ref;
using codec::View;
using ring::Bell;
using ring::Ring;

uint64_t copied(const Endpoint* end) {
    return end->assembly->active() ? end->assembly->total() - end->assembly->missing() : 0;
}

// A closed endpoint has news: a read learns that it is closed. An endpoint with an owner has none for other
// threads. A signal handler on the owner's thread is refused: the owner goes on only after the handler, so
// news would never come.
PyObject* get_has_news(PyObject* self, void*) {
    Endpoint* end = endpoint_of(self);
    if (end->is_closed || end->kept == nullptr || !end->kept->empty()) Py_RETURN_TRUE;
    if (end->owner == PyThread_get_thread_ident()) {
        refuse(end, end->is_lent ? kLent : kReentrant);
        return nullptr;
    }
    if (end->owner != 0) Py_RETURN_FALSE;
    return PyBool_FromLong(end->ring->has_news(end->index, copied(end)));
}

Bell* bell_in(View& view, PyObject* memory) {
    if (!view.acquire(memory, PyBUF_WRITABLE)) return nullptr;
    if (view.size() >= sizeof(Bell) && reinterpret_cast<uintptr_t>(view.data()) % alignof(Bell) == 0) {
        return reinterpret_cast<Bell*>(view.data());
    }
    PyErr_Format(PyExc_ValueError, "a bell takes %zu aligned bytes", sizeof(Bell));
    return nullptr;
}

namespace {

// Counts the calling thread among the listeners of a bell for the length of a scope.
class Listener {
public:
    explicit Listener(Bell& bell) : bell_(bell), seen_(bell.begin()), born_(forks) {}
    // A signal handler may have forked this child meanwhile: its parent still listens.
    ~Listener() {
        if (born_ == forks) bell_.end();
    }
    Listener(const Listener&) = delete;
    Listener& operator=(const Listener&) = delete;

    // Polls and then sleeps until the bell has sounded since this listener began, or `is_ready()` is true.
    template <typename Ready>
    void wait(Budget budget, Ready is_ready) {
        const uint64_t until = ring::now_ns() + budget.spin_ns;
        while (budget.spin_ns > 0 && ring::now_ns() < until) {
            if (is_ready()) return;
            ring::yield_core();
        }
        if (budget.park_ns > 0 && !is_ready()) ring::futex_wait(bell_.word, seen_, budget.park_ns);
    }

private:
    Bell& bell_;
    const uint32_t seen_;
    const uint64_t born_;
};

// A ring that a listener looks at. It holds the mapping, because another thread may close the endpoint meanwhile.
struct Watched {
    View view;
    Ring ring{nullptr, 0};
    uint32_t index = 0;
    uint64_t taken = 0;
};

// Adds the ring of an endpoint, unless a thread is inside of a call on the endpoint: it sounds the bell when it leaves. Returns
// false with an exception.
bool add(std::deque<Watched>& rings, PyObject* object) {
    if (Py_TYPE(object) != reinterpret_cast<PyTypeObject*>(read_type)) {
        PyErr_SetString(PyExc_TypeError, "only a ReadEndpoint can be watched");
        return false;
    }
    const Endpoint* end = endpoint_of(object);
    if (end->owner != 0 || end->is_closed || end->ring == nullptr) return true;
    Watched& added = rings.emplace_back();
    added.ring = *end->ring;
    added.index = end->index;
    added.taken = copied(end);
    return added.view.acquire(end->memory, PyBUF_WRITABLE);
}

// bell_listen(bell, look, spin_ns, park_ns) -> whether look() returned None. If it returned a tuple of endpoints, first waits until the
// bell sounds or one of them can go on, at most for these times.
PyObject* bell_listen(PyObject*, PyObject* const* args, Py_ssize_t count) {
    View view;
    if (!expect_arguments("bell_listen", count, 4)) return nullptr;
    const Budget budget{PyLong_AsUnsignedLongLong(args[2]), PyLong_AsUnsignedLongLong(args[3])};
    Bell* bell = PyErr_Occurred() ? nullptr : bell_in(view, args[0]);
    if (bell == nullptr) return nullptr;
    // From here on the bell sounds for every message, and whenever a thread leaves an endpoint. So `look` misses nothing.
    Listener listener(*bell);
    const Ref endpoints(PyObject_CallNoArgs(args[1]));
    if (!endpoints) return nullptr;
    if (endpoints.get() == Py_None) Py_RETURN_TRUE;
    if (!PyTuple_Check(endpoints.get())) return PyErr_Format(PyExc_TypeError, "a tuple is needed");
    try {
        std::deque<Watched> rings;
        for (Py_ssize_t i = 0; i < PyTuple_Size(endpoints.get()); ++i) {
            if (!add(rings, PyTuple_GetItem(endpoints.get(), i))) return nullptr;
        }
        const auto is_ready = [&rings] {
            for (Watched& each : rings) {
                if (each.ring.has_news(each.index, each.taken)) return true;
            }
            return false;
        };
        Py_BEGIN_ALLOW_THREADS
        listener.wait(budget, is_ready);
        Py_END_ALLOW_THREADS
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    if (PyErr_CheckSignals() < 0) return nullptr;
    Py_RETURN_FALSE;
}

// bell_sound(bell): wakes the threads that listen to it
PyObject* bell_sound(PyObject*, PyObject* memory) {
    View view;
    Bell* bell = bell_in(view, memory);
    if (bell == nullptr) return nullptr;
    bell->sound();
    Py_RETURN_NONE;
}

}  // namespace

PyMethodDef bell_functions[] = {
    {"bell_listen", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(bell_listen)), METH_FASTCALL, nullptr},
    {"bell_sound", bell_sound, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace endpoint
