// Lanes as Python objects.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "lane.hpp"

// An entry of a table of methods, whatever the arguments of the function are.
#define METHOD(name, function, flags) \
    {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), flags, nullptr}

namespace status {

// Returns a new lane in a place of a page, which `page` keeps alive; nullptr with an exception.
PyObject* new_lane(Written written, uint32_t place, PyObject* page);

// Adds the classes and functions of lanes to the module, and lets a forked child close the lanes of its parent.
int add_lanes(PyObject* module);

}  // namespace status
