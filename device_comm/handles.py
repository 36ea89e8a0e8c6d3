"""Handles of transfers in progress."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from device_comm.health import GroupHealth, Operation, Pollable
from device_comm.outputs import fill
from shm_broadcast.interruption import raised_by_handler


class Handle(Protocol):
    """A transfer in progress."""

    def is_completed(self) -> bool:
        """Return whether the transfer is complete, without waiting. Raises what went wrong."""

    def wait(self) -> None:
        """Wait until the transfer is complete; may be called more than once."""


class CompletedHandle:
    """A transfer that was complete when it was asked for."""

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Transfer(Pollable, Protocol):
    """What is in flight between two ranks."""

    def is_complete(self) -> bool:
        """Return whether everything has been sent or received, without waiting. Raises what went wrong."""


class PointToPointHandle:
    """A send or a receive in progress; owns the memory that the transport uses."""

    def __init__(
        self,
        health: GroupHealth,
        operation: Operation,
        transfer: Transfer,
        timeout_s: float | None,
        landing: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Take over a transfer.

        Args:
            health: The state of the group.
            operation: The call, for errors.
            transfer: What is in flight.
            timeout_s: Seconds that `wait` may take, counted from its call; None for no limit.
            landing: Pair (destination, contiguous stand-in) when the destination is not contiguous.
        """
        self._health = health
        self._operation = operation
        self._transfer: Transfer | None = transfer
        self._timeout_s = timeout_s
        self._landing = landing

    def is_completed(self) -> bool:
        """Return whether the transfer is complete, without waiting. Raises as `wait`."""
        self._health.check_owner(self._operation)
        if self._transfer is None:
            return True
        try:
            is_complete = self._transfer.is_complete()
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            raise self._health.explain(self._operation, error, self._transfer.pending()) from error
        if is_complete:
            self._finish()
        return is_complete

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the transfer is complete; later calls return at once.

        Args:
            timeout_s: Seconds that this wait may take, in place of those with which the transfer was started.

        Raises:
            CommTimeoutError: The deadline passed; the group is broken.
            PeerLostError: A peer is gone; the group is broken.
            UsageError: This process is a forked child of the group's owner.
        """
        self._health.check_owner(self._operation)
        if self._transfer is None:
            return
        deadline = self._timeout_s if timeout_s is None else timeout_s
        self._health.wait(self._operation, self._transfer, deadline)
        self._finish()

    def _finish(self) -> None:
        if self._landing is not None:
            fill(*self._landing)
        self._landing = None
        self._transfer = None


class StreamHandle:
    """A transfer that an accelerator carries out in stream order: waiting orders the current stream behind it."""

    def __init__(
        self,
        health: GroupHealth,
        operation: Operation,
        works: Sequence[tuple[int, dist.Work]],
        keep: object,
        landing: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Own the memory in `keep` and, as `PointToPointHandle`, `landing`, until the works are complete."""
        self._health = health
        self._operation = operation
        self._works = list(works)
        self._keep = keep
        self._landing = landing

    def is_completed(self) -> bool:
        """Return whether the device is done, without waiting."""
        return all(work.is_completed() for _, work in self._works)

    def wait(self) -> None:
        """Order the current stream behind the transfer; later calls return at once."""
        with self._health.transport(self._operation):
            for _, work in self._works:
                work.wait()
        self._works.clear()
        if self._landing is not None:
            fill(*self._landing)
        self._landing = None
        self._keep = None
