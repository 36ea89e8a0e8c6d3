// The decoder: builds the object of a frame, whose buffers may be in memory of their own.
#pragma once

#include "built.hpp"
#include "codec.hpp"

namespace codec {

// A buffer that is in memory of its own, outside of the frame.
struct FarBuffer {
    PyObject* object;  // bytes, bytearray, or an exclusive window
    unsigned char* data;
    size_t nbytes;
};

class Decoder {
public:
    // Decodes a frame in one piece; `owner` keeps its bytes alive for the windows on them. If it `copies`, arrays and
    // tensors get memory of their own. `hook` builds what the core does not.
    Decoder(Span frame, PyObject* owner, PyObject* hook, bool copies)
        : frame_(frame), total_(frame.nbytes), owner_(owner), hook_(hook), copies_(copies), base_(frame.data) {}
    // Decodes a frame of `total` bytes of which only the header is in one piece.
    Decoder(Span header, size_t total, const FarBuffer* far, PyObject* hook, Built* built)
        : frame_(header), total_(total), hook_(hook), far_(far), built_(built) {}
    // Returns the object, or nullptr with an exception set. The header is copied first: a frame in shared memory may change while
    // it is decoded, and its strings are measured before they are built.
    PyObject* run() const;

protected:
    Span frame_;    // what is in one piece
    size_t total_;  // bytes of the whole frame
    PyObject* owner_ = nullptr;
    PyObject* hook_;
    bool copies_ = true;
    const FarBuffer* far_ = nullptr;  // the buffers that were not taken yet, if they are in memory of their own
    Built* built_ = nullptr;  // nullptr if the buffers stay as they are, however often the frame is decoded
    const unsigned char* base_ = nullptr;  // start of a frame in one piece, whose buffers follow its header

private:
    size_t header_bytes() const;
};

}  // namespace codec
