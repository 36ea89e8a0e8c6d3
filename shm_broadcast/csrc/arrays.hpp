// numpy arrays and torch tensors of ordinary dtypes, which the core sends and builds without a Python frame: after a
// sleep, when all caches are cold, the adapters in Python take 15 to 30 us for one array, these 2 to 4.
#pragma once

#include "codec.hpp"

namespace codec {

inline constexpr int kMaxDimensions = 64;  // wire.MAX_DIMENSIONS
inline constexpr Py_ssize_t kMostDtypes = 32;  // of numpy, and of torch; others are left to Python
inline constexpr size_t kMostName = 24;

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

// Each `*_describe` returns whether the object is one that these functions carry. torch's may run code of the application,
// where a function mode is on: it leaves an exception that is no Exception, such as Ctrl-C, and no other.
bool numpy_describe(PyObject* object, Array* array);
bool torch_describe(PyObject* object, Array* array);

// What is known of a dtype; found once for each array, as its name may stand in memory that changes.
struct KnownDtype {
    const void* entry;  // nullptr: left to Python
    size_t itemsize;
};
KnownDtype numpy_dtype(Span name);
KnownDtype torch_dtype(Span name);

// Each `*_build` makes an array of a known dtype, and of a shape that fits the bytes, which are at least one; nullptr with
// an exception. Nothing else uses its memory.
PyObject* numpy_build(const void* entry, const int64_t* shape, int dimensions, ArrayBytes from);
PyObject* torch_build(const void* entry, const int64_t* shape, int dimensions, ArrayBytes from);

// Each adds its functions to the module.
int numpy_add(PyObject* module);
int torch_add(PyObject* module);

}  // namespace codec
