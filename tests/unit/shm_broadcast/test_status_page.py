"""The page that a process writes: what it shows of groups, lanes and queues, and what it never shows."""

import os
import time
from collections.abc import Iterator

import pytest

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Group, Page
from shm_broadcast import _core
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.status import layout
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import GroupState, LaneState, Outcome
from shm_broadcast.status.page import OwnPage, own_page
from shm_broadcast.status.shown_calls import ShownCalls
from tests.waiting import wait_until

SECRET = "the-user's-secret"


@pytest.fixture
def page() -> Iterator[OwnPage]:
    """Return a page of this process beside its own."""
    made = OwnPage()
    yield made
    made.segment.close()
    # The mapping goes with what refers to it.
    vars(made).clear()


def read(page: OwnPage) -> Page:
    """Return what a page says."""
    return decode_page(_core.status_copy(page.segment.memory))


def group_of(page: OwnPage, name: str) -> Group:
    """Return what a page says of a group."""
    return next(group for group in read(page).groups if group.name == name)


@pytest.mark.guarantee("S1")
def test_a_call_is_shown_while_it_goes_on_and_counted_when_it_ends(page: OwnPage) -> None:
    """The lane has the call, its state and its beginning; counters and records have it when it has ended."""
    status = page.group("tp:0", 1, [4, 7], epoch=2)
    status.set_state(GroupState.USABLE)
    lane = status.lane("device", "process group")
    before = time.monotonic_ns()
    lane.begin(kind_of("reduce"), 3, 4096, 1)
    lane.set_state(LaneState.ASLEEP)
    shown = group_of(page, "tp:0")
    assert (shown.state, shown.epoch, shown.place, shown.ranks) == ("usable", 2, 1, (4, 7))
    (only,) = shown.lanes
    assert (only.state, only.call, only.number, only.nbytes, only.root) == ("asleep", "reduce", 3, 4096, 1)
    assert abs(only.begin_ns - before) < 1e8
    assert (only.counters, read(page).records) == ((), ())
    lane.end(Outcome.DONE)
    lane.begin(kind_of("reduce"), 4, 1000, 1)
    lane.end(Outcome.FAILED)
    (only,) = group_of(page, "tp:0").lanes
    (counters,) = only.counters
    assert only.state == "idle"
    assert (counters.call, counters.calls, counters.errors, counters.nbytes) == ("reduce", 2, 1, 5096)
    first, second = read(page).records
    assert [(each.group, each.epoch, each.number, each.outcome) for each in (first, second)] == [
        ("tp:0", 2, 3, "done"),
        ("tp:0", 2, 4, "failed"),
    ]
    assert before - 1e8 < first.begin_ns <= first.end_ns <= second.begin_ns


@pytest.mark.guarantee("S2")
def test_the_last_calls_are_kept_in_order(page: OwnPage) -> None:
    """Of 5,000 calls the page has the last 4,096."""
    lane = page.group("tp:0", 0, [0, 1]).lane("device", "process group")
    for number in range(1, 5001):
        lane.begin(kind_of("barrier"), number, 0, layout.NOBODY)
        lane.end(Outcome.DONE)
    said = read(page)
    assert said.calls == 5000
    assert [record.number for record in said.records] == list(range(905, 5001))


@pytest.mark.guarantee("S3")
def test_nothing_of_the_application_is_shown() -> None:
    """Neither an object in a queue, nor the text of an exception that is not ours, stands in the page."""
    shown = ShownCalls("secrets:0", 0, [0, 1])
    shown.broken(KeyError(SECRET))
    assert group_of(own_page(), "secrets:0").cause == "KeyError"
    with (
        QueueWriter.create("secrets", [0]) as writer,
        QueueReader.open(writer.handle, writer.key, 0, 10.0) as reader,
    ):
        writer.enqueue({SECRET: SECRET})
        assert SECRET.encode() not in _core.status_copy(own_page().segment.memory)
        assert reader.dequeue(10.0) == {SECRET: SECRET}
        ends = [end for end in read(own_page()).queues if end.name == "secrets"]
        assert sorted(end.reader for end in ends) == [-1, 0]
        assert len({end.inode for end in ends}) == 1
    assert [end for end in read(own_page()).queues if end.name == "secrets"] == []
    shown.status.leave()


def test_our_own_error_is_shown_as_the_cause() -> None:
    """A broken group says why, cut at a character."""
    shown = ShownCalls("timed-out:0", 0, [0, 1])
    shown.broken(CommTimeoutError("no answer from rank 1 " + "é" * 400, missing=(1,)))
    said = group_of(own_page(), "timed-out:0")
    assert said.state == "broken"
    assert said.cause.startswith("no answer from rank 1 éé")
    assert set(said.cause[22:]) == {"é"}
    shown.status.leave()


