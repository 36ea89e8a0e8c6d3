"""Ranks that others have reported as lost, for the waits of this process."""

import threading
from collections.abc import Iterator

import pytest

from coordinator.meeting import losses
from shm_broadcast.liveness import PeerWatch, this_process


@pytest.fixture(autouse=True)
def _nothing_is_lost() -> Iterator[None]:
    losses.forget_losses()
    yield
    losses.forget_losses()


def test_a_handler_may_report_a_loss_while_one_is_reported() -> None:
    """It runs on the thread that it has interrupted, which must not wait for itself."""

    def interrupted() -> None:
        with losses._lock:  # where a signal handler can run
            losses.report_loss(1, "killed")

    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive()


def test_all_known_losses_are_told_to_a_new_wait() -> None:
    """Those of its own ranks, with how each was lost."""
    for rank in (1, 2, 5):
        losses.report_loss(rank, f"killed, says {rank}")
    watch = PeerWatch(this_process(), {})
    try:
        losses.listen_for_losses(watch, [0, 1, 2, 3])
        assert watch.lost() == (1, 2)
        assert watch.reported(2) == "killed, says 2"
        losses.report_loss(3, "gone")
        assert watch.lost() == (1, 2, 3)
    finally:
        watch.close()
