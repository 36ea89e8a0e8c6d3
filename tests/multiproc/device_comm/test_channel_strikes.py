"""Signal handlers that raise, or make a call, at any step of a call on channels that are open."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from typing import Any

import pytest

from device_comm import health, works
from device_comm.cpu import channel_ends, channel_receiver, channel_sender, channels, receiving_any
from device_comm.cpu.channels import Channels
from shm_broadcast import codec
from shm_broadcast.errors import CapabilityError, CommError, GroupBrokenError, NativeError, UsageError
from tests.channels import channels_of, health_of
from tests.handlers import alarm
from tests.multiproc.device_comm.test_channel_opening import Strikes, recv, send, strike
from tests.queues import background
from tests.samples import sampled
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError
from tests.waiting import wait_until

TAG, OTHER_TAG = 1, 2
# Twice as long as a channel.
LONG = bytes(2 << 20)
LIMIT_S = 20.0


def isend(channels_: Channels, obj: Any, dst: int) -> None:
    """Send an object through a handle."""
    channels_.isend("host", "isend", obj, dst, TAG, LIMIT_S).wait()


@contextmanager
def opened() -> Iterator[tuple[Channels, Channels]]:
    """Yield the channels of two ranks, of which that from rank 0 to rank 1 is open."""
    with channels_of(2) as (zero, one):
        send(zero, "opens", 1)
        assert recv(one, 0) == "opens"
        yield zero, one


@contextmanager
def received(one: Channels, last: object) -> Iterator[list[Any]]:
    """Receive what rank 0 sends until `last` comes, or the group breaks; yield what came."""
    found: list[Any] = []

    def receive() -> None:
        try:
            while not found or found[-1] != last:
                found.append(one.recv("host", "recv", 0, TAG, LIMIT_S))
        except CommError as error:
            found.append(error)

    with background(receive):
        yield found


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("call", [send, pytest.param(isend, marks=pytest.mark.thorough)])
def test_a_strike_at_any_step_of_a_long_send_takes_it_back_or_breaks_the_group(
    call: Callable[[Channels, Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind it the next message is sent at once, or raises the failure: none waits for a call that has ended."""
    monkeypatch.setattr(health, "EXPLAIN_S", 0.01)
    strikes = Strikes(strike, channels, channel_ends, channel_sender, works)
    outcomes: list[str] = []
    while not strikes.is_over:
        with opened() as (zero, one), received(one, "last") as found:
            try:
                with strikes.run():
                    call(zero, LONG, 1)
                outcome = "sent"
            except AlarmError:
                outcome = "struck"
            try:
                send(zero, "last", 1)
            except GroupBrokenError:
                outcome = "broken"
                assert health_of(zero).is_broken
                zero.close()
        outcomes.append(outcome)
        if outcome == "broken":
            assert isinstance(found.pop(), CommError)
        else:
            assert found.pop() == "last"
        assert found in ([], [LONG])
        assert found or outcome != "sent"
    assert set(outcomes) == {"sent", "struck", "broken"}


def struck(*_: object) -> None:
    """Raise as a handler, in the place of any function."""
    raise AlarmError("struck")


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("call", [send, isend])
def test_a_second_strike_while_a_message_is_taken_back_breaks_the_group(
    call: Callable[[Channels, Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has taken it back then, and its memory is the caller's again."""
    with opened() as (zero, _):
        # The first strikes between the queue and the wait, the second where the function begins that takes it back.
        monkeypatch.setattr(channels, "Writing", struck)
        monkeypatch.setattr(channels, "PointToPointHandle", struck)
        monkeypatch.setattr(Channels, "_withdraw", struck)
        with pytest.raises(AlarmError):
            call(zero, LONG, 1)
        assert health_of(zero).is_broken


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("call", [send, isend])
def test_a_third_strike_while_the_group_breaks_leaves_that_to_the_next_call(
    call: Callable[[Channels, Any, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group must not go on with a message that nobody has taken back."""
    with opened() as (zero, _):
        with monkeypatch.context() as patches:
            for owner, name in (
                (channels, "Writing"),
                (channels, "PointToPointHandle"),
                (Channels, "_withdraw"),
                (health.GroupHealth, "left_halfway"),
            ):
                patches.setattr(owner, name, struck)
            with pytest.raises(AlarmError):
                call(zero, LONG, 1)
            assert not health_of(zero).is_broken
        with pytest.raises(GroupBrokenError, match="struck"):
            health_of(zero).check_usable("send")
        assert health_of(zero).is_broken


@pytest.mark.guarantee("D74")
def test_a_strike_at_any_step_of_closing_leaves_the_rest_to_the_next_close() -> None:
    """The other rank's receive, and its send on a channel that this rank has not used, end behind that."""
    strikes = Strikes(strike, channels, channel_sender, channel_receiver)
    while not strikes.is_over:
        with opened() as (zero, one):
            send(one, "not received", 0)
            with suppress(AlarmError), strikes.run():
                zero.close()
            zero.close()
            receiver, sender = one._receivers[0], one._senders[0]
            assert receiver.has_ended()
            with pytest.raises(channel_ends.LeftError):
                sender.raise_if_deserted()
            assert zero._bells == []
    assert strikes.place > 10


@pytest.mark.guarantee("D15", "R15")
@pytest.mark.parametrize(("outer", "inner"), sampled(3, product((send, isend), (send, isend))))
def test_a_handler_that_sends_at_any_step_of_a_long_send_is_refused_or_served(
    outer: Callable[[Channels, Any, int], None], inner: Callable[[Channels, Any, int], None]
) -> None:
    """It never waits for the call that it has interrupted."""
    outcomes: list[str] = []

    def call() -> None:
        try:
            inner(zero, LONG[1:], 1)
            outcomes.append("sent")
        except UsageError:
            outcomes.append("refused")

    strikes = Strikes(call, channels, channel_ends, channel_sender, works)
    while not strikes.is_over:
        count = len(outcomes)
        with opened() as (zero, one), received(one, "last") as found:
            start = time.monotonic()
            with strikes.run():
                outer(zero, LONG, 1)
            send(zero, "last", 1)
            assert time.monotonic() - start < LIMIT_S / 2
        lengths = sorted(len(each) for each in found)
        assert lengths == sorted([4, len(LONG)] + [len(LONG) - 1] * (outcomes[count:] == ["sent"]))
    # What a thread of ours writes keeps nobody from sending.
    assert set(outcomes) == ({"sent", "refused"} if outer is send else {"sent"})


@pytest.mark.guarantee("D15", "R15")
def test_a_send_to_several_ranks_that_is_refused_leaves_nothing_behind() -> None:
    """A handler sends to two ranks, and the call below it is sending to the second: the first can still be sent to."""
    errors: list[UsageError] = []
    with channels_of(3) as (zero, one, two):
        send(zero, "opens", 1)
        send(zero, "opens", 2)

        def call() -> None:
            if zero._senders[2]._own is None:
                # The call has not come so far.
                signal.setitimer(signal.ITIMER_REAL, 0.01)
                return
            try:
                zero.send("host", "send", LONG, (1, 2), TAG, LIMIT_S)
            except UsageError as error:
                errors.append(error)

        def receive() -> list[object]:
            wait_until(lambda: errors, "the handler's refusal")
            return [recv(two, 0), len(recv(two, 0)), recv(one, 0), len(recv(one, 0))]

        # In the middle of the call: the channel is full, and the thread that reads has not begun.
        with background(receive) as outcome, alarm(0.2, call):
            send(zero, LONG, 2)
            send(zero, LONG, 1)
        assert outcome == [["opens", len(LONG), "opens", len(LONG)]]
        assert "this thread is inside of a call that sends to rank 2 already" in str(errors[0])


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("call", [send, isend])
def test_what_another_thread_sends_queues_behind_a_call_that_is_sending(
    call: Callable[[Channels, Any, int], None],
) -> None:
    """Three messages, of which none fits into the channel, arrive whole and in order, and so does a later one."""
    with opened() as (zero, one):
        queued = threading.Event()

        def receive() -> list[object]:
            queued.wait(LIMIT_S)
            time.sleep(0.2)
            return [len(recv(one, 0)) for _ in range(4)]

        def send_others() -> None:
            time.sleep(0.2)
            queued.set()
            call(zero, LONG[1:], 1)
            call(zero, LONG[2:], 1)

        with background(receive) as outcome:
            with background(send_others):
                send(zero, LONG, 1)
            send(zero, "last", 1)
        assert outcome == [[len(LONG), len(LONG) - 1, len(LONG) - 2, len("last")]]


@pytest.mark.guarantee("D15")
def test_two_threads_that_send_to_the_same_ranks_in_different_order_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each writes what it is first to send, also while its other message waits for the other thread."""
    both_are_first = threading.Barrier(2)
    enqueue = channel_sender.ChannelSender.enqueue

    def enqueue_and_meet(self: channel_sender.ChannelSender, sending: channel_sender.Sending) -> bool:
        is_own = enqueue(self, sending)
        if is_own:
            both_are_first.wait(LIMIT_S)
        return is_own

    monkeypatch.setattr(channel_sender.ChannelSender, "enqueue", enqueue_and_meet)
    with channels_of(3) as (zero, one, two):
        send(zero, "opens", 1)
        send(zero, "opens", 2)

        def send_to(ranks: tuple[int, int], message: bytes) -> None:
            zero.send("host", "send", message, ranks, TAG, LIMIT_S)

        def receive(receiver: Channels) -> list[int]:
            time.sleep(0.3)
            return sorted(len(recv(receiver, 0)) for _ in range(3))

        start = time.monotonic()
        with (
            background(lambda: receive(one)) as at_one,
            background(lambda: receive(two)) as at_two,
            background(lambda: send_to((1, 2), LONG)),
        ):
            send_to((2, 1), LONG[1:])
        assert at_one == at_two == [[len("opens"), len(LONG) - 1, len(LONG)]]
        assert time.monotonic() - start < LIMIT_S / 2


@pytest.mark.guarantee("D15")
def test_what_queues_behind_a_call_goes_on_when_that_call_takes_its_message_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also if no thread can be started then: who waits for the message or asks about it raises that, or starts one."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for can_start in (True, False):
        with opened() as (zero, one), received(one, LONG) as found:
            sender = zero._sender(1, "send")
            message = codec.encode(LONG)
            first = channel_sender.Sending(sender, message, TAG)
            assert sender.enqueue(first)
            with background(lambda: channel_sender.Sending(sender, message, TAG)) as other:  # noqa: B023
                pass
            second = other[0]
            assert not sender.enqueue(second)
            with monkeypatch.context() as patch:
                if not can_start:
                    patch.setattr(threading.Thread, "start", start)
                assert sender.withdraw(first)
                if not can_start:
                    with pytest.raises(CapabilityError, match="no thread can be started"):
                        second.poll(0.01)
                    with pytest.raises(CapabilityError, match="no thread can be started"):
                        second.is_complete()
            if not can_start:
                second.is_complete()
            wait_until(lambda: second.is_owned, "the second message")  # noqa: B023 - called at once
        assert found == [LONG]


@pytest.mark.guarantee("D15")
def test_a_send_whose_message_to_another_rank_has_begun_breaks_the_group_for_want_of_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread has begun to write the caller's memory to the second rank when none can be had for the first."""
    monkeypatch.setattr(health, "EXPLAIN_S", 0.01)
    with channels_of(3) as (zero, _one, _two):
        send(zero, "opens", 1)
        send(zero, "opens", 2)
        senders = [zero._sender(peer, "send") for peer in (1, 2)]
        firsts = [channel_sender.Sending(sender, codec.encode(LONG), OTHER_TAG) for sender in senders]
        assert all(first.sender.enqueue(first) for first in firsts)
        errors: list[CommError] = []

        def send_to_both() -> None:
            try:
                zero.send("host", "send", LONG, (1, 2), TAG, LIMIT_S)
            except CommError as error:
                errors.append(error)

        def start(_thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with background(send_to_both):
            wait_until(lambda: all(len(sender._waiting) == 2 for sender in senders), "both messages")
            assert senders[1].withdraw(firsts[1])
            wait_until(lambda: senders[1]._waiting[0].has_begun, "the thread that writes")
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", start)
                assert senders[0].withdraw(firsts[0])
                wait_until(lambda: errors, "the refusal")
        assert isinstance(errors[0], CapabilityError)
        with pytest.raises(GroupBrokenError, match="no thread can be started"):
            send(zero, "next", 2)


@pytest.mark.guarantee("D15", "R15")
def test_a_send_from_a_handler_does_not_wait_for_a_channel_that_its_thread_is_opening(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for another thread's message to the same rank, and that thread looks for channels that others made."""
    with channels_of(4) as (zero, one, two, three):
        send(zero, "opens", 1)
        send(two, "opens", 0)
        reserve = zero._segment.reserve

        def send_here(_offset: int, _nbytes: int) -> None:
            monkeypatch.setattr(zero._segment, "reserve", reserve)
            is_opening.set()
            started.wait(LIMIT_S)
            # The other thread has still to look at this channel.
            assert 2 not in zero._receivers
            send(zero, LONG[1:], 1)
            reserve(_offset, _nbytes)

        def send_beside() -> None:
            is_opening.wait(LIMIT_S)
            send(zero, LONG, 1)

        is_opening, started = threading.Event(), threading.Event()
        received_: list[int] = []

        def receive() -> None:
            wait_until(lambda: zero._senders[1]._waiting, "the other thread's message")
            started.set()
            time.sleep(0.3)
            received_.extend(len(recv(one, 0)) for _ in range(3))

        monkeypatch.setattr(zero._segment, "reserve", send_here)
        start = time.monotonic()
        with background(receive), background(send_beside):
            send(zero, "opens", 3)
        assert received_ == [len("opens"), len(LONG), len(LONG) - 1]
        assert recv(three, 0) == recv(zero, 2) == "opens"
        assert time.monotonic() - start < LIMIT_S / 2


@pytest.mark.guarantee("D15")
def test_a_thread_that_cannot_be_started_leaves_the_channel_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call says so and sends nothing; the next one arrives."""

    def start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with opened() as (zero, one):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(CapabilityError, match="no thread can be started to write a message"):
                isend(zero, LONG, 1)
        send(zero, "next", 1)
        assert recv(one, 0) == "next"
        with received(one, LONG):
            isend(zero, LONG, 1)


def receive_from(receiver: Channels, get: str, sources: Sequence[int]) -> list[object]:
    """Receive one message of each of `sources`, of which only `recv_each` takes several."""
    if get == "recv_each":
        return receiver.recv_each("host", "gather", sources, TAG, LIMIT_S)
    if get == "recv_any":
        return [receiver.recv_any("host", "recv", TAG, LIMIT_S)[0]]
    if get == "recv":
        return [recv(receiver, sources[0])]
    found: list[object] = []
    receiver.irecv("host", "irecv", sources[0], TAG, LIMIT_S, found.append).wait()
    return found


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("get", ["recv_each", "recv_any"])
def test_a_strike_at_any_step_of_a_receive_awaits_nothing_any_more(
    get: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next receives get all messages in order, unless the strike has broken the group."""
    monkeypatch.setattr(health, "EXPLAIN_S", 0.01)
    strikes = Strikes(strike, channels, channel_ends, channel_receiver, receiving_any)
    sources = (1, 2) if get == "recv_each" else (1,)
    first, second = [["first", src] for src in sources], [["second", src] for src in sources]
    outcomes: list[str] = []
    while not strikes.is_over:
        with channels_of(3) as ranks:
            found: list[list[object]] = []
            for src in sources:
                send(ranks[src], ["first", src], 0)
            try:
                with strikes.run():
                    found.append(receive_from(ranks[0], get, sources))
                outcome = "received"
            except AlarmError:
                outcome = "struck"
            if health_of(ranks[0]).is_broken:
                outcomes.append("broken")
                continue
            outcomes.append(outcome)
            for src in sources:
                send(ranks[src], ["second", src], 0)
            while len(found) < 2:
                found.append(receive_from(ranks[0], get, sources))
        assert found == [first, second]
    assert set(outcomes) == {"received", "struck", "broken"}


class Unknown:
    """None of these can be built."""


def build(_data: object) -> Unknown:
    """Build none."""
    raise ValueError("none can be built")


@pytest.mark.guarantee("D15")
@pytest.mark.parametrize("get", ["recv", "recv_each", "recv_any", "irecv"])
def test_a_message_for_which_there_is_no_memory_is_told_and_the_next_one_comes(
    get: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to receive raises a `NativeError`, and the group is intact."""
    codec.register_type(Unknown, encode=lambda _: 1, decode=build)
    # Without memory the native decoder raises this. What a function of the application raises is no `MemoryError`.
    monkeypatch.setattr(codec, "decode_error", lambda _: MemoryError("no memory"))
    with channels_of(2) as (zero, one):
        send(zero, Unknown(), 1)
        send(zero, "next", 1)
        with pytest.raises(
            NativeError, match="a message from rank 0 came, but could not be put in its place"
        ):
            receive_from(one, get, (0,))
        assert receive_from(one, get, (0,)) == ["next"]
        assert not health_of(one).is_broken
