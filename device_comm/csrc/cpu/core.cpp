// The module `device_comm._core`: an object for a group's shared region and the call in progress.
#include <Python.h>
#include <pthread.h>
#include <sys/mman.h>

#include <new>
#include <tuple>

#include "object.hpp"

namespace region {
namespace {

// With more ranks than cores, a call polls and yields for this long before it sleeps. This is many times the cost of a
// sleep and a wake-up: peers usually arrive at once, and yielding leaves the core to a rank that needs it.
constexpr uint64_t kSpinNs = 200 * 1000;
// If every rank can have a core, it polls longer. In the forward pass of an engine the ranks of a group of two came 0.3 ms
// apart at p90 and 1 ms apart at p99, and waking an idle core took up to some ms on a virtual machine.
constexpr uint64_t kLongSpinNs = 2 * 1000 * 1000;
// After this long a call returns to Python, where signals, dead peers and the deadline are checked.
constexpr uint64_t kFirstSliceNs = 50 * 1000 * 1000;

uint64_t forks = 0;  // forks between the process that loaded this module and this one

void count_fork() { ++forks; }

// Shows how the call in progress has ended.
void show_end(Object* object, status::Outcome outcome) {
    status::Lane* lane = object->region->lane();
    if (lane == nullptr || object->call == nullptr) return;
    status::End end = object->call->arrivals();
    end.outcome = outcome;
    std::tie(end.sleeps, end.polled_ns) = object->region->take_waits();
    lane->end(end, status::ticks());
}

void release(Object* object) {
    // In a forked child the lane shows nothing any more, but the region may be in any state.
    if (object->region != nullptr && object->born == forks) show_end(object, status::Outcome::kFailed);
    delete object->call;
    delete object->region;
    delete object->deferred;
    object->call = nullptr;
    object->region = nullptr;
    object->deferred = nullptr;
    if (object->has_view) PyBuffer_Release(&object->view);
    object->has_view = false;
    Py_CLEAR(object->lane);
}

void region_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    release(object_of(self));
    delete object_of(self)->disagreements;
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// SharedRegion(mapping, rank)
PyObject* region_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject* memory = nullptr;
    unsigned int rank = 0;
    if (!PyArg_ParseTuple(args, "OI:SharedRegion", &memory, &rank)) return nullptr;
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == nullptr) return nullptr;
    Object* object = object_of(self);
    object->born = forks;
    object->has_view = PyObject_GetBuffer(memory, &object->view, PyBUF_WRITABLE) == 0;
    if (object->has_view) {
        auto* base = static_cast<unsigned char*>(object->view.buf);
        object->region = new (std::nothrow) SharedRegion(base, static_cast<size_t>(object->view.len), rank);
        if (object->region != nullptr && object->region->valid()) return self;
        if (object->region == nullptr) {
            PyErr_NoMemory();
        } else {
            PyErr_SetString(PyExc_ValueError, "the mapping holds no shared region of this version with this rank");
        }
    }
    Py_DECREF(self);
    return nullptr;
}

// close(breaks)
PyObject* region_close(PyObject* self, PyObject* breaks) {
    Object* object = object_of(self);
    const int is_failure = PyObject_IsTrue(breaks);
    if (is_failure < 0) return nullptr;
    if (object->is_closed) Py_RETURN_NONE;
    object->is_closed = true;
    // A forked child must not close its parent's end.
    if (object->born == forks) object->region->close(is_failure != 0);
    if (!object->is_busy) release(object);
    Py_RETURN_NONE;
}

// Gives refusals the next numbers and posts them.
void post_refusals(Object* object, SharedRegion::Refusals& refused) {
    for (auto& [number, reason] : refused) number = ++object->number;
    object->region->refuse(refused);
}

// Ends a call that is complete, or that was refused on all ranks; returns its status. It never raises: an exception that `start`
// sets says that no call was begun.
long end_call(Object* object) {
    const bool disagrees = object->call->disagrees();
    show_end(object, disagrees ? status::Outcome::kDisagreed : status::Outcome::kDone);
    delete object->call;
    object->call = nullptr;
    // Keep the posts of this step before posting any refusal, which begins the next step.
    if (disagrees) keep_posts(object);
    if (object->deferred != nullptr && !object->deferred->empty()) post_refusals(object, *object->deferred);
    return disagrees ? kDisagree : kDone;
}

