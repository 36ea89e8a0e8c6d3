// Access torch tensors through DLPack (dmlc.github.io/dlpack, version 0.8). One call gives dtype, shape and address (0.2 us)
// and one builds a tensor (0.5 us); torch.empty_like takes 0.8 us, torch.frombuffer with view 2 us. With cold caches all of
// them take several times as long.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "ref.hpp"

namespace dlpack {

using codec::Ref;

// The structures of DLPack's ABI.
struct Dtype {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};
struct Tensor {
    void* data;
    int32_t device_type;
    int32_t device_id;
    int32_t ndim;
    Dtype dtype;
    int64_t* shape;
    int64_t* strides;  // nullptr: C order
    uint64_t byte_offset;
};
struct Managed {
    Tensor tensor;
    void* context;
    void (*deleter)(Managed*);
};
inline constexpr int32_t kHost = 1;         // kDLCPU
inline constexpr char kFresh[] = "dltensor";  // name of a capsule that was not consumed yet
inline constexpr size_t kAlignment = 64;

inline Managed* managed_of(PyObject* capsule) {
    void* pointer = PyCapsule_GetPointer(capsule, kFresh);
    if (pointer == nullptr) PyErr_Clear();
    return static_cast<Managed*>(pointer);
}

// Returns whether the elements are in host memory, in C order.
inline bool is_dense_on_host(const Tensor& tensor) {
    if (tensor.device_type != kHost) return false;
    if (tensor.strides == nullptr) return true;
    for (int i = 0; i < tensor.ndim; ++i) {
        if (tensor.shape[i] == 0) return true;
    }
    int64_t step = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != step) return false;
        step *= tensor.shape[i];
    }
    return true;
}

inline size_t elements_of(const Tensor& tensor) {
    size_t count = 1;
    for (int i = 0; i < tensor.ndim; ++i) count *= static_cast<size_t>(tensor.shape[i]);
    return count;
}

// Callers need not hold the GIL.
inline void free_block(Managed* managed) { std::free(managed); }

// Allocates the description of a tensor in host memory, with room for its shape and `bytes` of data in the same block. The
// caller fills in shape and dtype. Returns nullptr with MemoryError set.
inline Managed* make_managed(int dimensions, size_t bytes) {
    void* memory = nullptr;
    const size_t front = sizeof(Managed) + static_cast<size_t>(dimensions) * sizeof(int64_t);
    const size_t head = (front + kAlignment - 1) / kAlignment * kAlignment;
    if (posix_memalign(&memory, kAlignment, head + bytes) != 0) {
        PyErr_NoMemory();
        return nullptr;
    }
    Managed* managed = new (memory) Managed{};
    managed->tensor.data = static_cast<unsigned char*>(memory) + head;
    managed->tensor.device_type = kHost;
    managed->tensor.ndim = dimensions;
    managed->tensor.shape = reinterpret_cast<int64_t*>(managed + 1);
    managed->deleter = free_block;
    return managed;
}

// Destroys the tensor of a capsule that was not consumed.
inline void drop_capsule(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kFresh) == 0) return;
    Managed* managed = managed_of(capsule);
    managed->deleter(managed);
}

// torch's type and functions. The references are never released, as torch is never unloaded.
class Torch {
public:
    // Stores torch.Tensor, to_dlpack and from_dlpack; false with an exception set.
    bool learn(PyObject* type, PyObject* exports, PyObject* imports) {
        is_neg_ = PyUnicode_InternFromString("is_neg");
        dtype_ = PyUnicode_InternFromString("dtype");
        if (is_neg_ == nullptr || dtype_ == nullptr) return false;
        exports_ = Py_NewRef(exports);
        imports_ = Py_NewRef(imports);
        type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
        return true;
    }

    // Exact type only: a subclass may override anything.
    bool is_tensor(PyObject* object) const { return Py_TYPE(object) == type_; }

    // The next two run application code if a torch function mode is active. They return nullptr with a BaseException set,
    // such as KeyboardInterrupt, or with none: every Exception is cleared.

    // Returns the dtype of a tensor. DLPack's own dtype does not suffice: it shows int1 as int8.
    PyObject* dtype(PyObject* tensor) const { return answered(PyObject_GetAttr(tensor, dtype_)); }

    // Returns the capsule of a tensor whose dtype is not complex; nullptr if the Python adapter must handle the tensor: it is
    // sparse, on the meta device, a lazily negated view, ...
    PyObject* exported(PyObject* tensor) const {
        Ref negated(PyObject_CallMethodObjArgs(tensor, is_neg_, nullptr));
        PyObject* capsule = nullptr;
        if (negated && negated.get() == Py_False) capsule = PyObject_CallFunctionObjArgs(exports_, tensor, nullptr);
        return answered(capsule);
    }

    // Returns the tensor that `managed` describes and takes ownership of it; nullptr with an exception set.
    PyObject* imported(Managed* managed) const {
        Ref capsule(PyCapsule_New(managed, kFresh, drop_capsule));
        if (!capsule) {
            managed->deleter(managed);
            return nullptr;
        }
        return PyObject_CallFunctionObjArgs(imports_, capsule.get(), nullptr);
    }

private:
    static PyObject* answered(PyObject* object) {
        if (object == nullptr && PyErr_Occurred() && PyErr_ExceptionMatches(PyExc_Exception)) PyErr_Clear();
        return object;
    }

    PyTypeObject* type_ = nullptr;
    PyObject* exports_ = nullptr;
    PyObject* imports_ = nullptr;
    PyObject* is_neg_ = nullptr;  // interned attribute names
    PyObject* dtype_ = nullptr;
};

}  // namespace dlpack
