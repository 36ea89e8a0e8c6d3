// An owned reference to a Python object, which is released at the end of its scope.
#pragma once

#include <Python.h>

#include <memory>

namespace codec {

struct Release {
    void operator()(PyObject* object) const { Py_DECREF(object); }
};

class Ref : public std::unique_ptr<PyObject, Release> {
public:
    using unique_ptr::unique_ptr;
    static Ref borrowed(PyObject* object) { return Ref(Py_NewRef(object)); }
};

}  // namespace codec
