// Python functions for the table of channels.
#include <Python.h>

#include "channels.hpp"
#include "module.hpp"

namespace {

using channels::Table;

// The arguments of every function: the mapping, the number of ranks, then up to two ranks.
class Arguments {
public:
    ~Arguments() {
        if (has_view_) PyBuffer_Release(&view_);
    }

    // Reads the mapping, the number of ranks and `given` ranks; returns false with an exception set.
    bool take(const char* name, PyObject* const* args, Py_ssize_t count, Py_ssize_t given) {
        if (count != 2 + given) {
            PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, 2 + given, count);
            return false;
        }
        has_view_ = PyObject_GetBuffer(args[0], &view_, PyBUF_WRITABLE) == 0;
        if (!has_view_ || !read(args[1], channels::kMaxRanks + 1, &ranks_)) return false;
        if (static_cast<size_t>(view_.len) < channels::table_bytes(ranks_)) {
            PyErr_SetString(PyExc_ValueError, "the mapping is too small for this number of ranks");
            return false;
        }
        for (Py_ssize_t i = 0; i < given; ++i) {
            if (!read(args[2 + i], ranks_, &rank[i])) return false;
        }
        return true;
    }

    Table table() { return Table(static_cast<unsigned char*>(view_.buf), ranks_); }

    uint32_t rank[2] = {};

private:
    static bool read(PyObject* object, uint32_t below, uint32_t* value) {
        const unsigned long long number = PyLong_AsUnsignedLongLong(object);
        if (PyErr_Occurred()) return false;
        if (number >= below) {
            PyErr_Format(PyExc_ValueError, "%llu is not below %u", number, below);
            return false;
        }
        *value = static_cast<uint32_t>(number);
        return true;
    }

    Py_buffer view_{};
    bool has_view_ = false;
    uint32_t ranks_ = 0;
};

// channel_table_bytes(ranks)
PyObject* channel_table_bytes(PyObject*, PyObject* object) {
    const unsigned long ranks = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred()) return nullptr;
    return PyLong_FromSize_t(channels::table_bytes(static_cast<uint32_t>(ranks)));
}

// channel_claim(mapping, ranks, from, to) -> previous state; after CHANNEL_NONE the caller must create the channel
PyObject* channel_claim(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments given;
    if (!given.take("channel_claim", args, count, 2)) return nullptr;
    return PyLong_FromLong(given.table().claim(given.rank[0], given.rank[1]));
}

// channel_made(mapping, ranks, from, to): after a claim
PyObject* channel_made(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments given;
    if (!given.take("channel_made", args, count, 2)) return nullptr;
    given.table().settle(given.rank[0], given.rank[1], true);
    Py_RETURN_NONE;
}

// channel_failed(mapping, ranks, from, to): after a claim; the other rank may try again
PyObject* channel_failed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments given;
    if (!given.take("channel_failed", args, count, 2)) return nullptr;
    given.table().settle(given.rank[0], given.rank[1], false);
    Py_RETURN_NONE;
}

// channel_state(mapping, ranks, from, to)
PyObject* channel_state(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments given;
    if (!given.take("channel_state", args, count, 2)) return nullptr;
    return PyLong_FromLong(given.table().state(given.rank[0], given.rank[1]));
}

// channel_leave(mapping, ranks, rank)
PyObject* channel_leave(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments given;
    if (!given.take("channel_leave", args, count, 1)) return nullptr;
    given.table().leave(given.rank[0]);
    Py_RETURN_NONE;
}

// channel_left(mapping, ranks, rank) -> bool
PyObject* channel_left(PyObject*, PyObject* const* args, Py_ssize_t count) {
    Arguments given;
    if (!given.take("channel_left", args, count, 1)) return nullptr;
    return PyBool_FromLong(given.table().has_left(given.rank[0]));
}

#define FAST(name) {#name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(name)), METH_FASTCALL, nullptr}

PyMethodDef functions[] = {
    {"channel_table_bytes", channel_table_bytes, METH_O, nullptr},
    FAST(channel_claim), FAST(channel_made), FAST(channel_failed),
    FAST(channel_state), FAST(channel_leave), FAST(channel_left),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int channels_add(PyObject* module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    if (PyModule_AddIntConstant(module, "CHANNEL_NONE", channels::kNone) < 0) return -1;
    if (PyModule_AddIntConstant(module, "CHANNEL_MAKING", channels::kMaking) < 0) return -1;
    return PyModule_AddIntConstant(module, "CHANNEL_READY", channels::kReady);
}
