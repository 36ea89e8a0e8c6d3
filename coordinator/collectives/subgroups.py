"""The ranks of sub-groups, from lists or colors, and ranks as text. The groups are created in `group.py`."""

from __future__ import annotations

from collections.abc import Sequence

from device_comm import checks
from shm_broadcast.errors import UsageError


def check_lists(split_ranks: Sequence[Sequence[int]], world_size: int) -> list[list[int]]:
    """Return `split_ranks` as lists if they hold ranks in the group, share none and are not empty."""
    lists = [[checks.check_rank(rank, world_size, "split_ranks") for rank in ranks] for ranks in split_ranks]
    flat = [rank for ranks in lists for rank in ranks]
    if len(set(flat)) != len(flat) or not all(lists):
        raise UsageError(
            f"split_ranks must be lists that share no rank, none of them empty, not {split_ranks}"
        )
    return lists


def check_members(ranks: Sequence[int], world_size: int, where: str) -> list[int]:
    """Return `ranks` as a list if they are different ranks in the group; `where` begins the text of an error."""
    if not isinstance(ranks, Sequence) or isinstance(ranks, (str, bytes)) or not ranks:
        raise UsageError(f"{where}: ranks must be ranks of this group, at least one, not {ranks!r}")
    for index, rank in enumerate(ranks):
        checks.check_rank(rank, world_size, f"ranks[{index}]")
    if len(set(ranks)) != len(ranks):
        raise UsageError(f"{where}: ranks holds a rank twice: {list(ranks)}")
    return list(ranks)


def pack_color(color: int | None, key: int) -> int:
    """Pack color and key into one int64, so that one all-gather exchanges both."""
    for value, name in ((color, "color"), (key, "key")):
        if isinstance(value, bool) or not isinstance(value, int) or not -1 <= value < 1 << 31:
            raise UsageError(f"{name} must be an integer from -1 to 2**31 - 1, not {value!r}")
    return (color or 0) * (1 << 32) + key


def lists_by_color(stated: Sequence[int]) -> list[list[int]]:
    """Return the ranks of each color, ordered by key; `stated` holds each rank's packed integer, in rank order."""
    members: dict[int, list[tuple[int, int]]] = {}
    for rank, packed in enumerate(stated):
        # Packing a key of -1 lowers the color by one; adding 1 undoes that.
        color, key = (packed + 1) >> 32, ((packed + 1) & 0xFFFFFFFF) - 1
        if color >= 0:
            members.setdefault(color, []).append((key, rank))
    return [[rank for _, rank in sorted(members[color])] for color in sorted(members)]


def with_singles(group_ranks: Sequence[list[int]], ranks: Sequence[int]) -> list[list[int]]:
    """Return `group_ranks` and a list of one for each other rank, so that every rank stands in one list."""
    taken = {rank for each in group_ranks for rank in each}
    return [*group_ranks, *([rank] for rank in ranks if rank not in taken)]


def abbreviated(ranks: Sequence[int]) -> str:
    """Return the ranks as text, of more than eight the first four and the last."""
    if len(ranks) <= 8:
        return str(list(ranks))
    return f"[{', '.join(map(str, ranks[:4]))}, … {ranks[-1]}]"
