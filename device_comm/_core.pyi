"""Types of the native core. The caller guarantees that addresses and lengths are those of tensors it keeps alive."""

from collections.abc import Callable
from typing import TypeVar, final

import torch
from typing_extensions import Buffer

_Made = TypeVar("_Made")

TYPE_NAMES: dict[int, str]
DONE: int
PENDING: int
DISAGREE: int
CLOSED: int
BUSY: int
NESTED: int
ABANDONED: int
LEFT: int
ALL_REDUCE_ONE_SHOT: int
ALL_REDUCE_TWO_SHOT: int
REDUCE_SCATTER: int
ALL_GATHER: int
GATHER: int
SCATTER: int
ALL_TO_ALL: int
REDUCE: int
REFUSED: int

def lay_out(mapping: Buffer, ranks: int, slot_bytes: int, generation: int, /) -> None:
    """Initialise a shared region in a zeroed mapping.

    Raises:
        ValueError: The mapping is too small, or an argument is out of range.
    """

def segment_bytes(ranks: int, slot_bytes: int, /) -> int:
    """Return the bytes that a mapping needs."""

def ordinary_tensors(
    tensor: type[torch.Tensor],
    exports: Callable[[torch.Tensor], object],
    imports: Callable[[object], torch.Tensor],
    types: dict[torch.dtype, int],
    /,
) -> None:
    """Register the type and dtypes of ordinary tensors, and the functions to export and import DLPack capsules.

    Later calls have no effect.
    """

def level() -> str:
    """Return the vector instructions that the reductions use on this machine."""

@final
class SharedRegion:
    """One rank's end of a group's shared region, and the call in progress.

    Each call returns a status. DONE: complete. PENDING: some ranks have not arrived, continue with `resume`. DISAGREE:
    the ranks made different calls and nothing was moved. CLOSED: this end is closed, or a rank broke the group. BUSY:
    another thread has a call in progress. NESTED: this thread has one. ABANDONED: this thread has one that it has
    left, see `leave`. LEFT: a rank that has not arrived has closed its end.
    """

    def __new__(cls, mapping: Buffer, rank: int, /) -> SharedRegion: ...
    @property
    def number(self) -> int:
        """Number of calls begun so far."""

    def barrier(self, digest: int = 0, /) -> int:
        """Wait for the other ranks.

        `digest`, here and in `reduce`, `broadcast` and `move`, is a hash of the call of which this one is a part. It
        must be equal on all ranks.
        """

    def all_reduce(
        self, tensor: object, most_bytes: int, one_shot_bytes: int, /
    ) -> torch.Tensor | tuple[torch.Tensor, int] | None:
        """Sum an ordinary tensor of at most `most_bytes`: up to `one_shot_bytes` in one shot, above in two.

        Returns:
            The sum, a new tensor; or (tensor that will hold it, status) if the status is not DONE; or None if the
            tensor is not ordinary or too long, and then no call was begun.
        """

    def all_reduce_into(
        self, tensor: object, output: object, most_bytes: int, one_shot_bytes: int, /
    ) -> int | None:
        """Sum like `all_reduce`, but into `output`, which may be the tensor itself; return the status or None.

        It is also None if the output is not ordinary, has another dtype or shape, or shares a part of the memory.
        """

    def all_gather(
        self, tensor: object, dim: object, most_bytes: int, /
    ) -> torch.Tensor | tuple[torch.Tensor | None, int] | None:
        """Concatenate the ranks' ordinary tensors along `dim`, if the result has at most `most_bytes`.

        Returns:
            The result, a new tensor; or (tensor that will hold it, status) if the status is not DONE; (None, status) if
            no call can begin now; or None if the tensor is not ordinary, `dim` is none of its dimensions, or the result
            is too long, and then no call was begun.
        """

    def reduce(
        self,
        kind: int,
        source: int,
        result: int,
        elements: int,
        dtype: int,
        op: int,
        root: int,
        digest: int = 0,
        /,
    ) -> int: ...
    def broadcast(self, address: int, nbytes: int, dtype: int, root: int, digest: int = 0, /) -> int: ...
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
        digest: int = 0,
        /,
    ) -> int:
        """Move or reduce tensors that are concatenated or split along a dimension.

        `widths` holds each rank's bytes of a row. For an all-to-all it holds those of the tensor that is sent,
        followed by those of the tensor that is received.
        """

    def resume(self, slice_ns: int, /) -> int:
        """Continue the call in progress for at most `slice_ns` nanoseconds; return its status."""

    def leave(self) -> int:
        """Return the number of the call that this thread has begun, has not ended and is not in, or 0.

        Call this first of all when an exception leaves a caller. The call is then marked as left, and others of this
        thread are ABANDONED, until it is continued or `keep` is called.
        """

    def keep(self) -> None:
        """Take the mark of `leave` back: the exception was that of another call inside of the open one."""

    def refuse(self, reason: bytes, /) -> None:
        """Refuse the next call, which still takes a number; the other ranks' call is DISAGREE.

        Does not wait for the other ranks. While another thread is in a call, the refused call is the one
        after that. Does nothing during a call of the same thread and after `close`.
        """

    def catch_up(self) -> None:
        """Post refusals whose turn has come. The next call does so too, and others may wait for them before that."""

    def disagreement(
        self,
    ) -> list[tuple[tuple[int, int, int, int], tuple[tuple[int, ...], tuple[int, ...]] | None, bytes]]:
        """Return, once, what each rank has posted for this thread's latest call that was DISAGREE.

        For each rank: number, code, count and detail of its call; of an exchange the bytes per row that it sends to and
        expects from each rank; why it refused the call, b"" if it made one. Empty if there is nothing left to return.
        """

    def last_calls(self) -> list[tuple[int, int] | None]:
        """Return for each rank (number, kind) of the last call in which it has posted a step; None if there is none."""

    def missing(self) -> list[int]:
        """Return the ranks in the group that have not arrived at the current step."""

    def report_to(self, lane: object, /) -> None:
        """Show the calls in a lane of the status page, given as its capsule; with None nowhere."""

    def close(self, breaks: bool, /) -> None:
        """End waiting calls and release the mapping. With `breaks`, the other ranks' calls fail from now on too."""

