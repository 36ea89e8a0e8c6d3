// Frames that arrive in parts.
#include "assembly.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>

namespace codec {
namespace {

constexpr size_t kHuge = size_t{2} << 20;
constexpr size_t kPooled = size_t{64} << 10;      // smaller blocks come from malloc, which keeps them itself
constexpr size_t kMostPooled = size_t{64} << 20;  // bytes that wait for reuse at most

// Blocks that were given back and wait for their next use: fresh memory costs a page fault per 4 KiB, 3 ms for
// 8 MiB, more than the copy. Guarded by the GIL; emptied when the last reader is closed.
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

// Maps `nbytes`; from kHuge on aligned for huge pages, which are asked for. nullptr when there is no memory.
void* map_block(size_t nbytes) {
    const size_t extra = nbytes >= kHuge ? kHuge : 0;
    void* mapped = mmap(nullptr, nbytes + extra, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    if (extra == 0) return mapped;
    unsigned char* first = static_cast<unsigned char*>(mapped);
    const size_t before = aligned(reinterpret_cast<uintptr_t>(mapped), kHuge) - reinterpret_cast<uintptr_t>(mapped);
    if (before > 0) munmap(first, before);
    if (before < extra) munmap(first + before + nbytes, extra - before);
    madvise(first + before, nbytes, MADV_HUGEPAGE);  // refused where there are none
    return first + before;
}

// Returns a block of exactly block_bytes(nbytes), of any content.
void* take_block(size_t nbytes) {
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

void give_block(void* memory, size_t nbytes) {
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
    void* memory = PyCapsule_GetPointer(capsule, nullptr);
    const size_t nbytes = reinterpret_cast<size_t>(PyCapsule_GetContext(capsule));
    if (nbytes < kPooled) {
        std::free(memory);
    } else {
        give_block(memory, nbytes);
    }
}

// Returns a window on memory that nothing else uses; nullptr with MemoryError set.
PyObject* new_block(size_t nbytes, unsigned char** data) {
    void* memory = nullptr;
    if (nbytes >= kPooled) {
        memory = take_block(nbytes);
    } else if (posix_memalign(&memory, kAlignment, nbytes == 0 ? 1 : nbytes) != 0) {
        memory = nullptr;
    }
    if (memory == nullptr) return PyErr_NoMemory();
    *data = static_cast<unsigned char*>(memory);
    Ref owner(PyCapsule_New(memory, nullptr, nullptr));
    if (!owner || PyCapsule_SetContext(owner.get(), reinterpret_cast<void*>(nbytes)) < 0 ||
        PyCapsule_SetDestructor(owner.get(), free_block) < 0) {
        nbytes >= kPooled ? give_block(memory, nbytes) : std::free(memory);
        return nullptr;
    }
    return make_window(owner.get(), *data, nbytes, true);
}

}  // namespace

Assembly::Assembly() { ++users; }

Assembly::~Assembly() {
    clear();
    if (--users > 0) return;
    while (pooled_blocks > 0) drop_block(0);
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
    is_measured_ = is_broken_ = out_of_memory_ = false;
}

// Learns the header's length from the prefix; false when it makes no sense.
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

// Makes room for every buffer of the table; false when the table makes no sense or memory is short.
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

// Copies what belongs to the buffers; the padding between them is dropped.
void Assembly::fill(const unsigned char* from, size_t nbytes) {
    while (nbytes > 0 && current_ < far_.size()) {
        const FarBuffer& buffer = far_[current_];
        if (filled_ < starts_[current_]) {
            const size_t gap = std::min<uint64_t>(starts_[current_] - filled_, nbytes);
            from += gap, nbytes -= gap, filled_ += gap;
        }
        const size_t at = static_cast<size_t>(filled_ - std::min(filled_, starts_[current_]));
        const size_t length = std::min(buffer.nbytes - at, nbytes);
        if (length > 0) std::memcpy(buffer.data + at, from, length);
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
        Decoder decoder({header_.data(), header_.size()}, static_cast<size_t>(total_), far_.data(), hook);
        result = decoder.run();
    }
    clear();
    return result;
}

}  // namespace codec
