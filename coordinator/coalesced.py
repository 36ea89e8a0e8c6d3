"""Collectives on many tensors for the price of one meeting of the ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, Literal, overload

import torch
from torch.compiler import is_dynamo_compiling

from coordinator import traced_calls
from coordinator.planes import GroupPlanes
from device_comm import checks
from device_comm.async_calls import CallHandle
from device_comm.base import SUM, DeviceCommunicator
from device_comm.derived_reductions import Reduction, reducer
from device_comm.process_group import as_bytes, dense
from shm_broadcast.errors import UsageError

# Where the bytes of a tensor begin, so that they can be viewed as any dtype.
_ALIGNMENT: Final = 16


class CoalescedCollectives(GroupPlanes):
    """As the calls of the same name for one tensor, one result for each. Collective, with equal lists on all ranks.

    The tensors are copied into one, which takes one call: of reductions one for each dtype. The results are views of
    one new tensor, so each keeps the memory of all. In a function that `torch.compile` compiles each call becomes one
    operation of the graph (`compile_ops`), whose results are apart: that takes another copy of them.
    """

    @overload
    def all_reduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> list[torch.Tensor]: ...

    @overload
    def all_reduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
    ) -> CallHandle[list[torch.Tensor]]: ...

    def all_reduce_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Combine the ranks' tensors with `op`, in rank order; a new tensor for each."""
        if is_dynamo_compiling() and not async_op:
            return traced_calls.all_reduce_coalesced(self, tensors, op, timeout_s)
        return self._coalesced(
            "all_reduce_coalesced", _all_reduce, tensors, async_op, _Rest(op=op, timeout_s=timeout_s)
        )

    @overload
    def all_gather_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int = 0,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> list[torch.Tensor]: ...

    @overload
    def all_gather_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int = 0,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
    ) -> CallHandle[list[torch.Tensor]]: ...

    def all_gather_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int = 0,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Concatenate the ranks' tensors along `dim`, in rank order, each with its counterparts."""
        if is_dynamo_compiling() and not async_op:
            return traced_calls.all_gather_coalesced(self, tensors, dim, timeout_s)
        for tensor in checks.check_tensors(tensors, "all_gather_coalesced"):
            checks.check_tensor(tensor, self.device, "all_gather_coalesced")
            checks.check_dim(dim, tensor)
        return self._coalesced(
            "all_gather_coalesced", _all_gather, tensors, async_op, _Rest(dim=dim, timeout_s=timeout_s)
        )

    @overload
    def reduce_scatter_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int = 0,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[False] = False,
    ) -> list[torch.Tensor]: ...

    @overload
    def reduce_scatter_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int = 0,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: Literal[True],
    ) -> CallHandle[list[torch.Tensor]]: ...

    def reduce_scatter_coalesced(
        self,
        tensors: Sequence[torch.Tensor],
        dim: int = 0,
        op: Reduction = SUM,
        *,
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Combine the ranks' tensors and keep this rank's part of each along `dim`, all of which divide evenly."""
        if is_dynamo_compiling() and not async_op:
            return traced_calls.reduce_scatter_coalesced(self, tensors, dim, op, timeout_s)
        for tensor in checks.check_tensors(tensors, "reduce_scatter_coalesced"):
            checks.check_tensor(tensor, self.device, "reduce_scatter_coalesced")
            checks.check_divisible(tensor, checks.check_dim(dim, tensor), self.world_size)
        rest = _Rest(dim=dim, op=op, timeout_s=timeout_s)
        return self._coalesced("reduce_scatter_coalesced", _reduce_scatter, tensors, async_op, rest)

    @contextmanager
    def coalescing(self, *, timeout_s: float | None = None) -> Iterator[Coalescing]:
        """Collect calls, and make them together when the block ends: one meeting for each run of calls of one kind.

            with group.coalescing() as calls:
                sums = [calls.all_reduce(gradient) for gradient in gradients]
            first = sums[0].result()

        A block that ends with an exception makes none.
        """
        self._health.check_usable("coalescing")
        calls = Coalescing()
        yield calls
        for method, args, waiting in calls.runs():
            tensors = [each.tensor for each in waiting]
            results = getattr(self, f"{method}_coalesced")(tensors, *args, timeout_s=timeout_s)
            for each, result in zip(waiting, results, strict=True):
                each.value = result

    def _all_reduce_coalesced_into(
        self, tensors: Sequence[torch.Tensor], op: Reduction, timeout_s: float | None
    ) -> CallHandle[list[torch.Tensor]]:
        """Begin `all_reduce_coalesced` in place; the handle gives `tensors`, filled."""
        rest = _Rest(op=op, timeout_s=timeout_s)
        handle = self._coalesced("all_reduce_coalesced", _all_reduce_into, tensors, True, rest)
        assert isinstance(handle, CallHandle)
        return handle

    def _coalesced(
        self,
        name: str,
        call: Callable[[DeviceCommunicator, list[torch.Tensor], _Rest], list[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
        async_op: bool,
        rest: _Rest,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        self._health.check_usable(name)
        each_checked = checks.check_tensors(tensors, name)
        for tensor in each_checked:
            checks.check_tensor(tensor, self.device, name)
        checks.check_timeout(rest.timeout_s)

        def make() -> list[torch.Tensor]:
            if self.world_size == 1 or not each_checked:
                return list(each_checked)
            return call(self.device_communicator, list(each_checked), rest)

        if async_op:
            return self._calls.submit(name, make, at_once=self.device.type != "cpu")
        self._keep_order(name)
        self._health.check_usable(name)
        return make()


@dataclasses.dataclass(eq=False)
class Coalesced:
    """The result of one call of a `Coalescing` block.

    Attributes:
        tensor: What the call was given.
        value: What it gave, once the block has ended.
    """

    tensor: torch.Tensor
    value: torch.Tensor | None = None

    def result(self) -> torch.Tensor:
        """Return the result.

        Raises:
            UsageError: The block has not ended, or ended with an exception.
        """
        if self.value is None:
            raise UsageError("the calls of a coalescing block are made when the block ends")
        return self.value


class Coalescing:
    """Calls that are made together, in the order in which they were collected."""

    def __init__(self) -> None:
        """Collect nothing yet."""
        self._calls: list[tuple[str, tuple[Any, ...], Coalesced]] = []

    def all_reduce(self, tensor: torch.Tensor, op: Reduction = SUM) -> Coalesced:
        """Collect an all-reduce."""
        return self._collect("all_reduce", tensor, op)

    def all_gather(self, tensor: torch.Tensor, dim: int = 0) -> Coalesced:
        """Collect an all-gather."""
        return self._collect("all_gather", tensor, dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int = 0, op: Reduction = SUM) -> Coalesced:
        """Collect a reduce-scatter."""
        return self._collect("reduce_scatter", tensor, dim, op)

    def _collect(self, method: str, tensor: torch.Tensor, *args: Any) -> Coalesced:
        waiting = Coalesced(tensor)
        self._calls.append((method, args, waiting))
        return waiting

    def runs(self) -> Iterator[tuple[str, tuple[Any, ...], list[Coalesced]]]:
        """Yield calls of one kind that follow each other, with what waits for their results."""
        start = 0
        for at in range(1, len(self._calls) + 1):
            if at == len(self._calls) or self._calls[at][:2] != self._calls[start][:2]:
                method, args, _ = self._calls[start]
                yield method, args, [waiting for _, _, waiting in self._calls[start:at]]
                start = at


@dataclasses.dataclass(frozen=True)
class _Rest:
    """The arguments of a call besides its tensors."""

    dim: int = 0
    op: Reduction = SUM
    timeout_s: float | None = None


def _by_dtype(tensors: Sequence[torch.Tensor]) -> dict[torch.dtype, list[int]]:
    places: dict[torch.dtype, list[int]] = {}
    for at, tensor in enumerate(tensors):
        places.setdefault(tensor.dtype, []).append(at)
    return places


def _all_reduce(there: DeviceCommunicator, tensors: list[torch.Tensor], rest: _Rest) -> list[torch.Tensor]:
    results = list(tensors)
    for places in _by_dtype(tensors).values():
        flat = torch.cat([dense(tensors[at]).view(-1) for at in places])
        # The operation is looked at by what carries it out.
        whole = reducer(rest.op, there).all_reduce(flat, rest.op, timeout_s=rest.timeout_s)
        parts = torch.split(whole, [tensors[at].numel() for at in places])
        for at, part in zip(places, parts, strict=True):
            results[at] = part.view(tensors[at].shape)
    return results


def _all_reduce_into(
    there: DeviceCommunicator, tensors: list[torch.Tensor], rest: _Rest
) -> list[torch.Tensor]:
    for tensor, result in zip(tensors, _all_reduce(there, tensors, rest), strict=True):
        tensor.detach().copy_(result)
    return tensors


def _all_gather(there: DeviceCommunicator, tensors: list[torch.Tensor], rest: _Rest) -> list[torch.Tensor]:
    sources = [dense(tensor.reshape(1) if tensor.dim() == 0 else tensor) for tensor in tensors]
    starts, total = [], 0
    for source in sources:
        starts.append(total)
        total += -(-source.nbytes // _ALIGNMENT) * _ALIGNMENT
    own = torch.zeros(total, dtype=torch.uint8, device=there.device)
    for source, start in zip(sources, starts, strict=True):
        own[start : start + source.nbytes] = as_bytes(source)
    rows = there.all_gather(own.view(1, -1), 0, timeout_s=rest.timeout_s)
    return [
        torch.cat(
            [row[start : start + source.nbytes].view(source.dtype).view(source.shape) for row in rows],
            rest.dim,
        )
        for source, start in zip(sources, starts, strict=True)
    ]


def _reduce_scatter(
    there: DeviceCommunicator, tensors: list[torch.Tensor], rest: _Rest
) -> list[torch.Tensor]:
    results, size = list(tensors), there.world_size
    for places in _by_dtype(tensors).values():
        rows, shapes = [], []
        for at in places:
            source = tensors[at].detach()
            source = source.reshape(1) if source.dim() == 0 else source
            dim = checks.check_dim(rest.dim, source)
            shape = (*source.shape[:dim], size, source.shape[dim] // size, *source.shape[dim + 1 :])
            parts = source.reshape(shape).movedim(dim, 0)
            shapes.append(parts.shape[1:])
            rows.append(dense(parts).view(size, -1))
        whole = torch.cat(rows, 1)
        reducing = reducer(rest.op, there)
        own = reducing.reduce_scatter(whole, 0, rest.op, timeout_s=rest.timeout_s)
        own_parts = torch.split(own.view(-1), [math.prod(shape) for shape in shapes])
        for at, part, shape in zip(places, own_parts, shapes, strict=True):
            results[at] = part.view(shape)
    return results
