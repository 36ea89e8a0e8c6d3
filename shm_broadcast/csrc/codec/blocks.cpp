// Pooled memory for received messages and computed results.
#include "blocks.hpp"

#include <sys/mman.h>

#include <cstdlib>

namespace codec {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kPooled = size_t{64} << 10;      // smaller blocks come from malloc, which has its own pools
constexpr size_t kMostPooled = size_t{64} << 20;  // most bytes that wait for reuse

// Freed blocks that wait for reuse. New memory costs a page fault per 4 KiB: 3 ms for 8 MiB, more than copying it.
// The GIL guards the pool, and the last user empties it.
struct Block {
    void* memory;
    size_t nbytes;
};
constexpr size_t kMostBlocks = 8;
Block pool[kMostBlocks];
size_t pooled_blocks = 0;
size_t pooled_bytes = 0;
size_t users = 0;

size_t block_bytes(size_t nbytes) { return aligned(nbytes, nbytes >= kHuge ? kHuge : size_t{4096}); }

void drop_block(size_t index) {
    munmap(pool[index].memory, pool[index].nbytes);
    pooled_bytes -= pool[index].nbytes;
    pool[index] = pool[--pooled_blocks];
}

// Maps `nbytes`; returns nullptr if there is no memory. From kHuge on, the mapping is aligned for huge pages and asks for
// them.
void* map_block(size_t nbytes) {
    const size_t extra = nbytes >= kHuge ? kHuge : 0;
    void* mapped = mmap(nullptr, nbytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    if (extra == 0) return mapped;
    unsigned char* first = static_cast<unsigned char*>(mapped);
    const size_t before = aligned(reinterpret_cast<uintptr_t>(mapped), kHuge) - reinterpret_cast<uintptr_t>(mapped);
    if (before > 0) munmap(first, before);
    if (before < extra) munmap(first + before + nbytes, extra - before);
    madvise(first + before, nbytes, MADV_HUGEPAGE);  // a hint, which the kernel may refuse
    return first + before;
}

// Returns uninitialised memory for `nbytes`; nullptr if there is none.
void* take_block(size_t nbytes) {
    if (nbytes < kPooled) return std::aligned_alloc(kAlignment, aligned(nbytes == 0 ? 1 : nbytes));
    const size_t wanted = block_bytes(nbytes);
    for (size_t i = 0; i < pooled_blocks; ++i) {
        if (pool[i].nbytes != wanted) continue;
        void* memory = pool[i].memory;
        pooled_bytes -= wanted;
        pool[i] = pool[--pooled_blocks];
        return memory;
    }
    return map_block(wanted);
}

// Takes back what `take_block` returned for `nbytes`.
void give_block(void* memory, size_t nbytes) {
    if (nbytes < kPooled) return std::free(memory);
    const size_t given = block_bytes(nbytes);
    if (users == 0 || given > kMostPooled) {
        munmap(memory, given);
        return;
    }
    while (pooled_blocks == kMostBlocks || pooled_bytes + given > kMostPooled) drop_block(0);
    pool[pooled_blocks++] = {memory, given};
    pooled_bytes += given;
}

void free_block(PyObject* capsule) {
    give_block(PyCapsule_GetPointer(capsule, nullptr), reinterpret_cast<size_t>(PyCapsule_GetContext(capsule)));
}

}  // namespace

PyObject* new_block(size_t nbytes, unsigned char** data) {
    void* memory = take_block(nbytes);
    if (memory == nullptr) return PyErr_NoMemory();
    *data = static_cast<unsigned char*>(memory);
    Ref owner(PyCapsule_New(memory, nullptr, nullptr));
    if (!owner || PyCapsule_SetContext(owner.get(), reinterpret_cast<void*>(nbytes)) < 0 ||
        PyCapsule_SetDestructor(owner.get(), free_block) < 0) {
        give_block(memory, nbytes);
        return nullptr;
    }
    return make_window(owner.get(), *data, nbytes, true);
}

void use_pool() { ++users; }

void leave_pool() {
    if (--users > 0) return;
    while (pooled_blocks > 0) drop_block(0);
}

namespace {

struct BlockPool {
    PyObject_HEAD
    bool is_open;
};

PyObject* block_pool_new(PyTypeObject* type, PyObject*, PyObject*) {
    PyObject* self = PyType_GenericAlloc(type, 0);
    if (self == nullptr) return nullptr;
    use_pool();
    reinterpret_cast<BlockPool*>(self)->is_open = true;
    return self;
}

void close_pool(BlockPool* pool) {
    if (pool->is_open) leave_pool();
    pool->is_open = false;
}

void block_pool_dealloc(PyObject* self) {
    PyTypeObject* type = Py_TYPE(self);
    close_pool(reinterpret_cast<BlockPool*>(self));
    PyObject_Free(self);
    Py_DECREF(type);
}

// take(nbytes): returns a window that owns uninitialised memory exclusively.
PyObject* block_pool_take(PyObject*, PyObject* size) {
    const Py_ssize_t nbytes = PyLong_AsSsize_t(size);
    if (nbytes == -1 && PyErr_Occurred()) return nullptr;
    if (nbytes < 0) return PyErr_Format(PyExc_ValueError, "the size of a block cannot be negative");
    unsigned char* data = nullptr;
    return new_block(static_cast<size_t>(nbytes), &data);
}

PyObject* block_pool_close(PyObject* self, PyObject*) {
    close_pool(reinterpret_cast<BlockPool*>(self));
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"take", block_pool_take, METH_O, nullptr},
    {"close", block_pool_close, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(block_pool_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(block_pool_dealloc)},
    {Py_tp_methods, methods},
    {0, nullptr},
};

PyType_Spec spec = {"shm_broadcast._core.BlockPool", sizeof(BlockPool), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

int blocks_add(PyObject* module) {
    Ref type(PyType_FromSpec(&spec));
    return type && PyModule_AddObjectRef(module, "BlockPool", type.get()) == 0 ? 0 : -1;
}

}  // namespace codec
