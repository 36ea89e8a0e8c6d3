// A frame in pieces: the header, then each buffer at the next multiple of kAlignment.
#pragma once

#include <algorithm>

#include "codec.hpp"

namespace codec {

class Pieces {
public:
    // Views a header and its buffers, which are a tuple, a list, or nullptr for none. Returns false with an exception set.
    bool acquire(Span header, PyObject* buffers) {
        header_ = header;
        total_ = header.nbytes;
        const Py_ssize_t count = buffers == nullptr ? 0 : PyObject_Size(buffers);
        if (count <= 0) return count == 0;
        views_.reset(new (std::nothrow) View[static_cast<size_t>(count)]);
        if (!views_) return PyErr_NoMemory() != nullptr;
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

    // Copies the bytes [from, from + bytes) of the frame to `to`. Callers need not hold the GIL.
    void copy(unsigned char* to, size_t from, size_t bytes) const {
        // Copies what is wanted of the piece [start, end), which is zero where there is no `data`.
        const auto copy_piece = [&](const unsigned char* data, size_t start, size_t end) {
            if (bytes == 0 || from < start || from >= end) return;
            const size_t length = std::min(end - from, bytes);
            if (data != nullptr) std::memcpy(to, data + (from - start), length);
            else std::memset(to, 0, length);
            to += length, from += length, bytes -= length;
        };
        size_t end = header_.nbytes;
        copy_piece(header_.data, 0, end);
        for (size_t i = 0; i < count_ && bytes > 0; ++i) {
            const size_t start = aligned(end);
            copy_piece(nullptr, end, start);
            end = start + views_[i].size();
            copy_piece(views_[i].data(), start, end);
        }
    }

private:
    Span header_{nullptr, 0};
    std::unique_ptr<View[]> views_;
    size_t count_ = 0;
    size_t total_ = 0;
};

}  // namespace codec