@pytest.mark.guarantee("S6")
def test_a_forked_child_does_not_write_the_page_of_its_parent(page: OwnPage) -> None:
    """Its lanes lead nowhere, its groups change nothing, and its own page is another one."""
    status = page.group("tp:0", 0, [0, 1])
    lane = status.lane("device", "process group")
    before = _core.status_copy(page.segment.memory)
    inherited = os.fstat(own_page().segment.descriptor).st_ino
    child = os.fork()
    if not child:
        status_code = 1
        try:
            lane.begin(kind_of("barrier"), 1, 0, layout.NOBODY)
            lane.end(Outcome.DONE)
            status.set_state(GroupState.BROKEN, "of the child")
            status.leave()
            own = own_page()
            is_other = os.fstat(own.segment.descriptor).st_ino != inherited
            status_code = 0 if is_other and read(own).pid == os.getpid() else 2
        finally:
            os._exit(status_code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _core.status_copy(page.segment.memory) == before


@pytest.mark.guarantee("S7")
def test_what_has_no_room_is_counted_and_works(page: OwnPage) -> None:
    """Groups, lanes and queues beyond the page's places are not shown, and nothing fails."""
    groups = [page.group(f"g:{number}", 0, [0]) for number in range(66)]
    lanes = [groups[0].lane("device", "process group") for _ in range(130)]
    queues = [page.add_queue(f"q{number}", page.segment, 0, -1) for number in range(65)]
    for lane in lanes:
        lane.begin(kind_of("barrier"), 1, 0, layout.NOBODY)
        lane.end(Outcome.DONE)
    said = read(page)
    assert len(said.groups) == 64
    assert len(group_of(page, "g:0").lanes) == 128
    assert len(said.queues) == 64
    assert said.refused == 2 + 2 + 1
    assert queues[-1] is None
    for place in queues:
        page.remove_queue(place)
    assert read(page).queues == ()


@pytest.mark.guarantee("S7")
def test_groups_that_were_left_leave_room_for_the_planes_and_calls_of_others(page: OwnPage) -> None:
    """Of 200 groups with three planes and three kinds of calls each, every one has lanes and counters."""
    for number in range(200):
        status = page.group(f"g:{number}", 0, [0])
        for plane in ("shared", "shared host", "host"):
            lane = status.lane(plane, "shared memory")
            for kind in ("barrier", "all_gather", "broadcast"):
                lane.begin(kind_of(kind), 1, 0, layout.NOBODY)
                lane.end(Outcome.DONE)
        counted = [len(lane.counters) for lane in group_of(page, f"g:{number}").lanes]
        assert counted == [3, 3, 3]
        status.leave()
    assert read(page).refused == 0


@pytest.mark.guarantee("S7")
def test_a_group_takes_the_place_of_the_one_that_was_left_first(page: OwnPage) -> None:
    """A thousand groups, of which few exist at once, all have room; those that were left last are still shown."""
    for number in range(1000):
        status = page.group(f"g:{number}", 0, [0])
        lane = status.lane("device", "process group")
        lane.begin(kind_of("barrier"), number, 0, layout.NOBODY)
        lane.end(Outcome.DONE)
        status.leave()
        lane.begin(kind_of("barrier"), 0, 0, layout.NOBODY)
    said = read(page)
    assert said.refused == 0
    assert [group.name for group in said.groups] == [f"g:{number}" for number in range(984, 1000)]
    assert all(group.state == "left" for group in said.groups)
    assert all(group.lanes[0].counters[0].calls == 1 for group in said.groups)


def test_a_text_is_cut_and_a_page_of_another_size_is_refused() -> None:
    """The native core refuses what is no page."""
    with pytest.raises(ValueError, match="bytes"):
        _core.status_copy(bytearray(4096))
    with pytest.raises(ValueError, match="no status page of this version"):
        _core.StatusPage(bytearray(layout.PAGE_BYTES))


def test_the_clock_of_the_page_agrees_with_the_kernels(page: OwnPage) -> None:
    """A time that a lane noted is within 0.1 ms of CLOCK_MONOTONIC, so the rate is right."""
    lane = page.group("tp:0", 0, [0, 1]).lane("device", "process group")
    differences = []
    for _ in range(20):
        time.sleep(0.01)
        before = time.monotonic_ns()
        lane.begin(kind_of("barrier"), 1, 0, layout.NOBODY)
        after = time.monotonic_ns()
        (only,) = group_of(page, "tp:0").lanes
        differences.append(max(before - only.begin_ns, only.begin_ns - after))
    assert min(differences) < 100_000


@pytest.mark.guarantee("S5")
def test_a_message_of_a_queue_and_an_idle_page_write_nothing() -> None:
    """No byte of the page changes by messages, and the page has no thread that could write it."""
    page = own_page()
    threads = set(os.listdir("/proc/self/task"))
    with (
        QueueWriter.create("steps", [0]) as writer,
        QueueReader.open(writer.handle, writer.key, 0, 10.0) as reader,
    ):
        writer.enqueue("ready")
        assert reader.dequeue() == "ready"
        # The thread that hands the memory over ends with the last reader. One of an earlier test may end, too.
        wait_until(lambda: set(os.listdir("/proc/self/task")) <= threads, "the end of the handover")
        before = _core.status_copy(page.segment.memory)
        for number in range(100):
            writer.enqueue({"step": number})
            assert reader.dequeue() == {"step": number}
        assert _core.status_copy(page.segment.memory) == before
        assert set(os.listdir("/proc/self/task")) <= threads


@pytest.mark.guarantee("S5")
def test_making_a_page_starts_no_thread() -> None:
    """A process with a page has the threads that it had before."""
    before = set(os.listdir("/proc/self/task"))
    made = OwnPage()
    try:
        assert set(os.listdir("/proc/self/task")) == before
    finally:
        made.segment.close()
        vars(made).clear()
