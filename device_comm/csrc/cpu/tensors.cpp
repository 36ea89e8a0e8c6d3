// All-reduces and all-gathers of ordinary tensors in one call from Python. At 1 KB, three quarters of the time were spent in
// Python: on reading the tensor's properties, creating the result and checking both.
#include "../../../shm_broadcast/csrc/codec/dlpack.hpp"
#include "object.hpp"

namespace region {
namespace {

constexpr size_t kMostDtypes = 32;

// Filled once, by `ordinary_tensors`.
dlpack::Torch torch;
struct {
    PyObject* dtype;
    uint64_t type;
} dtypes[kMostDtypes];  // not a container: no destructor of ours may run at exit
size_t known = 0;

// ordinary_tensors(Tensor, to_dlpack, from_dlpack, {dtype: type, ...}): registers what the methods of this file accept
PyObject* ordinary_tensors(PyObject*, PyObject* args) {
    PyObject *tensor = nullptr, *exports = nullptr, *imports = nullptr, *types = nullptr;
    if (!PyArg_ParseTuple(args, "OOOO!:ordinary_tensors", &tensor, &exports, &imports, &PyDict_Type, &types)) return nullptr;
    if (known > 0) Py_RETURN_NONE;
    size_t count = 0;
    PyObject *dtype = nullptr, *type = nullptr;
    for (Py_ssize_t at = 0; count < kMostDtypes && PyDict_Next(types, &at, &dtype, &type); ++count) {
        dtypes[count] = {dtype, PyLong_AsUnsignedLongLong(type)};
        if (PyErr_Occurred()) return nullptr;
    }
    if (!torch.learn(tensor, exports, imports)) return nullptr;
    // The references are never released, because torch is never unloaded.
    for (size_t i = 0; i < count; ++i) Py_INCREF(dtypes[i].dtype);
    known = count;
    Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"ordinary_tensors", ordinary_tensors, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Up to how many bytes a tensor is summed here, and up to how many of them in one shot; the same on all ranks.
struct Limits {
    uint64_t most;
    uint64_t one_shot;
};

// Returns the DLPack capsule of `tensor`, its type and its elements; null if it is not ordinary.
Ref read_ordinary(PyObject* tensor, uint64_t* type, Plan* plan) {
    if (!torch.is_tensor(tensor)) return Ref(nullptr);
    Ref dtype(torch.dtype(tensor));
    size_t at = 0;
    while (at < known && dtypes[at].dtype != dtype.get()) ++at;
    if (!dtype || at == known) return Ref(nullptr);
    Ref capsule(torch.exported(tensor));
    const dlpack::Managed* managed = capsule ? dlpack::managed_of(capsule.get()) : nullptr;
    if (managed == nullptr || !dlpack::is_dense_on_host(managed->tensor)) return Ref(nullptr);
    *type = dtypes[at].type;
    plan->element = reduce::element_bytes(static_cast<reduce::Type>(*type));
    plan->view.count = dlpack::elements_of(managed->tensor);
    plan->bytes = plan->view.count * plan->element;
    plan->in = static_cast<const unsigned char*>(managed->tensor.data) + managed->tensor.byte_offset;
    const bool has_memory = managed->tensor.data != nullptr || plan->bytes == 0;  // false: its storage was freed
    return Ref(has_memory ? capsule.release() : nullptr);
}

// Fills a plan for the sum of `tensor` and returns its DLPack capsule; null if it is not ordinary or too long.
Ref read(PyObject* tensor, const Limits& limits, Plan* plan, uint64_t* type) {
    Ref capsule = read_ordinary(tensor, type, plan);
    if (!capsule || plan->bytes > limits.most || !find_kernel(*type, 0, false, plan)) return Ref(nullptr);
    plan->kind = plan->bytes <= limits.one_shot ? Kind::kAllReduceOneShot : Kind::kAllReduceTwoShot;
    return capsule;
}

// Fills a plan for the concatenation of the ranks' tensors along `dim` and returns the DLPack capsule of this rank's; null if
// the Python code must make the call, or refuse it.
Ref read_part(PyObject* tensor, PyObject* dim, uint32_t ranks, uint64_t most, Plan* plan, uint64_t* type, int* at) {
    if (!PyLong_CheckExact(dim)) return Ref(nullptr);
    Ref capsule = read_ordinary(tensor, type, plan);
    if (!capsule || plan->bytes > most / ranks) return Ref(nullptr);
    const dlpack::Tensor& part = dlpack::managed_of(capsule.get())->tensor;
    int overflow = 0;
    const long given = PyLong_AsLongAndOverflow(dim, &overflow);
    if (overflow != 0 || given < -part.ndim || given >= part.ndim) return Ref(nullptr);
    *at = static_cast<int>(given < 0 ? given + part.ndim : given);
    size_t rows = 1, width = plan->element;
    for (int i = 0; i < part.ndim; ++i) (i < *at ? rows : width) *= static_cast<size_t>(part.shape[i]);
    plan->kind = Kind::kAllGather;
    plan->columns.set(rows, std::vector<size_t>(ranks, width));
    plan->view.count = plan->columns.row_bytes * rows;
    plan->view.detail = hash_of(plan->columns);
    return capsule;
}

// Returns a new tensor with the dtype and shape of the capsule's tensor, `times` as large along `dim`; `*data` is the address of
// its `bytes`.
PyObject* made_alike(PyObject* capsule, size_t bytes, unsigned char** data, int dim = 0, uint32_t times = 1) {
    const dlpack::Tensor& like = dlpack::managed_of(capsule)->tensor;
    dlpack::Managed* managed = dlpack::make_managed(like.ndim, bytes);
    if (managed == nullptr) return nullptr;
    managed->tensor.dtype = like.dtype;
    std::copy(like.shape, like.shape + like.ndim, managed->tensor.shape);
    if (times > 1) managed->tensor.shape[dim] *= times;
    *data = static_cast<unsigned char*>(managed->tensor.data);
    return torch.imported(managed);
}

// Returns whether the tensors of two capsules have the same shape.
bool are_alike(PyObject* one, PyObject* other) {
    const dlpack::Tensor &left = dlpack::managed_of(one)->tensor, &right = dlpack::managed_of(other)->tensor;
    return left.ndim == right.ndim && std::equal(left.shape, left.shape + left.ndim, right.shape);
}

// Begins the call unless a call is in progress by now: reading or creating a tensor may run the application's code, such as
// a finalizer, which may have begun one. Returns as `start`.
long begin(Object* object, Plan&& plan, uint64_t type) {
    if (const long status = refusal(object); status != kDone) return status;
    const uint64_t code = code_of(plan.kind, type, 0, 0);
    return start(object, std::move(plan), code);
}

// The result of each method if the tensor is not ordinary: None, or nullptr with an exception set.
PyObject* left_to_python() { return PyErr_Occurred() ? nullptr : Py_NewRef(Py_None); }

}  // namespace

// all_reduce(tensor, most_bytes, one_shot_bytes) -> the sum; (result, status) if it is not complete; None if not ordinary and
// not begun
PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    uint64_t limits[2], type = 0;
    if (!expect("all_reduce", count, 3) || !read_unsigned(args + 1, 2, limits)) return nullptr;
    Plan plan;
    Ref capsule = read(args[0], {limits[0], limits[1]}, &plan, &type);
    if (!capsule) return left_to_python();
    Ref result(made_alike(capsule.get(), plan.bytes, &plan.out));
    if (!result) return nullptr;
    const long status = begin(object_of(self), std::move(plan), type);
    if (status < 0) return nullptr;
    return status == kDone ? result.release() : Py_BuildValue("(Nl)", result.release(), status);
}

// all_reduce_into(tensor, output, most_bytes, one_shot_bytes) -> status; or None, with no call begun, if a
// tensor is not ordinary, if the two differ in dtype or shape, or if they overlap only in part
PyObject* all_reduce_into(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    uint64_t limits[2], type = 0;
    if (!expect("all_reduce_into", count, 4) || !read_unsigned(args + 2, 2, limits)) return nullptr;
    Plan plan;
    Ref capsule = read(args[0], {limits[0], limits[1]}, &plan, &type);
    if (!capsule) return left_to_python();
    Ref output(nullptr);  // keeps what is written to while the call is begun
    plan.out = const_cast<unsigned char*>(plan.in);
    if (args[1] != args[0]) {
        uint64_t output_type = 0;
        Plan to;
        output = read_ordinary(args[1], &output_type, &to);
        if (!output || output_type != type || !are_alike(capsule.get(), output.get())) return left_to_python();
        const bool is_apart = to.in + plan.bytes <= plan.in || plan.in + plan.bytes <= to.in;
        if (!is_apart && to.in != plan.in) return left_to_python();
        plan.out = const_cast<unsigned char*>(to.in);
    }
    const long status = begin(object_of(self), std::move(plan), type);
    return status < 0 ? nullptr : PyLong_FromLong(status);
}

// all_gather(tensor, dim, most_bytes) -> the ranks' tensors, concatenated; (result, status) if it is not complete; None if this
// tensor is not ordinary, or the result longer than `most_bytes`, and no call was begun
PyObject* all_gather(PyObject* self, PyObject* const* args, Py_ssize_t count) {
    uint64_t most = 0, type = 0;
    if (!expect("all_gather", count, 3) || !read_unsigned(args + 2, 1, &most)) return nullptr;
    Object* object = object_of(self);
    // A closed region has no ranks.
    if (const long status = refusal(object); status != kDone) return Py_BuildValue("(Ol)", Py_None, status);
    const uint32_t ranks = object->region->ranks();
    Plan plan;
    int dim = 0;
    Ref capsule = read_part(args[0], args[1], ranks, most, &plan, &type, &dim);
    if (!capsule) return left_to_python();
    Ref result(made_alike(capsule.get(), plan.view.count, &plan.out, dim, ranks));
    if (!result) return nullptr;
    const long status = begin(object, std::move(plan), type);
    if (status < 0) return nullptr;
    return status == kDone ? result.release() : Py_BuildValue("(Nl)", result.release(), status);
}

}  // namespace region

int tensors_add(PyObject* module) { return PyModule_AddFunctions(module, region::functions); }
