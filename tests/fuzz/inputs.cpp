// Makes inputs for the decoders, a valid message with some changes each, and gives them to a decoder. The same number gives
// the same input again.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace {

struct Random {
    uint64_t state;

    // splitmix64: every 64-bit seed gives another sequence, also neighbouring ones.
    uint64_t next() {
        uint64_t word = state += 0x9E3779B97F4A7C15u;
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9u;
        word = (word ^ (word >> 27)) * 0x94D049BB133111EBu;
        return word ^ (word >> 31);
    }

    uint64_t below(uint64_t most) { return most ? next() % most : 0; }
};

const uint64_t kEdges[] = {0, 1, 2, 31, 32, 63, 64, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 0x7FFFFFFF, 0x80000000u,
                           0xFFFFFFFFu, uint64_t(1) << 56, uint64_t(1) << 62, uint64_t(1) << 63, ~uint64_t(0) - 63, ~uint64_t(0)};

// Bytes that begin a value of msgpack.
const uint8_t kTypes[] = {0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xC4, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA,
                          0xCB, 0xCC, 0xCF, 0xD0, 0xD3, 0xD4, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0, 0xFF};

constexpr size_t kHeader = 384;

struct Input {
    uint8_t* bytes;
    size_t size;
    size_t room;

    void change(Random& random, bool is_fixed) {
        // Memory of a fixed size begins with its header, which is short beside the rest.
        const size_t at = random.below(is_fixed && random.below(2) && size > kHeader ? kHeader : size);
        switch (random.below(5)) {
            case 0: bytes[at] ^= uint8_t(1) << random.below(8); break;
            case 1: bytes[at] = uint8_t(random.next()); break;
            case 2: bytes[at] = kTypes[random.below(sizeof kTypes)]; break;
            case 3: bytes[at] = uint8_t(bytes[at] + random.below(9) - 4); break;
            default: put(at, random);
        }
    }

    // Overwrite 2, 4 or 8 bytes by a number at the edge of something, or add a little to the number there.
    void put(size_t at, Random& random) {
        const size_t width = size_t(2) << random.below(3);
        if (size < width) return;
        at = at > size - width ? size - width : at;
        if (random.below(2)) at = at / 8 * 8 + width <= size ? at / 8 * 8 : at;
        uint64_t word = 0;
        std::memcpy(&word, bytes + at, width);
        word = random.below(3) ? kEdges[random.below(sizeof kEdges / sizeof *kEdges)] : word + random.below(17) - 8;
        std::memcpy(bytes + at, &word, width);
    }

    void cut(Random& random) {
        const size_t at = random.below(size), most = size - at < 64 ? size - at : 64, length = random.below(most + 1);
        std::memmove(bytes + at, bytes + at + length, size - at - length);
        size -= length;
    }

    // Insert a piece of another valid message, or of this one.
    void insert(const uint8_t* other, size_t other_size, Random& random) {
        const size_t from = random.below(other_size), left = other_size - from;
        const size_t length = random.below((left < 64 ? left : 64) + 1), at = random.below(size + 1);
        if (!other_size || size + length > room) return;
        std::memmove(bytes + at + length, bytes + at, size - at);
        std::memcpy(bytes + at, other + from, length);
        size += length;
    }
};

// Writes input `number` to `target`, which has `room` bytes, and returns its size. `is_fixed`: the size stays.
size_t mutate(uint64_t number, PyObject* seed, PyObject* other, uint8_t* target, size_t room, bool is_fixed) {
    Random random{number};
    const size_t size = static_cast<size_t>(PyBytes_GET_SIZE(seed));
    Input input{target, size < room ? size : room, room};
    std::memcpy(target, PyBytes_AS_STRING(seed), input.size);
    for (uint64_t left = 1 + random.below(random.below(4) ? 3 : 12); left && input.size; --left) {
        const uint64_t kind = is_fixed ? 0 : random.below(10);
        if (kind < 7) {
            input.change(random, is_fixed);
        } else if (kind == 7) {
            input.cut(random);
        } else if (kind == 8) {
            input.insert(reinterpret_cast<const uint8_t*>(PyBytes_AS_STRING(other)),
                         static_cast<size_t>(PyBytes_GET_SIZE(other)), random);
        } else {
            input.size = random.below(8) ? input.size : random.below(input.size + 1);
        }
    }
    return input.size;
}

struct Release {
    void operator()(PyObject* object) const { Py_XDECREF(object); }
};
using Ref = std::unique_ptr<PyObject, Release>;

// --- a read-only buffer in a block of exactly its size, so that a sanitizer sees who reads one byte beyond ------------

struct Block {
    PyObject ob_base;
    void* data;
    Py_ssize_t size;
};

int block_buffer(PyObject* self, Py_buffer* view, int flags) {
    auto* block = reinterpret_cast<Block*>(self);
    return PyBuffer_FillInfo(view, self, block->data, block->size, 1, flags);
}

void block_free(PyObject* self) {
    std::free(reinterpret_cast<Block*>(self)->data);
    PyObject_Free(self);
}

PyBufferProcs kBlockBuffer = {block_buffer, nullptr};
PyTypeObject kBlock{};

