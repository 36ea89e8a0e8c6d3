"""Gloo process groups that listen on an address of our choice.

torch derives Gloo's address from the environment or the host name, and has no option for it: it ignores the options of
a Gloo group. It looks up the class `ProcessGroupGloo` in its module whenever it creates one, and there we put a
subclass, `GlooAtAddress`. The groups are Gloo groups in every respect, so `get_backend`, `monitored_barrier` and
`new_group` treat them as such. A backend registered with torch under another name would not count as "gloo" for
them.
"""

from __future__ import annotations

import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from coordinator.host.gloo_addresses import GatheredAddresses
from shm_broadcast.descriptors import check_spare
from shm_broadcast.errors import CapabilityError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import fork_count
from shm_broadcast.timeouts import as_timedelta

GLOO: Final = "gloo"

LOOPBACK: Final = "127.0.0.1"

# torch's stubs declare no methods of ProcessGroupGloo; it has those of a process group.
GlooBackend: TypeAlias = dist.ProcessGroup
_Device: TypeAlias = ProcessGroupGloo.Device

# Threads per group, one per collective in flight. 2 is Gloo's own default.
_GLOO_THREADS: Final = 2
# What a device opens: a pipe, an epoll instance, a socket on which it listens; and what the store opens meanwhile.
_DEVICE_DESCRIPTORS: Final = 6


@dataclasses.dataclass
class GlooOptions:
    """Options of a Gloo group, and its backend once it exists.

    Attributes:
        address: Numeric address of this host to bind to; never a wildcard.
        is_lazy: Whether two ranks connect at their first message, so that creating the group waits for no rank.
        is_over: Whether nobody wants the group any more that a thread still connects.
        backend: The backend; set when the group is created.
    """

    address: str
    is_lazy: bool = False
    is_over: Callable[[], bool] = lambda: False
    backend: GlooBackend | None = None


# The options of the group that this thread is creating.
_wanted: Final[contextvars.ContextVar[GlooOptions | None]] = contextvars.ContextVar(
    "gloo_options", default=None
)
# The default process group that we initialised, if any, and the address on which it listens.
_own_world: Final[list[tuple[dist.ProcessGroup, str]]] = []


def set_own_world(world: dist.ProcessGroup | None, address: str = LOOPBACK) -> None:
    """Make the Gloo groups that callers create through torch listen on `address`, as long as `world` is torch's world.

    Args:
        world: The default process group, which we opened; None once we have left it.
        address: The address on which it listens.
    """
    _own_world[:] = [] if world is None else [(world, address)]


@contextmanager
def gloo_at(options: GlooOptions) -> Iterator[GlooOptions]:
    """Apply `options` to the Gloo group that this thread creates in the block, and yield them.

    Raises:
        CapabilityError: This torch has no Gloo.
    """
    if not dist.is_available() or not dist.is_gloo_available():
        raise CapabilityError("this torch was built without Gloo", requirement="torch.distributed with Gloo")
    torch_world: Any = dist.distributed_c10d
    torch_world.ProcessGroupGloo = GlooAtAddress
    token = _wanted.set(options)
    try:
        yield options
    finally:
        _wanted.reset(token)


def _chosen() -> GlooOptions | None:
    """Return the options of a group that is being created; None where its address is torch's choice."""
    wanted = _wanted.get()
    if wanted is None:
        for world, address in _own_world:
            if dist.group.WORLD is world:
                return GlooOptions(address)
    return wanted


def _backend_options(options: GlooOptions, size: int, timeout: timedelta) -> tuple[Any, _Device]:
    # Gloo's own thread ends the process if it cannot accept a connection. No rank connects before this one has told its
    # address, behind this; a lazy group has no connections yet.
    check_spare(_DEVICE_DESCRIPTORS + (0 if options.is_lazy else size - 1), "connects ranks over Gloo")
    device = _device_at(options.address, options.is_lazy)
    gloo = cast("Any", ProcessGroupGloo)._Options()
    gloo._devices = [device]
    gloo._timeout = timeout
    gloo._threads = _GLOO_THREADS
    return gloo, device


if TYPE_CHECKING:
    _Metaclass = type
else:
    _Metaclass = type(ProcessGroupGloo)  # that of pybind11, which stubs do not name


class _EveryGloo(_Metaclass):
    """Makes `isinstance(backend, GlooAtAddress)`, which torch asks, true for every Gloo backend, whoever created it."""

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, ProcessGroupGloo)


