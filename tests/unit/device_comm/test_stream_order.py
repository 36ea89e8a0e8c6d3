"""The order of a communicator's calls on several streams, with a driver that needs no GPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from device_comm.cuda.custom.streams import StreamOrder
from shm_broadcast.errors import CudaError, UsageError
from tests.fake_cuda import FakeDriver


class Calls:
    """Calls of one communicator, as the collectives admit them, and the edges that order them."""

    def __init__(self, directory: Path) -> None:
        """Begin with no call."""
        self.driver = FakeDriver(directory, 0)
        self.order = StreamOrder(self.driver, lambda operation: operation)

    def call(self, stream: int) -> list[tuple[int, int]]:
        """Make a call on `stream`; return the edges (before, behind) that this has added."""
        before = len(self.driver.orders)
        if stream != self.order.hot:
            self.order.admit(stream, "all_reduce")
        return self.driver.orders[before:]

    def fork(self, stream: int, into: int) -> None:
        """Let `into` wait for `stream`, and join its capture, as an application does."""
        self.join(into, self.mark(stream))

    def mark(self, stream: int) -> int:
        """Return an event behind the work on `stream`."""
        event = self.driver.event_create()
        self.driver.event_record(event, stream)
        return event

    def join(self, stream: int, event: int) -> None:
        """Let `stream` wait for an event, and join its capture."""
        self.driver.stream_wait_event(stream, event)
        self.driver.event_destroy(event)


@pytest.fixture
def calls(tmp_path: Path) -> Iterator[Calls]:
    """Yield the calls of a communicator; check that no event is left."""
    made = Calls(tmp_path)
    yield made
    made.order.close()
    assert [each for each in made.driver.leaks() if each.startswith("event")] == []


@pytest.mark.guarantee("D55")
def test_a_stream_that_joins_a_capture_after_an_eager_call_is_looked_at(calls: Calls) -> None:
    """Its call follows the captured one, and the next captured call follows it, as one chain."""
    calls.driver.begin_capture(9)
    early = calls.mark(9)
    assert calls.call(9) == []
    assert calls.call(5) == []
    # Joined behind a point before the captured call: nothing but the order itself puts the two in a chain.
    calls.join(5, early)
    calls.driver.orders.clear()
    assert calls.call(5) == [(9, 5)]
    assert calls.call(9) == [(5, 9)]
    assert calls.call(9) == []


@pytest.mark.guarantee("D55")
def test_calls_of_a_hot_stream_that_was_captured_are_followed(calls: Calls) -> None:
    """Those calls are not looked at, so the first call in another branch is put behind the stream as it is."""
    calls.call(5)
    calls.driver.begin_capture(5)
    calls.call(5)
    calls.fork(5, 6)
    calls.call(5)
    assert calls.call(6) == [(5, 6)]
    assert calls.call(5) == [(6, 5)]


@pytest.mark.guarantee("D55")
def test_two_captures_at_once_keep_an_order_each(calls: Calls) -> None:
    """A call in one of them does not hide the last call in the other."""
    calls.driver.begin_capture(9)
    early = calls.mark(9)
    assert calls.call(9) == []
    calls.driver.begin_capture(5)
    assert calls.call(5) == []
    calls.join(6, early)
    calls.driver.orders.clear()
    assert calls.call(6) == [(9, 6)]
    assert calls.call(5) == []
    assert calls.call(9) == [(6, 9)]
    for stream in (9, 5):
        calls.driver.end_capture(stream)
    assert calls.call(7) == []
    assert calls.order.hot == 7, "neither capture goes on"


@pytest.mark.guarantee("D55")
def test_calls_of_a_hot_stream_are_followed_behind_another_capture(calls: Calls) -> None:
    """Those calls were not looked at, and a call in another capture ends that the stream is hot."""
    calls.call(5)
    calls.driver.begin_capture(5)
    early = calls.mark(5)
    calls.call(5)
    calls.driver.begin_capture(9)
    assert calls.call(9) == []
    calls.join(6, early)
    calls.driver.orders.clear()
    assert calls.call(6) == [(5, 6)]


def test_captures_that_have_ended_are_forgotten(calls: Calls) -> None:
    """Otherwise a program that captures for ever would remember all its captures."""
    for _ in range(50):
        calls.driver.begin_capture(9)
        calls.call(9)
        calls.driver.end_capture(9)
    assert len(calls.order._branches) == 1
    calls.call(9)
    assert calls.order._branches == {}


def test_after_a_capture_the_calls_of_one_stream_are_not_looked_at(calls: Calls) -> None:
    """Otherwise every eager call of a program that has captured once would ask the driver."""
    calls.driver.begin_capture(9)
    calls.call(9)
    calls.call(5)
    assert calls.order.hot is None, "the capture of 9 goes on, and 5 may join it"
    calls.driver.end_capture(9)
    calls.call(5)
    assert calls.order.hot == 5


def test_a_captured_stream_that_was_destroyed_is_in_no_capture(calls: Calls) -> None:
    """An application may destroy the streams of a capture that has ended."""
    stream = calls.driver.stream_create()
    calls.driver.begin_capture(stream)
    calls.call(stream)
    calls.driver.end_capture(stream)
    calls.driver.stream_destroy(stream)
    assert calls.call(5) == []
    assert calls.order.hot == 5


def test_a_call_in_an_invalid_capture_changes_no_order(calls: Calls) -> None:
    """The launch raises the driver's error. A call after the capture follows the last one that was queued."""
    calls.call(5)
    calls.driver.begin_capture(9)
    calls.driver.invalidate_capture(9)
    assert calls.call(9) == []
    with pytest.raises(CudaError, match="901"):
        calls.driver.end_capture(9)
    assert (calls.order.stream, calls.order.hot) == (5, 5)
    assert calls.call(9) == [(5, 9)]


