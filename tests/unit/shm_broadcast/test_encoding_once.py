"""An object is encoded once, whatever becomes of it: hooks of the application are not run again."""

from typing import Any

import pytest

from shm_broadcast import codec
from shm_broadcast.errors import CommTimeoutError, UsageError
from shm_broadcast.settings import MIN_RING_BYTES
from tests.queues import background, fill, queue


class Counted:
    """Counts how often it is encoded."""

    encoded = 0

    def __init__(self, nbytes: int) -> None:
        """Take `nbytes` in a frame."""
        self.nbytes = nbytes


def encode(obj: Counted) -> bytes:
    """Count, and refuse what is negative."""
    Counted.encoded += 1
    if obj.nbytes < 0:
        raise ValueError("negative")
    return bytes(obj.nbytes)


@pytest.fixture(autouse=True)
def _registered() -> Any:
    codec.register_type(Counted, encode=encode, decode=lambda data: Counted(len(data)))
    Counted.encoded = 0
    yield
    codec.unregister_type(Counted)


def test_a_message_that_fits_is_encoded_once() -> None:
    """The ordinary case."""
    with queue() as (writer, [reader]):
        writer.enqueue(Counted(10))
        assert reader.dequeue(1.0).nbytes == 10
    assert Counted.encoded == 1


@pytest.mark.parametrize("nbytes", [MIN_RING_BYTES // 4, 3 * MIN_RING_BYTES])
def test_a_message_that_has_to_wait_is_encoded_once(nbytes: int) -> None:
    """It is written from where it was encoded, in one record or in parts."""
    with queue() as (writer, [reader]):
        sent, _ = fill(writer, bytes(1000))
        with background(lambda: writer.enqueue(Counted(nbytes), 10.0)) as outcome:
            for _ in range(sent):
                assert reader.dequeue(10.0) == bytes(1000)
            assert reader.dequeue(10.0).nbytes == nbytes
        assert outcome == [None]
    assert Counted.encoded == 1


def test_a_message_that_cannot_be_sent_is_encoded_once() -> None:
    """Neither an error of its hook nor a time-out makes the hook run again."""
    with queue() as (writer, _):
        with pytest.raises(UsageError, match="negative"):
            writer.enqueue(Counted(-1))
        assert Counted.encoded == 1
        fill(writer, bytes(1000))
        with pytest.raises(CommTimeoutError):
            writer.enqueue(Counted(5000), 0.01)
    assert Counted.encoded == 2