class GlooAtAddress(ProcessGroupGloo, metaclass=_EveryGloo):
    """torch's Gloo backend. It listens on the address of `gloo_at`, else of our world, else where torch chooses."""

    def __init__(self, store: dist.Store, rank: int, size: int, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of torch's class."""
        options = _chosen()
        timeout = kwargs.get("timeout", args[0] if args else dist.default_pg_timeout)
        # The argument after `size` may be an options object with a device: then the caller has chosen the address.
        if options is None or not isinstance(timeout, timedelta):
            super().__init__(store, rank, size, *args, **kwargs)
            return
        gloo, device = _backend_options(options, size, timeout)
        addresses = _addresses(options, store, rank, size)
        super().__init__(addresses, rank, size, gloo)
        if options.backend is None:  # torch's debug mode creates a second one, to compare calls
            options.backend = cast("GlooBackend", self)
        _keep(cast("GlooBackend", self), device, addresses)


def build_gloo_backend(backend_options: Any, options: GlooOptions) -> ProcessGroupGloo:
    """Build a Gloo backend: torch's options say for which ranks and over which store, ours at which address."""
    store, timeout = backend_options.store, backend_options.timeout
    with gloo_at(options):
        return GlooAtAddress(store, backend_options.group_rank, backend_options.group_size, timeout)


# Each device has a thread that wakes up a hundred times a second (0.15 % of a core), so the groups of a process that
# listen on one address, except lazy ones, share one device, which ends with the last of them. A forked child has no
# threads and needs its own device.
_devices: Final[dict[tuple[str, int], weakref.ref[_Device]]] = {}
# What a backend needs as long as it lives. The store has to be kept too: Gloo keeps its C++ half only. An entry ends
# with its backend, by a callback that runs no Python code. That of a `WeakKeyDictionary` is written in Python: a
# signal handler may raise in it, Python drops that exception, and the entry stays, here with Gloo's thread and its
# descriptors. Iterate over a copy of such a table: a callback may change it whenever the garbage collector runs.
_users: Final[dict[weakref.ref[GlooBackend], tuple[_Device, dist.Store]]] = {}


def _keep(backend: GlooBackend, device: _Device, addresses: dist.Store) -> None:
    """Keep these objects as long as the backend lives."""
    _users[weakref.ref(backend, _users.pop)] = device, addresses


def _addresses(options: GlooOptions, store: dist.Store, rank: int, size: int) -> dist.Store:
    """Return the store in which a new group finds its addresses; a lazy one asks for each when it connects."""
    return store if options.is_lazy else GatheredAddresses(store, rank, size, options.is_over)


def _device_at(address: str, is_lazy: bool) -> _Device:
    if is_lazy:
        # Two groups on one lazy device mix up their connections, and the second hangs (torch 2.13).
        return ProcessGroupGloo.create_device(hostname=address, lazy_init=True)
    known = _devices.get((address, fork_count()))
    device = None if known is None else known()
    if device is None:
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        _devices[address, fork_count()] = weakref.ref(device)
    return device


def new_gloo_group(
    ranks: Sequence[int], options: GlooOptions, name: str, timeout_s: float
) -> tuple[dist.ProcessGroup, GlooBackend]:
    """Create a Gloo group with these options; the other arguments are those of `new_group` below.

    Collective over `ranks`, unless `is_lazy`: then each rank may call it at any time.
    """
    with gloo_at(options):
        group = new_group(ranks, GLOO, name, timeout_s)
    assert options.backend is not None
    return group, options.backend


def new_unregistered_gloo_group(
    store: dist.Store, rank: int, size: int, name: str, timeout_s: float, options: GlooOptions
) -> tuple[dist.ProcessGroup, GlooBackend]:
    """Create a Gloo group that uses its own store and is not registered with torch.distributed.

    Collective over its ranks, unless it is lazy: then each rank may call it at any time.
    """
    gloo, device = _backend_options(options, size, as_timedelta(timeout_s))
    addresses = _addresses(options, dist.PrefixStore("cpu", store), rank, size)
    backend = cast("GlooBackend", ProcessGroupGloo(addresses, rank, size, gloo))
    _keep(backend, device, addresses)
    group: Any = dist.ProcessGroup(store, rank, size)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)  # noqa: SLF001 - torch has no other way, here and below
    group._register_backend(torch.device("cpu"), kind, backend)  # noqa: SLF001
    group._set_group_name(name)  # noqa: SLF001
    group._set_group_desc(name)  # noqa: SLF001
    return cast("dist.ProcessGroup", group), backend


def new_group(ranks: Sequence[int], backend: str, name: str, timeout_s: float) -> dist.ProcessGroup:
    """Create a process group with any backend. Collective over `ranks` only.

    `dist.new_group` cannot be used here: it sorts the ranks, and names the group by the number of groups in this
    process. Ranks with different numbers of groups would wait under different names, and a group that follows a
    destroyed one would find the old addresses in the store.

    Args:
        ranks: Global ranks, in group order.
        backend: torch backend.
        name: Equal on all ranks, and not used before by a group with the same first rank.
        timeout_s: Timeout of the backend's own operations, in seconds.
    """
    torch_world: Any = dist.distributed_c10d
    group, _ = torch_world._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        dist.PrefixStore("group_coordinator/process_groups", torch_world._get_default_store()),
        f"{name} of {ranks[0]}",
        timeout=as_timedelta(timeout_s),
        group_desc=name,
    )
    assert isinstance(group, dist.ProcessGroup)
    torch_world._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


def abort_gloo(backend: GlooBackend) -> None:
    """Make every pending operation of a Gloo group fail at once, here and on its peers.

    `ProcessGroupGloo.abort` does nothing in torch 2.13. But when a receive times out, Gloo closes all connections of
    the group and fails every pending operation. This posts a receive on a tag that nobody sends on, from each peer: one
    whose connection is closed already fails at once, and closes no other one.
    """
    buffer = torch.empty(1, dtype=torch.uint8, device="cpu")
    for step in range(1, backend.size()):
        peer = (backend.rank() + step) % backend.size()
        try:
            backend.recv([buffer], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
        except RuntimeError as error:
            if raised_by_handler(error):
                raise
            # Otherwise the connection was closed already.
            if "Timed out" in str(error):
                return


_ABORT_TAG: Final = 0x7FFF
