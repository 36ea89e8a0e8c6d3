// Queries about a call that is in progress or was refused.
#include "object.hpp"

namespace fabric {
namespace {

PyObject* tuple_of(const uint64_t* values, uint32_t count) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (uint32_t i = 0; tuple != nullptr && i < count; ++i) {
        PyObject* value = PyLong_FromUnsignedLongLong(values[i]);
        if (value == nullptr || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

}  // namespace

// widths() -> for each rank (sent, received) if its current call is an exchange in its first step, else None
PyObject* widths(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    PyObject* list = PyList_New(0);
    if (list == nullptr || object->is_closed) return list;
    Fabric& shared = *object->fabric;
    for (uint32_t r = 0; r < shared.ranks(); ++r) {
        const bool is_exchange = (shared.posted(r).view.code & 0xFF) == static_cast<uint64_t>(Kind::kAllToAll);
        const auto* table = reinterpret_cast<const uint64_t*>(shared.slot(r) + table_offset(shared));
        PyObject* entry = is_exchange ? Py_BuildValue("(NN)", tuple_of(table, shared.ranks()),
                                                      tuple_of(table + shared.ranks(), shared.ranks()))
                                      : Py_NewRef(Py_None);
        const bool ok = entry != nullptr && PyList_Append(list, entry) == 0;
        Py_XDECREF(entry);
        if (!ok) {
            Py_DECREF(list);
            return nullptr;
        }
    }
    return list;
}

// missing() -> ranks that have not posted the current step
PyObject* missing(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    PyObject* list = PyList_New(0);
    if (list == nullptr || object->is_closed) return list;
    for (uint32_t r = 0; r < object->fabric->ranks(); ++r) {
        if (object->fabric->has_posted(r)) continue;
        PyObject* rank = PyLong_FromUnsignedLong(r);
        if (rank == nullptr || PyList_Append(list, rank) < 0) {
            Py_XDECREF(rank);
            Py_DECREF(list);
            return nullptr;
        }
        Py_DECREF(rank);
    }
    return list;
}

// views() -> for each rank (number, code, count, detail) of its current call
PyObject* views(PyObject* self, PyObject*) {
    Object* object = object_of(self);
    PyObject* list = PyList_New(0);
    if (list == nullptr || object->is_closed) return list;
    for (uint32_t r = 0; r < object->fabric->ranks(); ++r) {
        const View view = object->fabric->posted(r).view;
        PyObject* entry = Py_BuildValue("(KKKK)", static_cast<unsigned long long>(view.number),
                                        static_cast<unsigned long long>(view.code),
                                        static_cast<unsigned long long>(view.count),
                                        static_cast<unsigned long long>(view.detail));
        if (entry == nullptr || PyList_Append(list, entry) < 0) {
            Py_XDECREF(entry);
            Py_DECREF(list);
            return nullptr;
        }
        Py_DECREF(entry);
    }
    return list;
}

}  // namespace fabric
