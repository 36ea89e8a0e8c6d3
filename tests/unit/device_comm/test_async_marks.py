"""Asynchronous calls on an accelerator: what they have queued, and which streams wait for it."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from device_comm.async_calls import CallHandle, CallLine, StreamMark
from device_comm.health import GroupHealth, StatusStore
from shm_broadcast.liveness import PeerWatch
from tests.channels import QuietStore, QuietWatch


class Device:
    """A device with streams, of which one is current. Work is done when the test says so."""

    def __init__(self) -> None:
        self.current = 1
        self.queued: list[tuple[int, str]] = []
        self.waits: list[tuple[int, int]] = []
        self.done: set[int] = set()

    def queue(self, name: str) -> str:
        """Queue work on the current stream."""
        self.queued.append((self.current, name))
        return name

    def mark(self) -> Mark:
        """Mark the current stream."""
        return Mark(self)


class Mark:
    """A place in a stream's order."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.current

    def wait(self) -> None:
        """Let the current stream wait."""
        self.device.waits.append((self.stream, self.device.current))

    def is_reached(self) -> bool:
        """Return whether the test says so."""
        return self.stream in self.device.done


def line_of(device: Device) -> CallLine:
    """Return the asynchronous calls of a group on a device."""
    health = GroupHealth(
        "tp:0", 0, [0, 1], cast("PeerWatch", QuietWatch()), cast("StatusStore", QuietStore())
    )
    return CallLine(health, torch.device("cuda", 0), mark=device.mark)


@pytest.mark.guarantee("D41")
def test_a_stream_that_waits_for_a_handle_waits_for_the_stream_of_the_call() -> None:
    """Also another one than that on which the call was made, which nothing orders otherwise; and as often as asked."""
    device = Device()
    handle = line_of(device).submit("all_reduce", lambda: device.queue("sum"), at_once=True)
    assert device.queued == [(1, "sum")]
    assert device.waits == []
    device.current = 2
    assert handle.wait() == "sum"
    device.current = 3
    assert handle.wait() == "sum"
    assert device.waits == [(1, 2), (1, 3)]


@pytest.mark.guarantee("D41")
def test_a_call_on_a_device_is_complete_when_the_device_is_done() -> None:
    """The host has made it before."""
    device = Device()
    handle: CallHandle[str] = line_of(device).submit("all_reduce", lambda: device.queue("sum"), at_once=True)
    assert handle.join()
    assert not handle.is_completed()
    device.done.add(1)
    assert handle.is_completed()


def test_a_call_that_has_failed_marks_nothing() -> None:
    """Its error is raised, also by the question whether it is complete."""
    device = Device()

    def fail() -> None:
        raise ValueError("refused")

    handle = line_of(device).submit("all_reduce", fail, at_once=True)
    for ask in (handle.wait, handle.is_completed):
        with pytest.raises(ValueError, match="refused"):
            ask()
    assert device.waits == []


def test_a_mark_of_torch_asks_the_module_of_its_device() -> None:
    """A CPU has the same functions as an accelerator, for work that is always done."""
    mark = StreamMark(torch.device("cpu"))
    mark.wait()
    assert mark.is_reached()
