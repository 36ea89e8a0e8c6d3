"""The order in which pairs of hosts are measured: no host is in two pairs of a round, so that they do not disturb."""

from __future__ import annotations

__all__ = ["rounds_of"]


def rounds_of(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs (a, b), a < b, from 0 to `hosts` - 1, in which each pair comes once.

    There are as few rounds as possible, `hosts` - 1 for an even number and `hosts` for an odd one: the circle method of
    tournaments, in which one player stays and the others move on by one place.
    """
    if hosts < 2:
        return []
    players = hosts + hosts % 2  # with an odd number, whoever would meet the last player has a pause
    rounds = []
    for turn in range(players - 1):
        circle = [players - 1, *((turn + place) % (players - 1) for place in range(players - 1))]
        pairs = [(circle[place], circle[players - 1 - place]) for place in range(players // 2)]
        rounds.append(sorted((min(pair), max(pair)) for pair in pairs if max(pair) < hosts))
    return rounds
