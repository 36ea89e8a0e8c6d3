"""Calls on an end of the transport to other hosts while another thread is inside of one."""

import asyncio
import time
from functools import partial

import pytest

from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.queue import QueueReader
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
