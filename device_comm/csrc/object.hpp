// The Python object that holds one rank's end of a fabric.
#pragma once

#include <Python.h>

#include "call.hpp"
#include "module.hpp"

namespace fabric {

struct Object {
    PyObject_HEAD
    uint64_t born;  // forks before it was made
    Py_buffer view;
    bool has_view;
    Fabric* fabric;
    Call* call;  // that is under way
    bool is_busy;  // a thread is in it
    bool is_closed;
    uint64_t number;  // of calls so far
};

inline Object* object_of(PyObject* self) { return reinterpret_cast<Object*>(self); }

// What both ends compare before they move anything, besides sizes.
inline uint64_t code_of(Kind kind, uint64_t type, uint64_t op, uint64_t root) {
    return static_cast<uint64_t>(kind) | type << 8 | op << 16 | root << 24;
}

// Begins a call and goes on with it for a first slice. Returns its status, or -1 with an exception: then nothing was begun.
long start(Object* object, Plan&& plan, uint64_t code);

// Whether a new call may begin; if not, the status to return.
bool is_idle(const Object* object, long* status);

// Sets the kernel of a plan, or raises.
bool find_kernel(uint64_t type, uint64_t op, bool streaming, Plan* plan);

// Reads `count` unsigned integers, or raises.
bool read_unsigned(PyObject* const* args, Py_ssize_t count, uint64_t* values);

// Raises unless a method got as many arguments as it takes.
bool expect(const char* name, Py_ssize_t got, Py_ssize_t wanted);

// The methods of the object that are elsewhere than in core.cpp.
PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* all_reduce_in_place(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* missing(PyObject* self, PyObject*);
PyObject* views(PyObject* self, PyObject*);
PyObject* widths(PyObject* self, PyObject*);

}  // namespace fabric
