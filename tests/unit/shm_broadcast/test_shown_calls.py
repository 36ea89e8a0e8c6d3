"""What the status page shows of the calls of a group that Python code makes, and of its waits."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Lane
from shm_broadcast import _core
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import NOBODY, Outcome
from shm_broadcast.status.page import own_page
from shm_broadcast.status.shown_calls import ShownCalls, StatusLane

DEVICE_WAITS = "device waits"

NUMBERS = itertools.count()


class Call(NamedTuple):
    """A call of a plane; those between two ranks have the number 0."""

    plane: str
    name: str
    number: int
    lane: StatusLane | None = None


class Work(NamedTuple):
    """What waits for these global ranks."""

    ranks: tuple[int, ...] | None = ()

    def pending(self) -> tuple[int, ...] | None:
        """Return the ranks."""
        return self.ranks


RECEIVE = Call("device", "recv from rank 7", 0)


@pytest.fixture
def shown() -> Iterator[ShownCalls]:
    """Return what shows a new group of the global ranks 4 and 7, in which this one is rank 4."""
    made = ShownCalls(f"shown-calls:{next(NUMBERS)}", 0, [4, 7])
    yield made
    made.status.leave()


def copied() -> bytes:
    """Return a copy of this process's page."""
    return _core.status_copy(own_page().segment.memory)


def lanes(plane: str = "") -> list[Lane]:
    """Return what the page shows of the new group, or of one of its planes, in the order of the lanes' making."""
    group = max(decode_page(copied()).groups, key=lambda each: each.created_ns)
    return [lane for lane in group.lanes if plane in ("", lane.plane)]


def during(shown: ShownCalls, call: Call, work: Work, look: Callable[[], Any]) -> Any:
    """Wait for `work` in a call; return what `look` finds meanwhile."""
    found = []

    def wait(*arguments: object) -> None:
        assert arguments == (call, work, 5.0)
        found.append(look())

    shown.wait(call, work, 5.0, wait)
    (only,) = found
    return only


def interrupted(*_arguments: object) -> None:
    """Raise as a signal handler does that strikes in a wait."""
    raise KeyboardInterrupt


@pytest.mark.guarantee("S1")
def test_a_collective_sleeps_while_it_waits_and_computes_again_behind_it(shown: ShownCalls) -> None:
    """Its lane says so, also if the wait raises. No lane of waits is made."""
    lane = shown.lanes["device"]

    def state() -> str:
        return lanes("device")[0].state

    call = Call("device", "all_reduce", 7, lane)
    lane.begin(kind_of("all_reduce"), 7, 1024, NOBODY)
    assert state() == "computing"
    assert during(shown, call, Work((7,)), state) == "asleep"
    assert state() == "computing"
    with pytest.raises(KeyboardInterrupt):
        shown.wait(call, Work((7,)), 5.0, interrupted)
    assert state() == "computing"
    lane.end(Outcome.DONE)
    assert [each.plane for each in lanes()] == ["device"]


@pytest.mark.guarantee("S1")
def test_a_native_plane_shows_its_waits_itself(shown: ShownCalls) -> None:
    """Python writes nothing of them."""
    shown.native_lane("shared", "shared memory")
    before = copied()
    call = Call("shared", "all_reduce", 7)
    assert during(shown, call, Work((7,)), copied) == before


@pytest.mark.guarantee("S1")
@pytest.mark.parametrize(("ranks", "peer"), [((7,), 1), ((4, 7), 0), ((9,), None), ((), None), (None, None)])
def test_a_wait_between_two_ranks_is_shown_with_the_peer_it_is_for(
    shown: ShownCalls, ranks: tuple[int, ...] | None, peer: int | None
) -> None:
    """The first rank that it waits for counts; one that is not known, or not of the group, is nobody."""
    lane = during(shown, RECEIVE, Work(ranks), lambda: lanes(DEVICE_WAITS)[0])
    assert (lane.state, lane.call, lane.number, lane.root) == ("asleep", "recv", 0, peer)
    with pytest.raises(KeyboardInterrupt):
        shown.wait(RECEIVE, Work(ranks), 5.0, interrupted)
    (lane,) = lanes(DEVICE_WAITS)
    (counted,) = lane.counters
    assert (lane.state, counted.calls, counted.errors) == ("idle", 2, 1)


