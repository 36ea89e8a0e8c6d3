"""What a method of a group becomes in a graph of `torch.compile`: one of the operations of `compile_ops`.

In a group of one the result of a collective is the input itself, as it is without a compiler; an operation could not
return that.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import torch

from coordinator.planes import GroupPlanes
from device_comm.derived_reductions import Reduction
from shm_broadcast.errors import UsageError


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


def _name(op: Reduction) -> str:
    """Return the name by which a graph knows `op`."""
    if isinstance(op, enum.Enum):
        return op.name.lower()
    if isinstance(op, str):
        return op
    raise UsageError(
        f"a compiled graph cannot hold the reduction {op!r}: pass it by name, or scale the tensor first"
    )
