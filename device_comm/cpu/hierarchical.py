"""Collectives on CPU tensors for ranks on several hosts: shared memory inside a host, Gloo between the hosts.

The first rank of each host is its leader, and only leaders talk to other hosts. A call has three parts: the ranks of a
host bring their data together in its shared memory, the leaders swap, and each leader passes on what came. No rank
leaves a call before all have come to it, so the group's status store knows who is late.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Final

import torch

from device_comm import _core
from device_comm.base import SUM, CallPath, CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.cpu.hosts import LoneHost, SharedHost
from device_comm.cpu.leaders import Call, Leaders, Swap
from device_comm.cpu.native_codes import TYPE_CODES, copy_code
from device_comm.cpu.shared_memory import SharedPart
from device_comm.handles import Handle
from device_comm.health import Operation
from device_comm.process_group import (
    ProcessGroupCommunicator,
    as_bytes,
    collective,
    dense,
    is_plain,
)
from device_comm.reduction import ReduceOperation, accumulation_dtype, reduce_in_rank_order

# An all-reduce is cut into pieces of this size: while one is on its way between the hosts, the next is combined.
PIECE_BYTES: Final = 4 << 20
# What a line of 10 Gbit/s carries in the 50 us that another round trip between the leaders costs.
ROUND_TRIP_BYTES: Final = 62_500
# Between two hosts one swap sends no more than two, unless partial results are wider than what is passed on: of n bytes
# in 16 bits one swap sends 2 n, and two send n and n / 2. From this size on that is worth another round trip.
WIDE_SWAP_BYTES: Final = 256 << 10


def group_by_host(host_ids: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each host, ascending; the hosts in the order of their lowest ranks."""
    members: dict[str, list[int]] = {}
    for rank, host_id in enumerate(host_ids):
        members.setdefault(host_id, []).append(rank)
    return tuple(tuple(ranks) for ranks in members.values())


def is_hierarchical(hosts: Sequence[Sequence[int]]) -> bool:
    """Return whether there are several hosts, at least one of them with several ranks."""
    return len(hosts) > 1 and any(len(ranks) > 1 for ranks in hosts)


def partial_dtype(dtype: torch.dtype, op: ReduceOperation) -> torch.dtype:
    """Return the dtype in which a host's result goes to the other hosts: one that loses nothing."""
    is_wider = (dtype.is_floating_point or dtype.is_complex) and op not in (
        ReduceOperation.MIN,
        ReduceOperation.MAX,
    )
    return accumulation_dtype(dtype) if is_wider else dtype


