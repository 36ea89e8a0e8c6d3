"""The two levels of a group over several hosts: each host's shared memory, and what the leaders of hosts swap."""

from __future__ import annotations

import dataclasses
import itertools
import socket
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from device_comm import _core
from device_comm.base import CommunicatorContext
from device_comm.cpu.native_codes import COPY_ONLY, TYPE_CODES
from device_comm.cpu.several_hosts.inside import LoneHost, SharedHost
from device_comm.cpu.several_hosts.leaders import Call, Leaders
from device_comm.cpu.several_hosts.line import UNMEASURED_BYTES
from device_comm.cpu.several_hosts.wires import Swap, Wire
from device_comm.cpu.shared_memory import SharedPart
from device_comm.reduction import ReduceOperation, accumulation_dtype, reduce_in_rank_order

# An all-reduce is cut into pieces of this size for each leader: while one is on its way, the next is combined.
PIECE_BYTES: Final = 1 << 20
# From this size on several ranks of each host are leaders: they share the work of combining, and where the line carries
# more than one process can move, they move it together.
SEVERAL_LEADERS_BYTES: Final = 1 << 20


def partners_of(rank: int, hosts: Sequence[Sequence[int]]) -> dict[int, int]:
    """Return the ranks that `rank` swaps with, by host: those at its place on the others; none if it leads nobody.

    Args:
        rank: A rank in the group.
        hosts: The ranks of each host, ascending.
    """
    own = next(host for host, ranks in enumerate(hosts) if rank in ranks)
    place = hosts[own].index(rank)
    if place >= min(map(len, hosts)):
        return {}
    return {host: ranks[place] for host, ranks in enumerate(hosts) if host != own}


def partial_dtype(dtype: torch.dtype, op: ReduceOperation) -> torch.dtype:
    """Return the dtype in which a host's result goes to the other hosts: one that loses nothing."""
    is_wider = (dtype.is_floating_point or dtype.is_complex) and op not in (
        ReduceOperation.MIN,
        ReduceOperation.MAX,
    )
    return accumulation_dtype(dtype) if is_wider else dtype


