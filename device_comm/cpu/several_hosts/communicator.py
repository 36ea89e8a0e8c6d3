"""Collectives on CPU tensors for ranks on several hosts: shared memory inside a host, TCP between the hosts.

The first rank of each host is its leader, and only leaders talk to other hosts; large tensors have several. A call has
three parts: the ranks of a host bring their data together in its shared memory, the leaders swap, and each leader
passes on what came. No rank leaves a call before all have come to it, so the group's status store knows who is late.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import torch

from device_comm.base import SUM, CallPath, CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.cpu.native_codes import copy_code
from device_comm.cpu.several_hosts.leaders import Call
from device_comm.cpu.several_hosts.levels import Levels
from device_comm.cpu.several_hosts.line import measured_worth_bytes
from device_comm.cpu.shared_memory import SharedPart
from device_comm.handles import Handle
from device_comm.health import Operation
from device_comm.outputs import fill
from device_comm.process_group import (
    ProcessGroupCommunicator,
    as_bytes,
    dense,
    is_plain,
)
from device_comm.reduction import ReduceOperation
from device_comm.stages import Turns, in_stages, until
from shm_broadcast.status.layout import NOBODY

# These have no part that hosts could combine or share before it crosses.
_OVER_GLOO: Final = frozenset(
    {"gather", "scatter", "all_to_all", "all_to_all_into_output", "send", "recv", "isend", "irecv"}
)

Result = TypeVar("Result")


def group_by_host(host_ids: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, ascending; the hosts in the order of their lowest ranks."""
    members: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        members.setdefault(host_id, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


class HierarchicalCommunicator(DeviceCommunicator):
    """Collectives in two levels, for ranks on several hosts.

    Gather, scatter, all-to-all and point to point take the process group: there every byte crosses once anyway.
    """

    algorithm = "two levels"

    def __init__(
        self,
        context: CommunicatorContext,
        general: ProcessGroupCommunicator,
        hosts: tuple[tuple[int, ...], ...],
        part: SharedPart | None,
        connections: Mapping[int, socket.socket],
    ) -> None:
        """Build on what `connect_cpu` has connected.

        Args:
            context: The group.
            general: A communicator of the same ranks over the process group; owned from now on.
            hosts: The ranks of each host.
            part: The shared region of this host, owned from now on; None if this rank is alone on its host.
            connections: One to each of `partners_of` this rank, by rank in the group; owned from now on.
        """
        super().__init__(context)
        self._health = context.health
        self._health.shown.carry("device", self.algorithm)
        self._general = general
        self._levels = Levels(context, hosts, part, connections)
        self._turns = Turns(context.health, "device", None if part is None else part.device)

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return how a call is carried."""
        del nbytes, dtype
        if operation in _OVER_GLOO:
            return CallPath("gloo", "every byte crosses between hosts once anyway")
        return CallPath(self.algorithm, "shared memory inside of each host, TCP between their leaders")

    def measure_line(self, exchange: Callable[[bytes], list[bytes]]) -> None:
        """Measure the line between the hosts, which decides how often leaders swap. Collective.

        Args:
            exchange: As in `CommunicatorContext`.

        Raises:
            As a collective, and as `exchange`.
        """

        def stages() -> None:
            call = Call(operation, time.monotonic() + self.context.timeout_s)
            self._levels.worth_bytes = measured_worth_bytes(self._levels.first_leaders, call, exchange)

        operation = Operation("device", "measure the line", 0)
        in_stages(self._health, operation, stages)

    def destroy(self) -> None:
        """Release the connections and the shared region, then the rest."""
        self._levels.close()
        self._general.destroy()
        self.context: CommunicatorContext = self._general.context

    def all_reduce_(
        self,
        tensor: torch.Tensor,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Combine the ranks' tensors in place; return `tensor`, which must not overlap itself."""
        if not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return super().all_reduce_(tensor, op, timeout_s=timeout_s)
        op = self._check_reduction("all_reduce_", tensor, op, timeout_s)
        into = tensor.detach()

        def stages(call: Call) -> None:
            self._levels.all_reduce(call, into, into, op)

        self._make("all_reduce", stages, timeout_s, tensor.nbytes)
        return tensor

    def _make(
        self,
        name: str,
        stages: Callable[[Call], None],
        timeout_s: float | None,
        nbytes: int,
        root: int = NOBODY,
    ) -> None:
        """Make a collective in its turn."""
        limit_s = timeout_s or self.context.timeout_s
        self._turns.make(name, lambda operation, end: stages(Call(operation, end)), limit_s, nbytes, root)

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        source = dense(input_)
        result = torch.empty_like(source)

        def stages(call: Call) -> None:
            self._levels.all_reduce(call, source, result, op)

        self._make("all_reduce", stages, timeout_s, source.nbytes)
        return result

    def _all_reduce_into(
        self, output: torch.Tensor, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout
    ) -> None:
        if not is_plain(output):
            super()._all_reduce_into(output, input_, op, timeout_s)
            return

        def stages(call: Call) -> None:
            self._levels.all_reduce(call, dense(input_), output, op)

        self._make("all_reduce", stages, timeout_s, input_.nbytes)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        # The all-reduce gives the same bits, and finds late ranks by the same rules.
        source = dense(input_)
        result = torch.empty_like(source)

        def stages(call: Call) -> None:
            call.view = f", root {dst}"
            self._levels.all_reduce(call, source, result, op)

        self._make("reduce", stages, timeout_s, source.nbytes, dst)
        return result if self.rank_in_group == dst else None

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        result = rows.new_empty((sizes[self.rank_in_group], *rows.shape[1:]))
        self._scatter_reduced(rows, result, sizes, op, timeout_s)
        return result.movedim(0, dim).contiguous()

    def _reduce_scatter_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        sizes: Sizes,
        op: ReduceOperation,
        timeout_s: Timeout,
    ) -> None:
        if dim or not is_plain(output):
            super()._reduce_scatter_into(output, input_, dim, sizes, op, timeout_s)
            return
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        self._scatter_reduced(rows, output, sizes, op, timeout_s)

    def _scatter_reduced(
        self, rows: torch.Tensor, result: torch.Tensor, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> None:
        """Put this rank's part of the combined rows into the contiguous `result`."""

        def stages(call: Call) -> None:
            per_row = math.prod(rows.shape[1:])
            counts = [size * per_row for size in sizes]
            self._levels.reduce_scatter(call, rows.view(-1), counts, result.view(-1), op)

        self._make("reduce_scatter", stages, timeout_s, rows.nbytes)

    def _all_gather(self, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout) -> torch.Tensor:
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        result = source.new_empty((*source.shape[:dim], sum(sizes), *source.shape[dim + 1 :]))
        self._gather_into(source, result, dim, sizes, timeout_s)
        return result

    def _all_gather_into(
        self, output: torch.Tensor, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout
    ) -> None:
        if not is_plain(output):
            super()._all_gather_into(output, input_, dim, sizes, timeout_s)
            return
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        self._gather_into(source, output, dim, sizes, timeout_s)

    def _gather_into(
        self, source: torch.Tensor, result: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout
    ) -> None:
        """Concatenate the ranks' contiguous tensors in the contiguous `result`."""

        def stages(call: Call) -> None:
            rows = math.prod(source.shape[:dim])
            inner = math.prod(source.shape[dim + 1 :]) * source.itemsize
            widths = [size * inner for size in sizes]
            self._levels.all_gather(
                call, as_bytes(source), as_bytes(result), rows, widths, copy_code(source.dtype)
            )

        self._make("all_gather", stages, timeout_s, source.nbytes)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        def stages(call: Call) -> None:
            into = tensor.detach()
            landing = into if is_plain(into) else dense(into)
            self._levels.broadcast(call, as_bytes(landing), copy_code(tensor.dtype), src)
            if landing is not into and self.rank_in_group != src:
                fill(into, landing)

        self._make("broadcast", stages, timeout_s, tensor.nbytes, src)
        return tensor

    # ------------------------------------------------------------------ over the process group

    def _take(self, name: str, call: Callable[[float], Result], timeout_s: Timeout) -> Result:
        """Return `call(left_s)`, which makes a collective over the process group, in its turn."""
        limit_s = timeout_s or self.context.timeout_s
        return self._turns.take(name, lambda end: call(until(end)), limit_s)

    def _gather(
        self, input_: torch.Tensor, dst: int, dim: int, timeout_s: float | None
    ) -> torch.Tensor | None:
        return self._take(
            "gather", lambda left_s: self._general.gather(input_, dst, dim, timeout_s=left_s), timeout_s
        )

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        def call(left_s: float) -> None:
            self._general.scatter(output, input_, src, dim, sizes, timeout_s=left_s)

        self._take("scatter", call, timeout_s)

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        def call(left_s: float) -> torch.Tensor:
            return self._general.all_to_all(input_, dim, send_sizes, recv_sizes, timeout_s=left_s)

        return self._take("all_to_all", call, timeout_s)

    def _all_to_all_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        send_sizes: Sizes,
        recv_sizes: Sizes,
        timeout_s: Timeout,
    ) -> None:
        def call(left_s: float) -> None:
            self._general.all_to_all_into_output(
                input_, output, dim, send_sizes, recv_sizes, timeout_s=left_s
            )

        self._take("all_to_all", call, timeout_s)

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        return self._general.isend(tensor, dst, timeout_s=timeout_s)

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        return self._general.irecv(tensor, src, timeout_s=timeout_s)

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int, timeout_s: Timeout) -> torch.Tensor:
        return self._general.recv(shape, dtype, src, timeout_s=timeout_s)


__all__ = ["HierarchicalCommunicator", "group_by_host"]
