"""Tensors from one rank to another: with tags, from any rank, and in batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, Literal

import torch

from coordinator.collectives.tensor_dicts import TensorDicts
from coordinator.host.plane import refuse_any
from coordinator.host.tags import FIRST_USER_TAG, TENSOR_TAG_COUNT
from device_comm import checks
from device_comm.handles import Handle
from device_comm.health import Operation
from device_comm.movable import movable_dtype
from device_comm.process_group import TENSOR_TAG, dense
from device_comm.stages import in_stages
from shm_broadcast.errors import UsageError
from shm_broadcast.timeouts import AnyTimeout, seconds

_BATCH: Final = Operation("device", "batch_isend_irecv", 0)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class P2POperation:
    """One transfer of `batch_isend_irecv`.

    Attributes:
        verb: Whether this rank sends or receives.
        tensor: The tensor that is sent, or filled.
        peer: The other rank in the group.
        tag: The tag, as in `send`.
    """

    verb: Literal["isend", "irecv"]
    tensor: torch.Tensor
    peer: int
    tag: int = 0


class PointToPoint(TensorDicts):
    """Point-to-point transfers of tensors. Only the sender and the receiver call them, with equal tags.

    Messages between two ranks arrive in the order in which they were sent, separately for each tag. Tensors of tag 0
    take the device plane. Those of other tags pass through the host's memory, whatever their device.
    """

    def send(
        self, tensor: torch.Tensor, dst: int | None = None, *, tag: int = 0, timeout_s: AnyTimeout = None
    ) -> None:
        """Send a tensor to rank `dst`, by default the next one; return when its memory may be reused.

        Rank `dst` calls `recv` with this rank and with the tensor's shape, dtype and tag. On one host a tensor of up to
        512 KiB does not wait for that, and a larger one proceeds while `dst` is in any point-to-point call of the
        group. All ranks may therefore send first and receive afterwards.
        """
        with self._calls.call("send", timeout_s, in_line=False) as limit_s:
            if tag:
                self._isend_tagged(tensor, dst, tag, limit_s).wait()
            else:
                self.device_communicator.send(tensor, dst, timeout_s=limit_s)

    def recv(
        self,
        size: torch.Size | Sequence[int],
        dtype: torch.dtype,
        src: int | None = None,
        *,
        tag: int = 0,
        timeout_s: AnyTimeout = None,
    ) -> torch.Tensor:
        """Receive a tensor from rank `src`, by default the previous one; return a new tensor on this group's device.

        Without `timeout_s` this waits without limit, but ends when a peer dies or the group is destroyed.

        Over Gloo, between hosts, a message is its bytes and nothing is compared, by `irecv` neither: as many bytes are
        taken in the shape and dtype of this call, fewer leave the rest of the tensor as it was, which is undefined in a
        new one, and with more of them Gloo ends this process.

        Raises:
            DisagreementError: On one host: the message has another shape or dtype; the text names both. The next one
                can be received.
        """
        # As `Calls.receive`, which is not called here: its frames and a nested function would take 0.3 us.
        calls = self._calls
        calls.enter("recv", in_line=False)
        try:
            limit_s = None if timeout_s is None else seconds(timeout_s)
            if not tag:
                return self.device_communicator.recv(size, dtype, src, timeout_s=limit_s)
            tensor = torch.empty(
                checks.check_shape(size), dtype=checks.check_dtype(dtype), device=self.device
            )
            into, peer = self._tagged_place(tensor, src)
            self._host.recv_tensor(into, peer, limit_s, self._wire_tag(tag))
            return tensor
        except BaseException as error:
            calls.unwind("recv", error)
            raise

    def recv_any(
        self,
        size: torch.Size | Sequence[int],
        dtype: torch.dtype,
        *,
        tag: int = 0,
        timeout_s: AnyTimeout = None,
    ) -> tuple[torch.Tensor, int]:
        """Receive the next tensor of `tag` from any rank; return (a new tensor, its rank in the group).

        If several tensors have arrived, any of them may come first, but those of one rank come in order, and no rank
        keeps those of the others waiting. Without `timeout_s` this waits without limit, but ends when any rank dies,
        all others have left, or the group is destroyed.

        Raises:
            CapabilityError: The ranks share no memory; the group is intact.
            DisagreementError: The message has another shape or dtype. It is lost; the group is intact.
        """
        return self._recv_any(size, dtype, None, tag, timeout_s)

    def _recv_any(
        self,
        size: torch.Size | Sequence[int],
        dtype: torch.dtype,
        into: torch.Tensor | None,
        tag: int,
        timeout_s: AnyTimeout,
    ) -> tuple[torch.Tensor, int]:
        """Do `recv_any`, also into a tensor, which is filled before the message is taken."""

        def take(limit_s: float | None) -> tuple[torch.Tensor, int]:
            shape, checked = checks.check_shape(size), checks.check_dtype(dtype)
            if into is not None:
                checks.check_tensor(into, self.device, "recv_any")
                checks.check_writable(into, "recv_any")
            if self.world_size == 1:
                raise UsageError("recv_any: a group of one has no other rank")
            if self.device.type != "cpu":
                raise refuse_any(self._health)
            return self._host.recv_any(shape, checked, self._wire_tag(tag), limit_s, into)

        return self._calls.receive("recv_any", timeout_s, take)

    def isend(
        self, tensor: torch.Tensor, dst: int | None = None, *, tag: int = 0, timeout_s: AnyTimeout = None
    ) -> Handle:
        """Start to send a tensor to rank `dst`, by default the next one.

        Returns:
            A handle that owns the memory. Do not change the tensor before you have waited for the handle. The handle
            may be dropped.
        """
        with self._calls.call("send", timeout_s, in_line=False) as limit_s:
            if tag:
                return self._isend_tagged(tensor, dst, tag, limit_s)
            handle = self.device_communicator.isend(tensor, dst, timeout_s=limit_s)
            self._open_sends.keep(handle)
            return handle

    def irecv(
        self, tensor: torch.Tensor, src: int | None = None, *, tag: int = 0, timeout_s: AnyTimeout = None
    ) -> Handle:
        """Start to receive into `tensor` from rank `src`, by default the previous one.

        Returns:
            A handle. The tensor is filled once the handle has been waited for; do not touch it before. The tensor must
            not overlap itself.
        """

        def start(limit_s: float | None) -> Handle:
            if tag:
                return self._irecv_tagged(tensor, src, tag, limit_s)
            return self.device_communicator.irecv(tensor, src, timeout_s=limit_s)

        # Not as a block: its end could lose the handle, and with it the message.
        return self._calls.receive("recv", timeout_s, start)

    def batch_isend_irecv(self, operations: Sequence[P2POperation]) -> list[Handle]:
        """Start several transfers at once; their order matters only between the same two ranks and with one tag.

        Receives begin first, so that no transfer of a batch waits for another one of the same batch.

        Returns:
            A handle for each operation, in order.

        Raises:
            UsageError: An item is not a valid operation. No transfer has begun.
        """
        with self._calls.call("batch_isend_irecv", in_line=False):
            for each in operations:
                if not isinstance(each, P2POperation) or each.verb not in ("isend", "irecv"):
                    raise UsageError(f"batch_isend_irecv takes operations of type P2POperation, not {each!r}")
                checks.check_tensor(each.tensor, self.device, "batch_isend_irecv")
                checks.check_peer(each.peer, self.rank_in_group, self.world_size, "peer")
                self._wire_tag(each.tag)
                if each.verb == "irecv":
                    checks.check_writable(each.tensor, "batch_isend_irecv")

        def stages() -> list[Handle]:
            handles: dict[int, Handle] = {}
            for verb, start in (("irecv", self.irecv), ("isend", self.isend)):
                for at, each in enumerate(operations):
                    if each.verb == verb:
                        handles[at] = start(each.tensor, each.peer, tag=each.tag)
            return [handles[at] for at in range(len(operations))]

        # The peers of the transfers that were left out would wait for them.
        return in_stages(self._health, _BATCH, stages)

    def _isend_tagged(
        self, tensor: torch.Tensor, dst: int | None, tag: int, timeout_s: float | None
    ) -> Handle:
        checks.check_tensor(tensor, self.device, "send")
        peer, wire = self._neighbour(dst, 1, "dst"), self._wire_tag(tag)
        source = dense(tensor.view(movable_dtype(tensor.dtype))).cpu()
        handle = self._host.isend_tensor(source, peer, timeout_s, wire)
        self._open_sends.keep(handle)
        return handle

    def _irecv_tagged(
        self, tensor: torch.Tensor, src: int | None, tag: int, timeout_s: float | None
    ) -> Handle:
        checks.check_tensor(tensor, self.device, "recv")
        checks.check_writable(tensor, "recv")
        into, peer = self._tagged_place(tensor, src)
        return self._host.irecv_tensor(into, peer, timeout_s, self._wire_tag(tag))

    def _tagged_place(self, tensor: torch.Tensor, src: int | None) -> tuple[torch.Tensor, int]:
        """Return `tensor` as bytes can be moved into it, and from which rank."""
        peer = self._neighbour(src, -1, "src")
        return tensor.detach().view(movable_dtype(tensor.dtype)), peer

    def _wire_tag(self, tag: int) -> int:
        if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < TENSOR_TAG_COUNT:
            raise UsageError(f"tag must be an integer from 0 to {TENSOR_TAG_COUNT - 1}, not {tag!r}")
        return FIRST_USER_TAG + tag if tag else TENSOR_TAG