@pytest.mark.guarantee("S1")
def test_waits_at_once_have_lanes_of_their_own_which_later_ones_use_again(shown: ShownCalls) -> None:
    """Three threads wait, and a signal handler inside of one of the waits; later waits need no new lane."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def wait(*_arguments: object) -> None:
        begun.release()
        assert go.wait(60.0)

    def in_the_handler(*_arguments: object) -> None:
        shown.wait(RECEIVE, Work((7,)), 5.0, wait)

    threads = [
        threading.Thread(target=shown.wait, args=[RECEIVE, Work((7,)), 5.0, each])
        for each in (wait, wait, in_the_handler)
    ]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60.0)
    states = [lane.state for lane in lanes(DEVICE_WAITS)]
    go.set()
    for thread in threads:
        thread.join()
    assert states == ["asleep"] * 4
    for _ in range(10):
        assert during(shown, RECEIVE, Work((7,)), lambda: len(lanes(DEVICE_WAITS))) == 4
    assert [lane.state for lane in lanes(DEVICE_WAITS)] == ["idle"] * 4
    assert sum(lane.counters[0].calls for lane in lanes(DEVICE_WAITS)) == 14


@pytest.mark.guarantee("S1")
def test_a_wait_in_which_the_group_is_left_writes_nothing_more(shown: ShownCalls) -> None:
    """A thread may leave the group while another one waits; the place may be that of another group then."""

    def leave() -> bytes:
        shown.status.leave()
        return copied()

    left = during(shown, RECEIVE, Work((7,)), leave)
    assert copied() == left


def test_lanes_of_waits_are_made_when_all_others_are_taken_and_let_go_at_the_end() -> None:
    """Nothing refers to them when what shows the waits has gone."""
    made, given = list[_core.StatusLane](), list[object]()

    def make() -> _core.StatusLane:
        made.append(_core.status_nowhere())
        return made[-1]

    before = sys.getrefcount(make)
    waits = _core.StatusWaits(make, {})
    for number in range(3):
        waits.show(1, 0, None, lambda *arguments: given.append(arguments), number, "work", None)
    assert given == [(number, "work", None) for number in range(3)]
    (only,) = made
    held = sys.getrefcount(only)
    del waits
    assert (sys.getrefcount(only), sys.getrefcount(make)) == (held - 1, before)


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_lane_that_cannot_be_made_ends_the_wait_before_it_begins(error: type[BaseException]) -> None:
    """The error passes, and the next wait tries again."""

    def make() -> _core.StatusLane:
        raise error

    waits = _core.StatusWaits(make, {})
    for _ in range(2):
        with pytest.raises(error):
            waits.show(1, 0, None, lambda *_: pytest.fail("the wait began"), None, None, None)


def test_arguments_of_the_native_core_are_checked() -> None:
    """What makes no lanes, numbers that are none, and calls with too few arguments are refused."""
    untyped: Any = _core.StatusWaits
    with pytest.raises(TypeError):
        untyped()
    with pytest.raises(TypeError, match="something else"):
        untyped(lambda: "no lane", {}).show(1, 0, None, print, None, None, None)
    waits: Any = _core.StatusWaits(_core.status_nowhere, {})
    with pytest.raises(TypeError, match="show takes 7"):
        waits.show(1, 0, None, print)
    refused: list[Any] = [7, [[]]]  # no sequence; of what cannot be looked up
    for ranks in refused:
        with pytest.raises(TypeError):
            waits.show(1, 0, ranks, print, None, None, None)
    with pytest.raises(OverflowError):
        waits.show(-1, 0, None, print, None, None, None)
    lane: Any = _core.status_nowhere()
    with pytest.raises(TypeError, match="asleep takes 4"):
        lane.asleep(print)
    with pytest.raises(TypeError, match="begin takes 4"):
        lane.begin(1, 0, 0)
