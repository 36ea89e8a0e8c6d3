// Frames to object trees. The decoder does not trust a frame: it compares every length with the bytes that are left
// before it allocates anything, it reads each byte of the prefix and the table once, and all containers together may not
// claim more entries than the tree has bytes.
#include "decoder.hpp"

#include <memory>
#include <new>

#include "arrays.hpp"

namespace codec {
namespace {

constexpr size_t kBriefHeader = 2048;  // longer headers are copied to the heap
constexpr size_t kCachedKey = 32;     // longer keys are not cached
constexpr size_t kCacheSlots = 1024;  // at most this many short strings stay alive

PyObject* key_cache[kCacheSlots];

// Mixes the length with the first and the last bytes. Keys that differ only elsewhere replace each other in one slot.
size_t slot_of(const unsigned char* data, size_t nbytes) {
    uint64_t first = 0, last = 0;
    if (nbytes >= sizeof(uint64_t)) {
        std::memcpy(&first, data, sizeof(uint64_t));
        std::memcpy(&last, data + nbytes - sizeof(uint64_t), sizeof(uint64_t));
    } else {
        for (size_t i = 0; i < nbytes; ++i) first = first << 8 | data[i];
    }
    const uint64_t mixed = (first ^ (last << 1) ^ nbytes << 56) * 0x9e3779b97f4a7c15;  // 2^64 / golden ratio
    return mixed >> 54;
}
static_assert(kCacheSlots == size_t{1} << (64 - 54));

// The integers that are encoded in one byte, -32 to 127, by that byte. Lists of block numbers consist mostly of them.
PyObject* fixed_integers[256];

PyObject* fixed_integer(uint8_t tag) {
    PyObject*& integer = fixed_integers[tag];
    if (integer == nullptr) integer = PyLong_FromLong(static_cast<int8_t>(tag));
    Py_XINCREF(integer);
    return integer;
}

bool is_fixed_integer(uint8_t tag) { return tag <= 0x7f || tag >= 0xe0; }

// Returns the string of these bytes. Short strings come from a cache, because the keys of dicts repeat.
PyObject* cached_string(const unsigned char* data, size_t nbytes) {
    const char* text = reinterpret_cast<const char*>(data);
    const Py_ssize_t length = static_cast<Py_ssize_t>(nbytes);
    if (nbytes > kCachedKey) return PyUnicode_DecodeUTF8(text, length, nullptr);
    PyObject*& slot = key_cache[slot_of(data, nbytes)];
    if (slot != nullptr) {
        Py_ssize_t known = 0;
        const char* other = PyUnicode_AsUTF8AndSize(slot, &known);
        if (other == nullptr) return nullptr;
        if (known == length && std::memcmp(other, text, nbytes) == 0) return Py_NewRef(slot);
    }
    PyObject* string = PyUnicode_DecodeUTF8(text, length, nullptr);
    if (string == nullptr) return nullptr;
    const Ref old(slot);
    slot = Py_NewRef(string);
    return string;
}

class TreeDecoder : public Decoder {
public:
    explicit TreeDecoder(const Decoder& frame) : Decoder(frame) {}

    PyObject* run() {
        if (!prefix()) return nullptr;
        Ref result(value(1));
        if (!result) return nullptr;
        if (at_ != end_) return refuse("there are bytes after the end of the value");
        if (buffers_left_ != 0) return refuse("the frame has a buffer that the tree does not use");
        if (offset_ != total_) return refuse("there are bytes after the last buffer");
        return result.release();
    }

private:
    struct Taken {
        Span bytes;
        PyObject* object;  // what holds the bytes, if they are in memory of their own
        bool is_inline;    // whether they are in the tree
    };

    size_t left() const { return static_cast<size_t>(end_ - at_); }

    PyObject* refuse(const char* what) {
        return PyErr_Format(PyExc_ValueError, "byte %zu: %s", static_cast<size_t>(at_ - frame_.data), what);
    }

    bool enter(int depth) { return depth <= kMaxDepth || refuse("the object has too many levels") != nullptr; }

    bool claim(size_t entries, size_t each) {
        if (entries > unclaimed_ / each || entries > left() / each) {
            return refuse("a container claims more entries than there are bytes") != nullptr;
        }
        unclaimed_ -= entries * each;
        return true;
    }

