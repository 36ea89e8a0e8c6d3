// The status page in Python: its owner's end, and the copy that a reader takes.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <time.h>

#include <algorithm>
#include <new>

#include "../codec/ref.hpp"
#include "lane.hpp"
#include "lanes.hpp"

namespace status {
namespace {

using codec::Ref;

struct Instant {
    uint64_t ticks;
    uint64_t ns;
};

// Reads one instant on both clocks. Of 8 pairs of readings it takes the one that took the least time.
Instant this_instant() {
    Instant best{};
    uint64_t shortest = UINT64_MAX;
    for (int i = 0; i < 8; ++i) {
        const uint64_t before = ticks(), ns = ring::now_ns(), after = ticks();
        if (after - before >= shortest) continue;
        shortest = after - before;
        best = {before + shortest / 2, ns};
    }
    return best;
}

const Instant loaded = this_instant();

// Nanoseconds per tick, times 2^32. Two instants are each known to about 50 ns, so 10 ms between them give 10 parts in a million.
uint64_t measured_rate(const Instant& now) {
    if (kClock == Clock::kMonotonic) return uint64_t{1} << 32;
    __extension__ using Wide = unsigned __int128;
    return static_cast<uint64_t>((static_cast<Wide>(now.ns - loaded.ns) << 32) / (now.ticks - loaded.ticks));
}
constexpr uint64_t kMeasuredNs = 10 * 1000 * 1000;

struct PageObject {
    PyObject_HEAD
    Py_buffer view;
    bool has_view;
    Written written;
};

PageObject* page_of(PyObject* self) { return reinterpret_cast<PageObject*>(self); }

void copy_text(char* to, size_t bytes, const char* text, Py_ssize_t length) {
    std::memset(to, 0, bytes);
    std::memcpy(to, text, std::min(bytes - 1, static_cast<size_t>(length)));
}

// status_format(mapping, pid, start_ticks, pid_namespace, time_namespace, boot_id, hostname)
PyObject* status_format(PyObject*, PyObject* args) {
    Py_buffer view;
    unsigned long long pid = 0, start = 0, pids = 0, times = 0;
    const char *boot_id = nullptr, *hostname = nullptr;
    Py_ssize_t boot_bytes = 0, host_bytes = 0;
    if (!PyArg_ParseTuple(args, "w*KKKKy#y#:status_format", &view, &pid, &start, &pids, &times, &boot_id, &boot_bytes, &hostname,
                          &host_bytes)) {
        return nullptr;
    }
    if (view.len != static_cast<Py_ssize_t>(sizeof(Page))) {
        PyBuffer_Release(&view);
        PyErr_Format(PyExc_ValueError, "a status page has %zu bytes", sizeof(Page));
        return nullptr;
    }
    Instant now = this_instant();
    while (now.ns - loaded.ns < kMeasuredNs) {
        const timespec rest{0, static_cast<long>(kMeasuredNs - (now.ns - loaded.ns))};
        nanosleep(&rest, nullptr);
        now = this_instant();
    }
    timespec real{};
    clock_gettime(CLOCK_REALTIME, &real);
    Header& header = reinterpret_cast<Page*>(view.buf)->header;
    header.version = kVersion;
    header.clock = static_cast<uint32_t>(kClock);
    header.page_bytes = sizeof(Page);
    header.ticks = now.ticks;
    header.monotonic_ns = now.ns;
    header.rate = measured_rate(now);
    header.realtime_ns = real.tv_sec * INT64_C(1000000000) + real.tv_nsec - static_cast<int64_t>(ring::now_ns());
    header.pid = pid;
    header.start_ticks = start;
    header.pid_namespace = pids;
    header.time_namespace = times;
    copy_text(header.boot_id, sizeof(header.boot_id), boot_id, boot_bytes);
    copy_text(header.hostname, sizeof(header.hostname), hostname, host_bytes);
    header.rank.store(-1, std::memory_order_relaxed);
    // SYNC page->finder (release): a reader that finds the magic number also sees the rest of the header.
    __atomic_store_n(&header.magic, kMagic, __ATOMIC_RELEASE);
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

// status_copy(mapping) -> bytes
PyObject* status_copy(PyObject*, PyObject* mapping) {
    Py_buffer view;
    if (PyObject_GetBuffer(mapping, &view, PyBUF_SIMPLE) < 0) return nullptr;
    if (view.len != static_cast<Py_ssize_t>(sizeof(Page)) || reinterpret_cast<uintptr_t>(view.buf) % alignof(uint64_t) != 0) {
        PyBuffer_Release(&view);
        PyErr_Format(PyExc_ValueError, "a status page has %zu bytes", sizeof(Page));
        return nullptr;
    }
    PyObject* copied = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(sizeof(Page)));
    if (copied != nullptr) {
        auto* to = reinterpret_cast<unsigned char*>(PyBytes_AsString(copied));
        Py_BEGIN_ALLOW_THREADS
        copy_page(to, static_cast<const unsigned char*>(view.buf));
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&view);
    return copied;
}

// StatusPage(mapping)
PyObject* page_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* memory = nullptr;
    if (!PyArg_ParseTuple(args, "O:StatusPage", &memory)) return nullptr;
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == nullptr) return nullptr;
    PageObject* object = page_of(self);
    object->has_view = PyObject_GetBuffer(memory, &object->view, PyBUF_WRITABLE) == 0;
    if (object->has_view) {
        auto* page = static_cast<Page*>(object->view.buf);
        if (object->view.len == static_cast<Py_ssize_t>(sizeof(Page)) && page->header.magic == kMagic) {
            object->written = {page, page->header.rate};
            return self;
        }
        PyErr_SetString(PyExc_ValueError, "the mapping holds no status page of this version");
    }
    Py_DECREF(self);
    return nullptr;
}

