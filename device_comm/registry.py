"""Which communicator serves which device type.

A package can bring a communicator for its device in one of two ways: call `register_communicator`, or
declare an entry point in the group `group_coordinator.communicators` whose name is the device type and
whose value is the factory. All ranks must make the same choice: it is part of what ranks agree on.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Final

from device_comm.base import CommunicatorContext, DeviceCommunicator
from device_comm.process_group import ProcessGroupCommunicator
from device_comm.solo import SoloCommunicator
from shm_broadcast.errors import UsageError

ENTRY_POINTS: Final = "group_coordinator.communicators"

CommunicatorFactory = Callable[[CommunicatorContext], DeviceCommunicator]

_FACTORIES: dict[str, CommunicatorFactory] = {}


def register_communicator(device_type: str, factory: CommunicatorFactory) -> None:
    """Use `factory` for groups on `device_type` that are created from now on, in this process.

    Args:
        device_type: As in `torch.device.type`: "cpu", "cuda", "xpu", …
        factory: Takes a `CommunicatorContext`; usually a `DeviceCommunicator` subclass.

    Raises:
        UsageError: Another factory is registered for the type; `unregister_communicator` it first.
    """
    if _FACTORIES.get(device_type, factory) is not factory:
        raise UsageError(
            f"a communicator for {device_type!r} is registered already: {_FACTORIES[device_type]!r}"
        )
    _FACTORIES[device_type] = factory


def unregister_communicator(device_type: str) -> None:
    """Forget what `register_communicator` was told for `device_type`."""
    _FACTORIES.pop(device_type, None)


def communicator_factory(device_type: str, world_size: int) -> CommunicatorFactory:
    """Return what builds the communicator of a group: a pure choice from its arguments and the registry."""
    if world_size == 1:
        return SoloCommunicator
    if device_type in _FACTORIES:
        return _FACTORIES[device_type]
    for entry_point in entry_points(group=ENTRY_POINTS, name=device_type):
        factory: CommunicatorFactory = entry_point.load()
        return factory
    return ProcessGroupCommunicator


def communicator_name(device_type: str, world_size: int) -> str:
    """Return a name of that choice which ranks can compare."""
    factory = communicator_factory(device_type, world_size)
    return f"{factory.__module__}.{getattr(factory, '__qualname__', type(factory).__qualname__)}"
