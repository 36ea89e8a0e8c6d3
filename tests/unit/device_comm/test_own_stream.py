"""The stream on which memory is written while a group is built."""

from pathlib import Path

import pytest

from device_comm.cuda.custom.own_stream import own_stream
from tests.fake_cuda import FakeDriver


class Recorded(FakeDriver):
    """A driver that remembers the calls on streams."""

    def __init__(self, directory: Path) -> None:
        """Remember nothing yet."""
        super().__init__(directory, 0)
        self.done: list[tuple[str, int]] = []

    def memset_d32(self, address: int, value: int, count: int, stream: int) -> None:
        """Write."""
        super().memset_d32(address, value, count, stream)
        self.done.append(("write", stream))

    def stream_synchronize(self, stream: int) -> None:
        """Wait."""
        super().stream_synchronize(stream)
        self.done.append(("wait", stream))

    def stream_destroy(self, stream: int) -> None:
        """Destroy."""
        super().stream_destroy(stream)
        self.done.append(("destroy", stream))


def test_what_was_queued_is_awaited_before_the_next_step(tmp_path: Path) -> None:
    """The wait is for that stream alone: another group's kernel on the device may spin meanwhile."""
    driver = Recorded(tmp_path)
    memory = driver.mem_alloc(64)
    with driver.hang(), own_stream(driver) as stream:
        driver.memset_d32(memory, 5, 16, stream)
    assert driver.done == [("write", stream), ("wait", stream), ("destroy", stream)]
    driver.mem_free(memory)
    assert driver.leaks() == []


def test_a_stream_of_a_step_that_failed_is_destroyed(tmp_path: Path) -> None:
    """The error of the step is raised; nothing is waited for."""
    driver = Recorded(tmp_path)
    with pytest.raises(ZeroDivisionError), own_stream(driver):
        raise ZeroDivisionError
    assert [name for name, _ in driver.done] == ["destroy"]
    assert driver.leaks() == []
