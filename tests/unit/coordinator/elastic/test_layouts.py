"""Which ranks go on when some are lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.elastic.layouts import drop_replicas, merged, torn_replicas
from coordinator.layout import ParallelLayout
from shm_broadcast.errors import UsageError


def test_whole_replicas_go_on_in_their_order() -> None:
    """A replica is what `tp`, `pp` and `cp` span: with one lost rank all of it goes."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=3)
    placed = drop_replicas(layout, set(range(12)) - {5})
    assert placed.ranks == (0, 1, 2, 3, 8, 9, 10, 11)
    assert placed.layout == ParallelLayout(tensor=2, pipeline=2, data=2)
    assert drop_replicas(layout, range(12)) == (layout, tuple(range(12)))


def test_experts_and_shards_are_spread_over_what_is_left_if_their_number_does_not_divide_it() -> None:
    """The same number is kept where it can be."""
    experts = ParallelLayout(tensor=2, data=4, expert=4)
    assert drop_replicas(experts, range(4)).layout.expert == 4
    assert drop_replicas(experts, range(6)).layout.expert is None
    sharded = ParallelLayout(data=4, shard=2)
    assert drop_replicas(sharded, (0, 1)).layout.shard == 2
    assert drop_replicas(sharded, (0, 1, 3)).layout.shard == 3


def test_what_no_rank_can_go_on_with_is_refused() -> None:
    """No replica is whole; or independent sets of replicas would get different sizes."""
    with pytest.raises(UsageError, match=r"no replica of the model is whole: each needs 2 ranks"):
        drop_replicas(ParallelLayout(tensor=2, data=2), (0, 3))
    with pytest.raises(UsageError, match="cannot be divided into 2 independent sets"):
        drop_replicas(ParallelLayout(data=2, external_data=2), (0, 1, 3))


@pytest.mark.parametrize(
    ("data", "sets", "ranks", "left"),
    [
        pytest.param(2, 2, (2, 3), r"\[0, 2\]", id="one set has lost all"),
        pytest.param(2, 3, (0, 1, 2, 4, 5), r"\[2, 1, 2\]", id="one set has lost one"),
        pytest.param(3, 2, (0, 1, 2, 5), r"\[3, 1\]", id="an even number is left"),
    ],
)
def test_an_independent_set_keeps_its_own_replicas(
    data: int, sets: int, ranks: tuple[int, ...], left: str
) -> None:
    """A replica of one deployment never becomes one of another, even if their number would allow it."""
    with pytest.raises(UsageError, match=f"each set keeps its own, which are {left}"):
        drop_replicas(ParallelLayout(data=data, external_data=sets), ranks)
    equal = drop_replicas(ParallelLayout(data=3, external_data=2), (0, 2, 4, 5))
    assert equal.ranks == (0, 2, 4, 5)
    assert equal.layout == ParallelLayout(data=2, external_data=2)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.data())
def test_the_rule_chooses_the_ranks_that_it_has_chosen(
    tensor: int, pipeline: int, data: int, draw: st.DataObject
) -> None:
    """Ranks check the choice of another one by asking the rule again, with the chosen ranks alone."""
    layout = ParallelLayout(tensor=tensor, pipeline=pipeline, data=data)
    left = draw.draw(st.sets(st.integers(0, layout.world_size - 1)))
    try:
        placed = drop_replicas(layout, left)
    except UsageError:
        return
    assert set(placed.ranks) <= left
    assert placed.layout.world_size == len(placed.ranks)
    assert drop_replicas(layout, placed.ranks) == placed


def test_a_place_is_before_the_first_larger_one() -> None:
    """Those that go on keep their order, whatever it is; a place without a larger one is the last."""
    assert merged((0, 1, 3), (2, 9)) == (0, 1, 2, 3, 9)
    assert merged((3, 0), (1, 2)) == (1, 2, 3, 0)
    assert merged((), (5, 4)) == (4, 5)


def test_replicas_that_are_torn_apart_are_named() -> None:
    """Processes may come between two replicas, not into one."""
    two, three = ParallelLayout(tensor=2, data=2), ParallelLayout(tensor=2, data=3)
    assert torn_replicas(two, three, (0, 1, 4, 5)) == []
    assert torn_replicas(two, three, (2, 3, 4, 5)) == []
    assert torn_replicas(two, three, (0, 1, 3, 4)) == [(2, 3)]
