"""The contract of the host plane, and the host plane of a group of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import torch

from device_comm.channels import Channels
from device_comm.handles import Handle
from device_comm.health import GroupHealth
from shm_broadcast.errors import UsageError


class HostPlane(Protocol):
    """Barriers, objects and CPU memory between the ranks of a group. Ranks are ranks in the group.

    `timeout_s` is in seconds. None means the group's deadline, except for receives, which then wait
    without limit but wake when a peer dies or the group is closed.
    """

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return once every rank has called this. Collective."""

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return every rank's integer, in rank order. Collective."""

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's object, in rank order. Collective."""

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return the ranks' objects on rank `dst`, None elsewhere. Collective."""

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return rank `src`'s object on every rank. Collective."""

    @property
    def carries_whole(self) -> bool:
        """Return whether a message of any size is moved as fast as tensors are by themselves."""

    @property
    def channels(self) -> Channels | None:
        """Return what carries objects between ranks that share memory; None where not all do."""

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Send an object to rank `dst`; return when the transport owns it."""

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Start to send an object to rank `dst`, whose tensors must not change until it is owned."""

    def recv_object(
        self, src: int, timeout_s: float | None = None, type_: Any = None, name: str = "", tag: int = 0
    ) -> Any:
        """Receive an object from rank `src`."""

    def isend_tensor(
        self, tensor: torch.Tensor, peers: Sequence[int], timeout_s: float | None, tag: int
    ) -> Handle:
        """Start to send a contiguous CPU tensor to each of `peers`."""

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Start to receive into a contiguous CPU tensor."""

    def flush(self, timeout_s: float) -> None:
        """Wait until closing the connections would lose nothing that was sent."""

    def close(self, timeout_s: float) -> None:
        """Release everything; wake what waits. Idempotent."""


class SoloHostPlane:
    """The host plane of a group of one: what is gathered is one's own, and there is no peer."""

    def __init__(self, health: GroupHealth) -> None:
        """Belong to the group of `health`."""
        self._health = health

    def barrier(self, timeout_s: float | None = None) -> None:
        """Return at once."""
        del timeout_s
        self._health.check_usable("barrier")

    def all_gather_integers(self, value: int, timeout_s: float | None = None) -> list[int]:
        """Return this rank's integer."""
        del timeout_s
        self._health.check_usable("all_gather_integers")
        return [value]

    def all_gather_object(self, obj: object, timeout_s: float | None = None) -> list[Any]:
        """Return this rank's object."""
        del timeout_s
        self._health.check_usable("all_gather_object")
        return [obj]

    def gather_object(self, obj: object, dst: int, timeout_s: float | None = None) -> list[Any] | None:
        """Return this rank's object."""
        del dst, timeout_s
        self._health.check_usable("gather_object")
        return [obj]

    def broadcast_object(self, obj: object, src: int, timeout_s: float | None, type_: Any = None) -> Any:
        """Return `obj`."""
        del src, timeout_s, type_
        self._health.check_usable("broadcast_object")
        return obj

    @property
    def carries_whole(self) -> bool:
        """Return False: nothing is carried."""
        return False

    @property
    def channels(self) -> Channels | None:
        """Return None: there is no peer."""
        return None

    def send_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> None:
        """Refuse: there is no peer."""
        del obj, dst, timeout_s, tag
        self._refuse(name)

    def isend_object(self, obj: object, dst: int, name: str, timeout_s: float | None, tag: int) -> Handle:
        """Refuse: there is no peer."""
        del obj, dst, timeout_s, tag
        self._refuse(name)

    def recv_object(
        self,
        src: int,
        timeout_s: float | None = None,
        type_: Any = None,
        name: str = "recv_object",
        tag: int = 0,
    ) -> Any:
        """Refuse: there is no peer."""
        del src, timeout_s, type_, tag
        self._refuse(name)

    def isend_tensor(
        self, tensor: torch.Tensor, peers: Sequence[int], timeout_s: float | None, tag: int
    ) -> Handle:
        """Refuse: there is no peer."""
        del tensor, peers, timeout_s, tag
        self._refuse("send")

    def irecv_tensor(self, tensor: torch.Tensor, src: int, timeout_s: float | None, tag: int) -> Handle:
        """Refuse: there is no peer."""
        del tensor, src, timeout_s, tag
        self._refuse("recv")

    def flush(self, timeout_s: float) -> None:
        """Nothing was sent."""
        del timeout_s

    def close(self, timeout_s: float) -> None:
        """Nothing to release."""
        del timeout_s

    def _refuse(self, name: str) -> NoReturn:
        self._health.check_usable(name)
        raise UsageError(f"{self._health.where(name)}: a group of one has no other rank")
