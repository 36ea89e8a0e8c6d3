"""The order of a group's object gathers, or scatters: a message counts only in the call to which it belongs.

In these calls ranks wait for some others only, so they have no step in which they compare their calls. Each rank counts
its calls, and each message carries (number of its call, whether its rank refused the call, object or reason).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from device_comm.health import GroupHealth, Operation
from shm_broadcast.errors import ClosedError, DecodeError, DisagreementError, UsageError


class Numbered(NamedTuple):
    """A message: the number of its call, whether its rank refused that, and the object or the reason."""

    number: int
    is_refused: bool
    value: Any


def numbered(value: object, where: str, rank: int) -> Numbered:
    """Return what global rank `rank` sent as a message with a number; `where` begins the text of the error.

    Raises:
        DecodeError: It is none.
    """
    match value:
        case (int(number), bool(is_refused), obj):
            return Numbered(number, is_refused, obj)
    raise DecodeError(f"{where}: rank {rank} sent no message of this call")


class ObjectOrder:
    """How many calls of one kind this rank has made, and which messages belong to others than the present one."""

    def __init__(self, name: str, health: GroupHealth) -> None:
        """Begin with no call.

        Args:
            name: The name of the calls, for errors.
            health: The group's shared state.
        """
        self._name = name
        self._health = health
        self.number: int = 0
        # A message of a call up to this number belongs to a call that has failed on this rank, and is dropped.
        self._failed = 0
        # Messages that came before their call, by sender.
        self._kept: dict[int, Numbered] = {}
        self._has_acted = False
        self._receives = False

    @contextmanager
    def counted(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Count the call in this block; if it is refused, drop what comes for it, and `tell` the others the reason."""
        self._has_acted = self._receives = False
        self.number += 1
        try:
            yield
        except (DisagreementError, DecodeError):
            raise
        except UsageError as error:
            if isinstance(error, ClosedError) or self._health.is_inherited:
                raise
            self._failed = self.number
            tell(f"{self._name}: {error}")
            raise
        except BaseException as error:
            if self._receives:
                # What has come for this call would be missing in it, or meet the next one.
                self._health.left_halfway(Operation("host", f"{self._name} #{self.number}", 0), error)
            # An interrupted call that has done nothing can be made again.
            self.number -= not self._has_acted
            raise

    def of_this_call(self, obj: object) -> tuple[int, bool, object]:
        """Return the message that brings `obj`; the call has passed its checks."""
        self._has_acted = True
        return self.number, False, obj

    def refusal(self, reason: str) -> tuple[int, bool, str]:
        """Return the message that says why this rank refuses its call."""
        return self.number, True, reason

    def receive(self, sources: Sequence[int], fetch: Callable[[Sequence[int]], Sequence[Any]]) -> list[Any]:
        """Return the object of each of `sources` in this call.

        Args:
            sources: Ranks in the group.
            fetch: Returns the next message of each of some ranks.

        Raises:
            DisagreementError: One of them has refused the call, or made another one. The next call works.
            DecodeError: A message is none. All of this call have been received; the next call works.
        """
        self._has_acted = self._receives = True
        found: dict[int, Any] = {}
        wrong: dict[int, str] = {}
        awaited = list(sources)
        while awaited:
            for src, message in self._next_of(awaited, fetch).items():
                if message.number > self.number:
                    self._kept[src] = message
                    wrong[src] = f"sent its part of call #{message.number}, and none of this one"
                elif message.number == self.number and message.is_refused:
                    wrong[src] = f"refused {message.value}"
                elif message.number == self.number:
                    found[src] = message.value
                elif not message.is_refused and message.number > self._failed:
                    wrong[src] = (
                        f"sent its part of call #{message.number}, in which this rank did something else"
                    )
                # Another one was for a call that has failed here, or in which this rank awaited nothing.
            awaited = [src for src in awaited if src not in found and src not in wrong]
        if wrong:
            self._failed = self.number
            raise self._disagreement(wrong)
        return [found[src] for src in sources]

    def _next_of(
        self, sources: Sequence[int], fetch: Callable[[Sequence[int]], Sequence[Any]]
    ) -> dict[int, Numbered]:
        messages = {src: self._kept.pop(src) for src in sources if src in self._kept}
        rest = [src for src in sources if src not in messages]
        try:
            where, ranks = self._health.where(self._name), self._health.ranks
            came = [numbered(value, where, ranks[src]) for src, value in zip(rest, fetch(rest), strict=True)]
        except DecodeError:
            self._failed = self.number
            raise
        return messages | dict(zip(rest, came, strict=True))

    def _disagreement(self, wrong: dict[int, str]) -> DisagreementError:
        views = {self._health.ranks[src]: what for src, what in wrong.items()}
        listed = "; ".join(f"rank {rank} {what}" for rank, what in sorted(views.items()))
        where = self._health.where(f"{self._name} #{self.number}")
        return DisagreementError(
            f"{where}: {listed}; no object is handed out, and the next call works", views=views
        )


__all__ = ["Numbered", "ObjectOrder", "numbered"]
