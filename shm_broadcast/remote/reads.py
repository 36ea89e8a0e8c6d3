"""What takes messages out of the end of a remote reader: reads, and the loan of a message.

Whatever a signal handler raises inside of a read, no message is lost, repeated or reordered; see `DESIGN.md`.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final

from shm_broadcast import codec
from shm_broadcast._core import NOTHING, LoanBlock
from shm_broadcast.endpoint import RemoteEndpoint
from shm_broadcast.errors import ClosedError, DecodeError, PeerLostError, UsageError
from shm_broadcast.interruption import is_held, raised_by_handler
from shm_broadcast.remote.end import RemoteEnd
from shm_broadcast.remote.ledger import Arrived, Inbox
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.turn import TakenError, Turn

# Acknowledge after reading 1/8 of the high-water mark, and on every heartbeat.
_ACKNOWLEDGED_PART: Final = 8


class RemoteReads(RemoteEnd):
    """The reads of a remote reader; the subclass receives what they take."""

    def __init__(self, name: str, settings: BroadcastSettings, endpoint: RemoteEndpoint) -> None:
        """Begin with nothing received; `endpoint` is the writer's."""
        super().__init__(name, settings)
        self._endpoint = endpoint
        # Every reading call holds `_calls`, so `close` from another thread frees the socket only after the call has
        # returned.
        self._calls = threading.RLock()
        self._inbox = Inbox()
        self._lent: Callable[[], _Loan | None] = _no_loan
        self._unacknowledged = 0  # bytes read since the last acknowledgement
        self._is_awaited = False  # whether the writer is waiting for room
        self._progress_at: float | None = None

    @abstractmethod
    def poll(self) -> bool:
        """Return whether a message has arrived. Does not wait."""

    @abstractmethod
    def _await(self, call: str, timeout_s: float | None, since: float) -> None:
        """Wait until a message has arrived, for a call that began at `since`."""

    @abstractmethod
    def _raise_if_over(self, call: str) -> None:
        """Raise if no further message will come."""

    @abstractmethod
    def _settle(self) -> None:
        """Make the descriptor of `fileno` readable if there is something to read or to raise, else unreadable."""

    @abstractmethod
    def _acknowledge(self) -> None:
        """Tell the writer what was received and read; the caller holds `_lock`."""

    def read(self, timeout_s: float | None, type_: Any) -> Any:
        """Wait for the next message and return its object, which owns its memory.

        Raises:
            CommTimeoutError: No message came in time; the queue stays usable.
            PeerLostError: The writer is gone and every received message has been read; the queue is unusable.
            ClosedError: The writer closed the queue and every message has been read, or this end was closed.
            GroupBrokenError: An earlier call failed; its error is the `__cause__`.
            DecodeError: The message is not valid, or not a `type_`. It counts as read; the queue stays usable.
        """
        self._refuse_nested("dequeue")
        return self._read("dequeue", timeout_s, type_)

    def try_read(self, call: str = "try_dequeue", looks: bool = False, type_: Any = None) -> tuple[bool, Any]:
        """Return (True, the next object), or (False, None) if it is not there or another thread reads."""
        self._refuse_nested(call)
        # Once there is a message, no call follows: a signal handler that ran there and raised would lose it.
        value = self._read(call, 0.0, type_, tries=True)
        if value is not NOTHING:
            return True, value
        if looks:
            self._look(call)
        return False, None

    def loan(self, timeout_s: float | None) -> AbstractContextManager[Any]:
        """Yield the next object; its arrays and tensors share one private copy of the message."""
        return _Loan(self, timeout_s)

    def lend(self, loan: _Loan, timeout_s: float | None) -> Any:
        """Return the next object on loan; the thread of `loan` cannot read until that ends."""
        self._refuse_nested("loan")
        self._lent = weakref.ref(loan)
        return self._read("loan", timeout_s, lends=True)

    def _is_inside(self) -> bool:
        return is_held(self._calls) or super()._is_inside()

    def _refuse_nested(self, call: str) -> None:
        """Raise if this thread reads already, or has a message on loan: the locks would let it in again."""
        loan = self._lent()
        has_loan = loan is not None and loan.hold == threading.get_ident()
        if has_loan or is_held(self._calls) or is_held(self._lock):
            raise UsageError(
                f"{self._where(call)}: this thread is inside of a call on the queue already, as in a signal handler or "
                "a finalizer, or has a message on loan"
            )

    def _read(
        self,
        call: str,
        timeout_s: float | None,
        type_: Any = None,
        *,
        lends: bool = False,
        tries: bool = False,
    ) -> Any:
        """Wait for the next message and return its object; the message counts as read.

        Whatever a signal handler raises before the object is returned, the message is the next one again. With `lends`
        the object's arrays alias memory of its own. With `tries` this does not wait, and may return `NOTHING`.
        """
        message: Arrived | None = None
        before = self._inbox.progress
        start = time.monotonic()
        try:
            with Turn(self._calls, timeout_s):
                self.check(call)
                if not self._inbox and not self.poll():
                    if not tries:
                        self._await(call, timeout_s, start)
                    else:
                        self._raise_if_over(call)
                        if not self._inbox:
                            self._settle()
                            return NOTHING
                before = self._inbox.progress
                message = self._inbox.first()
                value = self._decoded(message.frame, type_, lends=lends)
                self._take_out()
            return value
        except TakenError:
            if tries:
                return NOTHING
            self._raise_late(
                call, timeout_s or 0.0, "another thread is inside of a call on this end, no turn", ()
            )
        except BaseException as error:
            if message is not None and (not isinstance(error, DecodeError) or raised_by_handler(error)):
                with self._lock:
                    self._inbox.put_back(message, before)
                self._settle()
            if isinstance(error, ClosedError | PeerLostError) and not raised_by_handler(error):
                self._tell_owner(call, error)
            raise
        finally:
            if self._is_deferred:
                self._close()

    def _tell_owner(self, call: str, error: ClosedError | PeerLostError) -> None:
        """Tell the owner why a read ends; this thread holds no lock, as the owner may close this end."""
        if self.guard is not None and not self.is_asking:
            by_writer = isinstance(error, ClosedError) and not self._is_closing
            self.guard.ended(call, by_writer=by_writer)
            if isinstance(error, PeerLostError):
                self.guard.failed(call, error)

    def _decoded(self, frame: memoryview | bytearray, type_: Any, *, lends: bool) -> Any:
        """Return the object in `frame`; if there is none the message counts as read."""
        try:
            if lends:
                # zmq receives to any address; a new copy is aligned.
                return codec.decode(frame if isinstance(frame, bytearray) else bytearray(frame), copy=False)
            return codec.decode(frame, type_)
        except DecodeError as error:
            if not raised_by_handler(error):
                self._take_out()
            raise

    def _take_out(self) -> None:
        """Count the next message as read, and acknowledge it if the writer may be waiting for that."""
        with self._lock:
            before = self._inbox.progress.nbytes
            self._inbox.take_out()
            self._unacknowledged += self._inbox.progress.nbytes - before
            is_much = self._unacknowledged * _ACKNOWLEDGED_PART >= self._endpoint.settings.high_water_bytes
            if is_much or (self._is_awaited and not self._inbox):
                self._acknowledge()
        self._progress_at = time.monotonic()
        self._settle()


class _Loan(LoanBlock):
    """The block in which a message is on loan. Its object is a copy, so that nothing has to be let go at the end.

    Attributes:
        hold: The number of the thread that has the message on loan; None outside of the block.
    """

    hold: int | None

    def __init__(self, reader: RemoteReads, timeout_s: float | None) -> None:
        self._reader = reader
        self._timeout_s = timeout_s

    def __enter__(self) -> Any:
        self.hold = threading.get_ident()
        try:
            return self._reader.lend(self, self._timeout_s)
        except BaseException:
            self.hold = None
            raise


def _no_loan() -> None:
    """Stand for a loan that has ended."""
