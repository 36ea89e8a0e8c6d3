"""Collectives as operations of a graph, so that `torch.compile` takes a method of a group without a graph break.

An operation names its group by `unique_name` and is given the world size besides: the shapes of a graph that a
compiler has cached on disk depend on it, while a group of the same name in a later run may be of another size.
A compiled graph keeps no group alive.

    torch.ops.group_coordinator.all_reduce(x, group.unique_name)

is what `group.all_reduce(x)` becomes when Dynamo traces it. Results are always new tensors, which share memory neither
with the inputs nor with each other, and no gradient flows through them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import torch

from coordinator import group_registry
from coordinator.group_registry import Registration
from coordinator.planes import GroupPlanes
from device_comm import checks, coalesced, rms_norm
from device_comm.base import SUM
from device_comm.derived_reductions import Reduction, reducer
from shm_broadcast.errors import UsageError

NAMESPACE: Final = "group_coordinator"

_SCHEMAS: Final = {
    "all_reduce": "(Tensor input, str group_name, str op='sum', float? timeout_s=None) -> Tensor",
    "all_gather": "(Tensor input, str group_name, int world_size, int dim=-1, float? timeout_s=None) -> Tensor",
    "reduce_scatter": "(Tensor input, str group_name, int world_size, int dim=-1, str op='sum', "
    "float? timeout_s=None) -> Tensor",
    "all_reduce_add_rms_norm": "(Tensor input, Tensor residual, Tensor weight, float eps, str group_name, "
    "float? timeout_s=None) -> (Tensor, Tensor)",
    "all_to_all": "(Tensor input, str group_name, int world_size, int dim=0, SymInt[]? send_sizes=None, "
    "SymInt[]? recv_sizes=None, float? timeout_s=None) -> Tensor",
    "broadcast": "(Tensor input, str group_name, int src=0, float? timeout_s=None) -> Tensor",
    "all_reduce_coalesced": "(Tensor[] inputs, str group_name, str op='sum', float? timeout_s=None) -> Tensor[]",
    "all_gather_coalesced": "(Tensor[] inputs, str group_name, int world_size, int dim=0, float? timeout_s=None) "
    "-> Tensor[]",
    "reduce_scatter_coalesced": "(Tensor[] inputs, str group_name, int world_size, int dim=0, str op='sum', "
    "float? timeout_s=None) -> Tensor[]",
}

# --- what a method of a group becomes in a graph ----------------------------------------------------------------
# In a group of one the result is the input itself, as it is without a compiler; an operation could not return that.


def all_reduce(
    group: GroupPlanes, input_: torch.Tensor, op: Reduction, timeout_s: float | None
) -> torch.Tensor:
    """Trace `group.all_reduce`."""
    if group.world_size == 1:
        return input_
    name = _name(op)
    result: torch.Tensor = torch.ops.group_coordinator.all_reduce(
        input_.detach(), group.unique_name, name, timeout_s
    )
    return result


def all_gather(group: GroupPlanes, input_: torch.Tensor, dim: int, timeout_s: float | None) -> torch.Tensor:
    """Trace `group.all_gather`."""
    size = group.world_size
    if size == 1:
        return input_
    result: torch.Tensor = torch.ops.group_coordinator.all_gather(
        input_.detach(), group.unique_name, size, dim, timeout_s
    )
    return result


def reduce_scatter(
    group: GroupPlanes, input_: torch.Tensor, dim: int, op: Reduction, timeout_s: float | None
) -> torch.Tensor:
    """Trace `group.reduce_scatter`."""
    size = group.world_size
    if size == 1:
        return input_
    name = _name(op)
    result: torch.Tensor = torch.ops.group_coordinator.reduce_scatter(
        input_.detach(), group.unique_name, size, dim, name, timeout_s
    )
    return result


def all_reduce_add_rms_norm(
    group: GroupPlanes,
    input_: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    timeout_s: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trace `group.all_reduce_add_rms_norm`."""
    tensors = (input_.detach(), residual.detach(), weight.detach())
    normed, total = torch.ops.group_coordinator.all_reduce_add_rms_norm(
        *tensors, eps, group.unique_name, timeout_s
    )
    return normed, total


