// Object trees to frames. Exact builtin types are walked here; everything else goes through `fallback`,
// which may run application code: every container is held by a reference while it is walked, and a
// container that changes meanwhile is an error.
#include "encoder.hpp"

#include <array>

namespace codec {

bool Encoder::value(PyObject* object, int depth) {
    PyTypeObject* type = Py_TYPE(object);
    if (type == &PyLong_Type) return integer(object, depth);
    if (type == &PyUnicode_Type) return string(object);
    if (type == &PyFloat_Type) {
        return tagged<uint64_t>(0xcb, std::bit_cast<uint64_t>(PyFloat_AsDouble(object)));
    }
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

// Writes what does not fit into its tag.
bool Encoder::wide_number(long long number) {
    if (number >= 0) {
        if (number <= UINT8_MAX) return tagged<uint8_t>(0xcc, static_cast<uint8_t>(number));
        if (number <= UINT16_MAX) return tagged<uint16_t>(0xcd, static_cast<uint16_t>(number));
        if (number <= UINT32_MAX) return tagged<uint32_t>(0xce, static_cast<uint32_t>(number));
        return tagged<uint64_t>(0xcf, static_cast<uint64_t>(number));
    }
    if (number >= INT8_MIN) return tagged<uint8_t>(0xd0, static_cast<uint8_t>(number));
    if (number >= INT16_MIN) return tagged<uint16_t>(0xd1, static_cast<uint16_t>(number));
    if (number >= INT32_MIN) return tagged<uint32_t>(0xd2, static_cast<uint32_t>(number));
    return tagged<uint64_t>(0xd3, static_cast<uint64_t>(number));
}

bool Encoder::integer(PyObject* object, int depth) {
    int overflow = 0;
    const long long small = PyLong_AsLongLongAndOverflow(object, &overflow);
    if (overflow == 0) return number(small);
    if (overflow > 0) {
        const unsigned long long big = PyLong_AsUnsignedLongLong(object);
        if (big != static_cast<unsigned long long>(-1) || !PyErr_Occurred()) return tagged<uint64_t>(0xcf, big);
        PyErr_Clear();
    }
    return other(object, depth);
}

bool Encoder::wide_count(size_t entries, uint8_t wide) {
    if (entries <= UINT16_MAX) return tagged<uint16_t>(wide, static_cast<uint16_t>(entries));
    if (entries <= UINT32_MAX) return tagged<uint32_t>(static_cast<uint8_t>(wide + 1), static_cast<uint32_t>(entries));
    PyErr_SetString(PyExc_ValueError, "a container of more than 4294967295 entries");
    return false;
}

bool Encoder::blob(const unsigned char* data, size_t nbytes) {
    unsigned char* at = out_.extend(nbytes);
    if (at == nullptr) return false;
    if (nbytes > 0) std::memcpy(at, data, nbytes);
    return true;
}

bool Encoder::string(PyObject* object) {
    Py_ssize_t length = 0;
    const char* utf8 = PyUnicode_AsUTF8AndSize(object, &length);
    return utf8 != nullptr ? text(utf8, static_cast<size_t>(length)) : surrogates(object);
}

// Writes a string that has no UTF-8, if that is what the exception says: one with lone surrogates.
bool Encoder::surrogates(PyObject* object) {
    if (!PyErr_ExceptionMatches(PyExc_UnicodeEncodeError)) return false;
    PyErr_Clear();
    Ref encoded(PyUnicode_AsEncodedString(object, "utf-8", "surrogatepass"));
    View view;
    size_t mark = 0;
    return encoded && view.acquire(encoded.get()) && begin(kSurrogates, &mark) && blob(view.data(), view.size()) &&
           end(mark);
}

namespace {

// Copies fewer than 32 bytes without a call: the first and the last of them, which may overlap.
void copy_short(unsigned char* to, const char* from, size_t nbytes) {
    const auto both = [&](auto word) {
        const size_t last = nbytes - sizeof word;
        auto tail = word;
        std::memcpy(&word, from, sizeof word);
        std::memcpy(&tail, from + last, sizeof word);
        std::memcpy(to, &word, sizeof word);
        std::memcpy(to + last, &tail, sizeof word);
    };
    if (nbytes >= 16) both(std::array<uint64_t, 2>{});
    else if (nbytes >= 8) both(uint64_t{});
    else if (nbytes >= 4) both(uint32_t{});
    else if (nbytes >= 2) both(uint16_t{});
    else if (nbytes == 1) *to = static_cast<unsigned char>(*from);
}

}  // namespace

bool Encoder::text(const char* data, size_t nbytes) {
    if (nbytes >= 32) return long_text(data, nbytes);
    unsigned char* at = out_.extend(1 + nbytes);
    if (at == nullptr) return false;
    *at = static_cast<uint8_t>(0xa0 | nbytes);
    copy_short(at + 1, data, nbytes);
    return true;
}

bool Encoder::long_text(const char* data, size_t nbytes) {
    bool ok = false;
    if (nbytes <= UINT8_MAX) ok = tagged<uint8_t>(0xd9, static_cast<uint8_t>(nbytes));
    else if (nbytes <= UINT16_MAX) ok = tagged<uint16_t>(0xda, static_cast<uint16_t>(nbytes));
    else if (nbytes <= UINT32_MAX) ok = tagged<uint32_t>(0xdb, static_cast<uint32_t>(nbytes));
    else PyErr_SetString(PyExc_ValueError, "a string of more than 4294967295 bytes");
    return ok && blob(reinterpret_cast<const unsigned char*>(data), nbytes);
}

bool Encoder::far(PyObject* object, FarKind kind) {
    if (buffers_ == nullptr && (buffers_ = PyList_New(0)) == nullptr) return false;
    // A window never changes its size; of anything else a view is held, so that it cannot.
    Ref view(is_window(object) ? Ref::borrowed(object).release() : PyMemoryView_FromObject(object));
    if (!view || PyList_Append(buffers_, view.get()) < 0) return false;
    try {
        kinds_.push_back(static_cast<char>(kind));
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory() != nullptr;
    }
    return true;
}

bool Encoder::far_extension(PyObject* object, Code code) {
    size_t mark = 0;
    const FarKind kind = code == kFarBytes ? kBytesKind : kByteArrayKind;
    return begin(code, &mark) && end(mark) && far(object, kind);
}

bool Encoder::bytes(PyObject* object) {
    char* data = nullptr;
    Py_ssize_t length = 0;
    if (PyBytes_AsStringAndSize(object, &data, &length) < 0) return false;
    const size_t nbytes = static_cast<size_t>(length);
    if (nbytes >= kInlineLimit) return far_extension(object, kFarBytes);
    const bool ok = nbytes <= UINT8_MAX ? tagged<uint8_t>(0xc4, static_cast<uint8_t>(nbytes))
                                        : tagged<uint16_t>(0xc5, static_cast<uint16_t>(nbytes));
    return ok && blob(reinterpret_cast<const unsigned char*>(data), nbytes);
}

bool Encoder::byte_array(PyObject* object) {
    View view;
    if (!view.acquire(object)) return false;
    if (view.size() >= kInlineLimit) return far_extension(object, kFarByteArray);
    size_t mark = 0;
    return begin(kByteArray, &mark) && blob(view.data(), view.size()) && end(mark);
}

bool Encoder::enter(int depth) {
    if (depth <= kMaxDepth) return true;
    PyErr_Format(PyExc_RecursionError, "deeper than %d levels", kMaxDepth);
    return false;
}

bool Encoder::changed(const char* kind) {
    PyErr_Format(PyExc_ValueError, "the %s changed while it was encoded", kind);
    return false;
}

bool Encoder::list(PyObject* object, int depth) {
    const Py_ssize_t entries = PyList_Size(object);
    if (!enter(depth) || !count(static_cast<size_t>(entries), 0x90, 0xdc)) return false;
    for (Py_ssize_t i = 0; i < entries; ++i) {
        PyObject* borrowed = PyList_GetItem(object, i);
        if (borrowed == nullptr) {
            PyErr_Clear();
            return changed("list");
        }
        if (!entry(borrowed, depth + 1)) {
            Ref index(PyLong_FromSsize_t(i));
            return fail('i', index.get(), object);
        }
    }
    return PyList_Size(object) == entries || changed("list");
}

bool Encoder::tuple(PyObject* object, int depth) {
    const Py_ssize_t entries = PyTuple_Size(object);
    size_t mark = 0;
    if (!enter(depth) || !begin(kTuple, &mark) || !count(static_cast<size_t>(entries), 0x90, 0xdc)) return false;
    for (Py_ssize_t i = 0; i < entries; ++i) {
        if (!entry(PyTuple_GetItem(object, i), depth + 1)) {
            Ref index(PyLong_FromSsize_t(i));
            return fail('i', index.get(), object);
        }
    }
    return end(mark);
}

bool Encoder::set(PyObject* object, Code code, int depth) {
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

bool Encoder::dict(PyObject* object, int depth) {
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

bool Encoder::begin(uint8_t code, size_t* mark) {
    unsigned char* at = out_.extend(6);
    if (at == nullptr) return false;
    at[0] = 0xc9;
    std::memset(at + 1, 0, 4);
    at[5] = code;
    *mark = out_.size();
    return true;
}

bool Encoder::end(size_t mark) {
    const size_t length = out_.size() - mark;
    if (length > UINT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "a value of more than 4294967295 encoded bytes");
        return false;
    }
    const uint32_t wire = swapped(static_cast<uint32_t>(length));
    std::memcpy(out_.data() + mark - 5, &wire, sizeof(wire));
    return true;
}

// Writes what the adapter's description of this array would give.
bool Encoder::array(PyObject* object, Code code, const Array& array) {
    size_t mark = 0;
    if (!begin(code, &mark) || !byte(0x92) || !count(static_cast<size_t>(array.dimensions) + 1, 0x90, 0xdc)) return false;
    if (!text(array.dtype, std::strlen(array.dtype))) return false;
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

bool Encoder::other(PyObject* object, int depth) {
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

// Writes what the fallback returned: (code, meta, body), code 0 meaning `body` instead of the object.
bool Encoder::described(PyObject* description, int depth) {
    if (Py_TYPE(description) != &PyTuple_Type || PyTuple_Size(description) != 3) {
        PyErr_SetString(PyExc_TypeError, "the fallback must return (code, meta, body)");
        return false;
    }
    const long code = PyLong_AsLong(PyTuple_GetItem(description, 0));
    if (code == -1 && PyErr_Occurred()) return false;
    PyObject* body = PyTuple_GetItem(description, 2);
    if (code == 0) return value(body, depth + 1);
    if (code < kFirstHook || code > kLastCode) {
        PyErr_Format(PyExc_ValueError, "%ld is no extension code", code);
        return false;
    }
    size_t mark = 0;
    if (!begin(static_cast<uint8_t>(code), &mark) || !byte(0x92)) return false;
    if (!value(PyTuple_GetItem(description, 1), depth + 1)) return false;
    if (code < kFirstData) return value(body, depth + 1) && end(mark);
    View view;
    if (!view.acquire(body)) return false;
    if (view.size() >= kInlineLimit) return byte(0xc0) && end(mark) && far(body, kDataKind);
    return tagged<uint16_t>(0xc5, static_cast<uint16_t>(view.size())) && blob(view.data(), view.size()) && end(mark);
}

// Records one step of the path to the value that failed; keeps the exception; always false.
bool Encoder::fail(char kind, PyObject* key, PyObject* container) {
    PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &error, &trace);
    if (path_ == nullptr) path_ = PyList_New(0);
    if (path_ != nullptr && key != nullptr) {
        Ref step(Py_BuildValue("(COO)", kind, key, container));
        if (step) PyList_Append(path_, step.get());
    }
    PyErr_Clear();
    PyErr_Restore(type, error, trace);
    return false;
}

// Leaves the path on the exception, as its attribute `_path`.
void Encoder::tell_path() {
    if (path_ == nullptr) return;
    PyObject *type = nullptr, *error = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &error, &trace);
    PyErr_NormalizeException(&type, &error, &trace);
    if (error != nullptr && PyObject_SetAttrString(error, "_path", path_) < 0) PyErr_Clear();
    PyErr_Restore(type, error, trace);
}

bool Encoder::build(PyObject* object) {
    // The prefix is filled in by `finish`.
    return out_.extend(sizeof(Prefix)) != nullptr && value(object, 1) && finish();
}

// Appends the table of the buffers and fills the prefix.
bool Encoder::finish() {
    const Py_ssize_t buffers = buffers_ == nullptr ? 0 : PyList_Size(buffers_);
    Prefix prefix{kMagic, kVersion, 0, 0, 0, out_.size() - sizeof(Prefix), static_cast<uint64_t>(buffers)};
    const size_t gap = aligned(out_.size(), 8) - out_.size();
    unsigned char* at = out_.extend(gap + 8 * static_cast<size_t>(buffers));
    if (at == nullptr) return false;
    std::memset(at, 0, gap);
    at += gap;
    prefix.total = out_.size();
    for (Py_ssize_t i = 0; i < buffers; ++i, at += 8) {
        View view;
        if (!view.acquire(PyList_GetItem(buffers_, i))) return false;
        const uint64_t kind = static_cast<unsigned char>(kinds_[static_cast<size_t>(i)]);
        const uint64_t entry = view.size() | kind << kKindShift;
        std::memcpy(at, &entry, sizeof(entry));
        prefix.total = aligned(prefix.total) + view.size();
    }
    std::memcpy(out_.data(), &prefix, sizeof(prefix));
    nbytes_ = prefix.total;
    return true;
}

namespace {

// Returns a tuple of memoryviews of `buffers`, a list or nullptr.
PyObject* views_of(PyObject* buffers) {
    const Py_ssize_t count = buffers == nullptr ? 0 : PyList_Size(buffers);
    Ref views(PyTuple_New(count));
    for (Py_ssize_t i = 0; views && i < count; ++i) {
        PyObject* view = PyMemoryView_FromObject(PyList_GetItem(buffers, i));
        if (view == nullptr || PyTuple_SetItem(views.get(), i, view) < 0) return nullptr;
    }
    return views.release();
}

}  // namespace

PyObject* Encoder::run(PyObject* object) {
    if (build(object)) return result();
    tell_path();
    return nullptr;
}

PyObject* Encoder::result() {
    Ref header(PyBytes_FromStringAndSize(reinterpret_cast<char*>(out_.data()), static_cast<Py_ssize_t>(out_.size())));
    Ref views(views_of(buffers_));
    Ref nbytes(PyLong_FromUnsignedLongLong(nbytes_));
    if (!header || !views || !nbytes) return nullptr;
    return PyTuple_Pack(3, header.get(), views.get(), nbytes.get());
}

// encode(object, fallback)
PyObject* encode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect_arguments("encode", count, 2)) return nullptr;
    Encoder encoder(args[1]);
    return encoder.run(args[0]);
}

}  // namespace codec
