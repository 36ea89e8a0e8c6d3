// Python functions for the status board. Each holds the GIL, so one thread of a rank at a time publishes.
#define PY_SSIZE_T_CLEAN  // for "#" in the formats of arguments
#include "object.hpp"
#include "status_board.hpp"

namespace {

using region::Ref;
using status::Board;

// The arguments that all functions take: the mapping, the number of ranks, and this rank. Releases the mapping.
class Place {
public:
    ~Place() {
        if (view_.obj != nullptr) PyBuffer_Release(&view_);
    }

    // Returns whether the arguments fit; if not, an exception is set.
    bool fits() const {
        if (ranks_ <= status::kMaxRanks && rank_ < ranks_ &&
            static_cast<size_t>(view_.len) >= status::board_bytes(ranks_)) {
            return true;
        }
        PyErr_Format(PyExc_ValueError, "the mapping holds no status board for rank %u of %u", rank_, ranks_);
        return false;
    }

    Board board() const { return {static_cast<unsigned char*>(view_.buf), ranks_}; }

    Py_buffer view_{};
    unsigned int ranks_ = 0;
    unsigned int rank_ = 0;
};

// board_bytes(ranks)
PyObject* board_bytes(PyObject*, PyObject* object) {
    const unsigned long ranks = PyLong_AsUnsignedLong(object);
    if (PyErr_Occurred()) return nullptr;
    return PyLong_FromSize_t(status::board_bytes(static_cast<uint32_t>(ranks)));
}

PyObject* bytes_of(const std::string& text) {
    return PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

// board_publish(mapping, ranks, rank, record) -> the record that counts
PyObject* board_publish(PyObject*, PyObject* args) {
    Place place;
    const char* record = nullptr;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "w*IIy#:board_publish", &place.view_, &place.ranks_, &place.rank_, &record, &bytes) ||
        !place.fits()) {
        return nullptr;
    }
    if (static_cast<size_t>(bytes) > status::kRecordBytes) {
        PyErr_Format(PyExc_ValueError, "a record of %zd bytes does not fit", bytes);
        return nullptr;
    }
    place.board().publish(place.rank_, record, static_cast<size_t>(bytes));
    return bytes_of(place.board().record());
}

// board_record(mapping, ranks) -> the record that counts, or b""
PyObject* board_record(PyObject*, PyObject* args) {
    Place place;
    if (!PyArg_ParseTuple(args, "w*I:board_record", &place.view_, &place.ranks_) || !place.fits()) return nullptr;
    return bytes_of(place.board().record());
}

// board_arrive(mapping, ranks, rank, plane, number, name)
PyObject* board_arrive(PyObject*, PyObject* args) {
    Place place;
    unsigned int plane = 0;
    unsigned long long number = 0;
    const char* name = nullptr;
    Py_ssize_t bytes = 0;
    if (!PyArg_ParseTuple(args, "w*IIIKs#:board_arrive", &place.view_, &place.ranks_, &place.rank_, &plane, &number, &name,
                          &bytes) ||
        !place.fits()) {
        return nullptr;
    }
    if (plane >= status::kPlanes) {
        PyErr_Format(PyExc_ValueError, "there is no plane %u", plane);
        return nullptr;
    }
    place.board().arrive(place.rank_, plane, number, name, static_cast<size_t>(bytes));
    Py_RETURN_NONE;
}

// board_arrivals(mapping, ranks, plane) -> for each rank (number, name), with number 0 if it has not waited
PyObject* board_arrivals(PyObject*, PyObject* args) {
    Place place;
    unsigned int plane = 0;
    if (!PyArg_ParseTuple(args, "w*II:board_arrivals", &place.view_, &place.ranks_, &plane) || !place.fits()) return nullptr;
    if (plane >= status::kPlanes) {
        PyErr_Format(PyExc_ValueError, "there is no plane %u", plane);
        return nullptr;
    }
    Ref list(PyList_New(0));
    for (uint32_t rank = 0; list && rank < place.ranks_; ++rank) {
        std::string name;
        const unsigned long long number = place.board().arrival(rank, plane, &name);
        const Ref item(Py_BuildValue("(Ky#)", number, name.data(), static_cast<Py_ssize_t>(name.size())));
        if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    return list.release();
}

// board_leave(mapping, ranks, rank)
PyObject* board_leave(PyObject*, PyObject* args) {
    Place place;
    if (!PyArg_ParseTuple(args, "w*II:board_leave", &place.view_, &place.ranks_, &place.rank_) || !place.fits()) return nullptr;
    place.board().leave(place.rank_);
    Py_RETURN_NONE;
}

// board_left(mapping, ranks) -> the ranks that have left, ascending
PyObject* board_left(PyObject*, PyObject* args) {
    Place place;
    if (!PyArg_ParseTuple(args, "w*I:board_left", &place.view_, &place.ranks_) || !place.fits()) return nullptr;
    Ref list(PyList_New(0));
    for (uint32_t rank = 0; list && rank < place.ranks_; ++rank) {
        if (!place.board().has_left(rank)) continue;
        const Ref item(PyLong_FromUnsignedLong(rank));
        if (!item || PyList_Append(list.get(), item.get()) < 0) return nullptr;
    }
    return list.release();
}

PyMethodDef functions[] = {
    {"board_bytes", board_bytes, METH_O, nullptr},
    {"board_publish", board_publish, METH_VARARGS, nullptr},
    {"board_record", board_record, METH_VARARGS, nullptr},
    {"board_arrive", board_arrive, METH_VARARGS, nullptr},
    {"board_arrivals", board_arrivals, METH_VARARGS, nullptr},
    {"board_leave", board_leave, METH_VARARGS, nullptr},
    {"board_left", board_left, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int board_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }
