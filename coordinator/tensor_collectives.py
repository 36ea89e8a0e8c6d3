"""The tensor collectives of a group: validated by the contract of `DeviceCommunicator`, and routed to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from coordinator.planes import GroupPlanes
from device_comm import checks
from device_comm.base import SUM
from device_comm.reduction import ReduceOperation
from shm_broadcast.errors import UsageError


class TensorCollectives(GroupPlanes):
    """Collectives on tensors.

    Every rank of the group calls each method, in the same order, with equal shapes, dtypes and arguments,
    from one thread at a time. `src` and `dst` are ranks in the group. `timeout_s` is the deadline in
    seconds, by default the group's. All raise `UsageError` before anything is sent, after which the group
    is intact; `CommTimeoutError`, `PeerLostError` or `NativeError` after which it is broken; and
    `GroupBrokenError` at once if it was broken before.
    """

    def all_reduce(
        self, input_: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Combine the ranks' tensors with `op`, in rank order.

        Args:
            input_: Any shape and any dtype that `op` has a meaning for; equal on all ranks.
            op: SUM, MEAN, PRODUCT, MIN or MAX.
            timeout_s: Deadline in seconds.

        Returns:
            A new tensor of the input's shape and dtype with the same bits on every rank; the input is
            unchanged. In a group of one: the input itself.
        """
        self._health.check_usable("all_reduce")
        return self.device_communicator.all_reduce(input_, op, timeout_s=timeout_s)

    def _all_reduce_out_place(self, input_: torch.Tensor) -> torch.Tensor:
        """Return `all_reduce(input_)`; engines that subclass the group call it by this name."""
        return self.all_reduce(input_)

    def _all_gather_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `all_gather(input_, dim)`; see `_all_reduce_out_place`."""
        return self.all_gather(input_, dim)

    def _reduce_scatter_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `reduce_scatter(input_, dim)`; see `_all_reduce_out_place`."""
        return self.reduce_scatter(input_, dim)

    def all_reduce_(
        self, tensor: torch.Tensor, op: ReduceOperation = SUM, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """As `all_reduce`, in place; return `tensor`, which must not overlap itself."""
        self._health.check_usable("all_reduce_")
        return self.device_communicator.all_reduce_(tensor, op, timeout_s=timeout_s)

    def all_gather(
        self, input_: torch.Tensor, dim: int = -1, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Concatenate the ranks' tensors along `dim`, in rank order.

        Args:
            input_: Equal shape and dtype on all ranks; a 0-dim tensor counts as one of shape [1].
            dim: From -input_.dim() to input_.dim() - 1.
            timeout_s: Deadline in seconds.

        Returns:
            A new contiguous tensor whose dimension `dim` is `world_size` times the input's. In a group of
            one: the input itself.
        """
        self._health.check_usable("all_gather")
        return self.device_communicator.all_gather(input_, dim, timeout_s=timeout_s)

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
        """Concatenate along `dim` what may have another size there on each rank.

        Args:
            input_: A tensor, or a sequence of tensors, for which the result is a list.
            dim: Where to concatenate.
            sizes: `sizes[i]` is the size of dimension `dim` on rank i, equal on all ranks; None when all
                bring the same.
            timeout_s: Deadline in seconds, for each tensor.

        Returns:
            New contiguous tensors with `sum(sizes)` in dimension `dim`. In a group of one: the input.
        """
        self._health.check_usable("all_gatherv")
        return self.device_communicator.all_gatherv(input_, dim, sizes, timeout_s=timeout_s)

    def reduce(
        self,
        input_: torch.Tensor,
        dst: int = 0,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor | None:
        """Combine the ranks' tensors with `op`, in rank order, on rank `dst`.

        Unlike `torch.distributed.reduce`, which works in place.

        Args:
            input_: As in `all_reduce`; unchanged on every rank.
            dst: The rank that gets the result.
            op: SUM, MEAN, PRODUCT, MIN or MAX.
            timeout_s: Deadline in seconds.

        Returns:
            On rank `dst` a new tensor of the input's shape and dtype with the bits that `all_reduce` gives, elsewhere
            None. In a group of one: the input itself.
        """
        self._health.check_usable("reduce")
        return self.device_communicator.reduce(input_, dst, op, timeout_s=timeout_s)

    def reduce_scatter(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Combine the ranks' tensors and keep this rank's part.

        Args:
            input_: Equal shape and dtype on all ranks; dimension `dim` must be divisible by `world_size`.
            dim: The dimension that is split, in rank order.
            op: SUM, MEAN, PRODUCT, MIN or MAX.
            timeout_s: Deadline in seconds.

        Returns:
            A new contiguous tensor whose dimension `dim` is the input's divided by `world_size`. In a
            group of one: the input itself.
        """
        self._health.check_usable("reduce_scatter")
        return self.device_communicator.reduce_scatter(input_, dim, op, timeout_s=timeout_s)

    def reduce_scatterv(
        self,
        input_: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `reduce_scatter`, where rank i keeps `sizes[i]` of dimension `dim`; None splits evenly."""
        self._health.check_usable("reduce_scatterv")
        return self.device_communicator.reduce_scatterv(input_, dim, sizes, op, timeout_s=timeout_s)

    def reduce_scatterv_into_output(
        self,
        input_: torch.Tensor,
        output: torch.Tensor,
        dim: int = -1,
        sizes: Sequence[int] | None = None,
        op: ReduceOperation = SUM,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """As `reduce_scatterv`, into `output`, which is returned.

        `output` has the shape and dtype of the result and does not overlap the input. In a group of one
        too the result is copied into it.
        """
        self._health.check_usable("reduce_scatterv_into_output")
        return self.device_communicator.reduce_scatterv_into_output(
            input_, output, dim, sizes, op, timeout_s=timeout_s
        )

    def gather(
        self, input_: torch.Tensor, dst: int = 0, dim: int = -1, *, timeout_s: float | None = None
    ) -> torch.Tensor | None:
        """Concatenate the ranks' tensors along `dim` on rank `dst`.

        Returns:
            On rank `dst` a new contiguous tensor, elsewhere None. In a group of one: the input itself.
        """
        self._health.check_usable("gather")
        return self.device_communicator.gather(input_, dst, dim, timeout_s=timeout_s)

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

        Returns:
            `output`.
        """
        self._health.check_usable("scatter")
        return self.device_communicator.scatter(output, input_, src, dim, sizes, timeout_s=timeout_s)

    def all_to_all(
        self,
        input_: torch.Tensor,
        dim: int = 0,
        send_sizes: Sequence[int] | None = None,
        recv_sizes: Sequence[int] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Send the i-th part of `input_` to rank i, and get this rank's part of every rank's.

        As `torch.distributed.all_to_all_single`, with a new result.

        Args:
            input_: The same dtype on all ranks, and the same shape but for dimension `dim`.
            dim: The dimension that is split, and along which the result is concatenated, in rank order.
            send_sizes: How much of dimension `dim` goes to each rank (torch: `input_split_sizes`).
            recv_sizes: How much comes from each rank (torch: `output_split_sizes`): on rank j `recv_sizes[i]` is what
                `send_sizes[j]` is on rank i. Without both, the parts of all ranks are equal.
            timeout_s: Deadline in seconds.

        Returns:
            A new contiguous tensor with `sum(recv_sizes)` in dimension `dim`. In a group of one: the input itself.

        Raises:
            DisagreementError: On CPU tensors: sizes sent and expected differ. On every rank, before anything is
                moved; the group is intact.
        """
        self._health.check_usable("all_to_all")
        return self.device_communicator.all_to_all(input_, dim, send_sizes, recv_sizes, timeout_s=timeout_s)

    def broadcast(
        self, input_: torch.Tensor, src: int = 0, *, timeout_s: float | None = None
    ) -> torch.Tensor:
        """Fill `input_` on every rank with rank `src`'s, in place; return it."""
        self._health.check_usable("broadcast")
        return self.device_communicator.broadcast(input_, src, timeout_s=timeout_s)

    def send(self, tensor: torch.Tensor, dst: int | None = None, *, timeout_s: float | None = None) -> None:
        """Send a tensor to rank `dst`, by default the next one; return when its memory may be reused.

        Point to point: rank `dst` calls `recv` with this rank, the tensor's shape and dtype. On one host up to
        512 KiB do not wait for that, and larger tensors go on while `dst` is in any point-to-point call of the group,
        so ranks may all send first and receive then.
        """
        self._health.check_usable("send")
        self.device_communicator.send(tensor, dst, timeout_s=timeout_s)

    def recv(
        self,
        size: torch.Size | Sequence[int],
        dtype: torch.dtype,
        src: int | None = None,
        *,
        timeout_s: float | None = None,
    ) -> torch.Tensor:
        """Receive a tensor from rank `src`, by default the previous one, as a new one on this group's device.

        Without `timeout_s` this waits without limit, but wakes when a peer dies or the group is destroyed.
        """
        self._health.check_usable("recv")
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"dtype must be a torch.dtype, not {dtype!r}")
        return self.device_communicator.recv(size, dtype, src, timeout_s=timeout_s)

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this. Over the host plane: no device is touched."""
        self._health.check_usable("barrier")
        checks.check_timeout(timeout_s)
        self._host.barrier(timeout_s)
