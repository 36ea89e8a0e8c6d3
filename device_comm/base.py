"""The contract of every device communicator.

Ranks in arguments are ranks *in the group*. The public methods here check their arguments, so that every
implementation refuses the same mistakes with the same words; implementations fill in the methods that
start with an underscore and may rely on what was checked.
"""

from __future__ import annotations

import dataclasses
import socket
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast, overload

import torch
import torch.distributed as dist

from device_comm import checks
from device_comm.async_calls import Aside
from device_comm.experts.exchange import ExpertExchange
from device_comm.fused import rms_norm
from device_comm.fused.forms import FusedForms
from device_comm.handles import Handle
from device_comm.health import GroupHealth, Operation
from device_comm.movable import movable, movable_dtype, restored
from device_comm.outputs import SUM, OutputForms, Sizes, Timeout, fill
from device_comm.reduction import ReduceOperation, check_reducible, reduce_in_rank_order, reduce_operation
from device_comm.stages import in_parts
from shm_broadcast.errors import UsageError


@dataclasses.dataclass(frozen=True)
class CallPath:
    """Which algorithm carries a call, for benchmarks, logs and bug reports.

    Attributes:
        algorithm: Its name, such as "one-shot" or "nccl".
        reason: Why it was chosen, with the number that decided.
    """

    algorithm: str
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicatorContext:
    """What a communicator is built from.

    Attributes:
        name: The group's unique name.
        rank_in_group: This process's rank in the group.
        ranks: Global ranks of the group, in group order.
        device: Where the tensors live.
        process_group: A torch process group of the same ranks. None in a group of one, and where the communicator's
            class says by `needs_process_group = False` that it can do without. On the CPU that counts only where
            the ranks have `shared`; else there is a process group, whatever the class says.
        health: The group's shared state: every blocking wait goes through it.
        timeout_s: Deadline of a call that states none, in seconds.
        shared: The memory that all ranks share if they are on one host (`cpu.shared_memory.SharedMemory`), else
            None. It stays the caller's. Only communicators that use it look inside.
        cuda: Settings of groups on CUDA devices (`CudaSettings`), equal on all ranks except for paths; None for the
            defaults. Only communicators for CUDA look inside.
        exchange: Takes this rank's bytes and returns those of all ranks, in group order, over the host plane: how
            device communicators agree on facts before they can talk themselves. Collective; has its own deadline.
            Required by NCCL, and for several ranks on the CPU that are given no `shared` memory.
        connect: Opens a TCP connection with each of the ranks in the group that it is given, and returns them by rank;
            the caller owns them. Collective over the group: of two ranks, both name the other or neither does. Has its
            own deadline. Required for ranks on several hosts, on the CPU.
    """

    name: str
    rank_in_group: int
    ranks: tuple[int, ...]
    device: torch.device
    process_group: dist.ProcessGroup | None
    health: GroupHealth
    timeout_s: float
    shared: object = None
    cuda: object = None
    exchange: Callable[[bytes], list[bytes]] | None = None
    connect: Callable[[Sequence[int]], dict[int, socket.socket]] | None = None

    @property
    def world_size(self) -> int:
        """Return the number of ranks in the group."""
        return len(self.ranks)


