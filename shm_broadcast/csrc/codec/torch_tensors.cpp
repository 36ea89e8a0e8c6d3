// Send and build torch tensors through DLPack.
#include <algorithm>

#include "arrays.hpp"
#include "dlpack.hpp"

namespace codec {

DtypeTable torch_table;

namespace {

dlpack::Torch torch;

void free_window(dlpack::Managed* managed) {
    if (Py_IsInitialized()) {
        const PyGILState_STATE state = PyGILState_Ensure();
        Py_DECREF(static_cast<PyObject*>(managed->context));
        PyGILState_Release(state);
    }
    std::free(managed);
}

}  // namespace

// torch_dtypes(Tensor, to_dlpack, from_dlpack, ((name, dtype, capsule of a tensor of that dtype), ...)). No dtype may be
// complex, because DLPack does not tell whether a tensor is conjugated.
PyObject* torch_dtypes(PyObject*, PyObject* args) {
    PyObject *type = nullptr, *exports = nullptr, *imports = nullptr, *rows = nullptr;
    if (!PyArg_ParseTuple(args, "OOOO!:torch_dtypes", &type, &exports, &imports, &PyTuple_Type, &rows)) return nullptr;
    DtypeTable found;
    for (Py_ssize_t i = 0; i < PyTuple_Size(rows); ++i) {
        const char* name = nullptr;
        PyObject *dtype = nullptr, *capsule = nullptr;
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, i), "sOO", &name, &dtype, &capsule)) return nullptr;
        const dlpack::Managed* managed = dlpack::managed_of(capsule);
        if (managed == nullptr) return PyErr_Format(PyExc_ValueError, "%s: this is not a DLPack capsule", name);
        const dlpack::Dtype dl = managed->tensor.dtype;
        if (dl.lanes != 1 || dl.bits % 8 != 0) continue;
        if (!found.add(name, dtype, dl.bits / size_t{8}, dl.code)) return nullptr;
    }
    if (!torch.learn(type, exports, imports)) return nullptr;
    torch_table = found;
    Py_RETURN_NONE;
}

bool torch_describe(PyObject* object, Array* array) {
    if (!torch.is_tensor(object)) return false;
    Ref type(torch.dtype(object));
    if (!type) return false;
    const Dtype* dtype = torch_table.find_if([&type](const Dtype& each) { return each.object == type.get(); });
    if (dtype == nullptr) return false;
    Ref capsule(torch.exported(object));
    const dlpack::Managed* managed = capsule ? dlpack::managed_of(capsule.get()) : nullptr;
    if (managed == nullptr) return false;
    const dlpack::Tensor& tensor = managed->tensor;
    if (tensor.ndim > kMaxDimensions || !dlpack::is_dense_on_host(tensor)) return false;
    const size_t nbytes = dtype->itemsize * dlpack::elements_of(tensor);
    if (tensor.data == nullptr && nbytes > 0) return false;  // its storage was freed
    std::copy(tensor.shape, tensor.shape + tensor.ndim, array->shape);
    array->bytes = {static_cast<const unsigned char*>(tensor.data) + tensor.byte_offset, nbytes};
    array->dtype = dtype;
    array->dimensions = tensor.ndim;
    return true;
}

PyObject* torch_build(const Array& array, PyObject* window) {
    // Bytes without a window are copied into the block of the description.
    dlpack::Managed* managed = dlpack::make_managed(array.dimensions, window == nullptr ? array.bytes.nbytes : 0);
    if (managed == nullptr) return nullptr;
    dlpack::Tensor& tensor = managed->tensor;
    if (window == nullptr) {
        std::memcpy(tensor.data, array.bytes.data, array.bytes.nbytes);
    } else {
        tensor.data = const_cast<unsigned char*>(array.bytes.data);
        managed->context = Py_NewRef(window);
        managed->deleter = free_window;
    }
    tensor.dtype = {array.dtype->code, static_cast<uint8_t>(8 * array.dtype->itemsize), 1};
    std::copy(array.shape, array.shape + array.dimensions, tensor.shape);
    return torch.imported(managed);
}

}  // namespace codec