    bool zeros(const unsigned char* from, size_t nbytes) {
        for (size_t i = 0; i < nbytes; ++i) {
            if (from[i] != 0) return refuse("the padding is not zero") != nullptr;
        }
        return true;
    }

    bool prefix() {
        const unsigned char* start = frame_.data;
        at_ = end_ = start;
        if (frame_.nbytes < sizeof(Prefix)) return refuse("the frame is shorter than its prefix") != nullptr;
        Prefix prefix;
        std::memcpy(&prefix, start, sizeof(prefix));
        if (prefix.magic != kMagic) return refuse("the magic is not that of a frame") != nullptr;
        if (prefix.version != kVersion) return refuse("the frame has another version") != nullptr;
        if (prefix.flags != 0 || prefix.reserved != 0) return refuse("the frame has unknown flags") != nullptr;
        if (prefix.total != total_) return refuse("the length in the prefix is not that of the frame") != nullptr;
        if (prefix.tree > frame_.nbytes - sizeof(Prefix)) return refuse("the tree is longer than the frame") != nullptr;
        const size_t tree_end = sizeof(Prefix) + prefix.tree;
        const size_t table = aligned(tree_end, 8);
        if (table > frame_.nbytes || prefix.buffers > (frame_.nbytes - table) / 8) {
            return refuse("the table of buffers is longer than the frame") != nullptr;
        }
        at_ = start + sizeof(Prefix);
        end_ = start + tree_end;
        table_ = start + table;
        buffers_left_ = prefix.buffers;
        offset_ = table + 8 * prefix.buffers;
        unclaimed_ = prefix.tree;
        return zeros(end_, table - tree_end);
    }

    // Takes the next out-of-band buffer. The tree uses them in order, each once.
    bool far(Taken* taken, FarKind kind) {
        if (buffers_left_ == 0) return refuse("the tree uses a buffer that the frame does not have") != nullptr;
        uint64_t entry = 0;
        std::memcpy(&entry, table_, sizeof(entry));
        table_ += sizeof(entry);
        --buffers_left_;
        if (entry >> kKindShift != kind) return refuse("a buffer has another kind than the tree says") != nullptr;
        const uint64_t nbytes = entry & kLengthMask;
        const size_t from = aligned(offset_);
        if (from > total_ || nbytes > total_ - from) return refuse("a buffer ends beyond the frame") != nullptr;
        if (far_ == nullptr) {
            if (!zeros(base_ + offset_, from - offset_)) return false;
            *taken = {{base_ + from, static_cast<size_t>(nbytes)}, nullptr, false};
        } else {
            *taken = {{far_->data, far_->nbytes}, far_->object, false};
            ++far_;
        }
        offset_ = from + static_cast<size_t>(nbytes);
        return true;
    }

    template <typename T>
    bool take(T* value) {
        if (sizeof(T) > left()) return refuse("the bytes end inside a value") != nullptr;
        T wire;
        std::memcpy(&wire, at_, sizeof(T));
        at_ += sizeof(T);
        *value = swapped(wire);
        return true;
    }
    template <typename T>
    bool length(size_t* nbytes) {
        T wire = 0;
        if (!take(&wire)) return false;
        *nbytes = wire;
        return true;
    }
    template <typename T>
    PyObject* integer() {
        T wire = 0;
        return take(&wire) ? PyLong_FromLongLong(wire) : nullptr;
    }

    PyObject* string(size_t nbytes) {
        if (nbytes > left()) return refuse("a string ends beyond the tree");
        const char* text = reinterpret_cast<const char*>(at_);
        at_ += nbytes;
        return PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(nbytes), nullptr);
    }

    PyObject* blob(size_t nbytes) {
        if (nbytes > left()) return refuse("bytes end beyond the tree");
        const char* data = reinterpret_cast<const char*>(at_);
        at_ += nbytes;
        return PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(nbytes));
    }

