// The object codec's wire constants and the growable output; the format stands in codec.py.
#pragma once

#include <Python.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <unordered_map>

#include "ref.hpp"

namespace codec {

static_assert(std::endian::native == std::endian::little, "the prefix is written in native order");

inline constexpr uint32_t kMagic = 0x43424347;  // "GCBC" in memory order
inline constexpr uint8_t kVersion = 1;
inline constexpr size_t kAlignment = 64;        // a cache line, and the widest vector load
inline constexpr size_t kInlineLimit = 2048;    // smaller buffers travel inside the tree
static_assert(kInlineLimit <= UINT16_MAX);
inline constexpr int kMaxDepth = 256;
inline constexpr Py_ssize_t kMaxSameHash = 128;  // keys of one dict or set that share one full hash
inline constexpr size_t kUnlockedCopy = 64 * 1024;  // longer copies release the GIL

struct Prefix {
    uint32_t magic;
    uint8_t version;
    uint8_t flags;
    uint16_t reserved;
    uint64_t total;
    uint64_t tree;
    uint64_t buffers;
};
static_assert(sizeof(Prefix) == 32);

// Extension codes. From kFirstHook on, Python builds the value; from kFirstData on, the body is raw data. Those that
// stand here by name are the ones that the core may handle itself.
enum Code : uint8_t {
    kTuple = 1,
    kSet = 2,
    kFrozenSet = 3,
    kByteArray = 4,
    kFarBytes = 5,
    kFarByteArray = 6,
    kSurrogates = 7,
    kFirstHook = 16,
    kFirstData = 64,
    kNumpyArray = 64,
    kTorchTensor = 80,
    kLastCode = 127,
};

// What a buffer becomes, in the top byte of its entry in the table: whoever gets a frame in parts can make room for
// its buffers before they arrive.
enum FarKind : uint8_t { kDataKind = 0, kBytesKind = 1, kByteArrayKind = 2 };
inline constexpr int kKindShift = 56;
inline constexpr uint64_t kLengthMask = (uint64_t{1} << kKindShift) - 1;

inline constexpr size_t aligned(size_t offset, size_t to = kAlignment) { return (offset + to - 1) & ~(to - 1); }

template <typename T>
inline T swapped(T value) {
    if constexpr (sizeof(T) == 2) return __builtin_bswap16(value);
    else if constexpr (sizeof(T) == 4) return __builtin_bswap32(value);
    else if constexpr (sizeof(T) == 8) return __builtin_bswap64(value);
    else return value;
}

// Bytes at an address.
struct Span {
    const unsigned char* data;
    size_t nbytes;
};

// One C-contiguous view of an object's bytes.
class View {
public:
    View() = default;
    ~View() {
        if (held_) PyBuffer_Release(&view_);
    }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    bool acquire(PyObject* object, int flags = PyBUF_SIMPLE) {
        held_ = PyObject_GetBuffer(object, &view_, flags) == 0;
        return held_;
    }
    unsigned char* data() const { return static_cast<unsigned char*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_{};
    bool held_ = false;
};

// Refuses a dict or set whose keys were built to share one hash: each such key costs a comparison with
// every other one. Strings and bytes have secret hashes and machine integers hardly collide, so only
// other keys are counted, and only in containers large enough to matter.
class KeyGuard {
public:
    explicit KeyGuard(Py_ssize_t entries) {
        if (entries > kMaxSameHash) seen_.emplace();
    }
    bool admit(PyObject* key) { return !seen_ || count(key); }

private:
    bool count(PyObject* key) {
        PyTypeObject* type = Py_TYPE(key);
        if (type == &PyUnicode_Type || type == &PyBytes_Type || type == &PyFloat_Type) return true;
        if (type == &PyLong_Type) {
            int overflow = 0;
            PyLong_AsLongLongAndOverflow(key, &overflow);
            if (overflow == 0) return true;
        }
        const Py_hash_t hash = PyObject_Hash(key);
        if (hash == -1 && PyErr_Occurred()) return false;
        try {
            if (++(*seen_)[hash] <= kMaxSameHash) return true;
        } catch (const std::bad_alloc&) {
            PyErr_NoMemory();
            return false;
        }
        PyErr_Format(PyExc_ValueError, "more than %zd keys share one hash", kMaxSameHash);
        return false;
    }

    std::optional<std::unordered_map<Py_hash_t, Py_ssize_t>> seen_;  // of large containers only
};

// A function of METH_FASTCALL; the cast is the one that CPython documents.
using FastCall = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
bool expect_arguments(const char* function, Py_ssize_t got, Py_ssize_t wanted);

PyObject* encode(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* write_frame(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* window(PyObject*, PyObject* const* args, Py_ssize_t count);
PyObject* copy_into(PyObject*, PyObject* const* args, Py_ssize_t count);

// A window on `nbytes` at `address` that keeps `owner` alive; `exclusive`: nothing else uses these bytes.
PyObject* make_window(PyObject* owner, unsigned char* address, size_t nbytes, bool exclusive);
bool is_window(PyObject* object);

// Adds the codec's functions, constants and types to the module; -1 with an exception on failure.
int add_codec(PyObject* module);

}  // namespace codec
