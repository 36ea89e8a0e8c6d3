"""What ranks tell each other while they set up their device memory: short records, strictly checked.

The bytes come from the other ranks over the host plane. Whatever is in them, decoding gives a record whose fields are
within their bounds, or a `DecodeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from device_comm.driver import IPC_HANDLE_BYTES
from shm_broadcast.errors import DecodeError
from shm_broadcast.liveness import ProcessIdentity

__all__ = [
    "BufferRecord",
    "BuffersMessage",
    "Exchange",
    "Kind",
    "OfferMessage",
    "RegionMessage",
    "Remark",
    "speak",
]

Exchange = Callable[[bytes], Sequence[bytes | memoryview]]
"""Collective: returns every rank's bytes in rank order. The lengths differ between ranks. It blocks no longer than its
own deadline, and raises on every rank if one is lost."""

Kind = Literal["local", "ipc", "vmm"]
"""How memory is reached: in the same process, through a CUDA IPC handle, through a descriptor."""

_MOST_BYTES: Final = 8 << 20
"""Records of 65,536 buffers, more than any model has all-reduces in its graphs, are 6 MB."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=2000)]
_Handle = Annotated[bytes, msgspec.Meta(max_length=IPC_HANDLE_BYTES)]


class OfferMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a rank can do, before it has allocated anything.

    Attributes:
        nbytes: How much memory it wants of every rank.
        kinds: How it can make and reach memory.
        refused: Why it cannot in the other ways.
        process: Its process.
    """

    nbytes: _Size
    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(max_length=3)]
    refused: Annotated[dict[Kind, _Text], msgspec.Meta(max_length=3)]
    process: ProcessIdentity


class RegionMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a rank's memory is to be found, or why there is none.

    Attributes:
        failure: Why there is none; empty if there is some.
        nbytes: Its size, rounded up.
        handle: The IPC handle.
        socket: The abstract address at which its descriptor is handed over.
        key: What one must know to get it.
        address: Where it is, for ranks in the same process.
        device: The ordinal of its device, for the same.
    """

    failure: _Text = ""
    nbytes: _Size = 0
    handle: _Handle = b""
    socket: Annotated[str, msgspec.Meta(max_length=100)] = ""
    key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    address: _Address = 0
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0


class BufferRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of an allocation that a rank has.

    Attributes:
        handle: Names the allocation: 64 bytes, or 8 with the address of its base for ranks in the same process.
        offset: Where the part begins.
        nbytes: How long it is.
        base_nbytes: How long the allocation is.
    """

    handle: _Handle
    offset: _Size
    nbytes: _Size
    base_nbytes: _Size

    def __post_init__(self) -> None:
        """Check that the part lies within the allocation."""
        if len(self.handle) not in (8, IPC_HANDLE_BYTES):
            raise ValueError(f"a handle of {len(self.handle)} bytes")
        if self.offset + self.nbytes > self.base_nbytes:
            raise ValueError("a buffer that ends behind its allocation")


class BuffersMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The buffers that a rank registers, or why one of them cannot be."""

    failure: _Text = ""
    buffers: Annotated[tuple[BufferRecord, ...], msgspec.Meta(max_length=1 << 16)] = ()


class Remark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a step ended on a rank: empty if well."""

    failure: _Text = ""


_Message = TypeVar("_Message", bound=msgspec.Struct)


def speak(exchange: Exchange, message: _Message, ranks: Sequence[int]) -> list[_Message]:
    """Tell the other ranks `message`, and return what each of them told, in rank order. Collective.

    Args:
        exchange: How.
        message: What.
        ranks: Global ranks, for the error's text.

    Raises:
        DecodeError: A rank's bytes are no such message; on every rank, as all see the same bytes.
        Others: As `exchange`.
    """
    answers = exchange(msgspec.msgpack.encode(message))
    if len(answers) != len(ranks):
        raise DecodeError(f"{len(answers)} ranks of {len(ranks)} answered")
    return [decode(answer, type(message), rank) for answer, rank in zip(answers, ranks, strict=True)]


def decode(data: bytes | memoryview, kind: type[_Message], rank: int) -> _Message:
    """Return the message in `data`.

    Raises:
        DecodeError: There is none.
    """
    if len(data) > _MOST_BYTES:
        raise DecodeError(f"rank {rank} told {len(data)} bytes, more than {_MOST_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"what rank {rank} told is no {kind.__name__}: {error}") from error


def said(failures: Sequence[str], ranks: Sequence[int]) -> str:
    """Return `rank 3: why; rank 5: why` for those that failed."""
    return "; ".join(f"rank {rank}: {why}" for rank, why in zip(ranks, failures, strict=True) if why)
