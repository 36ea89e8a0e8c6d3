"""Signal handlers that raise while messages of a channel are received, and that receive, send or close themselves."""

import mmap
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from traceback import walk_stack
from typing import Any, NoReturn

import pytest

from device_comm.cpu import channel_ends, channel_receiver, channel_sender, channels
from device_comm.cpu.channel_receiver import ChannelReceiver
from device_comm.cpu.channel_sender import ChannelSender, Sending, Writing
from shm_broadcast import _core as rings
from shm_broadcast import codec
from shm_broadcast.errors import PeerLostError, UsageError
from shm_broadcast.layout import segment_bytes
from tests.channels import health_of
from tests.handlers import alarm
from tests.multiproc.device_comm.test_channel_opening import Strikes
from tests.multiproc.device_comm.test_channel_opening import recv as recv_object
from tests.multiproc.device_comm.test_channel_opening import send as send_object
from tests.multiproc.device_comm.test_channel_strikes import opened
from tests.queues import background
from tests.unit.shm_broadcast.test_signal_handlers import FEW, LONG_S, MANY, AlarmError, Numbered, alarms
from tests.waiting import wait_until

TAGS = (1, 2)
# No wait of these tests may take so long, on any machine.
HANG_S = 120.0


class Crossing:
    """Stands for the channels of a rank, of which there is one."""

    is_closed = False

    def drain(self, _busy: object) -> bool:
        """Take in nothing."""
        return False

    def fail_corrupt(self, _peer: int, error: Exception) -> NoReturn:
        """Fail the test."""
        raise AssertionError from error

    def submit(self, _job: Callable[[], None]) -> None:
        """Fail the test, in which calls write what they send."""
        raise AssertionError


def channel() -> tuple[ChannelSender, ChannelReceiver]:
    """Return both ends of a channel."""
    memory = mmap.mmap(-1, segment_bytes(1 << 18, 1))
    rings.ring_format(memory, 1, 1)
    crossing = Crossing()
    receiver = ChannelReceiver(crossing, memory, 0)
    return ChannelSender(crossing, memory, 1), receiver


def send(sender: ChannelSender, obj: Any, tag: int) -> None:
    """Send an object, waiting for room."""
    message = sender.send_now(obj, tag)
    if message is not None:
        sender.refuse_nested("send")
        sending = Sending(sender, message, tag)
        sender.enqueue(sending)
        writing = Writing(sender.crossing, [sending])
        until = time.monotonic() + HANG_S
        while not writing.poll(0.1):
            assert time.monotonic() < until


def receive(receiver: ChannelReceiver, tag: int, seen: list[int]) -> None:
    """Receive as `Channels.recv` does, of whose steps each can be interrupted."""
    value = receiver.receive_soon(tag, 0)
    if value is rings.NOTHING:
        until = time.monotonic() + HANG_S
        receiving = receiver.expect(tag, None)
        try:
            while not receiving.poll(0.1):
                assert time.monotonic() < until
        except BaseException:
            receiver.abandon(receiving)
            raise
        value = receiving.value
    seen.append(value[0].number)


def receive_any(receiver: ChannelReceiver, tag: int, seen: list[int]) -> None:
    """Receive what any rank sent, which is one rank here."""
    taken = receiver.take_arrived(tag)
    if taken is not None:
        seen.append(taken.message[0].number)


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    codec.register_type(
        Numbered, encode=lambda each: {"number": each.number}, decode=lambda data: Numbered(data["number"])
    )


