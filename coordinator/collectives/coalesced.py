"""Collectives on many tensors for the price of one meeting of the ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Unpack, overload

import torch
from torch.compiler import is_dynamo_compiling

from coordinator.calls import Async, Blocking
from coordinator.planes import GroupPlanes
from coordinator.torch_interop import compile_ops
from device_comm import coalesced
from device_comm.async_calls import CallHandle
from device_comm.base import SUM
from device_comm.derived_reductions import Reduction
from shm_broadcast.errors import UsageError


class CoalescedCollectives(GroupPlanes):
    """As the calls of the same name for one tensor, one result for each. Collective, with equal lists on all ranks.

    The tensors are copied into one, which takes one call: of reductions one for each dtype. The results are views of
    one new tensor, so each keeps the memory of all. In a function that `torch.compile` compiles each call becomes one
    operation of the graph (`compile_ops`), whose results are apart: that takes another copy of them.
    """

    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[torch.Tensor], op: Reduction = SUM, **how: Unpack[Blocking]
    ) -> list[torch.Tensor]: ...

    @overload
    def all_reduce_coalesced(
        self, tensors: Sequence[torch.Tensor], op: Reduction = SUM, **how: Unpack[Async]
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
            return compile_ops.all_reduce_coalesced(self, tensors, op, timeout_s)
        return self._calls.run(
            *(
                "all_reduce_coalesced",
                partial(coalesced.all_reduce, self.device_communicator),
                _listed(tensors),
                op,
            ),
            timeout_s=timeout_s,
            async_op=async_op,
        )

    @overload
    def all_gather_coalesced(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, **how: Unpack[Blocking]
    ) -> list[torch.Tensor]: ...

    @overload
    def all_gather_coalesced(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, **how: Unpack[Async]
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
            return compile_ops.all_gather_coalesced(self, tensors, dim, timeout_s)
        return self._calls.run(
            *(
                "all_gather_coalesced",
                partial(coalesced.all_gather, self.device_communicator),
                _listed(tensors),
                dim,
            ),
            timeout_s=timeout_s,
            async_op=async_op,
        )

    @overload
    def reduce_scatter_coalesced(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, op: Reduction = SUM, **how: Unpack[Blocking]
    ) -> list[torch.Tensor]: ...

    @overload
    def reduce_scatter_coalesced(
        self, tensors: Sequence[torch.Tensor], dim: int = 0, op: Reduction = SUM, **how: Unpack[Async]
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
            return compile_ops.reduce_scatter_coalesced(self, tensors, dim, op, timeout_s)
        make = partial(coalesced.reduce_scatter, self.device_communicator)
        return self._calls.run(
            *("reduce_scatter_coalesced", make, _listed(tensors), dim, op),
            timeout_s=timeout_s,
            async_op=async_op,
        )

    @contextmanager
    def coalescing(self, *, timeout_s: float | None = None) -> Iterator[Coalescing]:
        """Collect calls, and make them together when the block ends: one meeting for each run of calls of one kind.

            with group.coalescing() as calls:
                sums = [calls.all_reduce(gradient) for gradient in gradients]
            first = sums[0].result()

        A block that ends with an exception makes none.
        """
        self._calls.enter("coalescing", in_line=False)
        calls = Coalescing()
        yield calls
        for method, args, waiting in calls.runs():
            tensors = [each.tensor for each in waiting]
            results = getattr(self, f"{method}_coalesced")(tensors, *args, timeout_s=timeout_s)
            for each, result in zip(waiting, results, strict=True):
                each.value = result


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


def _listed(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return a list that the caller cannot change while a call is open; what is no sequence is refused later."""
    return list(tensors) if isinstance(tensors, Sequence) else tensors