def takes_one_swap(hosts: int, partial: torch.Tensor, dtype: torch.dtype, worth_bytes: float) -> bool:
    """Return whether each leader combines the whole of its slice, instead of a part that it then sends to the others.

    Args:
        hosts: How many there are.
        partial: A host's result.
        dtype: That of the final result.
        worth_bytes: What the line carries while another swap is under way.
    """
    narrow = partial.numel() * dtype.itemsize
    in_one = (hosts - 1) * partial.nbytes
    in_two = (hosts - 1) / hosts * (partial.nbytes + narrow)
    return in_one - in_two <= worth_bytes


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A piece of an all-reduce whose partial results are on their way between the leaders.

    Attributes:
        elements: Slice of the whole tensor, which this piece is.
        edges: Where the slices of this host's leaders begin and end within the piece; one more than there are leaders.
        ranges: On a leader: for each host the (start, end), within the slice, of the elements that it combines.
        parts: On a leader: each host's partial result for the leader's own range. Empty on other ranks.
        swap: On a leader: the transfers that fill `parts`. None on other ranks.
        is_divided: Whether the leaders of all hosts combine a part each, and swap the results.
    """

    elements: slice
    edges: Sequence[int]
    ranges: Sequence[tuple[int, int]] = ()
    parts: Sequence[torch.Tensor] = ()
    swap: Swap | None = None
    is_divided: bool = False


class Levels:
    """The two levels of one group, seen from one rank.

    In a call without elements the ranks of each host meet, so that they compare it as any other.
    """

    def __init__(
        self,
        context: CommunicatorContext,
        hosts: tuple[tuple[int, ...], ...],
        part: SharedPart | None,
        connections: Mapping[int, socket.socket],
    ) -> None:
        """Take the arguments of `HierarchicalCommunicator`."""
        rank = context.rank_in_group
        self._world_size = context.world_size
        self._hosts = hosts
        self._host = next(index for index, ranks in enumerate(hosts) if rank in ranks)
        self._members = hosts[self._host]
        self._place = self._members.index(rank)
        self._is_leader = self._place == 0
        self._most_leaders = min(map(len, hosts))
        # How many bytes another swap must save to be worth its time.
        self.worth_bytes: float = UNMEASURED_BYTES
        self._inside: SharedHost | LoneHost = (
            LoneHost() if part is None else SharedHost(part, self._place, len(self._members), context.health)
        )
        partners = partners_of(rank, hosts)
        wires = {
            host: Wire(context.ranks[partner], connections[partner], context.health.forks)
            for host, partner in partners.items()
        }
        self._links = Leaders(context.health, {**partners, self._host: rank}, self._host, wires)

    def close(self) -> None:
        """Release the connections and the shared region. Idempotent."""
        self._links.close()
        self._inside.close()

    @property
    def first_leaders(self) -> Leaders | None:
        """Return what connects the leaders, one of each host, that make short calls; None if this rank is not one."""
        return self._links if self._is_leader else None

    def _leaders_for(self, nbytes: int) -> int:
        """Return how many ranks of each host talk to other hosts in a call whose result has `nbytes` bytes."""
        return self._most_leaders if nbytes >= SEVERAL_LEADERS_BYTES else 1

    # ------------------------------------------------------------------ reductions

    def all_reduce(self, call: Call, source: torch.Tensor, result: torch.Tensor, op: ReduceOperation) -> None:
        """Combine the ranks' contiguous tensors into `result`, which may be `source`."""
        flat, into = source.view(-1), result.view(-1)
        call.view = f"{op.name} of {flat.numel()} elements, {flat.dtype}{call.view}"
        if not flat.numel():
            self._inside.meet(call)
        wide = partial_dtype(flat.dtype, op)
        leaders = self._leaders_for(flat.nbytes)
        length = leaders * PIECE_BYTES // wide.itemsize
        before: _Piece | None = None
        for start in range(0, flat.numel(), length):
            elements = slice(start, min(start + length, flat.numel()))
            piece = self._start_piece(call, flat[elements].to(wide), elements, leaders, op, flat.dtype)
            if before is not None:
                self._finish_piece(call, before, into, op)
            before = piece
        if before is not None:
            self._finish_piece(call, before, into, op)

    def _start_piece(
        self,
        call: Call,
        flat: torch.Tensor,
        elements: slice,
        leaders: int,
        op: ReduceOperation,
        dtype: torch.dtype,
    ) -> _Piece:
        """Combine the piece `flat` inside of the host, and begin to swap this leader's slice of it."""
        edges = _edges(flat.numel(), leaders)
        if leaders == 1:
            partial = self._inside.combine(call, flat, op)
        else:
            partial = self._inside.combine_slices(call, flat, _counts(edges), op)
        if self._place >= leaders:
            return _Piece(elements, edges)
        count, hosts = partial.numel(), len(self._hosts)
        is_divided = not takes_one_swap(hosts, partial, dtype, self.worth_bytes)
        ranges = list(itertools.pairwise(_edges(count, hosts))) if is_divided else [(0, count)] * hosts
        first, last = ranges[self._host]
        parts = list(partial.new_empty((hosts, last - first)))
        parts[self._host] = partial[first:last]
        sends = {host: partial[slice(*ranges[host])] for host in self._links.others}
        swap = self._links.swap(call, sends, {host: parts[host] for host in self._links.others})
        return _Piece(elements, edges, ranges, parts, swap, is_divided)

    def _finish_piece(self, call: Call, piece: _Piece, into: torch.Tensor, op: ReduceOperation) -> None:
        whole = into[piece.elements]
        mine = self._slice_of(whole, piece.edges)
        if piece.swap is not None:
            self._links.wait(call, piece.swap)
            own = mine[slice(*piece.ranges[self._host])]
            # Outside of inference mode torch refuses to write into tensors that were made in it.
            with torch.inference_mode():
                own.copy_(self._combined(piece.parts, op, whole.dtype))
            if piece.is_divided:
                received = {host: mine[slice(*piece.ranges[host])] for host in self._links.others}
                self._links.wait(
                    call, self._links.swap(call, dict.fromkeys(self._links.others, own), received)
                )
        self._pass_on(call, whole, piece.edges, TYPE_CODES[whole.dtype])

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
        if not flat.numel():
            self._inside.meet(call)
            return
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

    def _slice_of(self, flat: torch.Tensor, edges: Sequence[int]) -> torch.Tensor:
        """Return the slice of `flat` that this rank swaps as a leader; empty if it is no leader."""
        return (
            flat[slice(*edges[self._place : self._place + 2])] if self._place < len(edges) - 1 else flat[:0]
        )

    def _pass_on(self, call: Call, flat: torch.Tensor, edges: Sequence[int], code: int) -> None:
        """Fill `flat` on all ranks of the host, of which each leader has its slice."""
        if len(edges) == 2:
            self._inside.pass_on(call, flat, code)
        else:
            self._inside.gather_slices(call, self._slice_of(flat, edges), flat, _counts(edges), code)

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
        if not result.numel():
            self._inside.meet(call)
            return
        order = [rank for ranks in self._hosts for rank in ranks]
        is_in_place = rows == 1 and order == sorted(order)
        # `stage` holds the parts host by host, and within a host rank by rank.
        stage = result if is_in_place else torch.empty_like(result)
        blocks = stage.split_with_sizes([rows * sum(widths[rank] for rank in ranks) for ranks in self._hosts])
        own = blocks[self._host]
        self._inside.gather(call, source, own, tuple(rows * widths[rank] for rank in self._members), code)
        leaders = self._leaders_for(stage.numel())
        edges = [_edges(block.numel(), leaders) for block in blocks]
        if self._place < leaders:
            slices = [self._slice_of(*each) for each in zip(blocks, edges, strict=True)]
            sends = dict.fromkeys(self._links.others, slices[self._host])
            received = {host: slices[host] for host in self._links.others}
            self._links.wait(call, self._links.swap(call, sends, received))
        if own.numel() == stage.numel():
            self._inside.meet(call)
        elif leaders == 1:
            start = sum(block.numel() for block in blocks[: self._host])
            self._inside.pass_on(call, stage[:start])
            self._inside.pass_on(call, stage[start + own.numel() :])
        else:
            # `_links.others` would not do here: it is empty on a rank that leads nobody.
            for host, block in enumerate(blocks):
                if host != self._host:
                    self._pass_on(call, block, edges[host], COPY_ONLY)
        if not is_in_place:
            parts = dict(
                zip(order, stage.split_with_sizes([rows * widths[rank] for rank in order]), strict=True)
            )
            columns = [parts[rank].view(rows, widths[rank]) for rank in range(self._world_size)]
            torch.cat(columns, 1, out=result.view(rows, -1))

    def broadcast(self, call: Call, flat: torch.Tensor, code: int, src: int) -> None:
        """Fill the bytes `flat` on every rank with those of rank `src`."""
        call.view = f"{flat.numel()} bytes, {_core.TYPE_NAMES.get(code, 'another dtype')}, root {src}"
        if not flat.numel():
            self._inside.meet(call)
            return
        home = next(index for index, ranks in enumerate(self._hosts) if src in ranks)
        is_home = home == self._host
        if is_home:
            self._inside.pass_on(call, flat, code, self._members.index(src))
        else:
            self._inside.meet(call)
        leaders = self._leaders_for(flat.numel())
        edges = _edges(flat.numel(), leaders)
        if self._place < leaders:
            mine = self._slice_of(flat, edges)
            sends = dict.fromkeys(self._links.others, mine) if is_home else {}
            receives = {} if is_home else {home: mine}
            self._links.wait(call, self._links.swap(call, sends, receives))
        if is_home:
            self._inside.meet(call)
        else:
            self._pass_on(call, flat, edges, code)


def _edges(count: int, parts: int) -> list[int]:
    """Return where each of `parts` even parts of `count` elements begins, and `count`; the last ones may be shorter."""
    share = -(-count // parts)
    return [min(part * share, count) for part in range(parts + 1)]


def _counts(edges: Sequence[int]) -> list[int]:
    return [last - first for first, last in itertools.pairwise(edges)]


__all__ = ["PIECE_BYTES", "SEVERAL_LEADERS_BYTES", "Levels", "partial_dtype", "partners_of", "takes_one_swap"]
