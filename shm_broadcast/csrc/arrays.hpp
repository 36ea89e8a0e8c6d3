// numpy arrays and torch tensors of ordinary dtypes, which the core sends and builds without a Python frame: after a
// sleep, when all caches are cold, the adapters in Python take 15 to 30 us for one array, these 2 to 4.
#pragma once

#include "codec.hpp"

namespace codec {

inline constexpr int kMaxDimensions = 64;  // wire.MAX_DIMENSIONS

// What of an array travels. The bytes are those of the array itself, in C order.
struct Array {
    Span bytes;
    const char* dtype;  // the name that travels
    int dimensions;
    int64_t shape[kMaxDimensions];
};

// Bytes for a new array. `window`, if there is one, owns them and nothing else uses them; else they are copied.
struct ArrayBytes {
    Span bytes;
    PyObject* window;
};

// Each `*_describe` returns whether the object is one that these functions carry, and never leaves an exception.
bool numpy_describe(PyObject* object, Array* array);
bool torch_describe(PyObject* object, Array* array);

// Each `*_itemsize` returns the bytes of an element of the dtype of this name; 0: left to Python.
size_t numpy_itemsize(Span name);
size_t torch_itemsize(Span name);

// Each `*_build` makes an array of a dtype whose itemsize is known, and of a shape that fits the bytes, which are at
// least one; nullptr with an exception.
PyObject* numpy_build(Span name, const int64_t* shape, int dimensions, ArrayBytes from);
PyObject* torch_build(Span name, const int64_t* shape, int dimensions, ArrayBytes from);

// Each adds its functions to the module.
int numpy_add(PyObject* module);
int torch_add(PyObject* module);

}  // namespace codec
