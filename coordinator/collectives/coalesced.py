"""Collectives on many tensors, for which the ranks meet once."""

from __future__ import annotations

import dataclasses
import itertools
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
from device_comm.health import Operation
from device_comm.stages import in_parts
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout


class CoalescedCollectives(GroupPlanes):
    """Collectives on a list of tensors, with one result for each. All ranks call them with equal lists.

    The tensors are copied into one, so that one call moves them all; reductions make one call for each dtype. The
    results are views of one new tensor, and each of them keeps all of its memory alive. In a function that
    `torch.compile` compiles, each call becomes one operation of the graph (see `compile_ops`), whose results share no
    memory: they are copied once more.
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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Combine the ranks' tensors with `op`, in rank order; return a new tensor for each."""
        return self._coalesced("all_reduce", tensors, timeout_s, async_op, op=op)

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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Concatenate each tensor along `dim` with its counterparts on the other ranks, in rank order."""
        return self._coalesced("all_gather", tensors, timeout_s, async_op, dim=dim)

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
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Combine the ranks' tensors; return this rank's part of each along `dim`, which must divide evenly."""
        return self._coalesced("reduce_scatter", tensors, timeout_s, async_op, dim=dim, op=op)

    def _coalesced(
        self,
        method: str,
        tensors: Sequence[torch.Tensor],
        timeout_s: AnyTimeout,
        async_op: bool,
        **arguments: Any,
    ) -> list[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        name = f"{method}_coalesced"
        if is_dynamo_compiling() and not async_op:
            return compile_ops.trace_list(name, self, tensors, timeout_s, **arguments)
        if async_op:
            # The handle of a wrong call may be dropped, so it is refused here.
            with self._calls.call(name, timeout_s, in_line=False, plane="device"):
                tensors = coalesced.checked(self.device_communicator, tensors, method, **arguments)
        make = partial(getattr(coalesced, method), self.device_communicator, **arguments)
        # A list of our own, which the caller cannot change while the call is open. `make` refuses other types.
        given = list(tensors) if isinstance(tensors, Sequence) else tensors
        return self._calls.run(name, make, given, timeout_s=timeout_s, async_op=async_op)

    @contextmanager
    def coalescing(self, *, timeout_s: AnyTimeout = None) -> Iterator[Coalescing]:
        """Collect calls, and make them when the block ends; successive calls of one kind are made together.

            with group.coalescing() as calls:
                sums = [calls.all_reduce(gradient) for gradient in gradients]
            first = sums[0].result()

        A block that ends with an exception makes no calls.
        """
        self._calls.enter("coalescing", in_line=False)
        calls = Coalescing()
        yield calls

        def stages() -> None:
            for method, args, waiting in calls.runs():
                tensors = [each.tensor for each in waiting]
                results = getattr(self, f"{method}_coalesced")(tensors, *args, timeout_s=timeout_s)
                for each, result in zip(waiting, results, strict=True):
                    each.value = result

        in_parts(self._health, Operation("device", "coalescing", 0), stages)


@dataclasses.dataclass(eq=False)
class Coalesced:
    """The result of one call of a `Coalescing` block.

    Attributes:
        tensor: The input of the call.
        value: Its result, once the block has ended.
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
    """Calls that are made later, in the order in which they were collected."""

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
        """Yield each run of successive calls of one kind: the method, its arguments and what waits for the results."""
        for (method, args), calls in itertools.groupby(self._calls, key=lambda call: call[:2]):
            yield method, args, [waiting for _, _, waiting in calls]
