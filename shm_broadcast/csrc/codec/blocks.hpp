// Pooled memory for received messages and computed results.
#pragma once

#include "codec.hpp"

namespace codec {

// Returns a window that owns uninitialised memory exclusively; nullptr with MemoryError set.
PyObject* new_block(size_t nbytes, unsigned char** data);

// The pool keeps freed blocks of 64 KiB or more while it has users.
void use_pool();
void leave_pool();

// Adds the type BlockPool to the module; returns -1 with an exception set on failure.
int blocks_add(PyObject* module);

}  // namespace codec
