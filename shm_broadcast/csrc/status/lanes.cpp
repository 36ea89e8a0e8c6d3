// The lanes of the status page in Python: what shows the calls of a plane, and its waits.
#include "lanes.hpp"

#include <pthread.h>

#include <new>
#include <vector>

#include "../codec/ref.hpp"

namespace status {
namespace {

using codec::Ref;

struct LaneObject {
    PyObject_HEAD
    Lane* lane;
    PyObject* page;
};

LaneObject* lane_of(PyObject* self) { return reinterpret_cast<LaneObject*>(self); }

// All lanes of this process; a forked child closes them.
std::vector<Lane*>& lanes() {
    static auto* all = new std::vector<Lane*>();
    return *all;
}

void close_inherited() {
    for (Lane* lane : lanes()) lane->close();
}

void lane_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    LaneObject* object = lane_of(self);
    std::erase(lanes(), object->lane);
    delete object->lane;
    Py_XDECREF(object->page);
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Reads `count` arguments, which are numbers; returns whether all of them fit.
bool numbers(PyObject* const* args, Py_ssize_t count, uint64_t* to) {
    for (Py_ssize_t i = 0; i < count; ++i) {
        to[i] = PyLong_AsUnsignedLongLong(args[i]);
        if (to[i] == static_cast<uint64_t>(-1) && PyErr_Occurred()) return false;
    }
    return true;
}

// lane.begin(kind, number, nbytes, peer)
PyObject* lane_begin(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    uint64_t v[4];
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "begin takes 4 arguments, got %zd", count);
        return nullptr;
    }
    if (!numbers(args, 4, v)) return nullptr;
    Call call;
    call.kind = static_cast<uint8_t>(v[0] % kKinds);
    call.number = v[1];
    call.count = call.nbytes = v[2];
    call.root = static_cast<uint32_t>(v[3]);
    lane_of(self)->lane->begin(call, ticks());
    Py_RETURN_NONE;
}

// lane.set_state(state)
PyObject* lane_set_state(PyObject* self, PyObject* state) {
    const long value = PyLong_AsLong(state);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    lane_of(self)->lane->set_state(static_cast<State>(value & 3));
    Py_RETURN_NONE;
}

// lane.end(outcome)
PyObject* lane_end(PyObject* self, PyObject* outcome) {
    const long value = PyLong_AsLong(outcome);
    if (value == -1 && PyErr_Occurred()) return nullptr;
    End end;
    end.outcome = static_cast<Outcome>(value);
    lane_of(self)->lane->end(end, ticks());
    Py_RETURN_NONE;
}

// lane.asleep(wait, call, work, timeout_s): calls the first with the others, and shows meanwhile that the lane's call sleeps.
PyObject* lane_asleep(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    if (count != 4) {
        PyErr_Format(PyExc_TypeError, "asleep takes 4 arguments, got %zd", count);
        return nullptr;
    }
    Lane& lane = *lane_of(self)->lane;
    lane.set_state(State::kAsleep);
    PyObject* result = PyObject_CallFunctionObjArgs(args[0], args[1], args[2], args[3], nullptr);
    lane.set_state(State::kComputing);
    return result;
}

// lane.close()
PyObject* lane_close(PyObject* self, PyObject*) {
    lane_of(self)->lane->close();
    Py_RETURN_NONE;
}

void forget(PyObject* capsule) {
    auto* owner = static_cast<PyObject*>(PyCapsule_GetContext(capsule));
    Py_XDECREF(owner);
}

// lane.capsule() -> the lane for another native module, as long as that keeps the capsule
PyObject* lane_capsule(PyObject* self, PyObject*) {
    PyObject* capsule = PyCapsule_New(lane_of(self)->lane, kCapsule, forget);
    if (capsule == nullptr) return nullptr;
    if (PyCapsule_SetContext(capsule, Py_NewRef(self)) < 0) {
        Py_DECREF(self);
        Py_DECREF(capsule);
        return nullptr;
    }
    return capsule;
}

PyMethodDef lane_methods[] = {
    METHOD("begin", lane_begin, METH_FASTCALL),   METHOD("set_state", lane_set_state, METH_O),
    METHOD("asleep", lane_asleep, METH_FASTCALL), METHOD("end", lane_end, METH_O),
    METHOD("close", lane_close, METH_NOARGS),     METHOD("capsule", lane_capsule, METH_NOARGS),
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot lane_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(lane_dealloc)},
    {Py_tp_methods, lane_methods},
    {0, nullptr},
};

