"""The addresses of captured inputs are written without a wait for work that has nothing to do with them."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch

from tests import fake_device
from tests.fake_cuda import violations
from tests.unit.device_comm.test_custom_end import Noted, made


class Queued(Noted):
    """A driver that also notes what is copied to the device, and which streams are waited for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.steps: list[tuple[str, int]] = []

    def memcpy_htod(self, address: int, data: bytes, stream: int = 0) -> None:
        self.steps.append(("copy", stream))
        super().memcpy_htod(address, data, stream)

    def stream_create(self) -> int:
        stream = super().stream_create()
        self.steps.append(("create", stream))
        return stream

    def stream_synchronize(self, stream: int) -> None:
        self.steps.append(("wait", stream))
        super().stream_synchronize(stream)

    def stream_destroy(self, stream: int) -> None:
        self.steps.append(("destroy", stream))
        super().stream_destroy(stream)


@pytest.mark.guarantee("D53")
def test_the_end_of_a_capture_waits_for_no_other_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of another group may wait for a rank that is here. The legacy stream would wait for most streams."""
    monkeypatch.setattr(fake_device, "MOST_HANG_S", 1.0)
    driver = Queued(tmp_path)
    custom = made(driver)
    input_, output = driver.tensor(64, torch.bfloat16), driver.tensor(64, torch.bfloat16)
    custom.begin_capture(7)
    slot = custom._inputs.note(input_.data_ptr(), 128, output.data_ptr(), 7)
    assert driver.memcpy_dtoh(slot, 64) == bytes(64)
    driver.steps.clear()
    with driver.hang():
        custom.finish_capture()
    assert violations(tmp_path) == []
    stream = driver.steps[0][1]
    assert stream not in (0, 1, 7)
    assert driver.steps == [(name, stream) for name in ("create", "copy", "wait", "destroy")]
    assert driver.memcpy_dtoh(slot, 64) == struct.pack("<8Q", *[input_.data_ptr()] * 2, *[0] * 6)
    custom.destroy(lambda: None)
    assert driver.leaks() == []
    driver.release()