def takes_one_swap(hosts: int, partial: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether each leader combines the whole of a piece. `dtype` is that of the result."""
    if hosts > 2:
        # One swap sends h - 1 times n bytes, two send 2 n (h - 1) / h: so many more are worth a round trip.
        return partial.nbytes * (hosts - 1) * (1 - 2 / hosts) <= ROUND_TRIP_BYTES
    return partial.itemsize == dtype.itemsize or partial.nbytes <= WIDE_SWAP_BYTES


class HierarchicalCommunicator(DeviceCommunicator):
    """Collectives in two levels, for ranks on several hosts of which at least one holds several ranks.

    Gather, scatter, all-to-all and point to point take the process group: there every byte crosses once anyway.
    """

    algorithm = "two levels"

    def __init__(
        self,
        context: CommunicatorContext,
        general: ProcessGroupCommunicator,
        hosts: tuple[tuple[int, ...], ...],
        part: SharedPart | None,
    ) -> None:
        """Build on what `connect_cpu` has connected.

        Args:
            context: The group.
            general: A communicator of the same ranks over the process group; owned from now on.
            hosts: The ranks of each host.
            part: The shared region of this host, owned from now on; None if this rank is alone on its host.
        """
        super().__init__(context)
        self._health = context.health
        self._general = general
        self._levels = _Levels(context, general, hosts, part)

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return how a call is carried."""
        del operation, nbytes, dtype
        return CallPath(self.algorithm, "shared memory inside of each host, Gloo between their first ranks")

    def destroy(self) -> None:
        """Release the shared region, then the rest."""
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

        def stages(operation: Operation) -> None:
            self._levels.all_reduce(self._call(operation, timeout_s), into, into, op)

        collective(self._health, "device", "all_reduce", stages, tensor.nbytes)
        return tensor

    def _call(self, operation: Operation, timeout_s: float | None) -> Call:
        end = time.monotonic() + (timeout_s or self.context.timeout_s)
        group, other = self._general.process_group, self.context.other_group
        return Call(operation, group, group if other is None else other, end)

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        source = dense(input_)
        result = torch.empty_like(source)

        def stages(operation: Operation) -> None:
            self._levels.all_reduce(self._call(operation, timeout_s), source, result, op)

        collective(self._health, "device", "all_reduce", stages, source.nbytes)
        return result

    def _all_reduce_into(
        self, output: torch.Tensor, input_: torch.Tensor, op: ReduceOperation, timeout_s: Timeout
    ) -> None:
        if not is_plain(output):
            super()._all_reduce_into(output, input_, op, timeout_s)
            return

        def stages(operation: Operation) -> None:
            self._levels.all_reduce(self._call(operation, timeout_s), dense(input_), output, op)

        collective(self._health, "device", "all_reduce", stages, input_.nbytes)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        # The all-reduce gives the same bits, and finds late ranks by the same rules.
        source = dense(input_)
        result = torch.empty_like(source)

        def stages(operation: Operation) -> None:
            call = self._call(operation, timeout_s)
            call.view = f", root {dst}"
            self._levels.all_reduce(call, source, result, op)

        collective(self._health, "device", "reduce", stages, source.nbytes, dst)
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

        def stages(operation: Operation) -> None:
            if rows.numel():
                per_row = rows[0].numel()
                counts = [size * per_row for size in sizes]
                call = self._call(operation, timeout_s)
                self._levels.reduce_scatter(call, rows.view(-1), counts, result.view(-1), op)

        collective(self._health, "device", "reduce_scatter", stages, rows.nbytes)

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

        def stages(operation: Operation) -> None:
            if result.numel():
                call = self._call(operation, timeout_s)
                rows = math.prod(source.shape[:dim])
                inner = math.prod(source.shape[dim + 1 :]) * source.itemsize
                widths = [size * inner for size in sizes]
                self._levels.all_gather(
                    call, as_bytes(source), as_bytes(result), rows, widths, copy_code(source.dtype)
                )

        collective(self._health, "device", "all_gather", stages, source.nbytes)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        def stages(operation: Operation) -> None:
            if tensor.numel() == 0:
                return
            call = self._call(operation, timeout_s)
            into = tensor.detach()
            landing = into if is_plain(into) else dense(into)
            self._levels.broadcast(call, as_bytes(landing), copy_code(tensor.dtype), src)
            if landing is not into and self.rank_in_group != src:
                into.copy_(landing)

        collective(self._health, "device", "broadcast", stages, tensor.nbytes, src)
        return tensor

    # ------------------------------------------------------------------ over the process group

    def _gather(
        self, input_: torch.Tensor, dst: int, dim: int, timeout_s: float | None
    ) -> torch.Tensor | None:
        return self._general.gather(input_, dst, dim, timeout_s=timeout_s)

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        self._general.scatter(output, input_, src, dim, sizes, timeout_s=timeout_s)

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        return self._general.all_to_all(input_, dim, send_sizes, recv_sizes, timeout_s=timeout_s)

    def _all_to_all_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        send_sizes: Sizes,
        recv_sizes: Sizes,
        timeout_s: Timeout,
    ) -> None:
        general = self._general
        general.all_to_all_into_output(input_, output, dim, send_sizes, recv_sizes, timeout_s=timeout_s)

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        return self._general.isend(tensor, dst, timeout_s=timeout_s)

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        return self._general.irecv(tensor, src, timeout_s=timeout_s)

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int, timeout_s: Timeout) -> torch.Tensor:
        return self._general.recv(shape, dtype, src, timeout_s=timeout_s)


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of an all-reduce whose partial results are on their way between the leaders.

    Attributes:
        elements: Slice of the whole tensor, which this piece is.
        ranges: For each host the (start, end) within the piece of the elements that its leader combines.
        parts: On a leader: each host's partial result for the leader's own range. Empty on other ranks.
        swap: On a leader: the transfers that fill `parts`. None on other ranks.
    """

    elements: slice
    ranges: Sequence[tuple[int, int]] = ()
    parts: Sequence[torch.Tensor] = ()
    swap: Swap | None = None


class _Levels:
    """The two levels of one group, seen from one rank."""

    def __init__(
        self,
        context: CommunicatorContext,
        general: ProcessGroupCommunicator,
        hosts: tuple[tuple[int, ...], ...],
        part: SharedPart | None,
    ) -> None:
        """As `HierarchicalCommunicator`."""
        rank = context.rank_in_group
        self._world_size = context.world_size
        self._hosts = hosts
        self._host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self._members = hosts[self._host]
        self._is_leader = rank == self._members[0]
        self._inside: SharedHost | LoneHost = (
            LoneHost() if part is None else SharedHost(part, len(self._members), context.health)
        )
        self._links = Leaders(context.health, general.threads, [ranks[0] for ranks in hosts], self._host)

    def close(self) -> None:
        """Release the shared region. Idempotent."""
        self._inside.close()

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, call: Call, source: torch.Tensor, result: torch.Tensor, op: ReduceOperation) -> None:
        """Combine the ranks' contiguous tensors into `result`, which may be `source`."""
        flat, into = source.view(-1), result.view(-1)
        call.view = f"{op.name} of {flat.numel()} elements, {flat.dtype}{call.view}"
        wide = partial_dtype(flat.dtype, op)
        length = PIECE_BYTES // wide.itemsize
        before: _Piece | None = None
        for start in range(0, flat.numel(), length):
            partial = self._inside.combine(call, flat[start : start + length].to(wide), op)
            piece = self._start_piece(call, partial, slice(start, start + partial.numel()), flat.dtype)
            if before is not None:
                self._finish_piece(call, before, into, op)
            before = piece
        if before is not None:
            self._finish_piece(call, before, into, op)

    def _start_piece(self, call: Call, partial: torch.Tensor, elements: slice, dtype: torch.dtype) -> _Piece:
        if not self._is_leader:
            return _Piece(elements)
        count, hosts = partial.numel(), len(self._hosts)
        if takes_one_swap(hosts, partial, dtype):
            ranges = [(0, count)] * hosts
        else:
            share = -(-count // hosts)
            edges = [min(host * share, count) for host in range(hosts + 1)]
            ranges = list(itertools.pairwise(edges))
        first, last = ranges[self._host]
        parts = list(partial.new_empty((hosts, last - first)))
        parts[self._host] = partial[first:last]
        sends = {host: partial[slice(*ranges[host])] for host in self._links.others}
        swap = self._links.swap(call, sends, {host: parts[host] for host in self._links.others})
        return _Piece(elements, ranges, parts, swap)

    def _finish_piece(self, call: Call, piece: _Piece, into: torch.Tensor, op: ReduceOperation) -> None:
        whole = into[piece.elements]
        if piece.swap is not None:
            self._links.wait(call, piece.swap)
            own = whole[slice(*piece.ranges[self._host])]
            # Outside of that mode torch refuses to write into tensors that were made in it.
            with torch.inference_mode():
                own.copy_(self._combined(piece.parts, op, whole.dtype))
            if own.numel() < whole.numel():
                received = {host: whole[slice(*piece.ranges[host])] for host in self._links.others}
                self._links.wait(
                    call, self._links.swap(call, dict.fromkeys(self._links.others, own), received)
                )
        self._inside.pass_on(call, whole, TYPE_CODES[whole.dtype])

    def _combined(
        self, parts: Sequence[torch.Tensor], op: ReduceOperation, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the hosts' partial results combined in the order of the hosts, rounded once."""
        is_mean = op is ReduceOperation.MEAN
        total = reduce_in_rank_order(parts, ReduceOperation.SUM if is_mean else op)
        if is_mean:
            components = torch.view_as_real(total) if total.is_complex() else total
            components.div_(components.new_full((), self._world_size))
        return total.to(dtype)

    def reduce_scatter(
        self,
        call: Call,
        flat: torch.Tensor,
        counts: Sequence[int],
        result: torch.Tensor,
        op: ReduceOperation,
    ) -> None:
        """Combine the ranks' flat tensors; this rank's `counts[rank]` elements, in rank order, go to `result`."""
        call.view = f"{op.name} of elements {list(counts)}, {flat.dtype}"
        partial = self._inside.combine(call, flat.to(partial_dtype(flat.dtype, op)), op)
        block = None
        if self._is_leader:
            pieces = partial.split_with_sizes(list(counts))
            own = [torch.cat([pieces[rank] for rank in ranks]) for ranks in self._hosts]
            parts = list(partial.new_empty((len(self._hosts), own[self._host].numel())))
            parts[self._host] = own[self._host]
            sends = {host: own[host] for host in self._links.others}
            self._links.wait(
                call, self._links.swap(call, sends, {host: parts[host] for host in self._links.others})
            )
            block = self._combined(parts, op, flat.dtype)
        self._inside.scatter(call, block, result, [counts[rank] for rank in self._members])

    # ------------------------------------------------------------------ moving data

    def all_gather(
        self,
        call: Call,
        source: torch.Tensor,
        result: torch.Tensor,
        rows: int,
        widths: Sequence[int],
        code: int,
    ) -> None:
        """Put `widths[rank]` bytes of each rank into each of the `rows` of `result`."""
        call.view = f"{rows} rows of bytes {list(widths)}, {_core.TYPE_NAMES.get(code, 'another dtype')}"
        order = [rank for ranks in self._hosts for rank in ranks]
        is_in_place = rows == 1 and order == sorted(order)
        # The hosts one after the other, of each its ranks one after the other.
        stage = result if is_in_place else torch.empty_like(result)
        blocks = stage.split_with_sizes([rows * sum(widths[rank] for rank in ranks) for ranks in self._hosts])
        own = blocks[self._host]
        self._inside.gather(call, source, own, tuple(rows * widths[rank] for rank in self._members), code)
        if self._is_leader:
            received = {host: blocks[host] for host in self._links.others}
            self._links.wait(call, self._links.swap(call, dict.fromkeys(self._links.others, own), received))
        start = sum(block.numel() for block in blocks[: self._host])
        if own.numel() == stage.numel():
            self._inside.meet(call)
        self._inside.pass_on(call, stage[:start])
        self._inside.pass_on(call, stage[start + own.numel() :])
        if not is_in_place:
            parts = dict(
                zip(order, stage.split_with_sizes([rows * widths[rank] for rank in order]), strict=True)
            )
            columns = [parts[rank].view(rows, widths[rank]) for rank in range(self._world_size)]
            torch.cat(columns, 1, out=result.view(rows, -1))

    def broadcast(self, call: Call, flat: torch.Tensor, code: int, src: int) -> None:
        """Fill the bytes `flat` on every rank with those of rank `src`."""
        call.view = f"{flat.numel()} bytes, {_core.TYPE_NAMES.get(code, 'another dtype')}, root {src}"
        home = next(index for index, ranks in enumerate(self._hosts) if src in ranks)
        is_home = home == self._host
        if is_home:
            self._inside.pass_on(call, flat, code, self._members.index(src))
        else:
            self._inside.meet(call)
        if self._is_leader:
            sends = dict.fromkeys(self._links.others, flat) if is_home else {}
            receives = {} if is_home else {home: flat}
            self._links.wait(call, self._links.swap(call, sends, receives))
        if is_home:
            self._inside.meet(call)
        else:
            self._inside.pass_on(call, flat, code)


__all__ = [
    "PIECE_BYTES",
    "ROUND_TRIP_BYTES",
    "WIDE_SWAP_BYTES",
    "HierarchicalCommunicator",
    "group_by_host",
    "is_hierarchical",
    "partial_dtype",
    "takes_one_swap",
]
