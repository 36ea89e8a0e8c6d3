// Send and build numpy arrays and torch tensors of common dtypes without a Python frame. With cold caches, as after a
// sleep, this takes 2 to 4 us for an array; the Python adapters take 15 to 30.
#pragma once

#include "codec.hpp"

namespace codec {

inline constexpr int kMaxDimensions = 64;  // wire.MAX_DIMENSIONS
inline constexpr Py_ssize_t kMostDtypes = 32;  // per library; the Python adapters handle the rest
inline constexpr size_t kMostName = 24;        // bytes of a dtype's name, with its terminating zero

// What is sent of an array. `bytes` views the array's own memory, in C order.
struct Array {
    Span bytes;
    const char* dtype;  // its name in the message
    int dimensions;
    int64_t shape[kMaxDimensions];
};

// Bytes for a new array. With a `window`, which owns them exclusively, the array views them; otherwise they are copied.
struct ArrayBytes {
    Span bytes;
    PyObject* window;
};

// Each `*_describe` fills `array` and returns true if these functions can send the object. torch's runs application code if
// a torch function mode is active; it may return false with a BaseException set, such as KeyboardInterrupt, and clears
// every Exception.
bool numpy_describe(PyObject* object, Array* array);
bool torch_describe(PyObject* object, Array* array);

// A dtype, looked up once for each array, because its name is in memory that a peer may change.
struct KnownDtype {
    const void* entry;  // nullptr: the Python adapter handles it
    size_t itemsize;
};
KnownDtype numpy_dtype(Span name);
KnownDtype torch_dtype(Span name);

// The dtypes of one library that the core handles. `Dtype` has at least `char name[kMostName]` and `PyObject* dtype`.
// Filled once, when the process sends or receives its first array; the references are never released, as the library is
// never unloaded. A plain array: no destructor may run when the process exits.
template <typename Dtype>
struct DtypeTable {
    Dtype entries[kMostDtypes];
    size_t known;

    void fill(const Dtype (&found)[kMostDtypes], size_t count) {
        known = count;
        std::memcpy(entries, found, sizeof entries);
        for (size_t i = 0; i < known; ++i) Py_INCREF(entries[i].dtype);
    }

    template <typename Matches>
    const Dtype* find_if(Matches matches) const {
        for (size_t i = 0; i < known; ++i) {
            if (matches(entries[i])) return &entries[i];
        }
        return nullptr;
    }

    const Dtype* find(Span name) const {
        return find_if([name](const Dtype& each) {
            return std::strlen(each.name) == name.nbytes && std::memcmp(each.name, name.data, name.nbytes) == 0;
        });
    }
};

// Each `*_build` returns a new array that owns its memory exclusively; nullptr with an exception set. The caller has checked
// that the shape fits the bytes, of which there is at least one.
PyObject* numpy_build(const void* entry, const int64_t* shape, int dimensions, ArrayBytes from);
PyObject* torch_build(const void* entry, const int64_t* shape, int dimensions, ArrayBytes from);

// Add the functions to the module; 0 or -1.
int numpy_add(PyObject* module);
int torch_add(PyObject* module);

}  // namespace codec
