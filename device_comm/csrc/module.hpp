// What the files of the module `device_comm._core` add to it.
#pragma once

#include <Python.h>

int channels_add(PyObject* module);
int tensors_add(PyObject* module);

// How a call stands; equal to the constants of the module.
enum Status : long { kDone = 0, kPending = 1, kDisagree = 2, kClosed = 3, kBusy = 4, kLeft = 5 };

// Adds the names of dtypes, statuses and kinds of calls; -1 with an error set if it cannot.
int constants_add(PyObject* module);
