"""Messages between ranks during the setup of device memory: short records, strictly checked.

The bytes come from the other ranks over the host plane. Decoding any bytes gives a record whose fields are within their
bounds, or a `DecodeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from device_comm.cuda.driver import IPC_HANDLE_BYTES
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
    "exchange_failure",
    "speak",
]

Exchange = Callable[[bytes], Sequence[bytes | memoryview]]
"""Collective: returns every rank's bytes in rank order. The lengths differ between ranks. It blocks no longer than its
own deadline, and raises on every rank if one is lost."""

Kind = Literal["local", "ipc", "vmm"]
"""How memory is mapped: in the same process, through a CUDA IPC handle, or through a descriptor."""

MAX_TEXT_CHARS: Final = 1900
"""Most characters of a failure that is sent to the other ranks, below the 2,000 that a message may hold."""

_MOST_BYTES: Final = 8 << 20
"""Largest message. Records of 65,536 buffers, more than any model has all-reduces in its graphs, take 6 MB."""

_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Text = Annotated[str, msgspec.Meta(max_length=2000)]
_Handle = Annotated[bytes, msgspec.Meta(max_length=IPC_HANDLE_BYTES)]


class OfferMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The kinds of memory that a rank supports, sent before it has allocated anything.

    Attributes:
        nbytes: Bytes that it requests on every rank.
        kinds: Kinds that it supports.
        refused: Why it does not support the other kinds.
        process: Its process.
    """

    nbytes: _Size
    kinds: Annotated[tuple[Kind, ...], msgspec.Meta(max_length=3)]
    refused: Annotated[dict[Kind, _Text], msgspec.Meta(max_length=3)]
    process: ProcessIdentity


class RegionMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The location of a rank's region, or why it has none.

    Attributes:
        failure: Why there is no region; empty if there is one.
        nbytes: Its size in bytes, rounded up.
        handle: Its IPC handle.
        socket: The abstract socket address at which its descriptor can be fetched.
        key: The key that authenticates a peer there.
        address: Its address, for ranks in the same process.
        device: The ordinal of its device, for ranks in the same process.
    """

    failure: _Text = ""
    nbytes: _Size = 0
    handle: _Handle = b""
    socket: Annotated[str, msgspec.Meta(max_length=100)] = ""
    key: Annotated[bytes, msgspec.Meta(max_length=32)] = b""
    address: _Address = 0
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)] = 0


class BufferRecord(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A part of an allocation of a rank.

    Attributes:
        handle: The allocation's IPC handle of 64 bytes; for ranks in the same process its address in 8 bytes.
        offset: Offset of the part in the allocation.
        nbytes: Bytes of the part.
        base_nbytes: Bytes of the allocation.
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
    """The buffers that a rank registers, or why one of them cannot be registered."""

    failure: _Text = ""
    buffers: Annotated[tuple[BufferRecord, ...], msgspec.Meta(max_length=1 << 16)] = ()


class Remark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a step failed on a rank; empty if it succeeded."""

    failure: _Text = ""


_Message = TypeVar("_Message", bound=msgspec.Struct)


def speak(exchange: Exchange, message: _Message, ranks: Sequence[int]) -> list[_Message]:
    """Send `message` to the other ranks and return the messages of all, in rank order. Collective.

    Args:
        exchange: The exchange of the group.
        message: This rank's message.
        ranks: Global ranks, for the error's text.

    Raises:
        DecodeError: A rank's bytes are not such a message; raised on every rank, because all see the same bytes.
        Others: As `exchange`.
    """
    answers = exchange(msgspec.msgpack.encode(message))
    if len(answers) != len(ranks):
        raise DecodeError(f"{len(answers)} ranks of {len(ranks)} answered")
    return [decode(answer, type(message), rank) for answer, rank in zip(answers, ranks, strict=True)]


def decode(data: bytes | memoryview, kind: type[_Message], rank: int) -> _Message:
    """Return the message in `data`.

    Raises:
        DecodeError: `data` is not a message of this kind.
    """
    if len(data) > _MOST_BYTES:
        raise DecodeError(f"rank {rank} sent {len(data)} bytes, more than {_MOST_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"the message of rank {rank} is not a valid {kind.__name__}: {error}") from error


def said(failures: Sequence[str], ranks: Sequence[int]) -> str:
    """Return `rank 3: why; rank 5: why` for those that failed."""
    return "; ".join(f"rank {rank}: {why}" for rank, why in zip(ranks, failures, strict=True) if why)


def exchange_failure(exchange: Exchange, failure: str, ranks: Sequence[int]) -> str:
    """Exchange why a step failed on this rank ("" if it succeeded); return the ranks' failures. Collective.

    Returns:
        "" if the step succeeded on all ranks, else the text of `said`; equal on all ranks.

    Raises:
        DecodeError: As `speak`.
        Others: As `exchange`.
    """
    remarks = speak(exchange, Remark(failure[:MAX_TEXT_CHARS]), ranks)
    return said([remark.failure for remark in remarks], ranks)
