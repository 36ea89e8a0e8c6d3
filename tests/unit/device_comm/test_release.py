"""What becomes of memory that peers may have open if other work on the device takes long, and what is logged."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from device_comm.cuda.custom.peer_memory import PeerMemory
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.custom.release import release_together
from tests.fake_cuda import FakeDriver, violations
from tests.log_records import fields_of
from tests.queues import background
from tests.waiting import wait_until

BUSY = (
    "a step: other work on the device takes longer than 1 s; memory is freed behind it, but for what peers may have "
    "open by CUDA IPC"
)
KEPT = "teardown of peer memory: 2048 bytes stay allocated until this process ends: a peer may have them open"


class Region:
    """A region of a rank that hears only itself, and how it is released."""

    def __init__(self, directory: Path) -> None:
        self.driver = FakeDriver(directory, 0)
        self.peers = PeerExchange(lambda own: [own, own], 0, (0, 1))
        self.memory = PeerMemory.create(self.driver, self.peers, 2048, lambda: ())
        self.released: list[bool] = []

    def release(self) -> None:
        """Release it together with the other rank."""
        release_together(self.driver, "a step", self.peers.fields, self.peers, self.close)

    def close(self, is_together: bool) -> None:
        """Do what is done once the device is idle."""
        self.memory.close(self.peers.meet if is_together else None)
        self.released.append(is_together)


@pytest.mark.slow
@pytest.mark.guarantee("D31", "D75")
def test_on_a_busy_device_the_memory_is_kept_until_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says at once that it takes longer, another one behind the other work how much is kept."""
    region = Region(tmp_path)
    start = time.monotonic()
    with region.driver.hang():
        region.release()
        assert time.monotonic() - start >= 1.0
        assert (region.released, caplog.messages) == ([], [BUSY])
    wait_until(lambda: region.released == [False], "the thread", 10.0)
    assert caplog.messages == [BUSY, KEPT]
    assert [fields_of(record) for record in caplog.records] == [{"rank": 0}] * 2
    (left,) = region.driver.leaks()
    assert left.startswith("memory memory-")
    assert left.endswith("of 2048 bytes")
    assert violations(tmp_path) == []
    region.driver.release()


@pytest.mark.guarantee("D31")
def test_on_a_device_that_becomes_idle_in_time_the_memory_is_freed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller waits for the other work, and nothing is logged."""
    monkeypatch.setattr("device_comm.cuda.custom.release.IDLE_S", 30.0)
    region = Region(tmp_path)
    with background(region.release), region.driver.hang():
        wait_until(lambda: region.driver.calls.get("context_synchronize"), "the wait for the device", 10.0)
        time.sleep(0.05)
    assert region.released == [True]
    assert region.driver.leaks() == []
    assert caplog.messages == []
