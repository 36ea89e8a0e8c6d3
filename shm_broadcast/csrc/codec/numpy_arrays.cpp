// Send and build numpy arrays through the buffer protocol, which gives format, shape and address in one call.
#include "arrays.hpp"

namespace codec {
namespace {

// A dtype that the core handles.
struct Dtype {
    char format;  // native format letter of the buffer protocol
    char name[kMostName];
    PyObject* dtype;
    size_t itemsize;
};

PyTypeObject* array_type = nullptr;
DtypeTable<Dtype> dtypes;

const Dtype* find(char format) {
    return dtypes.find_if([format](const Dtype& each) { return each.format == format; });
}

// numpy_dtypes(ndarray, ((format, name, dtype, itemsize), ...))
PyObject* numpy_dtypes(PyObject*, PyObject* args) {
    PyObject *type = nullptr, *rows = nullptr;
    if (!PyArg_ParseTuple(args, "OO!:numpy_dtypes", &type, &PyTuple_Type, &rows)) return nullptr;
    Dtype found[kMostDtypes] = {};
    const Py_ssize_t count = PyTuple_Size(rows);
    for (Py_ssize_t i = 0; i < count && i < kMostDtypes; ++i) {
        int format = 0;
        const char* name = nullptr;
        Py_ssize_t itemsize = 0;
        if (!PyArg_ParseTuple(PyTuple_GetItem(rows, i), "CsOn", &format, &name, &found[i].dtype, &itemsize)) return nullptr;
        if (std::strlen(name) >= kMostName) return PyErr_Format(PyExc_ValueError, "%s is too long a name", name);
        found[i].format = static_cast<char>(format);
        found[i].itemsize = static_cast<size_t>(itemsize);
        std::memcpy(found[i].name, name, std::strlen(name));
    }
    dtypes.fill(found, static_cast<size_t>(count < kMostDtypes ? count : kMostDtypes));
    Py_INCREF(type);
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
        PyErr_Clear();  // not contiguous, of a dtype without a format, ...
        return false;
    }
    const Dtype* dtype = view.format[0] != 0 && view.format[1] == 0 ? find(view.format[0]) : nullptr;
    const bool ok = dtype != nullptr && static_cast<size_t>(view.itemsize) == dtype->itemsize && view.ndim <= kMaxDimensions;
    if (ok) {
        array->bytes = {static_cast<const unsigned char*>(view.buf), static_cast<size_t>(view.len)};
        array->dtype = dtype->name;
        array->dimensions = view.ndim;
        for (int i = 0; i < view.ndim; ++i) array->shape[i] = view.shape[i];
    }
    PyBuffer_Release(&view);
    return ok;
}

KnownDtype numpy_dtype(Span name) {
    const Dtype* dtype = dtypes.find(name);
    return {dtype, dtype == nullptr ? 0 : dtype->itemsize};
}

PyObject* numpy_build(const void* entry, const int64_t* shape, int dimensions, ArrayBytes from) {
    PyObject* const dtype = static_cast<const Dtype*>(entry)->dtype;
    PyObject* const type = reinterpret_cast<PyObject*>(array_type);
    Ref sizes(PyTuple_New(dimensions));
    if (!sizes) return nullptr;
    for (int i = 0; i < dimensions; ++i) {
        PyObject* size = PyLong_FromLongLong(shape[i]);
        if (size == nullptr || PyTuple_SetItem(sizes.get(), i, size) < 0) return nullptr;
    }
    // ndarray(shape, dtype, buffer)
    if (from.window != nullptr) return PyObject_CallFunctionObjArgs(type, sizes.get(), dtype, from.window, nullptr);
    Ref array(PyObject_CallFunctionObjArgs(type, sizes.get(), dtype, nullptr));
    View view;
    if (!array || !view.acquire(array.get(), PyBUF_WRITABLE)) return nullptr;
    std::memcpy(view.data(), from.bytes.data, from.bytes.nbytes);
    return array.release();
}

int numpy_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }

}  // namespace codec
