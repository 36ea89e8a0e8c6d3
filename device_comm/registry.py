"""Which communicator serves which device type.

A package provides a communicator for its device in one of two ways: it calls `register_communicator`, or it
declares an entry point in the group `group_coordinator.communicators` whose name is the device type and whose value is
the factory. A registered factory takes precedence over a declared one. All ranks must make the same choice, and group
creation checks that they do.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.cpu.connect import connect_cpu
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import CapabilityError, UsageError
from shm_broadcast.threads import import_aside

ENTRY_POINTS: Final = "group_coordinator.communicators"

CommunicatorFactory = Callable[[CommunicatorContext], DeviceCommunicator]

_FACTORIES: dict[str, CommunicatorFactory] = {}


def register_communicator(device_type: str, factory: CommunicatorFactory) -> None:
    """Use `factory` for groups on `device_type` that are created from now on, in this process.

    Args:
        device_type: As in `torch.device.type`: "cpu", "cuda", "xpu", …
        factory: Takes a `CommunicatorContext`; usually a `DeviceCommunicator` subclass.

    Raises:
        UsageError: Another factory is registered for the type and must be unregistered first, or an argument has
            the wrong type.
    """
    if not isinstance(device_type, str) or not device_type.isidentifier():
        raise UsageError(f"device_type must be the type of a device such as 'cuda', not {device_type!r}")
    if not callable(factory):
        raise UsageError(
            f"a factory takes a CommunicatorContext and returns a communicator, {factory!r} cannot"
        )
    if _FACTORIES.get(device_type, factory) is not factory:
        raise UsageError(
            f"a communicator for {device_type!r} is registered already: {_FACTORIES[device_type]!r}"
        )
    _FACTORIES[device_type] = factory


def unregister_communicator(device_type: str) -> None:
    """Forget what `register_communicator` was told for `device_type`."""
    _FACTORIES.pop(device_type, None)


def communicator_factory(device_type: str, world_size: int) -> CommunicatorFactory:
    """Return the factory of a group's communicator. It depends on the arguments and the registry only.

    Raises:
        UsageError: Several installed packages declare a communicator for the type, and none is registered.
        CapabilityError: The declared communicator cannot be loaded.
    """
    if world_size == 1:
        return SoloCommunicator
    if device_type in _FACTORIES:
        return _FACTORIES[device_type]
    declared = {each.value: each for each in _declared(tuple(sys.path)) if each.name == device_type}
    if declared:
        return _load(device_type, list(declared.values()))
    if device_type == "cuda":
        # Imported on demand: it loads the bindings of the driver and of NCCL, which few processes need.
        import_aside("device_comm.cuda.communicator")
        from device_comm.cuda.communicator import CudaCommunicator

        return CudaCommunicator
    return connect_cpu if device_type == "cpu" else ProcessGroupCommunicator


def communicator_name(device_type: str, world_size: int) -> str:
    """Return the name of that factory, which ranks compare. Raises as `communicator_factory`."""
    factory: object = communicator_factory(device_type, world_size)
    while isinstance(factory, functools.partial):
        factory = factory.func
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"


@functools.lru_cache(maxsize=1)
def _declared(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """Return the entry points of all device types.

    Looking them up reads the metadata of every installed package, which takes tens of milliseconds. Doing it once
    for each value of `sys.path`, which is `path`, is enough.
    """
    del path
    return tuple(entry_points(group=ENTRY_POINTS))


def _load(device_type: str, declared: Sequence[EntryPoint]) -> CommunicatorFactory:
    who = ", ".join(
        f"{each.value} ({each.dist.name if each.dist else 'an unknown package'})" for each in declared
    )
    if len(declared) > 1:
        # Their order depends on the order of installation, which may differ between ranks.
        raise UsageError(
            f"several packages declare a communicator for {device_type!r}: {who}; "
            "choose one with register_communicator"
        )
    try:
        factory = declared[0].load()
    except Exception as error:
        raise CapabilityError(
            f"the communicator that is declared for {device_type!r} cannot be loaded: {who}: {error}",
            requirement=declared[0].value,
        ) from error
    if not callable(factory):
        raise CapabilityError(
            f"the communicator that is declared for {device_type!r} is no factory: {who}",
            requirement=declared[0].value,
        )
    chosen: CommunicatorFactory = factory
    return chosen
