"""The groups of this process by name. References are weak: compiled graphs and this registry keep no group alive."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from functools import partial
from typing import Final

from coordinator.calls import Calls
from coordinator.planes import GroupPlanes
from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import ClosedError, UsageError

# The names of this many destroyed groups are kept, so that the error for a graph that uses one can say what happened.
_REMEMBERED: Final = 1024


@dataclasses.dataclass(frozen=True)
class Registration:
    """The parts of a group that the operations of a compiled graph use.

    Attributes:
        reference: A weak reference to the group.
        calls: The gate that every operation of the group passes.
        communicator: The group's device communicator.
        in_torch_world: Whether its ranks are ranks of torch's default process group. False for fake (testing) and
            stateless groups, which `live_groups` leaves out.
    """

    reference: weakref.ref[GroupPlanes]
    calls: Calls
    communicator: DeviceCommunicator
    in_torch_world: bool


_groups: dict[str, Registration] = {}
_gone: dict[str, None] = {}
_given_out: Counter[str] = Counter()


def free_name(base: str) -> str:
    """Return `base:0`, `base:1` …: the next one that no group of this process has, and that was not returned before."""
    while True:
        name = f"{base}:{_given_out[base]}"
        _given_out[base] += 1
        if name not in _groups:
            return name


def register(group: GroupPlanes, calls: Calls, *, in_torch_world: bool) -> None:
    """Let `find` return `group` by its unique name, until `forget` is called or the group is collected."""
    name = group.unique_name
    reference = weakref.ref(group, partial(_forget, name))
    _gone.pop(name, None)
    _groups[name] = Registration(reference, calls, group.device_communicator, in_torch_world)


def forget(group: GroupPlanes) -> None:
    """Make operations that name `group` raise `ClosedError` from now on. Idempotent."""
    found = _groups.get(group.unique_name)
    if found is not None and found.reference() is group:
        _forget(group.unique_name, found.reference)


def _forget(name: str, reference: weakref.ref[GroupPlanes]) -> None:
    """Remove the group of `reference`, unless a group of the same name in a later world has replaced it."""
    found = _groups.get(name)
    if found is None or found.reference is not reference:
        return
    del _groups[name]
    _gone[name] = None
    if len(_gone) > _REMEMBERED:
        del _gone[next(iter(_gone))]


def find(name: str, operation: str) -> Registration:
    """Return what is registered under a group's unique name.

    Args:
        name: The group's `unique_name`.
        operation: The operation that needs it, for errors.

    Raises:
        ClosedError: The group was destroyed.
        UsageError: This process has had no such group.
    """
    found = _groups.get(name)
    if found is not None and found.reference() is not None:
        return found
    where = f"group_coordinator::{operation} on {name!r}"
    if name in _gone or found is not None:
        raise ClosedError(
            f"{where}: the group was destroyed; use an existing group, and recompile the graph with it"
        )
    raise UsageError(f"{where}: this process has no group of that name; it has {sorted(_groups) or 'none'}")


def is_registered(group: object) -> bool:
    """Return whether operations that name `group` find it."""
    found = _groups.get(getattr(group, "unique_name", ""))
    return found is not None and found.reference() is group


def live_groups() -> list[GroupPlanes]:
    """Return the groups of torch's world that exist in this process, newest first."""
    groups = [found.reference() for found in list(_groups.values()) if found.in_torch_world]
    return [group for group in reversed(groups) if group is not None]
