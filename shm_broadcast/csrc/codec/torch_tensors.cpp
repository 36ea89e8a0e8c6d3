// Send and build torch tensors through DLPack.
#include <algorithm>

#include "arrays.hpp"
#include "dlpack.hpp"

namespace codec {
namespace {

// A dtype that the core handles.
struct Dtype {
    char name[kMostName];
    PyObject* dtype;
    dlpack::Dtype dl;
};

dlpack::Torch torch;
DtypeTable<Dtype> dtypes;

const Dtype* find(PyObject* dtype) {
    return dtypes.find_if([dtype](const Dtype& each) { return each.dtype == dtype; });
}

// torch_dtypes(Tensor, to_dlpack, from_dlpack, ((name, dtype, capsule of a tensor of that dtype), ...)). No dtype may be
// complex, because DLPack does not tell whether a tensor is conjugated.
PyObject* torch_dtypes(PyObject*, PyObject* args) {
    PyObject *type = nullptr, *exports = nullptr, *imports = nullptr, *rows = nullptr;
    if (!PyArg_ParseTuple(args, "OOOO!:torch_dtypes", &type, &exports, &imports, &PyTuple_Type, &rows)) return nullptr;
    Dtype found[kMostDtypes] = {};
    size_t count = 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(rows) && i < kMostDtypes; ++i) {
        const char* name = nullptr;
        PyObject* capsule = nullptr;
        Dtype& each = found[count];
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, i), "sOO", &name, &each.dtype, &capsule)) return nullptr;
        const dlpack::Managed* managed = dlpack::managed_of(capsule);
        if (managed == nullptr || std::strlen(name) >= kMostName) {
            return PyErr_Format(PyExc_ValueError, "%s: no capsule of DLPack, or too long a name", name);
        }
        if (managed->tensor.dtype.lanes != 1 || managed->tensor.dtype.bits % 8 != 0) continue;
        each.dl = managed->tensor.dtype;
        std::memset(each.name, 0, sizeof each.name);
        std::memcpy(each.name, name, std::strlen(name));
        ++count;
    }
    if (!torch.learn(type, exports, imports)) return nullptr;
    dtypes.fill(found, count);
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"torch_dtypes", torch_dtypes, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

bool facts_of(const dlpack::Tensor& tensor, const Dtype* dtype, Array* array) {
    if (tensor.ndim > kMaxDimensions || !dlpack::is_dense_on_host(tensor)) return false;
    const size_t nbytes = dtype->dl.bits / size_t{8} * dlpack::elements_of(tensor);
    std::copy(tensor.shape, tensor.shape + tensor.ndim, array->shape);
    if (tensor.data == nullptr && nbytes > 0) return false;  // its storage was freed
    array->bytes = {static_cast<const unsigned char*>(tensor.data) + tensor.byte_offset, nbytes};
    array->dtype = dtype->name;
    array->dimensions = tensor.ndim;
    return true;
}

void free_window(dlpack::Managed* managed) {
    if (Py_IsInitialized()) {
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(static_cast<PyObject*>(managed->context));
        PyGILState_Release(state);
    }
    std::free(managed);
}

// Describes a tensor of `from`. Bytes without a window are copied into the block of the description.
dlpack::Managed* make_managed(const ArrayBytes& from, int dimensions) {
    dlpack::Managed* managed = dlpack::make_managed(dimensions, from.window == nullptr ? from.bytes.nbytes : 0);
    if (managed == nullptr) return nullptr;
    if (from.window == nullptr) {
        std::memcpy(managed->tensor.data, from.bytes.data, from.bytes.nbytes);
    } else {
        managed->tensor.data = const_cast<unsigned char*>(from.bytes.data);
        managed->context = Ref::borrowed(from.window).release();
        managed->deleter = free_window;
    }
    return managed;
}

}  // namespace

bool torch_describe(PyObject* object, Array* array) {
    if (!torch.is_tensor(object)) return false;
    Ref type(torch.dtype(object));
    const Dtype* dtype = type ? find(type.get()) : nullptr;
    if (dtype == nullptr) return false;
    Ref capsule(torch.exported(object));
    const dlpack::Managed* managed = capsule ? dlpack::managed_of(capsule.get()) : nullptr;
    return managed != nullptr && facts_of(managed->tensor, dtype, array);
}

KnownDtype torch_dtype(Span name) {
    const Dtype* dtype = dtypes.find(name);
    return {dtype, dtype == nullptr ? size_t{0} : dtype->dl.bits / size_t{8}};
}

PyObject* torch_build(const void* entry, const int64_t* shape, int dimensions, ArrayBytes from) {
    dlpack::Managed* managed = make_managed(from, dimensions);
    if (managed == nullptr) return nullptr;
    managed->tensor.dtype = static_cast<const Dtype*>(entry)->dl;
    std::copy(shape, shape + dimensions, managed->tensor.shape);
    return torch.imported(managed);
}

int torch_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace codec