    // Builds a list or tuple.
    template <auto New, auto SetItem>
    PyObject* sequence(size_t entries, int depth) {
        if (!enter(depth) || !claim(entries, 1)) return nullptr;
        Ref result(New(static_cast<Py_ssize_t>(entries)));
        if (!result) return nullptr;
        for (size_t i = 0; i < entries; ++i) {
            PyObject* item = left() > 0 && is_fixed_integer(*at_) ? fixed_integer(*at_++) : value(depth + 1);
            if (item == nullptr || SetItem(result.get(), static_cast<Py_ssize_t>(i), item) < 0) return nullptr;
        }
        return result.release();
    }
    PyObject* list(size_t entries, int depth) { return sequence<PyList_New, PyList_SetItem>(entries, depth); }
    PyObject* tuple(size_t entries, int depth) { return sequence<PyTuple_New, PyTuple_SetItem>(entries, depth); }

    PyObject* set(size_t entries, bool frozen, int depth) {
        if (!enter(depth) || !claim(entries, 1)) return nullptr;
        Ref result(frozen ? PyFrozenSet_New(nullptr) : PySet_New(nullptr));
        if (!result) return nullptr;
        KeyGuard guard(static_cast<Py_ssize_t>(entries));
        for (size_t i = 0; i < entries; ++i) {
            Ref item(value(depth + 1));
            if (!item || !guard.admit(item.get()) || PySet_Add(result.get(), item.get()) < 0) return nullptr;
        }
        if (PySet_Size(result.get()) != static_cast<Py_ssize_t>(entries)) return refuse("a set has an element twice");
        return result.release();
    }

    PyObject* key(int depth) {
        if (left() > 0 && (*at_ & 0xe0) == 0xa0) {
            const size_t nbytes = *at_ & 0x1f;
            if (nbytes < left()) {
                const unsigned char* text = at_ + 1;
                at_ += 1 + nbytes;
                return cached_string(text, nbytes);
            }
        }
        return value(depth);
    }

    PyObject* dict(size_t entries, int depth) {
        if (!enter(depth) || !claim(entries, 2)) return nullptr;
        Ref result(PyDict_New());
        if (!result) return nullptr;
        KeyGuard guard(static_cast<Py_ssize_t>(entries));
        for (size_t i = 0; i < entries; ++i) {
            Ref name(key(depth + 1));
            if (!name || !guard.admit(name.get())) return nullptr;
            Ref item(value(depth + 1));
            if (!item || PyDict_SetItem(result.get(), name.get(), item.get()) < 0) return nullptr;
        }
        if (PyDict_Size(result.get()) != static_cast<Py_ssize_t>(entries)) return refuse("a dict has a key twice");
        return result.release();
    }

    PyObject* value(int depth) {
        uint8_t tag = 0;
        if (!take(&tag)) return nullptr;
        if (is_fixed_integer(tag)) return fixed_integer(tag);
        if (tag <= 0x8f) return dict(tag & 0x0f, depth);
        if (tag <= 0x9f) return list(tag & 0x0f, depth);
        if (tag <= 0xbf) return string(tag & 0x1f);
        size_t size = 0;
        switch (tag) {
            case 0xc0: return Py_NewRef(Py_None);
            case 0xc2: return Py_NewRef(Py_False);
            case 0xc3: return Py_NewRef(Py_True);
            case 0xc4: return length<uint8_t>(&size) ? blob(size) : nullptr;
            case 0xc5: return length<uint16_t>(&size) ? blob(size) : nullptr;
            case 0xc9: return extension(depth);
            case 0xcb: return length<uint64_t>(&size) ? PyFloat_FromDouble(std::bit_cast<double>(size)) : nullptr;
            case 0xcc: return integer<uint8_t>();
            case 0xcd: return integer<uint16_t>();
            case 0xce: return integer<uint32_t>();
            case 0xcf: return length<uint64_t>(&size) ? PyLong_FromSize_t(size) : nullptr;
            case 0xd0: return integer<int8_t>();
            case 0xd1: return integer<int16_t>();
            case 0xd2: return integer<int32_t>();
            case 0xd3: return integer<int64_t>();
            case 0xd9: return length<uint8_t>(&size) ? string(size) : nullptr;
            case 0xda: return length<uint16_t>(&size) ? string(size) : nullptr;
            case 0xdb: return length<uint32_t>(&size) ? string(size) : nullptr;
            case 0xdc: return length<uint16_t>(&size) ? list(size, depth) : nullptr;
            case 0xdd: return length<uint32_t>(&size) ? list(size, depth) : nullptr;
            case 0xde: return length<uint16_t>(&size) ? dict(size, depth) : nullptr;
            case 0xdf: return length<uint32_t>(&size) ? dict(size, depth) : nullptr;
            default: --at_; return refuse("the tree has a tag that this codec does not use");
        }
    }

