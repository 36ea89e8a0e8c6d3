"""Threads whose end is noticed even if a signal handler raises in the wait, and steps that run on them."""

from __future__ import annotations

import _thread
import importlib
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, Final, TypeVar

from shm_broadcast._core import fork_count
from shm_broadcast.errors import CapabilityError, UsageError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["Aside", "DaemonThread", "ImportingError", "import_aside", "made_aside", "start_thread"]

_Made = TypeVar("_Made")

# A wait looks again this often: a handler that raised in another wait may have left the lock taken.
_LOOK_S: Final = 0.1
# How long `settle` waits before it aborts a step once more.
_AGAIN_S: Final = 0.02
# Where Python's import holds a module's lock, and where it holds the lock of all imports.
_IMPORTLIB: Final = "<frozen importlib._bootstrap>"
_IMPORTS_ONE: Final = "_find_and_load"
_STOPS_ALL: Final = ("_find_spec", "_get_module_lock")


class ImportingError(UsageError):
    """What a call needs waits for an import that the calling thread itself is inside of, as in a signal handler."""


class _Caller(threading.local):
    """What calls must know of the thread that makes them.

    Attributes:
        forks: The fork count of the process to which the creation belongs that the thread is in; None outside of one.
            A signal handler may fork at any place of it, and the child goes on there: it must neither ask nor open
            anything, and so come to the other ranks as its parent.
    """

    forks: int | None = None


caller: Final = _Caller()
"""Set its attribute in a `try` whose `finally` restores it, by assignments: no handler can raise in between."""


def owner_forks() -> int:
    """Return the fork count of the process to which a call of this thread belongs, and what it makes."""
    return fork_count() if caller.forks is None else caller.forks


def owned_by(forks: int, call: Callable[[], _Made]) -> _Made:
    """Return what `call` returns, in which nothing runs that belongs to a process with another fork count."""
    before = caller.forks
    try:
        caller.forks = forks
        return call()
    finally:
        caller.forks = before


