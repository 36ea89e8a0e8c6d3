"""How calls on a queue wait: deadlines, warnings, Ctrl-C, and closing from either end or another thread."""

import asyncio
import logging
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from shm_broadcast import codec
from shm_broadcast.errors import (
    ClosedError,
    CommTimeoutError,
    GroupBrokenError,
    PeerLostError,
)
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.settings import MIN_RING_BYTES, WaitMode
from tests.queues import background, fill, memory_of, queue, ring_write
from tests.waiting import sleeping_in, wait_in, wait_until

MODES: list[WaitMode] = ["adaptive", "spin", "park"]


def until_in_call(end: QueueWriter | QueueReader, mode: WaitMode = "adaptive") -> None:
    """Return when a thread is in a call on this end, and asleep there unless it spins."""
    endpoint: Any = end.endpoint
    call = "enqueue" if isinstance(end, QueueWriter) else "dequeue"
    wait_until(lambda: endpoint.is_busy and (mode == "spin" or sleeping_in(call)), f"`{call}` waiting")


# --- not waiting, and how long ---------------------------------------------------------------------------------


@pytest.mark.guarantee("B4")
def test_try_dequeue_returns_instead_of_waiting() -> None:
    """It gives the message that is there whole, and nothing otherwise; a long one comes when it is complete."""
    with queue() as (writer, [reader]):
        assert reader.try_dequeue() == (False, None)
        writer.enqueue(None)
        assert reader.try_dequeue() == (True, None)
        message = bytes(range(256)) * 768
        with background(lambda: writer.enqueue(message, 20.0)):
            # The writer may fill the last part while the first is taken; the next test stops it in between.
            deadline = time.monotonic() + 20.0
            while not (found := reader.try_dequeue())[0]:
                assert time.monotonic() < deadline
        assert found == (True, message)
        writer.close()
        with pytest.raises(ClosedError, match="the writer closed"):
            reader.try_dequeue()
        reader.close()
        with pytest.raises(ClosedError, match="the queue was closed"):
            reader.try_dequeue()


@pytest.mark.guarantee("B4")
@pytest.mark.parametrize("mode", MODES)
def test_a_timeout_costs_nothing(mode: WaitMode) -> None:
    """A reader and a writer whose time is up have waited that long, lose nothing, and go on."""
    with queue(wait=mode, writer=7) as (writer, [reader]):
        start = time.monotonic()
        with pytest.raises(
            CommTimeoutError, match=r"dequeue on queue 'steps' \(reader, rank 0, message #1\)"
        ) as late:
            reader.dequeue(0.15)
        assert time.monotonic() - start >= 0.15
        assert late.value.missing == (7,)
        sent, _ = fill(writer, bytes(2000))
        start = time.monotonic()
        with pytest.raises(CommTimeoutError, match=r"enqueue on queue 'steps' \(writer, message #") as full:
            writer.enqueue(bytes(2000), 0.15)
        assert time.monotonic() - start >= 0.15
        assert full.value.missing == (0,)
        assert all(reader.dequeue(1.0) == bytes(2000) for _ in range(sent))
        writer.enqueue("more", 1.0)
        assert reader.dequeue(1.0) == "more"


@pytest.mark.guarantee("B4")
def test_a_reader_whose_time_is_up_within_a_long_message_gets_it_later() -> None:
    """The time-out holds in the middle of a message too; the next call goes on with the same message."""
    obj = bytes(range(255, -1, -1)) * 768
    message = codec.encode(obj)
    with queue() as (writer, [reader]):
        memory = memory_of(writer)
        done = ring_write(memory, message.header, message.buffers, 0, 0, 0)
        assert 0 < done < message.nbytes
        with pytest.raises(CommTimeoutError, match="no end of the message"):
            reader.dequeue(0.05)
        assert reader.try_dequeue() == (False, None)
        done = ring_write(memory, message.header, message.buffers, done, 0, 0)
        with pytest.raises(CommTimeoutError, match="no end of the message"):
            reader.loan(0.0).__enter__()
        while done < message.nbytes:
            assert reader.try_dequeue() == (False, None)
            done = ring_write(memory, message.header, message.buffers, done, 0, 0)
        assert reader.dequeue(1.0) == obj
        writer.enqueue("next", 1.0)
        assert reader.dequeue(1.0) == "next"


