// numpy's arrays through the buffer protocol, which tells format, shape and address in one call.
#include <string>
#include <vector>

#include "arrays.hpp"
#include "blocks.hpp"

namespace codec {
namespace {

// One dtype that travels by its name.
struct Dtype {
    char format;  // of the buffer protocol, native
    std::string name;
    PyObject* dtype;
    size_t itemsize;
};

// Filled once, when the first array of this process is sent or received.
PyTypeObject* array_type = nullptr;
std::vector<Dtype> dtypes;

const Dtype* find(char format) {
    for (const Dtype& each : dtypes) {
        if (each.format == format) return &each;
    }
    return nullptr;
}

const Dtype* find(Span name) {
    for (const Dtype& each : dtypes) {
        if (each.name.size() == name.nbytes && std::memcmp(each.name.data(), name.data, name.nbytes) == 0) return &each;
    }
    return nullptr;
}

// numpy_dtypes(ndarray, ((format, name, dtype, itemsize), ...))
PyObject* numpy_dtypes(PyObject*, PyObject* args) {
    PyObject *type = nullptr, *rows = nullptr;
    if (!PyArg_ParseTuple(args, "OO!:numpy_dtypes", &type, &PyTuple_Type, &rows)) return nullptr;
    std::vector<Dtype> found;
    for (Py_ssize_t i = 0; i < PyTuple_Size(rows); ++i) {
        int format = 0;
        const char* name = nullptr;
        PyObject* dtype = nullptr;
        Py_ssize_t itemsize = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, i), "CsOn", &format, &name, &dtype, &itemsize)) return nullptr;
        found.push_back({static_cast<char>(format), name, dtype, static_cast<size_t>(itemsize)});
    }
    // Kept for good, as numpy is.
    for (const Dtype& each : found) Py_INCREF(each.dtype);
    Py_INCREF(type);
    dtypes = found;
    array_type = reinterpret_cast<PyTypeObject*>(type);
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"numpy_dtypes", numpy_dtypes, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool numpy_describe(PyObject* object, Array* array) {
    if (Py_TYPE(object) != array_type) return false;
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_FORMAT | PyBUF_C_CONTIGUOUS) != 0) {
        PyErr_Clear();  // strided, of another byte order, of a dtype that has no format, ...
        return false;
    }
    const Dtype* dtype = view.format[0] != 0 && view.format[1] == 0 ? find(view.format[0]) : nullptr;
    const bool ok = dtype != nullptr && static_cast<size_t>(view.itemsize) == dtype->itemsize && view.ndim <= kMaxDimensions;
    if (ok) {
        array->bytes = {static_cast<const unsigned char*>(view.buf), static_cast<size_t>(view.len)};
        array->dtype = dtype->name.c_str();
        array->dimensions = view.ndim;
        for (int i = 0; i < view.ndim; ++i) array->shape[i] = view.shape[i];
    }
    PyBuffer_Release(&view);
    return ok;
}

size_t numpy_itemsize(Span name) {
    const Dtype* dtype = find(name);
    return dtype == nullptr ? 0 : dtype->itemsize;
}

PyObject* numpy_build(Span name, const int64_t* shape, int dimensions, ArrayBytes from) {
    Ref sizes(PyTuple_New(dimensions));
    if (!sizes) return nullptr;
    for (int i = 0; i < dimensions; ++i) {
        PyObject* size = PyLong_FromLongLong(shape[i]);
        if (size == nullptr || PyTuple_SetItem(sizes.get(), i, size) < 0) return nullptr;
    }
    unsigned char* memory = nullptr;
    Ref window(from.window != nullptr ? Ref::borrowed(from.window).release() : new_block(from.bytes.nbytes, &memory));
    if (!window) return nullptr;
    if (memory != nullptr) std::memcpy(memory, from.bytes.data, from.bytes.nbytes);
    // ndarray(shape, dtype, buffer)
    return PyObject_CallFunctionObjArgs(reinterpret_cast<PyObject*>(array_type), sizes.get(), find(name)->dtype,
                                        window.get(), nullptr);
}

int numpy_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace codec