PyType_Spec lane_spec = {"shm_broadcast._core.StatusLane", sizeof(LaneObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, lane_slots};

PyTypeObject* lane_type = nullptr;

// status_nowhere() -> a lane that is shown to nobody
PyObject* status_nowhere(PyObject*, PyObject*) {
    PyObject* made = reinterpret_cast<allocfunc>(PyType_GetSlot(lane_type, Py_tp_alloc))(lane_type, 0);
    if (made == nullptr) return nullptr;
    lane_of(made)->lane = new (std::nothrow) Lane(Written{&nowhere, 0}, 0);
    if (lane_of(made)->lane != nullptr) return made;
    Py_DECREF(made);
    return PyErr_NoMemory();
}

// The lanes in which one plane of a group shows waits that several threads may be in at once.
struct Waits {
    PyObject* make;                  // returns a new lane
    PyObject* places;                // the place in the group of each global rank of it
    std::vector<LaneObject*> lanes;  // each made when all others were taken
    std::vector<LaneObject*> idle;   // has room for all of `lanes`
};

struct WaitsObject {
    PyObject_HEAD
    Waits* waits;
};

Waits& waits_of(PyObject* self) { return *reinterpret_cast<WaitsObject*>(self)->waits; }

// StatusWaits(make, places)
PyObject* waits_new(PyTypeObject* type, PyObject* args, PyObject*) {
    PyObject *make = nullptr, *places = nullptr;
    if (!PyArg_ParseTuple(args, "OO!:StatusWaits", &make, &PyDict_Type, &places)) return nullptr;
    PyObject* self = reinterpret_cast<allocfunc>(PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == nullptr) return nullptr;
    auto* waits = new (std::nothrow) Waits{make, places, {}, {}};
    reinterpret_cast<WaitsObject*>(self)->waits = waits;
    if (waits == nullptr) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    Py_INCREF(make);
    Py_INCREF(places);
    return self;
}

void waits_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    if (Waits* waits = reinterpret_cast<WaitsObject*>(self)->waits) {
        for (LaneObject* lane : waits->lanes) Py_DECREF(lane);
        Py_DECREF(waits->make);
        Py_DECREF(waits->places);
        delete waits;
    }
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

// Returns a lane that no wait is shown in, which belongs to the caller until it is in `idle` again; nullptr with an exception.
LaneObject* taken(Waits& waits) {
    if (waits.idle.empty()) {
        PyObject* made = PyObject_CallNoArgs(waits.make);
        if (made == nullptr) return nullptr;
        if (Py_TYPE(made) != lane_type) {
            Py_DECREF(made);
            PyErr_SetString(PyExc_TypeError, "what makes lanes has made something else");
            return nullptr;
        }
        try {
            waits.idle.reserve(waits.lanes.size() + 1);
            waits.lanes.push_back(lane_of(made));
        } catch (const std::bad_alloc&) {
            Py_DECREF(made);
            PyErr_NoMemory();
            return nullptr;
        }
        return lane_of(made);
    }
    LaneObject* lane = waits.idle.back();
    waits.idle.pop_back();
    return lane;
}

// Sets `place` to that of the first of these global ranks, which may be None; returns whether there was no exception.
bool find_place(const Waits& waits, PyObject* ranks, uint64_t& place) {
    place = kNobody;
    if (ranks == Py_None) return true;
    const Py_ssize_t size = PySequence_Size(ranks);
    if (size <= 0) return size == 0;
    const Ref first(PySequence_GetItem(ranks, 0));
    if (first == nullptr) return false;
    PyObject* found = PyDict_GetItemWithError(waits.places, first.get());
    return found != nullptr ? numbers(&found, 1, &place) : PyErr_Occurred() == nullptr;
}

// waits.show(kind, number, ranks, wait, call, work, timeout_s): calls the fourth with the others behind it, and shows meanwhile
// that this rank waits for the first of the global `ranks`.
PyObject* waits_show(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    uint64_t v[2], place = 0;
    if (count != 7) {
        PyErr_Format(PyExc_TypeError, "show takes 7 arguments, got %zd", count);
        return nullptr;
    }
    if (!numbers(args, 2, v) || !find_place(waits_of(self), args[2], place)) return nullptr;
    LaneObject* object = taken(waits_of(self));
    if (object == nullptr) return nullptr;
    Call call;
    call.kind = static_cast<uint8_t>(v[0] % kKinds);
    call.number = v[1];
    call.root = static_cast<uint32_t>(place);
    object->lane->begin(call, ticks(), State::kAsleep);
    PyObject* result = PyObject_CallFunctionObjArgs(args[3], args[4], args[5], args[6], nullptr);
    End end;
    end.outcome = result != nullptr ? Outcome::kDone : Outcome::kFailed;
    object->lane->end(end, ticks());
    waits_of(self).idle.push_back(object);
    return result;
}

PyMethodDef waits_methods[] = {METHOD("show", waits_show, METH_FASTCALL), {nullptr, nullptr, 0, nullptr}};

PyType_Slot waits_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(waits_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(waits_dealloc)},
    {Py_tp_methods, waits_methods},
    {0, nullptr},
};

PyType_Spec waits_spec = {"shm_broadcast._core.StatusWaits", sizeof(WaitsObject), 0, Py_TPFLAGS_DEFAULT, waits_slots};

PyMethodDef functions[] = {METHOD("status_nowhere", status_nowhere, METH_NOARGS), {nullptr, nullptr, 0, nullptr}};

}  // namespace

PyObject* new_lane(Written written, uint32_t place, PyObject* page) {
    PyObject* made = reinterpret_cast<allocfunc>(PyType_GetSlot(lane_type, Py_tp_alloc))(lane_type, 0);
    if (made == nullptr) return nullptr;
    try {
        lane_of(made)->lane = new Lane(written, place);
        lanes().push_back(lane_of(made)->lane);
    } catch (const std::bad_alloc&) {
        Py_DECREF(made);
        return PyErr_NoMemory();
    }
    lane_of(made)->page = Py_NewRef(page);
    return made;
}

int add_lanes(PyObject* module) {
    Ref lane(PyType_FromSpec(&lane_spec)), waits(PyType_FromSpec(&waits_spec));
    if (lane == nullptr || waits == nullptr) return -1;
    if (PyModule_AddObjectRef(module, "StatusLane", lane.get()) < 0) return -1;
    if (PyModule_AddObjectRef(module, "StatusWaits", waits.get()) < 0) return -1;
    lane_type = reinterpret_cast<PyTypeObject*>(lane.release());
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    return pthread_atfork(nullptr, nullptr, close_inherited);
}

}  // namespace status
