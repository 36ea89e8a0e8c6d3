"""`dequeue_any` beside signal handlers and other threads, which read the same queues."""

import math
import signal
import threading
import time
from contextlib import ExitStack
from functools import partial
from types import FrameType
from typing import Any

import pytest

from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from tests.queues import background, queue
from tests.remotes import remote_queue
from tests.waiting import sleeping_in, wait_until

DEADLINE_S = 20.0


def two_queues(stack: ExitStack, *, is_far: bool) -> tuple[list[QueueWriter], list[QueueReader]]:
    """Create two queues, of which the first reaches its reader by shared memory, or over a connection."""
    first: Any = stack.enter_context(remote_queue() if is_far else queue())
    second, [other] = stack.enter_context(queue())
    return [first[0], second], [first[1][1 if is_far else 0], other]


@pytest.mark.guarantee("B20")
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("timeout_s", [math.inf, 1e300, 1e-9, 0.0])
def test_any_time_is_a_deadline(*, is_far: bool, timeout_s: float) -> None:
    """A call without end waits for its message, and one that has no time raises."""
    with ExitStack() as stack:
        writers, readers = two_queues(stack, is_far=is_far)
        if timeout_s < 1.0:
            with pytest.raises(CommTimeoutError):
                dequeue_any(readers, timeout_s)
            return
        with background(partial(dequeue_any, readers, timeout_s)) as outcome:
            wait_until(lambda: outcome or sleeping_in("take_any"), "the call to wait")
            writers[1].enqueue("other")
        assert outcome == [(1, "other")]


@pytest.mark.guarantee("B20", "R15")
@pytest.mark.parametrize("is_far", [False, True])
@pytest.mark.parametrize("timeout_s", [DEADLINE_S, None])
def test_a_message_that_a_handler_takes_first_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, *, is_far: bool, timeout_s: float | None
) -> None:
    """The call goes on to wait for any queue, and gets the message of another one."""
    taken = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        taken.append(readers[0].dequeue(DEADLINE_S))
        writers[1].enqueue("other")

    with ExitStack() as stack:
        writers, readers = two_queues(stack, is_far=is_far)
        end: Any = readers[0]._ring
        is_ready = end.is_ready

        def interrupted() -> bool:
            is_found = bool(is_ready())
            if is_found and not taken:
                signal.raise_signal(signal.SIGALRM)
            return is_found

        monkeypatch.setattr(end, "is_ready", interrupted)
        before = signal.signal(signal.SIGALRM, handler)
        # Ends a call that waits for ever for the first queue.
        rescue = threading.Timer(5.0, partial(writers[0].enqueue, "too late"))
        rescue.start()
        try:
            writers[0].enqueue("first")
            assert dequeue_any(readers, timeout_s) == (1, "other")
        finally:
            signal.signal(signal.SIGALRM, before)
            rescue.cancel()
            rescue.join()
        assert taken == ["first"]


@pytest.mark.guarantee("B20")
def test_a_message_on_loan_to_another_thread_holds_up_no_other_queue() -> None:
    """The others are served, and the deadline is kept, with the processor at rest."""
    is_lent, is_over = threading.Event(), threading.Event()

    def lend() -> None:
        with readers[0].loan(DEADLINE_S):
            is_lent.set()
            is_over.wait(DEADLINE_S)

    with ExitStack() as stack:
        writers, readers = two_queues(stack, is_far=False)
        writers[0].enqueue("lent")
        with background(lend):
            try:
                assert is_lent.wait(DEADLINE_S)
                for number in range(3):
                    writers[1].enqueue(number)
                    assert dequeue_any(readers, 5.0) == (1, number)
                start, used = time.monotonic(), time.thread_time()
                with pytest.raises(CommTimeoutError, match="dequeue_any on steps, steps: no message"):
                    dequeue_any(readers, 1.0)
                assert time.monotonic() - start >= 1.0
                assert time.thread_time() - used < 0.5
            finally:
                is_over.set()
        writers[0].enqueue("next")
        assert dequeue_any(readers, DEADLINE_S) == (0, "next")


@pytest.mark.guarantee("B20")
@pytest.mark.parametrize("is_far", [False, True])
def test_threads_that_read_the_same_queues_share_the_messages(*, is_far: bool) -> None:
    """Each message goes to one of them, and each thread ends with the message that tells it to."""
    count, found = 300, list[tuple[int, int]]()

    def take() -> None:
        while (each := dequeue_any(readers, DEADLINE_S))[1] is not None:
            found.append(each)

    with ExitStack() as stack:
        writers, readers = two_queues(stack, is_far=is_far)
        with background(take) as first, background(take) as second:
            for number in range(count):
                for writer in writers:
                    writer.enqueue(number, DEADLINE_S)
            wait_until(lambda: len(found) == 2 * count, "all messages")
            wait_until(lambda: sleeping_in("dequeue_any") == 2, "two threads asleep")
            for writer in writers:
                writer.enqueue(None)
        assert first == second == [None]
    assert sorted(found) == [(index, number) for index in (0, 1) for number in range(count)]
