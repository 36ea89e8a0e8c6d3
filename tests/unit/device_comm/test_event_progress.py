"""One event tells whether the queued calls of NCCL are complete."""

from pathlib import Path

from device_comm.cuda.event_progress import EventProgress
from tests.fake_cuda import FakeDriver


def test_a_captured_call_is_not_marked(tmp_path: Path) -> None:
    """It runs in each replay. The mark stays behind the calls that are queued, which still have their deadline."""
    driver = FakeDriver(tmp_path, 0)
    progress = EventProgress(lambda: driver, {})
    assert progress.is_done()
    driver.unfinished = 1 << driver.queue(7, "sum")
    progress.mark(7)
    assert not progress.is_done()
    driver.begin_capture(8)
    driver.queue(8, "captured sum")
    progress.mark(8)
    assert not progress.is_done()
    driver.end_capture(8)
    driver.unfinished = 0
    assert progress.is_done()
    progress.close()
    assert driver.leaks() == []
