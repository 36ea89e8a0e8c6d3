// torch's tensors through DLPack (dmlc.github.io/dlpack, version 0.8), which tells dtype, shape and address in one call and
// makes a tensor in one: 0.2 and 0.5 us, where torch.empty_like takes 0.8, torch.frombuffer and view 2, and all of them
// several times that when caches are cold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "ref.hpp"

namespace dlpack {

using codec::Ref;

// The structures of its ABI.
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
inline constexpr char kFresh[] = "dltensor";  // the name of a capsule that nobody has consumed
inline constexpr size_t kAlignment = 64;

inline Managed* managed_of(PyObject* capsule) {
    void* pointer = PyCapsule_GetPointer(capsule, kFresh);
    if (pointer == nullptr) PyErr_Clear();
    return static_cast<Managed*>(pointer);
}

// Whether the elements stand in host memory in C order.
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

// May be called by a thread without the GIL.
inline void free_block(Managed* managed) { std::free(managed); }

// Makes what stands for a tensor in host memory, whose shape and dtype the caller fills in; its shape, and `bytes` for its
// data, stand in the same memory behind it. nullptr with MemoryError.
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

// Frees what nobody has consumed.
inline void drop_capsule(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kFresh) == 0) return;
    Managed* managed = managed_of(capsule);
    managed->deleter(managed);
}

// torch's side. What is learnt is kept for good, as torch is.
class Torch {
public:
    // The type torch.Tensor, and what makes a capsule and what takes one; false with an exception.
    bool learn(PyObject* type, PyObject* exports, PyObject* imports) {
        is_neg_ = PyUnicode_InternFromString("is_neg");
        dtype_ = PyUnicode_InternFromString("dtype");
        if (is_neg_ == nullptr || dtype_ == nullptr) return false;
        exports_ = Py_NewRef(exports);
        imports_ = Py_NewRef(imports);
        type_ = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
        return true;
    }

    // Subclasses do as they please, so that they are no tensors here.
    bool is_tensor(PyObject* object) const { return Py_TYPE(object) == type_; }

    // The next two may run code of the application, where a function mode is on: behind nullptr there is an exception that is
    // no Exception, such as Ctrl-C, or none.

    // The dtype of a tensor. That of DLPack is not the same: it takes int1 for int8.
    PyObject* dtype(PyObject* tensor) const { return answered(PyObject_GetAttr(tensor, dtype_)); }

    // The capsule of a tensor of a dtype that is not complex; nullptr for what has to be left to Python: sparse, on no device,
    // a view that stands for its negative, ...
    PyObject* exported(PyObject* tensor) const {
        Ref negated(PyObject_CallMethodObjArgs(tensor, is_neg_, nullptr));
        PyObject* capsule = nullptr;
        if (negated && negated.get() == Py_False) capsule = PyObject_CallFunctionObjArgs(exports_, tensor, nullptr);
        return answered(capsule);
    }

    // The tensor that `managed` stands for, and which owns it from now on; nullptr with an exception.
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
    PyObject* is_neg_ = nullptr;  // names of what is asked of a tensor
    PyObject* dtype_ = nullptr;
};

}  // namespace dlpack
