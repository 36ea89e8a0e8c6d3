"""The order of a group's object broadcasts: a message is handed out only in the call to which it belongs.

Broadcasts have no step in which the ranks compare what they call. So each message carries the number of its call: over
the host plane, and through a queue that reaches other hosts, as it is; through a queue of one host as a tag, which says
how many calls of its writer did not use the queue. If a rank passes another source than the others, or refuses a call,
the numbers differ.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, NoReturn

from coordinator.host.object_order import numbered
from device_comm.health import GroupHealth, Operation
from device_comm.stages import in_stages
from shm_broadcast import codec
from shm_broadcast._core import NOTHING
from shm_broadcast.errors import ClosedError, CommTimeoutError, DecodeError, DisagreementError, UsageError
from shm_broadcast.interruption import is_held, raised_by_handler
from shm_broadcast.turn import TakenError, Turn

# The bit of a queue's tag that marks a message as the writer's reason for refusing its call. The other bits
# are a count modulo 2^31.
_REFUSED: Final = 1 << 31
_COUNT: Final = _REFUSED - 1

# Broadcasts (number, whether it was refused, object or reason) over the host plane, or through the queue.
Send = Callable[[tuple[int, bool, Any]], Any]
Receive = Callable[[], Any]


class BroadcastOrder:
    """How many object broadcasts this rank has called, and which messages still belong to calls that failed.

    Attributes:
        name: The method that broadcasts on this thread, for the reason of a refusal.
        tag: The tag that the queue's next message must have, so that the hottest call compares two numbers.
    """

    def __init__(self, health: GroupHealth) -> None:
        """Begin with no queue and no broadcast."""
        self._health = health
        self._end: Any = None
        self._writer = -1
        self._is_local = True
        # The end of a queue of one host on its writer, which gives each message its tag.
        self._tagged: Any = None
        # How many of this rank's calls took no message of the queue, minus how many messages no call took.
        self._beside = 0
        # A message of a call up to this number belongs to a call that has failed on this rank, and is dropped.
        self._failed = 0
        # Messages that came before their call, or in a call that was interrupted, by sender.
        self._kept: dict[int, list[Any]] = {}
        # Those of a queue that reaches other hosts, in order. A thread holds the lock while a message comes or is sent.
        self._come: list[Any] = []
        self._turn = threading.RLock()
        # What each thread calls, and whether the call has passed its checks.
        self._calls = threading.local()
        self.tag: int = 0

    def adopt(self, end: Any, writer: int, *, is_writer: bool, is_local: bool) -> None:
        """Count the messages of a queue by its `end`, an endpoint that knows how many it has sent or handed out.

        With None only calls that use no queue are counted. `writer` is the writer's rank in the group. The messages of
        a queue that is not local are numbered as those over the host plane, by `send_in_queue` and `receive_in_queue`.
        """
        self._end, self._writer, self._is_local = end, writer, is_local
        self._tagged = end if is_writer and is_local else None
        self._failed = 0
        self._come.clear()
        self._settle(0)

    def _number(self) -> int:
        end = self._end
        if end is None:
            return self._beside
        if self._is_local:
            # A message counts from its arrival on.
            return self._beside + int(end.messages)
        # A message counts once it has been given to its call. Its end counts it before, and may keep it.
        return self._beside + int(end.messages) - int(end.has_message) - len(self._come)

    @property
    def name(self) -> str:
        """Return it; see the class."""
        return getattr(self._calls, "name", "broadcast_object")

    def expect(self, name: str) -> None:
        """Note that the call `name` comes next on this thread."""
        self._calls.name, self._calls.is_begun = name, False

    def refuses(self, error: UsageError) -> bool:
        """Return whether `error` has refused the call before it began, so that the other ranks must learn of it."""
        is_begun = getattr(self._calls, "is_begun", False)
        return not is_begun and not isinstance(error, ClosedError) and not self._health.is_inherited

    def skip(self) -> None:
        """Count a call that this rank refuses, and of which it can tell nobody. Its message is dropped."""
        self._settle(1)
        self._failed = self._number()

    def begin(self) -> None:
        """Note that the call has passed its checks."""
        self._calls.is_begun = True

    # ------------------------------------------------------------------ through the queue

    def sort(self) -> None:
        """Decide what to do with a message of the queue whose tag is not `tag`, and which nobody has taken.

        If the message belongs to a call that has already failed on this rank, this drops it and returns; the
        caller then waits for the next message.

        Raises:
            DisagreementError: It belongs to another call, or its writer refused the call. The next call works.
        """
        found, number = self._end.tag, self._number()
        late = self.tag - (found & _COUNT)
        late = (late + _REFUSED // 2) % _REFUSED - _REFUSED // 2
        its = number - late
        if late < 0:
            # The message stays for the call to which it belongs.
            failure = self._failure(number, its, self._writer)
            self._settle(1, failed=number)
            raise failure
        if late > 0 and its <= self._failed:
            self._settle(-1, takes=True)
            return
        reason = None
        if late == 0:
            reason = self._end.message
            if reason is NOTHING:
                # Another thread has taken it.
                return
            # Put it back at once, so that it stays there if a signal handler raises before the last step.
            self._end.message = reason
        failure = self._failure(number, its, self._writer, reason)
        self._settle(0, failed=number, takes=True)
        raise failure

    def refuse(self, reason: str, timeout_s: float) -> None:
        """On the writer of a queue of one host, send the others the reason why it refuses its call."""
        end = self._end
        if end is None:
            # Another thread has destroyed the group.
            return
        end.tag = self.tag | _REFUSED
        try:
            end.send(reason, int(timeout_s * 1e9))
        finally:
            end.tag = self.tag

    # ------------------------------------------------------------------ over the host plane

    def send(self, obj: object, send: Send, within_s: float) -> None:
        """Broadcast `obj` with its number; if it cannot be sent, broadcast the reason and raise it.

        Raises:
            UsageError: A signal handler makes the call inside of another one. It has no number.
            CommTimeoutError: Another thread is inside of a call for `within_s` seconds.
        """
        self._counted(lambda number: self._send(obj, number, send), within_s)

    def _send(self, obj: object, number: int, send: Send) -> None:
        try:
            send((number, False, obj))
        except UsageError as refused:
            if raised_by_handler(refused):
                raise
            # Encode `obj` alone, so that the error names a place in `obj`, not in the message around it.
            error = refusal_of(obj) or refusal_of((number, False, obj))
            if error is None:
                raise
            send((number, True, f"{self.name}: {error}"))
            raise error from None

    def send_refusal(self, reason: str, send: Send, within_s: float) -> None:
        """Broadcast the reason why this rank refuses its call as the source."""
        self._counted(lambda number: send((number, True, reason)), within_s)

    def _counted(self, act: Callable[[int], object], within_s: float) -> None:
        """Count a call that `act` sends to the others under its number, behind the calls of other threads.

        What a signal handler raises meanwhile breaks the group: some may have the message, and others wait for it.
        """

        def stages() -> None:
            if is_held(self._turn):
                self._refuse_nested()
            try:
                with Turn(self._turn, within_s):
                    self._settle(1)
                    act(self._number())
            except TakenError:
                self._raise_taken(within_s)

        in_stages(self._health, Operation("host", self.name, 0), stages)

    def receive(self, src: int, receive: Receive, type_: Any, left: Callable[[], float | None]) -> Any:
        """Return the object that rank `src` broadcasts in this call, as `type_` unless that is None.

        `left` returns the time left.

        Raises:
            DisagreementError: The next message of rank `src` belongs to another call, or `src` refused the
                call. The next call works.
            DecodeError: What came is no message, or no `type_`. The next call works.
            UsageError: A signal handler makes the call inside of another one. It has no number.
            CommTimeoutError: Another thread is inside of a call until the time is over.
        """
        return self._receive(self._kept.setdefault(src, []), src, receive, type_, left)

    # ------------------------------------------------------------------ through a queue that reaches other hosts

    def send_in_queue(self, obj: object, send: Send, within_s: float) -> None:
        """Send `obj` with its number; if it cannot be sent, send the reason and raise it. The queue counts the call."""
        self._in_turn(lambda number: self._send(obj, number, send), within_s)

    def refuse_in_queue(self, reason: str, send: Send, within_s: float) -> None:
        """Send the reason why this rank refuses its call as the source."""
        self._in_turn(lambda number: send((number, True, reason)), within_s)

    def _in_turn(self, act: Callable[[int], object], within_s: float) -> None:
        if is_held(self._turn):
            # The call inside of which a handler makes this one goes on, also if its message is half written.
            self._end.note_refusal()
            self._refuse_nested()
        try:
            with Turn(self._turn, within_s):
                act(self._number() + 1)
        except TakenError:
            self._raise_taken(within_s)

    def receive_in_queue(self, receive: Receive, type_: Any, left: Callable[[], float | None]) -> Any:
        """Return the object that the queue's writer broadcasts in this call; as `receive`."""
        return self._receive(self._come, self._writer, receive, type_, left)

    # ------------------------------------------------------------------ helpers

    def _receive(
        self, come: list[Any], src: int, receive: Receive, type_: Any, left: Callable[[], float | None]
    ) -> Any:
        """Return the object of this call, whose message is the next one in `come`, or what `receive` returns.

        A message is kept in `come` from its arrival on. One step takes it out and counts its call. The step calls no
        function, so a signal handler finds both undone or done, and it finds out whether another thread, or a signal
        handler's own call, has taken the message meanwhile.
        """
        where, rank = self._health.where(self.name), self._health.ranks[src]
        while True:
            message, number = self._next(come, receive, left)
            try:
                its, is_refused, value = numbered(message, where, rank)
                if its == number and not is_refused:
                    if type_ is not None:
                        value = codec.convert(value, type_)
                    if self._take(come, message):
                        return value
                    continue
            except DecodeError as error:
                # This call has failed here, but its message may still come: from `src` or, if ranks named different
                # sources, from another rank. It will be dropped then.
                if raised_by_handler(error) or self._take(come, message, failed=number):
                    raise
                continue
            if its < number and its <= self._failed:
                self._take(come, message, calls=-1)
                continue
            failure = self._failure(number, its, src, value if its == number else None)
            if its > number:
                # A message of a later call stays for that.
                self._settle(1, failed=number)
            elif not self._take(come, message, failed=number):
                continue
            raise failure

    def _next(self, come: list[Any], receive: Receive, left: Callable[[], float | None]) -> tuple[Any, int]:
        """Return the next message, which stays in `come`, and the number of the call that takes it."""
        if is_held(self._turn):
            self._refuse_nested()
        within_s = left()
        try:
            with Turn(self._turn, within_s):
                while True:
                    if not come:
                        come.append(self._received(come, receive))
                    number = self._number() + 1
                    # Another thread takes messages out without this turn.
                    if come:
                        return come[0], number
        except TakenError:
            self._raise_taken(within_s or 0.0)

    def _received(self, come: list[Any], receive: Receive) -> Any:
        """Return what comes; a message that cannot be decoded has failed this call."""
        try:
            return receive()
        except DecodeError as error:
            if not raised_by_handler(error):
                # The queue's end has counted it.
                calls = int(come is not self._come)
                self._settle(calls, failed=self._number() + calls)
            raise

    def _take(self, come: list[Any], message: object, *, calls: int = 0, failed: int = 0) -> bool:
        """Take the next message out of `come`, which counts its call, if it is `message`. Calls no function.

        `calls` corrects the count: -1 for a message that no call takes.
        """
        if not come or come[0] is not message:
            return False
        del come[0]
        self._failed = failed if failed > self._failed else self._failed  # noqa: FURB136 - `max` would be a call
        # Only the messages of the queue are counted by its end.
        self._beside += calls if come is self._come else calls + 1
        self.tag = self._beside & _COUNT
        if self._tagged is not None:
            self._tagged.tag = self.tag
        return True

    def _refuse_nested(self) -> NoReturn:
        raise UsageError(
            f"{self._health.where(self.name)}: this thread is inside of a broadcast of the group already, as in a "
            "signal handler or a finalizer"
        )

    def _raise_taken(self, within_s: float) -> NoReturn:
        raise CommTimeoutError(
            f"{self._health.where(self.name)}: another thread is inside of a broadcast of the group, no turn within "
            f"{within_s:.1f} s",
            missing=(),
        ) from None

    def _settle(self, calls: int, *, failed: int = 0, takes: bool = False) -> None:
        """Count `calls`; with `takes` drop the queue's message.

        This calls no function, so that a signal handler can run only before or after all of it.
        """
        if takes:
            _ = self._end.message
        self._failed = failed if failed > self._failed else self._failed  # noqa: FURB136 - `max` would be a call
        self._beside += calls
        self.tag = self._beside & _COUNT
        if self._tagged is not None:
            self._tagged.tag = self.tag

    def _failure(self, number: int, its: int, src: int, reason: object = None) -> DisagreementError:
        rank = self._health.ranks[src]
        what = f"sent the object of its broadcast #{its}: it passed another source, or made other calls"
        if reason is not None:
            what = f"refused {reason}"
        where = self._health.where(f"broadcast_object #{number}")
        return DisagreementError(
            f"{where}: rank {rank} {what}; no object is handed out, and the next call works",
            views={rank: what},
        )


def refusal_of(obj: object) -> UsageError | None:
    """Return why `obj` cannot be sent; None if it can be."""
    try:
        codec.encode(obj)
    except UsageError as error:
        return error
    return None


__all__ = ["BroadcastOrder", "refusal_of"]
