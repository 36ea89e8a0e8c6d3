"""Who sits where: seats from tables of placement groups, without Ray."""

import pytest

from coordinator.integrations.ray import Seat
from coordinator.integrations.ray.seats import assign
from shm_broadcast.errors import UsageError

ADDRESSES = {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}


def shown(seats: list[Seat]) -> list[tuple[int, int, str, int, int]]:
    return [(seat.rank, seat.bundle, seat.node_id, seat.local_rank, seat.local_world_size) for seat in seats]


@pytest.mark.guarantee("M6")
def test_the_drivers_node_comes_first() -> None:
    """Ray has packed the first bundles elsewhere; rank 0 is on the driver's node all the same."""
    seats = assign({0: "b", 1: "b", 2: "a", 3: "a"}, ADDRESSES, "a")
    assert shown(seats) == [(0, 2, "a", 0, 2), (1, 3, "a", 1, 2), (2, 0, "b", 0, 2), (3, 1, "b", 1, 2)]
    assert [seat.address for seat in seats] == ["10.0.0.1", "10.0.0.1", "10.0.0.2", "10.0.0.2"]


@pytest.mark.guarantee("M6")
def test_the_ranks_of_a_node_follow_each_other() -> None:
    """A spread group alternates between nodes; local ranks count from 0 on each."""
    seats = assign({0: "c", 1: "a", 2: "b", 3: "c", 4: "a", 5: "c"}, ADDRESSES, "a")
    assert shown(seats) == [
        (0, 1, "a", 0, 2),
        (1, 4, "a", 1, 2),
        (2, 0, "c", 0, 3),
        (3, 3, "c", 1, 3),
        (4, 5, "c", 2, 3),
        (5, 2, "b", 0, 1),
    ]


@pytest.mark.guarantee("M6")
@pytest.mark.parametrize("first", [None, "c", "no node of this cluster"])
def test_a_driver_without_bundles_leaves_the_order_to_the_bundles(first: str | None) -> None:
    """The nodes then come in the order of their lowest bundles."""
    seats = assign({0: "b", 1: "a", 2: "b"}, ADDRESSES, first)
    assert [seat.node_id for seat in seats] == ["b", "b", "a"]


def test_one_bundle_is_a_world_of_one() -> None:
    """Nothing is special about it."""
    assert shown(assign({0: "a"}, ADDRESSES, "b")) == [(0, 0, "a", 0, 1)]


def test_the_order_of_the_table_does_not_matter() -> None:
    """Ray promises none."""
    nodes = {0: "b", 1: "a", 2: "b", 3: "a"}
    backwards = dict(reversed(nodes.items()))
    assert assign(backwards, dict(reversed(ADDRESSES.items())), "a") == assign(nodes, ADDRESSES, "a")


@pytest.mark.guarantee("M6")
@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ({}, r"bundles from 0 on, not \[\]"),
        ({0: "a", 2: "a"}, r"bundles from 0 on, not \[0, 2\]"),
        ({0: "a", 1: ""}, r"bundles \[1\] .* are not placed"),
        ({0: "a", 1: "d", 2: "d"}, r"nodes that are not alive: d \(bundle 1\)"),
    ],
)
def test_what_has_no_place_is_refused(nodes: dict[int, str], text: str) -> None:
    """The error names the bundle, and the node where there is one."""
    with pytest.raises(UsageError, match=text):
        assign(nodes, ADDRESSES, "a")
