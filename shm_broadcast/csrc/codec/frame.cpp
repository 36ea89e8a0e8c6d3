// The codec's part of the module: its functions, and windows on memory.
#include <algorithm>
#include <cstdarg>

#include "blocks.hpp"
#include "decoder.hpp"
#include "encoder.hpp"
#include "pieces.hpp"

namespace codec {
namespace {

struct Window {
    PyObject_HEAD
    PyObject* owner;
    unsigned char* address;
    Py_ssize_t nbytes;
    bool exclusive;
};

PyTypeObject* window_type = nullptr;

void window_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    Py_XDECREF(reinterpret_cast<Window*>(self)->owner);
    PyObject_Free(self);
    Py_DECREF(type);
}

int window_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Window* window = reinterpret_cast<Window*>(self);
    return PyBuffer_FillInfo(view, self, window->address, window->nbytes, 0, flags);
}

Py_ssize_t window_length(PyObject* self) { return reinterpret_cast<Window*>(self)->nbytes; }

PyObject* window_exclusive(PyObject* self, void*) { return PyBool_FromLong(reinterpret_cast<Window*>(self)->exclusive); }

PyGetSetDef window_attributes[] = {
    {"exclusive", window_exclusive, nullptr, "Whether nothing else uses this memory.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot window_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(window_dealloc)},
    {Py_bf_getbuffer, reinterpret_cast<void*>(window_buffer)},
    {Py_sq_length, reinterpret_cast<void*>(window_length)},
    {Py_tp_getset, window_attributes},
    {0, nullptr},
};

PyType_Spec window_spec = {"shm_broadcast._core.Window", sizeof(Window), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, window_slots};

// Calls `copy`, which copies `nbytes`; releases the GIL if they are many.
template <typename Copy>
void unlocked(size_t nbytes, Copy copy) {
    PyThreadState* state = nbytes < kUnlockedCopy ? nullptr : PyEval_SaveThread();
    copy();
    if (state != nullptr) PyEval_RestoreThread(state);
}

// Returns whether there can be memory; sets an exception if not.
bool expect_memory(Py_ssize_t address, Py_ssize_t nbytes) {
    if (nbytes >= 0 && (address > 0 || nbytes == 0)) return true;
    return set_error(PyExc_ValueError, "there is no memory of %zd bytes at address %zd", nbytes, address);
}

}  // namespace

bool expect_arguments(const char* function, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted) return true;
    return set_error(PyExc_TypeError, "%s takes %zd arguments, got %zd", function, wanted, got);
}

PyObject* make_window(PyObject* owner, unsigned char* address, size_t nbytes, bool exclusive) {
    PyObject* self = PyType_GenericAlloc(window_type, 0);
    if (self == nullptr) return nullptr;
    Window* window = reinterpret_cast<Window*>(self);
    window->owner = Py_NewRef(owner);
    window->address = address;
    window->nbytes = static_cast<Py_ssize_t>(nbytes);
    window->exclusive = exclusive;
    return self;
}

bool is_window(PyObject* object) { return Py_TYPE(object) == window_type; }

bool set_error(PyObject* type, const char* format, ...) {
    va_list values;
    va_start(values, format);
    PyErr_FormatV(type, format, values);
    va_end(values);
    return false;
}

// Returns the length of the prefix, the tree and the table. If they do not fit the frame, returns the length of those that do; the
// decoder says then what is wrong.
size_t Decoder::header_bytes() const {
    Prefix prefix;
    if (frame_.nbytes < sizeof(prefix)) return frame_.nbytes;
    std::memcpy(&prefix, frame_.data, sizeof(prefix));
    if (prefix.tree > frame_.nbytes - sizeof(prefix)) return sizeof(prefix);
    const size_t table = aligned(sizeof(prefix) + prefix.tree, 8);
    if (table > frame_.nbytes || prefix.buffers > (frame_.nbytes - table) / 8) return std::min(table, frame_.nbytes);
    return table + 8 * prefix.buffers;
}

