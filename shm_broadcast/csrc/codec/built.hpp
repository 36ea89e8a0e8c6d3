// What a decoder keeps of a frame that may be decoded again.
#pragma once

#include <Python.h>

#include <new>
#include <vector>

#include "ref.hpp"

namespace codec {

// The objects of registered classes in a frame that may be decoded again, in order. Each is built once: its function may have changed
// the buffers, which are the object's own memory, and would change them twice.
class Built {
public:
    // Begins another try.
    void rewind() { at_ = 0; }
    // Returns the next object if an earlier try has built it, else nullptr without an exception.
    PyObject* next() { return at_ < objects_.size() ? Py_NewRef(objects_[at_++].get()) : nullptr; }
    // Adds the next object. Returns false with an exception set.
    bool add(PyObject* object) {
        try {
            objects_.push_back(Ref::borrowed(object));
        } catch (const std::bad_alloc&) {
            return PyErr_NoMemory() != nullptr;
        }
        ++at_;
        return true;
    }
    int traverse(visitproc visit, void* arg) const {
        for (const Ref& each : objects_) Py_VISIT(each.get());
        return 0;
    }

private:
    std::vector<Ref> objects_;
    size_t at_ = 0;
};

}  // namespace codec
