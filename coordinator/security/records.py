"""The records between a rank and the process that serves the store of a job.

Each is one ZeroMQ message over a connection with CURVE. It begins with 32 bytes; integers are little-endian:

| offset | bytes | field |
|---|---|---|
| 0 | 1 | kind |
| 1 | 1 | version, 1 |
| 2 | 2 | zero |
| 4 | 4 | the sender's rank; 0 from the store |
| 8 | 8 | number of the question, which its answer repeats |
| 16 | 16 | the store's generation; zeros in HELLO |

A question or an answer in msgpack follows, or a text in UTF-8: the reason of a refusal, or how a rank was
lost. LOST has the number of the lost rank in place of that of a question. HELLO has a random number there,
which a process repeats if it says HELLO again because its connection ended before it was welcomed. BYE says
that a rank leaves, END that rank 0 does; BEAT only shows whether a connection is there.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import msgspec

from shm_broadcast.errors import DecodeError

__all__ = [
    "GENERATION_BYTES",
    "LONGEST_ANSWER",
    "LONGEST_QUESTION",
    "NO_GENERATION",
    "Add",
    "Answer",
    "Append",
    "Await",
    "Count",
    "Has",
    "Kind",
    "Put",
    "Question",
    "Read",
    "Record",
    "Remove",
    "Swap",
    "answer_of",
    "pack",
    "packed",
    "question_of",
    "unpack",
]

VERSION: Final = 1
GENERATION_BYTES: Final = 16
NO_GENERATION: Final = bytes(GENERATION_BYTES)
_HEADER: Final = struct.Struct("<BB2xIQ16s")

LONGEST_QUESTION: Final = 1 << 20
"""Most bytes of a record that the store takes; a longer one breaks its connection before it is received."""

LONGEST_ANSWER: Final = 64 << 20
"""Most bytes of a record that a rank takes: whoever ends an agreement reads the views of all ranks at once."""


class Kind:
    """Kinds of records."""

    HELLO: Final = 1
    WELCOME: Final = 2
    REFUSED: Final = 3
    QUESTION: Final = 4
    ANSWER: Final = 5
    FAILED: Final = 6
    BEAT: Final = 7
    LOST: Final = 8
    BYE: Final = 9
    END: Final = 10


class Record(NamedTuple):
    """The fields of a record; `body` views its memory."""

    kind: int
    rank: int
    number: int
    generation: bytes
    body: memoryview


def pack(kind: int, rank: int, number: int, generation: bytes, body: bytes = b"") -> bytes:
    """Return the bytes of a record."""
    return _HEADER.pack(kind, VERSION, rank, number, generation) + body


def unpack(data: memoryview) -> Record:
    """Parse the first 32 bytes of a record, and nothing behind them.

    Raises:
        DecodeError: It is not a record of this version.
    """
    if data.nbytes < _HEADER.size:
        raise DecodeError(f"{data.nbytes} bytes are not a record of a store")
    kind, version, rank, number, generation = _HEADER.unpack_from(data)
    if version != VERSION:
        raise DecodeError(f"a record of a store has version {version}, this is version {VERSION}")
    return Record(kind, rank, number, generation, data[_HEADER.size :])


class Put(msgspec.Struct, frozen=True, array_like=True, tag="put"):
    """Set keys; each gets the value at its place."""

    keys: list[str]
    values: list[bytes]


class Read(msgspec.Struct, frozen=True, array_like=True, tag="read"):
    """Return the values of keys once all are there; no answer if they are not within so many milliseconds."""

    keys: list[str]
    within_ms: int


class Await(msgspec.Struct, frozen=True, array_like=True, tag="await"):
    """As `Read`, with None for an answer."""

    keys: list[str]
    within_ms: int


class Has(msgspec.Struct, frozen=True, array_like=True, tag="has"):
    """Return whether all keys are there."""

    keys: list[str]


class Add(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Add to a key's number, which is 0 if it is not there; return the sum."""

    key: str
    amount: int


class Swap(msgspec.Struct, frozen=True, array_like=True, tag="swap"):
    """Set a key if it has the expected value, or is not there and the expected one is empty; return what it has then.

    If it is not there and another value is expected, return the expected one, as torch's stores do.
    """

    key: str
    expected: bytes
    desired: bytes


class Append(msgspec.Struct, frozen=True, array_like=True, tag="append"):
    """Append to a key's value, which is empty if it is not there."""

    key: str
    value: bytes


class Remove(msgspec.Struct, frozen=True, array_like=True, tag="remove"):
    """Delete a key; return whether it was there."""

    key: str


class Count(msgspec.Struct, frozen=True, array_like=True, tag="count"):
    """Return the number of keys."""


Question = Put | Read | Await | Has | Add | Swap | Append | Remove | Count
Answer = None | bool | int | bytes | list[bytes]

_encoder: Final = msgspec.msgpack.Encoder()
_question_decoder: Final = msgspec.msgpack.Decoder(Question)
_answer_decoder: Final = msgspec.msgpack.Decoder(Answer)


def packed(content: Question | Answer) -> bytes:
    """Return a question or an answer in msgpack."""
    return _encoder.encode(content)


def question_of(body: memoryview) -> Question:
    """Return the question in a record.

    Raises:
        DecodeError: There is none, or its parts do not fit together.
    """
    try:
        question: Question = _question_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"a record holds no question to a store: {error}") from error
    if isinstance(question, Put) and len(question.keys) != len(question.values):
        raise DecodeError(f"a question sets {len(question.keys)} keys to {len(question.values)} values")
    return question


def answer_of(body: memoryview) -> Answer:
    """Return the answer in a record.

    Raises:
        DecodeError: There is none.
    """
    try:
        answer: Answer = _answer_decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"a record holds no answer of a store: {error}") from error
    return answer