@pytest.mark.guarantee("B4")
def test_a_long_message_cut_by_a_timeout_breaks_the_writer() -> None:
    """Once parts of a message are written nothing can follow them: later calls say so at once."""
    with queue() as (writer, [reader]):
        with pytest.raises(CommTimeoutError) as caught:
            writer.enqueue(bytes(3 * MIN_RING_BYTES), 0.05)
        with pytest.raises(GroupBrokenError) as broken:
            writer.enqueue("next")
        assert broken.value.__cause__ is caught.value
        assert writer.statistics().messages == 0
        writer.close()
        with pytest.raises(ClosedError):
            reader.dequeue(1.0)


@pytest.mark.guarantee("B5")
def test_a_late_reader_is_named_with_all_that_is_known() -> None:
    """The error says queue, role, message, and of each reader in the way: rank, pid, state, lag, last progress."""
    with queue(readers=3) as (writer, readers):
        writer.enqueue("read by one")
        readers[1].dequeue(1.0)
        readers[2].dequeue(1.0)
        _, full = fill(writer, bytes(1000), lambda: readers[2].dequeue(1.0))
        text = str(full)
        assert full.missing == (0, 1)
        assert "enqueue on queue 'steps' (writer, message #" in text
        assert "rank 0 (pid " in text
        assert "alive, " in text
        assert " behind, never read)" in text
        assert " behind, last progress 0." in text
        assert "rank 2" not in text


@pytest.mark.guarantee("B5")
@pytest.mark.slow
def test_a_long_wait_warns_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """A call that waits says for whom every `warn_after_s`, not at every turn."""
    with queue(warn_after_s=0.2) as (writer, [reader]), caplog.at_level(logging.WARNING):
        with pytest.raises(CommTimeoutError):
            reader.dequeue(0.9)
        texts = [record.getMessage() for record in caplog.records]
        assert 1 <= len(texts) <= 4
        assert all("no message from the writer (pid " in text for text in texts)
        caplog.clear()
        with pytest.raises(CommTimeoutError):
            writer.enqueue(bytes(3 * MIN_RING_BYTES), 0.9)
        texts = [record.getMessage() for record in caplog.records]
        assert 1 <= len(texts) <= 4
        assert all("no room, behind are rank 0 (pid " in text for text in texts)


@pytest.mark.guarantee("B6")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("role", ["reader", "writer", "any"])
@pytest.mark.slow
def test_ctrl_c_interrupts_every_wait(mode: WaitMode, role: str) -> None:
    """A signal ends a wait without limit; the promise is 0.2 s, a loaded machine gets ten times that."""
    with queue(wait=mode) as (writer, [reader]):
        if role == "writer":
            fill(writer, bytes(20_000))
        call = {
            "reader": reader.dequeue,
            "writer": lambda: writer.enqueue(bytes(20_000)),
            "any": lambda: dequeue_any([reader]),
        }[role]
        sent: list[float] = []

        def interrupt() -> None:
            sent.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        timer = threading.Timer(0.25, interrupt)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            call()
        assert time.monotonic() - sent[0] < 2.0
        timer.join()
        if role != "writer":
            writer.enqueue("still usable")
            assert reader.dequeue(1.0) == "still usable"
        elif reader.dequeue(1.0) == bytes(20_000):
            writer.enqueue("still usable", 1.0)


@pytest.mark.guarantee("B6")
@pytest.mark.parametrize(("nbytes", "breaks"), [(100_000, False), (10**6, True)])
def test_ctrl_c_while_a_message_waits_for_room_tears_nothing(nbytes: int, breaks: bool) -> None:
    """A signal with parts of a message in the ring breaks the queue; a message in one record is there or is not."""
    with queue(ring_bytes=4 * MIN_RING_BYTES) as (writer, [reader]):
        sent, _ = fill(writer, bytes(15_000))
        if breaks:
            # Room for a part of the message.
            for _ in range(sent):
                assert reader.dequeue(1.0) == bytes(15_000)
        main = threading.current_thread()

        def interrupt() -> None:
            wait_in("enqueue", main)
            signal.pthread_kill(main.ident or 0, signal.SIGINT)

        with background(interrupt), pytest.raises(KeyboardInterrupt):
            writer.enqueue(bytes(nbytes), 10.0)
        if breaks:
            with pytest.raises(GroupBrokenError):
                writer.enqueue("next", 1.0)
        else:
            for _ in range(sent):
                assert reader.dequeue(1.0) == bytes(15_000)
            writer.enqueue("next", 1.0)
            assert reader.dequeue(1.0) == "next"


