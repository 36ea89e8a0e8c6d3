"""`ParallelLayout` computes the rank lists of all parallel dimensions from their sizes, equally on every rank.

Ranks are numbered as engines number them: tensor varies fastest, then context, pipeline, data, and external data. With
coordinates `t`, `c`, `p`, `d`, `e` and sizes `T`, `C`, `P`, `D`:

    rank = (((e * D + d) * P + p) * C + c) * T + t

Experts are spread over all ranks that hold the same layers: data x context x tensor ranks in each pipeline stage. In
ascending order, these ranks are cut into runs of `expert` ranks.

Decoding reuses the ranks of the tensor and the context dimension, to share the cache of a sequence. Ordered by tensor
and then by context, which varies fastest, these ranks are cut into runs of `decode_context` ranks (`dcp`).

Hybrid sharding cuts each data-parallel list into runs of `shard` neighbours. The model is sharded over a run (`sdp`).
Ranks at the same position in different runs hold the same shard (`rdp`).

The replicas of external data parallelism (`xdp`) share nothing: each serves requests of its own, at its own times.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal, Self

from shm_broadcast.errors import UsageError

__all__ = ["Dimension", "ParallelLayout", "RankLists"]

Dimension = Literal["world", "tp", "dcp", "cp", "pp", "dp", "ep", "rdp", "sdp", "replica", "xdp"]
"""All ranks; tensor, decode context, (prefill) context, pipeline, data and expert parallel; replicated and sharded data
parallel; all ranks of one copy of the model; external data parallel."""

RankLists = tuple[tuple[int, ...], ...]

# The axes of the grid of ranks, the slowest first.
_GRID: Final = ("xdp", "rdp", "sdp", "pp", "cp", "tp")
# The lists of a dimension run along these axes, the slowest first.
_ALONG: Final[dict[Dimension, tuple[str, ...]]] = {
    "world": _GRID,
    "tp": ("tp",),
    "dcp": ("tp", "cp"),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("rdp", "sdp"),
    "ep": ("rdp", "sdp", "cp", "tp"),
    "rdp": ("rdp",),
    "sdp": ("sdp",),
    "replica": ("pp", "cp", "tp"),
    "xdp": ("xdp",),
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
        context: Ranks that share a sequence while it is prefilled.
        shard: Replicas over which one copy of the model is sharded, usually those of one host. Must divide
            `data`; 1 means no sharding, `data` full sharding.
        decode_context: Ranks that share the cache of a sequence while it is decoded. They are ranks of `context`, and
            of `tensor` if there are more: the size must divide `context`, or be `context` times a divisor of `tensor`.
        external_data: Independent deployments of all these sizes, side by side in one world. No group but the world
            spans two of them.

    Raises:
        UsageError: A size is not a positive integer, or `expert`, `shard` or `decode_context` does not fit the others.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int | None = None
    context: int = 1
    shard: int = 1
    decode_context: int = 1
    external_data: int = 1

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("tensor", "pipeline", "data", "context", "shard", "decode_context", "external_data"):
            _check_size(name, getattr(self, name))
        fitting = _divisors_of(self.context) + [self.context * each for each in _divisors_of(self.tensor)[1:]]
        if self.decode_context not in fitting:
            raise UsageError(
                f"decode_context={self.decode_context} fits neither context={self.context} nor that times "
                f"tensor={self.tensor}; possible sizes: {_listed(fitting)}"
            )
        if self.data % self.shard:
            raise UsageError(
                f"shard={self.shard} does not divide data={self.data}; "
                f"possible sizes: {_listed(_divisors_of(self.data))}"
            )
        if self.expert is not None:
            _check_size("expert", self.expert)
            stage = self.data * self.context * self.tensor
            if stage % self.expert:
                raise UsageError(
                    f"expert={self.expert} does not divide the {stage} ranks of a pipeline stage "
                    f"(data={self.data} x context={self.context} x tensor={self.tensor}); "
                    f"possible sizes: {_listed(_divisors_of(stage))}"
                )

    @classmethod
    def from_world_size(
        cls,
        world_size: int,
        *,
        tensor: int = 1,
        pipeline: int = 1,
        data: int | None = None,
        expert: int | None = None,
        context: int = 1,
        shard: int = 1,
        decode_context: int = 1,
    ) -> Self:
        """Return the layout that uses all `world_size` ranks.

        The data-parallel size follows from the others. If it is given, `external_data` follows instead.

        Raises:
            UsageError: A size is not a positive integer, or the ranks cannot be divided into replicas of these sizes.
        """
        _check_size("world_size", world_size)
        sizes = {"tensor": tensor, "pipeline": pipeline, "context": context}
        if data is not None:
            sizes["data"] = data
        replica = cls(**sizes).world_size
        if world_size % replica:
            below = world_size // replica * replica
            fitting = f"{below} or {below + replica}" if below else f"at least {replica}"
            product = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise UsageError(
                f"{world_size} ranks cannot be divided into replicas of {replica} ranks ({product}): "
                f"start {fitting} ranks, or choose sizes whose product divides them"
            )
        rest = "data" if data is None else "external_data"
        sizes[rest] = world_size // replica
        return cls(**sizes, expert=expert, shard=shard, decode_context=decode_context)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.tensor * self.pipeline * self.data * self.context * self.external_data

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
        if name == "dcp":
            return self.decode_context
        return math.prod(size for size, _ in self._axes(_ALONG[name]))

    def groups(self, name: Dimension) -> RankLists:
        """Return the rank lists of dimension `name`.

        Every rank is in exactly one list. The lists are sorted by their first rank, and each is ascending, except for
        those of "dcp" that cross the context dimension.

        Raises:
            UsageError: The dimension is unknown.
        """
        size = self.size(name)
        line = self._line(_ALONG[name])
        runs = [line[start : start + size] for start in range(0, len(line), size)]
        origins = self._line([axis for axis in _GRID if axis not in _ALONG[name]])
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

    def rank_at(self, *, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0, xdp: int = 0) -> int:
        """Return the rank with these coordinates: the inverse of `coordinates`.

        Raises:
            UsageError: A coordinate is not below the size of its dimension.
        """
        rank = 0
        places: dict[Dimension, int] = {"xdp": xdp, "dp": dp, "pp": pp, "cp": cp, "tp": tp}
        for name, index in places.items():
            size = self.size(name)
            if type(index) is not int or not 0 <= index < size:
                raise UsageError(f"there is no index {index!r} in dimension {name!r} of {size} ranks")
            rank = rank * size + index
        return rank

    def _axes(self, names: Iterable[str]) -> list[tuple[int, int]]:
        """Return (size, rank distance between neighbours) of these axes of the grid, in the order of `names`."""
        sizes = {
            "tp": self.tensor,
            "cp": self.context,
            "pp": self.pipeline,
            "sdp": self.shard,
            "rdp": self.data // self.shard,
            "xdp": self.external_data,
        }
        axes, stride = {}, 1
        for name, size in sizes.items():
            axes[name] = (size, stride)
            stride *= size
        return [axes[name] for name in names]

    def _line(self, names: Iterable[str]) -> list[int]:
        """Return the ranks that differ from rank 0 along these axes only; along the last axis they are neighbours."""
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


def _divisors_of(number: int) -> list[int]:
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return low + [number // each for each in reversed(low) if each * each != number]


def _listed(sizes: Iterable[int]) -> str:
    found = list(map(str, sizes))
    return ", ".join(found if len(found) <= 12 else [*found[:6], "...", *found[-6:]])
