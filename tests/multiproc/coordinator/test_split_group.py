"""Groups are split by lists and by color, and have sub-groups."""

from pathlib import Path
from typing import Any

import torch

from coordinator import GroupCoordinator
from tests.harness import RankPool
from tests.worlds import refused, world


def split(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        found: list[Any] = []
        by_list = group.split_group([[3, 0], [1]])
        found.append(None if by_list is None else by_list.ranks)
        if by_list is not None:
            found.append(by_list.all_gather_object(rank))
            by_list.destroy()
        by_color = group.split_group(color=rank % 2, key=-rank if rank < 2 else 0, group_name="half")
        assert isinstance(by_color, GroupCoordinator)
        found += [by_color.ranks, by_color.unique_name, by_color.all_reduce(torch.tensor([rank])).item()]
        by_color.destroy()
        some = group.split_group(color=-1 if rank == 2 else 0, key=3 - rank)
        found.append(None if some is None else some.ranks)
        if some is not None:
            some.destroy()
        found.append(
            [
                refused(lambda: group.split_group([[0], [0]])),
                refused(lambda: group.split_group([[4]])),
                refused(group.split_group),
            ]
        )
        return found


def test_groups_are_split_by_lists_and_by_color(ranks4: RankPool) -> None:
    """Lists and keys determine the order of the ranks. A rank in no list gets None."""
    found = ranks4.run(split)
    checks = [True, True, True]
    assert found[0] == [[3, 0], [3, 0], [0, 2], "world.0@0/half:0", 2, [3, 1, 0], checks]
    assert found[1] == [[1], [1], [1, 3], "world.0@0/half:0", 4, [3, 1, 0], checks]
    assert found[2] == [None, [0, 2], "world.0@0/half:0", 2, None, checks]
    assert found[3] == [[3, 0], [3, 0], [1, 3], "world.0@0/half:0", 4, [3, 1, 0], checks]


def part_of_parts(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        pair = GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True, group_name="tp")
        # Both pairs split at once, and their groups have the same name.
        one = pair.create_subgroup([1])
        halves = pair.split_group([[0], [1]])
        assert halves is not None
        found = [None if one is None else one.ranks, halves.ranks]
        # Each list leaves out other ranks.
        for lists in ([[0, 1]], [[1, 2]], [[3, 2, 1]]):
            part = group.split_group(lists)
            found.append(None if part is None else part.all_gather_object(rank))
            if part is not None:
                part.destroy()
        if one is not None:
            one.destroy()
        halves.destroy()
        pair.destroy()
        return found


def test_groups_of_the_same_name_have_separate_parts(ranks4: RankPool) -> None:
    """Pairs that split at the same time do not mix, and a rank that is left out once can be in the next part."""
    assert ranks4.run(part_of_parts) == [
        [None, [0], [0, 1], None, None],
        [[1], [1], [0, 1], [1, 2], [3, 2, 1]],
        [None, [2], None, [1, 2], [3, 2, 1]],
        [[3], [3], None, None, [3, 2, 1]],
    ]
