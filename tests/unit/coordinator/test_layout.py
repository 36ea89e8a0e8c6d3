"""Sizes of parallel dimensions become lists of ranks."""

import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coordinator.layout import Dimension, ParallelLayout
from shm_broadcast.errors import UsageError

ROOT = Path(__file__).parents[3]
DIMENSIONS: tuple[Dimension, ...] = get_args(Dimension)
SIZES = st.integers(1, 6)


@st.composite
def layouts(draw: st.DrawFn) -> ParallelLayout:
    tensor, pipeline, data, context = (draw(SIZES) for _ in range(4))
    stage = tensor * data * context
    divisors = [each for each in range(1, stage + 1) if stage % each == 0]
    expert = draw(st.none() | st.sampled_from(divisors))
    shard = draw(st.sampled_from([each for each in range(1, data + 1) if data % each == 0]))
    decode = [each for each in range(1, context) if context % each == 0]
    decode += [context * each for each in range(1, tensor + 1) if tensor % each == 0]
    return ParallelLayout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        expert=expert,
        context=context,
        shard=shard,
        decode_context=draw(st.sampled_from(decode)),
        external_data=draw(st.integers(1, 3)),
    )


def test_eight_ranks_in_two_by_four() -> None:
    """The usual example of engines, tensor 2 and pipeline 4, gives the usual lists."""
    layout = ParallelLayout(tensor=2, pipeline=4)
    assert layout.world_size == 8
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("pp") == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert layout.groups("dp") == tuple((rank,) for rank in range(8))
    assert layout.groups("cp") == tuple((rank,) for rank in range(8))
    assert layout.groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("world") == (tuple(range(8)),)


def test_eight_ranks_in_three_dimensions() -> None:
    """With data 2 x pipeline 2 x tensor 2, experts span data and tensor within one stage."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=2)
    assert layout.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert layout.groups("pp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("dp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("ep") == ((0, 1, 4, 5), (2, 3, 6, 7))


def test_an_expert_size_cuts_the_stage() -> None:
    """With `expert` given, the ranks of a stage are divided into runs of that size."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=2, expert=2)
    assert layout.groups("ep") == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert ParallelLayout(tensor=2, data=4, expert=4).groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert layout.size("ep") == 2


def test_context_stands_between_tensor_and_pipeline() -> None:
    """Context varies slower than tensor and faster than pipeline; experts span it too."""
    layout = ParallelLayout(tensor=2, pipeline=2, context=2)
    assert layout.groups("cp") == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert layout.groups("pp") == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert layout.groups("ep") == ((0, 1, 2, 3), (4, 5, 6, 7))


