// The encoder: turns an object tree into a header and the buffers beside it. It encodes objects of exact builtin types,
// and ordinary arrays and tensors. All others go through `fallback`, which may run application code: the encoder holds a
// reference to each container on its way, and raises an error if one changes meanwhile.
#pragma once

#include <string>

#include "arrays.hpp"
#include "output.hpp"

namespace codec {

class Encoder : Output {
public:
    // `fallback` describes an object that the encoder cannot encode.
    explicit Encoder(PyObject* fallback) : fallback_(fallback) {}

    // Encodes `object`: the header, which is the prefix, the tree and the table, and the buffers beside it. Returns false
    // with an exception set; call `tell_path` then.
    bool build(PyObject* object) {
        // `finish` fills in the prefix.
        return extend(sizeof(Prefix)) != nullptr && value(object, 1) && finish();
    }

    const Output& header() const { return *this; }
    // Returns a list of objects with the buffer protocol, or nullptr if there are none.
    PyObject* buffers() const { return buffers_.get(); }

    // Stores on the exception where in the object it was raised, as its attribute `_path`.
    void tell_path() {
        if (!path_) return;
        PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
        PyErr_Fetch(&type, &error, &trace);
        PyErr_NormalizeException(&type, &error, &trace);
        if (error != nullptr && PyObject_SetAttrString(error, "_path", path_.get()) < 0) PyErr_Clear();
        PyErr_Restore(type, error, trace);
    }

    // Returns what was built as (header, buffers, bytes of the frame).
    PyObject* result() {
        const Py_ssize_t count = buffers_ ? PyList_Size(buffers_.get()) : 0;
        Ref header(PyBytes_FromStringAndSize(reinterpret_cast<char*>(data()), static_cast<Py_ssize_t>(size())));
        Ref views(PyTuple_New(count));
        Ref nbytes(PyLong_FromUnsignedLongLong(nbytes_));
        if (!header || !views || !nbytes) return nullptr;
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject* view = PyMemoryView_FromObject(PyList_GetItem(buffers_.get(), i));
            if (view == nullptr || PyTuple_SetItem(views.get(), i, view) < 0) return nullptr;
        }
        return PyTuple_Pack(3, header.get(), views.get(), nbytes.get());
    }

private:
    bool value(PyObject* object, int depth) {
        PyTypeObject* type = Py_TYPE(object);
        if (type == &PyLong_Type) return integer(object, depth);
        if (type == &PyUnicode_Type) return string(object);
        if (type == &PyFloat_Type) return tagged(0xcb, std::bit_cast<uint64_t>(PyFloat_AsDouble(object)));
        if (type == &PyList_Type) return list(object, depth);
        if (type == &PyDict_Type) return dict(object, depth);
        if (object == Py_None) return byte(0xc0);
        if (object == Py_False) return byte(0xc2);
        if (object == Py_True) return byte(0xc3);
        if (type == &PyBytes_Type) return bytes(object);
        if (type == &PyTuple_Type) return tuple(object, depth);
        if (type == &PySet_Type) return set(object, kSet, depth);
        if (type == &PyFrozenSet_Type) return set(object, kFrozenSet, depth);
        if (type == &PyByteArray_Type) return byte_array(object);
        return other(object, depth);
    }

    bool integer(PyObject* object, int depth) {
        int overflow = 0;
        const long long small = PyLong_AsLongLongAndOverflow(object, &overflow);
        return overflow == 0 ? number(small) : big_integer(object, overflow, depth);
    }

    [[gnu::noinline]] bool big_integer(PyObject* object, int overflow, int depth) {
        const Ref held = Ref::borrowed(object);
        if (overflow > 0) {
            const unsigned long long big = PyLong_AsUnsignedLongLong(object);
            if (big != static_cast<unsigned long long>(-1) || !PyErr_Occurred()) return tagged<uint64_t>(0xcf, big);
            PyErr_Clear();
        }
        return other(object, depth);
    }

    // Encodes an entry of a container. The caller need not own a reference to it.
    bool entry(PyObject* object, int depth) {
        if (Py_TYPE(object) == &PyLong_Type) return integer(object, depth);  // half of a scheduler step
        const Ref held = Ref::borrowed(object);
        return value(object, depth);
    }

    bool string(PyObject* object) {
        Py_ssize_t length = 0;
        const char* utf8 = PyUnicode_AsUTF8AndSize(object, &length);
        return utf8 != nullptr ? text(utf8, static_cast<size_t>(length)) : surrogates(object);
    }

