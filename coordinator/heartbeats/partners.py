"""Who of a group holds a link to whom: arithmetic on the agreed places, so that both ends of a link know it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["REACH", "partners_of"]

REACH: Final = 7
"""Of more than 16 hosts, each watches this many before and behind it in the ring."""

_ALL_WATCH_ALL: Final = 16

Hosts = Sequence[Sequence[int]]


def partners_of(rank: int, hosts: Hosts) -> dict[int, tuple[int, ...]]:
    """Return the ranks on other hosts that `rank` holds a link to, each with all ranks of its host.

    It is symmetric, and every rank has a partner on each host that its own one watches.

    Args:
        rank: A rank of the group.
        hosts: The ranks of the group on each host, ascending, in the order of the ring.
    """
    own = next(number for number, ranks in enumerate(hosts) if rank in ranks)
    return {
        partner: tuple(hosts[other])
        for other in _watched(own, len(hosts))
        for partner in _partners_on(rank, hosts[own], hosts[other])
    }


def _watched(own: int, count: int) -> list[int]:
    """Return the hosts that host number `own` of `count` watches."""
    if count <= _ALL_WATCH_ALL:
        return [other for other in range(count) if other != own]
    return sorted((own + step) % count for step in range(-REACH, REACH + 1) if step != 0)


def _partners_on(rank: int, mine: Sequence[int], theirs: Sequence[int]) -> list[int]:
    """Return the partners of `rank`, one of `mine`, among `theirs`: the host with more ranks spreads them."""
    place = mine.index(rank)
    if len(mine) >= len(theirs):
        return [theirs[place % len(theirs)]]
    return [partner for number, partner in enumerate(theirs) if number % len(mine) == place]
