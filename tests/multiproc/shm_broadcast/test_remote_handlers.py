"""Signal handlers that call a queue inside of a call of their own thread, when readers are on other hosts."""

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from shm_broadcast.errors import CommTimeoutError, UsageError
from tests.queue_ranks import DEADLINE_S
from tests.remotes import remote_queue


def while_alarmed(nested: Callable[[], Any], call: Callable[[], Any]) -> list[str]:
    """Run `call`, in which a handler calls `nested` after 0.2 s; return what that one raised."""
    errors: list[str] = []

    def handler(_number: int, _frame: FrameType | None) -> None:
        try:
            nested()
        except UsageError as error:
            errors.append(str(error))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return errors


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("call", ["dequeue", "try_dequeue", "loan"])
def test_a_handler_cannot_read_inside_of_a_remote_read(call: str) -> None:
    """It gets an error that names its call, and the interrupted read ends by its deadline; then messages come."""
    with remote_queue() as (writer, readers):
        reader = readers[1]

        def nested() -> None:
            if call == "loan":
                with reader.loan(1.0):
                    pass
            elif call == "dequeue":
                reader.dequeue(1.0)
            else:
                reader.try_dequeue()

        def read() -> None:
            with pytest.raises(CommTimeoutError):
                reader.dequeue(0.6)

        errors = while_alarmed(nested, read)
        assert len(errors) == 1
        assert errors[0].startswith(f"{call} on queue")
        writer.enqueue("next", DEADLINE_S)
        assert reader.dequeue(DEADLINE_S) == "next"


@pytest.mark.guarantee("R15")
def test_a_handler_cannot_write_inside_of_a_write_to_remote_readers() -> None:
    """It gets an error that names its call, and the reader gets what was written, in order."""
    with remote_queue(high_water_bytes=65536) as (writer, readers):
        sent = 0

        def write() -> None:
            nonlocal sent
            try:
                while True:
                    writer.enqueue([sent, bytes(50_000)], 0.6)
                    sent += 1
            except CommTimeoutError:
                return

        errors = while_alarmed(lambda: writer.enqueue("nested", 0.1), write)
        assert len(errors) == 1
        assert errors[0].startswith("enqueue on queue")
        assert [readers[1].dequeue(DEADLINE_S)[0] for _ in range(sent)] == list(range(sent))
