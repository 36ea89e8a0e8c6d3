"""Distinguish what a signal handler does from what the code that it interrupts does."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from inspect import CO_VARARGS
from types import CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, Final, TypeVar

from shm_broadcast.errors import UsageError

__all__ = ["Forks", "Posts", "is_held", "is_interrupting", "raised_by_handler", "tolerating"]

Result = TypeVar("Result")

_SIGNALS: Final = tuple(map(int, signal.valid_signals()))


def raised_by_handler(error: BaseException, *, anywhere: bool = False) -> bool:
    """Return whether a signal handler written in Python raised `error`, on this thread or, with `anywhere`, on any.

    Only the main thread runs handlers. Python passes the interrupted frame to a handler as an argument, and
    the handler's own frame lies directly above that frame; no other function receives its caller's frame. A
    handler that has rebound this argument is still recognised while it is installed. If other code has caught
    the exception and raised another one, the new one counts as that code's. So does an exception that the
    handler itself has caught and that is raised again here. Handlers not in Python are not recognised.
    """
    main = threading.main_thread().ident
    is_elsewhere = threading.get_ident() != main
    if is_elsewhere and not anywhere:
        return False
    # Frames that still run are left out: reading their variables would keep these alive. `error` is often
    # among them, and a reference cycle would then keep it alive too.
    running = set()
    # Not this frame: it holds the set, and the two would keep all callers, with their variables, for the collector.
    frame: FrameType | None = sys._getframe().f_back  # noqa: SLF001 - there is no public way to the calling frames
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    frame = sys._current_frames().get(main or 0) if is_elsewhere else None  # noqa: SLF001 - documented
    while frame is not None:
        running.add(frame)
        frame = frame.f_back
    installed: set[CodeType] | None = None  # on demand: it takes much longer than a refusal in native code
    traceback, before = error.__traceback__, None
    while traceback is not None:
        frame = traceback.tb_frame
        # A handler's exception passes into the interrupted frame, its `f_back`. Native code may ask earlier.
        has_left = before is None or before is frame.f_back
        if has_left and frame not in running:
            installed = _installed() if installed is None else installed
            if frame.f_code in installed or _is_handler(frame):
                return True
        traceback, before = traceback.tb_next, frame
    return False


def _installed() -> set[CodeType]:
    """Return the code of the handlers that are written in Python and installed now."""
    found = set()
    for number in _SIGNALS:
        handler: object = signal.getsignal(number)
        while isinstance(handler, partial):
            handler = handler.func
        if not callable(handler):  # such as SIG_DFL, an Enum whose metaclass has a `__call__` in Python
            continue
        if not isinstance(handler, FunctionType | MethodType):
            handler = type(handler).__call__
        code = getattr(getattr(handler, "__func__", handler), "__code__", None)
        if isinstance(code, CodeType):
            found.add(code)
    return found


def _is_handler(frame: FrameType) -> bool:
    interrupted, code = frame.f_back, frame.f_code
    if interrupted is None:
        return False
    values = frame.f_locals
    arguments = [values.get(name) for name in code.co_varnames[: code.co_argcount]]
    if code.co_flags & CO_VARARGS:
        rest = values.get(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
        arguments += rest if isinstance(rest, tuple) else ()
    return any(argument is interrupted for argument in arguments)


def is_interrupting(code: CodeType, name: str, value: object, count: int) -> bool:
    """Return whether a signal handler or a finalizer calls this, and has interrupted a function on this thread.

    Handlers are recognised as in `raised_by_handler`, finalizers if they are methods `__del__`.

    Args:
        code: Of the function.
        name: Of one of its variables.
        value: What that is.
        count: How many such functions run on this thread; behind the outermost one nothing is looked for.
    """
    frame: FrameType | None = sys._getframe().f_back  # noqa: SLF001 - there is no public way to the calling frames
    installed = _installed() if threading.current_thread() is threading.main_thread() else set()
    is_found = False
    while frame is not None and count:
        if frame.f_code is code and frame.f_locals.get(name) is value:
            if is_found:
                return True
            count -= 1
        is_found = (
            is_found or frame.f_code.co_name == "__del__" or frame.f_code in installed or _is_handler(frame)
        )
        frame = frame.f_back
    return False


class tolerating:  # noqa: N801 - as `contextlib.suppress`
    """Suppress errors of some types in a block, except those that a signal handler raises there.

    `contextlib.suppress` would drop these too, and a handler may raise any type.
    """

    def __init__(self, *kinds: type[BaseException]) -> None:
        """Suppress errors of `kinds`."""
        self._kinds = kinds

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _traceback: TracebackType | None
    ) -> bool:
        """Return whether `error`, which ends the block, is suppressed."""
        return isinstance(error, self._kinds) and not raised_by_handler(error)


def is_held(lock: threading.RLock) -> bool:
    """Return whether this thread holds a re-entrant lock, which would let a signal handler of the same thread in."""
    return bool(lock._is_owned())  # type: ignore[attr-defined] # noqa: SLF001 - `threading.Condition` asks so too


class Forks:
    """How often Python has forked on the way to this process, to be read without a call.

    Attributes:
        count: That number.
    """

    count: int = 0


def _count_fork() -> None:
    Forks.count += 1


os.register_at_fork(after_in_child=_count_fork)


class Posts:
    """Makes the calls of one group that post on its transports.

    A signal handler may fork behind the checks of a call, and the child goes on in that call. What it then sends over
    the connections of its parent makes Gloo end that process, and the other ranks.

    Attributes:
        forks: What `Forks.count` was where this was made.
    """

    def __init__(self, where: str) -> None:
        """Make them in this process only; `where` begins the text of the error."""
        self._where = where
        self.forks: int = Forks.count

    def __call__(self, call: Callable[..., Result], *args: Any) -> Result:
        """Return `call(*args)`.

        Raises:
            UsageError: This process is a forked child of the one that made this.
        """
        # Python runs handlers where a function begins and where a call has returned. So none runs from this look to the
        # call: `fork_count` would be a call in between.
        if self.forks != Forks.count:
            raise UsageError(f"{self._where}: the group belongs to the process that forked this one")
        return call(*args)
