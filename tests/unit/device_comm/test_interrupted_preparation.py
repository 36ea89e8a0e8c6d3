"""What a signal handler raises while shared memory is prepared or taken leaves no descriptor open."""

import gc
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from types import FrameType

import pytest

from device_comm.cpu.shared_memory import Preparation
from shm_broadcast.segment import Segment

OURS = ("device_comm/cpu/", "shm_broadcast/segment.py", "shm_broadcast/threads.py")


class Interrupt(BaseException):
    """What a handler raises."""


def raising_at(step: int, call: Callable[[], None]) -> bool:
    """Run `call`, and raise at a place of our code on this thread; return whether that place came.

    Python runs a handler when a function begins and when a native call has returned. These are the events of a
    profiler, whose exception appears at the same places.
    """
    places = count()

    def profile(frame: FrameType, event: str, _arg: object) -> None:
        is_place = event in ("call", "c_return") and any(name in frame.f_code.co_filename for name in OURS)
        if is_place and next(places) == step:
            sys.setprofile(None)
            raise Interrupt

    sys.setprofile(profile)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.setprofile(None)
    return False


def segments() -> int:
    """Return how many descriptors of segments this process has open, besides what it keeps for its life."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            name = os.readlink(descriptor)
            found += name.startswith("/memfd:group-coordinator") and not (
                "-status" in name or "-stacks" in name
            )
    return found


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_leaves_no_segment_open(rank: int) -> None:
    """Wherever it strikes, in the rank that makes the memory as in one that takes it."""
    gc.collect()
    before = segments()

    def take() -> None:
        taken.append(regions[1].take(regions[0].offer, 30.0)[0])

    taken: list[Segment | None] = []
    for step in count():
        regions = [Preparation(2, 0), Preparation(2, 1)]
        with ExitStack() as stack:
            for region in regions:
                stack.callback(region.close)
            if rank == 0:
                is_interrupted = raising_at(step, regions[0].prepare)
            else:
                regions[0].prepare()
                is_interrupted = raising_at(step, take)
        for segment in taken:
            assert segment is not None
            segment.close()
        taken.clear()
        assert segments() == before, step
        if not is_interrupted:
            break
    assert step > 1
