"""Gloo process groups that listen where we say.

torch chooses Gloo's address from the environment or the host's name, and drops the options that would
say better. It does let a backend be registered under a name of its own, so ours is Gloo on one given
address; everything else, and every torch function, works on it as on any process group.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from shm_broadcast.errors import CapabilityError, InternalError
from shm_broadcast.liveness import fork_count

BACKEND: Final = "gloo_at_address"

LOOPBACK: Final = "127.0.0.1"

# torch's stubs give ProcessGroupGloo none of its methods; they are those of a process group.
GlooBackend: TypeAlias = dist.ProcessGroup

# Gloo's own default; its threads carry the collectives that are in flight at once.
_GLOO_THREADS: Final = 2


@dataclasses.dataclass
class GlooOptions:
    """Where a Gloo group listens, and the backend once it exists.

    Attributes:
        address: Numeric address of this host to bind to; never a wildcard.
        is_lazy: Two ranks connect when they first talk, so that creating the group waits for nobody.
        backend: Set when the group is created.
    """

    address: str
    is_lazy: bool = False
    backend: GlooBackend | None = None

    def created(self) -> GlooBackend:
        """Return the backend of the group that was created with these options."""
        if self.backend is None:
            raise InternalError("the Gloo group has not been created")
        return self.backend


# Where the world listens. A caller's own `dist.new_group()` takes the backend of a world of ours and no options.
_world_address: Final[list[str]] = []


def set_world_address(address: str) -> None:
    """Let groups that callers create in this world, through torch and without options, listen at `address`."""
    _world_address[:] = [address]


def register_backend() -> None:
    """Make `BACKEND` known to torch.distributed. Idempotent."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise CapabilityError("this torch was built without Gloo", requirement="torch.distributed with Gloo")
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu"])


def _create(backend_options: Any, options: GlooOptions | None) -> ProcessGroupGloo:
    """Build the backend; torch calls this, with its own description of the group and our options, if any."""
    if options is None:
        options = GlooOptions(_world_address[0] if _world_address else LOOPBACK)
    gloo = cast("Any", ProcessGroupGloo)._Options()
    device = _device_at(options.address, options.is_lazy)
    gloo._devices = [device.gloo]
    gloo._timeout = backend_options.timeout
    gloo._threads = _GLOO_THREADS
    backend = ProcessGroupGloo(
        backend_options.store, backend_options.group_rank, backend_options.group_size, gloo
    )
    options.backend = cast("GlooBackend", backend)
    _users[options.backend] = device
    return backend


class _Device:
    """One Gloo device and those who use it."""

    def __init__(self, address: str, is_lazy: bool) -> None:
        self.gloo = ProcessGroupGloo.create_device(hostname=address, lazy_init=is_lazy)


# Each device has a thread that wakes up a hundred times a second for ever, 0.15 % of a core, so all groups of a
# process share one; it goes with the last of them. A forked child, which has no threads, needs its own.
_devices: Final[weakref.WeakValueDictionary[tuple[str, int], _Device]] = weakref.WeakValueDictionary()
_users: Final[weakref.WeakKeyDictionary[GlooBackend, _Device]] = weakref.WeakKeyDictionary()


def _device_at(address: str, is_lazy: bool) -> _Device:
    if is_lazy:
        # Two groups on one lazy device take each other's connections (torch 2.13): the second one hangs.
        return _Device(address, is_lazy)
    device = _devices.get((address, fork_count()))
    if device is None:
        device = _devices[address, fork_count()] = _Device(address, is_lazy)
    return device


def new_gloo_group(
    ranks: Sequence[int], address: str, name: str, timeout_s: float, is_lazy: bool = False
) -> tuple[dist.ProcessGroup, GlooBackend]:
    """Create a Gloo group of `ranks`, all of which call this with the same name; at any time if `is_lazy`."""
    register_backend()
    options = GlooOptions(address, is_lazy)
    group = new_group(ranks, BACKEND, name, timeout_s, options)
    return group, options.created()


def new_group(
    ranks: Sequence[int], backend: str, name: str, timeout_s: float, options: GlooOptions | None = None
) -> dist.ProcessGroup:
    """Create a process group with any backend; only its members, `ranks` in group order, take part.

    Not through `dist.new_group`: that sorts the ranks, and names the group by how many groups this process
    has just now. So ranks that hold different numbers of groups would wait for each other under different
    names, and a group that follows a destroyed one would find the addresses of that in the store.

    Args:
        ranks: Global ranks.
        backend: torch backend.
        name: Never used before for a group with the same first rank, and equal on all ranks.
        timeout_s: Of the backend's own operations.
        options: Of the backend.
    """
    torch_world: Any = dist.distributed_c10d
    group, _ = torch_world._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        dist.PrefixStore("group_coordinator/process_groups", torch_world._get_default_store()),
        f"{name} of {ranks[0]}",
        backend_options=options,
        timeout=timedelta(seconds=timeout_s),
        group_desc=name,
    )
    if not isinstance(group, dist.ProcessGroup):
        raise InternalError(f"torch gave no process group for ranks {list(ranks)}")
    torch_world._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def abort_gloo(backend: GlooBackend) -> None:
    """End everything that is in flight in a Gloo group, here and on its peers, at once.

    `ProcessGroupGloo.abort` does nothing in torch 2.13. A receive whose time-out passes does: Gloo then
    closes all connections of the group, upon which every pending operation fails. So one is posted that
    nobody will ever answer, on a tag that nobody uses.
    """
    if backend.size() == 1:
        return
    buffer = torch.empty(1, dtype=torch.uint8)
    peer = (backend.rank() + 1) % backend.size()
    try:
        backend.recv([buffer], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
    except RuntimeError as expected:
        # Either the time-out, which is the purpose, or the connections were closed already.
        del expected


_ABORT_TAG: Final = 0x7FFF
