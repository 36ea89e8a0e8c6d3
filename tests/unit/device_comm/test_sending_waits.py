"""Signal handlers within a wait for a message that another thread writes into a channel."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from device_comm.cpu.channel_sender import Sending
from shm_broadcast import codec
from tests.handlers import handling_at, raising_at

PLACES = ("/threading.py", "device_comm/cpu/channel_sender.py")
# More than the places of the call.
STEPS = 200
LIMIT_S = 20.0


def sending() -> Sending:
    """Return a message that nobody has written yet."""
    crossing = SimpleNamespace(is_closed=False, drain=lambda _busy: False)
    sender: Any = SimpleNamespace(crossing=crossing, peer=1)
    sender.raise_if_deserted = sender.go_on = lambda: None
    sender.call_thread = lambda **_: None
    sender.done = lambda _sending: None
    return Sending(sender, codec.encode(1), 1)


def within_limit(call: Callable[[], None]) -> None:
    """Run `call` on a thread, and fail if it does not end."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    assert not thread.is_alive()


@pytest.mark.guarantee("D15")
def test_a_handler_may_wait_for_the_message_for_which_its_thread_waits() -> None:
    """Wherever it runs, neither call waits for the other."""
    over: list[int] = []

    def run() -> None:
        for step in range(STEPS):
            message, found = sending(), list[bool]()

            def wait() -> None:
                found.append(message.poll(0.001))  # noqa: B023 - called within the same round

            if not handling_at(step, wait, wait, PLACES):
                over.append(step)
                break
            assert found == [False, False]

    within_limit(run)
    assert over[0] > 1


@pytest.mark.guarantee("D15")
def test_a_strike_within_a_wait_keeps_no_thread_from_ending_it() -> None:
    """What a handler raises arrives as it is; then the message is written, and the next wait returns."""
    for step in count():
        assert step < STEPS, "the call has more places"
        message = sending()
        has_come = raising_at(step, lambda: message.poll(0.001), PLACES)  # noqa: B023 - as above
        within_limit(lambda: message._finish(None))  # noqa: B023
        assert message.poll(LIMIT_S)
        assert message.pending() == ()
        if not has_come:
            break
    assert step > 1
