"""The sum of sparse tensors over the ranks of a group."""

from __future__ import annotations

from functools import partial

import torch

from device_comm.base import DeviceCommunicator, Timeout
from device_comm.health import Operation
from device_comm.reduction import ReduceOperation
from device_comm.stages import in_parts
from shm_broadcast.errors import DisagreementError, UsageError


def all_reduce_(
    there: DeviceCommunicator, tensor: torch.Tensor, op: object, timeout_s: Timeout
) -> torch.Tensor:
    """Sum the ranks' tensors of the COO layout in place; return `tensor`, which is coalesced then.

    The ranks may hold different numbers of elements; shape, sparse dimensions and dtype are equal.

    Raises:
        UsageError: The operation is not SUM; nothing was sent.
        DisagreementError: The ranks' tensors have different shapes; the group is intact.
    """
    if op is not ReduceOperation.SUM:
        raise UsageError(
            "all_reduce: sparse tensors can be summed, no other reduction has a meaning for them"
        )
    health = there.context.health
    stages = partial(_all_reduce_, there, tensor, timeout_s)
    return in_parts(health, Operation("device", "all_reduce", 0), stages)


def _all_reduce_(there: DeviceCommunicator, tensor: torch.Tensor, timeout_s: Timeout) -> torch.Tensor:
    """Sum in up to four collectives: two compare the shapes, two move the elements."""
    own = tensor.detach().coalesce()
    indices, values = own.indices(), own.values()
    facts = torch.tensor([[own.sparse_dim(), values.shape[0], *own.shape]], device=own.device)
    # Shapes may differ in length, so their lengths come first.
    dims = there.all_gather(torch.tensor([facts.shape[1]], device=own.device), 0, timeout_s=timeout_s)
    equal = bool((dims == facts.shape[1]).all())
    if equal:
        rows = there.all_gather(facts, 0, timeout_s=timeout_s)
        equal = bool(
            (rows[:, [0, *range(2, rows.shape[1])]] == facts[:, [0, *range(2, rows.shape[1])]]).all()
        )
    if not equal:
        raise DisagreementError(
            f"{there.context.health.where('all_reduce')}: the ranks hold sparse tensors of different shapes; this one "
            f"has shape {list(own.shape)} with {own.sparse_dim()} sparse dimensions"
        )
    counts = rows[:, 1].tolist()
    places = there.all_gatherv(indices, 1, counts, timeout_s=timeout_s)
    elements = there.all_gatherv(values, 0, counts, timeout_s=timeout_s)
    total = torch.sparse_coo_tensor(places, elements, own.shape, check_invariants=False).coalesce()
    # Not into `tensor.detach()`: a sparse copy replaces the indices of the object that it is called on.
    with torch.no_grad():
        tensor.copy_(total)
    return tensor


__all__ = ["all_reduce_"]
