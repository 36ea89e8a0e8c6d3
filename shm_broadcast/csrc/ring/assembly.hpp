// This file declares the assembly of a message that comes in parts. The parts are copied straight into the memory where the
// buffers stay, so that each byte is copied once.
#pragma once

#include <vector>

#include "../codec/decoder.hpp"

namespace codec {

class Assembly {
public:
    Assembly();
    ~Assembly();
    Assembly(const Assembly&) = delete;
    Assembly& operator=(const Assembly&) = delete;

    bool active() const { return total_ > 0; }
    uint64_t message() const { return message_; }
    uint64_t total() const { return total_; }
    uint64_t missing() const { return total_ - filled_; }

    // Begins message number `message`, whose frame has `total` > 0 bytes.
    void begin(uint64_t message, uint64_t total);
    // Takes the next bytes of the frame, at most `missing()`. Releases the GIL for long copies. Never fails: `finish` reports
    // an invalid frame or a lack of memory after all bytes have come, so that the next message can follow.
    void feed(const unsigned char* from, size_t nbytes);
    // Returns the object, or nullptr with an exception. The assembly stays active until `clear`, so that the same message can be
    // decoded again after an exception that is not its own fault. No object of a registered class is then built twice.
    PyObject* finish(PyObject* hook);
    // Keeps what takes the place of the message, its object or an error, until `clear`.
    void settle(Ref outcome, bool is_decoded);
    PyObject* outcome() const { return outcome_.get(); }  // borrowed; nullptr before `settle`
    bool is_decoded() const { return is_decoded_; }
    void clear();
    int traverse(visitproc visit, void* arg) const {
        Py_VISIT(outcome_.get());
        return built_.traverse(visit, arg);
    }

private:
    bool measure();
    bool make_room();
    bool add_buffer(uint64_t entry);
    void fill(const unsigned char* from, size_t nbytes);

    uint64_t message_ = 0;
    uint64_t total_ = 0;
    uint64_t filled_ = 0;
    size_t wanted_ = 0;          // length of the header, as far as it is known
    bool is_measured_ = false;   // wanted_ is the whole length
    bool is_broken_ = false;     // the header is invalid or memory is short: the rest is thrown away
    bool out_of_memory_ = false;
    size_t current_ = 0;         // index of the buffer that is being filled
    std::vector<unsigned char> header_;
    std::vector<FarBuffer> far_;
    std::vector<uint64_t> starts_;  // offset of each buffer in the frame
    Built built_;  // empty once the message is decoded
    Ref outcome_;
    bool is_decoded_ = false;
};

}  // namespace codec
