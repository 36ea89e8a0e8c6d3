"""The tensor collectives of a group, which its `DeviceCommunicator` checks and carries out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack, overload

import torch
from torch.compiler import is_dynamo_compiling

from coordinator.calls import Async, Blocking
from coordinator.collectives.coalesced import CoalescedCollectives
from coordinator.collectives.expert_parallel import ExpertParallel
from coordinator.collectives.tensor_reductions import TensorReductions
from coordinator.torch_interop import compile_ops
from device_comm.async_calls import CallHandle
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout, seconds


class TensorCollectives(TensorReductions, CoalescedCollectives, ExpertParallel):
    """Collectives on tensors.

    Every rank of the group calls each method, in the same order, with equal shapes, dtypes and arguments, from one
    thread at a time. `src` and `dst` are ranks in the group. `timeout_s` is the deadline in seconds, by default the
    group's. All methods raise `UsageError` before anything is sent, and the group stays intact. They raise
    `CommTimeoutError`, `PeerLostError` or `NativeError`, after which the group is broken, and `GroupBrokenError` at
    once if it was broken before.

    With `async_op=True` each method returns a `CallHandle` at once, and the call runs beside the caller's computations.
    The handle's `wait` returns the result, or raises what the call would have raised. Until then do not change the
    tensors or read the results. A group makes its calls in the order in which the caller issued them, and a call
    without `async_op` waits for the open ones, because the order must be the same on all ranks. Point-to-point calls,
    object broadcasts and queues do not wait. On an accelerator the current stream carries the call in either case.

    `torch.compile` can compile functions that call `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and
    `all_reduce_add_rms_norm`, also with `fullgraph=True`. Each call becomes one operation of the graph (see
    `compile_ops`) with the same result, and no gradient flows through it, as without a compiler. If a call is refused
    while it is traced, `torch.compile` raises an error of its own.
    """

    def _all_reduce_out_place(self, input_: torch.Tensor) -> torch.Tensor:
        """Return `all_reduce(input_)`; engines that subclass the group call it by this name."""
        return self.all_reduce(input_)

    def _all_gather_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `all_gather(input_, dim)`; see `_all_reduce_out_place`."""
        return self.all_gather(input_, dim)

    def _reduce_scatter_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `reduce_scatter(input_, dim)`; see `_all_reduce_out_place`."""
        return self.reduce_scatter(input_, dim)

    @overload
    def all_gather(self, input_: torch.Tensor, dim: int = -1, **how: Unpack[Blocking]) -> torch.Tensor: ...

    @overload
    def all_gather(
        self, input_: torch.Tensor, dim: int = -1, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    def all_gather(
        self, input_: torch.Tensor, dim: int = -1, *, timeout_s: AnyTimeout = None, async_op: bool = False
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Concatenate the ranks' tensors along `dim`, in rank order.

        Args:
            input_: A tensor of equal shape and dtype on all ranks; a 0-dim tensor counts as one of shape [1].
            dim: A dimension from -input_.dim() to input_.dim() - 1.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            A new contiguous tensor whose dimension `dim` is `world_size` times the input's. A group of one returns the
            input itself.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.trace("all_gather", self, input_, timeout_s, dim=dim)
        make = self.device_communicator.all_gather
        return self._calls.run("all_gather", make, input_, dim, timeout_s=timeout_s, async_op=async_op)

    @overload
    def all_gatherv(
        self, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[Blocking]
    ) -> torch.Tensor: ...

    @overload
    def all_gatherv(
        self,
        input_: Sequence[torch.Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        **how: Unpack[Blocking],
    ) -> list[torch.Tensor]: ...

    @overload
    def all_gatherv(
        self, input_: torch.Tensor, dim: int = 0, sizes: Sequence[int] | None = None, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    @overload
    def all_gatherv(
        self,
        input_: Sequence[torch.Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        **how: Unpack[Async],
    ) -> CallHandle[list[torch.Tensor]]: ...

    def all_gatherv(
        self,
        input_: torch.Tensor | Sequence[torch.Tensor],
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | list[torch.Tensor] | CallHandle[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Concatenate the ranks' tensors along `dim`, in which their sizes may differ.

        Args:
            input_: A tensor, or a sequence of tensors, for which the result is a list.
            dim: The dimension along which the result is concatenated.
            sizes: `sizes[i]` is the size of dimension `dim` on rank i; equal on all ranks. None means that all ranks
                have the same size.
            timeout_s: Deadline in seconds for each tensor.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            New contiguous tensors with `sum(sizes)` in dimension `dim`. A group of one returns the input itself.
        """
        # The overloads define which result belongs to which input.
        make: Callable[..., Any] = self.device_communicator.all_gatherv
        gathered: Any = self._calls.run(
            "all_gatherv", make, input_, dim, sizes, timeout_s=timeout_s, async_op=async_op
        )
        return gathered  # type: ignore[no-any-return]

    @overload
    def gather(
        self, input_: torch.Tensor, dst: int = 0, dim: int = -1, **how: Unpack[Blocking]
    ) -> torch.Tensor | None: ...

    @overload
    def gather(
        self, input_: torch.Tensor, dst: int = 0, dim: int = -1, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor | None]: ...

    def gather(
        self,
        input_: torch.Tensor,
        dst: int = 0,
        dim: int = -1,
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor | None] | None:
        """Concatenate the ranks' tensors along `dim` on rank `dst`.

        Returns:
            On rank `dst` a new contiguous tensor, elsewhere None. A group of one returns the input itself.
        """
        make = self.device_communicator.gather
        return self._calls.run("gather", make, input_, dst, dim, timeout_s=timeout_s, async_op=async_op)

    @overload
    def scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None = None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        **how: Unpack[Blocking],
    ) -> torch.Tensor: ...

    @overload
    def scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None = None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        **how: Unpack[Async],
    ) -> CallHandle[torch.Tensor]: ...

    def scatter(
        self,
        output: torch.Tensor,
        input_: torch.Tensor | None = None,
        src: int = 0,
        dim: int = 0,
        sizes: Sequence[int] | None = None,
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Split the tensor of rank `src` along `dim` over the ranks, in rank order: the opposite of `gather`.

        The arguments have the order of `torch.distributed.scatter`, but the input is one tensor, not a list.

        Args:
            output: The tensor that receives this rank's part, also in a group of one. It overlaps neither itself nor
                the input. The dtype is equal on all ranks, and so is the shape, except for what `sizes` states.
            input_: On rank `src` a tensor of the output's dtype and shape, with the sum of all sizes in dimension
                `dim`; it does not change. Other ranks ignore it, and may pass None.
            src: The rank that provides `input_`.
            dim: The dimension that is split.
            sizes: `sizes[i]` is the size of dimension `dim` of rank i's output; equal on all ranks. None splits evenly.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            `output`.
        """
        make = self.device_communicator.scatter
        return self._calls.run(
            "scatter", make, output, input_, src, dim, sizes, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def all_to_all(
        self,
        input_: torch.Tensor,
        dim: int = 0,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        **how: Unpack[Blocking],
    ) -> torch.Tensor: ...

    @overload
    def all_to_all(
        self,
        input_: torch.Tensor,
        dim: int = 0,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        **how: Unpack[Async],
    ) -> CallHandle[torch.Tensor]: ...

    def all_to_all(
        self,
        input_: torch.Tensor,
        dim: int = 0,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        timeout_s: AnyTimeout = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Send the i-th part of `input_` to rank i, and receive this rank's part from every rank.

        Unlike `torch.distributed.all_to_all_single`, this returns a new tensor.

        Args:
            input_: A tensor whose dtype is equal on all ranks, and whose shape differs only in dimension `dim`.
            dim: The dimension that is split, and along which the result is concatenated, in rank order.
            send_sizes: How much of dimension `dim` goes to each rank (torch: `input_split_sizes`).
            recv_sizes: How much comes from each rank (torch: `output_split_sizes`). `recv_sizes[i]` on rank j equals
                `send_sizes[j]` on rank i. Pass both or neither; without them all parts are equal.
            timeout_s: Deadline in seconds.
            async_op: Whether to return a handle at once; see the class.

        Returns:
            A new contiguous tensor with `sum(recv_sizes)` in dimension `dim`. A group of one returns the input itself.

        Raises:
            DisagreementError: The sizes of CPU tensors that a rank sends differ from those that another rank expects.
                Every rank raises it before anything is moved; the group is intact.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.trace(
                "all_to_all", self, input_, timeout_s, dim=dim, send_sizes=send_sizes, recv_sizes=recv_sizes
            )
        name, make = "all_to_all", self.device_communicator.all_to_all
        return self._calls.run(
            name, make, input_, dim, send_sizes, recv_sizes, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def broadcast(self, input_: torch.Tensor, src: int = 0, **how: Unpack[Blocking]) -> torch.Tensor: ...

    @overload
    def broadcast(
        self, input_: torch.Tensor, src: int = 0, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    def broadcast(
        self, input_: torch.Tensor, src: int = 0, *, timeout_s: AnyTimeout = None, async_op: bool = False
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Overwrite `input_` on every rank with the values of rank `src`; return `input_`.

        A compiled graph cannot hold this call, because it writes to its input. In functions that `torch.compile`
        compiles, call `functional.broadcast`, which returns a new tensor.
        """
        make = self.device_communicator.broadcast
        return self._calls.run("broadcast", make, input_, src, timeout_s=timeout_s, async_op=async_op)

    @overload
    def barrier(self, timeout_s: AnyTimeout = None, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def barrier(self, timeout_s: AnyTimeout = None, *, async_op: Literal[True]) -> CallHandle[None]: ...

    def barrier(self, timeout_s: AnyTimeout = None, *, async_op: bool = False) -> CallHandle[None] | None:
        """Return once every rank has called this. It uses the host plane and touches no device."""
        make = self._host.barrier
        if async_op:
            return self._calls.run("barrier", make, timeout_s=timeout_s, async_op=True, on_host=True)
        # Packing the arguments for `run` would take 0.3 us of the 2.3 us of a barrier in shared memory.
        self._calls.enter("barrier")
        try:
            return make(None if timeout_s is None else seconds(timeout_s))
        except UsageError as error:
            self._calls.refuse("barrier", error)
            raise

    def monitored_barrier(self, timeout_s: AnyTimeout = None, wait_all_ranks: bool = True) -> None:
        """Do `barrier`; when the deadline passes, every rank that came learns which ranks did not.

        Args:
            timeout_s: Deadline in seconds.
            wait_all_ranks: As in torch, where False names only the first late rank. Here all are always named.

        Raises:
            CommTimeoutError: `.missing` holds exactly the late ranks; the group is broken.
        """
        del wait_all_ranks
        self.barrier(timeout_s)
