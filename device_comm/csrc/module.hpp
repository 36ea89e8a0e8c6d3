// What the files of the module `device_comm._core` add to it.
#pragma once

#include <Python.h>

int channels_add(PyObject* module);