// Continues the call in progress for at most `slice_ns`; returns its status.
long advance(Object* object, uint64_t spin_ns, uint64_t slice_ns) {
    object->is_busy = true;
    object->is_left = false;
    // If the peers arrive at once, releasing and taking the GIL costs as much as the call itself.
    Wait wait = object->call->is_soon_done() ? object->call->run(0, 0) : Wait::kTime;
    if (wait == Wait::kTime) {
        object->call->show();
        Py_BEGIN_ALLOW_THREADS
        wait = object->call->run(spin_ns, now_ns() + slice_ns);
        Py_END_ALLOW_THREADS
    }
    object->is_busy = false;
    if (object->is_closed) {
        release(object);
        return kClosed;
    }
    if (wait == Wait::kDone) return end_call(object);
    if (wait == Wait::kLeft) return kLeft;
    return wait == Wait::kClosed ? kClosed : kPending;
}

// The result of a method: a status, or nullptr with an exception set.
PyObject* answer(long status) { return status < 0 ? nullptr : PyLong_FromLong(status); }

}  // namespace

long start(Object* object, Plan&& plan, uint64_t code) {
    plan.view.number = object->number + 1;
    plan.view.code = code;
    // The others take 0 for a rank that shows nothing.
    const uint64_t arrived = object->region->lane() == nullptr ? 0 : status::ticks();
    try {
        object->call = new Call(*object->region, std::move(plan), arrived);
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
        return -1;
    }
    object->number += 1;
    object->owner = PyThread_get_thread_ident();
    return advance(object, object->region->has_core_each() ? kLongSpinNs : kSpinNs, kFirstSliceNs);
}

long refusal(Object* object) {
    if (object->is_closed || object->born != forks) return kClosed;
    if (!object->is_busy && object->call == nullptr) return kDone;
    if (object->owner != PyThread_get_thread_ident()) return kBusy;
    return object->is_left ? kAbandoned : kNested;
}

bool read_unsigned(PyObject* const* args, Py_ssize_t count, uint64_t* values) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        values[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (values[i] == static_cast<uint64_t>(-1) && PyErr_Occurred()) return false;
    }
    return true;
}

bool expect(const char* name, Py_ssize_t got, Py_ssize_t wanted, Py_ssize_t optional) {
    if (got >= wanted && got <= wanted + optional) return true;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted + optional, got);
    return false;
}

bool find_kernel(uint64_t type, uint64_t op, bool streaming, Plan* plan) {
    const auto the_type = static_cast<reduce::Type>(type);
    const auto the_op = static_cast<reduce::Op>(op);
    if (type < 256 && op < 256) {
        plan->kernel = reduce::kernel(the_op, the_type, streaming);
    }
    if (plan->kernel == nullptr) {
        PyErr_SetString(PyExc_ValueError, "there is no kernel for this dtype and reduction");
        return false;
    }
    plan->element = reduce::element_bytes(the_type);
    return true;
}

// An FNV-1a hash.
uint64_t hash_of(const Columns& columns) {
    constexpr uint64_t kPrime = 0x100000001b3;
    uint64_t hash = (0xcbf29ce484222325 ^ columns.rows) * kPrime;
    for (const size_t width : columns.widths) hash = (hash ^ width) * kPrime;
    return hash;
}

