// The constants of the module: dtypes that have kernels, the statuses of a call and its kinds.
#include <Python.h>

#include "call.hpp"
#include "module.hpp"

namespace {

using fabric::Kind;

// Adds the dtypes that have kernels, under torch's names.
bool add_types(PyObject* self) {
    constexpr struct {
        reduce::Type type;
        const char* name;
    } types[] = {
        {reduce::Type::f32, "float32"},       {reduce::Type::f64, "float64"},
        {reduce::Type::f16, "float16"},       {reduce::Type::bf16, "bfloat16"},
        {reduce::Type::f8e4m3fn, "float8_e4m3fn"}, {reduce::Type::f8e5m2, "float8_e5m2"},
        {reduce::Type::f8e4m3fnuz, "float8_e4m3fnuz"}, {reduce::Type::f8e5m2fnuz, "float8_e5m2fnuz"},
        {reduce::Type::i8, "int8"},           {reduce::Type::u8, "uint8"},
        {reduce::Type::i16, "int16"},         {reduce::Type::u16, "uint16"},
        {reduce::Type::i32, "int32"},         {reduce::Type::u32, "uint32"},
        {reduce::Type::i64, "int64"},         {reduce::Type::boolean, "bool"},
        {reduce::Type::c32, "complex32"},     {reduce::Type::c64, "complex64"},
        {reduce::Type::c128, "complex128"},
    };
    PyObject* names = PyDict_New();
    if (names == nullptr) return false;
    bool ok = true;
    for (const auto& entry : types) {
        PyObject* code = PyLong_FromLong(static_cast<long>(entry.type));
        PyObject* name = PyUnicode_FromString(entry.name);
        ok = ok && code != nullptr && name != nullptr && PyDict_SetItem(names, code, name) == 0;
        Py_XDECREF(code);
        Py_XDECREF(name);
    }
    ok = ok && PyModule_AddObjectRef(self, "TYPE_NAMES", names) == 0;
    Py_DECREF(names);
    return ok;
}

bool add_constants(PyObject* self) {
    const struct {
        const char* name;
        long value;
    } constants[] = {
        {"DONE", kDone},
        {"PENDING", kPending},
        {"DISAGREE", kDisagree},
        {"CLOSED", kClosed},
        {"BUSY", kBusy},
        {"LEFT", kLeft},
        {"ALL_REDUCE_ONE_SHOT", static_cast<long>(Kind::kAllReduceOneShot)},
        {"ALL_REDUCE_TWO_SHOT", static_cast<long>(Kind::kAllReduceTwoShot)},
        {"REDUCE_SCATTER", static_cast<long>(Kind::kReduceScatter)},
        {"ALL_GATHER", static_cast<long>(Kind::kAllGather)},
        {"GATHER", static_cast<long>(Kind::kGather)},
        {"SCATTER", static_cast<long>(Kind::kScatter)},
        {"REDUCE", static_cast<long>(Kind::kReduce)},
    };
    for (const auto& constant : constants) {
        if (PyModule_AddIntConstant(self, constant.name, constant.value) < 0) return false;
    }
    return true;
}

}  // namespace

int constants_add(PyObject* module) { return add_types(module) && add_constants(module) ? 0 : -1; }
