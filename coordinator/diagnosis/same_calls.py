"""Tell which groups and calls of several pages are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from coordinator.diagnosis.model import Group, Lane, Page, Record
from shm_broadcast.status.kinds import ALGORITHMS

__all__ = [
    "TWO_LEVELS",
    "GroupKey",
    "PageGroups",
    "ambiguous_groups",
    "carrier_of",
    "is_shared",
    "lets_all_meet",
]

# Shared memory says which of its ways it took for a sum.
_SHARED: Final = frozenset({"shared memory", *ALGORITHMS.values()})

# Calls of tensors between hosts: the ranks of a host meet in its memory, the hosts' leaders over TCP.
TWO_LEVELS: Final = "two levels"


class GroupKey(NamedTuple):
    """What is equal for a group on all its ranks.

    Attributes:
        name: Its unique name, which the tensor-parallel groups of one job share.
        epoch: How often its members have changed.
        world_size: Its members.
        ranks: The first 256 of them.
        later: How many groups with these values the process has made since. A process that leaves a world and
            joins it again makes groups with the same names.
    """

    name: str
    epoch: int
    world_size: int
    ranks: tuple[int, ...]
    later: int


class PageGroups:
    """The groups of one page.

    Attributes:
        keys: The key of each group, and the group.
    """

    def __init__(self, page: Page) -> None:
        """Find the groups of `page`."""
        self.keys: dict[GroupKey, Group] = {}
        self._named: dict[tuple[str, int], list[tuple[GroupKey, Group]]] = {}
        for group in sorted(page.groups, key=lambda each: -each.created_ns):
            named = self._named.setdefault((group.name, group.epoch), [])
            later = sum(other.ranks == group.ranks for _, other in named)
            key = GroupKey(group.name, group.epoch, group.world_size, group.ranks, later)
            self.keys[key] = group
            named.append((key, group))

    def of(self, record: Record) -> tuple[GroupKey, Group] | None:
        """Return the group of a call: of those with its name the newest one that existed when it began."""
        named = self._named.get((record.group, record.epoch), ())
        return next((each for each in named if each[1].created_ns <= record.begin_ns), None)


def ambiguous_groups(pages: Sequence[Page]) -> dict[GroupKey, tuple[int, int]]:
    """Return groups in which two pages claim one place, as those of two jobs do, with the pids of two such.

    It cannot be told which calls of such a group belong together.
    """
    seen: dict[tuple[GroupKey, int], int] = {}
    found: dict[GroupKey, tuple[int, int]] = {}
    for page in pages:
        for key, group in PageGroups(page).keys.items():
            first = seen.setdefault((key, group.place), page.pid)
            if first != page.pid:
                found.setdefault(key, (first, page.pid))
    return found


def is_shared(algorithm: str) -> bool:
    """Return whether calls go through shared memory, where all ranks compare their calls."""
    return algorithm in _SHARED


def lets_all_meet(algorithm: str, call: str) -> bool:
    """Return whether no rank leaves the call before all have come, even if one rank alone has the data.

    Between hosts a broadcast is made by the hosts' leaders, which first tell each other of it. What leaders
    do not carry, such as a scatter, goes through a process group.
    """
    return is_shared(algorithm) or (algorithm == TWO_LEVELS and call == "broadcast")


def carrier_of(call: Lane | Record) -> str:
    """Return what numbers the call: in one plane, shared memory and a process group count separately."""
    return "shared memory" if is_shared(call.algorithm) else call.algorithm
