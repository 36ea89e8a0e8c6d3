// An owned reference to a Python object, released at the end of its scope.
#pragma once

#include <Python.h>

namespace codec {

class Ref {
public:
    explicit Ref(PyObject* object) : object_(object) {}
    static Ref borrowed(PyObject* object) {
        Py_INCREF(object);
        return Ref(object);
    }
    ~Ref() { Py_XDECREF(object_); }
    Ref(const Ref&) = delete;
    Ref& operator=(const Ref&) = delete;
    PyObject* get() const { return object_; }
    PyObject* release() {
        PyObject* object = object_;
        object_ = nullptr;
        return object;
    }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject* object_;
};

}  // namespace codec
