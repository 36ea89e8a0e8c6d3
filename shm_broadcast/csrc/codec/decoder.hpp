// The decoder: a frame, in one piece or with its buffers elsewhere, to an object tree.
#pragma once

#include "arrays.hpp"

namespace codec {

// A buffer that stands in memory of its own, outside of the frame.
struct FarBuffer {
    PyObject* object;  // bytes, bytearray, or an exclusive window
    unsigned char* data;
    size_t nbytes;
};

class Decoder {
public:
    // `owner` keeps the frame's bytes alive for the windows on them.
    Decoder(Span frame, PyObject* owner, PyObject* hook, bool copies)
        : hook_(hook), owner_(owner), copies_(copies), total_(frame.nbytes), start_(frame.data), readable_(frame.nbytes) {}
    // A frame of `total` bytes of which `header` are in one piece, and each buffer in memory of its own.
    Decoder(Span header, size_t total, const FarBuffer* far, PyObject* hook)
        : hook_(hook), total_(total), start_(header.data), readable_(header.nbytes), far_(far) {}
    PyObject* run();

private:
    struct Taken {
        Span bytes;
        PyObject* object;  // what holds them, if they stand on their own
        bool is_inline;    // they stand in the tree
    };
    // What a frame says of an array, once all of it has been checked.
    struct ArrayFacts {
        const void* dtype;
        int dimensions;
        int64_t shape[kMaxDimensions];
        Taken taken;
    };

    bool prefix();
    bool zeros(const unsigned char* from, size_t nbytes);
    PyObject* value(int depth);
    PyObject* string(size_t nbytes);
    PyObject* blob(size_t nbytes);
    PyObject* list(size_t entries, int depth);
    PyObject* tuple(size_t entries, int depth);
    PyObject* set(size_t entries, bool frozen, int depth);
    PyObject* dict(size_t entries, int depth);
    PyObject* key(int depth);
    PyObject* extension(int depth);
    PyObject* extended(uint8_t code, int depth);
    PyObject* raw(uint8_t code);
    PyObject* hooked(uint8_t code, int depth);
    PyObject* array(uint8_t code);
    bool array_facts(uint8_t code, ArrayFacts* facts);
    bool natural_number(uint64_t* number);
    PyObject* data();
    bool raw_data(Taken* taken);
    bool far(Taken* taken, FarKind kind);
    bool array_head(size_t* entries);
    bool claim(size_t entries, size_t each);
    bool enter(int depth);
    PyObject* refuse(const char* what);
    size_t left() const { return static_cast<size_t>(end_ - at_); }
    size_t position() const { return static_cast<size_t>(at_ - start_); }

    template <typename T>
    bool take(T* value) {
        if (sizeof(T) > left()) return refuse("the bytes end inside a value") != nullptr;
        T wire;
        std::memcpy(&wire, at_, sizeof(T));
        at_ += sizeof(T);
        *value = swapped(wire);
        return true;
    }
    template <typename T>
    bool length(size_t* nbytes) {
        T wire = 0;
        if (!take(&wire)) return false;
        *nbytes = wire;
        return true;
    }
    template <typename T>
    PyObject* natural() {
        T wire = 0;
        return take(&wire) ? PyLong_FromUnsignedLongLong(wire) : nullptr;
    }
    template <typename Wire, typename T>
    PyObject* integer() {
        Wire wire = 0;
        return take(&wire) ? PyLong_FromLongLong(static_cast<T>(wire)) : nullptr;
    }

    PyObject* hook_ = nullptr;
    PyObject* owner_ = nullptr;
    bool copies_ = true;  // arrays and tensors have memory of their own
    size_t total_;  // bytes of the frame
    const unsigned char* start_;
    size_t readable_;                 // bytes from start_ on that are in one piece
    const FarBuffer* far_ = nullptr;  // the buffers not taken yet, where they stand on their own
    const unsigned char* at_ = nullptr;
    const unsigned char* end_ = nullptr;
    const unsigned char* table_ = nullptr;  // lengths of the buffers not taken yet
    uint64_t buffers_left_ = 0;
    size_t offset_ = 0;     // end of the last buffer taken
    size_t unclaimed_ = 0;  // entries that containers may still claim
};

}  // namespace codec
