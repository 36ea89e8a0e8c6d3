// The Python object that holds one rank's end of a shared region.
#pragma once

#include <Python.h>

#include "call.hpp"
#include "module.hpp"

namespace fabric {

struct Object {
    PyObject_HEAD
    uint64_t born;  // value of `forks` when it was created
    Py_buffer view;
    bool has_view;
    Fabric* fabric;
    Call* call;  // in progress, or nullptr
    bool is_busy;  // a thread is inside the call
    bool is_closed;
    uint64_t number;  // calls begun so far
};

inline Object* object_of(PyObject* self) { return reinterpret_cast<Object*>(self); }

// What the ranks compare, besides sizes, before they move any data.
inline uint64_t code_of(Kind kind, uint64_t type, uint64_t op, uint64_t root) {
    return static_cast<uint64_t>(kind) | type << 8 | op << 16 | root << 24;
}

// Begins a call and runs it for a first slice. Returns its status; or -1 with an exception set, if no call was begun.
long start(Object* object, Plan&& plan, uint64_t code);

// Whether a new call may begin; if not, `*status` is the status to return.
bool is_idle(const Object* object, long* status);

// Sets the kernel of a plan; returns false with an exception set if there is none.
bool find_kernel(uint64_t type, uint64_t op, bool streaming, Plan* plan);

// Reads `count` unsigned integers; returns false with an exception set on failure.
bool read_unsigned(PyObject* const* args, Py_ssize_t count, uint64_t* values);

// Returns whether a method got as many arguments as it takes; if not, sets an exception.
bool expect(const char* name, Py_ssize_t got, Py_ssize_t wanted);

// The object's methods that are defined outside of core.cpp.
PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* all_reduce_in_place(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* missing(PyObject* self, PyObject*);
PyObject* views(PyObject* self, PyObject*);
PyObject* widths(PyObject* self, PyObject*);

}  // namespace fabric