namespace {

// encode(object, fallback)
PyObject* encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect_arguments("encode", count, 2)) return nullptr;
    Encoder encoder(args[1]);
    if (encoder.build(args[0])) return encoder.result();
    encoder.tell_path();
    return nullptr;
}

// decode(frame, hook, copies)
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect_arguments("decode", count, 3)) return nullptr;
    View view;
    if (!view.acquire(args[0])) return nullptr;
    Ref owner(PyMemoryView_FromObject(args[0]));
    if (!owner) return nullptr;
    return Decoder({view.data(), view.size()}, owner.get(), args[1], args[2] == Py_True).run();
}

// window(owner, address, nbytes)
PyObject* window(PyObject*, PyObject* args) {
    PyObject* owner = nullptr;
    Py_ssize_t address = 0, nbytes = 0;
    if (!PyArg_ParseTuple(args, "Onn:window", &owner, &address, &nbytes)) return nullptr;
    if (!expect_memory(address, nbytes)) return nullptr;
    return make_window(owner, reinterpret_cast<unsigned char*>(address), static_cast<size_t>(nbytes), false);
}

// copy_into(address, nbytes, source)
PyObject* copy_into(PyObject*, PyObject* args) {
    PyObject* object = nullptr;
    Py_ssize_t address = 0, nbytes = 0;
    View source;
    if (!PyArg_ParseTuple(args, "nnO:copy_into", &address, &nbytes, &object)) return nullptr;
    if (!expect_memory(address, nbytes) || !source.acquire(object)) return nullptr;
    const size_t size = source.size();
    if (size != static_cast<size_t>(nbytes)) {
        return PyErr_Format(PyExc_ValueError, "the source has %zu bytes, which do not fill %zd", size, nbytes);
    }
    if (size > 0) unlocked(size, [&] { std::memcpy(reinterpret_cast<void*>(address), source.data(), size); });
    Py_RETURN_NONE;
}

// write_frame(target, header, buffers)
PyObject* write_frame(PyObject*, PyObject* const* args, Py_ssize_t count) {
    View target, header;
    Pieces pieces;
    if (!expect_arguments("write_frame", count, 3)) return nullptr;
    if (!target.acquire(args[0], PyBUF_WRITABLE) || !header.acquire(args[1])) return nullptr;
    if (!pieces.acquire({header.data(), header.size()}, args[2])) return nullptr;
    const size_t total = pieces.total();
    if (total > target.size()) {
        return PyErr_Format(PyExc_ValueError, "the target of %zu bytes is too small for the frame", target.size());
    }
    unlocked(total, [&] { pieces.copy(target.data(), 0, total); });
    return PyLong_FromSize_t(total);
}

PyMethodDef functions[] = {
    {"encode", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(encode)), METH_FASTCALL, nullptr},
    {"decode", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(decode)), METH_FASTCALL, nullptr},
    {"write_frame", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(write_frame)), METH_FASTCALL, nullptr},
    {"window", window, METH_VARARGS, nullptr},
    {"copy_into", copy_into, METH_VARARGS, nullptr},
    {"numpy_dtypes", numpy_dtypes, METH_VARARGS, nullptr},
    {"torch_dtypes", torch_dtypes, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int add_codec(PyObject* module) {
    if (PyModule_AddFunctions(module, functions) < 0 || blocks_add(module) < 0) return -1;
    PyObject* type = PyType_FromSpec(&window_spec);
    if (type == nullptr) return -1;
    window_type = reinterpret_cast<PyTypeObject*>(type);
    if (PyModule_AddObjectRef(module, "Window", type) < 0) return -1;
    if (PyModule_AddIntConstant(module, "MAX_DEPTH", kMaxDepth) < 0) return -1;
    if (PyModule_AddIntConstant(module, "ALIGNMENT", static_cast<long>(kAlignment)) < 0) return -1;
    if (PyModule_AddIntConstant(module, "FIRST_HOOK_CODE", kFirstHook) < 0) return -1;
    return PyModule_AddIntConstant(module, "FIRST_DATA_CODE", kFirstData);
}

}  // namespace codec
