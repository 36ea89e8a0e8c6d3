// Send and build numpy arrays through the buffer protocol, which gives format, shape and address in one call.
#include <algorithm>

#include "arrays.hpp"

namespace codec {
namespace {

PyTypeObject* array_type = nullptr;

}  // namespace

DtypeTable numpy_table;

// numpy_dtypes(ndarray, ((format, name, dtype, itemsize), ...))
PyObject* numpy_dtypes(PyObject*, PyObject* args) {
    PyObject *type = nullptr, *rows = nullptr;
    if (!PyArg_ParseTuple(args, "OO!:numpy_dtypes", &type, &PyTuple_Type, &rows)) return nullptr;
    DtypeTable found;
    for (Py_ssize_t i = 0; i < PyTuple_Size(rows); ++i) {
        int format = 0;
        const char* name = nullptr;
        PyObject* dtype = nullptr;
        Py_ssize_t itemsize = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, i), "CsOn", &format, &name, &dtype, &itemsize)) return nullptr;
        if (!found.add(name, dtype, static_cast<size_t>(itemsize), static_cast<uint8_t>(format))) return nullptr;
    }
    numpy_table = found;
    array_type = reinterpret_cast<PyTypeObject*>(Py_NewRef(type));
    Py_RETURN_NONE;
}

bool numpy_describe(PyObject* object, Array* array) {
    if (Py_TYPE(object) != array_type) return false;
    View view;
    if (!view.acquire(object, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS)) {
        PyErr_Clear();  // not contiguous, of a dtype without a format, ...
        return false;
    }
    const Py_buffer& buffer = view.buffer();
    if (buffer.format[0] == 0 || buffer.format[1] != 0 || buffer.ndim > kMaxDimensions) return false;
    const uint8_t format = static_cast<uint8_t>(buffer.format[0]);
    const Dtype* dtype = numpy_table.find_if([format](const Dtype& each) { return each.code == format; });
    if (dtype == nullptr || static_cast<size_t>(buffer.itemsize) != dtype->itemsize) return false;
    array->bytes = {view.data(), view.size()};
    array->dtype = dtype;
    array->dimensions = buffer.ndim;
    std::copy(buffer.shape, buffer.shape + buffer.ndim, array->shape);
    return true;
}

PyObject* numpy_build(const Array& array, PyObject* window) {
    PyObject* const type = reinterpret_cast<PyObject*>(array_type);
    Ref sizes(PyTuple_New(array.dimensions));
    if (!sizes) return nullptr;
    for (int i = 0; i < array.dimensions; ++i) {
        PyObject* size = PyLong_FromLongLong(array.shape[i]);
        if (size == nullptr || PyTuple_SetItem(sizes.get(), i, size) < 0) return nullptr;
    }
    // ndarray(shape, dtype, buffer); without a window the arguments end at the dtype.
    Ref built(PyObject_CallFunctionObjArgs(type, sizes.get(), array.dtype->object, window, nullptr));
    if (!built || window != nullptr) return built.release();
    View view;
    if (!view.acquire(built.get(), PyBUF_WRITABLE)) return nullptr;
    std::memcpy(view.data(), array.bytes.data, array.bytes.nbytes);
    return built.release();
}

}  // namespace codec
