// Memory for what is received or computed, kept for its next use.
#pragma once

#include "codec.hpp"

namespace codec {

// Returns a window on memory that nothing else uses; nullptr with MemoryError set.
PyObject* new_block(size_t nbytes, unsigned char** data);

// While anybody uses the pool, large blocks that are given back wait in it.
void use_pool();
void leave_pool();

// Adds the type BlockPool.
int blocks_add(PyObject* module);

}  // namespace codec
