"""How a Gloo group is made to fail."""

from __future__ import annotations

import signal
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, cast

import pytest

from coordinator.host.process_groups import GlooBackend, abort_gloo


class Backend:
    """A group of two whose receives end as `wait` does."""

    def __init__(self, *, is_struck: bool) -> None:
        """Let a signal strike in `wait`, or let it time out."""
        self.is_struck = is_struck

    def size(self) -> int:
        """Return two."""
        return 2

    def rank(self) -> int:
        """Return the first."""
        return 0

    def recv(self, _tensors: list[Any], _peer: int, _tag: int) -> Backend:
        """Return the work, which this is as well."""
        return self

    def wait(self, _limit: timedelta) -> NoReturn:
        """Raise as Gloo when its time is over, or what a signal handler raises."""
        if self.is_struck:
            signal.raise_signal(signal.SIGUSR1)
        raise RuntimeError("timed out")


@pytest.mark.guarantee("R14")
def test_aborting_swallows_the_time_out_and_nothing_that_a_handler_raises() -> None:
    """Both are RuntimeErrors. The first is how Gloo closes its connections."""

    def strike(_number: int, _frame: FrameType | None) -> None:
        raise RuntimeError("stop now")

    abort_gloo(cast("GlooBackend", Backend(is_struck=False)))
    before = signal.signal(signal.SIGUSR1, strike)
    try:
        with pytest.raises(RuntimeError, match="stop now"):
            abort_gloo(cast("GlooBackend", Backend(is_struck=True)))
    finally:
        signal.signal(signal.SIGUSR1, before)
