// This file gives Python functions on the ring. Each takes the mapping as a buffer, checks it, and never blocks longer than it
// is told to. It releases the GIL while it waits.
#include "ring.hpp"

#include <sys/eventfd.h>

#include <algorithm>

#include "../codec/codec.hpp"
#include "wait_any.hpp"

namespace {

using codec::expect_arguments;
using codec::View;
using ring::Ring;

// What these functions raise for their own findings about a mapping. Nobody else raises it, so that it is never mistaken for an
// exception of a signal handler.
PyObject* mapping_error = nullptr;

// Holds the mapping, which is the first argument of every function.
class Mapped {
public:
    bool acquire(PyObject* object) {
        if (!view_.acquire(object, PyBUF_WRITABLE)) {
            // The mapping is closed.
            if (PyErr_ExceptionMatches(PyExc_ValueError)) PyErr_SetString(mapping_error, "the mapping is closed");
            return false;
        }
        ring_ = Ring(view_.data(), view_.size());
        if (ring_.valid()) return true;
        PyErr_SetString(mapping_error, "the mapping holds no ring of this version");
        return false;
    }
    Ring& ring() { return ring_; }

private:
    View view_;
    Ring ring_{nullptr, 0};
};

bool read_unsigned(PyObject* object, uint64_t* value) {
    *value = PyLong_AsUnsignedLongLong(object);
    return !(*value == static_cast<uint64_t>(-1) && PyErr_Occurred());
}

// Returns the size of a tuple. For any other object it returns -1 and sets a TypeError.
Py_ssize_t tuple_size(PyObject* object) {
    if (PyTuple_Check(object)) return PyTuple_Size(object);
    PyErr_SetString(PyExc_TypeError, "a tuple is needed");
    return -1;
}

bool read_reader(const Ring& ring, PyObject* object, uint32_t* index) {
    uint64_t value = 0;
    if (!read_unsigned(object, &value)) return false;
    if (value >= ring.readers()) {
        PyErr_Format(mapping_error, "reader %llu of %u", static_cast<unsigned long long>(value), ring.readers());
        return false;
    }
    *index = static_cast<uint32_t>(value);
    return true;
}

// ring_format(mapping, readers, generation)
PyObject* ring_format(PyObject*, PyObject* const* args, Py_ssize_t count) {
    View view;
    uint64_t readers = 0, generation = 0;
    if (!expect_arguments("ring_format", count, 3) || !view.acquire(args[0], PyBUF_WRITABLE)) return nullptr;
    if (!read_unsigned(args[1], &readers) || !read_unsigned(args[2], &generation)) return nullptr;
    if (readers > ring::kMaxReaders ||
        !Ring::format(view.data(), view.size(), static_cast<uint32_t>(readers), generation)) {
        PyErr_SetString(PyExc_ValueError, "the mapping is too small for a ring with this number of readers");
        return nullptr;
    }
    Py_RETURN_NONE;
}

// ring_facts(mapping) -> (readers, generation, capacity, longest payload of one record)
PyObject* ring_facts(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    if (!expect_arguments("ring_facts", count, 1) || !mapped.acquire(args[0])) return nullptr;
    const Ring& ring = mapped.ring();
    return Py_BuildValue("(IKKK)", ring.readers(), static_cast<unsigned long long>(ring.generation()),
                         static_cast<unsigned long long>(ring.capacity()),
                         static_cast<unsigned long long>(ring.longest_payload()));
}

// ring_wait(mapping, reader, spin_ns, park_ns) -> 1 if there is a whole record, 2 if the queue has ended, 0 otherwise
PyObject* ring_wait(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    uint32_t index = 0;
    uint64_t spin_ns = 0, park_ns = 0;
    if (!expect_arguments("ring_wait", count, 4) || !mapped.acquire(args[0])) return nullptr;
    if (!read_reader(mapped.ring(), args[1], &index)) return nullptr;
    if (!read_unsigned(args[2], &spin_ns) || !read_unsigned(args[3], &park_ns)) return nullptr;
    Ring& ring = mapped.ring();
    const auto ready = [&] { return ring.has_whole_record(index) || ring.ended(index); };
    if ((spin_ns > 0 || park_ns > 0) && !ready()) {
        Py_BEGIN_ALLOW_THREADS
        ring.wait(index, spin_ns, park_ns, ready);
        Py_END_ALLOW_THREADS
    }
    const bool ended = ring.ended(index);  // loaded first, as records published before the end are still read
    const bool streaming = ring.has_data(index) && !ring.has_whole_record(index);
    return PyLong_FromLong(ring.has_whole_record(index) ? 1 : ended && !streaming ? 2 : 0);
}

// ring_wait_any(mappings, readers, spin_ns, park_ns, waited_ns) -> whether one of several rings has data or
// has ended. Waits for that within these times; `waited_ns` is how long the caller has waited before.
PyObject* ring_wait_any(PyObject*, PyObject* const* args, Py_ssize_t count) {
    uint64_t spin_ns = 0, park_ns = 0, waited_ns = 0;
    if (!expect_arguments("ring_wait_any", count, 5)) return nullptr;
    if (!read_unsigned(args[2], &spin_ns) || !read_unsigned(args[3], &park_ns)) return nullptr;
    if (!read_unsigned(args[4], &waited_ns)) return nullptr;
    const Py_ssize_t rings = tuple_size(args[0]);
    if (rings < 0 || tuple_size(args[1]) < 0) return nullptr;
    if (rings == 0 || rings > static_cast<Py_ssize_t>(ring::kMaxWords) || PyTuple_Size(args[1]) != rings) {
        PyErr_Format(PyExc_ValueError, "1 to %zu rings are needed, and one reader for each", ring::kMaxWords);
        return nullptr;
    }
    Mapped mapped[ring::kMaxWords];
    uint32_t readers[ring::kMaxWords];
    ring::WaitWord words[ring::kMaxWords];
    for (Py_ssize_t i = 0; i < rings; ++i) {
        if (!mapped[i].acquire(PyTuple_GetItem(args[0], i))) return nullptr;
        if (!read_reader(mapped[i].ring(), PyTuple_GetItem(args[1], i), &readers[i])) return nullptr;
    }
    const auto ready = [&] {
        for (Py_ssize_t i = 0; i < rings; ++i) {
            Ring& ring = mapped[i].ring();
            if (ring.has_whole_record(readers[i]) || ring.ended(readers[i])) return true;
        }
        return false;
    };
    bool found = false;
    Py_BEGIN_ALLOW_THREADS
    const uint64_t until = ring::now_ns() + spin_ns;
    found = ready();
    while (!found && ring::now_ns() < until) {
        ring::pause();
        found = ready();
    }
    if (!found && park_ns > 0) {
        for (Py_ssize_t i = 0; i < rings; ++i) {
            Ring& ring = mapped[i].ring();
            const uint32_t seen = ring.begin_park(readers[i]);
            words[i] = {seen, reinterpret_cast<uint64_t>(&ring.writer().sequence), ring::kWord32, 0};
        }
        if (!ready() && !ring::futex_wait_any(words, static_cast<size_t>(rings), park_ns)) {
            ring::nap_until(ready, park_ns, waited_ns);
        }
        for (Py_ssize_t i = 0; i < rings; ++i) mapped[i].ring().end_park(readers[i]);
        found = ready();
    }
    Py_END_ALLOW_THREADS
    return PyBool_FromLong(found);
}

// ring_take(mapping, reader) -> (payload, flags, message, total): returns the next record. Its payload is a window on the
// mapping and must not be used after ring_release.
PyObject* ring_take(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    uint32_t index = 0;
    if (!expect_arguments("ring_take", count, 2) || !mapped.acquire(args[0])) return nullptr;
    if (!read_reader(mapped.ring(), args[1], &index)) return nullptr;
    Ring& ring = mapped.ring();
    ring::RecordHeader record{};
    unsigned char* payload = nullptr;
    if (!ring.has_whole_record(index) || !ring.next(index, &record, &payload)) {
        PyErr_SetString(mapping_error, "the ring holds no readable record");
        return nullptr;
    }
    PyObject* window = codec::make_window(args[0], payload, record.payload_bytes, false);
    if (window == nullptr) return nullptr;
    return Py_BuildValue("(NIKK)", window, record.flags, static_cast<unsigned long long>(record.message),
                         static_cast<unsigned long long>(record.total_bytes));
}

// ring_release(mapping, reader): gives the record that ring_take found back to the writer.
PyObject* ring_release(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    uint32_t index = 0;
    if (!expect_arguments("ring_release", count, 2) || !mapped.acquire(args[0])) return nullptr;
    if (!read_reader(mapped.ring(), args[1], &index)) return nullptr;
    Ring& ring = mapped.ring();
    ring::RecordHeader record{};
    unsigned char* payload = nullptr;
    if (!ring.has_whole_record(index) || !ring.next(index, &record, &payload)) {
        PyErr_SetString(mapping_error, "the ring holds no readable record");
        return nullptr;
    }
    ring.release(index, record);
    Py_RETURN_NONE;
}

// ring_end(mapping, reader): leaves as the reader with this index, or closes as the writer with -1. Wakes all waiting threads.
PyObject* ring_end(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    if (!expect_arguments("ring_end", count, 2) || !mapped.acquire(args[0])) return nullptr;
    Ring& ring = mapped.ring();
    const long who = PyLong_AsLong(args[1]);
    if (who == -1) {
        if (PyErr_Occurred()) return nullptr;
        ring.close();
        Py_RETURN_NONE;
    }
    uint32_t index = 0;
    if (!read_reader(ring, args[1], &index)) return nullptr;
    ring.leave(index);
    Py_RETURN_NONE;
}

// ring_attach(mapping, reader): marks this reader as attached.
PyObject* ring_attach(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    uint32_t index = 0;
    if (!expect_arguments("ring_attach", count, 2) || !mapped.acquire(args[0])) return nullptr;
    if (!read_reader(mapped.ring(), args[1], &index)) return nullptr;
    Ring& ring = mapped.ring();
    ring.reader(index).state.store(ring::kAttached, std::memory_order_relaxed);
    ring.wake_writer();
    Py_RETURN_NONE;
}

// ring_state(mapping) -> (published bytes, messages, stamp_ns, closed,
//                         ((consumed bytes, messages, progress_ns, parked, state), ...))
PyObject* ring_state(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    if (!expect_arguments("ring_state", count, 1) || !mapped.acquire(args[0])) return nullptr;
    Ring& ring = mapped.ring();
    PyObject* readers = PyTuple_New(ring.readers());
    if (readers == nullptr) return nullptr;
    for (uint32_t i = 0; i < ring.readers(); ++i) {
        ring::ReaderLine& line = ring.reader(i);
        PyObject* entry = Py_BuildValue(
            "(KKKII)", static_cast<unsigned long long>(line.consumed.load(std::memory_order_relaxed)),
            static_cast<unsigned long long>(line.messages.load(std::memory_order_relaxed)),
            static_cast<unsigned long long>(line.progress_ns.load(std::memory_order_relaxed)),
            line.parked.load(std::memory_order_relaxed), line.state.load(std::memory_order_relaxed));
        if (entry == nullptr || PyTuple_SetItem(readers, i, entry) < 0) {
            Py_DECREF(readers);
            return nullptr;
        }
    }
    ring::WriterLine& writer = ring.writer();
    return Py_BuildValue("(KKKIN)", static_cast<unsigned long long>(writer.published.load(std::memory_order_relaxed)),
                         static_cast<unsigned long long>(writer.messages.load(std::memory_order_relaxed)),
                         static_cast<unsigned long long>(writer.stamp_ns.load(std::memory_order_relaxed)),
                         writer.closed.load(std::memory_order_relaxed), readers);
}

// ring_signal(mapping, reader, eventfd, nanoseconds, stop): sleeps, and makes the eventfd readable each time
// that a message comes or the queue ends after the endpoint has asked for that. Also returns after a signal,
// and once the first byte of `stop` is not 0: call `ring_stir` after setting it.
PyObject* ring_signal(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    uint32_t index = 0;
    uint64_t descriptor = 0, nanoseconds = 0;
    View stop;
    if (!expect_arguments("ring_signal", count, 5) || !mapped.acquire(args[0])) return nullptr;
    if (!read_reader(mapped.ring(), args[1], &index)) return nullptr;
    if (!read_unsigned(args[2], &descriptor) || !read_unsigned(args[3], &nanoseconds)) return nullptr;
    if (!stop.acquire(args[4], PyBUF_WRITABLE)) return nullptr;
    if (stop.size() == 0) return PyErr_Format(PyExc_ValueError, "a byte is needed that says when to stop");
    Ring& ring = mapped.ring();
    const uint64_t until = ring::now_ns() + nanoseconds;
    Py_BEGIN_ALLOW_THREADS
    for (uint64_t now = ring::now_ns(); now < until && ring.await_readable(index, until - now, stop.data()); now = ring::now_ns()) {
        if (ring.take_signal(index)) eventfd_write(static_cast<int>(descriptor), 1);
        if (ring.ended(index)) break;
    }
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

// ring_stir(mapping): wakes every thread that sleeps until something is published, and those of `ring_signal`
PyObject* ring_stir(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Mapped mapped;
    if (!expect_arguments("ring_stir", count, 1) || !mapped.acquire(args[0])) return nullptr;
    mapped.ring().stir();
    Py_RETURN_NONE;
}

#define FAST(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(name)), METH_FASTCALL, nullptr}

PyMethodDef functions[] = {
    FAST(ring_format), FAST(ring_facts),  FAST(ring_wait),   FAST(ring_wait_any), FAST(ring_take),
    FAST(ring_signal), FAST(ring_stir), FAST(ring_release), FAST(ring_end), FAST(ring_attach), FAST(ring_state),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int ring_add(PyObject* module) {
    mapping_error = PyErr_NewException("shm_broadcast._core.MappingError", PyExc_ValueError, nullptr);
    if (mapping_error == nullptr || PyModule_AddObjectRef(module, "MappingError", mapping_error) < 0) return -1;
    return PyModule_AddFunctions(module, functions);
}
