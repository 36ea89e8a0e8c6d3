"""Collectives as operations of a graph, so that `torch.compile` takes a method of a group without a graph break.

An operation names its group by `unique_name` and is given the world size besides: the shapes of a graph that a
compiler has cached on disk depend on it, while a group of the same name in a later run may be of another size.
Groups are kept weakly: a compiled graph keeps none alive.

    torch.ops.group_coordinator.all_reduce(x, group.unique_name)

is what `group.all_reduce(x)` becomes (`traced_calls`). Results are always new tensors, which share memory neither with
the inputs nor with each other, and no gradient flows through them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final, cast

import torch

from coordinator.coalesced import CoalescedCollectives
from coordinator.tensor_collectives import TensorCollectives
from device_comm import checks, rms_norm
from device_comm.base import SUM
from device_comm.derived_reductions import Reduction
from shm_broadcast.errors import ClosedError, UsageError

NAMESPACE: Final = "group_coordinator"

# Names of groups that are gone, the latest ones, so that their graphs are told what happened.
_REMEMBERED: Final = 1024

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

_groups: dict[str, weakref.ref[TensorCollectives]] = {}
_gone: dict[str, None] = {}


# --- groups by name ---------------------------------------------------------------------------------------------


def register_group(group: TensorCollectives) -> None:
    """Let operations find `group` by its unique name, until `forget_group` or its end."""
    name = group.unique_name

    def collected(reference: weakref.ref[TensorCollectives]) -> None:
        if _groups.get(name) is reference:
            _forget(name)

    _gone.pop(name, None)
    _groups[name] = weakref.ref(group, collected)


def forget_group(group: TensorCollectives) -> None:
    """Let operations that name `group` raise `ClosedError` from now on. Idempotent."""
    reference = _groups.get(group.unique_name)
    # A later world may have a group of the same name: that one stays.
    if reference is not None and reference() is group:
        _forget(group.unique_name)


def _forget(name: str) -> None:
    del _groups[name]
    _gone[name] = None
    if len(_gone) > _REMEMBERED:
        del _gone[next(iter(_gone))]


def find_group(name: str, operation: str) -> TensorCollectives:
    """Return the group of that unique name.

    Args:
        name: The group's `unique_name`.
        operation: What it is wanted for, for the error's text.

    Raises:
        ClosedError: It was destroyed.
        UsageError: This process has had no such group.
    """
    reference = _groups.get(name)
    group = None if reference is None else reference()
    if group is not None:
        return group
    where = f"{NAMESPACE}::{operation} on {name!r}"
    if name in _gone or reference is not None:
        raise ClosedError(f"{where}: the group was destroyed; compile again with one that exists")
    raise UsageError(f"{where}: this process has no group of that name; it has {sorted(_groups) or 'none'}")


def live_groups() -> list[TensorCollectives]:
    """Return the groups that exist in this process, newest first."""
    groups = [reference() for reference in list(_groups.values())]
    return [group for group in reversed(groups) if group is not None]


# --- what the operations do ---------------------------------------------------------------------------------------


def _sized(name: str, operation: str, world_size: int) -> TensorCollectives:
    group = find_group(name, operation)
    if world_size != group.world_size:
        raise UsageError(
            f"{NAMESPACE}::{operation} on {name!r}: the graph was made for a group of {world_size}, this one has "
            f"{group.world_size} ranks"
        )
    return group


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


def _coalescing(group: TensorCollectives) -> CoalescedCollectives:
    # What is registered is a GroupCoordinator, which is both.
    return cast("CoalescedCollectives", group)


def _operation(op: str) -> Reduction:
    # A name is taken like what it names; the usual one need not be looked up.
    return SUM if op == "sum" else cast("Reduction", op)


# The methods are those of our class: one that a subclass overrides has been traced already.


def _all_reduce(
    input_: torch.Tensor, group_name: str, op: str = "sum", timeout_s: float | None = None
) -> torch.Tensor:
    group = find_group(group_name, "all_reduce")
    return _new(TensorCollectives.all_reduce(group, input_, _operation(op), timeout_s=timeout_s), input_)


def _all_gather(
    input_: torch.Tensor, group_name: str, world_size: int, dim: int = -1, timeout_s: float | None = None
) -> torch.Tensor:
    group = _sized(group_name, "all_gather", world_size)
    return _new(TensorCollectives.all_gather(group, input_, dim, timeout_s=timeout_s), input_)


def _reduce_scatter(
    input_: torch.Tensor,
    group_name: str,
    world_size: int,
    dim: int = -1,
    op: str = "sum",
    timeout_s: float | None = None,
) -> torch.Tensor:
    group = _sized(group_name, "reduce_scatter", world_size)
    return _new(
        TensorCollectives.reduce_scatter(group, input_, dim, _operation(op), timeout_s=timeout_s), input_
    )


def _all_reduce_add_rms_norm(
    input_: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    group_name: str,
    timeout_s: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = find_group(group_name, "all_reduce_add_rms_norm")
    return TensorCollectives.all_reduce_add_rms_norm(
        group, input_, residual, weight, eps, timeout_s=timeout_s
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
    group = _sized(group_name, "all_to_all", world_size)
    result = TensorCollectives.all_to_all(group, input_, dim, send_sizes, recv_sizes, timeout_s=timeout_s)
    return _new(result, input_)


def _broadcast(
    input_: torch.Tensor, group_name: str, src: int = 0, timeout_s: float | None = None
) -> torch.Tensor:
    group = find_group(group_name, "broadcast")
    return TensorCollectives.broadcast(group, _copy(input_), src, timeout_s=timeout_s)


def _all_reduce_coalesced(
    inputs: Sequence[torch.Tensor], group_name: str, op: str = "sum", timeout_s: float | None = None
) -> list[torch.Tensor]:
    group = _coalescing(find_group(group_name, "all_reduce_coalesced"))
    results = CoalescedCollectives.all_reduce_coalesced(group, inputs, _operation(op), timeout_s=timeout_s)
    return _apart(results, inputs)


def _all_gather_coalesced(
    inputs: Sequence[torch.Tensor],
    group_name: str,
    world_size: int,
    dim: int = 0,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    group = _coalescing(_sized(group_name, "all_gather_coalesced", world_size))
    return _apart(CoalescedCollectives.all_gather_coalesced(group, inputs, dim, timeout_s=timeout_s), inputs)


def _reduce_scatter_coalesced(
    inputs: Sequence[torch.Tensor],
    group_name: str,
    world_size: int,
    dim: int = 0,
    op: str = "sum",
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    group = _coalescing(_sized(group_name, "reduce_scatter_coalesced", world_size))
    results = CoalescedCollectives.reduce_scatter_coalesced(
        group, inputs, dim, _operation(op), timeout_s=timeout_s
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

__all__ = ["NAMESPACE", "find_group", "forget_group", "live_groups", "register_group"]