namespace {

// Results of this size or more bypass the caches, which would otherwise read the memory before the write.
constexpr size_t kStreamingBytes = size_t{2} << 20;

// Fresh memory costs a page fault per 4 KiB, 28 ms for 64 MiB, but 9 ms with huge pages. The advice does not affect
// memory that has pages already; kernels without huge pages refuse it, which is ignored.
constexpr size_t kHuge = size_t{2} << 20;

void prefer_huge_pages(void* memory, size_t bytes) {
    if (memory == nullptr || bytes < 2 * kHuge) return;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(memory) + kHuge - 1) / kHuge * kHuge;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHuge * kHuge;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

// The optional last argument `digest` of the following methods is a hash of the call of which this one is a part: the ranks
// compare it too.

// reduce(kind, in, out, elements, type, op, root, digest = 0) -> status
PyObject* region_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Object* object = object_of(self);
    uint64_t v[8] = {};
    if (!expect("reduce", count, 7, 1) || !read_unsigned(args, count, v)) return nullptr;
    if (const long status = refusal(object); status != kDone) return PyLong_FromLong(status);
    Plan plan;
    plan.kind = static_cast<Kind>(v[0]);
    plan.in = reinterpret_cast<const unsigned char*>(v[1]);
    plan.out = reinterpret_cast<unsigned char*>(v[2]);
    plan.root = static_cast<uint32_t>(v[6]);
    const size_t element = v[4] < 256 ? reduce::element_bytes(static_cast<reduce::Type>(v[4])) : 0;
    const bool streams = v[1] != v[2] && v[3] * element >= kStreamingBytes;
    if (!find_kernel(v[4], v[5], streams, &plan)) return nullptr;
    plan.bytes = v[3] * plan.element;
    if (v[1] != v[2]) prefer_huge_pages(plan.out, plan.bytes);
    plan.view.count = v[3];
    plan.view.detail = v[7];
    return answer(start(object, std::move(plan), code_of(plan.kind, v[4], v[5], v[6])));
}

// barrier(digest = 0) -> status
PyObject* region_barrier(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Object* object = object_of(self);
    Plan plan;
    if (!expect("barrier", count, 0, 1) || !read_unsigned(args, count, &plan.view.detail)) return nullptr;
    if (const long status = refusal(object); status != kDone) return PyLong_FromLong(status);
    return answer(start(object, std::move(plan), code_of(Kind::kBarrier, 0, 0, 0)));
}

// broadcast(address, bytes, type, root, digest = 0) -> status
PyObject* region_broadcast(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Object* object = object_of(self);
    uint64_t v[5] = {};
    if (!expect("broadcast", count, 4, 1) || !read_unsigned(args, count, v)) return nullptr;
    if (const long status = refusal(object); status != kDone) return PyLong_FromLong(status);
    Plan plan;
    plan.kind = Kind::kBroadcast;
    plan.in = reinterpret_cast<const unsigned char*>(v[0]);
    plan.out = reinterpret_cast<unsigned char*>(v[0]);
    plan.bytes = plan.view.count = v[1];
    plan.root = static_cast<uint32_t>(v[3]);
    plan.view.detail = v[4];
    return answer(start(object, std::move(plan), code_of(Kind::kBroadcast, v[2], 0, v[3])));
}

// Reads one width in bytes for each rank from a tuple, and for an all-to-all a second one for each rank behind them.
bool read_widths(PyObject* tuple, uint32_t ranks, uint64_t rows, Plan* plan) {
    const size_t expected = plan->kind == Kind::kAllToAll ? 2 * ranks : ranks;
    if (!PyTuple_Check(tuple) || PyTuple_Size(tuple) != static_cast<Py_ssize_t>(expected)) {
        PyErr_Format(PyExc_ValueError, "expected a tuple of %zu widths for %u ranks", expected, ranks);
        return false;
    }
    std::vector<size_t> widths(expected);
    for (size_t i = 0; i < expected; ++i) {
        widths[i] = PyLong_AsSize_t(PyTuple_GetItem(tuple, static_cast<Py_ssize_t>(i)));
        if (widths[i] == static_cast<size_t>(-1) && PyErr_Occurred()) return false;
    }
    plan->columns.set(rows, {widths.begin(), widths.begin() + ranks});
    plan->out_columns.set(rows, {widths.begin() + ranks, widths.end()});
    return true;
}

