// The module `shm_broadcast._core`: what each part of the native core adds to it.
#include "codec/codec.hpp"

int endpoint_add(PyObject* module);
int files_add(PyObject* module);
int ring_add(PyObject* module);
int signals_add(PyObject* module);
int status_add(PyObject* module);

namespace {

PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT, "_core", "The native core.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__core() {
    PyObject* module = PyModule_Create(&core_module);
    if (module == nullptr) return nullptr;
    if (codec::add_codec(module) < 0 || ring_add(module) < 0 || endpoint_add(module) != 0 ||
        files_add(module) != 0 || signals_add(module) != 0 || status_add(module) != 0) {
        Py_DECREF(module);
        return nullptr;
    }
    return module;
}
