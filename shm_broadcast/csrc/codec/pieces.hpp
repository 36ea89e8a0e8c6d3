// A frame in pieces: the header, then each buffer at the next multiple of kAlignment.
#pragma once

#include <algorithm>

#include "codec.hpp"

namespace codec {

class Pieces {
public:
    Pieces() = default;
    ~Pieces() { delete[] views_; }
    Pieces(const Pieces&) = delete;
    Pieces& operator=(const Pieces&) = delete;

    // `buffers`: a tuple, a list, or nullptr for none. False with an exception.
    bool acquire(Span header, PyObject* buffers) {
        header_ = header;
        total_ = header.nbytes;
        const Py_ssize_t count = buffers == nullptr ? 0 : PyObject_Size(buffers);
        if (count <= 0) return count == 0;
        views_ = new (std::nothrow) View[static_cast<size_t>(count)];
        if (views_ == nullptr) return PyErr_NoMemory() != nullptr;
        count_ = static_cast<size_t>(count);
        for (size_t i = 0; i < count_; ++i) {
            const Py_ssize_t at = static_cast<Py_ssize_t>(i);
            PyObject* buffer = PyTuple_Check(buffers) ? PyTuple_GetItem(buffers, at) : PyList_GetItem(buffers, at);
            if (buffer == nullptr || !views_[i].acquire(buffer)) return false;
            total_ = aligned(total_) + views_[i].size();
        }
        return true;
    }

    size_t total() const { return total_; }

    // Copies [from, from + bytes) of the frame to `to`.
    void copy(unsigned char* to, size_t from, size_t bytes) const {
        if (from < header_.nbytes) {
            const size_t length = std::min(header_.nbytes - from, bytes);
            std::memcpy(to, header_.data + from, length);
            to += length, from += length, bytes -= length;
        }
        size_t end = header_.nbytes;
        for (size_t i = 0; i < count_ && bytes > 0; ++i) {
            const size_t start = aligned(end);
            if (from >= end && from < start) {
                const size_t gap = std::min(start - from, bytes);
                std::memset(to, 0, gap);
                to += gap, from += gap, bytes -= gap;
            }
            end = start + views_[i].size();
            if (bytes == 0 || from < start || from >= end) continue;
            const size_t length = std::min(end - from, bytes);
            std::memcpy(to, views_[i].data() + (from - start), length);
            to += length, from += length, bytes -= length;
        }
    }

private:
    Span header_{nullptr, 0};
    View* views_ = nullptr;
    size_t count_ = 0;
    size_t total_ = 0;
};

}  // namespace codec
