"""The order of a group's object gathers, or scatters: a message counts only in the call to which it belongs.

In these calls ranks wait for some others only, so they have no step in which they compare their calls. Each rank counts
its calls, and each message carries (number of its call, whether its rank refused the call, object or reason).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from device_comm.health import GroupHealth, Operation
from shm_broadcast.errors import ClosedError, CommError, DecodeError, DisagreementError, UsageError
from shm_broadcast.interruption import raised_by_handler

Result = TypeVar("Result")


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


class ObjectCall:
    """One call.

    Attributes:
        number: Its number; 0 until it begins, which is when it sends or receives, or is refused.
    """

    def __init__(self, order: ObjectOrder) -> None:
        """Count nothing yet."""
        self._order = order
        self.number: int = 0

    def begin(self) -> None:
        """Count the call, once."""
        # Nothing is called in here, so that a signal handler runs before all of this or behind it.
        if not self.number:
            order = self._order
            order.number += 1
            self.number = order.number

    def message(self, obj: object) -> tuple[int, bool, object]:
        """Return the message that brings `obj`; the call has passed its checks, and begins."""
        self.begin()
        return self.number, False, obj

    def refusal(self, reason: str) -> tuple[int, bool, str]:
        """Return the message that says why this rank refuses its call."""
        return self.number, True, reason


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

    def make(self, tell: Callable[[ObjectCall, str], None], act: Callable[[ObjectCall], Result]) -> Result:
        """Return `act(call)`, which makes a call; if it is refused, drop what comes for it and `tell` the others why.

        No function is called after `act` returns, so that no signal handler can lose the result. If a handler
        raises before the call has begun, the call is not counted. If it raises later, the group breaks:
        messages that have come for this call would be missing in it or meet the next one, and what was sent
        cannot be taken back.
        """
        call, operation = ObjectCall(self), Operation("host", self._name, 0)
        try:
            return act(call)
        except BaseException as error:
            self._health.left.append((operation, error))
            try:
                self._end(call, operation, error, tell)
            except BaseException as second:
                self._health.left.append((operation, second))
                self._health.left_halfway(operation, second)
                raise
            raise

    def _end(
        self,
        call: ObjectCall,
        operation: Operation,
        error: BaseException,
        tell: Callable[[ObjectCall, str], None],
    ) -> None:
        """Do what is to be done for a call that `error` ends."""
        is_own = isinstance(error, CommError) and not raised_by_handler(error)
        if call.number and not is_own:
            self._health.left_halfway(operation, error)
            return
        self._health.forget_left(operation, error)
        if (
            is_own
            and isinstance(error, UsageError)
            and not isinstance(error, ClosedError)
            and not self._health.is_inherited
        ):
            call.begin()
            self._failed = call.number
            tell(call, f"{self._name}: {error}")

    def receive(
        self, call: ObjectCall, sources: Sequence[int], fetch: Callable[[Sequence[int]], Sequence[Any]]
    ) -> list[Any]:
        """Return the object of each of `sources` in a call.

        Args:
            call: The call, which begins with this.
            sources: Ranks in the group.
            fetch: Returns the next message of each of some ranks.

        Raises:
            DisagreementError: One of them has refused the call, or made another one. The next call works.
            DecodeError: A message is malformed. All messages of this call were received; the next call works.
        """
        call.begin()
        number = call.number
        found: dict[int, Any] = {}
        wrong: dict[int, str] = {}
        awaited = list(sources)
        while awaited:
            for src, message in self._next_of(number, awaited, fetch).items():
                if message.number > number:
                    self._kept[src] = message
                    wrong[src] = f"sent its part of call #{message.number}, and none of this one"
                elif message.number == number and message.is_refused:
                    wrong[src] = f"refused {message.value}"
                elif message.number == number:
                    found[src] = message.value
                elif not message.is_refused and message.number > self._failed:
                    wrong[src] = (
                        f"sent its part of call #{message.number}, in which this rank did something else"
                    )
                # Another one was for a call that has failed here, or in which this rank awaited nothing.
            awaited = [src for src in awaited if src not in found and src not in wrong]
        if wrong:
            self._failed = number
            raise self._disagreement(number, wrong)
        return [found[src] for src in sources]

    def _next_of(
        self, number: int, sources: Sequence[int], fetch: Callable[[Sequence[int]], Sequence[Any]]
    ) -> dict[int, Numbered]:
        messages = {src: self._kept.pop(src) for src in sources if src in self._kept}
        rest = [src for src in sources if src not in messages]
        try:
            where, ranks = self._health.where(self._name), self._health.ranks
            came = [numbered(value, where, ranks[src]) for src, value in zip(rest, fetch(rest), strict=True)]
        except DecodeError:
            self._failed = number
            raise
        return messages | dict(zip(rest, came, strict=True))

    def _disagreement(self, number: int, wrong: dict[int, str]) -> DisagreementError:
        views = {self._health.ranks[src]: what for src, what in wrong.items()}
        listed = "; ".join(f"rank {rank} {what}" for rank, what in sorted(views.items()))
        where = self._health.where(f"{self._name} #{number}")
        return DisagreementError(
            f"{where}: {listed}; no object is handed out, and the next call works", views=views
        )


__all__ = ["Numbered", "ObjectCall", "ObjectOrder", "numbered"]
