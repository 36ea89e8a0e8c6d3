"""Collectives as operations of a graph, so that `torch.compile` traces a method of a group without a graph break.

An operation names its group by `unique_name`. Where the shape of its result depends on the world size, the operation
also holds that: a compiler may have cached the graph on disk, and in a later run a group of the same name may have
another size. A compiled graph does not keep its group alive.

    torch.ops.group_coordinator.all_reduce(x, group.unique_name)

is the operation that replaces `group.all_reduce(x)` when Dynamo traces it. Results are always new tensors, which share
memory neither with the inputs nor with each other. Operations that write to a tensor of the caller say so in their
schema and return nothing. `backward` holds the gradients; a call without one refuses an input that requires grad.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch.compiler import is_dynamo_compiling

from coordinator import group_registry
from coordinator.gradients import lost_gradient, refuse_lost_gradient, wants_gradient
from coordinator.planes import GroupPlanes
from coordinator.torch_interop.backward import BACKWARD, is_linear
from device_comm import checks, coalesced
from device_comm.base import SUM
from device_comm.derived_reductions import reducer
from device_comm.fused import rms_norm
from device_comm.fused.finalize import check_experts
from device_comm.fused.fp4 import BLOCK, check_blocks
from device_comm.fused.fp8 import FP8, check_scale
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout, seconds

NAMESPACE: Final = "group_coordinator"

# Without `group_name`, `world_size`, `rank` and `timeout_s`, the arguments have the order of the communicator's method;
# `_make` depends on it. An operation holds the rank if the shape of its result, or of its gradient, depends on it.
_SCHEMAS: Final = {
    "all_reduce": "(Tensor input, str group_name, str op='sum', float? timeout_s=None) -> Tensor",
    "all_gather": "(Tensor input, str group_name, int world_size, int dim=-1, float? timeout_s=None) -> Tensor",
    "reduce_scatter": "(Tensor input, str group_name, int world_size, int dim=-1, str op='sum', "
    "float? timeout_s=None) -> Tensor",
    "all_reduce_add_rms_norm": "(Tensor input, Tensor residual, Tensor weight, float eps, str group_name, "
    "float? timeout_s=None) -> (Tensor, Tensor)",
    # The second result is an empty tensor where the call has a scale: it would be an input.
    "all_reduce_add_rms_norm_fp8": "(Tensor input, Tensor residual, Tensor weight, float eps, str group_name, "
    "Tensor? scale=None, float? timeout_s=None) -> (Tensor, Tensor, Tensor)",
    "all_reduce_add_rms_norm_nvfp4": "(Tensor input, Tensor residual, Tensor weight, float eps, str group_name, "
    "Tensor global_scale, float? timeout_s=None) -> (Tensor, Tensor, Tensor)",
    "moe_finalize_all_reduce": "(Tensor expert_out, Tensor rows, Tensor weights, str group_name, Tensor? shared=None, "
    "float? timeout_s=None) -> Tensor",
    "all_to_all": "(Tensor input, str group_name, int world_size, int dim=0, SymInt[]? send_sizes=None, "
    "SymInt[]? recv_sizes=None, float? timeout_s=None) -> Tensor",
    "broadcast": "(Tensor input, str group_name, int src=0, float? timeout_s=None) -> Tensor",
    "all_gatherv": "(Tensor input, str group_name, int world_size, int rank, int dim=0, SymInt[]? sizes=None, "
    "float? timeout_s=None) -> Tensor",
    "reduce_scatterv": "(Tensor input, str group_name, int world_size, int rank, int dim=-1, SymInt[]? sizes=None, "
    "str op='sum', float? timeout_s=None) -> Tensor",
    # On the other ranks the result is an empty tensor.
    "gather": "(Tensor input, str group_name, int world_size, int rank, int dst=0, int dim=-1, "
    "float? timeout_s=None) -> Tensor",
    # The sum of the ranks' tensors on rank `dst`, zeros elsewhere: the gradient of `broadcast`.
    "sum_on": "(Tensor input, str group_name, int dst=0, float? timeout_s=None) -> Tensor",
    "all_reduce_coalesced": "(Tensor[] inputs, str group_name, str op='sum', float? timeout_s=None) -> Tensor[]",
    "all_gather_coalesced": "(Tensor[] inputs, str group_name, int world_size, int dim=0, float? timeout_s=None) "
    "-> Tensor[]",
    "reduce_scatter_coalesced": "(Tensor[] inputs, str group_name, int world_size, int dim=0, str op='sum', "
    "float? timeout_s=None) -> Tensor[]",
}

# Operations that write to their argument `(a!)`.
_WRITING: Final = {
    "all_reduce_": "(Tensor(a!) tensor, str group_name, str op='sum', float? timeout_s=None) -> ()",
    "broadcast_": "(Tensor(a!) tensor, str group_name, int src=0, float? timeout_s=None) -> ()",
    "all_reduce_into_output": "(Tensor input, Tensor(a!) output, str group_name, str op='sum', "
    "float? timeout_s=None) -> ()",
    "reduce_scatterv_into_output": "(Tensor input, Tensor(a!) output, str group_name, int dim=-1, "
    "SymInt[]? sizes=None, str op='sum', float? timeout_s=None) -> ()",
    "all_gatherv_into_output": "(Tensor input, Tensor(a!) output, str group_name, int dim=0, SymInt[]? sizes=None, "
    "float? timeout_s=None) -> ()",
    "all_to_all_into_output": "(Tensor input, Tensor(a!) output, str group_name, int dim=0, "
    "SymInt[]? send_sizes=None, SymInt[]? recv_sizes=None, float? timeout_s=None) -> ()",
}

# --- calls that are traced ---------------------------------------------------------------------------------------


def trace(
    name: str, group: GroupPlanes, input_: torch.Tensor, timeout_s: AnyTimeout = None, **arguments: Any
) -> torch.Tensor:
    """Trace a call of `group` as the operation `name`, and return its result.

    Args:
        name: Name of the operation.
        group: The group.
        input_: The call's input.
        timeout_s: Deadline in any form.
        arguments: All other arguments of the operation, in the order of its schema.
    """
    # In a group of one the method returns its input, and so does a traced call; an operation could not.
    if group.world_size == 1 and name != "broadcast":
        return input_
    try:
        if wants_gradient(input_) and not (name in BACKWARD and is_linear(_named(arguments.get("op", SUM)))):
            raise lost_gradient(name, "sums and means have gradients; for others pass tensor.detach()")
        held, limit_s = _all_held(arguments), None if timeout_s is None else seconds(timeout_s)
    except UsageError as error:
        if is_dynamo_compiling():
            raise
        # An input that requires grad brings calls here that nobody compiles.
        group_registry.find(group.unique_name, name).calls.refuse_unadmitted(name, error)
    result: torch.Tensor = _add(name, group, (input_,), limit_s, held)
    return result


def trace_writing(
    name: str,
    group: GroupPlanes,
    tensors: Sequence[torch.Tensor],
    timeout_s: AnyTimeout = None,
    **arguments: Any,
) -> torch.Tensor:
    """Trace a call that writes to the last one of `tensors`, and return that one; see `trace`."""
    refuse_lost_gradient(name.replace("broadcast_", "broadcast"), tensors, group.world_size)
    limit_s = None if timeout_s is None else seconds(timeout_s)
    _add(name, group, tuple(tensors), limit_s, _all_held(arguments))
    return tensors[-1]


def trace_list(
    name: str,
    group: GroupPlanes,
    tensors: Sequence[torch.Tensor],
    timeout_s: AnyTimeout = None,
    **arguments: Any,
) -> list[torch.Tensor]:
    """Trace a call on several tensors; see `trace`."""
    refuse_lost_gradient(name, [tensors], group.world_size)
    if group.world_size == 1 or not tensors:
        return list(tensors)
    limit_s = None if timeout_s is None else seconds(timeout_s)
    results: list[torch.Tensor] = _add(name, group, (list(tensors),), limit_s, _all_held(arguments))
    return results


def trace_norm(
    group: GroupPlanes,
    input_: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    timeout_s: AnyTimeout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trace `group.all_reduce_add_rms_norm`."""
    tensors = (input_, residual, weight)
    refuse_lost_gradient("all_reduce_add_rms_norm", tensors, group.world_size)
    normed, total = torch.ops.group_coordinator.all_reduce_add_rms_norm(
        *tensors, eps, group.unique_name, None if timeout_s is None else seconds(timeout_s)
    )
    return normed, total