// Returns a view of a copy of `bytes`.
PyObject* exact_view(PyObject* bytes) {
    Ref block(PyObject_Init(static_cast<PyObject*>(PyObject_Malloc(sizeof(Block))), &kBlock));
    if (!block) return nullptr;
    auto* own = reinterpret_cast<Block*>(block.get());
    own->size = PyBytes_GET_SIZE(bytes);
    own->data = std::malloc(static_cast<size_t>(own->size));
    if (own->data == nullptr && own->size) return PyErr_NoMemory();
    std::memcpy(own->data, PyBytes_AS_STRING(bytes), static_cast<size_t>(own->size));
    return PyMemoryView_FromObject(block.get());
}

// --- what Python calls -------------------------------------------------------------------------------------------------

// What stands in the memory of the current input, before its bytes.
struct Current {
    uint64_t number;
    uint64_t size;
};

struct Maker {
    PyObject* seeds = nullptr;  // a tuple of bytes
    Py_buffer memory{};
    int is_fixed = 0;

    ~Maker() { PyBuffer_Release(&memory); }

    // Returns input `number`; the first ones are the seeds as they are.
    PyObject* input(uint64_t number) {
        const auto count = static_cast<uint64_t>(PyTuple_GET_SIZE(seeds));
        PyObject* seed = PyTuple_GET_ITEM(seeds, number % count);
        auto* current = static_cast<Current*>(memory.buf);
        auto* bytes = reinterpret_cast<uint8_t*>(current + 1);
        const size_t room = static_cast<size_t>(memory.len) - sizeof(Current);
        current->number = number;
        if (number < count) {
            current->size = static_cast<size_t>(PyBytes_GET_SIZE(seed));
            std::memcpy(bytes, PyBytes_AS_STRING(seed), current->size);
            return Py_NewRef(seed);
        }
        PyObject* other = PyTuple_GET_ITEM(seeds, number / 7 % count);
        current->size = mutate(number, seed, other, bytes, room, is_fixed);
        return PyBytes_FromStringAndSize(reinterpret_cast<char*>(bytes), static_cast<Py_ssize_t>(current->size));
    }
};

PyObject* make(PyObject*, PyObject* arguments) {
    Maker maker;
    unsigned long long number = 0;
    if (!PyArg_ParseTuple(arguments, "O!w*pK", &PyTuple_Type, &maker.seeds, &maker.memory, &maker.is_fixed, &number)) {
        return nullptr;
    }
    return maker.input(number);
}

struct Refusal {
    PyObject* type;
    long long count;
};

// Adds the exception that is set to `refusals` and clears it, or returns false if it is none of `errors`.
bool refused(PyObject* errors, std::vector<Refusal>& refusals) {
    if (!PyErr_ExceptionMatches(errors)) return false;
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    for (Ref gone_value(value), gone_traceback(traceback); Refusal& known : refusals) {
        if (known.type == type) return Py_DECREF(type), ++known.count, true;
    }
    refusals.push_back({type, 1});
    return true;
}

PyObject* counted(long long accepted, const std::vector<Refusal>& refusals) {
    Ref found(PyList_New(0));
    if (!found) return nullptr;
    for (const Refusal& refusal : refusals) {
        Ref pair(Py_BuildValue("(OL)", refusal.type, refusal.count));
        if (!pair || PyList_Append(found.get(), pair.get()) < 0) return nullptr;
    }
    return Py_BuildValue("(LO)", accepted, found.get());
}

PyObject* decode(PyObject*, PyObject* arguments) {
    Maker maker;
    unsigned long long first = 0, count = 0;
    PyObject *repair, *run, *errors;
    int is_view = 0;
    if (!PyArg_ParseTuple(arguments, "O!w*pKKOOO!p", &PyTuple_Type, &maker.seeds, &maker.memory, &maker.is_fixed, &first,
                          &count, &repair, &run, &PyTuple_Type, &errors, &is_view)) {
        return nullptr;
    }
    long long accepted = 0;
    std::vector<Refusal> refusals;
    for (uint64_t number = first; number < first + count; ++number) {
        Ref data(maker.input(number)), named(PyLong_FromUnsignedLongLong(number));
        if (!data || !named) return nullptr;
        if (repair != Py_None) {
            PyObject* both[] = {data.get(), named.get()};
            data.reset(PyObject_Vectorcall(repair, both, 2, nullptr));
            if (!data) return nullptr;
        }
        if (is_view) data.reset(exact_view(data.get()));
        if (!data) return nullptr;
        PyObject* both[] = {data.get(), named.get()};
        Ref result(PyObject_Vectorcall(run, both, 2, nullptr));
        if (result) {
            ++accepted;
        } else if (!refused(errors, refusals)) {
            return nullptr;
        }
    }
    Ref found(counted(accepted, refusals));
    for (const Refusal& refusal : refusals) Py_DECREF(refusal.type);
    return found.release();
}

PyMethodDef kFunctions[] = {
    {"make", make, METH_VARARGS, "make(seeds, memory, is_fixed, number): return input `number`."},
    {"decode", decode, METH_VARARGS,
     "decode(seeds, memory, is_fixed, first, count, repair, run, errors, is_view): give `count` inputs to `run`; return how "
     "many it accepted, and pairs of an error and how often it was raised."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "inputs", nullptr, -1, kFunctions, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_inputs() {
    Py_SET_REFCNT(reinterpret_cast<PyObject*>(&kBlock), 1);
    kBlock.tp_name = "inputs.Block";
    kBlock.tp_basicsize = sizeof(Block);
    kBlock.tp_dealloc = block_free;
    kBlock.tp_as_buffer = &kBlockBuffer;
    kBlock.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    if (PyType_Ready(&kBlock) < 0) return nullptr;
    return PyModule_Create(&kModule);
}
