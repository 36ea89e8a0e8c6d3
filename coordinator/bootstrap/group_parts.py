"""What a group consists of once it is made, and the order in which it is given back."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.membership import Membership
from coordinator.bootstrap.timings import CreationReport
from coordinator.host.open_sends import OpenSends
from coordinator.host.plane import HostPlane
from coordinator.host.process_groups import BACKEND, LOOPBACK, GlooBackend, new_gloo_group, new_group
from device_comm.base import DeviceCommunicator
from device_comm.health import GroupHealth


@dataclasses.dataclass(frozen=True)
class GroupPlan:
    """One of the groups that are created together.

    Attributes:
        name: Unique, equal on all ranks of the group.
        group_ranks: Global ranks of every group of this kind.
        membership: This rank's host_id in them.
    """

    name: str
    group_ranks: Sequence[Sequence[int]]
    membership: Membership


class GroupProcessGroups:
    """The torch process groups of one group: made when something needs one, destroyed with the group.

    Attributes:
        address: Where this rank listens; numeric, never a wildcard.
        host: The host plane's process group; None where that has none.
        device: The device plane's process group, likewise.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], backend: str, address: str, create_timeout_s: float
    ) -> None:
        """Make none yet.

        Args:
            name: The group's unique name.
            ranks: Its global ranks, in group order.
            backend: torch backend of the process groups for device tensors.
            address: Where this rank listens.
            create_timeout_s: Deadline for each process group, in seconds.
        """
        self.address = address
        self.host: dist.ProcessGroup | None = None
        self.device: dist.ProcessGroup | None = None
        self._name = name
        self._ranks = ranks
        self._backend = backend
        self._timeout_s = create_timeout_s
        self._siblings = 0
        self._adopted: list[dist.ProcessGroup] = []

    def adopt(self, group: dist.ProcessGroup) -> None:
        """Destroy `group` together with these; a forked child leaves it alone."""
        self._adopted.append(group)
        fork_guard.protect(group)

    def open_gloo(self, description: str) -> dist.ProcessGroup:
        """Create a Gloo group of the same ranks, whether or not the others do so now."""
        # Not aborted with the group: that takes a connection, for which it would wait where there is none yet.
        group, _ = new_gloo_group(
            self._ranks,
            self.address or LOOPBACK,
            f"{self._name} {description}",
            self._timeout_s,
            is_lazy=True,
        )
        self.adopt(group)
        return group

    def open_device(self) -> dist.ProcessGroup:
        """Create the device plane's process group, which our own calls do without; it connects at its first use."""
        if self._is_gloo:
            return self.open_gloo("device")
        group = new_group(self._ranks, self._backend, f"{self._name} device", self._timeout_s)
        self.adopt(group)
        return group

    def connect_host(self) -> GlooBackend:
        """Connect the host plane's process group. Collective."""
        self.host, gloo = new_gloo_group(self._ranks, self.address, self._name, self._timeout_s)
        self.adopt(self.host)
        return gloo

    def connect_device(self) -> GlooBackend | None:
        """Connect the device plane's process group; return its backend if that is Gloo. Collective."""
        self.device, gloo = self._connect(f"{self._name} device")
        return gloo

    def connect_sibling(self, description: str) -> dist.ProcessGroup:
        """Connect another process group of the same ranks for device tensors. Collective."""
        self._siblings += 1
        group, _ = self._connect(f"{self._name} {description} {self._siblings}")
        return group

    @property
    def _is_gloo(self) -> bool:
        # Engines ask torch for the backend of one group of ours, and create the next one with the answer.
        return self._backend in ("gloo", BACKEND)

    def _connect(self, name: str) -> tuple[dist.ProcessGroup, GlooBackend | None]:
        gloo: GlooBackend | None = None
        if self._is_gloo:
            group, gloo = new_gloo_group(self._ranks, self.address, name, self._timeout_s)
        else:
            group = new_group(self._ranks, self._backend, name, self._timeout_s)
        self.adopt(group)
        return group, gloo

    def destroy(self) -> None:
        """Give all of them back. Idempotent."""
        for group in reversed(self._adopted):
            try:
                dist.destroy_process_group(group)
            except (ValueError, AssertionError) as gone:
                # torch knows it no more: a world that was destroyed before took its groups with it.
                del gone
            fork_guard.release(group)
        self._adopted.clear()
        self.host = self.device = None


@dataclasses.dataclass(frozen=True)
class GroupParts:
    """Everything that a group holds.

    Attributes:
        health: The state that all parts share.
        host: The host plane.
        communicator: The device plane.
        device: Where the group's tensors live.
        process_groups: The torch process groups.
        report: How long the group took to create.
        host_ids: Where each rank is, by global rank; equal where they can share memory.
        is_fake: The group has no other process, so no call ever waits.
    """

    health: GroupHealth
    host: HostPlane
    communicator: DeviceCommunicator
    device: torch.device
    process_groups: GroupProcessGroups
    report: CreationReport
    host_ids: Mapping[int, str] = dataclasses.field(default_factory=dict)
    is_fake: bool = False

    def destroy(self, timeout_s: float, open_sends: OpenSends) -> None:
        """Give everything back, within about `timeout_s` seconds; half of it is for `open_sends` to complete."""
        deadline = time.monotonic() + timeout_s
        if not self.health.is_broken:
            open_sends.flush(timeout_s / 2)
            self.host.flush(max(deadline - timeout_s / 2 - time.monotonic(), 0.0))
        self.health.say_goodbye()
        # Not left to the garbage collector: whoever keeps a reference would keep the other ranks waiting.
        self.health.abort()
        self.communicator.destroy()
        self.host.close(max(deadline - time.monotonic(), 0.5))
        self.health.release()
        self.process_groups.destroy()


__all__ = ["GroupParts", "GroupPlan", "GroupProcessGroups"]
