"""Run a signal handler, or what one may do, at every place of a call where Python would run it."""

import sys
from collections.abc import Callable, Sequence
from itertools import count
from types import FrameType

__all__ = ["PLACES", "Interrupt", "handling_at", "raising_at"]


class Interrupt(BaseException):
    """What a handler raises."""


PLACES = (
    "shm_broadcast/queue.py",
    "/threading.py",
    "shm_broadcast/turn.py",
    "zmq/sugar/socket.py",
    *(
        f"shm_broadcast/remote/{name}.py"
        for name in ("end", "ledger", "news", "reader", "reads", "wire", "writer")
    ),
)
"""The files of remote readers, in which a handler runs unless a test names others."""


def handling_at(
    step: int, call: Callable[[], object], handler: Callable[[], object], places: Sequence[str] = PLACES
) -> bool:
    """Run `call`, and `handler` at a place inside of the files that end with `places`; return whether that place came.

    Python runs a handler when a function begins and when a native call has returned. These are the events of a
    profiler, whose exception appears at the same places.
    """
    passed = count()
    has_come = False

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        nonlocal has_come
        is_place = event in ("call", "c_return") and frame.f_code.co_filename.endswith(tuple(places))
        # The collector may come by at any place, and Python lets no exception out of a finalizer.
        if is_place and frame.f_code.co_name != "__del__" and next(passed) == step:
            sys.setprofile(None)
            has_come = True
            handler()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return has_come


def raising_at(step: int, call: Callable[[], object], places: Sequence[str] = PLACES) -> bool:
    """Run `call`, and raise at a place inside of the files that end with `places`; return whether that place came."""

    def handler() -> None:
        raise Interrupt

    try:
        return handling_at(step, call, handler, places)
    except Interrupt:
        return True
