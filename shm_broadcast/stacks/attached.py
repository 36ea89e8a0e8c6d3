"""Attach the stacks of ranks to a time-out: as `error.stacks` and as a note, which a printed traceback shows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

from shm_broadcast.errors import CommError, CommTimeoutError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, this_process
from shm_broadcast.stacks.asking import ask
from shm_broadcast.stacks.offered import NBYTES, offered_signal

__all__ = ["QueueStacks", "ask_members", "ask_missing", "attach"]

# A queue's time-out of less than a second is part of a loop that polls.
_LEAST_S: Final = 1.0

# A note holds this many bytes of the stacks of each missing rank, for at most this many ranks.
_NOTE_BYTES: Final = 4096
_NOTE_RANKS: Final = 4

Failure = TypeVar("Failure", bound=CommError)


class _Judgement(Protocol):
    """What broke a group."""

    @property
    def kind(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def by(self) -> int: ...


def ask_members(judgement: _Judgement, own: int, members: Sequence[int], watch: PeerWatch) -> dict[int, str]:
    """Return the stacks of a group's ranks, or why there are none; nothing if it has not broken by a time-out.

    Only the rank that was the first to judge asks, and only if its process offers its own stacks. Blocks for at most
    about half a second.

    Args:
        judgement: What broke the group; those who are missing are asked first.
        own: This process's global rank.
        members: The global ranks of the group.
        watch: Knows the processes of the others.
    """
    if judgement.kind != "timeout" or judgement.by != own:
        return {}
    return _ask_ranks((*judgement.ranks, *members), own, watch)


def ask_missing(
    missing: Collection[int], own: int, members: Sequence[int], watch: PeerWatch
) -> dict[int, str]:
    """Return the stacks of the ranks of a group whose creation timed out; nothing if all missing are unknown.

    The rank that lists who is `missing` asks, and the others have read that list. Blocks as `ask_members`.

    Args:
        missing: The global ranks that have not come; they are asked first.
        own: This process's global rank.
        members: The global ranks that were to come.
        watch: Knows the processes of the others, if the world does.
    """
    if all(watch.process(rank) is None for rank in missing):
        return {}
    return _ask_ranks((*missing, *members), own, watch)


def _ask_ranks(ranks: Iterable[int], own: int | None, watch: PeerWatch, most: int = NBYTES) -> dict[int, str]:
    """Return the stacks of `ranks`, of which `own` is this process; `most` as `ask` says."""
    if not offered_signal():
        return {}
    processes: dict[int, ProcessIdentity] = {}
    texts: dict[int, str] = {}
    for rank in dict.fromkeys(ranks):
        process = this_process() if rank == own else watch.process(rank)
        texts[rank] = "no process is known"
        if process is not None:
            processes[rank] = process
    return texts | ask(processes, most=most)


def attach(error: Failure, texts: Mapping[int, str]) -> Failure:
    """Return `error`, a time-out, with what was asked. Nothing else of it changes."""
    if isinstance(error, CommTimeoutError) and texts:
        error.stacks = dict(texts)
        named = [rank for rank in error.missing if rank in texts] or list(texts)
        error.add_note("\n".join(_noted(rank, texts[rank]) for rank in named[:_NOTE_RANKS]))
    return error


def _noted(rank: int, text: str) -> str:
    if len(text) > _NOTE_BYTES:
        text = f"{text[:_NOTE_BYTES]}\n(cut; the error's `stacks` hold more)"
    return f"stacks of {f'rank {rank}' if rank >= 0 else 'the writer'}:\n{text}"


class QueueStacks:
    """Asks for stacks when a call on one end of a queue times out, at most once for each message.

    The queue stays usable, and an idle queue is no hang: a loop that reads it must not send a signal to its
    writer each time. For the same reason half of each process's memory is left for groups.
    """

    def __init__(self) -> None:
        """Start with no message asked for."""
        self._message = -1

    def attached(
        self, error: CommTimeoutError, within_s: float, message: int, ranks: Iterable[int], watch: PeerWatch
    ) -> CommTimeoutError:
        """Return `error`, with the stacks of the other end's processes unless they were asked for this message.

        Args:
            error: What the call raises.
            within_s: Its deadline in seconds.
            message: Number of the message that did not come, or found no room.
            ranks: The other end; -1 for a writer without a rank, as `watch` knows it.
            watch: The processes at the other end.
        """
        if within_s < _LEAST_S or message == self._message:
            return error
        self._message = message
        return attach(error, _ask_ranks(ranks, None, watch, NBYTES // 2))