// move(kind, in, out, rows, widths, type, op, root, digest = 0) -> status. `widths`: bytes of each rank's run of a row; for an
// all-to-all those of the tensor that is sent, followed by those of the tensor that is received.
PyObject* region_move(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    Object* object = object_of(self);
    uint64_t head[4], tail[4] = {};
    if (!expect("move", count, 8, 1) || !read_unsigned(args, 4, head) || !read_unsigned(args + 5, count - 5, tail)) {
        return nullptr;
    }
    if (const long status = refusal(object); status != kDone) return PyLong_FromLong(status);
    Plan plan;
    plan.kind = static_cast<Kind>(head[0]);
    plan.in = reinterpret_cast<const unsigned char*>(head[1]);
    plan.out = reinterpret_cast<unsigned char*>(head[2]);
    plan.root = static_cast<uint32_t>(tail[2]);
    plan.view.detail = tail[3];
    const uint32_t ranks = object->region->ranks();
    if (!read_widths(args[4], ranks, head[3], &plan)) return nullptr;
    if (plan.kind == Kind::kReduceScatter && !find_kernel(tail[0], tail[1], false, &plan)) return nullptr;
    if (plan.kind == Kind::kAllToAll) {
        if (table_offset(*object->region) < ranks * kLine) {
            PyErr_SetString(PyExc_ValueError, "the slots are too small for an exchange between this number of ranks");
            return nullptr;
        }
        // The ranks state different widths, which the first step compares.
        plan.view.count = plan.columns.rows;
        prefer_huge_pages(plan.out, plan.out_columns.row_bytes * plan.out_columns.rows);
    } else {
        plan.view.count = plan.columns.row_bytes * plan.columns.rows;
        plan.view.detail ^= hash_of(plan.columns);
        if (plan.kind == Kind::kAllGather) prefer_huge_pages(plan.out, plan.view.count);
    }
    return answer(start(object, std::move(plan), code_of(plan.kind, tail[0], tail[1], tail[2])));
}

// resume(slice_ns) -> status of the call in progress
PyObject* region_resume(PyObject* self, PyObject* slice) {
    Object* object = object_of(self);
    const uint64_t slice_ns = PyLong_AsUnsignedLongLong(slice);
    if (PyErr_Occurred()) return nullptr;
    // A signal handler inside of the call may have forked this child, whose slots are those of its parent.
    if (object->is_closed || object->born != forks) return PyLong_FromLong(kClosed);
    if (object->call == nullptr || object->is_busy) return PyLong_FromLong(kBusy);
    return answer(advance(object, 0, slice_ns));
}

