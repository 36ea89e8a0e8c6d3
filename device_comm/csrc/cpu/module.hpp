// The functions by which the source files add their parts to the module `device_comm._core`.
#pragma once

#include <Python.h>

int channels_add(PyObject* module);
int tensors_add(PyObject* module);

// The status of a call; equal to the constants of the module.
enum Status : long { kDone = 0, kPending = 1, kDisagree = 2, kClosed = 3, kBusy = 4, kLeft = 5 };

// Adds the names of dtypes, statuses and kinds of calls; returns -1 with an exception set on failure.
int constants_add(PyObject* module);