def lines(ranks: torch.Tensor, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the runs of `size` ranks of a grid, sorted."""
    return tuple(sorted(map(tuple, ranks.reshape(-1, size).tolist())))


@pytest.mark.guarantee("G23")
@given(layouts())
def test_lists_are_those_of_a_tensor_with_five_axes(layout: ParallelLayout) -> None:
    """Engines number the ranks of a tensor, move one axis to the end, and cut the result into runs."""
    data, shard = layout.data, layout.shard
    shape = (layout.external_data, data, layout.pipeline, layout.context, layout.tensor)
    ranks = torch.arange(layout.world_size).reshape(shape)
    halves = ranks.reshape(shape[0], data // shard, shard, *shape[2:])
    expected: dict[Dimension, tuple[tuple[int, ...], ...]] = {
        "world": lines(ranks, layout.world_size),
        "tp": lines(ranks, layout.tensor),
        "dcp": lines(ranks.transpose(3, 4), layout.decode_context),
        "cp": lines(ranks.transpose(3, 4), layout.context),
        "pp": lines(ranks.transpose(2, 4), layout.pipeline),
        "dp": lines(ranks.transpose(1, 4), data),
        "ep": lines(ranks.transpose(1, 2), layout.expert or data * layout.context * layout.tensor),
        "rdp": lines(halves.transpose(1, 5), data // shard),
        "sdp": lines(halves.transpose(2, 5), shard),
        "replica": lines(ranks, layout.pipeline * layout.context * layout.tensor),
        "xdp": lines(ranks.transpose(0, 4), layout.external_data),
    }
    assert layout.rank_lists == expected


@given(layouts(), st.sampled_from(DIMENSIONS))
def test_every_rank_is_in_one_list(layout: ParallelLayout, name: Dimension) -> None:
    """The lists of a dimension partition the world and have its size. They ascend, unless they cross the context."""
    lists = layout.groups(name)
    assert sorted(rank for ranks in lists for rank in ranks) == list(range(layout.world_size))
    assert {len(ranks) for ranks in lists} == {layout.size(name)}
    if name != "dcp" or layout.context == 1:
        assert all(list(ranks) == sorted(ranks) for ranks in lists)
    assert list(lists) == sorted(lists)
    assert layout.rank_lists[name] == lists


@given(layouts(), st.data())
def test_coordinates_find_the_rank_again(layout: ParallelLayout, data: st.DataObject) -> None:
    """`rank_at` inverts `coordinates`, and a coordinate is the rank's position in `group_of`."""
    rank = data.draw(st.integers(0, layout.world_size - 1))
    where = layout.coordinates(rank)
    places = {name: where[name] for name in ("tp", "cp", "pp", "dp", "xdp")}
    assert layout.rank_at(**places) == rank
    for name in DIMENSIONS:
        ranks = layout.group_of(name, rank)
        assert ranks in layout.groups(name)
        assert ranks.index(rank) == where[name]


@given(layouts())
def test_the_data_size_follows_from_the_world(layout: ParallelLayout) -> None:
    """`from_world_size` finds the layout with that many ranks, or the number of independent ones."""
    sizes: dict[str, Any] = {
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "expert": layout.expert,
        "context": layout.context,
        "shard": layout.shard,
        "decode_context": layout.decode_context,
    }
    assert ParallelLayout.from_world_size(layout.world_size, data=layout.data, **sizes) == layout
    ranks = layout.world_size // layout.external_data
    assert ParallelLayout.from_world_size(ranks, **sizes) == replace(layout, external_data=1)


def test_a_world_that_does_not_divide_is_refused() -> None:
    """The error names the product and the numbers of ranks that fit."""
    with pytest.raises(
        UsageError, match=r"10 ranks .* replicas of 4 ranks \(tensor=2 x pipeline=2.* 8 or 12 ranks"
    ):
        ParallelLayout.from_world_size(10, tensor=2, pipeline=2)
    with pytest.raises(UsageError, match="start at least 4 ranks"):
        ParallelLayout.from_world_size(3, tensor=4)
    with pytest.raises(UsageError, match=r"8 ranks .* replicas of 6 ranks \(tensor=2 .* x data=3\)"):
        ParallelLayout.from_world_size(8, tensor=2, data=3)


def test_an_expert_size_that_does_not_divide_is_refused() -> None:
    """The error names the number of ranks in a stage and the sizes that fit."""
    with pytest.raises(
        UsageError, match=r"expert=3 does not divide the 8 ranks .* possible sizes: 1, 2, 4, 8"
    ):
        ParallelLayout(tensor=2, data=4, expert=3)
    with pytest.raises(UsageError, match=r"1, 2, 3, 4, 5, 6, \.\.\., "):
        ParallelLayout(data=720720, expert=720719)


@pytest.mark.parametrize(
    ("sizes", "fitting"),
    [
        ({"tensor": 4, "decode_context": 3}, "1, 2, 4"),
        ({"tensor": 2, "context": 4, "decode_context": 3}, "1, 2, 4, 8"),
        ({"tensor": 2, "context": 6, "decode_context": 4}, "1, 2, 3, 6, 12"),
        ({"data": 2, "decode_context": 2}, "1$"),
    ],
)
def test_a_decode_context_that_fits_no_axis_is_refused(sizes: dict[str, int], fitting: str) -> None:
    """The error names the sizes that cut the context evenly, or all of it together with tensor ranks."""
    with pytest.raises(UsageError, match=f"decode_context=.* possible sizes: {fitting}"):
        ParallelLayout(**sizes)


def test_decode_context_groups_take_context_ranks_before_tensor_ranks() -> None:
    """Within a group the context varies fastest; without prefill context parallelism the groups are runs of tp."""
    assert ParallelLayout(tensor=4, decode_context=2).groups("dcp") == ((0, 1), (2, 3))
    layout = ParallelLayout(tensor=2, context=2, decode_context=2)
    assert layout.groups("dcp") == layout.groups("cp") == ((0, 2), (1, 3))
    layout = ParallelLayout(tensor=2, context=2, pipeline=2, decode_context=4)
    assert layout.groups("dcp") == ((0, 2, 1, 3), (4, 6, 5, 7))
    assert layout.group_of("dcp", 6) == (4, 6, 5, 7)
    assert layout.coordinates(6)["dcp"] == 1


def test_external_replicas_are_far_apart() -> None:
    """Four ranks with tensor 2 and data 1 are two replicas; no list but those of the world and of xdp spans both."""
    layout = ParallelLayout.from_world_size(4, tensor=2, data=1)
    assert layout == ParallelLayout(tensor=2, external_data=2)
    assert layout.groups("tp") == layout.groups("ep") == layout.groups("replica") == ((0, 1), (2, 3))
    assert layout.groups("dp") == ((0,), (1,), (2,), (3,))
    assert layout.groups("xdp") == ((0, 2), (1, 3))
    assert layout.rank_at(xdp=1, tp=1) == 3


@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True, None])
@pytest.mark.parametrize(
    "name", ["tensor", "pipeline", "data", "context", "decode_context", "external_data", "expert"]
)
def test_a_size_that_is_no_positive_integer_is_refused(name: str, value: Any) -> None:
    """The error names the size and its value."""
    if name == "expert" and value is None:
        return
    with pytest.raises(UsageError, match=f"{name}={value!r} must be an integer"):
        ParallelLayout(**{name: value})