REASON_BYTES: int
BOARD_RECORD_BYTES: int
BELL_BYTES: int
CHANNEL_NONE: int
CHANNEL_MAKING: int
CHANNEL_READY: int

def board_bytes(ranks: int, /) -> int:
    """Return the size of the status board of a group."""

def board_publish(board: Buffer, ranks: int, rank: int, record: bytes, /) -> bytes:
    """Make `record` the one that counts, unless there is one; return the one that counts."""

def board_record(board: Buffer, ranks: int, /) -> bytes:
    """Return the record that counts, or nothing."""

def board_arrive(board: Buffer, ranks: int, rank: int, plane: int, number: int, name: str, /) -> None:
    """Report in which call of a plane `rank` waits."""

def board_arrivals(board: Buffer, ranks: int, plane: int, /) -> list[tuple[int, bytes]]:
    """Return for each rank the number and name of the call in which it waits or waited last; 0 if it has not waited."""

def board_leave(board: Buffer, ranks: int, rank: int, /) -> None:
    """Report that `rank` has destroyed the group."""

def board_left(board: Buffer, ranks: int, /) -> list[int]:
    """Return the ranks that have destroyed the group, ascending."""

def channel_table_bytes(ranks: int, /) -> int:
    """Return the size of the table of channels of a group."""

def channel_open(
    table: Buffer, ranks: int, src: int, dst: int, make: Callable[[], _Made], /
) -> tuple[int, _Made | None]:
    """Return the channel's state and None; or, if that is CHANNEL_NONE, create it by `make` and also return its result.

    If `make` raises, the channel is missing again, and another rank may create it.
    """

def channel_state(table: Buffer, ranks: int, src: int, dst: int, /) -> int:
    """Return the channel's state: CHANNEL_NONE, CHANNEL_MAKING or CHANNEL_READY."""

def channel_leave(table: Buffer, ranks: int, rank: int, /) -> None:
    """Mark `rank` as having left: it uses no channel any more."""

def channel_left(table: Buffer, ranks: int, rank: int, /) -> bool:
    """Return whether `rank` has left."""
