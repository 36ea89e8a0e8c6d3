// The constants of the module: dtypes that have kernels, the statuses of a call and its kinds.
#include "object.hpp"
#include "channels.hpp"
#include "status_board.hpp"

namespace {

using region::Kind;

// torch's names of the dtypes that have kernels, in the order of reduce::Type.
constexpr const char* kTypeNames[] = {
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool",
    "complex32", "complex64", "complex128",
};
static_assert(std::size(kTypeNames) == reduce::kTypes);

bool add_types(PyObject* self) {
    const region::Ref names(PyDict_New());
    if (!names) return false;
    for (size_t type = 0; type < reduce::kTypes; ++type) {
        const region::Ref code(PyLong_FromSize_t(type)), name(PyUnicode_FromString(kTypeNames[type]));
        if (!code || !name || PyDict_SetItem(names.get(), code.get(), name.get()) < 0) return false;
    }
    return PyModule_AddObjectRef(self, "TYPE_NAMES", names.get()) == 0;
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
        {"NESTED", kNested},
        {"ABANDONED", kAbandoned},
        {"LEFT", kLeft},
        {"ALL_REDUCE_ONE_SHOT", static_cast<long>(Kind::kAllReduceOneShot)},
        {"ALL_REDUCE_TWO_SHOT", static_cast<long>(Kind::kAllReduceTwoShot)},
        {"REDUCE_SCATTER", static_cast<long>(Kind::kReduceScatter)},
        {"ALL_GATHER", static_cast<long>(Kind::kAllGather)},
        {"GATHER", static_cast<long>(Kind::kGather)},
        {"SCATTER", static_cast<long>(Kind::kScatter)},
        {"ALL_TO_ALL", static_cast<long>(Kind::kAllToAll)},
        {"REDUCE", static_cast<long>(Kind::kReduce)},
        {"REFUSED", static_cast<long>(region::kRefused)},
        {"REASON_BYTES", static_cast<long>(region::kReasonBytes)},
        {"BOARD_RECORD_BYTES", static_cast<long>(status::kRecordBytes)},
        {"BELL_BYTES", static_cast<long>(channels::kBellBytes)},
        {"CHANNEL_NONE", channels::kNone},
        {"CHANNEL_MAKING", channels::kMaking},
        {"CHANNEL_READY", channels::kReady},
    };
    for (const auto& constant : constants) {
        if (PyModule_AddIntConstant(self, constant.name, constant.value) < 0) return false;
    }
    return true;
}

}  // namespace

int constants_add(PyObject* module) { return add_types(module) && add_constants(module) ? 0 : -1; }
