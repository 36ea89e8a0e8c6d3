"""`ParallelLayout` computes the rank lists of all parallel dimensions from their sizes, equally on every rank.

Ranks are numbered as engines number them: tensor varies fastest, then context, then pipeline, then data. With
coordinates `t`, `c`, `p`, `d` and sizes `T`, `C`, `P`:

    rank = ((d * P + p) * C + c) * T + t

Experts are spread over all ranks that hold the same layers: data x context x tensor ranks in each pipeline stage. In
ascending order, these ranks are cut into runs of `expert` ranks.

Hybrid sharding cuts each data-parallel list into runs of `shard` neighbours. The model is sharded over a run (`sdp`).
Ranks at the same position in different runs hold the same shard (`rdp`).
"""

from dataclasses import dataclass
from typing import Literal, Self, get_args

from shm_broadcast.errors import UsageError

__all__ = ["Dimension", "ParallelLayout", "RankLists"]

Dimension = Literal["world", "tp", "cp", "pp", "dp", "ep", "rdp", "sdp"]
"""All ranks; tensor, context, pipeline, data and expert parallel; replicated and sharded data parallel."""

RankLists = tuple[tuple[int, ...], ...]


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
            if self._ranks_per_stage % self.expert:
                raise UsageError(
                    f"expert={self.expert} does not divide the {self._ranks_per_stage} ranks of a pipeline stage "
                    f"(data={self.data} x context={self.context} x tensor={self.tensor}); "
                    f"possible sizes: {_divisors(self._ranks_per_stage)}"
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
        return {name: self.groups(name) for name in get_args(Dimension)}

    def size(self, name: Dimension) -> int:
        """Return how many ranks a list of dimension `name` has.

        Raises:
            UsageError: There is no such dimension.
        """
        sizes: dict[str, int] = {
            "world": self.world_size,
            "tp": self.tensor,
            "cp": self.context,
            "pp": self.pipeline,
            "dp": self.data,
            "ep": self._ranks_per_stage if self.expert is None else self.expert,
            "rdp": self.data // self.shard,
            "sdp": self.shard,
        }
        if name not in sizes:
            raise UsageError(f"unknown dimension {name!r}; the dimensions are {', '.join(sizes)}")
        return sizes[name]

    def groups(self, name: Dimension) -> RankLists:
        """Return the rank lists of dimension `name`.

        Every rank is in exactly one list. Each list is ascending, and the lists are sorted by their first rank.

        Raises:
            UsageError: The dimension is unknown.
        """
        size = self.size(name)
        if name == "ep":
            stages = (self._stage(stage) for stage in range(self.pipeline))
            runs = (stage[start : start + size] for stage in stages for start in range(0, len(stage), size))
            return tuple(sorted(runs))
        stride = self._stride(name)
        # A list starts at each rank whose coordinate in this dimension is 0. These ranks form runs of `stride`, one in
        # each block of `stride * size` ranks.
        blocks = range(0, self.world_size, stride * size)
        firsts = (first for block in blocks for first in range(block, block + stride))
        return tuple(tuple(range(first, first + size * stride, stride)) for first in firsts)

    def group_of(self, name: Dimension, rank: int) -> tuple[int, ...]:
        """Return the list of dimension `name` that contains `rank`, without computing the other lists.

        Raises:
            UsageError: The dimension is unknown, or there is no such rank.
        """
        size = self.size(name)
        index = self.coordinates(rank)[name]
        if name == "ep":
            per_replica = self.tensor * self.context
            position = self._position_in_stage(rank)
            stage = rank % (per_replica * self.pipeline) // per_replica
            return tuple(
                self._rank_in_stage(stage, each) for each in range(position - index, position - index + size)
            )
        stride = self._stride(name)
        first = rank - index * stride
        return tuple(range(first, first + size * stride, stride))

    def coordinates(self, rank: int) -> dict[Dimension, int]:
        """Return the position of `rank` in its list of each dimension.

        Raises:
            UsageError: There is no such rank.
        """
        if type(rank) is not int or not 0 <= rank < self.world_size:
            raise UsageError(f"there is no rank {rank!r} in a world of {self.world_size} ranks")
        return {
            "world": rank,
            "tp": rank % self.tensor,
            "cp": rank // self._stride("cp") % self.context,
            "pp": rank // self._stride("pp") % self.pipeline,
            "dp": rank // self._stride("dp"),
            "ep": self._position_in_stage(rank) % self.size("ep"),
            "rdp": rank // self._stride("rdp"),
            "sdp": rank // self._stride("sdp") % self.shard,
        }

    def rank_at(self, *, tp: int = 0, cp: int = 0, pp: int = 0, dp: int = 0) -> int:
        """Return the rank with these coordinates: the inverse of `coordinates`.

        Raises:
            UsageError: A coordinate is not below the size of its dimension.
        """
        places: tuple[tuple[Dimension, int], ...] = (("tp", tp), ("cp", cp), ("pp", pp), ("dp", dp))
        for name, index in places:
            if type(index) is not int or not 0 <= index < self.size(name):
                raise UsageError(
                    f"there is no index {index!r} in dimension {name!r} of {self.size(name)} ranks"
                )
        return sum(index * self._stride(name) for name, index in places)

    @property
    def _ranks_per_stage(self) -> int:
        return self.data * self.context * self.tensor

    def _stride(self, name: Dimension) -> int:
        """Return the rank distance between neighbours in dimension `name`, which is not "ep"."""
        strides = {
            "world": 1,
            "tp": 1,
            "cp": self.tensor,
            "pp": self.tensor * self.context,
            "dp": self.tensor * self.context * self.pipeline,
            "sdp": self.tensor * self.context * self.pipeline,
            "rdp": self.tensor * self.context * self.pipeline * self.shard,
        }
        return strides[name]

    def _stage(self, stage: int) -> tuple[int, ...]:
        return tuple(self._rank_in_stage(stage, position) for position in range(self._ranks_per_stage))

    def _rank_in_stage(self, stage: int, position: int) -> int:
        replica, rest = divmod(position, self.tensor * self.context)
        return replica * self._stride("dp") + stage * self._stride("pp") + rest

    def _position_in_stage(self, rank: int) -> int:
        """Return the position of `rank` among the ascending ranks of its pipeline stage."""
        per_replica = self.tensor * self.context
        return rank // self._stride("dp") * per_replica + rank % per_replica


def _check_size(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise UsageError(f"{name}={value!r} must be an integer of at least 1")


def _divisors(number: int) -> str:
    found = [str(each) for each in range(1, number + 1) if number % each == 0]
    return ", ".join(found if len(found) <= 12 else [*found[:6], "...", *found[-6:]])