class DaemonThread(threading.Thread):
    """A daemon thread that can be started and joined beside signal handlers that raise.

    Before Python 3.13, `Thread.join` may take a running thread for ended if a handler raises in it: it finds
    the lock held that announces the thread's end, and believes that it holds the lock itself. If the thread
    ends just then, a `RuntimeError` replaces the handler's exception. `Thread.start` takes an `Exception` of
    a handler for a refusal by the kernel: it removes a thread that has begun from Python's list, and that
    thread then ends with a `KeyError` before it calls its target.
    """

    def __init__(self, target: Callable[..., object], name: str, args: Iterable[Any] = ()) -> None:
        """Start nothing yet."""
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._forks = fork_count()
        self._has_ended = False
        self._runs = threading.Lock()
        self._runs.acquire()

    def start(self) -> None:
        """Start the thread, and wait until it has begun. What a handler raises meanwhile does not stop it.

        Signal handlers run on the main thread only; there, a bare helper thread calls `Thread.start` instead.

        Raises:
            RuntimeError: This process can have no further thread, or the thread was started before.
        """
        if threading.get_ident() != threading.main_thread().ident:
            super().start()
            return
        ended: list[BaseException | None] = []
        over = threading.Lock()
        over.acquire()

        def start(starts: Callable[[], None]) -> None:
            error: BaseException | None = None
            try:
                starts()
            except BaseException as refusal:  # noqa: BLE001 - raised below
                error = refusal
            ended.append(error)
            over.release()

        _thread.start_new_thread(start, (super().start,))
        # In a child that a handler has forked meanwhile nobody starts it.
        while not ended and self._forks == fork_count():
            if over.acquire(timeout=_LOOK_S):
                over.release()
        if ended and ended[0] is not None:
            try:
                raise ended[0]
            finally:
                ended.clear()  # its traceback holds this frame

    def run(self) -> None:
        """Run the target, and tell that it has ended."""
        try:
            super().run()
        finally:
            self._has_ended = True
            self._runs.release()

    def is_alive(self) -> bool:
        """Return whether the thread has begun in this process, and its target has not ended."""
        return self.ident is not None and not self._has_ended and self._forks == fork_count()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the target has ended, for at most `timeout` seconds unless that is None.

        Raises:
            RuntimeError: The thread has not been started, or it is this one.
        """
        if self.ident is None:
            raise RuntimeError("cannot join thread before it is started")
        if self is threading.current_thread():
            raise RuntimeError("cannot join current thread")
        end = math.inf if timeout is None else time.monotonic() + timeout
        while self.is_alive():
            left_s = end - time.monotonic()
            if left_s <= 0:
                return
            if self._runs.acquire(timeout=min(left_s, _LOOK_S)):
                self._runs.release()


def start_thread(thread: DaemonThread, purpose: str) -> None:
    """Start a thread; `purpose` says in an error what it is for.

    Raises:
        CapabilityError: This process can have no further thread.
    """
    try:
        thread.start()
    except RuntimeError as refused:
        if raised_by_handler(refused):
            raise
        raise CapabilityError(
            f"no thread could be started {purpose}: {refused}", requirement="a thread"
        ) from refused


class Aside:
    """Runs steps that open descriptors, one at a time, on a thread of their own.

    Python runs signal handlers on the main thread, between any two of its instructions, even when a system
    call has just returned a descriptor that is not stored yet. An exception of a handler, such as that of
    Ctrl-C, would leave the descriptor open. A step stores what it opens in an object that will be closed.
    """

    def __init__(self, purpose: str = "to open descriptors") -> None:
        """Start no thread yet; `purpose` says in an error what a thread is for."""
        self._purpose = purpose
        self._thread: DaemonThread | None = None
        self._is_cancelled = self._has_begun = False
        self._error: BaseException | None = None

    def run(self, step: Callable[[], None]) -> None:
        """Run `step` and wait for its end, or raise its error. If the wait is interrupted, call `settle`.

        Raises:
            CapabilityError: This process can have no further thread.
            UsageError: A handler has forked inside of this call, and this is the child, in which nothing runs.
        """
        self._has_begun, self._error, forks = False, None, owner_forks()

        def body() -> None:
            # Either `settle` sees that the step has begun, or the step sees that it is cancelled.
            self._has_begun = True
            if self._is_cancelled or forks != fork_count():
                return
            try:
                step()
            except BaseException as error:  # noqa: BLE001 - raised below, on the caller's thread
                self._error = error

        self._thread = DaemonThread(body, "group-coordinator-descriptors")
        start_thread(self._thread, self._purpose)
        _check_parent(forks)
        self._thread.join()
        _check_parent(forks)
        self._thread = None
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame

    def settle(self, abort: Callable[[], object]) -> None:
        """Wait for the end of a step that `run` no longer waits for; `abort` makes it end soon. Idempotent."""
        self._is_cancelled = True
        thread = self._thread
        while thread is not None and self._has_begun and thread.is_alive():
            abort()
            thread.join(_AGAIN_S)
        self._thread = self._error = None


def made_aside(
    make: Callable[[], _Made], drop: Callable[[_Made], object], abort: Callable[[], object]
) -> _Made:
    """Return what `make` makes; what a signal handler raises meanwhile passes, and nothing stays open.

    Only the main thread runs signal handlers, so a call on the main thread runs `make` on another one. `make`
    must not need a lock that the caller holds. The caller stores or returns the result in a statement that
    makes no other call.

    Args:
        make: Opens descriptors and starts threads, which its result owns; if it raises, it leaves nothing.
        drop: Closes a result that nobody gets.
        abort: Lets `make` end soon; called repeatedly until it has ended.

    Raises:
        CapabilityError: This process can have no further thread.
        UsageError: A handler has forked inside of this call, and this is the child.
    """
    if threading.current_thread() is not threading.main_thread():
        return make()
    made: list[_Made] = []
    aside, forks, is_given_up = Aside(), owner_forks(), False

    def step() -> None:
        made.append(make())
        if is_given_up:
            discard()

    def discard() -> None:
        # The caller's thread or the one that runs `step`: whichever pops the result closes it.
        try:
            each = made.pop()
        except IndexError:
            return
        drop(each)

    try:
        aside.run(step)
        _check_parent(forks)
        return made[0]
    except BaseException:
        is_given_up = True
        try:
            aside.settle(abort)
        finally:
            discard()
        raise


def _check_parent(forks: int) -> None:
    """Raise if this is a child that was forked since the fork count was `forks`."""
    if forks != fork_count():
        raise UsageError("a signal handler has forked this process while something was made for the parent")


def import_aside(name: str, *needs: str) -> None:
    """Import a module ahead of an `import` statement, on a thread on which no signal handler can raise.

    If a handler raises inside of `import`, Python's lock of that module may stay taken, and the next import
    of the module would wait for ever. Here the handler's exception passes unchanged once the import is over. The
    caller must not be inside of an import that the module needs, other than of `needs`: the thread would wait for it.

    Raises:
        ImportingError: The caller is inside of an import of one of `needs`, or where no other thread can import.
        Exception: As `made_aside`, and what the module raises.
    """
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        if threading.current_thread() is threading.main_thread():
            _refuse_within_import((name, *needs))
        made_aside(partial(importlib.import_module, name), _keep, _wait)


def _refuse_within_import(names: tuple[str, ...]) -> None:
    """Raise if another thread that imports these modules would wait for an import that this one is inside of."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no public way to the calling frames
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTLIB:
            where = frame.f_code.co_name
            imported = frame.f_locals.get("name")
            if where in _STOPS_ALL or (where == _IMPORTS_ONE and imported in names):
                raise ImportingError(
                    f"this thread is inside of an import of {imported}, as in a signal handler or a finalizer; call "
                    f"this again when that is over, because it needs {names[-1]}, which is not imported yet"
                )
        frame = frame.f_back


def _keep(_module: object) -> None:
    """Leave a module that was imported for nobody where it is."""


def _wait() -> None:
    """Do nothing to end an import."""
