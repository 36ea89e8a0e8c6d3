"""Calls on an end of the transport to other hosts while another thread is inside of one."""

import asyncio
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import zmq

from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.interruption import is_held
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.queue_ranks import DEADLINE_S, blob
from tests.queues import background
from tests.remotes import counted, remote_queue, until_full
from tests.waiting import sleeping_in, wait_until


@pytest.mark.guarantee("B4", "R17", "R18")
def test_reads_beside_a_read_of_another_thread_end_by_their_deadlines() -> None:
    """`try_dequeue` and `fileno` do not wait, `dequeue` and `loan` say why they end, and a loop goes on meanwhile."""

    async def ticks_beside(reader: QueueReader) -> int:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        with pytest.raises(CommTimeoutError, match=r"adequeue .* within 0\.3 s"):
            await reader.adequeue(0.3)
        ticking.cancel()
        return ticks

    with remote_queue() as (writer, readers):
        reader = readers[1]
        with background(partial(reader.dequeue, DEADLINE_S)) as got:
            wait_until(lambda: sleeping_in("_sleep"), "`dequeue` asleep")
            assert reader.try_dequeue() == (False, None)
            assert reader.fileno() >= 0
            assert asyncio.run(ticks_beside(reader)) > 2
            start = time.monotonic()
            with pytest.raises(CommTimeoutError, match="dequeue .*another thread"):
                reader.dequeue(0.1)
            with pytest.raises(CommTimeoutError, match="loan .*another thread"), reader.loan(0.1):
                pass
            assert 0.2 <= time.monotonic() - start < 30.0
            assert not got
            writer.enqueue("first")
        assert got == ["first"]
        writer.enqueue("second")
        assert asyncio.run(reader.adequeue(DEADLINE_S)) == "second"


@pytest.mark.guarantee("B4")
def test_a_write_beside_a_write_of_another_thread_ends_by_its_deadline() -> None:
    """It says that another thread is writing, and has sent nothing."""
    with remote_queue(high_water_bytes=64 << 10) as (writer, readers):
        sent, _ = until_full(writer, blob(0, 30_000), 0.05)
        with background(partial(writer.enqueue, blob(0, 60_000), DEADLINE_S)) as first:
            wait_until(lambda: sleeping_in("_sleep"), "`enqueue` asleep")
            start = time.monotonic()
            with pytest.raises(CommTimeoutError, match="enqueue .*another thread"):
                writer.enqueue("not sent", 0.1)
            assert 0.1 <= time.monotonic() - start < 30.0
            counted(readers[1], sent)
        assert first == [None]
        assert len(readers[1].dequeue(DEADLINE_S)) == 60_000
        writer.enqueue("next", DEADLINE_S)
        assert readers[1].dequeue(DEADLINE_S) == "next"


@contextmanager
def acknowledged_before_the_next_record(writer: QueueWriter, reader: QueueReader) -> Iterator[list[bool]]:
    """Within the block, the writer's next record is sent when the reader's acknowledgement of a message has come.

    Yield a list that is empty from then on.
    """
    leg: Any = writer._remote
    push, left = leg._push, [True]

    def read_and_push(link: Any, frame: Any) -> None:
        if left:
            left.pop()
            reader.dequeue(DEADLINE_S)
            assert select.select([leg._router.get(zmq.FD)], [], [], DEADLINE_S)[0]
            # zmq clears the descriptor as it sends only if it has not looked for 3 million ticks of the clock.
            time.sleep(0.02)
        push(link, frame)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leg, "_push", read_and_push)
        yield left


@pytest.mark.guarantee("B11")
def test_room_that_comes_just_before_a_heartbeat_is_noticed() -> None:
    """The heartbeat clears the descriptor that tells the writer's thread, which is about to wait for it."""
    with remote_queue(high_water_bytes=65536, heartbeat_s=20.0, lost_after_s=60.0) as (writer, readers):
        # It fills the queue, so that the next one has to wait, and reading it is worth an acknowledgement.
        writer.enqueue(blob(0, 40_000), DEADLINE_S)
        leg: Any = writer._remote
        lost_at = leg._lost_at
        is_waiting, may_go_on = threading.Event(), threading.Event()

        def pause(link: Any) -> float | None:
            if threading.current_thread() is leg._thread and not is_held(leg._lock):
                is_waiting.set()
                may_go_on.wait(DEADLINE_S)
            return lost_at(link)  # type: ignore[no-any-return]

        def beat_and_go_on(beat: Callable[[], None]) -> None:
            beat()
            may_go_on.set()  # the thread hears of nothing before the next heartbeat

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(leg, "_lost_at", pause)
            os.eventfd_write(leg._wake, 1)
            assert is_waiting.wait(DEADLINE_S)
            with acknowledged_before_the_next_record(writer, readers[1]) as left:
                patch.setattr(leg, "_beat", partial(beat_and_go_on, leg._beat))
                writer.enqueue(blob(1, 40_000), 10.0)
                assert not left
        assert np.array_equal(readers[1].dequeue(DEADLINE_S), blob(1, 40_000))


@pytest.mark.guarantee("B11")
def test_what_comes_just_before_the_end_of_a_queue_is_received() -> None:
    """END clears the descriptor that tells the writer's thread of it, as a heartbeat does."""
    with remote_queue(high_water_bytes=65536, heartbeat_s=20.0, lost_after_s=60.0) as (writer, readers):
        writer.enqueue(blob(0, 40_000), DEADLINE_S)
        leg: Any = writer._remote
        with acknowledged_before_the_next_record(writer, readers[1]) as left, leg._lock:
            assert leg._ledger.in_the_way(40_000)
            leg._send_end()
            assert not left
            assert not leg._ledger.in_the_way(40_000)


@pytest.mark.guarantee("R6")
def test_a_reader_may_warn_as_late_as_it_likes() -> None:
    """`poll` refuses more than 24.8 days; a wait without a deadline that warns later still gets its message."""
    with (
        remote_queue(warn_after_s=100 * 86400.0) as (writer, readers),
        background(readers[1].dequeue) as outcome,
    ):
        wait_until(lambda: outcome or sleeping_in("_sleep"), "the call to wait")
        writer.enqueue("next", DEADLINE_S)
    assert outcome == ["next"]
