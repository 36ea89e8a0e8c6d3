"""Read from a queue in an event loop of asyncio, which goes on meanwhile."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final, NoReturn, Protocol

from shm_broadcast import _core
from shm_broadcast.descriptors import refuse_if_full
from shm_broadcast.reports.log_fields import LogFields

logger: logging.Logger = logging.getLogger(__name__)

# How long a call waits for another thread before it looks again. A thousand looks a second take some percent of a core.
_PAUSE_S: Final = 0.001


class ReadingEnd(Protocol):
    """The reader of either transport."""

    name: str
    warns: bool

    @property
    def warn_after_s(self) -> float:
        """How long a call waits before it warns, in seconds."""

    @property
    def is_busy(self) -> bool:
        """Whether a thread is inside of a call that keeps `try_read` from what is there, as with a message on loan."""

    def fileno(self, call: str = ...) -> int:
        """Return a descriptor that is readable while `try_read` may find something or raise."""

    def try_read(self, call: str = ..., looks: bool = ..., type_: Any = ...) -> tuple[bool, Any]:
        """Return (True, the next object) or (False, None); with `looks` raise at once if the writer is lost.

        The object is converted to `type_`, unless that is None.
        """

    def log_fields(self, call: str) -> LogFields:
        """Return the fields of a log record on `call`."""

    def raise_late(self, call: str, within_s: float) -> NoReturn:
        """Raise for a message that has not come in time."""


async def read(end: ReadingEnd, timeout_s: float | None, type_: Any) -> Any:
    """Return the next object; what a cancelled call has not returned stays in the queue."""
    start = time.monotonic()
    warns_s = end.warn_after_s
    while True:
        # Between taking a message and returning it nothing is awaited, so that a cancelled call takes none.
        found, value = end.try_read("adequeue", looks=True, type_=type_)
        if found:
            return value
        waited_s = time.monotonic() - start
        if timeout_s is not None and waited_s >= timeout_s:
            end.raise_late("adequeue", timeout_s)
        if waited_s >= warns_s:
            warns_s += end.warn_after_s
            if end.warns:
                fields = end.log_fields("adequeue")
                logger.warning("adequeue on queue %r: waiting for %.0f s", end.name, waited_s, extra=fields)
        until_s = warns_s if timeout_s is None else min(warns_s, timeout_s)
        await _readable(end, until_s - waited_s)
        if end.is_busy:
            # The descriptor may stay readable for as long as the other thread likes.
            await asyncio.sleep(_PAUSE_S)


def _duplicate(end: ReadingEnd) -> tuple[object, int]:
    """Return the number of a duplicate of the descriptor, which `close` leaves open, and its owner, which closes it.

    Each waiting task or loop has one. The owner is made together with the duplicate: a signal handler that raises
    leaves none open.
    """
    descriptor = end.fileno("adequeue")
    try:
        own = _core.own_duplicate(descriptor)
    except OSError as error:
        end.fileno("adequeue")  # if another thread has closed this end meanwhile, it says so
        refuse_if_full("fcntl", "gives each call that waits a descriptor of its own", error)
        raise
    # `close` closes the end before its descriptor: if the end is open now, the number was its own then.
    try:
        end.fileno("adequeue")
    except BaseException:
        del own  # else the error's traceback would keep the duplicate open
        raise
    return own


async def _readable(end: ReadingEnd, within_s: float) -> None:
    """Return when the descriptor is readable, or after `within_s` seconds."""
    loop = asyncio.get_running_loop()
    woken: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    owner, number = _duplicate(end)
    timer: asyncio.TimerHandle | None = None
    try:
        loop.add_reader(number, wake)
        timer = loop.call_later(within_s, wake)
        await woken
    finally:
        # The loop must forget the number before it is closed, and another descriptor gets it.
        try:
            loop.remove_reader(number)
        finally:
            del owner
            if timer is not None:
                timer.cancel()