@pytest.mark.parametrize("value", [0, -1, 1.5, None])
def test_a_world_size_that_is_no_positive_integer_is_refused(value: Any) -> None:
    """The error names world_size."""
    with pytest.raises(UsageError, match="world_size="):
        ParallelLayout.from_world_size(value)


@pytest.mark.parametrize("rank", [-1, 8, 1.0, True, None])
def test_a_rank_outside_the_world_is_refused(rank: Any) -> None:
    """The error names the rank and the world's size."""
    layout = ParallelLayout(tensor=2, pipeline=4)
    with pytest.raises(UsageError, match="in a world of 8 ranks"):
        layout.coordinates(rank)
    with pytest.raises(UsageError, match="in a world of 8 ranks"):
        layout.group_of("tp", rank)


@pytest.mark.parametrize("place", [{"tp": 2}, {"pp": -1}, {"dp": 1}, {"cp": "0"}])
def test_a_coordinate_outside_its_dimension_is_refused(place: dict[str, Any]) -> None:
    """The error names the dimension."""
    with pytest.raises(UsageError, match=f"in dimension '{next(iter(place))}'"):
        ParallelLayout(tensor=2, pipeline=4).rank_at(**place)


def test_an_unknown_dimension_is_refused() -> None:
    """The error lists the valid dimensions."""
    name: Any = "pipeline"
    for ask in (
        ParallelLayout().groups,
        ParallelLayout().size,
        lambda name: ParallelLayout().group_of(name, 0),
    ):
        with pytest.raises(UsageError, match="the dimensions are world, tp, dcp, cp, pp, dp, ep"):
            ask(name)


def test_a_layout_is_a_value() -> None:
    """Equal sizes give equal, hashable layouts that cannot be changed."""
    layout = ParallelLayout(tensor=2)
    assert layout == ParallelLayout(tensor=2)
    assert len({layout, ParallelLayout(tensor=2), ParallelLayout(tensor=4)}) == 2
    with pytest.raises(FrozenInstanceError):
        layout.tensor = 3  # type: ignore[misc]


@pytest.mark.parametrize("expert", [None, 50])
def test_a_hundred_thousand_ranks(expert: int | None) -> None:
    """Every dimension of 100,000 ranks partitions them, and `group_of` agrees at the ends and in between."""
    layout = ParallelLayout.from_world_size(100_000, tensor=8, pipeline=5, context=5, expert=expert)
    assert layout.data == 500
    everybody = set(range(100_000))
    for name, lists in layout.rank_lists.items():
        assert set().union(*lists) == everybody
        assert sum(map(len, lists)) == 100_000
        assert {len(ranks) for ranks in lists} == {layout.size(name)}
        for ranks in (lists[0], lists[len(lists) // 2], lists[-1]):
            assert layout.group_of(name, ranks[-1]) == ranks


def test_the_module_loads_no_library() -> None:
    """The module itself imports neither torch nor any other library."""
    code = """
import sys, types
for name in "coordinator", "shm_broadcast":
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name]
import coordinator.layout
assert not {"torch", "numpy", "zmq", "msgspec"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