@pytest.mark.guarantee("B6", "B22")
@pytest.mark.parametrize("nbytes", [10, 8 << 20])
def test_ctrl_c_within_an_ordinary_call_tears_nothing(nbytes: int) -> None:
    """Whenever the signal comes, the message is there whole or is not there, and the queue goes on."""
    message = bytes(range(256)) * (nbytes // 256 + 1)
    with queue(ring_bytes=32 << 20) as (writer, [reader]):
        for turn in range(20):
            main = threading.main_thread().ident or 0
            timer = threading.Timer(turn * 0.0004, signal.pthread_kill, (main, signal.SIGINT))
            sent = 0
            try:
                timer.start()
                while True:
                    writer.enqueue((turn, sent, message), 10.0)
                    sent += 1
                    assert reader.dequeue(10.0) == (turn, sent - 1, message)
            except KeyboardInterrupt:
                timer.join()
            left = []
            while (found := reader.try_dequeue())[0]:
                left.append(found[1])
            assert left in ([], [(turn, sent, message)], [(turn, sent - 1, message)])
            writer.enqueue("next", 1.0)
            assert reader.dequeue(1.0) == "next"


# --- closing ---------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("B7")
@pytest.mark.parametrize("mode", MODES)
def test_a_closed_writer_ends_the_queue_behind_its_messages(mode: WaitMode) -> None:
    """Readers get what was written, then `ClosedError`, also one that waits just then."""
    with queue(readers=2, wait=mode) as (writer, readers):
        writer.enqueue("last")
        assert readers[0].dequeue(1.0) == "last"
        with background(readers[0].dequeue) as outcome:
            until_in_call(readers[0], mode)
            writer.close()
            writer.close()
        assert isinstance(outcome[0], ClosedError)
        assert "the writer closed the queue" in str(outcome[0])
        assert readers[1].dequeue(1.0) == "last"
        with pytest.raises(ClosedError):
            readers[1].dequeue()
        with pytest.raises(ClosedError, match="the queue was closed"):
            writer.enqueue("more")
        with pytest.raises(ClosedError):
            writer.statistics()


@pytest.mark.guarantee("B7")
@pytest.mark.parametrize("mode", MODES)
def test_close_from_another_thread_wakes_a_waiting_call(mode: WaitMode) -> None:
    """Whoever waits without limit on either end is told that its own end was closed."""
    with queue(readers=2, wait=mode) as (writer, readers):
        with background(readers[0].dequeue) as read:
            until_in_call(readers[0], mode)
            readers[0].close()
        assert isinstance(read[0], ClosedError)
    with (
        queue(wait=mode) as (writer, _),
        background(lambda: writer.enqueue(bytes(3 * MIN_RING_BYTES))) as wrote,
    ):
        until_in_call(writer, mode)
        writer.close()
    assert isinstance(wrote[0], ClosedError)
    with queue(wait=mode) as (_, readers), background(lambda: dequeue_any(readers)) as waited:
        wait_until(lambda: sleeping_in("dequeue_any"), "`dequeue_any` asleep")
        readers[0].close()
    assert isinstance(waited[0], ClosedError)


@pytest.mark.guarantee("B7")
def test_nothing_is_sent_behind_a_close_from_another_thread() -> None:
    """A call that was ended by `close` is not followed by one that succeeds, however soon it comes."""
    with queue() as (writer, _):
        fill(writer, bytes(10_000))

        def wait_and_try_again() -> list[bool]:
            with pytest.raises(ClosedError):
                writer.enqueue(bytes(10_000))
            outcomes = []
            for _ in range(3):
                with pytest.raises(ClosedError):
                    writer.enqueue(1)
                outcomes.append(False)
            return outcomes

        with background(wait_and_try_again) as outcome:
            until_in_call(writer)
            writer.close()
        assert outcome == [[False, False, False]]


@pytest.mark.guarantee("B7")
def test_a_reader_that_left_is_named_when_its_room_is_needed() -> None:
    """The writer drops nothing silently: it gets `PeerLostError` with the rank, also in the middle of a wait."""
    with queue(readers=2) as (writer, readers):
        with (
            background(lambda: writer.enqueue(bytes(3 * MIN_RING_BYTES))) as outcome,
            background(lambda: readers[0].dequeue(20.0)),
        ):
            wait_until(lambda: min(map(sleeping_in, ("enqueue", "dequeue"))), "both calls asleep")
            readers[1].close()
            readers[1].close()
            # The other reader waits for the rest of the message, until the writer gives up.
            try:
                wait_until(lambda: outcome, "the writer to give up", 20.0, 0.01)
            finally:
                writer.close()
        assert isinstance(outcome[0], PeerLostError)
        assert outcome[0].peers == (1,)
        assert "rank 1 (" in str(outcome[0])
        assert "closed the queue" in str(outcome[0])
    with queue() as (writer, readers):
        readers[0].close()
        for _ in range(MIN_RING_BYTES // 20_064):
            writer.enqueue(bytes(20_000))
        with pytest.raises(PeerLostError):
            writer.enqueue(bytes(20_000))
        with pytest.raises(GroupBrokenError):
            writer.enqueue("next")


@pytest.mark.guarantee("B7")
def test_waiting_for_readers_names_those_that_are_missing() -> None:
    """`wait_until_ready` says who has not come, and who came and left again."""
    with QueueWriter.create("steps", [3, 5]) as writer:
        with QueueReader.open(writer.handle, writer.key, 5):
            with pytest.raises(CommTimeoutError) as caught:
                writer.wait_until_ready(0.05)
            assert caught.value.missing == (3,)
        with pytest.raises(PeerLostError) as lost:
            writer.wait_until_ready()
        assert lost.value.peers == (5,)


@pytest.mark.guarantee("B7")
def test_closing_the_queue_ends_a_wait_for_readers_under_its_own_name() -> None:
    """Another thread closes the queue meanwhile; the error does not name a call that the caller never made."""
    with QueueWriter.create("steps", [3]) as writer:
        closer = threading.Timer(0.2, writer.close)
        closer.start()
        with pytest.raises(ClosedError, match=r"^wait_until_ready on queue 'steps'"):
            writer.wait_until_ready(20.0)
        closer.join()


@pytest.mark.guarantee("B1")
def test_the_last_message_of_a_writer_that_dies_between_two_looks_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reader finds no message, then the writer publishes one and dies, then the reader finds it dead."""
    with queue() as (writer, [reader]):
        ring: Any = reader._ring

        def publishes_and_dies() -> tuple[int, ...]:
            writer.enqueue("last")
            return (0,)

        with monkeypatch.context() as patch:
            patch.setattr(ring, "_watch", SimpleNamespace(lost=publishes_and_dies))
            ring.raise_if_lost("dequeue")
        assert reader.dequeue(10.0) == "last"


@pytest.mark.guarantee("B7")
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue", "adequeue", "dequeue_any", "loan"])
def test_a_writer_that_closes_the_queue_and_ends_between_two_looks_has_closed_it(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader finds no end, then the writer closes the queue and ends, then the reader finds that it has ended."""
    with queue() as (writer, [reader]):
        ring: Any = reader._ring

        def closes_and_ends() -> tuple[int, ...]:
            writer.close()
            return (0,)

        def read() -> None:
            if call == "adequeue":
                asyncio.run(reader.adequeue(10.0))
            elif call == "dequeue_any":
                dequeue_any([reader], 10.0)
            elif call == "loan":
                reader.loan(10.0).__enter__()
            elif call == "dequeue":
                reader.dequeue(10.0)
            else:
                reader.try_dequeue()

        with monkeypatch.context() as patch:
            patch.setattr(ring._watch, "lost", closes_and_ends)
            with pytest.raises(ClosedError, match="the writer closed the queue"):
                read()
        assert ring.endpoint.cause is None
