// What all parts of the native codec share. `codec/__init__.py` documents the format of a frame.
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
inline constexpr size_t kAlignment = 64;        // the size of a cache line and of the widest vector load
inline constexpr size_t kInlineLimit = 2048;    // smaller buffers are sent in the tree
static_assert(kInlineLimit <= UINT16_MAX);
inline constexpr int kMaxDepth = 256;
inline constexpr Py_ssize_t kMaxSameHash = 128;  // most keys of one dict or set that may share a hash
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

// Extension codes. Python builds the values of kFirstHook and above; from kFirstData on, their body is raw data. The codes
// that have a name here are those that the core can handle itself.
enum Code : uint8_t {
    kTuple = 1,
    kSet = 2,
    kFrozenSet = 3,
    kByteArray = 4,
    kFarBytes = 5,
    kFarByteArray = 6,
    kSurrogates = 7,
    kFirstHook = 16,
    kRegistered = 19,
    kFirstData = 64,
    kNumpyArray = 64,
    kTorchTensor = 80,
    kLastCode = 127,
};

// What a buffer becomes; this is the top byte of its entry in the table. It lets the receiver of a frame in parts allocate
// the buffers before they arrive.
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

// Sets an exception and returns false.
[[gnu::format(printf, 2, 3)]] bool set_error(PyObject* type, const char* format, ...);

// Bytes at an address.
struct Span {
    const unsigned char* data;
    size_t nbytes;
};

// A contiguous view of an object's bytes.
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
    const Py_buffer& buffer() const { return view_; }
    unsigned char* data() const { return static_cast<unsigned char*>(view_.buf); }
    size_t size() const { return static_cast<size_t>(view_.len); }

private:
    Py_buffer view_{};
    bool held_ = false;
};

// Refuses a dict or set whose keys were made to share one hash, because each of them is compared with every other one.
// The hashes of strings and bytes are secret, and machine integers hardly collide: only other keys are counted, and only
// in containers that are large enough to matter.
class KeyGuard {
public:
    explicit KeyGuard(Py_ssize_t entries) {
        if (entries > kMaxSameHash) seen_.emplace();
    }
    // Returns false with an exception set if there are too many keys like this one.
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
            return PyErr_NoMemory() != nullptr;
        }
        return set_error(PyExc_ValueError, "more than %zd keys share one hash", kMaxSameHash);
    }

    std::optional<std::unordered_map<Py_hash_t, Py_ssize_t>> seen_;  // only in large containers
};

// Returns whether a function got the number of arguments that it takes; sets an exception if not.
bool expect_arguments(const char* function, Py_ssize_t got, Py_ssize_t wanted);

// Returns a window on `nbytes` at `address` that keeps `owner` alive. It is `exclusive` if nothing else uses these bytes.
PyObject* make_window(PyObject* owner, unsigned char* address, size_t nbytes, bool exclusive);
bool is_window(PyObject* object);

// Adds the codec's functions, constants and types to the module; returns -1 with an exception set on failure.
int add_codec(PyObject* module);

}  // namespace codec
