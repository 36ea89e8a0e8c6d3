"""Present a group to torch as a `ProcessGroup`: calls from torch's functions become calls of the group."""

from __future__ import annotations

import weakref
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group
from torch.distributed.distributed_c10d import GroupName

from coordinator.calls import Calls
from coordinator.torch_interop.collectives import Tensors, TorchCollectives
from coordinator.torch_interop.works import AnyWork, CallWork, TransferWork, seconds
from device_comm.base import DeviceCommunicator
from device_comm.handles import Handle
from shm_broadcast.errors import ClosedError, UsageError

__all__ = ["register"]

BACKEND: Final = "group_coordinator"


class Group(Protocol):
    """What torch's calls need of a `GroupCoordinator`."""

    unique_name: str
    ranks: list[int]
    rank_in_group: int
    world_size: int
    device: torch.device
    device_communicator: DeviceCommunicator

    def barrier(self, timeout_s: float | None = None, *, async_op: Any = False) -> Any:
        """Wait for all ranks."""

    def isend(self, tensor: torch.Tensor, dst: int | None = None, *, tag: int = 0) -> Handle:
        """Start to send a tensor."""

    def irecv(self, tensor: torch.Tensor, src: int | None = None, *, tag: int = 0) -> Handle:
        """Start to receive a tensor."""

    def _recv_any(
        self,
        size: torch.Size,
        dtype: torch.dtype,
        into: torch.Tensor | None,
        tag: int,
        timeout_s: float | None,
    ) -> tuple[torch.Tensor, int]:
        """Receive a tensor from any rank, into `into`."""


class CoordinatorProcessGroup(TorchCollectives):
    """The methods that torch calls, by torch's names. Ranks are ranks in the group."""

    def __init__(self, group: Group, calls: Calls) -> None:
        """Wrap `group`; call `register` instead."""
        # torch keeps a process group until it is destroyed. A weak reference lets an unused group be collected.
        reference, name = weakref.ref(group), f"{group.unique_name} as a process group"

        def communicator() -> DeviceCommunicator:
            return _alive(reference, name).device_communicator

        super().__init__(group.rank_in_group, group.world_size, calls, communicator, None)
        self._group = reference
        self._name = name
        self.device_type: str = group.device.type

    @property
    def coordinator(self) -> Group:
        """Return the group.

        Raises:
            ClosedError: It no longer exists.
        """
        return _alive(self._group, self._name)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the backend's name."""
        return BACKEND

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name under which torch finds the group."""
        return self._name

    def shutdown(self) -> None:
        """Do nothing: the group's own `destroy` ends it."""

    abort = shutdown

    def barrier(self, opts: Any = None) -> CallWork:
        """Wait for all ranks."""
        timeout_s = None if opts is None else seconds(opts.timeout)
        if getattr(opts, "asyncOp", True):
            return CallWork(self.coordinator.barrier(timeout_s, async_op=True), (), None)
        self.coordinator.barrier(timeout_s)
        return CallWork(None, (), None)

    # ------------------------------------------------------------------ point to point

    def send(self, tensors: Tensors, dstRank: int, tag: int = 0) -> TransferWork:  # noqa: N803 - torch's name
        """Start a send."""
        return TransferWork(self.coordinator.isend(tensors[0], dstRank, tag=tag), tensors, dstRank)

    def recv(self, tensors: Tensors, srcRank: int, tag: int = 0) -> TransferWork:  # noqa: N803 - torch's name
        """Start a receive."""
        return TransferWork(self.coordinator.irecv(tensors[0], srcRank, tag=tag), tensors, srcRank)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> AnyWork:
        """Receive from any rank, inside the work's `wait`."""
        group, (tensor,) = self.coordinator, tensors

        def receive(timeout_s: float | None) -> int:
            into = tensor.detach()
            _, src = group._recv_any(into.shape, into.dtype, into, tag, timeout_s)  # noqa: SLF001 - not public
            return src

        return AnyWork(receive)


def _alive(reference: weakref.ref[Group], name: str) -> Group:
    group = reference()
    if group is None:
        raise ClosedError(f"{name}: the group no longer exists")
    return group


def register(group: Group, calls: Calls) -> dist.ProcessGroup:
    """Register a group with torch, until the returned process group is destroyed.

    Args:
        group: The group.
        calls: Its gate, which calls by torch pass too.

    Raises:
        UsageError: torch.distributed is not initialised.
    """
    if not dist.is_initialized():
        raise UsageError("as_process_group: torch.distributed is not initialised")
    made: Any = CoordinatorProcessGroup(group, calls)
    torch_world: Any = dist.distributed_c10d
    world, tag = torch_world._world, f"ptd:{made.getGroupName()}"
    world.pg_map[made] = (BACKEND, torch_world._get_default_store())
    world.pg_names[made] = made.getGroupName()
    world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(group.ranks)}
    world.pg_backend_config[made] = f"{group.device.type}:{BACKEND}"
    world.pg_to_tag[made] = tag
    world.tags_to_pg.setdefault(tag, []).append(made)
    world.tags_to_pg.setdefault("", []).append(made)
    _register_process_group(GroupName(made.getGroupName()), made)
    return cast("dist.ProcessGroup", made)
