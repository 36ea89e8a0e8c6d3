// Reads files and closes descriptors in native code, between whose steps no signal handler of Python can raise.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstdint>
#include <new>
#include <string>

#include "codec/codec.hpp"

namespace {

constexpr size_t PART_BYTES = 16 << 10;  // most files of the kernel fit

// read_file(path) -> bytes
PyObject* read_file(PyObject*, PyObject* path) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path, &encoded)) return nullptr;
    const int descriptor = ::open(PyBytes_AsString(encoded), O_RDONLY | O_CLOEXEC);
    Py_DECREF(encoded);
    if (descriptor < 0) return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    std::string content;
    int failure = 0;
    try {
        char part[PART_BYTES];
        ssize_t count;
        while ((count = ::read(descriptor, part, sizeof(part))) > 0 || (count < 0 && errno == EINTR)) {
            if (count > 0) content.append(part, static_cast<size_t>(count));
        }
        if (count < 0) failure = errno;
    } catch (const std::bad_alloc&) {
        failure = ENOMEM;
    }
    ::close(descriptor);
    if (failure != 0) {
        errno = failure;
        return PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path);
    }
    return PyBytes_FromStringAndSize(content.data(), static_cast<Py_ssize_t>(content.size()));
}

constexpr char kOwned[] = "shm_broadcast.owned_descriptor";

// The pointer is one more than the descriptor, because no capsule holds a null pointer.
void close_owned(PyObject* capsule) {
    ::close(static_cast<int>(reinterpret_cast<intptr_t>(PyCapsule_GetPointer(capsule, kOwned)) - 1));
}

// Returns -1 with an exception for what is no descriptor.
int descriptor_of(PyObject* number) {
    const long descriptor = PyLong_AsLong(number);
    if (descriptor == -1 && PyErr_Occurred()) return -1;
    if (descriptor >= 0 && descriptor < INT_MAX) return static_cast<int>(descriptor);
    PyErr_Format(PyExc_ValueError, "%ld is no descriptor", descriptor);
    return -1;
}

PyObject* owned(int descriptor) {
    return PyCapsule_New(reinterpret_cast<void*>(static_cast<intptr_t>(descriptor) + 1), kOwned, close_owned);
}

// own_descriptor(descriptor) -> an object that closes the descriptor when it is collected
PyObject* own_descriptor(PyObject*, PyObject* number) {
    const int descriptor = descriptor_of(number);
    if (descriptor < 0) return nullptr;
    return owned(descriptor);
}

// own_duplicate(descriptor) -> (object that closes a duplicate when it is collected, number of the duplicate)
PyObject* own_duplicate(PyObject*, PyObject* number) {
    const int descriptor = descriptor_of(number);
    if (descriptor < 0) return nullptr;
    const int duplicate = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (duplicate < 0) return PyErr_SetFromErrno(PyExc_OSError);
    PyObject* owner = owned(duplicate);
    if (owner == nullptr) {
        ::close(duplicate);
        return nullptr;
    }
    return Py_BuildValue("(Ni)", owner, duplicate);
}

PyMethodDef functions[] = {
    {"read_file", read_file, METH_O, nullptr},
    {"own_duplicate", own_duplicate, METH_O, nullptr},
    {"own_descriptor", own_descriptor, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

int files_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }
