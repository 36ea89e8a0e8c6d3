"""Messages that a receive refuses for a mistake of its caller: the next receive of their tag gets them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from device_comm import health
from device_comm.cpu import channel_receiver, channels, receiving_any
from device_comm.cpu.channel_receiver import ChannelReceiver, Receiving
from device_comm.cpu.channels import Channels
from shm_broadcast import _core as rings
from shm_broadcast.errors import UsageError
from tests.channels import channels_of, health_of
from tests.multiproc.device_comm.test_channel_opening import Strikes, recv, send, strike
from tests.multiproc.device_comm.test_channel_strikes import opened
from tests.queues import background
from tests.unit.shm_broadcast.test_signal_handlers import AlarmError
from tests.waiting import wait_until

TAG = 1
LIMIT_S = 20.0


def refuse(*_message: object) -> NoReturn:
    """Refuse a message, as one that cannot be decoded to the type that the caller gives."""
    raise UsageError("nothing can be decoded to this type")


def refuse_from(receiver: Channels, get: str, land: Callable[..., NoReturn] = refuse) -> Any:
    """Receive a message that is refused."""
    if get == "recv_any":
        return receiver.recv_any("host", "recv", TAG, LIMIT_S, land)
    return receiver.recv("host", "recv", 0, TAG, LIMIT_S, land)


@pytest.mark.guarantee("R14")
@pytest.mark.parametrize("get", ["recv", "recv that waits", "recv_any"])
def test_a_strike_at_any_step_of_a_receive_that_refuses_its_message_leaves_it(
    get: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the next one for whatever the caller gets, unless the strike has broken the group."""
    monkeypatch.setattr(health, "EXPLAIN_S", 0.01)
    if get == "recv that waits":
        monkeypatch.setattr(ChannelReceiver, "land_soon", lambda *_: rings.NOTHING)
    strikes = Strikes(strike, channels, channel_receiver, receiving_any, health)
    outcomes: set[str] = set()
    while not strikes.is_over:
        with opened() as (zero, one):
            send(zero, "refused", 1)
            with pytest.raises((UsageError, AlarmError)) as caught, strikes.run():
                refuse_from(one, get)
            if health_of(one).is_broken:
                outcomes.add("broken")
                continue
            outcomes.add(caught.type.__name__)
            send(zero, "next", 1)
            assert recv(one, 0) == "refused"
            assert recv(one, 0) == "next"
    assert outcomes == {"UsageError", "AlarmError"} | ({"broken"} if get != "recv" else set())


@pytest.mark.guarantee("D15")
def test_a_wait_that_has_refused_its_message_can_be_polled_again() -> None:
    """It meets the message once more, and keeps to its time when another call has taken that."""
    with opened() as (zero, one):
        send(zero, "refused", 1)
        refusing = Receiving(one._receivers[0], TAG, refuse)
        for _ in range(2):
            with pytest.raises(UsageError, match="this type"):
                refusing.poll(0.1)
        assert recv(one, 0) == "refused"
        assert not refusing.poll(0.1)


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("get", ["recv", "recv_any"])
def test_a_message_that_one_thread_refuses_goes_to_another_that_waits_for_it(
    get: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has begun to wait before that, and gets it before a later one."""
    monkeypatch.setattr(ChannelReceiver, "land_soon", lambda *_: rings.NOTHING)
    is_waiting = threading.Event()

    def refuse_later(*_message: object) -> NoReturn:
        assert is_waiting.wait(LIMIT_S)
        refuse()

    with channels_of(3) as ranks:
        receiver = ranks[1]
        send(ranks[0], "opens", 1)
        assert recv(receiver, 0) == "opens"

        def refused() -> None:
            with pytest.raises(UsageError, match="this type"):
                refuse_from(receiver, get, refuse_later)

        end = receiver._receivers[0]
        with background(refused) as first:
            send(ranks[0], "refused", 1)
            wait_until(lambda: end.endpoint.messages == 2 and not end.arrived[TAG], "the message to be taken")
            with background(lambda: [recv(receiver, 0), recv(receiver, 0)]) as second:
                wait_until(lambda: end._awaited[TAG], "the other thread to wait")
                is_waiting.set()
                wait_until(lambda: first, "the refusal")
                send(ranks[0], "next", 1)
        assert first == [None]
        assert second == [["refused", "next"]]


@pytest.mark.guarantee("D15")
def test_a_message_that_is_refused_goes_to_the_handle_that_was_made_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two handles were made while the other thread had the message; the second is waited for first."""
    monkeypatch.setattr(ChannelReceiver, "land_soon", lambda *_: rings.NOTHING)
    are_made = threading.Event()

    def refuse_later(*_message: object) -> NoReturn:
        assert are_made.wait(LIMIT_S)
        refuse()

    def refused() -> None:
        with pytest.raises(UsageError, match="this type"):
            refuse_from(one, "recv", refuse_later)

    with opened() as (zero, one):
        end = one._receivers[0]
        found: list[list[object]] = [[], []]
        with background(refused) as refusal:
            send(zero, "refused", 1)
            wait_until(lambda: end.endpoint.messages == 2 and not end.arrived[TAG], "the message to be taken")
            first, second = (one.irecv("host", "irecv", 0, TAG, LIMIT_S, each.append) for each in found)
            are_made.set()
        assert refusal == [None]
        send(zero, "next", 1)
        second.wait()
        first.wait()
        assert found == [["refused"], ["next"]]
