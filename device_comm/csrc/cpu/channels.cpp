// Python functions for the table of channels.
#include "object.hpp"
#include "channels.hpp"

namespace {

using channels::Table;

// Reads a function's arguments by `format`: the mapping, the number of ranks, then up to two ranks and an object. Returns what
// `use` returns for the table and these ranks.
template <typename Use>
PyObject* with_table(PyObject* args, const char* format, Use use, PyObject** object = nullptr) {
    Py_buffer view{};
    unsigned int ranks = 0, from = 0, to = 0;
    if (!PyArg_ParseTuple(args, format, &view, &ranks, &from, &to, object)) return nullptr;
    PyObject* result = nullptr;
    if (ranks > channels::kMaxRanks || static_cast<size_t>(view.len) < channels::table_bytes(ranks)) {
        PyErr_Format(PyExc_ValueError, "the mapping is too small for %u ranks", ranks);
    } else if (from >= ranks || to >= ranks) {
        PyErr_Format(PyExc_ValueError, "ranks %u and %u are not both below %u", from, to, ranks);
    } else {
        result = use(Table(static_cast<unsigned char*>(view.buf), ranks), from, to);
    }
    PyBuffer_Release(&view);
    return result;
}

// channel_table_bytes(ranks)
PyObject* channel_table_bytes(PyObject*, PyObject* object) {
    const unsigned long ranks = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred()) return nullptr;
    return PyLong_FromSize_t(channels::table_bytes(static_cast<uint32_t>(ranks)));
}

// channel_open(mapping, ranks, from, to, make) -> (previous state, result of make() or None). If the previous
// state is CHANNEL_NONE, make() has created the channel. From the claim until it is settled, signal handlers
// run only inside make(). So if a handler raises, either make() raises and the channel is missing again, or
// the channel is ready already.
PyObject* channel_open(PyObject*, PyObject* args) {
    PyObject* make = nullptr;
    return with_table(args, "w*IIIO:channel_open", [&make](Table table, uint32_t from, uint32_t to) -> PyObject* {
        const channels::State found = table.claim(from, to);
        if (found != channels::kNone) return Py_BuildValue("(iO)", found, Py_None);
        PyObject* made = PyObject_CallNoArgs(make);
        table.settle(from, to, made != nullptr);
        return made == nullptr ? nullptr : Py_BuildValue("(iN)", found, made);
    }, &make);
}

// channel_state(mapping, ranks, from, to)
PyObject* channel_state(PyObject*, PyObject* args) {
    return with_table(args, "w*III:channel_state", [](Table table, uint32_t from, uint32_t to) {
        return PyLong_FromLong(table.state(from, to));
    });
}

// channel_leave(mapping, ranks, rank)
PyObject* channel_leave(PyObject*, PyObject* args) {
    return with_table(args, "w*II:channel_leave", [](Table table, uint32_t rank, uint32_t) {
        table.leave(rank);
        return Py_NewRef(Py_None);
    });
}

// channel_left(mapping, ranks, rank) -> bool
PyObject* channel_left(PyObject*, PyObject* args) {
    return with_table(args, "w*II:channel_left", [](Table table, uint32_t rank, uint32_t) {
        return PyBool_FromLong(table.has_left(rank));
    });
}

PyMethodDef functions[] = {
    {"channel_table_bytes", channel_table_bytes, METH_O, nullptr},
    {"channel_open", channel_open, METH_VARARGS, nullptr},
    {"channel_state", channel_state, METH_VARARGS, nullptr},
    {"channel_leave", channel_leave, METH_VARARGS, nullptr},
    {"channel_left", channel_left, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int channels_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }
