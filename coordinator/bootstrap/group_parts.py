"""The parts of a group after its creation, and the order in which they are released."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.membership import Membership
from coordinator.bootstrap.timings import CreationReport, Stopwatch
from coordinator.bootstrap.world import World
from coordinator.host.open_sends import OpenSends
from coordinator.host.plane import HostPlane
from coordinator.host.process_groups import (
    GLOO,
    GlooBackend,
    GlooOptions,
    new_gloo_group,
    new_group,
    new_unregistered_gloo_group,
)
from device_comm.base import DeviceCommunicator
from device_comm.health import GroupHealth
from shm_broadcast.errors import CapabilityError, ClosedError, UsageError
from shm_broadcast.interruption import is_held, tolerating
from shm_broadcast.liveness import ProcessIdentity


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """One of the groups that are created together.

    Attributes:
        name: Unique, equal on all ranks of the group.
        group_ranks: Global ranks of every group of this kind.
        membership: This rank's place in them.
        clock: Measures how long this rank takes to create the group.
    """

    name: str
    group_ranks: Sequence[Sequence[int]]
    membership: Membership
    clock: Stopwatch = dataclasses.field(default_factory=Stopwatch)


@dataclasses.dataclass(eq=False)
class GroupProcessGroups:
    """The torch process groups of one group. Each is created when something needs it, and destroyed with the group.

    Attributes:
        name: The group's unique name.
        ranks: Its global ranks, in group order.
        backend: torch backend of the process groups for device tensors.
        address: The address on which this rank listens; numeric, never a wildcard.
        create_timeout_s: Deadline for the creation of each process group, in seconds; torch keeps it for calls of the
            group that state none.
        apart: The world of a group of which torch knows nothing, and this rank's place in the group.
        connect_timeout_s: A shorter deadline for those that the planes connect, if there is one.
        host: The host plane's process group; None if the host plane needs none.
        device: The device plane's process group; None if the device plane needs none.
    """

    name: str
    ranks: Sequence[int]
    backend: str
    address: str
    create_timeout_s: float
    apart: tuple[World, int] | None = None
    connect_timeout_s: float | None = None
    host: dist.ProcessGroup | None = None
    device: dist.ProcessGroup | None = None
    _siblings: int = 0
    _adopted: list[dist.ProcessGroup] = dataclasses.field(default_factory=list)
    _is_destroyed: bool = False
    # A signal handler may destroy the group while this thread holds it.
    _lock: threading.RLock = dataclasses.field(default_factory=threading.RLock, repr=False)
    # What callers have asked for, by its purpose, and what a thread holds while it creates one.
    _asked: dict[str, dist.ProcessGroup] = dataclasses.field(default_factory=dict)
    _asking: threading.RLock = dataclasses.field(default_factory=threading.RLock, repr=False)

    def once(self, purpose: str, create: Callable[[], dist.ProcessGroup]) -> dist.ProcessGroup:
        """Return the process group for a purpose, which the first call creates; other threads wait for it.

        Raises:
            UsageError: This call has interrupted another one on this thread, as a signal handler does.
        """
        if is_held(self._asking):
            raise UsageError(
                f"{self.name!r}: this call has interrupted the creation of a process group on its own thread, as a "
                "signal handler or a finalizer does; call it again when that is over"
            )
        with self._asking:
            if purpose not in self._asked:
                self._asked[purpose] = create()
            return self._asked[purpose]

    def adopt(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Destroy `group` together with these process groups, keep forked children from finalising it, and return it.

        Raises:
            ClosedError: They were destroyed while a thread connected `group`, which is now destroyed too.
        """
        with self._lock:
            self._adopted.append(group)
            fork_guard.protect(group)
            if not self._is_destroyed:
                return group
        self.destroy()
        raise ClosedError(f"{self.name!r}: destroyed while a process group was connected")

    def owns(self, group: object) -> bool:
        """Return whether `group` is one of these."""
        return any(group is each for each in self._adopted)

    def for_callers(self) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
        """Return `host` and `device` if callers may use them too: without a deadline of their own."""
        return (self.host, self.device) if self.connect_timeout_s is None else (None, None)

    def open_gloo(self, description: str) -> dist.ProcessGroup:
        """Create a Gloo group of the same ranks, without waiting for the other ranks to create theirs."""
        # It is not aborted with the group: an abort needs a connection, and would wait for one where there is none yet.
        group, _ = self._connect_gloo(f"{self.name} {description}", is_lazy=True)
        return group

    def open_device(self) -> dist.ProcessGroup:
        """Create the process group for device tensors, which our own calls do without; it connects at its first use."""
        return self.open_gloo("device") if self._is_gloo else self._connect(f"{self.name} device")[0]

    def connect_host(self) -> GlooBackend:
        """Connect the host plane's process group. Collective."""
        self.host, gloo = self._connect_gloo(self.name, self.connect_timeout_s)
        return gloo

    def connect_device(self) -> GlooBackend | None:
        """Connect the device plane's process group; return its backend if that is Gloo. Collective."""
        self.device, gloo = self._connect(f"{self.name} device", self.connect_timeout_s)
        return gloo

    def connect_sibling(self, description: str) -> dist.ProcessGroup:
        """Connect another process group of the same ranks for device tensors. Collective."""
        self._siblings += 1
        return self._connect(f"{self.name} {description} {self._siblings}")[0]

    @property
    def _is_gloo(self) -> bool:
        return self.backend == GLOO

    def _connect(
        self, name: str, timeout_s: float | None = None
    ) -> tuple[dist.ProcessGroup, GlooBackend | None]:
        if self._is_gloo:
            return self._connect_gloo(name, timeout_s)
        if self.apart is not None:
            raise CapabilityError(
                f"{self.name!r}: torch makes process groups of backend {self.backend!r} only in its own world, to "
                "which the ranks of a stateless group do not belong",
                requirement="a world of torch.distributed",
            )
        group = new_group(self.ranks, self.backend, name, timeout_s or self.create_timeout_s)
        self.adopt(group)
        return group, None

    def _connect_gloo(
        self, name: str, timeout_s: float | None = None, *, is_lazy: bool = False
    ) -> tuple[dist.ProcessGroup, GlooBackend]:
        timeout_s = timeout_s or self.create_timeout_s
        options = GlooOptions(self.address, is_lazy, is_over=lambda: self._is_destroyed)
        if self.apart is None:
            group, gloo = new_gloo_group(self.ranks, options, name, timeout_s)
        else:
            world, place = self.apart
            store = dist.PrefixStore(
                f"group_coordinator/process_groups/{name} of {self.ranks[0]}", world.store
            )
            group, gloo = new_unregistered_gloo_group(store, place, len(self.ranks), name, timeout_s, options)
        self.adopt(group)
        return group, gloo

    def destroy(self) -> None:
        """Destroy all of them; one that a thread still connects is destroyed once connected. Idempotent."""
        while True:
            with self._lock:
                self._is_destroyed = True
                group = self._adopted[-1] if self._adopted else None
            if group is None:
                break
            # torch no longer knows the groups of a world that was destroyed before.
            with tolerating(ValueError, AssertionError):
                dist.destroy_process_group(group)
            fork_guard.release(group)
            with self._lock, tolerating(ValueError):  # another thread has done so
                self._adopted.remove(group)
        self.host = self.device = None
        self._asked.clear()


@dataclasses.dataclass(frozen=True)
class GroupParts:
    """Everything that a group holds.

    Attributes:
        health: The state that all parts share.
        host: The host plane.
        communicator: The device plane.
        device: Device on which the group's tensors live.
        process_groups: The torch process groups.
        report: How long the creation of the group took.
        host_ids: Host id of each rank, by global rank; equal for ranks that can share memory.
        is_fake: Whether the group is a fake, which stands for several ranks in one process.
        world: The processes among which it was created; None for a fake.
        after: What to call when everything else is released; see `call_each`.
        processes: The ranks' processes, by global rank.
    """

    health: GroupHealth
    host: HostPlane
    communicator: DeviceCommunicator
    device: torch.device
    process_groups: GroupProcessGroups
    report: CreationReport
    host_ids: Mapping[int, str] = dataclasses.field(default_factory=dict)
    is_fake: bool = False
    world: World | None = None
    after: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    processes: Mapping[int, ProcessIdentity] = dataclasses.field(default_factory=dict)

    def destroy(self, timeout_s: float, open_sends: OpenSends) -> None:
        """Release everything within about `timeout_s` seconds, half of which `open_sends` may take to complete."""
        deadline = time.monotonic() + timeout_s
        try:
            if not self.health.is_broken:
                open_sends.flush(timeout_s / 2, self.health.unfinished_sends)
                self.host.flush(max(deadline - timeout_s / 2 - time.monotonic(), 0.0))
        finally:  # Ctrl-C ends the waits only
            try:
                self.health.say_goodbye()
                # Not left to the garbage collector: a remaining reference would keep the other ranks waiting.
                self.health.abort()
                self.communicator.destroy()
                self.host.close(max(deadline - time.monotonic(), 0.5))
                self.health.release()
                self.process_groups.destroy()
            finally:
                call_each(self.after)


def call_each(closers: list[Callable[[], None]], number: int = 0) -> None:
    """Call each of `closers` from `number` on, also behind one that is interrupted.

    A closer stays in the list until it has returned, so another call calls it again: all must be idempotent.
    """
    if number < len(closers):
        try:
            closers[number]()
            del closers[number]
            number -= 1
        finally:
            call_each(closers, number + 1)


@contextmanager
def kept(made: Sequence[GroupParts]) -> Iterator[None]:
    """Release groups if the block that hands them to their owners is interrupted: nobody else could."""
    try:
        yield
    except BaseException as error:
        _release(made, error)
        raise


def _release(made: Sequence[GroupParts], error: BaseException) -> None:
    """Destroy groups because of `error`, also behind one whose end is interrupted."""
    if made:
        try:
            made[0].health.fail(error, "creating groups")
            if made[0].health.close():
                made[0].destroy(0.0, OpenSends())
        finally:
            _release(made[1:], error)


__all__ = ["GroupParts", "GroupPlan", "GroupProcessGroups", "call_each", "kept"]
