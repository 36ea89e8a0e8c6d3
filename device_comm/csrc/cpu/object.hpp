// The Python object that holds one rank's end of a shared region, and what the source files of the module
// `device_comm._core` share.
#pragma once

#include <Python.h>

#include "../../../shm_broadcast/csrc/codec/ref.hpp"
#include "call.hpp"

// The status of a call; equal to the constants of the module.
enum Status : long { kDone = 0, kPending = 1, kDisagree = 2, kClosed = 3, kBusy = 4, kLeft = 5, kNested = 6, kAbandoned = 7 };

// Each adds a part of the module; returns -1 with an exception set on failure.
int board_add(PyObject* module);
int channels_add(PyObject* module);
int constants_add(PyObject* module);
int tensors_add(PyObject* module);

namespace region {

using codec::Ref;

// What a rank has posted for a call for which the ranks disagree.
struct Posted {
    View view;
    std::vector<uint64_t> widths;  // of an exchange: sent to each rank, then expected from each rank
    std::string reason;            // why it refused the call, or empty
};

// The posts of all ranks, kept for the thread of this rank that made the call.
struct Disagreement {
    unsigned long thread;
    std::vector<Posted> posts;
};

struct Object {
    PyObject_HEAD
    uint64_t born;  // value of `forks` when it was created
    Py_buffer view;
    bool has_view;
    SharedRegion* region;
    Call* call;  // in progress, or nullptr
    bool is_busy;  // a thread is inside the call
    unsigned long owner;  // the thread that began `call`
    bool is_left;  // an exception left a caller while no thread was inside of `call`, and nobody has continued it since
    bool is_closed;
    uint64_t number;  // calls begun so far
    PyObject* lane;   // keeps the lane of the status page in which the region reports, or nullptr
    // The next two are used only under the GIL, and are null until there is something to keep.
    SharedRegion::Refusals* deferred;  // made during another thread's call; get their numbers at its end
    std::list<Disagreement>* disagreements;  // those that their threads have not read yet
};

inline Object* object_of(PyObject* self) { return reinterpret_cast<Object*>(self); }

// What the ranks compare, besides sizes, before they move any data.
inline uint64_t code_of(Kind kind, uint64_t type, uint64_t op, uint64_t root) {
    return static_cast<uint64_t>(kind) | type << 8 | op << 16 | root << 24;
}

// Begins a call and runs it for a first slice. Returns its status; or -1 with an exception set, if no call was begun.
long start(Object* object, Plan&& plan, uint64_t code);

// Returns kDone if a new call may begin, otherwise the status to return.
long refusal(Object* object);

// Keeps what the ranks have posted in the current step for the thread that made the call, if there is memory for that.
void keep_posts(Object* object);

// Sets the kernel of a plan; returns false with an exception set if there is none.
bool find_kernel(uint64_t type, uint64_t op, bool streaming, Plan* plan);

// Returns a hash of the widths and the rows, which must be equal on all ranks.
uint64_t hash_of(const Columns& columns);

// Reads `count` unsigned integers; returns false with an exception set on failure.
bool read_unsigned(PyObject* const* args, Py_ssize_t count, uint64_t* values);

// Returns whether a method got as many arguments as it takes, and at most so many optional ones; if not, sets an exception.
bool expect(const char* name, Py_ssize_t got, Py_ssize_t wanted, Py_ssize_t optional = 0);

// The object's methods that are defined outside of core.cpp.
PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* all_reduce_into(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* all_gather(PyObject* self, PyObject* const* args, Py_ssize_t count);
PyObject* missing(PyObject* self, PyObject*);
PyObject* last_calls(PyObject* self, PyObject*);
PyObject* disagreement(PyObject* self, PyObject*);

}  // namespace region
