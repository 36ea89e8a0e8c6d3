"""The end of a writer that another thread, or its own hook, closes in the middle of a message."""

import os
import signal
import threading
from functools import partial

import pytest

from shm_broadcast import _core, codec
from tests.queues import LONG, RefusedError, background, bare_ring, ends, refuse
from tests.waiting import wait_until

MEGABYTE = 1 << 20


@pytest.mark.guarantee("B7", "R3")
@pytest.mark.parametrize(
    ("nbytes", "seen"),
    [(28 * MEGABYTE, 1), (46 * MEGABYTE, 1), (46 * MEGABYTE, 20 * MEGABYTE)],
    ids=["stream", "first part", "second part"],
)
def test_nothing_is_published_behind_a_close(nbytes: int, seen: int) -> None:
    """`close` waits for the copy of the present record, and what it has published whole is counted then."""
    memory = bare_ring(64 * MEGABYTE)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    with background(partial(writer.send, bytes(nbytes))) as outcome:
        wait_until(lambda: _core.ring_state(memory)[0] >= seen, "a record", poll_s=0.0)
        writer.close(refuse)
        # This is what readers see from the end of the queue on, and what its owner tells readers on other hosts.
        before, counted = _core.ring_state(memory), writer.messages
        _core.ring_end(memory, -1)
    after = _core.ring_state(memory)
    assert before[:2] == after[:2]
    assert counted == writer.messages == after[1]
    assert isinstance(outcome[0], RefusedError)
    assert outcome[0].reason == _core.LOOK_UNUSABLE


@pytest.mark.guarantee("B7")
@pytest.mark.parametrize("when", ["LOOK_BEGIN", "LOOK_WAITING"])
@pytest.mark.parametrize("message", [bytes(1000), LONG], ids=["short", "long"])
def test_a_writer_that_is_closed_while_room_is_made_sends_nothing(when: str, message: bytes) -> None:
    """The wait for room has just ended when it learns that it was closed."""

    def look_around(reason: int, detail: object) -> RefusedError | None:
        if reason == getattr(_core, when):
            while reader.receive_within(0, 0) is not _core.NOTHING:
                pass
            writer.close(refuse)
        return refuse(reason, detail)

    memory, _, reader = ends()
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", look_around)
    while writer.send_now(message, 0) is None:
        pass
    sent = _core.ring_state(memory)[:2]
    with pytest.raises(RefusedError) as caught:
        writer.send(message)
    assert caught.value.reason == _core.LOOK_UNUSABLE
    assert _core.ring_state(memory)[:2] == sent


@pytest.mark.guarantee("B7")
def test_two_threads_that_close_wait_for_the_same_copy() -> None:
    """Both come back when the record is there, and the mapping is free once the writing call has ended."""
    memory = bare_ring(64 * MEGABYTE)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    seen: list[int] = []

    def close() -> None:
        writer.close(refuse)
        seen.append(_core.ring_state(memory)[1])

    threads = [threading.Thread(target=close) for _ in range(2)]
    with background(partial(writer.send, bytes(28 * MEGABYTE))):
        wait_until(lambda: _core.ring_state(memory)[0] > 0, "a record", poll_s=0.0)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [1, 1]
    memory.close()


@pytest.mark.guarantee("B7", "B19")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_close_in_a_forked_child_waits_for_no_copy_of_its_parent() -> None:
    """The thread that copies does not exist there."""
    memory = bare_ring(64 * MEGABYTE)
    writer = _core.WriteEndpoint(memory, codec.describe, "adaptive", refuse)
    with background(partial(writer.send, bytes(28 * MEGABYTE))) as outcome:
        wait_until(lambda: _core.ring_state(memory)[0] > 0, "a record", poll_s=0.0)
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            writer.close(refuse)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert outcome == [None]