def all_to_all(
    group: GroupPlanes,
    input_: torch.Tensor,
    dim: int,
    send_sizes: Sequence[int] | None,
    recv_sizes: Sequence[int] | None,
    timeout_s: float | None,
) -> torch.Tensor:
    """Trace `group.all_to_all`."""
    size = group.world_size
    if size == 1:
        return input_
    sent = None if send_sizes is None else list(send_sizes)
    received = None if recv_sizes is None else list(recv_sizes)
    result: torch.Tensor = torch.ops.group_coordinator.all_to_all(
        input_.detach(), group.unique_name, size, dim, sent, received, timeout_s
    )
    return result


def broadcast(group: GroupPlanes, input_: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
    """Trace `functional.broadcast`: not in place, so the result is new in a group of one too."""
    result: torch.Tensor = torch.ops.group_coordinator.broadcast(
        input_.detach(), group.unique_name, src, timeout_s
    )
    return result


def all_reduce_coalesced(
    group: GroupPlanes, tensors: Sequence[torch.Tensor], op: Reduction, timeout_s: float | None
) -> list[torch.Tensor]:
    """Trace `group.all_reduce_coalesced`."""
    if group.world_size == 1 or not tensors:
        return list(tensors)
    name = _name(op)
    result: list[torch.Tensor] = torch.ops.group_coordinator.all_reduce_coalesced(
        [each.detach() for each in tensors], group.unique_name, name, timeout_s
    )
    return result


def all_gather_coalesced(
    group: GroupPlanes, tensors: Sequence[torch.Tensor], dim: int, timeout_s: float | None
) -> list[torch.Tensor]:
    """Trace `group.all_gather_coalesced`."""
    size = group.world_size
    if size == 1 or not tensors:
        return list(tensors)
    result: list[torch.Tensor] = torch.ops.group_coordinator.all_gather_coalesced(
        [each.detach() for each in tensors], group.unique_name, size, dim, timeout_s
    )
    return result


def reduce_scatter_coalesced(
    group: GroupPlanes, tensors: Sequence[torch.Tensor], dim: int, op: Reduction, timeout_s: float | None
) -> list[torch.Tensor]:
    """Trace `group.reduce_scatter_coalesced`."""
    size = group.world_size
    if size == 1 or not tensors:
        return list(tensors)
    name = _name(op)
    result: list[torch.Tensor] = torch.ops.group_coordinator.reduce_scatter_coalesced(
        [each.detach() for each in tensors], group.unique_name, size, dim, name, timeout_s
    )
    return result


def _operation(op: str) -> Any:
    """Return the reduction that a graph names; the usual one need not be looked up."""
    return SUM if op == "sum" else op


def _name(op: Reduction) -> str:
    """Return the name by which a graph knows `op`."""
    if isinstance(op, enum.Enum):
        return op.name.lower()
    if isinstance(op, str):
        return op
    raise UsageError(
        f"a compiled graph cannot hold the reduction {op!r}: pass it by name, or scale the tensor first"
    )


# --- what the operations do: the group's communicator makes the call, behind the group's gate -------------------------


def _sized(name: str, operation: str, world_size: int) -> Registration:
    found = group_registry.find(name, operation)
    if world_size != found.communicator.world_size:
        raise UsageError(
            f"{NAMESPACE}::{operation} on {name!r}: the graph was made for a group of {world_size}, this one has "
            f"{found.communicator.world_size} ranks"
        )
    return found


def _new(result: torch.Tensor, input_: torch.Tensor) -> torch.Tensor:
    """Return `result`, or a copy where that is the input itself: in a group of one."""
    return _copy(result) if result is input_ else result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _apart(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results that share no memory: a compiler takes each to begin at an aligned address of its own."""
    given = {id(each) for each in inputs}
    return [
        _copy(each)
        if id(each) in given or not each.nbytes or each.untyped_storage().nbytes() != each.nbytes
        else each
        for each in results
    ]


def _all_reduce(
    input_: torch.Tensor, group_name: str, op: str = "sum", timeout_s: float | None = None
) -> torch.Tensor:
    found = group_registry.find(group_name, "all_reduce")
    operation = _operation(op)
    make = reducer(operation, found.communicator).all_reduce
    return _new(found.calls.run("all_reduce", make, input_, operation, timeout_s=timeout_s), input_)


def _all_gather(
    input_: torch.Tensor, group_name: str, world_size: int, dim: int = -1, timeout_s: float | None = None
) -> torch.Tensor:
    found = _sized(group_name, "all_gather", world_size)
    make = found.communicator.all_gather
    return _new(found.calls.run("all_gather", make, input_, dim, timeout_s=timeout_s), input_)


def _reduce_scatter(
    input_: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int = -1,
    op: str = "sum",
    timeout_s: float | None = None,
) -> torch.Tensor:
    found = _sized(group_name, "reduce_scatter", world_size)
    operation = _operation(op)
    make = reducer(operation, found.communicator).reduce_scatter
    return _new(found.calls.run("reduce_scatter", make, input_, dim, operation, timeout_s=timeout_s), input_)


def _all_reduce_add_rms_norm(
    input_: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_name: str,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    found = group_registry.find(group_name, "all_reduce_add_rms_norm")
    make = found.communicator.all_reduce_add_rms_norm
    return found.calls.run(
        "all_reduce_add_rms_norm", make, input_, residual, weight, eps, timeout_s=timeout_s
    )


def _all_to_all(
    input_: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int = 0,
    send_sizes: Sequence[int] | None = None,
    recv_sizes: Sequence[int] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    found = _sized(group_name, "all_to_all", world_size)
    make = found.communicator.all_to_all
    result = found.calls.run("all_to_all", make, input_, dim, send_sizes, recv_sizes, timeout_s=timeout_s)
    return _new(result, input_)


def _broadcast(
    input_: torch.Tensor, group_name: str, src: int = 0, timeout_s: float | None = None
) -> torch.Tensor:
    found = group_registry.find(group_name, "broadcast")
    make = found.communicator.broadcast
    return found.calls.run("broadcast", make, _copy(input_), src, timeout_s=timeout_s)


def _all_reduce_coalesced(
    inputs: Sequence[torch.Tensor], group_name: str, op: str = "sum", timeout_s: float | None = None
) -> list[torch.Tensor]:
    found = group_registry.find(group_name, "all_reduce_coalesced")
    make = partial(coalesced.all_reduce, found.communicator)
    results = found.calls.run("all_reduce_coalesced", make, inputs, _operation(op), timeout_s=timeout_s)
    return _apart(results, inputs)


def _all_gather_coalesced(
    inputs: Sequence[torch.Tensor],
    group_name: str,
    world_size: int,
    dim: int = 0,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    found = _sized(group_name, "all_gather_coalesced", world_size)
    make = partial(coalesced.all_gather, found.communicator)
    return _apart(found.calls.run("all_gather_coalesced", make, inputs, dim, timeout_s=timeout_s), inputs)


def _reduce_scatter_coalesced(
    inputs: Sequence[torch.Tensor],
    group_name: str,
    world_size: int,
    dim: int = 0,
    op: str = "sum",
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    found = _sized(group_name, "reduce_scatter_coalesced", world_size)
    make = partial(coalesced.reduce_scatter, found.communicator)
    results = found.calls.run(
        "reduce_scatter_coalesced", make, inputs, dim, _operation(op), timeout_s=timeout_s
    )
    return _apart(results, inputs)


# --- what shapes they give -------------------------------------------------------------------------------------------


def _all_reduce_shape(
    input_: torch.Tensor, group_name: str, op: str = "sum", timeout_s: float | None = None
) -> torch.Tensor:
    del group_name, op, timeout_s
    return _like(input_, input_.shape)


def _all_gather_shape(
    input_: torch.Tensor, group_name: str, world_size: int, dim: int = -1, timeout_s: float | None = None
) -> torch.Tensor:
    del group_name, timeout_s
    at = checks.check_dim(dim, input_)
    if world_size == 1:
        return _like(input_, input_.shape)
    shape = list(input_.shape) or [1]
    shape[at] = shape[at] * world_size
    return _like(input_, shape)


def _reduce_scatter_shape(
    input_: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int = -1,
    op: str = "sum",
    timeout_s: float | None = None,
) -> torch.Tensor:
    del group_name, op, timeout_s
    at = checks.check_dim(dim, input_)
    if world_size == 1:
        return _like(input_, input_.shape)
    # A symbolic size is guarded to be a multiple.
    checks.check_divisible(input_, at, world_size)
    shape = list(input_.shape) or [1]
    shape[at] = shape[at] // world_size
    return _like(input_, shape)


def _all_reduce_add_rms_norm_shape(
    input_: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_name: str,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    del group_name, timeout_s
    rms_norm.check_arguments(input_, residual, weight, eps, input_.device, "all_reduce_add_rms_norm")
    return _like(input_, input_.shape), _like(input_, input_.shape)


def _all_to_all_shape(
    input_: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int = 0,
    send_sizes: Sequence[Any] | None = None,
    recv_sizes: Sequence[Any] | None = None,
    timeout_s: float | None = None,
) -> torch.Tensor:
    del group_name, timeout_s
    at = checks.check_dim(dim, input_)
    if (send_sizes is None) != (recv_sizes is None):
        raise UsageError(checks.BOTH_OR_NEITHER)
    if send_sizes is not None and recv_sizes is not None:
        _check_counts(send_sizes, world_size, "send_sizes")
        _check_counts(recv_sizes, world_size, "recv_sizes")
    elif world_size > 1:
        checks.check_divisible(input_, at, world_size, "send_sizes and recv_sizes may be uneven")
    if world_size == 1:
        return _like(input_, input_.shape)
    shape = list(input_.shape) or [1]
    if recv_sizes is not None:
        shape[at] = sum(recv_sizes)
    return _like(input_, shape)


def _check_counts(sizes: Sequence[Any], world_size: int, name: str) -> None:
    """Raise unless `sizes` may be counts; whether they fit the tensor is told when the call is made."""
    # Comparing their sum with a symbolic size would tie the graph to this one, or fail for one that depends on data.
    checks.check_sizes([each if isinstance(each, int) else 0 for each in sizes], world_size, name)
    for each in sizes:
        if not isinstance(each, int):
            torch._check(each >= 0)  # type: ignore[no-untyped-call]  # noqa: SLF001 - what its documentation names for this


def _broadcast_shape(
    input_: torch.Tensor, group_name: str, src: int = 0, timeout_s: float | None = None
) -> torch.Tensor:
    del group_name, src, timeout_s
    return _like(input_, input_.shape)


def _all_reduce_coalesced_shape(
    inputs: Sequence[torch.Tensor], group_name: str, op: str = "sum", timeout_s: float | None = None
) -> list[torch.Tensor]:
    return [_all_reduce_shape(each, group_name, op, timeout_s) for each in inputs]


def _all_gather_coalesced_shape(
    inputs: Sequence[torch.Tensor],
    group_name: str,
    world_size: int,
    dim: int = 0,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    return [_all_gather_shape(each, group_name, world_size, dim, timeout_s) for each in inputs]


def _reduce_scatter_coalesced_shape(
    inputs: Sequence[torch.Tensor],
    group_name: str,
    world_size: int,
    dim: int = 0,
    op: str = "sum",
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    return [_reduce_scatter_shape(each, group_name, world_size, dim, op, timeout_s) for each in inputs]


def _like(input_: torch.Tensor, shape: Sequence[Any]) -> torch.Tensor:
    """Return a new contiguous tensor, whatever the input's strides."""
    return torch.empty(shape, dtype=input_.dtype, device=input_.device)


def _define() -> Any:
    library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, schema in _SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, globals()[f"_{name}"], "CompositeExplicitAutograd")
        # Without a kernel of its own here torch would give the result a gradient that fails when it is asked for.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", globals()[f"_{name}_shape"], lib=library)
    return library


# The operations exist as long as this does.
_library: Final = _define()
