// The encoder: an object tree to a header and the buffers beside it. The format stands in codec.py.
#pragma once

#include <string>

#include "arrays.hpp"

namespace codec {

inline constexpr size_t kStackBytes = 4096;  // most step inputs fit, and need no allocation

class Output {
public:
    Output() = default;
    ~Output() {
        if (data_ != stack_) PyMem_Free(data_);
    }
    Output(const Output&) = delete;
    Output& operator=(const Output&) = delete;
    size_t size() const { return size_; }
    unsigned char* data() { return data_; }
    const unsigned char* data() const { return data_; }
    // Returns room for `more` bytes and counts them as written; nullptr with MemoryError set.
    unsigned char* extend(size_t more) {
        if (capacity_ - size_ < more && !grow(more)) return nullptr;
        unsigned char* at = data_ + size_;
        size_ += more;
        return at;
    }

private:
    bool grow(size_t more) {
        constexpr size_t limit = static_cast<size_t>(PY_SSIZE_T_MAX);
        if (more > limit - size_) return PyErr_NoMemory() != nullptr;
        const size_t needed = size_ + more;
        const size_t wanted = capacity_ > limit / 2 ? limit : capacity_ * 2;
        const size_t capacity = needed > wanted ? needed : wanted;
        void* bigger = PyMem_Realloc(data_ == stack_ ? nullptr : data_, capacity);
        if (bigger == nullptr) return PyErr_NoMemory() != nullptr;
        if (data_ == stack_) std::memcpy(bigger, stack_, size_);
        data_ = static_cast<unsigned char*>(bigger);
        capacity_ = capacity;
        return true;
    }

    unsigned char stack_[kStackBytes];
    unsigned char* data_ = stack_;
    size_t size_ = 0;
    size_t capacity_ = kStackBytes;
};

class Encoder {
public:
    explicit Encoder(PyObject* fallback) : fallback_(fallback) {}
    ~Encoder() {
        Py_XDECREF(buffers_);
        Py_XDECREF(path_);
    }
    PyObject* run(PyObject* object);

    // Encodes `object`: the header, which is the prefix, the tree and the table, and the buffers beside it.
    // False with an exception; `tell_path` then leaves on it where in the object it happened.
    bool build(PyObject* object);
    const Output& header() const { return out_; }
    PyObject* buffers() const { return buffers_; }  // a list of what has a buffer, or nullptr for none
    // Leaves where in the object it happened on the exception that is set.
    void tell_path();
    // What was built as (header, buffers, bytes of the frame).
    PyObject* result();

private:
    bool value(PyObject* object, int depth);
    bool integer(PyObject* object, int depth);
    bool wide_number(long long value);
    bool text(const char* data, size_t nbytes);
    bool long_text(const char* data, size_t nbytes);
    bool string(PyObject* object);
    bool surrogates(PyObject* object);
    bool bytes(PyObject* object);
    bool byte_array(PyObject* object);
    bool list(PyObject* object, int depth);
    bool tuple(PyObject* object, int depth);
    bool set(PyObject* object, Code code, int depth);
    bool dict(PyObject* object, int depth);
    bool array(PyObject* object, Code code, const Array& array);
    bool other(PyObject* object, int depth);
    bool described(PyObject* description, int depth);
    bool far(PyObject* object, FarKind kind);
    bool blob(const unsigned char* data, size_t nbytes);
    bool wide_count(size_t entries, uint8_t wide);
    bool begin(uint8_t code, size_t* mark);
    bool end(size_t mark);
    bool far_extension(PyObject* object, Code code);
    bool enter(int depth);
    bool changed(const char* kind);
    bool fail(char kind, PyObject* key, PyObject* container);
    bool finish();

    // Encodes an entry of a container, of which it need not own a reference.
    bool entry(PyObject* object, int depth) {
        if (Py_TYPE(object) == &PyLong_Type) {  // half of what a scheduler step consists of, and nothing else can run
            int overflow = 0;
            const long long small = PyLong_AsLongLongAndOverflow(object, &overflow);
            if (overflow == 0) return number(small);
        }
        const Ref held = Ref::borrowed(object);
        return value(object, depth);
    }
    bool number(long long value) {
        return value >= -32 && value <= 127 ? byte(static_cast<uint8_t>(value)) : wide_number(value);
    }
    // Writes the head of a map or array.
    bool count(size_t entries, uint8_t fixed, uint8_t wide) {
        return entries < 16 ? byte(static_cast<uint8_t>(fixed | entries)) : wide_count(entries, wide);
    }
    bool byte(uint8_t value) {
        unsigned char* at = out_.extend(1);
        if (at == nullptr) return false;
        *at = value;
        return true;
    }
    template <typename T>
    bool tagged(uint8_t tag, T value) {
        unsigned char* at = out_.extend(1 + sizeof(T));
        if (at == nullptr) return false;
        *at = tag;
        const T wire = swapped(value);
        std::memcpy(at + 1, &wire, sizeof(T));
        return true;
    }

    PyObject* fallback_;
    PyObject* buffers_ = nullptr;  // list of windows and memoryviews, made for the first one
    PyObject* path_ = nullptr;     // list of (kind, key, container), innermost first, made on failure
    uint64_t nbytes_ = 0;
    std::string kinds_;            // FarKind of each buffer
    Output out_;
};

}  // namespace codec
