"""Gloo process groups that listen on an address of our choice.

torch derives Gloo's address from the environment or the host name, and ignores the options that would set it. It does
accept backends under new names, so we register Gloo on a given address as such a backend. Every torch function works
on it as on any process group.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from shm_broadcast.errors import CapabilityError
from shm_broadcast.liveness import fork_count

BACKEND: Final = "gloo_at_address"

LOOPBACK: Final = "127.0.0.1"

# torch's stubs declare no methods of ProcessGroupGloo; it has those of a process group.
GlooBackend: TypeAlias = dist.ProcessGroup
_Device: TypeAlias = ProcessGroupGloo.Device

# Threads per group, one per collective in flight. 2 is Gloo's own default.
_GLOO_THREADS: Final = 2


@dataclasses.dataclass
class GlooOptions:
    """Options of a Gloo group, and its backend once it exists.

    Attributes:
        address: Numeric address of this host to bind to; never a wildcard.
        is_lazy: Whether two ranks connect at their first message, so that creating the group waits for no rank.
        backend: The backend; set when the group is created.
    """

    address: str
    is_lazy: bool = False
    backend: GlooBackend | None = None


# The address on which the world listens. A caller's own `dist.new_group()` uses our backend without options.
_world_address: Final[list[str]] = []


def set_world_address(address: str) -> None:
    """Make groups that callers create through torch, without options, listen on `address`."""
    _world_address[:] = [address]


def register_backend() -> None:
    """Register `BACKEND` with torch.distributed. Idempotent."""
    if not dist.is_available() or not dist.is_gloo_available():
        raise CapabilityError("this torch was built without Gloo", requirement="torch.distributed with Gloo")
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, create_gloo, extended_api=True, devices=["cpu"])


def create_gloo(backend_options: Any, options: GlooOptions | None) -> ProcessGroupGloo:
    """Build the backend. torch calls this with its own options and, for our groups, ours."""
    if options is None:
        options = GlooOptions(_world_address[0] if _world_address else LOOPBACK)
    gloo = cast("Any", ProcessGroupGloo)._Options()
    device = _device_at(options.address, options.is_lazy)
    gloo._devices = [device]
    gloo._timeout = backend_options.timeout
    gloo._threads = _GLOO_THREADS
    backend = ProcessGroupGloo(
        backend_options.store, backend_options.group_rank, backend_options.group_size, gloo
    )
    options.backend = cast("GlooBackend", backend)
    _users[options.backend] = device
    return backend


# Each device has a thread that wakes up a hundred times a second (0.15 % of a core), so all groups of a process share
# one device, which ends with the last of them. A forked child has no threads and needs its own device.
_devices: Final[weakref.WeakValueDictionary[tuple[str, int], _Device]] = weakref.WeakValueDictionary()
_users: Final[weakref.WeakKeyDictionary[GlooBackend, _Device]] = weakref.WeakKeyDictionary()


def _device_at(address: str, is_lazy: bool) -> _Device:
    if is_lazy:
        # Two groups on one lazy device mix up their connections, and the second hangs (torch 2.13).
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
    device = _devices.get((address, fork_count()))
    if device is None:
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        _devices[address, fork_count()] = device
    return device


def new_gloo_group(
    ranks: Sequence[int], address: str, name: str, timeout_s: float, is_lazy: bool = False
) -> tuple[dist.ProcessGroup, GlooBackend]:
    """Create a Gloo group that listens on `address`; the other arguments are those of `new_group`.

    Collective over `ranks`, unless `is_lazy`: then each rank may call it at any time.
    """
    register_backend()
    options = GlooOptions(address, is_lazy)
    group = new_group(ranks, BACKEND, name, timeout_s, options)
    assert options.backend is not None
    return group, options.backend


def new_group(
    ranks: Sequence[int], backend: str, name: str, timeout_s: float, options: GlooOptions | None = None
) -> dist.ProcessGroup:
    """Create a process group with any backend. Collective over `ranks` only.

    `dist.new_group` does not fit: it sorts the ranks, and names the group by the number of groups in this process.
    Ranks with different numbers of groups would wait under different names, and a group that follows a destroyed one
    would find the old addresses in the store.

    Args:
        ranks: Global ranks, in group order.
        backend: torch backend.
        name: Equal on all ranks, and new among groups with the same first rank.
        timeout_s: Timeout of the backend's own operations, in seconds.
        options: Options of the backend.
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
    assert isinstance(group, dist.ProcessGroup)
    torch_world._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def abort_gloo(backend: GlooBackend) -> None:
    """Make every pending operation of a Gloo group fail at once, here and on its peers.

    `ProcessGroupGloo.abort` does nothing in torch 2.13. But when a receive times out, Gloo closes all connections of
    the group and fails every pending operation. This posts a receive on a tag that nobody sends on.
    """
    if backend.size() == 1:
        return
    buffer = torch.empty(1, dtype=torch.uint8)
    peer = (backend.rank() + 1) % backend.size()
    with suppress(RuntimeError):  # the intended timeout, or the connections were closed already
        backend.recv([buffer], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))


_ABORT_TAG: Final = 0x7FFF
