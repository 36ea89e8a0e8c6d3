"""Messages between ranks during the setup of device memory: short records, strictly checked.

The bytes come from the other ranks over the host plane. Decoding any bytes gives a record whose fields are within their
bounds, or a `DecodeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from device_comm.cuda.driver import IPC_HANDLE_BYTES
from shm_broadcast.errors import DecodeError, DisagreementError
from shm_broadcast.liveness import ProcessIdentity
from shm_broadcast.reports.log_fields import LogFields, log_fields

__all__ = ["BufferRecord", "Exchange", "Kind", "OfferMessage", "PeerExchange", "RegionMessage", "Remark"]

Exchange = Callable[[bytes], Sequence[bytes | memoryview]]
"""Collective: returns every rank's bytes in rank order. The lengths differ between ranks. It blocks no longer than its
own deadline, and raises on every rank if one is lost."""

Kind = Literal["local", "ipc", "vmm"]
"""How memory is mapped: in the same process, through a CUDA IPC handle, or through a descriptor."""

MAX_TEXT_CHARS: Final = 1900
"""Most characters of a failure that is sent to the other ranks, below the 2,000 that a message may hold."""

_MOST_BYTES: Final = 8 << 20
"""Largest message. The records of 4,096 captured inputs take less than 1 MB."""

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


class Remark(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Why a step failed on a rank; empty if it succeeded."""

    failure: _Text = ""


_Message = TypeVar("_Message", bound=msgspec.Struct)


class PeerExchange:
    """The exchange over the host plane by which the ranks of a group agree.

    `gather`, `failures` and `meet` are collective, and block as long as the exchange does.

    Attributes:
        rank: This rank in the group.
        ranks: Global ranks, in group order.
        fields: The fields of a log record on the group.
    """

    def __init__(
        self,
        exchange: Exchange,
        rank_in_group: int,
        ranks: Sequence[int],
        fields: LogFields | None = None,
    ) -> None:
        """Exchange nothing yet."""
        self.rank: int = rank_in_group
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.fields: LogFields = log_fields(rank=self.ranks[rank_in_group]) if fields is None else fields
        self._exchange = exchange

    def gather(self, message: _Message) -> list[_Message]:
        """Send `message` to the other ranks and return the messages of all, in rank order.

        Raises:
            DecodeError: A rank's bytes are not such a message; raised on every rank, because all see the same bytes.
            Others: As `Exchange`.
        """
        answers = self._exchange(msgspec.msgpack.encode(message))
        if len(answers) != len(self.ranks):
            raise DecodeError(f"{len(answers)} ranks of {len(self.ranks)} answered")
        return [decode(answer, type(message), rank) for answer, rank in zip(answers, self.ranks, strict=True)]

    def failures(self, failure: str) -> str:
        """Exchange why a step failed on this rank, or ""; return `named` of all ranks. Raises as `gather`."""
        return self.named([remark.failure for remark in self.gather(Remark(failure[:MAX_TEXT_CHARS]))])

    def meet(self) -> None:
        """Wait until all ranks have called this. Raises as `gather`."""
        self.gather(Remark())

    def named(self, failures: Sequence[str]) -> str:
        """Return `rank 3: why; rank 5: why` for the ranks that failed; "" if none did."""
        return "; ".join(f"rank {rank}: {why}" for rank, why in zip(self.ranks, failures, strict=True) if why)

    def disagreement(self, what: str, views: Sequence[str]) -> DisagreementError:
        """Return the error for ranks that differ, with the view of each."""
        return DisagreementError(
            f"{what}: {self.named(views)}", views=dict(zip(self.ranks, views, strict=True))
        )


def decode(data: bytes | memoryview, kind: type[_Message], rank: int) -> _Message:
    """Return the message in `data`.

    Raises:
        DecodeError: `data` is not a message of this kind.
    """
    if not isinstance(data, (bytes, memoryview)):
        raise DecodeError(f"rank {rank} sent an object of type {type(data).__name__}, no bytes")
    if len(data) > _MOST_BYTES:
        raise DecodeError(f"rank {rank} sent {len(data)} bytes, more than {_MOST_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise DecodeError(f"the message of rank {rank} is not a valid {kind.__name__}: {error}") from error
