// Queries about a call that is in progress or was refused.
#include "object.hpp"

namespace region {
namespace {

PyObject* tuple_of(const uint64_t* values, uint32_t count) {
    PyObject* tuple = PyTuple_New(static_cast<Py_ssize_t>(count));
    for (uint32_t i = 0; tuple != nullptr && i < count; ++i) {
        PyObject* value = PyLong_FromUnsignedLongLong(values[i]);
        if (value == nullptr || PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(i), value) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

// Returns a list of what `entry` returns for each rank, without the ranks for which it returns null and sets no exception.
// The list is empty if the region is closed.
template <typename Entry>
PyObject* list_of(PyObject* self, Entry entry) {
    Object* object = object_of(self);
    Ref list(PyList_New(0));
    if (!list || object->is_closed) return list.release();
    for (uint32_t r = 0; r < object->region->ranks(); ++r) {
        const Ref item(entry(*object->region, r));
        if (!item && PyErr_Occurred() == nullptr) continue;
        if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    return list.release();
}

}  // namespace

// widths() -> for each rank (sent, received) if its current call is an exchange in its first step, else None
PyObject* widths(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        const uint32_t ranks = shared.ranks();
        const bool is_exchange = (shared.posted(r).view.code & 0xFF) == static_cast<uint64_t>(Kind::kAllToAll);
        const auto* table = reinterpret_cast<const uint64_t*>(shared.slot(r) + table_offset(shared));
        return is_exchange ? Py_BuildValue("(NN)", tuple_of(table, ranks), tuple_of(table + ranks, ranks))
                           : Py_NewRef(Py_None);
    });
}

// missing() -> ranks that have not posted the current step
PyObject* missing(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        return shared.has_posted(r) ? nullptr : PyLong_FromUnsignedLong(r);
    });
}

// reasons() -> for each rank why it refused its current call, or b""
PyObject* reasons(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        const std::string reason = shared.reason(r);
        return PyBytes_FromStringAndSize(reason.data(), static_cast<Py_ssize_t>(reason.size()));
    });
}

// last_calls() -> for each rank (number, kind) of the last call in which it has posted a step, or None
PyObject* last_calls(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        const View* view = shared.last_view(r);
        if (view == nullptr) return Py_NewRef(Py_None);
        return Py_BuildValue("(KI)", static_cast<unsigned long long>(view->number), static_cast<unsigned>(view->code & 0xFF));
    });
}

// views() -> for each rank (number, code, count, detail) of its current call
PyObject* views(PyObject* self, PyObject*) {
    return list_of(self, [](SharedRegion& shared, uint32_t r) {
        const View& view = shared.posted(r).view;
        const uint64_t numbers[] = {view.number, view.code, view.count, view.detail};
        return tuple_of(numbers, 4);
    });
}

}  // namespace region
