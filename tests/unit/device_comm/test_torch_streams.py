"""Streams of torch, by their numbers, where no CUDA is: torch's functions are replaced."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from device_comm.nccl.streams import TorchStreams

DEVICE = torch.device("cuda", 1)


class Questions:
    """Stands for torch's streams and events: notes whether each question is asked in the relaxed mode."""

    def __init__(self) -> None:
        self.is_relaxed = False
        self.asked: list[bool] = []
        self.found: list[tuple[int, int]] = []

    def of(self, number: int, device: int) -> Questions:
        """Stand for `torch.cuda.get_stream_from_external`."""
        self.found.append((number, device))
        return self

    def event(self) -> Questions:
        """Stand for `torch.cuda.Event`."""
        return self

    def record(self, stream: object) -> None:
        """Stand for an event's."""

    def query(self) -> bool:
        """Stand for that of a stream and of an event."""
        self.asked.append(self.is_relaxed)
        return False

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Note the mode."""
        self.is_relaxed = True
        yield
        self.is_relaxed = False


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> Questions:
    """Return what stands for torch's streams and events."""
    made = Questions()
    monkeypatch.setattr(torch.cuda, "get_stream_from_external", made.of)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return made


@pytest.mark.parametrize("number", [0, 0x7000])
def test_a_stream_is_found_by_its_number(questions: Questions, number: int) -> None:
    """The default stream too, whose number is 0, and for which `torch.cuda.ExternalStream` makes a new stream."""
    TorchStreams(DEVICE, questions.relaxed).is_idle(number)
    assert questions.found == [(number, 1)]


def test_a_question_spoils_no_capture(questions: Questions) -> None:
    """Streams and events are asked in the relaxed mode, which ends with the question."""
    streams = TorchStreams(DEVICE, questions.relaxed)
    assert not streams.is_idle(0)
    assert not streams.record(0).is_done()
    assert questions.asked == [True, True]
    assert not questions.is_relaxed