// refuse(reason): this rank refuses its next call. The refused call still takes a number: the one after the
// call that another thread is in, if there is one. Does nothing during a call of the same thread.
PyObject* region_refuse(PyObject* self, PyObject* reason) {
    Object* object = object_of(self);
    char* text = nullptr;
    Py_ssize_t bytes = 0;
    if (PyBytes_AsStringAndSize(reason, &text, &bytes) < 0) return nullptr;
    if (object->is_closed || object->born != forks) Py_RETURN_NONE;
    if (object->call != nullptr && object->owner == PyThread_get_thread_ident()) Py_RETURN_NONE;
    try {
        SharedRegion::Refusals refused;
        refused.emplace_back(0, std::string(text, static_cast<size_t>(bytes)));
        if (object->call == nullptr) {
            post_refusals(object, refused);
            Py_RETURN_NONE;
        }
        if (object->deferred == nullptr) object->deferred = new SharedRegion::Refusals();
        object->deferred->splice(object->deferred->end(), refused);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    Py_RETURN_NONE;
}

// catch_up(): posts the refusals whose turn has come, which the next call would otherwise post first. Does
// nothing while a call is in progress, because that call posts them itself.
PyObject* region_catch_up(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    if (!object->is_closed && object->born == forks && object->call == nullptr) object->region->catch_up();
    Py_RETURN_NONE;
}

// leave() -> the number of the unfinished call that this thread has begun and is not inside of, or 0. Such a
// call is marked as left until it is continued or kept. No signal handler of Python can run between the
// exception that ended its caller and the mark.
PyObject* region_leave(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    const bool is_open = object->call != nullptr && !object->is_busy && !object->is_closed;
    if (!is_open || object->owner != PyThread_get_thread_ident()) return PyLong_FromLong(0);
    object->is_left = true;
    return PyLong_FromUnsignedLongLong(object->number);
}

// keep(): takes the mark of `leave` back.
PyObject* region_keep(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    if (object->owner == PyThread_get_thread_ident()) object->is_left = false;
    Py_RETURN_NONE;
}

// report_to(lane): shows the calls in a lane of the status page, given as its capsule; with None nowhere.
PyObject* region_report_to(PyObject* self, PyObject* capsule) {
    Object* object = object_of(self);
    status::Lane* lane = nullptr;
    if (capsule != Py_None) {
        lane = static_cast<status::Lane*>(PyCapsule_GetPointer(capsule, status::kCapsule));
        if (lane == nullptr) return nullptr;
    }
    if (object->is_closed || object->region == nullptr || object->call != nullptr) Py_RETURN_NONE;
    Py_XDECREF(std::exchange(object->lane, Py_NewRef(capsule)));
    object->region->report_to(lane);
    Py_RETURN_NONE;
}

PyObject* region_number(PyObject* self, void*) { return PyLong_FromUnsignedLongLong(object_of(self)->number); }

// lay_out(mapping, ranks, slot_bytes, generation)
PyObject* lay_out(PyObject*, PyObject* args) {
    Py_buffer view;
    unsigned int ranks = 0;
    unsigned long long slot_bytes = 0, generation = 0;
    if (!PyArg_ParseTuple(args, "w*IKK:lay_out", &view, &ranks, &slot_bytes, &generation)) return nullptr;
    const bool ok = SharedRegion::format(static_cast<unsigned char*>(view.buf), static_cast<size_t>(view.len), ranks,
                                   slot_bytes, generation);
    PyBuffer_Release(&view);
    if (!ok) {
        PyErr_SetString(PyExc_ValueError, "the mapping is too small for this number of ranks and size of slots");
        return nullptr;
    }
    Py_RETURN_NONE;
}

// segment_bytes(ranks, slot_bytes)
PyObject* segment_bytes(PyObject*, PyObject* args) {
    unsigned int ranks = 0;
    unsigned long long slot_bytes = 0;
    if (!PyArg_ParseTuple(args, "IK:segment_bytes", &ranks, &slot_bytes)) return nullptr;
    return PyLong_FromSize_t(region::segment_bytes(ranks, slot_bytes));
}

PyObject* level(PyObject*, PyObject*) { return PyUnicode_FromString(reduce::level()); }

#define METHOD(name, function, flags) \
    {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr}

PyMethodDef methods[] = {
    METHOD("all_reduce", all_reduce, METH_FASTCALL), METHOD("all_reduce_into", all_reduce_into, METH_FASTCALL),
    METHOD("all_gather", all_gather, METH_FASTCALL),
    METHOD("reduce", region_reduce, METH_FASTCALL),   METHOD("barrier", region_barrier, METH_FASTCALL),
    METHOD("broadcast", region_broadcast, METH_FASTCALL), METHOD("move", region_move, METH_FASTCALL),
    METHOD("resume", region_resume, METH_O),   METHOD("leave", region_leave, METH_NOARGS),
    METHOD("keep", region_keep, METH_NOARGS),
    METHOD("refuse", region_refuse, METH_O),   METHOD("catch_up", region_catch_up, METH_NOARGS),
    METHOD("disagreement", disagreement, METH_NOARGS),
    METHOD("missing", missing, METH_NOARGS),   METHOD("last_calls", last_calls, METH_NOARGS),
    METHOD("report_to", region_report_to, METH_O), METHOD("close", region_close, METH_O),
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"number", region_number, nullptr, "Number of calls begun so far.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(region_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(region_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, nullptr},
};

PyType_Spec spec = {"device_comm._core.SharedRegion", sizeof(Object), 0, Py_TPFLAGS_DEFAULT, slots};

PyMethodDef functions[] = {
    METHOD("lay_out", lay_out, METH_VARARGS),
    METHOD("segment_bytes", segment_bytes, METH_VARARGS),
    METHOD("level", level, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_core", "The native core.", -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace region

PyMODINIT_FUNC PyInit__core() {
    PyObject* self = PyModule_Create(&region::module);
    if (self == nullptr) return nullptr;
    PyObject* type = PyType_FromSpec(&region::spec);
    if (type == nullptr || PyModule_AddObjectRef(self, "SharedRegion", type) < 0 || constants_add(self) < 0 || channels_add(self) < 0 ||
        board_add(self) < 0 || tensors_add(self) < 0 || pthread_atfork(nullptr, nullptr, region::count_fork) != 0) {
        Py_XDECREF(type);
        Py_DECREF(self);
        return nullptr;
    }
    Py_DECREF(type);
    return self;
}
