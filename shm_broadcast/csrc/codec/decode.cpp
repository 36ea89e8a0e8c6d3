// Frames to object trees. Nothing in a frame is trusted: every length is compared with the bytes that are
// left before anything is allocated, each byte of the prefix and the table is read once, and all containers
// together may not claim more entries than the tree has bytes.
#include "decoder.hpp"

namespace codec {
namespace {

constexpr size_t kCachedKey = 32;    // longer keys are not cached
constexpr size_t kCacheSlots = 1024;  // at most this many short strings stay alive

PyObject* key_cache[kCacheSlots];

// Mixes the length, the first and the last bytes: keys that differ elsewhere only take turns in one slot.
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

// The integers of one byte, -32 to 127, by that byte: a list of block numbers is mostly these.
PyObject* fixed_integers[256];

PyObject* fixed_integer(uint8_t tag) {
    PyObject*& integer = fixed_integers[tag];
    if (integer == nullptr) integer = PyLong_FromLong(static_cast<int8_t>(tag));
    Py_XINCREF(integer);
    return integer;
}

bool is_fixed_integer(uint8_t tag) { return tag <= 0x7f || tag >= 0xe0; }

// Returns the string of these bytes; dict keys repeat, so short ones come from a cache.
PyObject* cached_string(const unsigned char* data, size_t nbytes) {
    const char* text = reinterpret_cast<const char*>(data);
    const Py_ssize_t length = static_cast<Py_ssize_t>(nbytes);
    if (nbytes > kCachedKey) return PyUnicode_DecodeUTF8(text, length, nullptr);
    PyObject*& slot = key_cache[slot_of(data, nbytes)];
    if (slot != nullptr) {
        Py_ssize_t known = 0;
        const char* other = PyUnicode_AsUTF8AndSize(slot, &known);
        if (other == nullptr) return nullptr;
        if (known == length && std::memcmp(other, text, nbytes) == 0) {
            Py_INCREF(slot);
            return slot;
        }
    }
    PyObject* string = PyUnicode_DecodeUTF8(text, length, nullptr);
    if (string == nullptr) return nullptr;
    PyObject* old = slot;
    Py_INCREF(string);
    slot = string;
    Py_XDECREF(old);
    return string;
}

}  // namespace

PyObject* Decoder::refuse(const char* what) {
    PyErr_Format(PyExc_ValueError, "byte %zu: %s", position(), what);
    return nullptr;
}

bool Decoder::enter(int depth) { return depth <= kMaxDepth || refuse("too many levels") != nullptr; }

bool Decoder::claim(size_t entries, size_t each) {
    if (entries > unclaimed_ / each || entries > left() / each) {
        return refuse("a container claims more entries than there are bytes") != nullptr;
    }
    unclaimed_ -= entries * each;
    return true;
}

bool Decoder::zeros(const unsigned char* from, size_t nbytes) {
    for (size_t i = 0; i < nbytes; ++i) {
        if (from[i] != 0) return refuse("padding is not zero") != nullptr;
    }
    return true;
}

bool Decoder::prefix() {
    const size_t nbytes = total_;
    at_ = end_ = start_;
    if (readable_ < sizeof(Prefix)) return refuse("shorter than the prefix of a frame") != nullptr;
    Prefix prefix;
    std::memcpy(&prefix, start_, sizeof(prefix));
    if (prefix.magic != kMagic) return refuse("no frame of this codec (magic)") != nullptr;
    if (prefix.version != kVersion) return refuse("a frame of another version of the codec") != nullptr;
    if (prefix.flags != 0 || prefix.reserved != 0) return refuse("unknown flags") != nullptr;
    if (prefix.total != nbytes) return refuse("the frame's length is not the one in its prefix") != nullptr;
    if (prefix.tree > readable_ - sizeof(Prefix)) return refuse("the tree is longer than the frame") != nullptr;
    const size_t tree_end = sizeof(Prefix) + prefix.tree;
    const size_t table = aligned(tree_end, 8);
    if (table > readable_ || prefix.buffers > (readable_ - table) / 8) {
        return refuse("the table of buffers is longer than the frame") != nullptr;
    }
    at_ = start_ + sizeof(Prefix);
    end_ = start_ + tree_end;
    table_ = start_ + table;
    buffers_left_ = prefix.buffers;
    offset_ = table + 8 * prefix.buffers;
    unclaimed_ = prefix.tree;
    return zeros(end_, table - tree_end);
}

PyObject* Decoder::run() {
    if (!prefix()) return nullptr;
    Ref result(value(1));
    if (!result) return nullptr;
    if (at_ != end_) return refuse("bytes after the end of the value");
    if (buffers_left_ != 0) return refuse("a buffer that the tree does not use");
    if (offset_ != total_) return refuse("bytes after the last buffer");
    return result.release();
}

// Takes the next out-of-band buffer. They are used in order, each once.
bool Decoder::far(Taken* taken, FarKind kind) {
    if (buffers_left_ == 0) return refuse("the tree uses a buffer that the frame does not have") != nullptr;
    uint64_t entry = 0;
    std::memcpy(&entry, table_, sizeof(entry));
    table_ += sizeof(entry);
    --buffers_left_;
    if (entry >> kKindShift != kind) return refuse("a buffer of another kind than the tree says") != nullptr;
    const uint64_t nbytes = entry & kLengthMask;
    const size_t from = aligned(offset_);
    if (from > total_ || nbytes > total_ - from) return refuse("a buffer ends after the frame") != nullptr;
    if (far_ == nullptr) {
        if (!zeros(start_ + offset_, from - offset_)) return false;
        *taken = {{start_ + from, static_cast<size_t>(nbytes)}, nullptr, false};
    } else {
        *taken = {{far_->data, far_->nbytes}, far_->object, false};
        ++far_;
    }
    offset_ = from + static_cast<size_t>(nbytes);
    return true;
}

PyObject* Decoder::string(size_t nbytes) {
    if (nbytes > left()) return refuse("a string ends after the bytes");
    const char* text = reinterpret_cast<const char*>(at_);
    at_ += nbytes;
    return PyUnicode_DecodeUTF8(text, static_cast<Py_ssize_t>(nbytes), nullptr);
}

PyObject* Decoder::blob(size_t nbytes) {
    if (nbytes > left()) return refuse("bytes end after the tree");
    const char* data = reinterpret_cast<const char*>(at_);
    at_ += nbytes;
    return PyBytes_FromStringAndSize(data, static_cast<Py_ssize_t>(nbytes));
}

PyObject* Decoder::list(size_t entries, int depth) {
    if (!enter(depth) || !claim(entries, 1)) return nullptr;
    Ref result(PyList_New(static_cast<Py_ssize_t>(entries)));
    if (!result) return nullptr;
    for (size_t i = 0; i < entries; ++i) {
        PyObject* item = left() > 0 && is_fixed_integer(*at_) ? fixed_integer(*at_++) : value(depth + 1);
        if (item == nullptr) return nullptr;
        if (PyList_SetItem(result.get(), static_cast<Py_ssize_t>(i), item) < 0) return nullptr;
    }
    return result.release();
}

PyObject* Decoder::tuple(size_t entries, int depth) {
    if (!enter(depth) || !claim(entries, 1)) return nullptr;
    Ref result(PyTuple_New(static_cast<Py_ssize_t>(entries)));
    if (!result) return nullptr;
    for (size_t i = 0; i < entries; ++i) {
        PyObject* item = value(depth + 1);
        if (item == nullptr) return nullptr;
        if (PyTuple_SetItem(result.get(), static_cast<Py_ssize_t>(i), item) < 0) return nullptr;
    }
    return result.release();
}

PyObject* Decoder::set(size_t entries, bool frozen, int depth) {
    if (!enter(depth) || !claim(entries, 1)) return nullptr;
    Ref result(frozen ? PyFrozenSet_New(nullptr) : PySet_New(nullptr));
    if (!result) return nullptr;
    KeyGuard guard(static_cast<Py_ssize_t>(entries));
    for (size_t i = 0; i < entries; ++i) {
        Ref item(value(depth + 1));
        if (!item || !guard.admit(item.get()) || PySet_Add(result.get(), item.get()) < 0) return nullptr;
    }
    if (PySet_Size(result.get()) != static_cast<Py_ssize_t>(entries)) return refuse("an element of a set twice");
    return result.release();
}

PyObject* Decoder::key(int depth) {
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

PyObject* Decoder::dict(size_t entries, int depth) {
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
    if (PyDict_Size(result.get()) != static_cast<Py_ssize_t>(entries)) return refuse("a key of a dict twice");
    return result.release();
}

PyObject* Decoder::value(int depth) {
    uint8_t tag = 0;
    if (!take(&tag)) return nullptr;
    if (is_fixed_integer(tag)) return fixed_integer(tag);
    if (tag <= 0x8f) return dict(tag & 0x0f, depth);
    if (tag <= 0x9f) return list(tag & 0x0f, depth);
    if (tag <= 0xbf) return string(tag & 0x1f);
    size_t size = 0;
    switch (tag) {
        case 0xc0: return Ref::borrowed(Py_None).release();
        case 0xc2: return Ref::borrowed(Py_False).release();
        case 0xc3: return Ref::borrowed(Py_True).release();
        case 0xc4: return length<uint8_t>(&size) ? blob(size) : nullptr;
        case 0xc5: return length<uint16_t>(&size) ? blob(size) : nullptr;
        case 0xc9: return extension(depth);
        case 0xcb: {
            uint64_t bits = 0;
            return take(&bits) ? PyFloat_FromDouble(std::bit_cast<double>(bits)) : nullptr;
        }
        case 0xcc: return natural<uint8_t>();
        case 0xcd: return natural<uint16_t>();
        case 0xce: return natural<uint32_t>();
        case 0xcf: return natural<uint64_t>();
        case 0xd0: return integer<uint8_t, int8_t>();
        case 0xd1: return integer<uint16_t, int16_t>();
        case 0xd2: return integer<uint32_t, int32_t>();
        case 0xd3: return integer<uint64_t, int64_t>();
        case 0xd9: return length<uint8_t>(&size) ? string(size) : nullptr;
        case 0xda: return length<uint16_t>(&size) ? string(size) : nullptr;
        case 0xdb: return length<uint32_t>(&size) ? string(size) : nullptr;
        case 0xdc: return length<uint16_t>(&size) ? list(size, depth) : nullptr;
        case 0xdd: return length<uint32_t>(&size) ? list(size, depth) : nullptr;
        case 0xde: return length<uint16_t>(&size) ? dict(size, depth) : nullptr;
        case 0xdf: return length<uint32_t>(&size) ? dict(size, depth) : nullptr;
        default: --at_; return refuse("a tag that this codec does not use");
    }
}

PyObject* Decoder::extension(int depth) {
    size_t nbytes = 0;
    uint8_t code = 0;
    if (!length<uint32_t>(&nbytes) || !take(&code)) return nullptr;
    if (nbytes > left()) return refuse("an extension ends after the bytes");
    const unsigned char* outer = end_;
    end_ = at_ + nbytes;
    Ref result(extended(code, depth));
    if (!result) return nullptr;
    if (at_ != end_) return refuse("bytes left over in an extension");
    end_ = outer;
    return result.release();
}

bool Decoder::array_head(size_t* entries) {
    uint8_t tag = 0;
    if (!take(&tag)) return false;
    if ((tag & 0xf0) == 0x90) {
        *entries = tag & 0x0f;
        return true;
    }
    if (tag == 0xdc) return length<uint16_t>(entries);
    if (tag == 0xdd) return length<uint32_t>(entries);
    return refuse("an array was expected") != nullptr;
}

PyObject* Decoder::extended(uint8_t code, int depth) {
    size_t entries = 0;
    switch (code) {
        case kTuple: return array_head(&entries) ? tuple(entries, depth) : nullptr;
        case kSet: return array_head(&entries) ? set(entries, false, depth) : nullptr;
        case kFrozenSet: return array_head(&entries) ? set(entries, true, depth) : nullptr;
        case kByteArray:
        case kFarBytes:
        case kFarByteArray:
        case kSurrogates: return raw(code);
        default: return hooked(code, depth);
    }
}

// Builds what consists of bytes alone.
PyObject* Decoder::raw(uint8_t code) {
    Taken taken{{at_, left()}, nullptr, true};
    if (code == kFarBytes || code == kFarByteArray) {
        if (!far(&taken, code == kFarBytes ? kBytesKind : kByteArrayKind)) return nullptr;
        if (taken.object != nullptr) return Ref::borrowed(taken.object).release();
    } else {
        at_ = end_;
    }
    const char* data = reinterpret_cast<const char*>(taken.bytes.data);
    const Py_ssize_t nbytes = static_cast<Py_ssize_t>(taken.bytes.nbytes);
    if (code == kFarBytes) return PyBytes_FromStringAndSize(data, nbytes);
    if (code == kSurrogates) return PyUnicode_DecodeUTF8(data, nbytes, "surrogatepass");
    return PyByteArray_FromStringAndSize(data, nbytes);
}

// Decodes the pair [meta, body] of a type that Python builds, and builds it.
PyObject* Decoder::hooked(uint8_t code, int depth) {
    size_t entries = 0;
    if (code < kFirstHook || code > kLastCode) return refuse("an extension that this codec does not use");
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
    Ref number(PyLong_FromLong(code));
    if (!number) return nullptr;
    return PyObject_CallFunctionObjArgs(hook_, number.get(), meta.get(), body.get(), nullptr);
}

// Reads an integer that is not negative; false, perhaps with an exception, for anything else.
bool Decoder::natural_number(uint64_t* number) {
    uint8_t tag = 0;
    size_t wide = 0;
    if (!take(&tag)) return false;
    if (tag <= 0x7f) {
        *number = tag;
        return true;
    }
    const bool ok = tag == 0xcc   ? length<uint8_t>(&wide)
                    : tag == 0xcd ? length<uint16_t>(&wide)
                    : tag == 0xce ? length<uint32_t>(&wide)
                                  : tag == 0xcf && length<uint64_t>(&wide);
    *number = wide;
    return ok;
}

// Reads the pair [[dtype, *shape], data]; false, perhaps with an exception, for what is left to Python.
bool Decoder::array_facts(uint8_t code, ArrayFacts* facts) {
    size_t entries = 0;
    if (!array_head(&entries) || entries != 2 || !array_head(&entries)) return false;
    if (entries == 0 || entries > kMaxDimensions + 1) return false;
    uint8_t tag = 0;
    if (!take(&tag) || (tag & 0xe0) != 0xa0 || (tag & 0x1f) > left()) return false;
    const Span name{at_, static_cast<size_t>(tag & 0x1f)};
    at_ += name.nbytes;
    const KnownDtype dtype = code == kNumpyArray ? numpy_dtype(name) : torch_dtype(name);
    if (dtype.entry == nullptr) return false;
    facts->dtype = dtype.entry;
    uint64_t nbytes = dtype.itemsize;
    facts->dimensions = static_cast<int>(entries) - 1;
    for (int i = 0; i < facts->dimensions; ++i) {
        uint64_t size = 0;
        if (!natural_number(&size) || size > INT64_MAX || __builtin_mul_overflow(nbytes, size, &nbytes)) return false;
        facts->shape[i] = static_cast<int64_t>(size);
    }
    return nbytes > 0 && raw_data(&facts->taken) && facts->taken.bytes.nbytes == nbytes;
}

// Builds an array or tensor without Python; nullptr without an exception, and nothing taken, for what is left to it:
// dtypes out of the ordinary, and whatever is wrong, which Python knows how to say.
PyObject* Decoder::array(uint8_t code) {
    const Decoder before = *this;
    ArrayFacts facts;
    if (array_facts(code, &facts)) {
        const auto build = code == kNumpyArray ? numpy_build : torch_build;
        return build(facts.dtype, facts.shape, facts.dimensions, {facts.taken.bytes, facts.taken.object});
    }
    PyErr_Clear();
    *this = before;
    return nullptr;
}

// Takes raw data, inline or out of band.
bool Decoder::raw_data(Taken* taken) {
    uint8_t tag = 0;
    size_t nbytes = 0;
    if (!take(&tag)) return false;
    if (tag == 0xc0) return far(taken, kDataKind);
    if (tag != 0xc5) return refuse("data was expected") != nullptr;
    if (!length<uint16_t>(&nbytes)) return false;
    if (nbytes > left()) return refuse("bytes end after the tree") != nullptr;
    *taken = {{at_, nbytes}, nullptr, true};
    at_ += nbytes;
    return true;
}

// Takes raw data as an object: inline bytes as `bytes`, an out-of-band buffer as a window.
PyObject* Decoder::data() {
    Taken taken{};
    if (!raw_data(&taken)) return nullptr;
    if (taken.object != nullptr) return Ref::borrowed(taken.object).release();
    unsigned char* data = const_cast<unsigned char*>(taken.bytes.data);
    const Py_ssize_t nbytes = static_cast<Py_ssize_t>(taken.bytes.nbytes);
    if (taken.is_inline) return PyBytes_FromStringAndSize(reinterpret_cast<char*>(data), nbytes);
    return make_window(owner_, data, taken.bytes.nbytes, false);
}

// decode(frame, hook, copies)
PyObject* decode(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (!expect_arguments("decode", count, 3)) return nullptr;
    View view;
    if (!view.acquire(args[0])) return nullptr;
    Ref owner(PyMemoryView_FromObject(args[0]));
    if (!owner) return nullptr;
    Decoder decoder({view.data(), view.size()}, owner.get(), args[1], args[2] == Py_True);
    return decoder.run();
}

}  // namespace codec
