"""The thread that watches peers while kernels wait: what ends kernels, and what breaks the group."""

import threading
from typing import Any

import pytest

from device_comm.cuda.error_record import DeathWatch

# What must happen at once may take this long on a busy machine.
SOON_S = 20.0


class Health:
    """A group whose rank 9 has ended, maybe after it had left."""

    name = "tp:0"
    is_broken = False

    def __init__(self, *, has_left: bool) -> None:
        self._gone = () if has_left else (9,)

    def lost(self) -> tuple[int, ...]:
        return (9,)

    def gone(self) -> tuple[int, ...]:
        return self._gone

    def others_failed(self) -> bool:
        return False


class Record:
    """The record of kernels that have reported nothing."""

    words = (0,)

    def __init__(self) -> None:
        self.was_aborted = threading.Event()

    def abort(self) -> None:
        self.was_aborted.set()


@pytest.mark.guarantee("D54")
@pytest.mark.parametrize("has_left", [False, True])
def test_a_rank_that_ends_without_having_left_breaks_a_group_that_only_replays(has_left: bool) -> None:
    """No call would find it. Kernels that wait end either way; a rank that has left in order breaks nothing."""
    record: Any = Record()
    health: Any = Health(has_left=has_left)
    failures: list[bool] = []
    watch = DeathWatch(record, health, lambda: failures.append(record.was_aborted.is_set()))
    assert record.was_aborted.wait(SOON_S)
    watch.stop()
    assert failures == ([] if has_left else [True])


@pytest.mark.guarantee("D54")
def test_the_others_are_watched_after_one_that_has_left_has_ended() -> None:
    """The end of the first ends kernels that wait, and that of another one breaks the group."""
    record: Any = Record()
    health: Any = Health(has_left=True)
    has_failed = threading.Event()
    watch = DeathWatch(record, health, has_failed.set)
    assert record.was_aborted.wait(SOON_S)
    assert not has_failed.wait(0.2)
    health._gone = (10,)
    assert has_failed.wait(SOON_S)
    watch.stop()
