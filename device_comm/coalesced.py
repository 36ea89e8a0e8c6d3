"""Collectives on several tensors as one call of a communicator: the tensors are packed into one and split again."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from device_comm import checks
from device_comm.base import SUM, DeviceCommunicator
from device_comm.derived_reductions import Reduction, reducer
from device_comm.health import Operation
from device_comm.process_group import as_bytes, dense
from device_comm.stages import in_parts

# The bytes of each tensor start at a multiple of this, so that they can be viewed as any dtype.
_ALIGNMENT: Final = 16


def checked(
    there: DeviceCommunicator,
    tensors: Sequence[torch.Tensor],
    method: str,
    dim: int | None = None,
    **_others: Any,
) -> list[torch.Tensor]:
    """Return the tensors of a call of `method`, a function of this module, as a list.

    Raises:
        UsageError: The tensors, or `dim`, do not fit the call.
    """
    name = f"{method}_coalesced"
    found = list(checks.check_tensors(tensors, name))
    for tensor in found:
        checks.check_tensor(tensor, there.device, name)
        at = 0 if dim is None else checks.check_dim(dim, tensor)
        if method == "reduce_scatter":
            checks.check_divisible(tensor, at, there.world_size)
    return found


def _for_each_dtype(
    there: DeviceCommunicator,
    name: str,
    tensors: Sequence[torch.Tensor],
    call: Callable[[list[int]], None],
) -> None:
    """Make a collective for the places of each dtype among `tensors`; together they are the call `name`."""
    places: dict[torch.dtype, list[int]] = {}
    for at, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(at)

    def stages() -> None:
        for each in places.values():
            call(each)

    if len(places) == 1:
        stages()
    else:
        in_parts(there.context.health, Operation("device", name, 0), stages)


def all_reduce(
    there: DeviceCommunicator,
    tensors: Sequence[torch.Tensor],
    op: Reduction = SUM,
    *,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    """Combine the ranks' tensors with `op`, in one call for each dtype. A group of one returns its inputs."""
    results = checked(there, tensors, "all_reduce")
    if there.world_size == 1:
        return results

    def reduce(places: list[int]) -> None:
        flat = torch.cat([dense(results[at]).view(-1) for at in places])
        # The communicator or the reducer checks the operation.
        whole = reducer(op, there).all_reduce(flat, op, timeout_s=timeout_s)
        parts = torch.split(whole, [results[at].numel() for at in places])
        for at, part in zip(places, parts, strict=True):
            results[at] = part.view(results[at].shape)

    _for_each_dtype(there, "all_reduce_coalesced", results, reduce)
    return results


def all_gather(
    there: DeviceCommunicator,
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    *,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    """Concatenate the ranks' tensors along `dim`, as bytes in one call. A group of one returns its inputs."""
    inputs = checked(there, tensors, "all_gather", dim)
    if there.world_size == 1 or not inputs:
        return inputs
    sources = [dense(tensor.reshape(1) if tensor.dim() == 0 else tensor) for tensor in inputs]
    starts, total = [], 0
    for source in sources:
        starts.append(total)
        total += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    # Empty rows would start at bytes 0, 1, 2 …, and torch refuses to view an unaligned one as a wider dtype.
    own = torch.zeros(max(total, _ALIGNMENT), dtype=torch.uint8, device=there.device)
    for source, start in zip(sources, starts, strict=True):
        own[start : start + source.nbytes] = as_bytes(source)
    rows = there.all_gather(own.view(1, -1), 0, timeout_s=timeout_s)
    return [
        torch.cat(
            [row[start : start + source.nbytes].view(source.dtype).view(source.shape) for row in rows], dim
        )
        for source, start in zip(sources, starts, strict=True)
    ]


def reduce_scatter(
    there: DeviceCommunicator,
    tensors: Sequence[torch.Tensor],
    dim: int = 0,
    op: Reduction = SUM,
    *,
    timeout_s: float | None = None,
) -> list[torch.Tensor]:
    """Combine the ranks' tensors and return this rank's parts along `dim`, with one call for each dtype."""
    results, size = checked(there, tensors, "reduce_scatter", dim), there.world_size
    if size == 1:
        return results

    def reduce(places: list[int]) -> None:
        rows, shapes = [], []
        for at in places:
            source = results[at].detach()
            source = source.reshape(source.shape or 1)
            along = checks.check_dim(dim, source)
            parts = torch.unflatten(source, along, (size, source.shape[along] // size)).movedim(along, 0)
            shapes.append(parts.shape[1:])
            rows.append(dense(parts).view(size, math.prod(parts.shape[1:])))
        whole = torch.cat(rows, 1)
        own = reducer(op, there).reduce_scatter(whole, 0, op, timeout_s=timeout_s)
        own_parts = torch.split(own.view(-1), [math.prod(shape) for shape in shapes])
        for at, part, shape in zip(places, own_parts, shapes, strict=True):
            results[at] = part.view(shape)

    _for_each_dtype(there, "reduce_scatter_coalesced", results, reduce)
    return results
