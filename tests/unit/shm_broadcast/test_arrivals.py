"""A rank reports in order where it waits, and which ranks a call names if it cannot end follows from reports alone."""

import threading

import pytest

from shm_broadcast.reports.arrivals import Announcer, Arrival, late_for

EARLY, LATE = Arrival("gather", 5), Arrival("barrier", 6)


class Store:
    """Holds what was reported, in order; `before` runs at the beginning of each report."""

    def __init__(self) -> None:
        self.reports: list[tuple[str, Arrival]] = []
        self.before = lambda: None

    def arrive(self, plane: str, arrival: Arrival) -> None:
        self.before()
        self.reports.append((plane, arrival))


def over(arrival: Arrival) -> Arrival:
    """Return the report that the wait in `arrival` is over."""
    return Arrival(arrival.operation, arrival.number, is_over=True)


def test_a_wait_that_was_not_reported_is_not_reported_when_it_is_over() -> None:
    """Neither before the first report, nor behind that of another call."""
    store = Store()
    announcer = Announcer(store.arrive)
    announcer.end_wait("host", 5)
    announcer.begin_wait("host", EARLY)
    announcer.end_wait("host", 6)
    announcer.end_wait("device", 5)
    assert store.reports == [("host", EARLY)]


def test_the_end_of_a_wait_is_reported_once_and_a_further_round_anew() -> None:
    """A call of several rounds waits in each of them."""
    store = Store()
    announcer = Announcer(store.arrive)
    for _ in range(2):
        announcer.begin_wait("host", EARLY)
        announcer.end_wait("host", 5)
        announcer.end_wait("host", 5)
    assert [report for _, report in store.reports] == [EARLY, over(EARLY)] * 2


def test_a_rank_that_has_come_to_a_later_call_is_not_reported_at_an_earlier_one() -> None:
    """Several collectives may be in flight at once, and any of them may be waited for first."""
    store = Store()
    announcer = Announcer(store.arrive)
    announcer.begin_wait("host", LATE)
    announcer.begin_wait("host", EARLY)
    announcer.end_wait("host", 5)
    assert store.reports == [("host", LATE)] * 2
    announcer.begin_wait("device", EARLY)
    announcer.end_wait("host", 6)
    announcer.begin_wait("host", EARLY)
    assert store.reports[2:] == [("device", EARLY), ("host", over(LATE)), ("host", over(LATE))]


@pytest.mark.parametrize("place", ["begin", "end"])
def test_a_report_that_overtakes_a_later_one_is_followed_by_that(place: str) -> None:
    """The store takes the first one late. A signal handler that interrupted it may wait for the other thread."""
    store = Store()
    announcer = Announcer(store.arrive)
    if place == "end":
        announcer.begin_wait("host", EARLY)

    def report_another() -> None:
        store.before = lambda: None
        thread = threading.Thread(target=announcer.begin_wait, args=["host", LATE], daemon=True)
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()

    store.before = report_another
    if place == "begin":
        announcer.begin_wait("host", EARLY)
    else:
        announcer.end_wait("host", 5)
    first = EARLY if place == "begin" else over(EARLY)
    assert [report for _, report in store.reports][-3:] == [LATE, first, LATE]
    announcer.end_wait("host", 5)
    announcer.end_wait("host", 6)
    assert store.reports[-1] == ("host", over(LATE))


@pytest.mark.parametrize(
    ("arrivals", "named"),
    [
        ({}, [1, 2, 3]),
        ({1: Arrival("barrier", 7), 2: Arrival("barrier", 8, is_over=True)}, [3]),
        ({1: EARLY, 2: EARLY}, [3]),
        ({1: EARLY, 2: LATE, 3: over(LATE)}, [3]),
        ({1: EARLY, 2: LATE, 3: LATE}, [1]),
        ({1: LATE, 2: LATE, 3: LATE}, [1, 2, 3]),
        ({1: over(LATE), 2: LATE}, [1, 3]),
        ({1: LATE, 2: LATE, 3: Arrival("gather", 7)}, [1, 2]),
        (dict.fromkeys([1, 2, 3], Arrival("gather", 7)), []),
    ],
)
def test_who_has_not_come_as_far_as_the_others_is_named(
    arrivals: dict[int, Arrival], named: list[int]
) -> None:
    """Of the ranks that have not come to call 7, those are left out that wait in an earlier one for others of them."""
    assert late_for(7, [1, 2, 3], arrivals) == named
