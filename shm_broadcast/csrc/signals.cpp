// Makes a signal handler that is not ours leave `errno` as the code that it interrupts has left it.
#include <csignal>

#include <cerrno>

#include "codec/codec.hpp"

namespace {

// The handlers that were there before, by signal. An entry is written before `restoring` can be called for it.
void (*wrapped[NSIG])(int) = {};

void restoring(int number) {
    const int before = errno;
    wrapped[number](number);
    errno = before;
}

// keep_errno(number): the process's handler for the signal restores `errno` from now on.
PyObject* keep_errno(PyObject*, PyObject* argument) {
    const long number = PyLong_AsLong(argument);
    if (number == -1 && PyErr_Occurred()) return nullptr;
    struct sigaction action;
    if (number < 1 || number >= NSIG || sigaction(static_cast<int>(number), nullptr, &action) != 0) {
        return PyErr_Format(PyExc_ValueError, "%ld is no signal", number);
    }
    const bool is_plain = (action.sa_flags & SA_SIGINFO) == 0;
    if (!is_plain || action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) {
        return PyErr_Format(PyExc_ValueError, "signal %ld has no plain handler", number);
    }
    if (action.sa_handler == restoring) Py_RETURN_NONE;
    wrapped[number] = action.sa_handler;
    action.sa_handler = restoring;
    if (sigaction(static_cast<int>(number), &action, nullptr) != 0) return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {{"keep_errno", keep_errno, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

}  // namespace

int signals_add(PyObject* module) { return PyModule_AddFunctions(module, functions); }
