"""Asynchronous calls on an accelerator: what they have queued, and which streams wait for it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import pytest
import torch

from device_comm.async_calls import CallHandle, CallLine, StreamMark, tensors_of
from device_comm.derived_reductions import premul_sum
from device_comm.health import GroupHealth, StatusStore
from shm_broadcast.errors import UsageError
from shm_broadcast.liveness import PeerWatch
from tests.channels import QuietStore, QuietWatch
from tests.log_records import fields_of


class Device:
    """A device with streams, of which one is current. Work is done when the test says so."""

    def __init__(self) -> None:
        self.current = 1
        self.queued: list[tuple[int, str]] = []
        self.waits: list[tuple[int, int]] = []
        self.done: set[int] = set()
        # What the device's runtime says to an order between streams that it refuses.
        self.refusal = ""

    def queue(self, name: str) -> str:
        """Queue work on the current stream."""
        self.queued.append((self.current, name))
        return name

    def entered(self, call: object) -> AbstractContextManager[None]:
        """Stay on the current stream."""
        del call
        return nullcontext()

    def mark(self, result: object) -> Mark:
        """Mark the current stream."""
        del result
        return Mark(self)


class Mark:
    """A place in a stream's order."""

    def __init__(self, device: Device) -> None:
        self.device, self.stream = device, device.current

    def wait(self) -> None:
        """Let the current stream wait, or raise as torch."""
        if self.device.refusal:
            raise RuntimeError(self.device.refusal)
        self.device.waits.append((self.stream, self.device.current))

    def is_reached(self) -> bool:
        """Return whether the test says so, or raise as torch."""
        if self.device.refusal:
            raise RuntimeError(self.device.refusal)
        return self.stream in self.device.done

    def behind(self) -> AbstractContextManager[None]:
        """Let the current stream wait."""
        self.wait()
        return nullcontext()


def line_of(device: Device, torch_device: torch.device = torch.device("cuda", 0)) -> CallLine:  # noqa: B008
    """Return the asynchronous calls of a group on a device."""
    health = GroupHealth(
        "tp:0", 0, [0, 1], cast("PeerWatch", QuietWatch()), cast("StatusStore", QuietStore())
    )
    return CallLine(health, torch_device, aside=device)


@pytest.mark.guarantee("D40")
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


@pytest.mark.guarantee("D40")
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


@pytest.mark.guarantee("D40")
def test_a_future_that_cannot_order_the_stream_holds_the_error() -> None:
    """As for a call before a capture, of which a future is asked for in it. The future completes, and so do others."""
    device = Device()
    # A future of torch for a device needs a build of torch that has it.
    line = line_of(device, torch.device("cpu"))
    handle = line.submit("all_reduce", lambda: device.queue("sum"), at_once=True)
    device.refusal = "operation would make the legacy stream depend on a capturing stream"
    future = handle.get_future()
    assert future.done()
    with pytest.raises(RuntimeError, match="depend on a capturing stream"):
        future.wait()
    with pytest.raises(RuntimeError, match="depend on a capturing stream"):
        handle.wait()
    device.refusal = ""
    # The call itself has not failed.
    assert handle.wait() == "sum"
    assert line.submit("all_reduce", lambda: device.queue("next"), at_once=True).get_future().wait() == "next"


@pytest.mark.guarantee("D42")
def test_a_future_that_the_application_completed_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The call goes on, and its handle has its result."""
    line = line_of(Device(), torch.device("cpu"))
    handle = CallHandle(line._health, "all_reduce", lambda: "sum", torch.device("cpu"))
    future = handle.get_future()
    future.set_result("the application's")
    assert handle.perform() is None
    handle.finish()
    assert (future.wait(), handle.wait()) == ("the application's", "sum")
    assert "completed its future already" in caplog.text
    (record,) = caplog.records
    assert fields_of(record) == {"group": line._health.name, "rank": 0, "call": "all_reduce"}


class TorchStreams:
    """Stands for torch's module of an accelerator: notes what is done with events and streams, in order."""

    def __init__(self) -> None:
        self.current, self.is_done, self.is_captured = 1, False, False
        self.steps: list[tuple[str, object]] = []

    def current_stream(self, device: torch.device) -> tuple[torch.device, int]:
        """Return the stream that is current on a device."""
        return device, self.current

    def is_current_stream_capturing(self) -> bool:
        """Return whether the test says that the current stream is captured."""
        return self.is_captured

    def Event(self) -> TorchEvent:  # noqa: N802 - torch's name
        """Return a new event."""
        return TorchEvent(self)


class TorchEvent:
    """Stands for torch's event."""

    def __init__(self, streams: TorchStreams) -> None:
        self.streams = streams

    def record(self, stream: object) -> None:
        """Note it."""
        self.streams.steps.append(("record", stream))

    def wait(self, stream: object) -> None:
        """Note it."""
        self.streams.steps.append(("wait", stream))

    def query(self) -> bool:
        """Return whether the test says that the work is done."""
        return self.streams.is_done


@pytest.mark.guarantee("D40")
def test_a_mark_of_torch_is_behind_the_work_and_before_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event is recorded once, on the stream of the call, and each stream that waits does so for that event."""
    device, streams = torch.device("cuda", 1), TorchStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda asked: streams if asked is device else None)
    mark = StreamMark(device)
    assert streams.steps == [("record", (device, 1))]
    streams.current = 2
    mark.wait()
    mark.wait()
    assert streams.steps[1:] == [("wait", (device, 2)), ("wait", (device, 2))]
    assert not mark.is_reached()
    streams.is_done = True
    assert mark.is_reached()
    with mark.behind():
        assert streams.steps[3:] == [("wait", (device, 2))]


@pytest.mark.guarantee("D76")
@pytest.mark.parametrize("was_captured", [False, True])
def test_a_mark_of_torch_spoils_no_capture(monkeypatch: pytest.MonkeyPatch, was_captured: bool) -> None:
    """It refuses to order a captured stream behind a call of none, and the other way round, and to be asked in one."""
    device, streams = torch.device("cuda", 1), TorchStreams()
    monkeypatch.setattr(torch, "get_device_module", lambda asked: streams if asked is device else None)
    streams.is_captured = was_captured
    mark = StreamMark(device)
    mark.wait()
    streams.is_captured = not was_captured
    steps = list(streams.steps)
    with pytest.raises(UsageError, match="captured"):
        mark.wait()
    with pytest.raises(UsageError, match="is_completed"):
        mark.is_reached()
    assert streams.steps == steps


def test_every_tensor_of_a_call_is_found() -> None:
    """In its arguments, in lists, in partials within partials, in a reduction with a factor, in a sparse tensor."""
    tensors = [torch.ones(each) for each in range(1, 7)]
    inner = partial(max, tensors[0], key=tensors[1])
    call = partial(inner, [tensors[2], (tensors[3], 5)], op=premul_sum(tensors[4][:1]), name="x", none=None)
    found = [each.data_ptr() for each in tensors_of(call)]
    assert sorted(found) == sorted(each.data_ptr() for each in tensors[:5])
    sparse = torch.ones(3).to_sparse()
    assert [each.data_ptr() for each in tensors_of(sparse)] == [
        each.data_ptr() for each in (sparse.indices(), sparse.values())
    ]
