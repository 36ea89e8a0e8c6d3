"""The general communicator: any torch process group, any dtype, the same bits on every rank.

It needs three things of a backend: an all-gather and an all-to-all of bytes, and point to point; on the CPU, point to
point alone. Data moves as bytes, so a dtype that the backend does not know moves like any other. Reductions are
computed here, in rank order (`device_comm.reduction`). `DESIGN.md` states the price under *Cost*.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from device_comm import checks
from device_comm.base import CallPath, CommunicatorContext, DeviceCommunicator, Sizes, Timeout
from device_comm.gloo.exchange import exchange
from device_comm.handles import Handle, PointToPointHandle, StreamHandle
from device_comm.health import FOREVER_S, GRACE_S, Operation
from device_comm.movable import movable
from device_comm.outputs import fill
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from device_comm.stages import Turns, collective, in_stages, until
from device_comm.works import PointToPointWorks, WaiterThreads
from shm_broadcast.errors import ClosedError, InternalError
from shm_broadcast.status.layout import NOBODY

# Up to this many bytes per rank an all-reduce is one all-gather and a local sum: one round trip instead
# of two. Gloo on one host, 2 ranks, medians: 8 KB 390 against 620 us; they meet between 64 and 256 KB.
ONE_SHOT_BYTES: Final = 64 << 10

# The tag of tensors sent point to point; the host plane uses others on a process group of its own.
TENSOR_TAG: Final = 16
# The tag of tensors that a collective moves between two ranks. With `TENSOR_TAG` it could take a tensor that was sent
# point to point before the collective.
COLLECTIVE_TAG: Final = 17
# The tags of exchanges between all ranks. If ranks make different calls by mistake, none may take another's message.
_GATHER_TAG: Final = 18
_EXCHANGE_TAG: Final = 19

Result = TypeVar("Result")

# `send` or `recv` of a process group: takes the tensor in a list, the peer and the tag.
Post: TypeAlias = Callable[[list[torch.Tensor], int, int], dist.Work]

# How much later than ours the backend's deadline is: the backend must never be the first to give up.
BACKEND_MARGIN_S: Final = GRACE_S + 5.0


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`'s values without gradient, contiguous, with lazy conjugation and sign resolved."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the tensor's memory holds its elements in order, with no lazy conjugation or sign.

    The results of functional collectives have no memory until they are used; they only stand for tensors.
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
    # `view(-1)` keeps any stride of a dimension of size 1, but torch views only a stride of 1 as bytes.
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
        self._health = context.health
        self._on_host = self.device.type == "cpu"
        self.threads: WaiterThreads = WaiterThreads(context.name)
        # The calls of an accelerator only queue work. A communicator in two levels, which uses this one for some calls,
        # has turns of its own.
        self._turns = Turns(self._health, "device") if self._on_host else None

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return how a call is carried; on the CPU also why nothing faster carries it."""
        if self._on_host:
            return CallPath("gloo", "the ranks are on one host and were given no memory to share")
        return super().path(operation, nbytes, dtype)

    def destroy(self) -> None:
        """End the waiting threads and let the process group go."""
        # A thread stays busy for a moment after its transfer is complete. Aborting then would end the whole group,
        # which may outlive its communicator.
        give_up = time.monotonic() + _SETTLE_S
        while self.threads.is_busy and time.monotonic() < give_up:
            time.sleep(0.001)
        if self.threads.is_busy:
            self._health.abort()
        self.threads.close(timeout_s=2.0)
        # A user may keep the destroyed group; its connections must not live as long.
        self.context: CommunicatorContext = dataclasses.replace(self.context, process_group=None)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """Return the process group; `ClosedError` once the communicator was destroyed."""
        group = self.context.process_group
        if group is None:
            raise ClosedError(
                f"{self._health.where('a call')}: the group was destroyed while the call was being posted"
            )
        return group

    # ------------------------------------------------------------------ collectives

    def _collective(
        self,
        name: str,
        stages: Callable[[Operation, Timeout], Result],
        timeout_s: Timeout,
        nbytes: int,
        root: int = NOBODY,
    ) -> Result:
        """Make a collective in its turn; `stages` gets what is left of the deadline."""
        if self._turns is None:
            return collective(
                self._health, "device", name, lambda operation: stages(operation, timeout_s), nbytes, root
            )

        limit_s = timeout_s or self.context.timeout_s
        return self._turns.make(
            name, lambda operation, end: stages(operation, until(end)), limit_s, nbytes, root
        )

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor:
            source = dense(input_)
            if source.numel() == 0:
                return torch.empty_like(source)
            if source.nbytes <= ONE_SHOT_BYTES:
                gathered = self._gather_bytes(operation, as_bytes(source), timeout_s)
                parts = list(gathered.view(source.dtype).view(self.world_size, *source.shape))
                return reduce_in_rank_order(parts, op)
            # Each rank combines its share of the flat tensor, then the shares are gathered.
            flat = source.view(-1)
            counts = self._shares(flat.numel())
            own = flat.new_empty(counts[0])
            own[: counts[self.rank_in_group]] = self._combine(operation, flat, counts, op, timeout_s)
            gathered = self._gather_bytes(operation, as_bytes(own), timeout_s)
            return gathered.view(source.dtype)[: flat.numel()].view(source.shape)

        return self._collective("all_reduce", stages, timeout_s, input_.nbytes)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor | None:
            source = dense(input_)
            if source.nbytes <= ONE_SHOT_BYTES or self.world_size == 2:
                # The root combines what it gathers: one transfer instead of an exchange and a transfer.
                parts = self._gather_parts(operation, source, dst, timeout_s)
                return None if parts is None else reduce_in_rank_order(list(parts), op)
            flat = source.view(-1)
            counts = self._shares(flat.numel())
            own = self._combine(operation, flat, counts, op, timeout_s)
            if self.rank_in_group != dst:
                self._transfer(operation, self.process_group.send, {dst: own}, timeout_s)
                return None
            result = torch.empty_like(flat)
            shares = dict(enumerate(result.split_with_sizes(counts)))
            shares.pop(dst).copy_(own)
            self._transfer(operation, self.process_group.recv, shares, timeout_s)
            return result.view(source.shape)

        return self._collective("reduce", stages, timeout_s, input_.nbytes, dst)

    def _shares(self, elements: int) -> list[int]:
        """Return how many elements of a flat tensor each rank combines; no rank has more than the first."""
        share = -(-elements // self.world_size)
        return [min(share, max(elements - rank * share, 0)) for rank in range(self.world_size)]

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor:
            rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
            return self._combine(operation, rows, sizes, op, timeout_s).movedim(0, dim).contiguous()

        return self._collective("reduce_scatter", stages, timeout_s, input_.nbytes)

    def _combine(
        self,
        operation: Operation,
        rows: torch.Tensor,
        sizes: Sequence[int],
        op: ReduceOperation,
        timeout_s: Timeout,
    ) -> torch.Tensor:
        """Combine the ranks' contiguous tensors; rank i gets `sizes[i]` rows of the result, in rank order."""
        shape = (sizes[self.rank_in_group], *rows.shape[1:])
        if rows.numel() == 0:
            return rows.new_empty(shape)
        received = rows.new_empty((self.world_size, *shape))
        self._exchange(operation, rows, received, sizes, shape[:1] * self.world_size, timeout_s)
        return reduce_in_rank_order(list(received), op)

    def _all_gather_into(
        self, output: torch.Tensor, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout
    ) -> None:
        if dim or len(set(sizes)) > 1 or not output.numel() or not is_plain(output):
            super()._all_gather_into(output, input_, dim, sizes, timeout_s)
            return

        def stages(operation: Operation, timeout_s: Timeout) -> None:
            self._gather_bytes(operation, as_bytes(dense(input_)), timeout_s, as_bytes(output))

        self._collective("all_gather", stages, timeout_s, input_.nbytes)

    def _all_gather(self, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout) -> torch.Tensor:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor:
            source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
            shapes = [(*source.shape[:dim], size, *source.shape[dim + 1 :]) for size in sizes]
            if all(0 in shape for shape in shapes):
                return source.new_empty((*source.shape[:dim], sum(sizes), *source.shape[dim + 1 :]))
            if len(set(sizes)) == 1:
                gathered = self._gather_bytes(operation, as_bytes(source), timeout_s).view(source.dtype)
                return _concatenate(gathered.view(self.world_size, *source.shape), dim)
            padded = source.new_empty(max(math.prod(shape) for shape in shapes))
            padded[: source.numel()] = source.view(-1)
            gathered = self._gather_bytes(operation, as_bytes(padded), timeout_s).view(source.dtype)
            rows = gathered.view(self.world_size, -1)
            parts = [row[: math.prod(shape)].view(shape) for row, shape in zip(rows, shapes, strict=True)]
            return torch.cat(parts, dim)

        return self._collective("all_gather", stages, timeout_s, input_.nbytes)

    def _gather(self, input_: torch.Tensor, dst: int, dim: int, timeout_s: Timeout) -> torch.Tensor | None:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor | None:
            source = dense(input_.reshape(1) if input_.dim() == 0 else input_)
            parts = self._gather_parts(operation, source, dst, timeout_s)
            return None if parts is None else _concatenate(parts, dim)

        return self._collective("gather", stages, timeout_s, input_.nbytes, dst)

    def _gather_parts(
        self, operation: Operation, source: torch.Tensor, dst: int, timeout_s: Timeout
    ) -> torch.Tensor | None:
        """Return the ranks' contiguous tensors on rank `dst`, stacked; the other ranks get None."""
        if self.rank_in_group != dst:
            self._transfer(operation, self.process_group.send, {dst: source}, timeout_s)
            return None
        parts = source.new_empty((self.world_size, *source.shape))
        parts[dst] = source
        others = {rank: part for rank, part in enumerate(parts) if rank != dst}
        self._transfer(operation, self.process_group.recv, others, timeout_s)
        return parts

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        def stages(operation: Operation, timeout_s: Timeout) -> None:
            if input_ is None:
                self._receive(operation, output, src, timeout_s or self.context.timeout_s).wait()
                return
            whole = input_.reshape(1) if input_.dim() == 0 else input_.detach()
            parts = whole.split_with_sizes(list(sizes), dim)
            others = {rank: dense(part) for rank, part in enumerate(parts) if rank != src}
            fill(output, parts[src])
            self._transfer(operation, self.process_group.send, others, timeout_s)

        self._collective("scatter", stages, timeout_s, output.nbytes, src)

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor:
            self._compare_sizes(operation, send_sizes, recv_sizes, timeout_s)
            rows = dense(input_.reshape(1) if input_.dim() == 0 else input_.movedim(dim, 0))
            result = rows.new_empty((sum(recv_sizes), *rows.shape[1:]))
            self._exchange(operation, rows, result, send_sizes, recv_sizes, timeout_s)
            return result.movedim(0, dim).contiguous()

        return self._collective("all_to_all", stages, timeout_s, input_.nbytes)

    def _all_to_all_into(
        self,
        output: torch.Tensor,
        input_: torch.Tensor,
        dim: int,
        send_sizes: Sizes,
        recv_sizes: Sizes,
        timeout_s: Timeout,
    ) -> None:
        if dim or not is_plain(output):
            super()._all_to_all_into(output, input_, dim, send_sizes, recv_sizes, timeout_s)
            return

        def stages(operation: Operation, timeout_s: Timeout) -> None:
            self._compare_sizes(operation, send_sizes, recv_sizes, timeout_s)
            rows = dense(input_.reshape(1) if input_.dim() == 0 else input_)
            self._exchange(operation, rows, output, send_sizes, recv_sizes, timeout_s)

        self._collective("all_to_all", stages, timeout_s, input_.nbytes)

    def _compare_sizes(
        self, operation: Operation, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> None:
        """On the CPU, raise on every rank unless what is sent in an all-to-all is what is expected."""
        if self._on_host:
            # Gloo would end a process that receives other sizes than it expects. This raises on every rank instead.
            own = torch.tensor([*send_sizes, *recv_sizes], dtype=torch.int64, device="cpu")
            gathered = self._gather_bytes(operation, as_bytes(own), timeout_s).view(torch.int64)
            table = gathered.view(self.world_size, -1).tolist()
            checks.check_exchange_table(self._health.where("all_to_all"), self.context.ranks, table)

    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        def stages(operation: Operation, timeout_s: Timeout) -> torch.Tensor:
            if self.rank_in_group == src:
                source = dense(tensor)
                others = {rank: source for rank in range(self.world_size) if rank != src}
                self._transfer(operation, self.process_group.send, others, timeout_s)
            else:
                self._receive(operation, tensor, src, timeout_s or self.context.timeout_s).wait()
            return tensor

        return self._collective("broadcast", stages, timeout_s, tensor.nbytes, src)

    # ------------------------------------------------------------------ point to point

    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        operation = self._health.begin_point_to_point("device", f"send to {self.context.ranks[dst]}")
        deadline = timeout_s or self.context.timeout_s
        unfinished = self._health.unfinished_sends
        return self._start(
            operation, self.process_group.send, {dst: dense(tensor)}, deadline, unfinished=unfinished
        )

    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        operation = self._health.begin_point_to_point("device", f"recv from {self.context.ranks[src]}")
        return self._receive(operation, tensor, src, timeout_s)

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int, timeout_s: Timeout) -> torch.Tensor:
        # A message cannot be put back, so whatever a handler raises before it has arrived breaks the group.
        operation = self._health.begin_point_to_point("device", f"recv from {self.context.ranks[src]}")
        tensor = torch.empty(shape, dtype=dtype, device=self.device)

        def stages() -> None:
            self._receive(operation, movable(tensor), src, timeout_s).wait()

        in_stages(self._health, operation, stages)
        return tensor

    def _receive(self, operation: Operation, tensor: torch.Tensor, src: int, timeout_s: Timeout) -> Handle:
        """Start to receive into a tensor of any layout."""
        into = tensor.detach()
        landing = into if is_plain(into) else into.new_empty(into.shape)
        copy = None if landing is into else (into, landing)
        return self._start(operation, self.process_group.recv, {src: landing}, timeout_s, copy)

    def _start(
        self,
        operation: Operation,
        post: Post,
        tensors: dict[int, torch.Tensor],
        timeout_s: Timeout,
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
        unfinished: set[object] | None = None,
    ) -> Handle:
        """Post one transfer for each peer that is a key of `tensors`, unless its tensor is empty."""
        tag = COLLECTIVE_TAG if operation.number else TENSOR_TAG
        works: list[tuple[int, dist.Work]] = []

        def stages() -> Handle:
            limit_s = self._settled(operation, timeout_s) if operation.number else timeout_s
            with self._health.transport(operation) as make:
                for peer, tensor in tensors.items():
                    if tensor.numel():
                        works.append((self.context.ranks[peer], make(post, [as_bytes(tensor)], peer, tag)))
                if not self._on_host:
                    return StreamHandle(self._health, operation, works, tensors, landing)
                # Here too, since the system may have no thread to give.
                transfer = PointToPointWorks(self.threads, works, tensors, unfinished)
            return PointToPointHandle(self._health, operation, transfer, limit_s, landing)

        return in_stages(self._health, operation, stages)

    def _transfer(
        self, operation: Operation, post: Post, tensors: dict[int, torch.Tensor], timeout_s: Timeout
    ) -> None:
        self._start(operation, post, tensors, timeout_s or self.context.timeout_s).wait()

    # ------------------------------------------------------------------ what the backend does

    def _settled(self, operation: Operation, timeout_s: Timeout) -> float:
        """Return the deadline of a collective in seconds, less the wait for what this rank has refused before it."""
        limit_s = timeout_s or self.context.timeout_s
        return self._health.refusals.settle(self._health, operation, limit_s)

    def _gather_bytes(
        self,
        operation: Operation,
        own: torch.Tensor,
        timeout_s: float | None,
        into: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return every rank's bytes one after the other, in `into` if given; all ranks bring the same number."""
        deadline = self._settled(operation, timeout_s)
        result = own.new_empty(own.numel() * self.world_size) if into is None else into
        if self._on_host:
            rows = dict(enumerate(result.view(self.world_size, own.numel())))
            fill(rows.pop(self.rank_in_group), own)
            self._exchange_parts(operation, dict.fromkeys(rows, own), rows, _GATHER_TAG, deadline)
            return result
        options = AllgatherOptions()
        options.timeout = backend_timeout(deadline)
        with self._health.transport(operation) as post:
            work = post(self.process_group._allgather_base, result, own, options)
        work.wait()
        return result

    def _exchange(
        self,
        operation: Operation,
        rows: torch.Tensor,
        result: torch.Tensor,
        sent: Sequence[int],
        received: Sequence[int],
        timeout_s: Timeout,
    ) -> None:
        """Send `sent[i]` of the rows to rank i; fill `result` with `received[i]` rows of each rank i, in rank order."""
        row_bytes = math.prod(rows.shape[1:]) * rows.itemsize
        if not row_bytes:
            return
        deadline = self._settled(operation, timeout_s)
        to_receive, to_send = ([size * row_bytes for size in sizes] for sizes in (received, sent))
        if self._on_host:
            leaving, arriving = (
                dict(enumerate(as_bytes(memory).split_with_sizes(sizes)))
                for memory, sizes in ((rows, to_send), (result, to_receive))
            )
            fill(arriving.pop(self.rank_in_group), leaving.pop(self.rank_in_group))
            self._exchange_parts(operation, leaving, arriving, _EXCHANGE_TAG, deadline)
            return
        options = dist.AllToAllOptions()
        options.timeout = backend_timeout(deadline)
        with self._health.transport(operation) as post:
            work = post(
                self.process_group.alltoall_base,
                as_bytes(result),
                as_bytes(rows),
                to_receive,
                to_send,
                options,
            )
        work.wait()

    def _exchange_parts(
        self,
        operation: Operation,
        sent: Mapping[int, torch.Tensor],
        received: Mapping[int, torch.Tensor],
        tag: int,
        timeout_s: float,
    ) -> None:
        exchange(self.process_group, self.threads, self._health, operation, (sent, received), tag, timeout_s)


def _concatenate(stacked: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [world, *shape] with the first dimension merged into `dim` of shape."""
    shape = list(stacked.shape[1:])
    shape[dim] *= stacked.shape[0]
    return stacked.movedim(0, dim).reshape(shape).contiguous()
