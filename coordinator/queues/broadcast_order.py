"""The order of a group's object broadcasts: a message is handed out only in the call to which it belongs.

Broadcasts have no step in which the ranks compare what they call. So each message carries the number of its call: over
the host plane, and through a queue that reaches other hosts, as it is; through a queue of one host as a tag, which says
how many calls of its writer did not use the queue. If a rank passes another source than the others, or refuses a call,
the numbers differ.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from coordinator.host.object_order import numbered
from device_comm.health import GroupHealth, Operation
from device_comm.stages import in_stages, until
from shm_broadcast import codec
from shm_broadcast._core import NOTHING
from shm_broadcast.errors import ClosedError, CommTimeoutError, DecodeError, DisagreementError, UsageError
from shm_broadcast.interruption import raised_by_handler

# The bit of a queue's tag that marks a message as the writer's reason for refusing its call. The other bits
# are a count modulo 2^31.
_REFUSED: Final = 1 << 31
_COUNT: Final = _REFUSED - 1
# How often a call looks whether its turn has come: it waits longer and longer, since another one may wait for ever.
_TURN_S: Final = 0.0002
_LONGEST_TURN_S: Final = 0.005

# Broadcasts (number, whether it was refused, object or reason) over the host plane, or through the queue.
Send = Callable[[tuple[int, bool, Any]], Any]
Receive = Callable[[], Any]


class BroadcastOrder:
    """How many object broadcasts this rank has called, and which messages still belong to calls that failed.

    Attributes:
        name: The method that broadcasts, for the reason of a refusal.
        tag: The tag that the queue's next message must have, so that the hottest call compares two numbers.
        holder: The thread that is inside of a call, if any. It writes this, behind a look, in statements that call no
            function: neither another thread nor a signal handler comes between. Only what goes through a queue of one
            host does without.
    """

    def __init__(self, health: GroupHealth) -> None:
        """Begin with no queue and no broadcast."""
        self._health = health
        self._end: Any = None
        self._writer = -1
        self._is_local = True
        # The end of a queue of one host on its writer, which gives each message its tag.
        self._tagged: Any = None
        self._is_far_writer = False
        # How many of this rank's calls took no message of the queue, minus how many messages no call took.
        self._beside = 0
        # A message of a call up to this number belongs to a call that has failed on this rank, and is dropped.
        self._failed = 0
        # Messages that came before their call, or in a call that was interrupted, by sender.
        self._kept: dict[int | None, Any] = {}
        # Those of a queue that reaches other hosts, in order.
        self._come: list[Any] = []
        self._is_begun = False
        self.holder: int | None = None
        self.name: str = "broadcast_object"
        self.tag: int = 0

    def adopt(self, end: Any, writer: int, *, is_writer: bool, is_local: bool) -> None:
        """Count the messages of a queue by its `end`, an endpoint that knows how many it has sent or handed out.

        With None only calls that use no queue are counted. `writer` is the writer's rank in the group. The messages of
        a queue that is not local are numbered as those over the host plane, by `send_in_queue` and `receive_in_queue`.
        """
        self._end, self._writer, self._is_local = end, writer, is_local
        self._tagged = end if is_writer and is_local else None
        self._is_far_writer = is_writer and not is_local
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

    def await_turn(self, name: str, within_s: float | None) -> float | None:
        """Wait until no other thread is inside of a call; return what is left of `within_s` seconds.

        The caller looks again, since a third thread may have come first.

        Raises:
            UsageError: A signal handler makes the call `name` inside of another one. It has no number.
            CommTimeoutError: Another thread is inside of a call for `within_s` seconds.
        """
        end = None if within_s is None else time.monotonic() + within_s
        pause_s = _TURN_S
        while (holder := self.holder) is not None:
            if holder == threading.get_ident():
                # The call inside of which a handler makes this one goes on, also if its message is half written.
                if self._tagged is not None:
                    self._tagged.refused_nested = True
                elif self._is_far_writer:
                    self._end.note_refusal()
                raise UsageError(
                    f"{self._health.where(name)}: this thread is inside of a broadcast of the group already, as in a "
                    "signal handler or a finalizer"
                )
            if end is not None and time.monotonic() >= end:
                raise CommTimeoutError(
                    f"{self._health.where(name)}: another thread is inside of a broadcast of the group, no turn within "
                    f"{within_s:.1f} s",
                    missing=(),
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_TURN_S)
        return None if end is None else until(end)

    def expect(self, name: str) -> None:
        """Note that the call `name` comes next."""
        self.name, self._is_begun = name, False

    def refuses(self, error: UsageError) -> bool:
        """Return whether `error` has refused the call before it began, so that the other ranks must learn of it."""
        return not self._is_begun and not isinstance(error, ClosedError) and not self._health.is_inherited

    def skip(self) -> None:
        """Count a call that this rank refuses, and of which it can tell nobody. Its message is dropped."""
        self._settle(1)
        self._failed = self._number()

    def begin(self) -> None:
        """Note that the call has passed its checks."""
        self._is_begun = True

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

    def send(self, obj: object, send: Send) -> None:
        """Broadcast `obj` with its number; if it cannot be sent, broadcast the reason and raise it."""
        self._counted(lambda number: self._send(obj, number, send))

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

    def send_refusal(self, reason: str, send: Send) -> None:
        """Broadcast the reason why this rank refuses its call as the source."""
        self._counted(lambda number: send((number, True, reason)))

    def _counted(self, act: Callable[[int], object]) -> None:
        """Count a call that `act` sends to the others under its number.

        What a signal handler raises meanwhile breaks the group: some may have the message, and others wait for it.
        """

        def stages() -> None:
            self._settle(1)
            act(self._number())

        in_stages(self._health, Operation("host", self.name, 0), stages)

    def receive(self, src: int, receive: Receive, type_: Any = None) -> Any:
        """Return the object that rank `src` broadcasts in this call, as `type_` unless that is None.

        A message is kept here from its arrival on. It is removed, and the call is counted, in statements that
        call no function, so that an exception from a signal handler leaves both as they were.

        Raises:
            DisagreementError: The next message of rank `src` belongs to another call, or `src` refused the
                call. The next call works.
            DecodeError: What came is no message, or no `type_`. The next call works.
        """
        number, kept = self._number() + 1, self._kept
        where, rank = self._health.where(self.name), self._health.ranks[src]
        while True:
            try:
                if src not in kept:
                    kept[src] = receive()
                its, is_refused, value = numbered(kept[src], where, rank)
                if its == number and not is_refused:
                    if type_ is not None:
                        value = codec.convert(value, type_)
                    self._settle(1, drops=src)
                    return value
            except DecodeError as error:
                if not raised_by_handler(error):
                    # This call has failed here, but its message may still come: from `src` or, if ranks named
                    # different sources, from another rank. It will be dropped then.
                    self._settle(1, failed=number, drops=src)
                raise
            if its < number and its <= self._failed:
                self._settle(0, drops=src)
                continue
            failure = self._failure(number, its, src, value if its == number else None)
            # A message of a later call stays for that.
            self._settle(1, failed=number, drops=None if its > number else src)
            raise failure

    # ------------------------------------------------------------------ through a queue that reaches other hosts

    def send_in_queue(self, obj: object, send: Send) -> None:
        """Send `obj` with its number; if it cannot be sent, send the reason and raise it. The queue counts the call."""
        self._send(obj, self._number() + 1, send)

    def refuse_in_queue(self, reason: str, send: Send) -> None:
        """Send the reason why this rank refuses its call as the source."""
        send((self._number() + 1, True, reason))

    def receive_in_queue(self, receive: Receive, type_: Any) -> Any:
        """Return the object that the queue's writer broadcasts in this call; as `receive`.

        A message is kept here from its arrival on. One step takes it out, which calls no function and finds out
        whether the queue was closed meanwhile.
        """
        where, rank = self._health.where(self.name), self._health.ranks[self._writer]
        while True:
            message, number = self._next(receive)
            try:
                its, is_refused, value = numbered(message, where, rank)
                if its == number and not is_refused:
                    if type_ is not None:
                        value = codec.convert(value, type_)
                    if self._take(message):
                        return value
                    continue
            except DecodeError as error:
                if raised_by_handler(error) or self._take(message, failed=number):
                    raise
                continue
            if its < number and its <= self._failed:
                self._take(message, calls=-1)
                continue
            failure = self._failure(number, its, self._writer, value if its == number else None)
            if its > number:
                # A message of a later call stays for that.
                self._settle(1, failed=number)
            elif not self._take(message, failed=number):
                continue
            raise failure

    def _next(self, receive: Receive) -> tuple[Any, int]:
        """Return the queue's next message, which stays, and the number of the call that takes it."""
        while True:
            if not self._come:
                self._come.append(self._received(receive))
            number = self._number() + 1
            # Another thread may close the queue.
            if self._come:
                return self._come[0], number

    def _received(self, receive: Receive) -> Any:
        """Return what comes; a message that cannot be decoded has failed this call."""
        try:
            return receive()
        except DecodeError as error:
            if not raised_by_handler(error):
                # Its end has counted it.
                self._settle(0, failed=self._number())
            raise

    def _take(self, message: object, *, calls: int = 0, failed: int = 0) -> bool:
        """Take the queue's next message out, which counts its call, if it is `message`. Calls no function."""
        come = self._come
        if not come or come[0] is not message:
            return False
        del come[0]
        self._failed = failed if failed > self._failed else self._failed  # noqa: FURB136 - `max` would be a call
        self._beside += calls
        return True

    # ------------------------------------------------------------------ helpers

    def _settle(self, calls: int, *, failed: int = 0, drops: int | None = None, takes: bool = False) -> None:
        """Count `calls`; drop the message kept from rank `drops`, or with `takes` the queue's message.

        This calls no function, so that a signal handler can run only before or after all of it.
        """
        if takes:
            _ = self._end.message
        if drops in self._kept:
            del self._kept[drops]
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