@pytest.mark.guarantee("R14")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("least", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("get", [receive, receive_any])
@pytest.mark.parametrize(("nbytes", "count"), [(10, 10_000), (300_000, 300)])
def test_no_alarm_loses_or_repeats_a_message_of_a_channel(
    get: Callable[[ChannelReceiver, int, list[int]], None], nbytes: int, count: int, least: int
) -> None:
    """Messages of two tags, sent in turn and received in blocks of one tag, come once each and in order.

    A thorough test goes on until a thousand exceptions of the handler have struck inside of a receive.
    """
    sender, receiver = channel()
    seen: dict[int, list[int]] = {tag: [] for tag in TAGS}
    total, raised = 0, 0

    def send_all(first: int) -> None:
        for number in range(first, first + count):
            for tag in TAGS:
                send(sender, [Numbered(number), bytes(nbytes)], tag)

    end = time.monotonic() + (HANG_S if least == FEW else LONG_S)
    while raised < least:
        total += count
        with background(partial(send_all, total - count)) as outcome, alarms(0.0002) as handler:
            handler.driver = sys._getframe().f_code
            while any(len(numbers) < total for numbers in seen.values()):
                assert time.monotonic() < end
                try:
                    handler.is_armed = True
                    for tag in (*TAGS, *reversed(TAGS)):
                        until = min(len(seen[tag]) + 7, total)
                        while len(seen[tag]) < until:
                            get(receiver, tag, seen[tag])
                    handler.is_armed = False
                except AlarmError:
                    pass
            raised += handler.count
        assert outcome == [None]
        assert all(numbers == list(range(total)) for numbers in seen.values())
        if least == FEW:
            break
    assert raised >= least


@pytest.mark.guarantee("R15")
def test_a_handler_that_sends_inside_of_a_long_message_to_the_same_rank_is_refused() -> None:
    """Its message does not get between the parts of the other one."""
    sender, receiver = channel()
    errors: list[str] = []

    def handler() -> None:
        if sender._own is None:
            # The call has not come so far.
            signal.setitimer(signal.ITIMER_REAL, 0.01)
            return
        try:
            send(sender, [Numbered(4)], 1)
        except UsageError as error:
            errors.append(str(error))

    seen: list[int] = []

    def receive_later() -> None:
        wait_until(lambda: errors, "the handler's refusal")
        receive(receiver, 1, seen)

    with background(receive_later), alarm(0.1, handler):
        send(sender, [Numbered(5), bytes(1 << 20)], 1)
    assert seen == [5]
    assert len(errors) == 1


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("outer", ["recv", "recv_each"])
def test_a_handler_that_receives_at_any_step_of_a_receive_gets_the_message_or_is_refused(outer: str) -> None:
    """It never waits for a message that comes behind the one of the call that it has interrupted."""
    outcomes: list[str] = []
    waits = 0

    def handler() -> None:
        nonlocal waits
        waits += any(frame.f_code is ChannelReceiver.await_arrival.__code__ for frame, _ in walk_stack(None))
        send_object(zero, "first", 1)
        try:
            assert recv_object(one, 0) == "first"
            send_object(zero, "second", 1)
            outcomes.append("received")
        except UsageError as error:
            assert "inside of a call on the channel with rank 0" in str(error)  # noqa: PT017 - it may come or not
            outcomes.append("refused")

    strikes = Strikes(handler, channels, channel_receiver)
    # The outer call waits until it is struck, in its last places again and again.
    while waits < 20:
        with opened() as (zero, one):
            with strikes.run():
                if outer == "recv":
                    found = recv_object(one, 0)
                else:
                    (found,) = one.recv_each("host", "gather", [0], TAGS[0], HANG_S)
            assert found == {"received": "second", "refused": "first"}[outcomes[-1]]
            send_object(zero, "last", 1)
            assert recv_object(one, 0) == "last"
    assert len(outcomes) == strikes.place
    assert set(outcomes) == {"received", "refused"}


@pytest.mark.guarantee("D74")
@pytest.mark.parametrize("drops_segment", [False, True])
def test_a_handler_that_closes_at_any_step_of_closing_does_it_all(drops_segment: bool) -> None:
    """A failure closes the channels, and a handler destroys the group meanwhile, which may drop the memory too.

    The failure goes on to what else it has to end, and the call that found it raises nothing but that.
    """

    def close() -> None:
        zero.close()
        assert zero._has_left
        if drops_segment:
            zero._segment.close()

    strikes = Strikes(close, channels, channel_sender, channel_receiver)
    while not strikes.is_over:
        with opened() as (zero, one):
            send_object(one, "not received", 0)
            others: list[str] = []
            health_of(zero).on_abort(lambda: others.append("ended"))  # noqa: B023
            with strikes.run():
                health_of(zero).fail(PeerLostError("found", peers=(1,)))
            assert others == ["ended"]
            assert one._receivers[0].has_ended()
            with pytest.raises(channel_ends.LeftError):
                one._senders[0].raise_if_deserted()
            assert zero._has_left
            assert zero._bells == []
    assert strikes.place > 10


class Interrupted:
    """An endpoint whose close is interrupted by a handler."""

    def __init__(self, end: Any, handler: Callable[[], None]) -> None:
        self.end, self.endpoint, self.handler = end, end.endpoint, handler

    def close(self, *arguments: Any) -> None:
        """Close the endpoint, behind the handler."""
        self.end.endpoint = self.endpoint
        self.handler()
        self.endpoint.close(*arguments)


@pytest.mark.guarantee("D74")
@pytest.mark.parametrize("ends", ["_senders", "_receivers"])
def test_a_close_below_a_handler_whose_own_close_was_cut_short_does_the_rest(ends: str) -> None:
    """The handler has closed the same end before it was struck in turn, and has caught that."""
    with opened() as (zero, one):
        send_object(one, "received", 0)
        assert recv_object(zero, 1) == "received"
        end = getattr(zero, ends)[1]
        end.endpoint = Interrupted(end, end.close)
        zero.close()
        assert zero._bells == []
        assert one._receivers[0].has_ended()
        with pytest.raises(channel_ends.LeftError):
            one._senders[0].raise_if_deserted()
