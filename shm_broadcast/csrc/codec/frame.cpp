// Bytes in memory: windows on foreign memory, copies, and laying a frame out in its target.
#include "codec.hpp"

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
    reinterpret_cast<freefunc>(PyType_GetSlot(type, Py_tp_free))(self);
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

void copy(unsigned char* to, const unsigned char* from, size_t nbytes) {
    if (nbytes == 0) return;
    if (nbytes < kUnlockedCopy) {
        std::memcpy(to, from, nbytes);
        return;
    }
    Py_BEGIN_ALLOW_THREADS
    std::memcpy(to, from, nbytes);
    Py_END_ALLOW_THREADS
}

// Reads (address, nbytes) from two integers; false with an exception when they name no memory.
bool read_span(PyObject* const* args, unsigned char** address, size_t* nbytes) {
    const Py_ssize_t length = PyLong_AsSsize_t(args[1]);
    if (length == -1 && PyErr_Occurred()) return false;
    void* pointer = PyLong_AsVoidPtr(args[0]);
    if (pointer == nullptr && PyErr_Occurred()) return false;
    if (length < 0 || (pointer == nullptr && length > 0)) {
        PyErr_SetString(PyExc_ValueError, "no memory at this address");
        return false;
    }
    *address = static_cast<unsigned char*>(pointer);
    *nbytes = static_cast<size_t>(length);
    return true;
}

// Appends `source` at `*offset` rounded up to `alignment`, zeroing the gap; false when it does not fit.
bool place(const View& target, size_t* offset, size_t alignment, const View& source) {
    const size_t start = aligned(*offset, alignment);
    if (start > target.size() || source.size() > target.size() - start) {
        PyErr_Format(PyExc_ValueError, "the target of %zu bytes is too small for the frame", target.size());
        return false;
    }
    if (start > *offset) std::memset(target.data() + *offset, 0, start - *offset);
    copy(target.data() + start, source.data(), source.size());
    *offset = start + source.size();
    return true;
}

PyMethodDef functions[] = {
    {"encode", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(encode)), METH_FASTCALL, nullptr},
    {"decode", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(decode)), METH_FASTCALL, nullptr},
    {"write_frame", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(write_frame)), METH_FASTCALL, nullptr},
    {"window", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(window)), METH_FASTCALL, nullptr},
    {"copy_into", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(copy_into)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool expect_arguments(const char* function, Py_ssize_t got, Py_ssize_t wanted) {
    if (got == wanted) return true;
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", function, wanted, got);
    return false;
}

PyObject* make_window(PyObject* owner, unsigned char* address, size_t nbytes, bool exclusive) {
    const auto allocate = reinterpret_cast<allocfunc>(PyType_GetSlot(window_type, Py_tp_alloc));
    PyObject* self = allocate(window_type, 0);
    if (self == nullptr) return nullptr;
    Window* window = reinterpret_cast<Window*>(self);
    Py_INCREF(owner);
    window->owner = owner;
    window->address = address;
    window->nbytes = static_cast<Py_ssize_t>(nbytes);
    window->exclusive = exclusive;
    return self;
}

bool is_window(PyObject* object) { return Py_TYPE(object) == window_type; }

// window(owner, address, nbytes)
PyObject* window(PyObject*, PyObject* const* args, Py_ssize_t count) {
    unsigned char* address = nullptr;
    size_t nbytes = 0;
    if (!expect_arguments("window", count, 3) || !read_span(args + 1, &address, &nbytes)) return nullptr;
    return make_window(args[0], address, nbytes, false);
}

// copy_into(address, nbytes, source)
PyObject* copy_into(PyObject*, PyObject* const* args, Py_ssize_t count) {
    unsigned char* address = nullptr;
    size_t nbytes = 0;
    View source;
    if (!expect_arguments("copy_into", count, 3) || !read_span(args, &address, &nbytes)) return nullptr;
    if (!source.acquire(args[2])) return nullptr;
    if (source.size() != nbytes) {
        PyErr_Format(PyExc_ValueError, "%zu bytes do not fill %zu", source.size(), nbytes);
        return nullptr;
    }
    copy(address, source.data(), nbytes);
    Py_RETURN_NONE;
}

// write_frame(target, header, buffers)
PyObject* write_frame(PyObject*, PyObject* const* args, Py_ssize_t count) {
    View target, header;
    if (!expect_arguments("write_frame", count, 3)) return nullptr;
    if (!target.acquire(args[0], PyBUF_WRITABLE) || !header.acquire(args[1])) return nullptr;
    const Py_ssize_t buffers = PyTuple_Size(args[2]);
    if (buffers < 0) return nullptr;
    size_t offset = 0;
    if (!place(target, &offset, 1, header)) return nullptr;
    for (Py_ssize_t i = 0; i < buffers; ++i) {
        View buffer;
        if (!buffer.acquire(PyTuple_GetItem(args[2], i))) return nullptr;
        if (!place(target, &offset, kAlignment, buffer)) return nullptr;
    }
    return PyLong_FromSize_t(offset);
}

int add_codec(PyObject* module) {
    if (PyModule_AddFunctions(module, functions) < 0) return -1;
    PyObject* type = PyType_FromSpec(&window_spec);
    if (type == nullptr) return -1;
    window_type = reinterpret_cast<PyTypeObject*>(type);
    if (PyModule_AddObjectRef(module, "Window", type) < 0) return -1;
    if (PyModule_AddIntConstant(module, "MAX_DEPTH", kMaxDepth) < 0) return -1;
    if (PyModule_AddIntConstant(module, "MAX_SAME_HASH", kMaxSameHash) < 0) return -1;
    if (PyModule_AddIntConstant(module, "INLINE_LIMIT", static_cast<long>(kInlineLimit)) < 0) return -1;
    if (PyModule_AddIntConstant(module, "ALIGNMENT", static_cast<long>(kAlignment)) < 0) return -1;
    if (PyModule_AddIntConstant(module, "FIRST_HOOK_CODE", kFirstHook) < 0) return -1;
    return PyModule_AddIntConstant(module, "FIRST_DATA_CODE", kFirstData);
}

}  // namespace codec
