"""Which of the ranks that are left go on, and in what layout: pure functions that all ranks compute alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

from coordinator.layout import ParallelLayout
from shm_broadcast.errors import UsageError

__all__ = ["LayoutRule", "Placement", "drop_replicas", "grown", "merged", "torn_replicas"]


class Placement(NamedTuple):
    """What a rule has chosen.

    Attributes:
        layout: The new layout.
        ranks: The old ranks that go on, in the order of their new ranks: as many as the layout has.
    """

    layout: ParallelLayout
    ranks: tuple[int, ...]


LayoutRule: TypeAlias = Callable[[ParallelLayout, Collection[int]], Placement]
"""(old layout, old ranks that are left) -> `Placement`. It must be pure: every rank computes it by itself. If only the
ranks that it has chosen are left, it must choose them all, in the same order, for the same layout."""


def drop_replicas(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
    """Go on with the replicas of the model that have lost no rank, in their order. A shard of a model cannot shrink.

    `layout.expert` and `layout.shard` stay where they still divide the ranks of a stage and the number of
    replicas. Otherwise experts are spread over all ranks of a stage, the model is sharded over all replicas.

    Args:
        layout: The old layout.
        ranks: Those of its ranks that are left.

    Raises:
        UsageError: No replica is whole, or there are independent sets of replicas (`external_data`) of which one has
            lost more than another.
    """
    replicas = layout.groups("replica")
    is_whole = [set(replica) <= set(ranks) for replica in replicas]
    whole = [replica for replica, is_left in zip(replicas, is_whole, strict=True) if is_left]
    if not whole:
        raise UsageError(
            f"no replica of the model is whole: each needs {layout.size('replica')} ranks, and of the replicas "
            f"{[list(replica) for replica in replicas]} the ranks {sorted(ranks)} are left"
        )
    # The replicas of a set follow each other. No set can take a replica of another one, which may hold other weights.
    left = [sum(is_whole[start : start + layout.data]) for start in range(0, len(replicas), layout.data)]
    data = left[0]
    if left != [data] * layout.external_data:
        raise UsageError(
            f"{len(whole)} whole replicas cannot be divided into {layout.external_data} independent sets of one size: "
            f"each set keeps its own, which are {left}"
        )
    shard = layout.shard if data % layout.shard == 0 else data
    stage = data * layout.context * layout.tensor
    expert = layout.expert if layout.expert is None or stage % layout.expert == 0 else None
    kept = tuple(sorted(rank for replica in whole for rank in replica))
    return Placement(dataclasses.replace(layout, data=data, shard=shard, expert=expert), kept)


def grown(layout: ParallelLayout, joined: int) -> ParallelLayout:
    """Return the layout with additional replicas, formed by `joined` new ranks, after the present ones.

    Raises:
        UsageError: The new ranks form no whole number of replicas, or there are independent sets of replicas.
    """
    if not joined:
        return layout
    replica = layout.size("replica")
    if joined % replica or layout.external_data > 1:
        raise UsageError(
            f"{joined} new ranks form no whole replicas of {replica} ranks behind the others of {layout}"
        )
    data = layout.data + joined // replica
    shard = layout.shard if data % layout.shard == 0 else data
    stage = data * layout.context * layout.tensor
    expert = layout.expert if layout.expert is None or stage % layout.expert == 0 else None
    return dataclasses.replace(layout, data=data, shard=shard, expert=expert)


def merged(kept: Sequence[int], joined: Sequence[int]) -> tuple[int, ...]:
    """Return the places of the next epoch, in the order of its ranks.

    Args:
        kept: The places of the ranks that go on, in their order, which stays.
        joined: The places of the ranks that join; each comes before the first place in `kept` that is larger.
    """
    places = list(kept)
    for place in sorted(joined):
        larger = (at for at, each in enumerate(places) if each > place)
        places.insert(next(larger, len(places)), place)
    return tuple(places)


def torn_replicas(old: ParallelLayout, new: ParallelLayout, kept: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the replicas of `old` that ranks which join would tear apart, each as ranks of `old`.

    Args:
        old: The layout of the ranks that go on, alone.
        new: The layout with those that join.
        kept: The new rank of each rank of `old`.
    """
    whole = set(new.groups("replica"))
    return [each for each in old.groups("replica") if tuple(kept[rank] for rank in each) not in whole]
