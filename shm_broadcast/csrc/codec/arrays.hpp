// Send and build numpy arrays and torch tensors of common dtypes without a Python frame. With cold caches, as after a
// sleep, this takes 2 to 4 us for an array; the Python adapters take 15 to 30.
#pragma once

#include "codec.hpp"

namespace codec {

inline constexpr int kMaxDimensions = 64;  // wire_format.MAX_DIMENSIONS
inline constexpr size_t kMostDtypes = 32;  // per library; the Python adapters handle the rest
inline constexpr size_t kMostName = 24;    // bytes of a dtype's name, with its terminating zero

// A dtype that the core handles.
struct Dtype {
    PyObject* object;
    size_t itemsize;
    uint8_t code;  // numpy: its format letter in the buffer protocol; torch: its type code in DLPack
    char name[kMostName];
};

// The dtypes of one library that the core handles. Filled when the process sends or receives its first array; the
// references are never released, because the library is never unloaded. No destructor may run when the process exits.
class DtypeTable {
public:
    // Adds a dtype unless the table is full; returns false with an exception set.
    bool add(const char* name, PyObject* object, size_t itemsize, uint8_t code) {
        if (std::strlen(name) >= kMostName) return set_error(PyExc_ValueError, "the name %s is too long", name);
        if (known_ == kMostDtypes) return true;
        Dtype& dtype = entries_[known_++];
        dtype = {Py_NewRef(object), itemsize, code, {}};
        std::memcpy(dtype.name, name, std::strlen(name));
        return true;
    }

    // Returns the first dtype that matches; nullptr if the Python adapter must handle it.
    template <typename Matches>
    const Dtype* find_if(Matches matches) const {
        for (size_t i = 0; i < known_; ++i) {
            if (matches(entries_[i])) return &entries_[i];
        }
        return nullptr;
    }

    // Call this once for each array: the name may be in memory that a peer can change.
    const Dtype* find(Span name) const {
        return find_if([name](const Dtype& each) {
            return std::strlen(each.name) == name.nbytes && std::memcmp(each.name, name.data, name.nbytes) == 0;
        });
    }

private:
    Dtype entries_[kMostDtypes]{};
    size_t known_ = 0;
};

extern DtypeTable numpy_table, torch_table;

// What is sent of an array: its bytes in C order.
struct Array {
    Span bytes;
    const Dtype* dtype;
    int dimensions;
    int64_t shape[kMaxDimensions];
};

// Each `*_describe` fills `array`, which then views the object's memory, and returns true if these functions can send the
// object. `torch_describe` runs application code if a torch function mode is active. It clears every Exception, but may
// return false with another BaseException set, such as KeyboardInterrupt.
bool numpy_describe(PyObject* object, Array* array);
bool torch_describe(PyObject* object, Array* array);

// Each `*_build` returns a new array that owns its memory exclusively; nullptr with an exception set. With a `window`, which
// owns the bytes exclusively, the new array views them; without one, it copies them. The caller has checked that the shape
// fits the bytes, of which there is at least one.
PyObject* numpy_build(const Array& array, PyObject* window);
PyObject* torch_build(const Array& array, PyObject* window);

// The functions that fill the tables; `_core.pyi` describes them.
PyObject* numpy_dtypes(PyObject*, PyObject* args);
PyObject* torch_dtypes(PyObject*, PyObject* args);

}  // namespace codec
