// This file implements the assembly of frames that arrive in parts.
#include "assembly.hpp"

#include <algorithm>
#include <utility>

#include "../codec/blocks.hpp"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace codec {
namespace {

// Buffers of this size or more are written past the caches, because a cache would first read every line that it overwrites.
constexpr size_t kPastCaches = size_t{4} << 20;

void copy_past_caches(unsigned char* to, const unsigned char* from, size_t nbytes) {
#if defined(__x86_64__)
    const size_t head = std::min<size_t>(-reinterpret_cast<uintptr_t>(to) % 64, nbytes);
    std::memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64) {
        const __m128i* source = reinterpret_cast<const __m128i*>(from);
        __m128i* target = reinterpret_cast<__m128i*>(to);
        const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
        const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    _mm_sfence();
#endif
    std::memcpy(to, from, nbytes);
}

}  // namespace

Assembly::Assembly() { use_pool(); }

Assembly::~Assembly() {
    clear();
    leave_pool();
}

void Assembly::begin(uint64_t message, uint64_t total) {
    clear();
    message_ = message;
    total_ = total;
    wanted_ = std::min<uint64_t>(sizeof(Prefix), total);
}

void Assembly::clear() {
    for (const FarBuffer& buffer : far_) Py_DECREF(buffer.object);
    far_.clear();
    starts_.clear();
    header_.clear();
    message_ = total_ = filled_ = 0;
    wanted_ = current_ = 0;
    is_measured_ = is_broken_ = out_of_memory_ = is_decoded_ = false;
    // Let go of last and all at once, because a destructor may look at the assembly.
    const Ref outcome(std::move(outcome_));
    const Built built(std::exchange(built_, Built()));
}

void Assembly::settle(Ref outcome, bool is_decoded) {
    outcome_ = std::move(outcome);
    is_decoded_ = is_decoded;
    const Built built(std::exchange(built_, Built()));
}

// Learns the header's length from the prefix. Returns false if the prefix is invalid.
bool Assembly::measure() {
    Prefix prefix;
    if (header_.size() < sizeof(prefix)) return false;
    std::memcpy(&prefix, header_.data(), sizeof(prefix));
    if (prefix.magic != kMagic || prefix.version != kVersion || prefix.total != total_) return false;
    if (prefix.tree > total_ - sizeof(prefix)) return false;
    const size_t table = aligned(sizeof(prefix) + prefix.tree, 8);
    if (table > total_ || prefix.buffers > (total_ - table) / 8) return false;
    wanted_ = table + 8 * prefix.buffers;
    return true;
}

bool Assembly::add_buffer(uint64_t entry) {
    const uint64_t nbytes = entry & kLengthMask;
    const uint64_t start = aligned(starts_.empty() ? wanted_ : starts_.back() + far_.back().nbytes);
    if (start > total_ || nbytes > total_ - start) return false;
    const Py_ssize_t length = static_cast<Py_ssize_t>(nbytes);
    FarBuffer buffer{nullptr, nullptr, static_cast<size_t>(nbytes)};
    if (entry >> kKindShift == kBytesKind) {
        buffer.object = PyBytes_FromStringAndSize(nullptr, length);
        if (buffer.object) buffer.data = reinterpret_cast<unsigned char*>(PyBytes_AsString(buffer.object));
    } else if (entry >> kKindShift == kByteArrayKind) {
        buffer.object = PyByteArray_FromStringAndSize(nullptr, length);
        if (buffer.object) buffer.data = reinterpret_cast<unsigned char*>(PyByteArray_AsString(buffer.object));
    } else {
        buffer.object = new_block(buffer.nbytes, &buffer.data);
    }
    if (buffer.object == nullptr) {
        PyErr_Clear();
        out_of_memory_ = true;
        return false;
    }
    far_.push_back(buffer);
    starts_.push_back(start);
    return true;
}

// Allocates every buffer of the table. Returns false if the table is invalid or memory is short.
bool Assembly::make_room() {
    Prefix prefix;
    std::memcpy(&prefix, header_.data(), sizeof(prefix));
    far_.reserve(prefix.buffers);
    starts_.reserve(prefix.buffers);
    const unsigned char* table = header_.data() + wanted_ - 8 * prefix.buffers;
    for (uint64_t i = 0; i < prefix.buffers; ++i) {
        uint64_t entry = 0;
        std::memcpy(&entry, table + 8 * i, sizeof(entry));
        if (!add_buffer(entry)) return false;
    }
    return (far_.empty() ? wanted_ : starts_.back() + far_.back().nbytes) == total_;
}

// Copies the bytes that belong to the buffers and drops the padding between them.
void Assembly::fill(const unsigned char* from, size_t nbytes) {
    while (nbytes > 0 && current_ < far_.size()) {
        const FarBuffer& buffer = far_[current_];
        if (filled_ < starts_[current_]) {
            const size_t gap = std::min<uint64_t>(starts_[current_] - filled_, nbytes);
            from += gap, nbytes -= gap, filled_ += gap;
        }
        const size_t at = static_cast<size_t>(filled_ - std::min(filled_, starts_[current_]));
        const size_t length = std::min(buffer.nbytes - at, nbytes);
        if (buffer.nbytes >= kPastCaches) {
            copy_past_caches(buffer.data + at, from, length);
        } else if (length > 0) {
            std::memcpy(buffer.data + at, from, length);
        }
        from += length, nbytes -= length, filled_ += length;
        if (filled_ >= starts_[current_] && at + length == buffer.nbytes) ++current_;
    }
    filled_ += nbytes;
}

void Assembly::feed(const unsigned char* from, size_t nbytes) {
    try {
        while (!is_broken_ && nbytes > 0 && header_.size() < wanted_) {
            const size_t length = std::min(wanted_ - header_.size(), nbytes);
            header_.insert(header_.end(), from, from + length);
            from += length, nbytes -= length, filled_ += length;
            if (header_.size() < wanted_) return;
            if (!is_measured_) {
                is_measured_ = true;
                is_broken_ = !measure();
            }
            if (!is_broken_ && header_.size() == wanted_) is_broken_ = !make_room();
        }
    } catch (const std::bad_alloc&) {
        is_broken_ = out_of_memory_ = true;
    }
    if (is_broken_) {
        filled_ += nbytes;
    } else if (nbytes > kUnlockedCopy) {
        Py_BEGIN_ALLOW_THREADS
        fill(from, nbytes);
        Py_END_ALLOW_THREADS
    } else {
        fill(from, nbytes);
    }
}

PyObject* Assembly::finish(PyObject* hook) {
    PyObject* result = nullptr;
    if (out_of_memory_) {
        PyErr_NoMemory();
    } else if (is_broken_) {
        PyErr_SetString(PyExc_ValueError, "the prefix or the table of buffers does not fit the length of the frame");
    } else {
        built_.rewind();
        Decoder decoder({header_.data(), header_.size()}, static_cast<size_t>(total_), far_.data(), hook, &built_);
        result = decoder.run();
    }
    return result;
}

}  // namespace codec
