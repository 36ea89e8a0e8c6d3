#include <Python.h>

static PyModuleDef core_module = {PyModuleDef_HEAD_INIT, "_core", "The native core.", -1, nullptr, nullptr, nullptr, nullptr, nullptr};

PyMODINIT_FUNC PyInit__core() { return PyModule_Create(&core_module); }
