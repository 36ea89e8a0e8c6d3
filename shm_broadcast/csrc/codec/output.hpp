// The header of a frame as it grows: bytes, and the parts of msgpack that the codec uses.
#pragma once

#include <array>

#include "codec.hpp"

namespace codec {

inline constexpr size_t kStackBytes = 4096;  // enough for most step inputs, which then need no allocation

// Copies fewer than 32 bytes without a call: the first and the last of them, two pieces that may overlap.
inline void copy_short(unsigned char* to, const char* from, size_t nbytes) {
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

// Every function that returns a bool returns false with an exception set if it fails. What is rare is not inlined, so that
// the common case touches few cache lines.
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

    bool byte(uint8_t value) {
        unsigned char* at = extend(1);
        if (at == nullptr) return false;
        *at = value;
        return true;
    }

    bool blob(const unsigned char* data, size_t nbytes) {
        unsigned char* at = extend(nbytes);
        if (at == nullptr) return false;
        if (nbytes > 0) std::memcpy(at, data, nbytes);
        return true;
    }

    template <typename T>
    bool tagged(uint8_t tag, T value) {
        unsigned char* at = extend(1 + sizeof(T));
        if (at == nullptr) return false;
        *at = tag;
        const T wire = swapped(value);
        std::memcpy(at + 1, &wire, sizeof(T));
        return true;
    }

    bool number(long long value) {
        return value >= -32 && value <= 127 ? byte(static_cast<uint8_t>(value)) : wide_number(value);
    }

    // Writes the head of a map or array, whose tag is `fixed` if it is short and `wide` if not.
    bool count(size_t entries, uint8_t fixed, uint8_t wide) {
        return entries < 16 ? byte(static_cast<uint8_t>(fixed | entries)) : wide_count(entries, wide);
    }

    bool text(const char* data, size_t nbytes) {
        if (nbytes >= 32) return long_text(data, nbytes);
        unsigned char* at = extend(1 + nbytes);
        if (at == nullptr) return false;
        *at = static_cast<uint8_t>(0xa0 | nbytes);
        copy_short(at + 1, data, nbytes);
        return true;
    }

    // Begins an extension; `end` writes its length.
    bool begin(uint8_t code, size_t* mark) {
        unsigned char* at = extend(6);
        if (at == nullptr) return false;
        at[0] = 0xc9;
        std::memset(at + 1, 0, 4);
        at[5] = code;
        *mark = size_;
        return true;
    }

    bool end(size_t mark) {
        const size_t length = size_ - mark;
        if (length > UINT32_MAX) return set_error(PyExc_ValueError, "the value takes more than 4294967295 bytes");
        const uint32_t wire = swapped(static_cast<uint32_t>(length));
        std::memcpy(data_ + mark - 5, &wire, sizeof(wire));
        return true;
    }

private:
    [[gnu::noinline]] bool grow(size_t more) {
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

    [[gnu::noinline]] bool wide_number(long long number) {
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

    [[gnu::noinline]] bool wide_count(size_t entries, uint8_t wide) {
        if (entries <= UINT16_MAX) return tagged(wide, static_cast<uint16_t>(entries));
        if (entries <= UINT32_MAX) return tagged(static_cast<uint8_t>(wide + 1), static_cast<uint32_t>(entries));
        return set_error(PyExc_ValueError, "the container has more than 4294967295 entries");
    }

    [[gnu::noinline]] bool long_text(const char* data, size_t nbytes) {
        bool ok = false;
        if (nbytes <= UINT8_MAX) ok = tagged(0xd9, static_cast<uint8_t>(nbytes));
        else if (nbytes <= UINT16_MAX) ok = tagged(0xda, static_cast<uint16_t>(nbytes));
        else if (nbytes <= UINT32_MAX) ok = tagged(0xdb, static_cast<uint32_t>(nbytes));
        else set_error(PyExc_ValueError, "the string has more than 4294967295 bytes");
        return ok && blob(reinterpret_cast<const unsigned char*>(data), nbytes);
    }

    unsigned char stack_[kStackBytes];
    unsigned char* data_ = stack_;
    size_t size_ = 0;
    size_t capacity_ = kStackBytes;
};

}  // namespace codec
