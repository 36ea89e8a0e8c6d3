"""`ParallelLayout` computes the rank lists of all parallel dimensions from their sizes, equally on every rank.

Ranks are numbered as engines number them: tensor varies fastest, then context, then pipeline, then data. With
coordinates `t`, `c`, `p`, `d` and sizes `T`, `C`, `P`:

    rank = ((d * P + p) * C + c) * T + t

Experts are spread over all ranks that hold the same layers: data x context x tensor ranks in each pipeline stage. In
ascending order, these ranks are cut into runs of `expert` ranks.

Hybrid sharding cuts each data-parallel list into runs of `shard` neighbours. The model is sharded over a run (`sdp`).
Ranks at the same position in different runs hold the same shard (`rdp`).
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal, Self

from shm_broadcast.errors import UsageError

__all__ = ["Dimension", "ParallelLayout", "RankLists"]

Dimension = Literal["world", "tp", "cp", "pp", "dp", "ep", "rdp", "sdp"]
"""All ranks; tensor, context, pipeline, data and expert parallel; replicated and sharded data parallel."""

RankLists = tuple[tuple[int, ...], ...]

_GRID: Final = frozenset({"tp", "cp", "pp", "sdp", "rdp"})
# The lists of a dimension run along these axes of the grid of ranks.
_ALONG: Final[dict[Dimension, frozenset[str]]] = {
    "world": _GRID,
    "tp": frozenset({"tp"}),
    "cp": frozenset({"cp"}),
    "pp": frozenset({"pp"}),
    "dp": frozenset({"sdp", "rdp"}),
    "ep": _GRID - {"pp"},
    "rdp": frozenset({"rdp"}),
    "sdp": frozenset({"sdp"}),
}


@dataclass(frozen=True, kw_only=True)
class ParallelLayout:
    """The sizes of all parallel dimensions of one deployment.

    Attributes:
        tensor: Ranks that share every layer.
        pipeline: Pipeline stages, each with a part of the layers.
        data: Replicas of the model.
        expert: Ranks over which the experts of a layer are spread. Must divide the number of ranks of a stage,
            data x context x tensor; None means all of them.
        context: Ranks that share a sequence.
        shard: Replicas over which one copy of the model is sharded, usually those of one host. Must divide
            `data`; 1 means no sharding, `data` full sharding.

    Raises:
        UsageError: A size is not a positive integer, or `expert` or `shard` does not divide its total.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int | None = None
    context: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("tensor", "pipeline", "data", "context", "shard"):
            _check_size(name, getattr(self, name))
        if self.data % self.shard:
            raise UsageError(
                f"shard={self.shard} does not divide data={self.data}; possible sizes: {_divisors(self.data)}"
            )
        if self.expert is not None:
            _check_size("expert", self.expert)
            stage = self.data * self.context * self.tensor
            if stage % self.expert:
                raise UsageError(
                    f"expert={self.expert} does not divide the {stage} ranks of a pipeline stage "
                    f"(data={self.data} x context={self.context} x tensor={self.tensor}); "
                    f"possible sizes: {_divisors(stage)}"
                )

    @classmethod
    def from_world_size(
        cls,
        world_size: int,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        expert: int | None = None,
        context: int = 1,
        shard: int = 1,
    ) -> Self:
        """Return the layout that uses all `world_size` ranks; the data-parallel size follows from the others.

        Raises:
            UsageError: A size is not a positive integer, or the size of a replica does not divide `world_size`.
        """
        _check_size("world_size", world_size)
        replica = cls(tensor=tensor, pipeline=pipeline, context=context).world_size
        if world_size % replica:
            below = world_size // replica * replica
            fitting = f"{below} or {below + replica}" if below else f"at least {replica}"
            raise UsageError(
                f"{world_size} ranks cannot be divided into replicas of {replica} ranks "
                f"(tensor={tensor} x pipeline={pipeline} x context={context}): start {fitting} ranks, "
                "or choose sizes whose product divides them"
            )
        data = world_size // replica
        return cls(tensor=tensor, pipeline=pipeline, data=data, expert=expert, context=context, shard=shard)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def rank_lists(self) -> dict[Dimension, RankLists]:
        """The rank lists of every dimension, as `groups` returns them."""
        return {name: self.groups(name) for name in _ALONG}

    def size(self, name: Dimension) -> int:
        """Return how many ranks a list of dimension `name` has.

        Raises:
            UsageError: There is no such dimension.
        """
        if name not in _ALONG:
            raise UsageError(f"unknown dimension {name!r}; the dimensions are {', '.join(_ALONG)}")
        if name == "ep" and self.expert is not None:
            return self.expert
        return math.prod(size for size, _ in self._axes(_ALONG[name]))

    def groups(self, name: Dimension) -> RankLists:
        """Return the rank lists of dimension `name`.

        Every rank is in exactly one list. Each list is ascending, and the lists are sorted by their first rank.

        Raises:
            UsageError: The dimension is unknown.
        """
        size = self.size(name)
        line = self._line(_ALONG[name])
        runs = [line[start : start + size] for start in range(0, len(line), size)]
        origins = self._line(_GRID - _ALONG[name])
        return tuple(sorted(tuple(origin + step for step in run) for origin in origins for run in runs))

    def group_of(self, name: Dimension, rank: int) -> tuple[int, ...]:
        """Return the list of dimension `name` that contains `rank`, without computing the other lists.

        Raises:
            UsageError: The dimension is unknown, or there is no such rank.
        """
        size = self.size(name)
        index = self.coordinates(rank)[name]
        line = self._line(_ALONG[name])
        position = self._position(name, rank)
        start, origin = position - index, rank - line[position]
        return tuple(origin + step for step in line[start : start + size])

    def coordinates(self, rank: int) -> dict[Dimension, int]:
        """Return the position of `rank` in its list of each dimension.

        Raises:
            UsageError: There is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise UsageError(f"there is no rank {rank!r} in a world of {self.world_size} ranks")
        return {name: self._position(name, rank) % self.size(name) for name in _ALONG}

    def rank_at(self, *, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Return the rank with these coordinates: the inverse of `coordinates`.

        Raises:
            UsageError: A coordinate is not below the size of its dimension.
        """
        rank = 0
        places: tuple[tuple[Dimension, int], ...] = (("dp", dp), ("pp", pp), ("cp", cp), ("tp", tp))
        for name, index in places:
            size = self.size(name)
            if type(index) is not int or not 0 <= index < size:
                raise UsageError(f"there is no index {index!r} in dimension {name!r} of {size} ranks")
            rank = rank * size + index
        return rank

    def _axes(self, names: Collection[str]) -> list[tuple[int, int]]:
        """Return (size, rank distance between neighbours) of these axes of the grid, the slowest first."""
        sizes = {
            "tp": self.tensor,
            "cp": self.context,
            "pp": self.pipeline,
            "sdp": self.shard,
            "rdp": self.data // self.shard,
        }
        axes, stride = [], 1
        for name, size in sizes.items():
            if name in names:
                axes.append((size, stride))
            stride *= size
        return axes[::-1]

    def _line(self, names: Collection[str]) -> list[int]:
        """Return the ranks that differ from rank 0 along these axes only, ascending."""
        line = [0]
        for size, stride in self._axes(names):
            line = [rank + index * stride for rank in line for index in range(size)]
        return line

    def _position(self, name: Dimension, rank: int) -> int:
        """Return the position of `rank` in the line along the axes of dimension `name` that contains it."""
        position = 0
        for size, stride in self._axes(_ALONG[name]):
            position = position * size + rank // stride % size
        return position


def _check_size(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{name}={value!r} must be an integer of at least 1")


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, number + 1) if number % each == 0]
    return ", ".join(found if len(found) <= 12 else [*found[:6], "...", *found[-6:]])
