// Lanes as Python objects.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "lane.hpp"

namespace status {

// Returns a new lane in a place of a page, which `page` keeps alive; nullptr with an exception.
PyObject* new_lane(Written written, uint32_t place, PyObject* page);

// Adds the classes and functions of lanes to the module, and lets a forked child close the lanes of its parent.
int add_lanes(PyObject* module);

}  // namespace status