class DeviceCommunicator(OutputForms, FusedForms):
    """Collectives on the tensors of one device type, for one group.

    Contract of every method, unless it says otherwise:

    * Collective: all ranks of the group call it, in the same order, with equal shapes, dtypes and
      arguments; only the sizes that `sizes` states may differ.
    * Blocks until this rank's result is there (CPU), or is queued on the current stream (accelerators).
    * Aliasing: the input is never changed and never kept, the result is a new contiguous tensor.
      Only in a group of one is the result the input itself, which costs nothing. Methods whose name ends
      with an underscore work in place.
    * Inputs may be non-contiguous, empty or 0-dim; a 0-dim tensor counts as one of shape [1] where the
      ranks' tensors are concatenated.
    * `timeout_s`: seconds until the deadline; None takes the group's.
    * Raises: `UsageError` before anything is sent, the group survives. `CommTimeoutError`,
      `PeerLostError`, `NativeError`: the group is broken afterwards.
    """

    algorithm: ClassVar[str] = "unnamed"
    # Where an accelerator carries out asynchronous calls; None: on its current stream.
    aside: Aside | None = None

    def __init__(self, context: CommunicatorContext) -> None:
        """Bind the communicator to a group. Not collective unless an implementation says so."""
        self.context = context
        self.device: torch.device = context.device
        self.rank_in_group: int = context.rank_in_group
        self.world_size: int = context.world_size

    # ------------------------------------------------------------------ reductions

    def all_reduce(
        self, input_: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors; every rank gets the result, of the input's shape and dtype."""
        op = self._check_reduction("all_reduce", input_, op, timeout_s)
        return self._all_reduce(input_, op, timeout_s)

    def all_reduce_(
        self, tensor: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors in place; return `tensor`, which must not overlap itself."""
        op = self._check_reduction("all_reduce_", tensor, op, timeout_s)
        checks.check_writable(tensor, "all_reduce_")
        result = self._all_reduce(tensor, op, timeout_s)
        if result is not tensor:
            fill(tensor, result)
        return tensor

    def reduce(
        self,
        input_: torch.Tensor,
        dst: int = 0,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor | None:
        """Combine the ranks' tensors on rank `dst`, to the bits of `all_reduce`; the other ranks get None.

        The inputs stay as they are. `torch.distributed.reduce` puts the result into the input of rank `dst` and
        leaves arbitrary data in the inputs of the other ranks.
        """
        op = self._check_reduction("reduce", input_, op, timeout_s)
        checks.check_rank(dst, self.world_size, "dst")
        return self._reduce(input_, dst, op, timeout_s)

    def reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Combine the ranks' tensors; rank i gets the i-th of `world_size` equal parts along `dim`."""
        op = self._check_reduction("reduce_scatter", input_, op, timeout_s)
        dim = checks.check_dim(dim, input_)
        checks.check_divisible(input_, dim, self.world_size)
        size = input_.shape[dim] if input_.dim() else 1
        return self._reduce_scatter(input_, dim, (size // self.world_size,) * self.world_size, op, timeout_s)

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Combine the ranks' tensors; rank i gets `sizes[i]` of dimension `dim`, in rank order.

        `sizes` holds one count for each rank and is equal on all of them; None splits evenly.
        """
        if sizes is None:
            return self.reduce_scatter(input_, dim, op, timeout_s=timeout_s)
        op = self._check_reduction("reduce_scatterv", input_, op, timeout_s)
        dim = checks.check_dim(dim, input_)
        counts = checks.check_sizes(sizes, self.world_size)
        checks.check_total_size(input_, dim, counts)
        return self._reduce_scatter(input_, dim, counts, op, timeout_s)

    def all_reduce_add_rms_norm(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        timeout_s: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the ranks' tensors, add `residual`, and normalise each row by its root mean square.

        The bits are those of `all_reduce`, `+` and `rms_norm` one after the other, each of which rounds once to
        the dtype: which of them an implementation fuses cannot be seen.

        Args:
            input_: [tokens, hidden] of float32, float16 or bfloat16.
            residual: Of the input's shape and dtype; equal on all ranks where the results shall be.
            weight: [hidden], of the input's dtype.
            eps: Added to the mean of the squares; at least 0.
            timeout_s: Deadline in seconds.

        Returns:
            (the normalised rows, `all_reduce(input_) + residual`), both new, also in a group of one.
        """
        name = "all_reduce_add_rms_norm"
        rms_norm.check_arguments(input_, residual, weight, eps, self.device, name)
        checks.check_timeout(timeout_s)
        return self._all_reduce_add_rms_norm(input_, residual, weight, eps, timeout_s)

    # ------------------------------------------------------------------ moving data

    def all_gather(
        self, input_: torch.Tensor, dim: int = -1, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order; every rank gets the result."""
        self._check_call("all_gather", input_, timeout_s)
        return self._concatenated(input_, dim, None, timeout_s)

    @overload
    def all_gatherv(
        self,
        input_: torch.Tensor,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor: ...

    @overload
    def all_gatherv(
        self,
        input_: Sequence[torch.Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> list[torch.Tensor]: ...

    def all_gatherv(
        self,
        input_: torch.Tensor | Sequence[torch.Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the ranks' tensors along `dim`, where rank i brings `sizes[i]`.

        Args:
            input_: A tensor, or a sequence of tensors that share `sizes`; a sequence gives a list.
            dim: Where to concatenate.
            sizes: One count for each rank, equal on all of them; None when all bring the same.
            timeout_s: Deadline of each tensor in seconds.
        """
        tensors = (
            [input_] if isinstance(input_, torch.Tensor) else checks.check_tensors(input_, "all_gatherv")
        )
        checks.check_timeout(timeout_s)
        counts = None if sizes is None else checks.check_sizes(sizes, self.world_size)
        for tensor in tensors:
            checks.check_tensor(tensor, self.device, "all_gatherv")
            at = checks.check_dim(dim, tensor)
            if counts is not None:
                checks.check_own_size(tensor, at, counts, self.rank_in_group)
        if isinstance(input_, torch.Tensor):
            return self._concatenated(input_, dim, counts, timeout_s)

        def stages() -> list[torch.Tensor]:
            return [self._concatenated(tensor, dim, counts, timeout_s) for tensor in tensors]

        return in_parts(self.context.health, Operation("device", "all_gatherv", 0), stages)

    def _concatenated(
        self, tensor: torch.Tensor, dim: int, sizes: Sizes | None, timeout_s: Timeout
    ) -> torch.Tensor:
        """All-gather one tensor; without `sizes` all ranks bring the same."""
        at = checks.check_dim(dim, tensor)
        if sizes is None:
            sizes = (tensor.shape[at] if tensor.dim() else 1,) * self.world_size
        moved = movable(tensor)
        return restored(self._all_gather(moved, at, sizes, timeout_s), moved, tensor)

    def gather(
        self, input_: torch.Tensor, dst: int = 0, dim: int = -1, *, timeout_s: float | None = None
    ) -> torch.Tensor | None:
        """Concatenate the ranks' tensors along `dim` on rank `dst`; the other ranks get None."""
        self._check_call("gather", input_, timeout_s)
        checks.check_rank(dst, self.world_size, "dst")
        at, moved = checks.check_dim(dim, input_), movable(input_)
        result = self._gather(moved, dst, at, timeout_s)
        return None if result is None else restored(result, moved, input_)

    def scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None = None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Split the tensor of rank `src` along `dim`; fill `output` on rank i with the i-th part, and return it.

        As with `torch.distributed.scatter`, the caller makes the output and passes it first: a rank that receives must
        know shape and dtype before anything is sent, and the output may be a view of a larger buffer. The input is one
        tensor, as in the other calls here, where torch takes a list.

        Args:
            output: This rank's part, filled in place: it overlaps neither itself nor the input. The same dtype
                on all ranks, and the same shape but for `sizes[i]` in dimension `dim`.
            input_: On rank `src` all parts one after the other, unchanged; not looked at elsewhere.
            src: The rank that brings `input_`.
            dim: Where the parts lie one after the other; a 0-dim output counts as one of shape [1].
            sizes: One count for each rank, equal on all of them; None when all get the same.
            timeout_s: Deadline in seconds.
        """
        self._check_call("scatter", output, timeout_s)
        checks.check_rank(src, self.world_size, "src")
        at = checks.check_dim(dim, output)
        own = output.shape[at] if output.dim() else 1
        counts = (own,) * self.world_size if sizes is None else checks.check_sizes(sizes, self.world_size)
        checks.check_own_size(output, at, counts, self.rank_in_group)
        checks.check_writable(output, "scatter")
        source = None
        if self.rank_in_group == src:
            checks.check_tensor(input_, self.device, "scatter")
            source = cast("torch.Tensor", input_)
            checks.check_scattered(source, output, at, counts)
            source = movable(source)
        self._scatter(movable(output), source, src, at, counts, timeout_s)
        return output

    def all_to_all(
        self,
        input_: torch.Tensor,
        dim: int = 0,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Send the i-th part of `input_` along `dim` to rank i; return the parts received, in rank order.

        As `torch.distributed.all_to_all_single`, with a new result, and along any dimension.

        Args:
            input_: The same dtype on all ranks, and the same shape but for dimension `dim`.
            dim: Where the parts lie one after the other.
            send_sizes: How much of dimension `dim` goes to each rank; torch's `input_split_sizes`.
            recv_sizes: How much of it comes from each rank, `send_sizes[this rank]` of that rank; torch's
                `output_split_sizes`. Both or neither are given; without them all parts of all ranks are equal.
            timeout_s: Deadline in seconds.

        Returns:
            A new tensor of the input's shape, with `sum(recv_sizes)` in dimension `dim`.
        """
        self._check_call("all_to_all", input_, timeout_s)
        at = checks.check_dim(dim, input_)
        sent, received = checks.check_exchange_sizes(
            input_, at, send_sizes, recv_sizes, self.rank_in_group, self.world_size
        )
        moved = movable(input_)
        return restored(self._all_to_all(moved, at, sent, received, timeout_s), moved, input_)

    def broadcast(
        self, tensor: torch.Tensor, src: int = 0, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Fill `tensor` on every rank with that of rank `src`; return `tensor`.

        In place: `tensor` must not overlap itself, which is refused on every rank, `src` too.
        """
        self._check_call("broadcast", tensor, timeout_s)
        checks.check_rank(src, self.world_size, "src")
        checks.check_writable(tensor, "broadcast")
        moved = movable(tensor)
        return restored(self._broadcast(moved, src, timeout_s), moved, tensor)

    def send(self, tensor: torch.Tensor, dst: int | None = None, *, timeout_s: float | None = None) -> None:
        """Send `tensor` to rank `dst` (the next one by default); return when its memory may be reused."""
        self._check_call("send", tensor, timeout_s)
        peer = self._peer(dst, 1, "dst")
        self._send(movable(tensor), peer, timeout_s)

    def recv(
        self,
        size: Sequence[int],
        dtype: torch.dtype,
        src: int | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Receive a new tensor of shape `size` and `dtype` from rank `src` (the previous one by default).

        Blocks without limit when `timeout_s` is None, but wakes when a peer dies or the group is closed.
        """
        shape, dtype = checks.check_shape(size), checks.check_dtype(dtype)
        checks.check_timeout(timeout_s)
        src = self._peer(src, -1, "src")
        return self._recv(shape, dtype, src, timeout_s)

    def isend(
        self, tensor: torch.Tensor, dst: int | None = None, *, timeout_s: float | None = None
    ) -> Handle:
        """Start to send `tensor`, which must not be changed until the handle has been waited for."""
        self._check_call("send", tensor, timeout_s)
        peer = self._peer(dst, 1, "dst")
        return self._isend(movable(tensor), peer, timeout_s)

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, *, timeout_s: float | None = None
    ) -> Handle:
        """Start to receive into `tensor`, which is filled once the handle has been waited for.

        `tensor` must not overlap itself, and must not be touched meanwhile.
        """
        self._check_call("recv", tensor, timeout_s)
        checks.check_writable(tensor, "recv")
        peer = self._peer(src, -1, "src")
        return self._irecv(movable(tensor), peer, timeout_s)

    # ------------------------------------------------------------------ life

    def path(self, operation: str, nbytes: int, dtype: torch.dtype) -> CallPath:
        """Return how this communicator carries a call, without making it: equal on all ranks. Not collective.

        Args:
            operation: Name of a method, such as "all_reduce".
            nbytes: Bytes of this rank's input.
            dtype: Its dtype.
        """
        del operation, nbytes, dtype
        return CallPath(self.algorithm, "this communicator has one algorithm")

    @contextmanager
    def capture(self, stream: Any) -> Iterator[None]:
        """Make calls on `stream` within the context ones that a graph can hold. Collective, at both ends.

        It does nothing where there are no graphs. Graphs may be replayed once the context has been left.
        """
        del stream
        yield

    def check(self) -> None:
        """Raise if a call that was queued earlier has failed since. Not collective.

        Results that are queued on a stream are valid once it was synchronized and a later `check` did not raise.
        """

    @contextmanager
    def group(self) -> Iterator[None]:
        """Queue the calls made within the context as one, where that is faster; results are there when it is left.

        A communicator that collects calls (`is_collecting`) queues none of them before that. Collectives with
        `async_op` are therefore refused within the context, and handles of transfers are waited for after it.
        """
        yield

    @property
    def is_collecting(self) -> bool:
        """Return whether calls are collected now, and queued when the context of `group` is left."""
        return False

    def expert_exchange(self, *, may_build: bool = True) -> ExpertExchange | None:
        """Return what dispatches and combines without any count on the host, or None where nothing does.

        The first call of a group is collective, and the answer is the same on all ranks. A call without
        `may_build` does not count as the first: until there has been one, it returns None.
        """
        del may_build
        return None

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of any content on the device, in memory that suits this communicator. Not collective."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def prepare_buffers(self, message_bytes: int) -> None:
        """Reserve what messages of up to `message_bytes` bytes need. Collective; a hint, not a limit."""
        del message_bytes

    def end_calls(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` for queued calls, then end those that would keep the device waiting longer.

        For several communicators that are destroyed together: `destroy` of one may wait for everything on the device.
        Not collective, idempotent, legal in any state, raises nothing. Calls afterwards may raise `ClosedError`.
        """
        del timeout_s

    def check_device(self) -> None:
        """Raise if the device has failed, so that this process cannot go on with it. Not collective; does not wait.

        Raises:
            CudaError: It has.
        """

    def quiesce(self, timeout_s: float) -> None:
        """Wait until nothing runs on the device any more, and let go of the peers' memory; `destroy` follows.

        For groups whose ranks end them together, behind `end_calls` of all of them: *The end of an epoch* in DESIGN.md.
        Not collective, idempotent. *Blocks* up to about `timeout_s`.

        Raises:
            CudaError: The device has failed, or a capture hides what it does. Memory that a kernel may use stays.
            CommTimeoutError: The device has not come to rest in time. As above.
        """
        del timeout_s

    def met(self, ranks: Collection[int]) -> None:
        """Take note that these global ranks have let go of this rank's memory, which `destroy` may then free."""
        del ranks

    @abstractmethod
    def destroy(self) -> None:
        """Release everything. Idempotent, legal in any state, bounded to seconds."""

    # ------------------------------------------------------------------ to be implemented, with `destroy`

    @abstractmethod
    def _all_gather(self, input_: torch.Tensor, dim: int, sizes: Sizes, timeout_s: Timeout) -> torch.Tensor:
        """Concatenate along `dim`, where rank i brings `sizes[i]`; a 0-dim input counts as one of shape [1]."""

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> torch.Tensor:
        """Fill `tensor` with that of rank `src`; return `tensor`."""

    @abstractmethod
    def _isend(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> Handle:
        """Start to send; the handle owns what the transfer needs."""

    @abstractmethod
    def _irecv(self, tensor: torch.Tensor, src: int, timeout_s: float | None) -> Handle:
        """Start to receive into `tensor`, which may be non-contiguous.

        Without `timeout_s` the handle waits without limit, not until the group's deadline.
        """

    # ------------------------------------------------------------------ made of the above, unless overridden
    # The price is more passes over memory, or bytes that ranks receive and drop.

    def _all_reduce(self, input_: torch.Tensor, op: ReduceOperation, timeout_s: float | None) -> torch.Tensor:
        rows = self._all_gather(input_.detach().reshape(1, -1), 0, (1,) * self.world_size, timeout_s)
        return reduce_in_rank_order(list(rows), op).view(input_.shape)

    def _reduce_scatter(
        self, input_: torch.Tensor, dim: int, sizes: Sizes, op: ReduceOperation, timeout_s: Timeout
    ) -> torch.Tensor:
        whole = self._all_reduce(input_.reshape(input_.shape or 1), op, timeout_s)
        start, size = sum(sizes[: self.rank_in_group]), sizes[self.rank_in_group]
        # A copy even if the part is contiguous: a view would keep the whole alive.
        return whole.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)

    def _gather(self, input_: torch.Tensor, dst: int, dim: int, timeout_s: Timeout) -> torch.Tensor | None:
        size = input_.shape[dim] if input_.dim() else 1
        result = self._all_gather(input_, dim, (size,) * self.world_size, timeout_s)
        return result if self.rank_in_group == dst else None

    def _all_reduce_add_rms_norm(
        self,
        input_: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rms_norm.add_rms_norm(self._all_reduce(input_, SUM, timeout_s), residual, weight, eps)

    def _reduce(
        self, input_: torch.Tensor, dst: int, op: ReduceOperation, timeout_s: float | None
    ) -> torch.Tensor | None:
        result = self._all_reduce(input_, op, timeout_s)
        return result if self.rank_in_group == dst else None

    def _scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None,
        src: int,
        dim: int,
        sizes: tuple[int, ...],
        timeout_s: float | None,
    ) -> None:
        """Fill `output`. `input_` is None on all ranks but `src`; a 0-dim tensor counts as one of shape [1]."""
        shape = list(output.shape) or [1]
        shape[dim] = sum(sizes)
        # A copy, because it may be impossible to write to the input.
        whole = output.new_empty(shape)
        if input_ is not None:
            whole.copy_(input_.detach().reshape(shape))
        self._broadcast(whole, src, timeout_s)
        rank = self.rank_in_group
        fill(output, whole.narrow(dim, sum(sizes[:rank]), sizes[rank]))

    def _all_to_all(
        self, input_: torch.Tensor, dim: int, send_sizes: Sizes, recv_sizes: Sizes, timeout_s: Timeout
    ) -> torch.Tensor:
        source = input_.detach().reshape(input_.shape or 1)
        own = torch.tensor([[*send_sizes, *recv_sizes]], dtype=torch.int64, device=self.device)

        def stages() -> tuple[list[list[int]], torch.Tensor]:
            table = self._all_gather(own, 0, (1,) * self.world_size, timeout_s).tolist()
            checks.check_exchange_table(self.context.health.where("all_to_all"), self.context.ranks, table)
            sent = [row[: self.world_size] for row in table]
            return sent, self._all_gather(source, dim, tuple(map(sum, sent)), timeout_s)

        sent, wholes = in_parts(self.context.health, Operation("device", "all_to_all", 0), stages)
        rank, parts, start = self.rank_in_group, [], 0
        for row in sent:
            parts.append(wholes.narrow(dim, start + sum(row[:rank]), row[rank]))
            start += sum(row)
        return torch.cat(parts, dim)

    def _send(self, tensor: torch.Tensor, dst: int, timeout_s: float | None) -> None:
        self._isend(tensor, dst, timeout_s).wait()

    def _recv(self, shape: tuple[int, ...], dtype: torch.dtype, src: int, timeout_s: Timeout) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        self._irecv(movable(tensor), src, timeout_s).wait()
        return tensor

    # ------------------------------------------------------------------ helpers

    def _check_call(self, name: str, tensor: torch.Tensor, timeout_s: float | None) -> None:
        checks.check_tensor(tensor, self.device, name)
        checks.check_timeout(timeout_s)

    def _check_reduction(
        self, name: str, tensor: torch.Tensor, op: object, timeout_s: float | None
    ) -> ReduceOperation:
        checks.check_tensor(tensor, self.device, name)
        checks.check_timeout(timeout_s)
        operation = reduce_operation(op)
        check_reducible(tensor.dtype, operation)
        return operation

    def _peer(self, rank: int | None, step: int, name: str) -> int:
        if rank is None:
            if self.world_size == 1:
                raise UsageError(f"{name}: a group of one has no other rank")
            return (self.rank_in_group + step) % self.world_size
        return checks.check_peer(rank, self.rank_in_group, self.world_size, name)


__all__ = ["SUM", "CommunicatorContext", "DeviceCommunicator", "Sizes", "Timeout", "movable_dtype"]
