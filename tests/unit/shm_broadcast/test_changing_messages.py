"""Messages that change in shared memory while they are decoded."""

import copy
import mmap
from dataclasses import dataclass
from typing import Any

import pytest

from shm_broadcast import codec
from tests.queues import memory_of, queue

SCRIBBLES: list[mmap.mmap] = []
"""The memory that the next decoding of a `Scribbler` changes."""

TEXT = "a text of some length"


@dataclass
class Scribbler:
    """Its decoding overwrites what follows it in the message."""

    number: int


def build(data: dict[str, Any]) -> Scribbler:
    """Replace the text, and its length before it, by bytes that are no text."""
    memory = SCRIBBLES.pop()
    at = memory.find(TEXT.encode())
    assert at > 0
    memory[at - 2 : at + len(TEXT)] = b"\xff" * (len(TEXT) + 2)
    return Scribbler(data["number"])


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    codec.register_type(Scribbler, encode=lambda each: {"number": each.number}, decode=build)


@pytest.mark.guarantee("R16")
@pytest.mark.parametrize("call", ["dequeue", "loan"])
@pytest.mark.parametrize("nbytes", [10, 10_000])
def test_a_message_that_changes_while_it_is_decoded_is_as_it_was_checked(call: str, nbytes: int) -> None:
    """This holds for a short message and for one whose tree is longer than what is copied to the stack."""
    message = [Scribbler(1), TEXT, list(range(nbytes))]
    with queue() as (writer, [reader]):
        writer.enqueue(message)
        SCRIBBLES.append(memory_of(reader))
        if call == "dequeue":
            found = reader.dequeue(5.0)
        else:
            with reader.loan(5.0) as lent:
                found = copy.deepcopy(lent)
        assert not SCRIBBLES
        assert found == message