def trace_fused(
    name: str,
    group: GroupPlanes,
    tensors: Sequence[torch.Tensor],
    *arguments: Any,
    last: torch.Tensor | None = None,
    timeout_s: AnyTimeout = None,
) -> Any:
    """Trace a call with other work than a collective; see `trace`.

    Args:
        name: Name of the operation.
        group: The group.
        tensors: The call's inputs.
        arguments: What follows them in the schema, before the group's name.
        last: What follows the group's name: a tensor that may be missing.
        timeout_s: Deadline in any form.
    """
    refuse_lost_gradient(name, [*tensors, last], group.world_size)
    limit_s = None if timeout_s is None else seconds(timeout_s)
    operation = getattr(torch.ops.group_coordinator, name)
    return operation(*tensors, *arguments, group.unique_name, last, limit_s)


def _add(
    name: str,
    group: GroupPlanes,
    inputs: tuple[object, ...],
    limit_s: float | None,
    held: Sequence[Any],
) -> Any:
    """Add an operation to the graph that is being traced, or make it; `held` are its other arguments."""
    schema = _SCHEMAS.get(name, "")
    size = (group.world_size,) if "int world_size" in schema else ()
    rank = (group.rank_in_group,) if "int rank" in schema else ()
    operation = getattr(torch.ops.group_coordinator, name)
    return operation(*inputs, group.unique_name, *size, *rank, *held, limit_s)