def test_an_event_that_the_next_call_waits_for_outlives_an_invalid_capture(calls: Calls) -> None:
    """A call that is captured into nothing must not use up what orders the next eager one."""
    calls.call(5)
    calls.order.restore(None)
    calls.driver.begin_capture(9)
    calls.driver.invalidate_capture(9)
    assert calls.call(9) == []
    with pytest.raises(CudaError, match="901"):
        calls.driver.end_capture(9)
    assert calls.call(7) == [(5, 7)]


@pytest.mark.parametrize("earlier", [None, 5])
def test_a_stream_in_an_invalid_capture_is_left_without_an_order(calls: Calls, earlier: int | None) -> None:
    """`restore` records nothing in it: the error of that would hide the exception that has left the capture."""
    if earlier is not None:
        calls.call(earlier)
    calls.order.use(9)
    calls.driver.begin_capture(9)
    calls.driver.invalidate_capture(9)
    calls.driver.orders.clear()
    calls.order.restore(earlier)
    assert (calls.order.stream, calls.order.hot, calls.driver.orders) == (earlier, earlier, [])
    with pytest.raises(CudaError, match="901"):
        calls.driver.end_capture(9)


def test_nothing_is_ordered_behind_a_stream_in_an_invalid_capture(calls: Calls) -> None:
    """That is refused as for a valid capture."""
    calls.call(5)
    calls.driver.begin_capture(5)
    calls.driver.invalidate_capture(5)
    with pytest.raises(UsageError, match="stream 0x5 is being captured"):
        calls.call(7)
    with pytest.raises(CudaError, match="901"):
        calls.driver.end_capture(5)
    assert calls.call(7) == [(5, 7)]


def test_a_stream_that_was_destroyed_before_the_next_call_is_named(calls: Calls) -> None:
    """What was queued on it cannot be waited for any more; the error says what the program has to change."""
    stream = calls.driver.stream_create()
    calls.call(stream)
    calls.driver.stream_destroy(stream)
    # A captured call waits for no eager one.
    calls.driver.begin_capture(9)
    assert calls.call(9) == []
    calls.driver.end_capture(9)
    with pytest.raises(CudaError, match=f"stream {stream:#x}, .*must outlive the next call") as raised:
        calls.call(5)
    assert raised.value.code == 400


def test_the_legacy_stream_is_ordered_beside_a_capture(calls: Calls) -> None:
    """Without a blocking stream in the capture, the legacy stream can be used as any other."""
    calls.call(0)
    calls.driver.begin_capture(9)
    assert calls.call(5) == [(0, 5)]
    assert calls.call(0) == [(5, 0)]
    calls.driver.end_capture(9)
    calls.driver.begin_capture(9, is_blocking=True)
    assert not calls.driver.stream_is_capturing(0)
    with pytest.raises(CudaError, match="906"):
        calls.call(5)
