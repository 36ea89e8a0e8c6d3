"""The tensor collectives of a group: validated by the contract of `DeviceCommunicator`, and routed to it."""

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


class TensorCollectives(TensorReductions, CoalescedCollectives, ExpertParallel):
    """Collectives on tensors.

    Every rank of the group calls each method, in the same order, with equal shapes, dtypes and arguments,
    from one thread at a time. `src` and `dst` are ranks in the group. `timeout_s` is the deadline in
    seconds, by default the group's. All raise `UsageError` before anything is sent, after which the group
    is intact; `CommTimeoutError`, `PeerLostError` or `NativeError` after which it is broken; and
    `GroupBrokenError` at once if it was broken before.

    With `async_op=True` each returns a `CallHandle` at once, and goes on beside the caller's computations; its `wait`
    returns the result, or raises what the call would have raised. Tensors must not be changed, nor their results
    read, before that. Calls of a group are carried out in the order in which they were made, and one without
    `async_op` waits for those that are open: so the order is the same on all ranks. Point to point, objects that are
    broadcast and queues do not wait. On an accelerator the call is queued on the current stream, as without.

    `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` and `all_reduce_add_rms_norm` can stand in a function
    that `torch.compile` compiles, also with `fullgraph=True`: each becomes one operation of the graph (`compile_ops`),
    with the same result. There too no gradient flows through them. What a call refuses while it is traced,
    `torch.compile` reports in an error of its own.
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
        self, input_: torch.Tensor, dim: int = -1, *, timeout_s: float | None = None, async_op: bool = False
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Concatenate the ranks' tensors along `dim`, in rank order.

        Args:
            input_: Equal shape and dtype on all ranks; a 0-dim tensor counts as one of shape [1].
            dim: From -input_.dim() to input_.dim() - 1.
            timeout_s: Deadline in seconds.
            async_op: Return a handle at once; see the class.

        Returns:
            A new contiguous tensor whose dimension `dim` is `world_size` times the input's. In a group of
            one: the input itself.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.all_gather(self, input_, dim, timeout_s)
        there = self.device_communicator
        return self._calls.run(
            "all_gather", there.all_gather, input_, dim, timeout_s=timeout_s, async_op=async_op
        )

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
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | list[torch.Tensor] | CallHandle[torch.Tensor] | CallHandle[list[torch.Tensor]]:
        """Concatenate along `dim` what may have another size there on each rank.

        Args:
            input_: A tensor, or a sequence of tensors, for which the result is a list.
            dim: Where to concatenate.
            sizes: `sizes[i]` is the size of dimension `dim` on rank i, equal on all ranks; None when all
                bring the same.
            timeout_s: Deadline in seconds, for each tensor.
            async_op: Return a handle at once; see the class.

        Returns:
            New contiguous tensors with `sum(sizes)` in dimension `dim`. In a group of one: the input.
        """
        # The overloads say which result belongs to which input.
        gather: Callable[..., Any] = self.device_communicator.all_gatherv
        gathered: Any = self._calls.run(
            "all_gatherv", gather, input_, dim, sizes, timeout_s=timeout_s, async_op=async_op
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
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor | None] | None:
        """Concatenate the ranks' tensors along `dim` on rank `dst`.

        Returns:
            On rank `dst` a new contiguous tensor, elsewhere None. In a group of one: the input itself.
        """
        there = self.device_communicator
        return self._calls.run(
            "gather", there.gather, input_, dst, dim, timeout_s=timeout_s, async_op=async_op
        )

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
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Split the tensor of rank `src` along `dim` over the ranks, in rank order; the opposite of `gather`.

        The order of the arguments is that of `torch.distributed.scatter`; the input is one tensor, not a list.

        Args:
            output: Filled with this rank's part, in place, also in a group of one. It overlaps neither itself nor the
                input; on all ranks the same dtype, and the same shape but for `sizes`.
            input_: On rank `src` a tensor of the output's dtype and shape, with the sum of all sizes in dimension
                `dim`; it is unchanged. Elsewhere it is not looked at and may be None.
            src: The rank that brings `input_`.
            dim: The dimension that is split.
            sizes: `sizes[i]` is the size of dimension `dim` of the output of rank i, equal on all ranks; None when
                all get the same.
            timeout_s: Deadline in seconds.
            async_op: Return a handle at once; see the class.

        Returns:
            `output`.
        """
        there = self.device_communicator
        return self._calls.run(
            "scatter", there.scatter, output, input_, src, dim, sizes, timeout_s=timeout_s, async_op=async_op
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
        timeout_s: float | None = None,
        async_op: bool = False,
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Send the i-th part of `input_` to rank i, and get this rank's part of every rank's.

        As `torch.distributed.all_to_all_single`, with a new result.

        Args:
            input_: The same dtype on all ranks, and the same shape but for dimension `dim`.
            dim: The dimension that is split, and along which the result is concatenated, in rank order.
            send_sizes: How much of dimension `dim` goes to each rank (torch: `input_split_sizes`).
            recv_sizes: How much comes from each rank (torch: `output_split_sizes`): on rank j `recv_sizes[i]` is what
                `send_sizes[j]` is on rank i. Without both, the parts of all ranks are equal.
            timeout_s: Deadline in seconds.
            async_op: Return a handle at once; see the class.

        Returns:
            A new contiguous tensor with `sum(recv_sizes)` in dimension `dim`. In a group of one: the input itself.

        Raises:
            DisagreementError: On CPU tensors: sizes sent and expected differ. On every rank, before anything is
                moved; the group is intact.
        """
        if is_dynamo_compiling() and not async_op:
            return compile_ops.all_to_all(self, input_, dim, send_sizes, recv_sizes, timeout_s)
        there = self.device_communicator
        return self._calls.run(
            "all_to_all",
            there.all_to_all,
            input_,
            dim,
            send_sizes,
            recv_sizes,
            timeout_s=timeout_s,
            async_op=async_op,
        )

    @overload
    def broadcast(self, input_: torch.Tensor, src: int = 0, **how: Unpack[Blocking]) -> torch.Tensor: ...

    @overload
    def broadcast(
        self, input_: torch.Tensor, src: int = 0, **how: Unpack[Async]
    ) -> CallHandle[torch.Tensor]: ...

    def broadcast(
        self, input_: torch.Tensor, src: int = 0, *, timeout_s: float | None = None, async_op: bool = False
    ) -> torch.Tensor | CallHandle[torch.Tensor]:
        """Fill `input_` on every rank with rank `src`'s, in place; return it.

        As it writes to its input, it is no operation of a graph: what `torch.compile` compiles takes
        `functional.broadcast`, whose result is new.
        """
        there = self.device_communicator
        return self._calls.run(
            "broadcast", there.broadcast, input_, src, timeout_s=timeout_s, async_op=async_op
        )

    @overload
    def barrier(self, timeout_s: float | None = None, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def barrier(self, timeout_s: float | None = None, *, async_op: Literal[True]) -> CallHandle[None]: ...

    def barrier(self, timeout_s: float | None = None, *, async_op: bool = False) -> CallHandle[None] | None:
        """Return once every rank has called this. Over the host plane: no device is touched."""
        return self._calls.run(
            "barrier", self._host.barrier, timeout_s=timeout_s, async_op=async_op, on_host=True
        )

    def monitored_barrier(self, timeout_s: float | None = None, wait_all_ranks: bool = True) -> None:
        """As `barrier`; when the deadline passes every rank that came learns all ranks that did not.

        Args:
            timeout_s: Deadline in seconds.
            wait_all_ranks: As in torch; without it the first late rank alone would do. All are always named.

        Raises:
            CommTimeoutError: `.missing` holds exactly the late ranks; the group is broken.
        """
        del wait_all_ranks
        self.barrier(timeout_s)