    // Not inlined into `value`, whose stack frame would grow by all that arrays need.
    [[gnu::noinline]] PyObject* extension(int depth) {
        size_t nbytes = 0;
        uint8_t code = 0;
        if (!length<uint32_t>(&nbytes) || !take(&code)) return nullptr;
        if (nbytes > left()) return refuse("an extension ends beyond the tree");
        const unsigned char* outer = end_;
        end_ = at_ + nbytes;
        Ref result(extended(code, depth));
        if (!result) return nullptr;
        if (at_ != end_) return refuse("an extension has bytes left over");
        end_ = outer;
        return result.release();
    }

    bool array_head(size_t* entries) {
        uint8_t tag = 0;
        if (!take(&tag)) return false;
        *entries = tag & 0x0f;
        if ((tag & 0xf0) == 0x90) return true;
        if (tag == 0xdc) return length<uint16_t>(entries);
        if (tag == 0xdd) return length<uint32_t>(entries);
        return refuse("an array was expected") != nullptr;
    }

    PyObject* extended(uint8_t code, int depth) {
        if (code >= kByteArray && code <= kSurrogates) return raw(code);
        if (code < kTuple || code > kFrozenSet) return hooked(code, depth);
        size_t entries = 0;
        if (!array_head(&entries)) return nullptr;
        return code == kTuple ? tuple(entries, depth) : set(entries, code == kFrozenSet, depth);
    }

    // Builds an object that consists of bytes alone.
    PyObject* raw(uint8_t code) {
        Taken taken{{at_, left()}, nullptr, true};
        if (code == kFarBytes || code == kFarByteArray) {
            if (!far(&taken, code == kFarBytes ? kBytesKind : kByteArrayKind)) return nullptr;
            if (taken.object != nullptr) return Py_NewRef(taken.object);
        } else {
            at_ = end_;
        }
        const char* data = reinterpret_cast<const char*>(taken.bytes.data);
        const Py_ssize_t nbytes = static_cast<Py_ssize_t>(taken.bytes.nbytes);
        if (code == kFarBytes) return PyBytes_FromStringAndSize(data, nbytes);
        if (code == kSurrogates) return PyUnicode_DecodeUTF8(data, nbytes, "surrogatepass");
        return PyByteArray_FromStringAndSize(data, nbytes);
    }

    // Decodes the pair [meta, body] and gives it to Python, or builds an ordinary array or tensor.
    PyObject* hooked(uint8_t code, int depth) {
        size_t entries = 0;
        if (code < kFirstHook || code > kLastCode) return refuse("the tree has an extension that this codec does not use");
        if (!enter(depth)) return nullptr;
        if (copies_ && (code == kNumpyArray || code == kTorchTensor)) {
            PyObject* result = depth < kMaxDepth ? array(code) : nullptr;
            if (result != nullptr || PyErr_Occurred()) return result;
        }
        if (!array_head(&entries)) return nullptr;
        if (entries != 2) return refuse("a pair was expected");
        Ref meta(value(depth + 1));
        if (!meta) return nullptr;
        Ref body(code < kFirstData ? value(depth + 1) : data());
        if (!body) return nullptr;
        Built* const earlier = code == kRegistered ? built_ : nullptr;
        if (PyObject* found = earlier == nullptr ? nullptr : earlier->next()) return found;
        const Ref number(PyLong_FromLong(code));
        if (!number) return nullptr;
        Ref result(PyObject_CallFunctionObjArgs(hook_, number.get(), meta.get(), body.get(), nullptr));
        return result && earlier != nullptr && !earlier->add(result.get()) ? nullptr : result.release();
    }

    // Reads an integer that is not negative; returns false, perhaps with an exception set, for anything else.
    bool natural_number(size_t* number) {
        uint8_t tag = 0;
        if (!take(&tag)) return false;
        *number = tag;
        if (tag <= 0x7f) return true;
        if (tag == 0xcc) return length<uint8_t>(number);
        if (tag == 0xcd) return length<uint16_t>(number);
        if (tag == 0xce) return length<uint32_t>(number);
        return tag == 0xcf && length<uint64_t>(number);
    }

