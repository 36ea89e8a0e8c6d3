"""A queue's key that travels in a serialised handle can be opened by the processes of one family only."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from coordinator.integrations.sealing import SEALED_BYTES, open_sealed, seal
from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from shm_broadcast.errors import DecodeError
from shm_broadcast.handle import KEY_BYTES, new_key

HANDLE = b"the handle of a queue"


def test_a_sealed_key_is_opened_by_the_same_family() -> None:
    """What one process seals, another one with the same secret opens."""
    key = new_key()
    assert open_sealed(seal(key, HANDLE), HANDLE) == key


def test_a_sealed_key_does_not_show_the_key_and_is_new_each_time() -> None:
    """Neither the key nor a part of it stands in the sealed form, which is random."""
    key = bytes(KEY_BYTES)
    sealed = [seal(key, HANDLE) for _ in range(8)]
    assert len(set(sealed)) == 8
    assert all(len(each) == SEALED_BYTES and key[:8] not in each for each in sealed)


@pytest.mark.guarantee("G51")
def test_another_family_cannot_open_it(other_family: Callable[[], None]) -> None:
    """The error says who can open a handle."""
    sealed = seal(new_key(), HANDLE)
    other_family()
    with pytest.raises(DecodeError, match="another family"):
        open_sealed(sealed, HANDLE)


@pytest.mark.parametrize("position", [0, 15, 16, 47, 48, 79])
def test_a_changed_byte_is_refused(position: int) -> None:
    """Salt, key and tag are each authenticated."""
    sealed = bytearray(seal(new_key(), HANDLE))
    sealed[position] ^= 1
    with pytest.raises(DecodeError, match="changed"):
        open_sealed(bytes(sealed), HANDLE)


def test_a_key_is_bound_to_its_queue() -> None:
    """A sealed key cannot be moved to the handle of another queue."""
    with pytest.raises(DecodeError):
        open_sealed(seal(new_key(), HANDLE), b"the handle of another queue")


@pytest.mark.parametrize("sealed", [b"", bytes(SEALED_BYTES - 1), bytearray(SEALED_BYTES), None])
def test_something_else_is_refused(sealed: Any) -> None:
    """Only bytes of the right length are looked at."""
    with pytest.raises(DecodeError, match="80 bytes"):
        open_sealed(sealed, HANDLE)


@pytest.mark.guarantee("G51")
def test_a_serialised_handle_holds_no_key(other_family: Callable[[], None]) -> None:
    """The executor pickles the handle for its workers; the key is sealed in there, and hidden in its text."""
    queue = MessageQueue(1, 1)
    try:
        handle = queue.export_handle()
        sent = pickle.dumps(handle)
        assert handle.key not in sent
        assert repr(handle.key) not in repr(handle)
        received = pickle.loads(sent)
        assert isinstance(received, MessageQueueHandle)
        assert (received.queue, received.key) == (handle.queue, handle.key)
        assert received.local_reader_ranks == [0]
        other_family()
        with pytest.raises(DecodeError, match="another family"):
            pickle.loads(sent)
    finally:
        queue.shutdown()
