"""Types of the native core. Addresses and lengths are the caller's to get right: they come from tensors it holds."""

from collections.abc import Callable
from typing import final

import torch
from typing_extensions import Buffer

TYPE_NAMES: dict[int, str]
DONE: int
PENDING: int
DISAGREE: int
CLOSED: int
BUSY: int
LEFT: int
ALL_REDUCE_ONE_SHOT: int
ALL_REDUCE_TWO_SHOT: int
REDUCE_SCATTER: int
ALL_GATHER: int
GATHER: int
SCATTER: int
REDUCE: int

def lay_out(mapping: Buffer, ranks: int, slot_bytes: int, generation: int, /) -> None:
    """Lay a fabric out in a zeroed mapping. ValueError: the mapping is too small."""

def segment_bytes(ranks: int, slot_bytes: int, /) -> int:
    """Return how large a mapping must be."""

def ordinary_tensors(
    tensor: type[torch.Tensor],
    exports: Callable[[torch.Tensor], object],
    imports: Callable[[object], torch.Tensor],
    types: dict[torch.dtype, int],
    /,
) -> None:
    """Say of what dtypes tensors are ordinary, and what makes a capsule of DLPack and what takes one.

    The first call counts.
    """

def level() -> str:
    """Return the vector instructions that the reductions use on this machine."""

@final
class Fabric:
    """One rank's end of the shared memory of a group, and the call that is under way.

    Each call returns a status: DONE; PENDING: not all ranks have come, go on with `resume`; DISAGREE: the ranks made
    different calls and nothing was moved; CLOSED; BUSY: a call is under way; LEFT: a rank that has not come has
    closed its end.
    """

    def __new__(cls, mapping: Buffer, rank: int, /) -> Fabric: ...
    @property
    def number(self) -> int:
        """How many calls were begun."""

    def barrier(self) -> int: ...
    def all_reduce(
        self, tensor: object, most_bytes: int, /
    ) -> torch.Tensor | tuple[torch.Tensor, int] | None:
        """Sum an ordinary tensor of at most `most_bytes`, one-shot.

        Returns the sum; or the tensor in which it will be, with a status that is not DONE; or None if the tensor is
        not ordinary or too long: then nothing was begun.
        """

    def all_reduce_in_place(self, tensor: object, most_bytes: int, /) -> int | None:
        """As `all_reduce`, with the sum in place of the tensor's elements; return the status."""

    def reduce(
        self, kind: int, source: int, result: int, elements: int, dtype: int, op: int, root: int, /
    ) -> int: ...
    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, /) -> int: ...
    def move(
        self,
        kind: int,
        source: int,
        result: int,
        rows: int,
        widths: tuple[int, ...],
        dtype: int,
        op: int,
        root: int,
        /,
    ) -> int: ...
    def exchange(
        self,
        source: int,
        result: int,
        rows: int,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        dtype: int,
        /,
    ) -> int: ...
    def resume(self, slice_ns: int, /) -> int:
        """Go on with the call that is under way, for at most `slice_ns`."""

    def missing(self) -> list[int]:
        """Return the ranks that have not come to the present step."""

    def views(self) -> list[tuple[int, int, int, int]]:
        """Return what each rank said about its call: number, code, count, detail."""

    def widths(self) -> list[tuple[tuple[int, ...], tuple[int, ...]] | None]:
        """Return what each rank sends and expects, bytes of a row for each rank, in an exchange that was just refused.

        None for a rank that made another call.
        """

    def close(self, breaks: bool, /) -> None:
        """Leave: end calls that wait, and let the mapping go. `breaks`: other ranks shall complete no call any more."""

CHANNEL_NONE: int
CHANNEL_MAKING: int
CHANNEL_READY: int

def channel_table_bytes(ranks: int, /) -> int:
    """Return the size of the table of channels of a group."""

def channel_claim(table: Buffer, ranks: int, src: int, dst: int, /) -> int:
    """Return what the channel was: behind CHANNEL_NONE it is the caller who makes it."""

def channel_made(table: Buffer, ranks: int, src: int, dst: int, /) -> None:
    """Say, behind a claim, that the channel can be used."""

def channel_failed(table: Buffer, ranks: int, src: int, dst: int, /) -> None:
    """Say, behind a claim, that the channel could not be made; the next one may try."""

def channel_state(table: Buffer, ranks: int, src: int, dst: int, /) -> int:
    """Return what the channel is."""

def channel_leave(table: Buffer, ranks: int, rank: int, /) -> None:
    """Say that `rank` uses no channel any more."""

def channel_left(table: Buffer, ranks: int, rank: int, /) -> bool:
    """Return whether `rank` uses no channel any more."""
