"""Run a step that opens descriptors on a thread of its own.

Python runs signal handlers on the main thread, between any two of its steps: also when a system call has returned a
descriptor that nobody has stored yet. What such a handler raises, as Ctrl-C does, would leave it open.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from shm_broadcast.errors import CapabilityError
from shm_broadcast.interruption import raised_by_handler

# How long `settle` waits before it aborts a step once more.
_AGAIN_S: Final = 0.02


class Aside:
    """Runs one step at a time; the step stores what it opens in an object that will be closed."""

    def __init__(self) -> None:
        """Start no thread yet."""
        self._thread: threading.Thread | None = None
        self._is_cancelled = self._has_begun = False
        self._error: BaseException | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Run `step` and wait for its end, or raise its error. If the wait is interrupted, call `settle`.

        Raises:
            CapabilityError: This process can have no further thread.
        """
        self._has_begun, self._error = False, None

        def body() -> None:
            # Either `settle` sees that this has begun, or this sees that it shall not begin.
            self._has_begun = True
            if self._is_cancelled:
                return
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
                self._error = error

        self._thread = threading.Thread(target=body, name="group-coordinator-descriptors", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as refused:
            if raised_by_handler(refused):
                raise
            raise CapabilityError(
                f"no thread could be started: {refused}", requirement="a thread"
            ) from refused
        self._thread.join()
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def settle(self, abort: Callable[[], None]) -> None:
        """Wait for the end of a step that `run` no longer waits for; `abort` makes it end soon. Idempotent."""
        self._is_cancelled = True
        thread = self._thread
        while thread is not None and self._has_begun and thread.is_alive():
            abort()
            thread.join(_AGAIN_S)
        self._thread = self._error = None


__all__ = ["Aside"]
