"""The model of a start: one process answers one request after the other, and ranks wait for the last one."""

import pytest

from benchmarks.start_simulation.costs import Costs
from benchmarks.start_simulation.model import Network, simulate
from benchmarks.start_simulation.requests import WAKING, Request, Round, record

FREE = Network(one_way_s=0.0, bytes_per_s=float("inf"))
SLOW_LINK = Network(one_way_s=2.0, bytes_per_s=float("inf"))


def costs_of(
    request_s: float = 0.0, wake_s: float = 0.0, asking_s: float = 0.0, byte_in_s: float = 0.0
) -> Costs:
    return Costs(request_s, 0.0, byte_in_s, 0.0, wake_s, 0.0, asking_s, 0.0)


def asked(*kinds: str, nbytes: int = 0) -> list[Request]:
    return [Request(kind, 1, nbytes, nbytes, 0.0) for kind in kinds]


ONE = Round(
    first=asked("add"),
    others=asked("add"),
    ending=asked(WAKING),
    told=asked("wait", "get"),
    ending_s=0.0,
    told_s=0.0,
    behind=[],
)


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        # Four come, one writes, three read.
        (costs_of(request_s=1.0), 8.0),
        # The waits come before the last rank asks for anything more.
        (costs_of(wake_s=1.0), 3.0),
    ],
)
def test_the_server_answers_one_after_the_other(costs: Costs, seconds: float) -> None:
    """Its work is the sum of what all ranks ask."""
    found = simulate([ONE], costs, 4, 0.0, FREE)
    assert found.over_s == (seconds,)
    assert found.busy == 1.0


def test_ranks_ask_at_the_same_time_if_they_have_processors() -> None:
    """Each asks for two or three things, and computes for a second for each of them."""
    costs = costs_of(asking_s=1.0)
    assert simulate([ONE], costs, 4, 0.0, FREE).over_s == (3.0,)
    assert simulate([ONE], costs, 4, 0.0, FREE, cores=1).over_s == (11.0,)
    assert simulate([ONE], costs, 4, 0.0, FREE, cores=2).over_s == (6.0,)


def test_time_is_counted_from_the_coming_of_the_last_rank() -> None:
    """What the others ask before is over then: the last one comes, writes, and three read."""
    assert simulate([ONE], costs_of(request_s=1.0), 4, 100.0, FREE).over_s == (5.0,)


def test_a_message_takes_its_way() -> None:
    """Two connections, two requests of the last one there and back; then the others get the wake, and ask once."""
    assert simulate([ONE], costs_of(), 4, 100.0, SLOW_LINK).over_s == (8.0 + 6.0 + 2.0 + 4.0,)


def test_bytes_share_the_link_and_the_server() -> None:
    """Ten bytes for each of eight requests."""
    large = Round(
        asked("add", nbytes=10),
        asked("add", nbytes=10),
        asked(WAKING, nbytes=10),
        asked("wait", "get"),
        0.0,
        0.0,
        [],
    )
    network = Network(one_way_s=0.0, bytes_per_s=10.0)
    assert simulate([large], costs_of(), 4, 0.0, network).over_s == (5.0,)
    assert simulate([large], costs_of(byte_in_s=0.1), 4, 0.0, FREE).over_s == (5.0,)


def test_a_later_agreement_begins_behind_the_first() -> None:
    """Each has an outcome of its own."""
    first, second = simulate([ONE, ONE], costs_of(request_s=1.0), 4, 0.0, FREE).over_s
    assert 8.0 <= first < second == 16.0


def test_what_is_recorded_does_not_grow_with_the_ranks() -> None:
    """Only the one that ends an agreement reads of all; who has asked is the code that real ranks run."""
    for few, many in zip(record(80), record(400), strict=True):
        for requests in ("first", "others", "told", "behind"):
            found = [[each.kind for each in getattr(round_, requests)] for round_ in (few, many)]
            assert found[0] == found[1]
        assert [each.kind for each in many.told] == ["wait", "get", "multi_get"]
        assert max(each.keys for each in many.ending) == 400
        assert max(each.keys for each in many.told) == 8