void page_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    if (page_of(self)->has_view) PyBuffer_Release(&page_of(self)->view);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Writes what follows a record's sequence number.
template <typename Record>
bool write_record(Record& record, const char* body, Py_ssize_t bytes) {
    if (bytes != static_cast<Py_ssize_t>(sizeof(Record) - sizeof(uint32_t))) {
        PyErr_Format(PyExc_ValueError, "the record has %zu bytes, got %zd", sizeof(Record) - sizeof(uint32_t), bytes);
        return false;
    }
    Writing<Record> writing(record);
    auto* words = reinterpret_cast<uint32_t*>(&record);
    for (size_t i = 1; i < sizeof(Record) / sizeof(uint32_t); ++i) {
        uint32_t word = 0;
        std::memcpy(&word, body + (i - 1) * sizeof(word), sizeof(word));
        put(words[i], word);
    }
    return true;
}

// write(is_queue, place, body)
PyObject* page_write(PyObject* self, PyObject* args) {
    int is_queue = 0;
    unsigned int place = 0;
    const char* body = nullptr;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "pIy#:write", &is_queue, &place, &body, &bytes)) return nullptr;
    Page& page = *page_of(self)->written.page;
    if (place >= (is_queue != 0 ? kQueues : kGroups)) {
        PyErr_SetString(PyExc_IndexError, "there is no such place in the status page");
        return nullptr;
    }
    const bool ok = is_queue != 0 ? write_record(page.queues[place], body, bytes) : write_record(page.groups[place], body, bytes);
    if (!ok) return nullptr;
    Py_RETURN_NONE;
}

// set_words(rank, world_size, stack_signal, refused)
PyObject* page_set_words(PyObject* self, PyObject* args) {
    int rank = 0;
    unsigned int world_size = 0, stack_signal = 0, refused = 0;
    if (!PyArg_ParseTuple(args, "iIII:set_words", &rank, &world_size, &stack_signal, &refused)) return nullptr;
    Header& header = page_of(self)->written.page->header;
    header.rank.store(rank, std::memory_order_relaxed);
    header.world_size.store(world_size, std::memory_order_relaxed);
    header.stack_signal.store(stack_signal, std::memory_order_relaxed);
    header.refused.store(refused, std::memory_order_relaxed);
    Py_RETURN_NONE;
}

// release(group): frees the lanes of the group in this place, and their counters.
PyObject* page_release(PyObject* self, PyObject* place) {
    const unsigned long group = PyLong_AsUnsignedLong(place);
    if (PyErr_Occurred()) return nullptr;
    Page& page = *page_of(self)->written.page;
    for (uint32_t i = 0; i < kLanes; ++i) {
        if (page.lanes[i].name.group != group + 1) continue;
        for (CounterRecord& counters : page.counters) {
            if (counters.lane != i + 1) continue;
            Writing<CounterRecord> writing(counters);
            auto* words = reinterpret_cast<uint32_t*>(&counters);
            for (size_t at = 1; at < sizeof(counters) / sizeof(uint32_t); ++at) put(words[at], uint32_t{0});
        }
        Writing<LaneName> writing(page.lanes[i].name);
        put(page.lanes[i].name.group, uint32_t{0});
    }
    Py_RETURN_NONE;
}

// lane(group, plane, algorithm) -> a lane, or None if there is no room
PyObject* page_lane(PyObject* self, PyObject* args) {
    unsigned int group = 0;
    const char *plane = nullptr, *algorithm = nullptr;
    Py_ssize_t plane_bytes = 0, algorithm_bytes = 0;
    if (!PyArg_ParseTuple(args, "Iy#y#:lane", &group, &plane, &plane_bytes, &algorithm, &algorithm_bytes)) return nullptr;
    Written written = page_of(self)->written;
    uint32_t place = 0;
    while (place < kLanes && written.page->lanes[place].name.group != 0) ++place;
    if (place == kLanes) Py_RETURN_NONE;
    PyObject* made = new_lane(written, place, self);
    if (made == nullptr) return nullptr;
    LaneName named{};
    copy_text(named.plane, sizeof(named.plane), plane, plane_bytes);
    copy_text(named.algorithm, sizeof(named.algorithm), algorithm, algorithm_bytes);
    named.group = group + 1;
    const auto* body = reinterpret_cast<const char*>(&named) + sizeof(uint32_t);
    write_record(written.page->lanes[place].name, body, sizeof(named) - sizeof(uint32_t));
    LaneCall idle{};
    write_record(written.page->lanes[place].call, reinterpret_cast<const char*>(&idle) + sizeof(uint32_t),
                 sizeof(idle) - sizeof(uint32_t));
    return made;
}

PyMethodDef page_methods[] = {
    METHOD("lane", page_lane, METH_VARARGS),   METHOD("write", page_write, METH_VARARGS),
    METHOD("set_words", page_set_words, METH_VARARGS), METHOD("release", page_release, METH_O),
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot page_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(page_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(page_dealloc)},
    {Py_tp_methods, page_methods},
    {0, nullptr},
};

PyType_Spec page_spec = {"shm_broadcast._core.StatusPage", sizeof(PageObject), 0, Py_TPFLAGS_DEFAULT, page_slots};

PyMethodDef functions[] = {
    METHOD("status_format", status_format, METH_VARARGS),
    METHOD("status_copy", status_copy, METH_O),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace status

int status_add(PyObject* module) {
    codec::Ref page(PyType_FromSpec(&status::page_spec));
    if (page == nullptr) return -1;
    if (PyModule_AddObjectRef(module, "StatusPage", page.get()) < 0) return -1;
    if (PyModule_AddFunctions(module, status::functions) < 0) return -1;
    return status::add_lanes(module);
}