    // Writes a string with lone surrogates, which has no UTF-8, if the exception says that this is the problem.
    [[gnu::noinline]] bool surrogates(PyObject* object) {
        if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return false;
        PyErr_Clear();
        Ref encoded(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass"));
        View view;
        size_t mark = 0;
        return encoded && view.acquire(encoded.get()) && begin(kSurrogates, &mark) && blob(view.data(), view.size()) &&
               end(mark);
    }

    [[gnu::noinline]] bool far(PyObject* object, FarKind kind) {
        if (!buffers_) buffers_.reset(PyList_New(0));
        // A window never changes its size; a view keeps any other object from changing its size.
        Ref view(is_window(object) ? Py_NewRef(object) : PyMemoryView_FromObject(object));
        if (!buffers_ || !view || PyList_Append(buffers_.get(), view.get()) < 0) return false;
        try {
            kinds_.push_back(static_cast<char>(kind));
        } catch (const std::bad_alloc&) {
            return PyErr_NoMemory() != nullptr;
        }
        return true;
    }

    bool far_extension(PyObject* object, Code code) {
        size_t mark = 0;
        const FarKind kind = code == kFarBytes ? kBytesKind : kByteArrayKind;
        return begin(code, &mark) && end(mark) && far(object, kind);
    }

    bool bytes(PyObject* object) {
        char* data = nullptr;
        Py_ssize_t length = 0;
        if (PyBytes_AsStringAndSize(object, &data, &length) < 0) return false;
        const size_t nbytes = static_cast<size_t>(length);
        if (nbytes >= kInlineLimit) return far_extension(object, kFarBytes);
        const bool ok = nbytes <= UINT8_MAX ? tagged<uint8_t>(0xc4, static_cast<uint8_t>(nbytes))
                                            : tagged<uint16_t>(0xc5, static_cast<uint16_t>(nbytes));
        return ok && blob(reinterpret_cast<const unsigned char*>(data), nbytes);
    }

    bool byte_array(PyObject* object) {
        View view;
        if (!view.acquire(object)) return false;
        if (view.size() >= kInlineLimit) return far_extension(object, kFarByteArray);
        size_t mark = 0;
        return begin(kByteArray, &mark) && blob(view.data(), view.size()) && end(mark);
    }

    bool enter(int depth) {
        return depth <= kMaxDepth || set_error(PyExc_RecursionError, "deeper than %d levels", kMaxDepth);
    }

    bool changed(const char* kind) {
        return set_error(PyExc_ValueError, "the %s changed while it was encoded", kind);
    }

    // Encodes the entries of a list or tuple.
    template <PyObject* (*Item)(PyObject*, Py_ssize_t)>
    bool sequence(PyObject* object, Py_ssize_t entries, int depth) {
        if (!enter(depth) || !count(static_cast<size_t>(entries), 0x90, 0xdc)) return false;
        for (Py_ssize_t i = 0; i < entries; ++i) {
            PyObject* borrowed = Item(object, i);
            if (borrowed == nullptr) {  // only a list can change
                PyErr_Clear();
                return changed("list");
            }
            if (!entry(borrowed, depth + 1)) {
                Ref index(PyLong_FromSsize_t(i));
                return fail('i', index.get(), object);
            }
        }
        return true;
    }

    bool list(PyObject* object, int depth) {
        const Py_ssize_t entries = PyList_Size(object);
        return sequence<PyList_GetItem>(object, entries, depth) && (PyList_Size(object) == entries || changed("list"));
    }

    bool tuple(PyObject* object, int depth) {
        size_t mark = 0;
        return begin(kTuple, &mark) && sequence<PyTuple_GetItem>(object, PyTuple_Size(object), depth) && end(mark);
    }

    bool set(PyObject* object, Code code, int depth) {
        const Py_ssize_t entries = PySet_Size(object);
        size_t mark = 0;
        if (!enter(depth) || !begin(code, &mark) || !count(static_cast<size_t>(entries), 0x90, 0xdc)) return false;
        Ref iterator(PyObject_GetIter(object));
        if (!iterator) return false;
        KeyGuard guard(entries);
        Py_ssize_t seen = 0;
        for (;;) {
            Ref item(PyIter_Next(iterator.get()));
            if (!item) break;
            if (++seen > entries) return changed("set");
            if (!guard.admit(item.get()) || !value(item.get(), depth + 1)) return fail('s', item.get(), object);
        }
        if (PyErr_Occurred()) {
            if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return false;
            PyErr_Clear();
            return changed("set");
        }
        return seen == entries ? end(mark) : changed("set");
    }

    bool dict(PyObject* object, int depth) {
        const Py_ssize_t entries = PyDict_Size(object);
        if (!enter(depth) || !count(static_cast<size_t>(entries), 0x80, 0xde)) return false;
        KeyGuard guard(entries);
        PyObject *next_key = nullptr, *next_item = nullptr;
        Py_ssize_t position = 0, seen = 0;
        while (PyDict_Next(object, &position, &next_key, &next_item)) {
            if (++seen > entries) return changed("dict");
            Ref key = Ref::borrowed(next_key);
            Ref item = Ref::borrowed(next_item);
            if (!guard.admit(key.get()) || !value(key.get(), depth + 1)) return fail('K', key.get(), object);
            if (!entry(item.get(), depth + 1)) return fail('k', key.get(), object);
            if (PyDict_Size(object) != entries) return changed("dict");
        }
        return seen == entries || changed("dict");
    }

    // Writes an array or tensor as its Python adapter would.
    bool array(PyObject* object, Code code, const Array& array) {
        size_t mark = 0;
        if (!begin(code, &mark) || !byte(0x92) || !count(static_cast<size_t>(array.dimensions) + 1, 0x90, 0xdc)) return false;
        if (!text(array.dtype->name, std::strlen(array.dtype->name))) return false;
        for (int i = 0; i < array.dimensions; ++i) {
            if (!number(array.shape[i])) return false;
        }
        const Span bytes = array.bytes;
        if (bytes.nbytes < kInlineLimit) {
            return tagged<uint16_t>(0xc5, static_cast<uint16_t>(bytes.nbytes)) && blob(bytes.data, bytes.nbytes) && end(mark);
        }
        Ref window(make_window(object, const_cast<unsigned char*>(bytes.data), bytes.nbytes, false));
        return window && byte(0xc0) && end(mark) && far(window.get(), kDataKind);
    }

    // Not inlined into `value`, whose stack frame would grow by an array's description.
    [[gnu::noinline]] bool other(PyObject* object, int depth) {
        if (!enter(depth)) return false;
        Array found;
        if (depth < kMaxDepth) {
            if (numpy_describe(object, &found)) return array(object, kNumpyArray, found);
            if (torch_describe(object, &found)) return array(object, kTorchTensor, found);
            if (PyErr_Occurred()) return false;
        }
        Ref description(PyObject_CallFunctionObjArgs(fallback_, object, nullptr));
        if (!description) return false;
        return described(description.get(), depth) || fail('x', object, object);
    }

    // Writes what the fallback returned: (code, meta, body). The code 0 means that `body` is sent instead of the object.
    bool described(PyObject* description, int depth) {
        if (Py_TYPE(description) != &PyTuple_Type || PyTuple_Size(description) != 3) {
            return set_error(PyExc_TypeError, "the fallback must return (code, meta, body)");
        }
        const long code = PyLong_AsLong(PyTuple_GetItem(description, 0));
        if (code == -1 && PyErr_Occurred()) return false;
        PyObject* body = PyTuple_GetItem(description, 2);
        if (code == 0) return value(body, depth + 1);
        if (code < kFirstHook || code > kLastCode) return set_error(PyExc_ValueError, "%ld is not an extension code", code);
        size_t mark = 0;
        if (!begin(static_cast<uint8_t>(code), &mark) || !byte(0x92)) return false;
        if (!value(PyTuple_GetItem(description, 1), depth + 1)) return false;
        if (code < kFirstData) return value(body, depth + 1) && end(mark);
        View view;
        if (!view.acquire(body)) return false;
        if (view.size() >= kInlineLimit) return byte(0xc0) && end(mark) && far(body, kDataKind);
        return tagged<uint16_t>(0xc5, static_cast<uint16_t>(view.size())) && blob(view.data(), view.size()) && end(mark);
    }

    // Records one step of the path to the value that failed. Keeps the exception and returns false.
    [[gnu::noinline]] bool fail(char kind, PyObject* key, PyObject* container) {
        PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
        PyErr_Fetch(&type, &error, &trace);
        if (!path_) path_.reset(PyList_New(0));
        if (path_ && key != nullptr) {
            Ref step(Py_BuildValue("(COO)", kind, key, container));
            if (step) PyList_Append(path_.get(), step.get());
        }
        PyErr_Clear();
        PyErr_Restore(type, error, trace);
        return false;
    }

    // Appends the table of the buffers and fills the prefix.
    bool finish() {
        const Py_ssize_t buffers = buffers_ ? PyList_Size(buffers_.get()) : 0;
        Prefix prefix{kMagic, kVersion, 0, 0, 0, size() - sizeof(Prefix), static_cast<uint64_t>(buffers)};
        const size_t gap = aligned(size(), 8) - size();
        unsigned char* at = extend(gap + 8 * static_cast<size_t>(buffers));
        if (at == nullptr) return false;
        std::memset(at, 0, gap);
        at += gap;
        prefix.total = size();
        for (Py_ssize_t i = 0; i < buffers; ++i, at += 8) {
            View view;
            if (!view.acquire(PyList_GetItem(buffers_.get(), i))) return false;
            const uint64_t kind = static_cast<unsigned char>(kinds_[static_cast<size_t>(i)]);
            const uint64_t entry = view.size() | kind << kKindShift;
            std::memcpy(at, &entry, sizeof(entry));
            prefix.total = aligned(prefix.total) + view.size();
        }
        std::memcpy(data(), &prefix, sizeof(prefix));
        nbytes_ = prefix.total;
        return true;
    }

    PyObject* fallback_;
    Ref buffers_;          // a list of windows and memoryviews, created for the first one
    Ref path_;             // a list of (kind, key, container), innermost first, created on failure
    uint64_t nbytes_ = 0;  // of the frame
    std::string kinds_;    // FarKind of each buffer
};

}  // namespace codec