    // Reads and checks the pair [[dtype, *shape], data]. Returns false, perhaps with an exception set, if Python must handle
    // it.
    bool read_array(uint8_t code, Array* array, PyObject** window) {
        size_t entries = 0;
        if (!array_head(&entries) || entries != 2 || !array_head(&entries)) return false;
        if (entries == 0 || entries > kMaxDimensions + 1) return false;
        uint8_t tag = 0;
        if (!take(&tag) || (tag & 0xe0) != 0xa0 || (tag & 0x1f) > left()) return false;
        const Span name{at_, static_cast<size_t>(tag & 0x1f)};
        at_ += name.nbytes;
        array->dtype = (code == kNumpyArray ? numpy_table : torch_table).find(name);
        if (array->dtype == nullptr) return false;
        size_t nbytes = array->dtype->itemsize;
        array->dimensions = static_cast<int>(entries) - 1;
        for (int i = 0; i < array->dimensions; ++i) {
            size_t size = 0;
            if (!natural_number(&size) || size > INT64_MAX || __builtin_mul_overflow(nbytes, size, &nbytes)) return false;
            array->shape[i] = static_cast<int64_t>(size);
        }
        Taken taken{};
        if (nbytes == 0 || !raw_data(&taken)) return false;
        array->bytes = taken.bytes;
        *window = taken.object;
        return taken.bytes.nbytes == nbytes;
    }

    // Builds an array or tensor without Python. Returns nullptr without an exception, and takes nothing, if Python must
    // handle it: its dtype is uncommon, or something is wrong, and Python says what.
    PyObject* array(uint8_t code) {
        const TreeDecoder before = *this;
        Array array;
        PyObject* window = nullptr;
        if (read_array(code, &array, &window)) return (code == kNumpyArray ? numpy_build : torch_build)(array, window);
        PyErr_Clear();
        *this = before;
        return nullptr;
    }

    // Takes raw data, inline or out of band.
    bool raw_data(Taken* taken) {
        uint8_t tag = 0;
        size_t nbytes = 0;
        if (!take(&tag)) return false;
        if (tag == 0xc0) return far(taken, kDataKind);
        if (tag != 0xc5) return refuse("data was expected") != nullptr;
        if (!length<uint16_t>(&nbytes)) return false;
        if (nbytes > left()) return refuse("bytes end beyond the tree") != nullptr;
        *taken = {{at_, nbytes}, nullptr, true};
        at_ += nbytes;
        return true;
    }

    // Takes raw data as an object: `bytes` if they are inline, a window if they are out of band.
    PyObject* data() {
        Taken taken{};
        if (!raw_data(&taken)) return nullptr;
        if (taken.object != nullptr) return Py_NewRef(taken.object);
        unsigned char* data = const_cast<unsigned char*>(taken.bytes.data);
        const Py_ssize_t nbytes = static_cast<Py_ssize_t>(taken.bytes.nbytes);
        if (taken.is_inline) return PyBytes_FromStringAndSize(reinterpret_cast<char*>(data), nbytes);
        return make_window(owner_, data, taken.bytes.nbytes, false);
    }

    const unsigned char* at_ = nullptr;
    const unsigned char* end_ = nullptr;
    const unsigned char* table_ = nullptr;  // entries of the buffers that were not taken yet
    uint64_t buffers_left_ = 0;
    size_t offset_ = 0;     // end of the last buffer that was taken
    size_t unclaimed_ = 0;  // entries that containers may still claim
};

}  // namespace

PyObject* Decoder::run() const {
    if (far_ != nullptr || base_ == nullptr) return TreeDecoder(*this).run();
    unsigned char brief[kBriefHeader];
    std::unique_ptr<unsigned char[]> longer;
    Decoder copy(*this);
    copy.frame_.nbytes = header_bytes();
    if (copy.frame_.nbytes > kBriefHeader) {
        longer.reset(new (std::nothrow) unsigned char[copy.frame_.nbytes]);
        if (!longer) return PyErr_NoMemory();
    }
    unsigned char* header = longer ? longer.get() : brief;
    if (copy.frame_.nbytes > 0) std::memcpy(header, frame_.data, copy.frame_.nbytes);
    copy.frame_.data = header;
    return TreeDecoder(copy).run();
}

}  // namespace codec
