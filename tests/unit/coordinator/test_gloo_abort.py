"""How a Gloo group is made to fail."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import FrameType
from typing import Any, NoReturn, cast

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo

from coordinator.host.process_groups import GlooBackend, abort_gloo

RANKS = 4
# Gloo's own deadline: a call that is not aborted ends then.
TIMEOUT = timedelta(seconds=60)


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


def connect(store: dist.Store, rank: int) -> GlooBackend:
    """Return this rank's end of a group, whose ranks are threads here."""
    options = cast("Any", ProcessGroupGloo)._Options()
    options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = TIMEOUT
    return cast("GlooBackend", ProcessGroupGloo(store, rank, RANKS, options))


@pytest.mark.guarantee("V1")
def test_aborting_ends_a_wait_for_a_silent_rank_though_another_one_has_closed_its_connection() -> None:
    """Rank 1 has given up before. Ranks 2 and 3 say nothing, as ranks of a vanished host; rank 0 waits for rank 3."""
    store = dist.HashStore()
    with ThreadPoolExecutor(RANKS) as threads:
        groups = list(threads.map(lambda rank: connect(store, rank), range(RANKS)))
    wait = groups[0].recv([torch.zeros(1)], 3, 1)
    with ThreadPoolExecutor(1) as threads:
        silence = threads.submit(wait.wait, TIMEOUT)
        abort_gloo(groups[1])
        with pytest.raises(RuntimeError, match="peer|pipe"):
            groups[0].send([torch.zeros(1)], 1, 1).wait(TIMEOUT)
        assert not silence.done()
        abort_gloo(groups[0])
        with pytest.raises(RuntimeError, match="Application timeout caused pair closure"):
            silence.result(timeout=TIMEOUT.total_seconds() / 3)
