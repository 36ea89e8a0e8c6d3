"""The general communicator: any torch process group, any dtype, the same bits on every rank.

It asks three things of a backend: an all-gather and an all-to-all of bytes, and point to point. Data
moves as bytes, so that a dtype the backend has never heard of travels like any other; reductions are
computed here, in rank order (`device_comm.reduction`). The price is stated in `DESIGN.md` under *Cost*.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from device_comm import checks
from device_comm.base import CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.handles import Handle, PointToPointHandle, StreamHandle
from device_comm.health import FOREVER_S, GRACE_S, Operation
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from device_comm.works import CollectiveWork, PointToPointWorks, WaiterThreads
from shm_broadcast.errors import ClosedError, InternalError

# Up to this many bytes per rank an all-reduce is one all-gather and a local sum: one round trip instead
# of two. Gloo on one host, 2 ranks, medians: 8 KB 390 against 620 us; they meet between 64 and 256 KB.
ONE_SHOT_BYTES: Final = 64 << 10

# The tag of tensors sent point to point; the host plane uses others on a process group of its own.
TENSOR_TAG: Final = 16
# That of tensors that a collective moves between two ranks: it must not take one that was sent before it.
COLLECTIVE_TAG: Final = 17

# How long past our own deadline the backend's may be: it must never be the first to give up.
BACKEND_MARGIN_S: Final = GRACE_S + 5.0


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`'s values without gradient, contiguous, with lazy conjugation and sign resolved."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory holds its elements in order, with no lazy conjugation or sign.

    What only stands for a tensor, as the results of functional collectives do until they are used, has no memory.
    """
    return (
        type(tensor) in _WITH_MEMORY
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


# How long a thread may take to notice that its transfer is complete, on a machine that is busy.
_SETTLE_S: Final = 0.25

_WITH_MEMORY: Final = (torch.Tensor, torch.nn.Parameter)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor as a 1-D uint8 tensor; no copy."""
    # `view(-1)` keeps the stride of a dimension of size 1, which may be any, and then it is no view of bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def backend_timeout(timeout_s: float | None) -> timedelta:
    """Return the deadline that the backend gets for a call of ours."""
    return timedelta(seconds=FOREVER_S if timeout_s is None else min(timeout_s + BACKEND_MARGIN_S, FOREVER_S))


class ProcessGroupCommunicator(DeviceCommunicator):
    """Collectives over a torch process group; on accelerators the results are queued on the stream."""

    algorithm = "process group"

    def __init__(self, context: CommunicatorContext) -> None:
        """Use `context.process_group`, which stays the caller's and is not destroyed here."""
        super().__init__(context)
        if context.process_group is None:
            raise InternalError(f"{context.name!r}: the general communicator needs a process group")
        self._open_group: dist.ProcessGroup | None = context.process_group
        self._health = context.health
        self._on_host = self.device.type == "cpu"
        self.threads: WaiterThreads = WaiterThreads(context.name)
        self._staging = torch.empty(0, dtype=torch.uint8, device=self.device)

    def prepare_buffers(self, message_bytes: int) -> None:
        """Reserve the staging memory of uneven gathers, which otherwise grows on first use."""
        self._stage(message_bytes)

    def destroy(self) -> None:
        """End the waiting threads, drop the staging memory and let the process group go."""
        # A thread whose transfer is complete is busy for a moment more; to abort then would end the whole group, which
        # may outlive its communicator.
        give_up = time.monotonic() + _SETTLE_S
        while self.threads.is_busy and time.monotonic() < give_up:
            time.sleep(0.001)
        if self.threads.is_busy:
            self._health.abort()
        self.threads.close(timeout_s=2.0)
        self._staging = self._staging.new_empty(0)
        # A user may keep the destroyed group; its connections must not live as long.
        self._open_group = None
        self.context: CommunicatorContext = dataclasses.replace(self.context, process_group=None)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the process group; `ClosedError` once the communicator was destroyed."""
        group = self._open_group
        if group is None:
            raise ClosedError(
                f"{self._health.where('a call')}: the group was destroyed while the call was being posted"
            )
        return group

    # ------------------------------------------------------------------ collectives

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        operation = self._health.begin("device", "all_reduce")
        source = dense(input_)
        if source.numel() == 0:
            return torch.empty_like(source)
        if source.nbytes <= ONE_SHOT_BYTES:
            gathered = self._gather_bytes(operation, as_bytes(source), timeout_s)
            parts = list(gathered.view(source.dtype).view(self.world_size, *source.shape))
            return reduce_in_rank_order(parts, op)
        return self._two_shot(operation, source, op, timeout_s).view(source.shape)

    def _two_shot(
        self, operation: Operation, source: torch.Tensor, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor:
        """Each rank reduces its share of the flat tensor, then the shares are gathered."""
        flat = source.view(-1)
        starts = self._share_starts(flat.numel())
        counts = [end - start for start, end in itertools.pairwise(starts)]
        own = flat.new_empty(counts[0])
        parts = self._exchange(operation, flat, counts, timeout_s)
        if counts[self.rank_in_group]:
            own[: counts[self.rank_in_group]] = reduce_in_rank_order(parts, op)
        gathered = self._gather_bytes(operation, as_bytes(own), timeout_s)
        return gathered.view(source.dtype)[: flat.numel()]

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        operation = self._health.begin("device", "reduce")
        source = dense(input_)
        is_root = self.rank_in_group == dst
        if source.numel() == 0:
            return torch.empty_like(source) if is_root else None
        flat = source.view(-1)
        others = [rank for rank in range(self.world_size) if rank != dst]
        if source.nbytes <= ONE_SHOT_BYTES or len(others) == 1:
            # As a gather whose root combines what comes: one transfer instead of an exchange and one.
            if not is_root:
                self._transfer(operation, timeout_s, sends={dst: flat})
                return None
            parts = flat.new_empty((self.world_size, flat.numel()))
            parts[dst] = flat
            self._transfer(operation, timeout_s, receives={rank: parts[rank] for rank in others})
            return reduce_in_rank_order(list(parts), op).view(source.shape)
        starts = self._share_starts(flat.numel())
        parts_of_share = self._exchange(
            operation, flat, [end - start for start, end in itertools.pairwise(starts)], timeout_s
        )
        own = reduce_in_rank_order(parts_of_share, op)
        if not is_root:
            self._transfer(operation, timeout_s, sends={dst: own})
            return None
        result = torch.empty_like(flat)
        result[starts[dst] : starts[dst + 1]] = own
        shares = {rank: result[starts[rank] : starts[rank + 1]] for rank in others}
        self._transfer(operation, timeout_s, receives=shares)
        return result.view(source.shape)

    def _share_starts(self, elements: int) -> list[int]:
        """Return where each rank's share of a flat tensor begins, and where the last one ends."""
        share = -(-elements // self.world_size)
        return [min(rank * share, elements) for rank in range(self.world_size + 1)]

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        operation = self._health.begin("device", "reduce_scatter")
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        own_shape = (sizes[self.rank_in_group], *rows.shape[1:])
        if rows.numel() == 0:
            return rows.new_empty(own_shape).movedim(0, dim).contiguous()
        per_row = rows[0].numel()
        counts = [size * per_row for size in sizes]
        parts = self._exchange(operation, rows.view(-1), counts, timeout_s)
        return reduce_in_rank_order(parts, op).view(own_shape).movedim(0, dim).contiguous()

    def _all_gather(
        self, input_: torch.Tensor, dim: int, sizes: tuple[int, ...], timeout_s: float | None
    ) -> torch.Tensor:
        operation = self._health.begin("device", "all_gather")
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        shapes = [(*source.shape[:dim], size, *source.shape[dim + 1 :]) for size in sizes]
        if all(0 in shape for shape in shapes):
            return source.new_empty((*source.shape[:dim], sum(sizes), *source.shape[dim + 1 :]))
        if len(set(sizes)) == 1:
            gathered = self._gather_bytes(operation, as_bytes(source), timeout_s).view(source.dtype)
            return _concatenate(gathered.view(self.world_size, *source.shape), dim)
        lengths = [torch.Size(shape).numel() * source.itemsize for shape in shapes]
        padded = self._stage(max(lengths))
        padded[: source.nbytes] = as_bytes(source)
        rows = self._gather_bytes(operation, padded, timeout_s).view(self.world_size, -1)
        parts = [
            row[:length].clone().view(source.dtype).view(shape)
            for row, length, shape in zip(rows, lengths, shapes, strict=True)
        ]
        return torch.cat(parts, dim)

    def _gather(
        self, input_: torch.Tensor, dst: int, dim: int, timeout_s: float | None
    ) -> torch.Tensor | None:
        operation = self._health.begin("device", "gather")
        source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
        if source.numel() == 0:
            empty = source.new_empty((self.world_size, *source.shape))
            return _concatenate(empty, dim) if self.rank_in_group == dst else None
        if self.rank_in_group != dst:
            self._transfer(operation, timeout_s, sends={dst: source})
            return None
        parts = source.new_empty((self.world_size, *source.shape))
        parts[dst] = source
        receives = {rank: parts[rank] for rank in range(self.world_size) if rank != dst}
        self._transfer(operation, timeout_s, receives=receives)
        return _concatenate(parts, dim)

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        operation = self._health.begin("device", "scatter")
        into = output.detach()
        if input_ is None:
            landing = into if is_plain(into) else into.new_empty(into.shape)
            self._transfer(operation, timeout_s, receives={src: landing})
            if landing is not into:
                into.copy_(landing)
            return
        whole = input_.reshape(1) if input_.dim() == 0 else input_.detach()
        starts = [0, *itertools.accumulate(sizes)]
        parts = [whole.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]
        others = {rank: dense(part) for rank, part in enumerate(parts) if rank != src}
        into.copy_(parts[src].reshape(into.shape))
        self._transfer(operation, timeout_s, sends=others)

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        operation = self._health.begin("device", "all_to_all")
        if self._on_host:
            self._check_table(operation, send_sizes, recv_sizes, timeout_s)
        rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
        result = rows.new_empty((sum(recv_sizes), *rows.shape[1:]))
        row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
        if row_bytes:
            sent, received = ([size * row_bytes for size in sizes] for sizes in (send_sizes, recv_sizes))
            self._exchange_bytes(operation, as_bytes(rows), as_bytes(result), sent, received, timeout_s)
        return result.movedim(0, dim).contiguous()

    def _check_table(
        self,
        operation: Operation,
        send_sizes: tuple[int, ...],
        recv_sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        """Raise on every rank if ranks send other sizes than are expected: Gloo would end the process."""
        own = torch.tensor([*send_sizes, *recv_sizes], dtype=torch.int64)
        table = self._gather_bytes(operation, as_bytes(own), timeout_s).view(torch.int64)
        rows = table.view(self.world_size, -1).tolist()
        checks.check_exchange_table(self._health.where("all_to_all"), self.context.ranks, rows)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        operation = self._health.begin("device", "broadcast")
        if tensor.numel() == 0:
            return tensor
        if self.rank_in_group == src:
            source = dense(tensor)
            others = {rank: source for rank in range(self.world_size) if rank != src}
            self._transfer(operation, timeout_s, sends=others)
            return tensor
        into = tensor.detach()
        landing = into if is_plain(into) else into.new_empty(into.shape)
        self._transfer(operation, timeout_s, receives={src: landing})
        if landing is not into:
            into.copy_(landing)
        return tensor

    # ------------------------------------------------------------------ point to point

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        operation = self._health.begin_point_to_point("device", f"send to {self.context.ranks[dst]}")
        return self._start(operation, timeout_s or self.context.timeout_s, {dst: dense(tensor)}, {})

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        operation = self._health.begin_point_to_point("device", f"recv from {self.context.ranks[src]}")
        into = tensor.detach()
        if is_plain(into):
            return self._start(operation, timeout_s, {}, {src: into})
        landing = into.new_empty(into.shape)
        return self._start(operation, timeout_s, {}, {src: landing}, (into, landing))

    def _start(
        self,
        operation: Operation,
        timeout_s: float | None,
        sends: dict[int, torch.Tensor],
        receives: dict[int, torch.Tensor],
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Handle:
        ranks = self.context.ranks
        tag = COLLECTIVE_TAG if operation.number else TENSOR_TAG
        works: list[tuple[int, dist.Work]] = []
        with self._health.transport(operation):
            for peer, tensor in sends.items():
                if tensor.numel():
                    works.append((ranks[peer], self.process_group.send([as_bytes(tensor)], peer, tag)))
            for peer, tensor in receives.items():
                if tensor.numel():
                    works.append((ranks[peer], self.process_group.recv([as_bytes(tensor)], peer, tag)))
        if not self._on_host:
            return StreamHandle(self._health, operation, works, (sends, receives), landing)
        keep = (list(sends.values()), list(receives.values()))
        transfer = PointToPointWorks(self.threads, works, keep)
        return PointToPointHandle(self._health, operation, transfer, timeout_s, landing)

    def _transfer(
        self,
        operation: Operation,
        timeout_s: float | None,
        sends: dict[int, torch.Tensor] | None = None,
        receives: dict[int, torch.Tensor] | None = None,
    ) -> None:
        self._start(operation, timeout_s or self.context.timeout_s, sends or {}, receives or {}).wait()

    # ------------------------------------------------------------------ what the backend does

    def _finish(self, operation: Operation, work: dist.Work, timeout_s: float) -> None:
        if self._on_host:
            self._health.wait(operation, CollectiveWork(work), timeout_s)
        else:
            work.wait()

    def _gather_bytes(self, operation: Operation, own: torch.Tensor, timeout_s: float | None) -> torch.Tensor:
        """Return every rank's bytes one after the other; all ranks bring the same number."""
        deadline = timeout_s or self.context.timeout_s
        options = AllgatherOptions()
        options.timeout = backend_timeout(deadline)
        result = own.new_empty(own.numel() * self.world_size)
        with self._health.transport(operation):
            work = self.process_group._allgather_base(result, own, options)
        self._finish(operation, work, deadline)
        return result

    def _exchange(
        self, operation: Operation, flat: torch.Tensor, counts: Sequence[int], timeout_s: float | None
    ) -> list[torch.Tensor]:
        """Send `counts[i]` elements to rank i; return what each rank sent here, in rank order."""
        own = counts[self.rank_in_group]
        received = flat.new_empty(own * self.world_size)
        out_bytes = [own * flat.itemsize] * self.world_size
        in_bytes = [count * flat.itemsize for count in counts]
        self._exchange_bytes(operation, as_bytes(flat), as_bytes(received), in_bytes, out_bytes, timeout_s)
        return list(received.view(self.world_size, own))

    def _exchange_bytes(
        self,
        operation: Operation,
        source: torch.Tensor,
        result: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        timeout_s: float | None,
    ) -> None:
        """Send `sent[i]` bytes of `source` to rank i; put `received[i]` bytes from rank i into `result`."""
        deadline = timeout_s or self.context.timeout_s
        options = dist.AllToAllOptions()
        options.timeout = backend_timeout(deadline)
        with self._health.transport(operation):
            work = self.process_group.alltoall_base(result, source, list(received), list(sent), options)
        self._finish(operation, work, deadline)

    def _stage(self, nbytes: int) -> torch.Tensor:
        if self._staging.numel() < nbytes:
            self._staging = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._staging[:nbytes]


def _concatenate(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [world, *shape] with the first dimension merged into `dim` of shape."""
    shape = list(stacked.shape[1:])
    shape[dim] *= stacked.shape[0]
    return stacked.movedim(0, dim).reshape(shape).contiguous()