def _named(op: object) -> object:
    """Return a reduction as a graph holds it."""
    return op.name.lower() if isinstance(op, enum.Enum) else op


def _all_held(arguments: dict[str, Any]) -> list[Any]:
    return [_held(key, value) for key, value in arguments.items()]


def _held(key: str, value: Any) -> Any:
    """Return an argument as a graph holds it: a reduction by its name, sizes as a list."""
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if key == "op" and not isinstance(value, str):
        raise UsageError(
            f"a compiled graph cannot hold the reduction {value!r}: pass it by name, or scale the tensor first"
        )
    return list(value) if key.endswith("sizes") and value is not None else value


def overridden(group: GroupPlanes | None, name: str) -> Callable[..., torch.Tensor] | None:
    """Return the method by which a subclass of the group replaces `name`; see `TensorCollectives`. Usually None."""
    if group is None or name not in group.overridden:
        return None
    hook: Callable[..., torch.Tensor] = getattr(group, group.overridden[name])
    return hook


# --- what the operations do --------------------------------------------------------------------------------------


def _make(name: str, given: dict[str, Any]) -> Any:
    """Make the call of the operation `name` behind its group's gate; `given` holds the arguments by name."""
    group_name, timeout_s = given.pop("group_name"), given.pop("timeout_s")
    found = group_registry.find(group_name, name)
    there = found.communicator
    world_size = given.pop("world_size", there.world_size)
    if world_size != there.world_size:
        raise UsageError(
            f"{NAMESPACE}::{name} on {group_name!r}: the graph was made for a group of {world_size}, this one has "
            f"{there.world_size} ranks"
        )
    if given.pop("rank", there.rank_in_group) != there.rank_in_group:
        raise UsageError(f"{NAMESPACE}::{name} on {group_name!r}: the graph was made for another rank")
    if given.get("op") == "sum":
        # The enum member needs no lookup.
        given["op"] = SUM
    first, *others = given.values()
    if name in _WRITING:
        method = "broadcast" if name == "broadcast_" else name
        make = getattr(reducer(given.get("op", SUM), there), method)
        found.calls.run(method, make, first, *others, timeout_s=timeout_s)
        return None
    if name == "sum_on":
        total = found.calls.run(name, there.reduce, first, *others, timeout_s=timeout_s)
        return torch.zeros_like(first) if total is None else _apart([total], [first])[0]
    if name.endswith("_coalesced"):
        make = partial(getattr(coalesced, name.removesuffix("_coalesced")), there)
        return _apart(found.calls.run(name, make, first, *others, timeout_s=timeout_s), first)
    make = getattr(reducer(given.get("op", SUM), there), name)
    hook = overridden(found.reference(), name)
    if hook is not None and given.get("op", SUM) is SUM and timeout_s is None:
        made: torch.Tensor = hook(first, *others[: name != "all_reduce"])
        return _copy(made) if made is first else made
    # The communicator broadcasts in place.
    input_ = _copy(first) if name == "broadcast" else first
    result = found.calls.run(name, make, input_, *others, timeout_s=timeout_s)
    if result is None:
        return first.new_empty(0)
    if given.get("scale") is not None:
        return result[0], first.new_empty(0, dtype=torch.float32), result[2]
    # In a group of one the result may be the input itself.
    return _copy(result) if result is first else result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _apart(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results that share no memory: a compiler assumes that each begins at an aligned address of its own."""
    given = {id(each) for each in inputs}
    return [
        _copy(each)
        if id(each) in given or not each.nbytes or each.untyped_storage().nbytes() != each.nbytes
        else each
        for each in results
    ]


# --- the shapes of their results ---------------------------------------------------------------------------------


def result_shape(
    name: str,
    like: torch.Tensor,
    *,
    world_size: int = 1,
    dim: int | None = None,
    send_sizes: Sequence[Any] | None = None,
    recv_sizes: Sequence[Any] | None = None,
    sizes: Sequence[Any] | None = None,
    rank: int = 0,
    dst: int | None = None,
    **_others: Any,
) -> Sequence[Any]:
    """Return the shape of the result of the call `name` on a tensor such as `like`. Sizes may be symbolic.

    Raises:
        UsageError: The arguments do not fit the tensor.
    """
    if dim is None:
        return like.shape
    at = checks.check_dim(dim, like)
    shape = list(like.shape) or [1]
    if dst is not None and rank != dst:
        return (0,)
    if sizes is not None:
        _check_counts(sizes, world_size, "sizes")
        shape[at] = sum(sizes) if name == "all_gatherv" else sizes[rank]
    elif name in ("all_gather", "all_gatherv", "gather"):
        shape[at] *= world_size
    elif name in ("reduce_scatter", "reduce_scatterv"):
        # A symbolic size gets a guard that it is a multiple.
        checks.check_divisible(like, at, world_size)
        shape[at] //= world_size
    elif (send_sizes is None) != (recv_sizes is None):
        raise UsageError(checks.BOTH_OR_NEITHER)
    elif send_sizes is None or recv_sizes is None:
        checks.check_divisible(like, at, world_size, "send_sizes and recv_sizes may be uneven")
    else:
        _check_counts(send_sizes, world_size, "send_sizes")
        _check_counts(recv_sizes, world_size, "recv_sizes")
        shape[at] = sum(recv_sizes)
    return like.shape if world_size == 1 else shape


def _check_counts(sizes: Sequence[Any], world_size: int, name: str) -> None:
    """Raise unless `sizes` may be counts; the call itself checks whether they fit the tensor."""
    # To compare their sum with a symbolic size would add a guard on it, or fail if it depends on data.
    checks.check_sizes([each if isinstance(each, int) else 0 for each in sizes], world_size, name)
    for each in sizes:
        if not isinstance(each, int):
            torch._check(each >= 0)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what its documentation names for this


def _fake(name: str, given: dict[str, Any]) -> Any:
    """Return empty tensors in the place of the results of the operation `name`."""
    if name in _WRITING:
        return None
    first, *others = given.values()
    if name == "all_reduce_add_rms_norm":
        residual, weight, eps, *_ = others
        rms_norm.check_arguments(first, residual, weight, eps, first.device, name)
        return _empty(first, first.shape), _empty(first, first.shape)
    if name == "all_reduce_add_rms_norm_fp8":
        residual, weight, eps, _, scale, *_ = others
        rms_norm.check_arguments(first, residual, weight, eps, first.device, name)
        check_scale(scale, first.device, name)
        scales = first.new_empty((first.shape[0], 1) if scale is None else (0,), dtype=torch.float32)
        return torch.empty(first.shape, dtype=FP8, device=first.device), scales, _empty(first, first.shape)
    if name == "all_reduce_add_rms_norm_nvfp4":
        residual, weight, eps, _, scale, *_ = others
        rms_norm.check_arguments(first, residual, weight, eps, first.device, name)
        rows, hidden = first.shape
        check_blocks(hidden, scale, first.device, name)
        scales = torch.empty((rows, hidden // BLOCK), dtype=FP8, device=first.device)
        return first.new_empty((rows, hidden // 2), dtype=torch.uint8), scales, _empty(first, first.shape)
    if name == "moe_finalize_all_reduce":
        rows, weights, _, shared, *_ = others
        check_experts(first, rows, weights, shared, first.device, name)
        return _empty(first, (rows.shape[0], first.shape[1]))
    if name.endswith("_coalesced"):
        method = name.removesuffix("_coalesced")
        return [_empty(each, result_shape(method, each, **given)) for each in first]
    return _empty(first, result_shape(name, first, **given))


def _empty(like: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """Return a new contiguous tensor, whatever the strides of `like`."""
    return torch.empty(shape, dtype=like.dtype, device=like.device)


def _differentiate(library: Any, name: str) -> None:
    """Give the operation `name` its gradient."""
    backward = BACKWARD[name]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del output
        ctx.given, ctx.shape = dict(zip(_defaults(name), inputs, strict=True)), inputs[0].shape
        del ctx.given["input"]
        if not is_linear(ctx.given.get("op", "sum")):
            raise lost_gradient(name)

    def differentiate(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        result = backward(grad, ctx.given)
        # A 0-dim input was taken as one of shape [1].
        return result.reshape(ctx.shape), *(None for _ in ctx.given)

    torch.library.register_autograd(f"{NAMESPACE}::{name}", differentiate, setup_context=keep, lib=library)


def _define() -> Any:
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in (_SCHEMAS | _WRITING).items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, _with_names(name, _make), "CompositeExplicitAutograd")
        if name in BACKWARD:
            _differentiate(library, name)
        else:
            # Without a kernel here torch would give the result a gradient that fails when it is computed.
            library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", _with_names(name, _fake), lib=library)
    return library


def _with_names(name: str, function: Callable[[str, dict[str, Any]], Any]) -> Callable[..., Any]:
    """Return `function` as torch calls it: by position, and without trailing arguments that equal their defaults."""
    defaults = _defaults(name)

    def call(*args: Any) -> Any:
        given = defaults.copy()
        given.update(zip(defaults, args, strict=False))
        return function(name, given)

    return call


def _defaults(name: str) -> dict[str, Any]:
    """Return the arguments of the operation `name`, in order, with their defaults."""
    schema = getattr(torch.ops.group_coordinator, name).default._schema  # noqa: SLF001 - as torch's documentation does
    return {each.name: each.default_value for each in schema.arguments}


# The operations exist as long as this does.
_library: Final = _define()
