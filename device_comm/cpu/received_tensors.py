"""Tensors from the channels between ranks of one host: what arrives is compared with what the receiver expects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from device_comm.cpu.channels import Channels
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from device_comm.outputs import fill
from shm_broadcast.errors import DisagreementError


def expect_tensor(
    received: object, dtype: torch.dtype, shape: Sequence[int], src: int, health: GroupHealth
) -> torch.Tensor:
    """Return what came from rank `src` of the group as a tensor of `dtype` and `shape`, without a copy.

    Raises:
        DisagreementError: Something else came. That message is gone, the group is intact.
    """
    if not isinstance(received, torch.Tensor):
        sent = f"an object of type {type(received).__name__}"
    elif received.dtype == dtype and tuple(received.shape) == tuple(shape):
        return received
    else:
        sent = f"a tensor of shape {list(received.shape)} and dtype {received.dtype}"
    raise DisagreementError(
        f"{health.where('recv')}: rank {health.ranks[src]} sent {sent}, this rank expects a tensor of "
        f"shape {list(shape)} and dtype {dtype}; the message is gone, the next one can be received"
    )


def irecv_into(
    into: torch.Tensor, channels: Channels, src: int, tag: int, timeout_s: float | None, health: GroupHealth
) -> Handle:
    """Start to receive into a tensor of any layout and device; the handle raises as `expect_tensor`."""
    return channels.irecv("device", "recv", src, tag, timeout_s, _landing(into, src, health))


def recv_into(
    into: torch.Tensor, channels: Channels, src: int, tag: int, timeout_s: float | None, health: GroupHealth
) -> None:
    """Receive into a tensor of any layout and device; raises as `expect_tensor`."""
    channels.recv("device", "recv", src, tag, timeout_s, _landing(into, src, health))


def _landing(into: torch.Tensor, src: int, health: GroupHealth) -> Callable[[object], None]:
    def land(received: object) -> None:
        fill(into, expect_tensor(received, into.dtype, into.shape, src, health))

    return land


__all__ = ["expect_tensor", "irecv_into", "recv_into"]
