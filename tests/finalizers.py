"""Objects whose finalizers make a call, wherever their last reference goes or the collector comes by."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["KINDS", "collecting", "finalize"]

KINDS = ("__del__", "weak reference", "cycle")
"""How an object ends: its last reference goes, with `__del__` or a callback; or the collector finds it in a cycle."""


class _Dying:
    """Makes a call when it ends."""

    def __init__(self, call: Callable[[], object]) -> None:
        """Keep the call."""
        self.call = call
        self.cycle: object = None

    def __del__(self) -> None:
        """Make the call."""
        self.call()


class _Watched:
    """Ends silently."""


def finalize(kind: str, call: Callable[[], object]) -> None:
    """Let a finalizer of this kind make a call, which raises nothing, before this returns."""
    if kind == "weak reference":
        watched = _Watched()
        reference = weakref.ref(watched, lambda _: call())
        del watched
        del reference
        return
    dying = _Dying(call)
    if kind == "cycle":
        dying.cycle = dying
    del dying
    if kind == "cycle":
        gc.collect(0)


@contextmanager
def collecting(call: Callable[[], bool]) -> Iterator[None]:
    """Let the collector run as often as it can within the block, and make a call in this thread each time that it does.

    Args:
        call: Returns whether it is to be made again. It may run at any place where Python makes an object.
    """
    owner, before = threading.get_ident(), gc.get_threshold()
    is_over = False

    def again() -> None:
        if is_over:
            return
        if threading.get_ident() != owner or call():
            leave()

    def leave() -> None:
        dying = _Dying(again)
        dying.cycle = dying

    leave()
    gc.set_threshold(1, 1000, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        is_over = True
        gc.collect(0)
