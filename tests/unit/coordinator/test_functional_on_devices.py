"""Functional calls that overlap, on tensors of an accelerator, whose progress may not be asked for in a capture."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from coordinator import functional
from coordinator.group import GroupCoordinator
from device_comm.async_calls import CallHandle
from shm_broadcast.errors import UsageError

RESULT = torch.full((3,), 2.0, device="meta")


class Queued:
    """The handle of a call that was queued on an accelerator, or refused; nobody may ask for its progress."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.waits = error, 0

    def failure(self) -> Exception | None:
        """Return why the call was refused."""
        return self.error

    def is_completed(self) -> bool:
        """Fail, as in a capture."""
        raise UsageError("is_completed: a capture allows no such question")

    def wait(self) -> torch.Tensor:
        """Order the current stream behind the call."""
        self.waits += 1
        return RESULT


class Group:
    """A group of two ranks with one method."""

    world_size = 2

    def __init__(self, handle: Queued) -> None:
        self.handle = handle

    def all_reduce(self, tensor: torch.Tensor, op: object, *, async_op: bool) -> CallHandle[torch.Tensor]:
        """Return the handle."""
        assert async_op
        return cast("CallHandle[torch.Tensor]", self.handle)


def reduced(monkeypatch: pytest.MonkeyPatch, handle: Queued) -> torch.Tensor:
    """Call `all_reduce` on a tensor that is not on the CPU."""
    monkeypatch.setattr(functional, "find_group", lambda group: cast("GroupCoordinator", Group(handle)))
    return functional.all_reduce(torch.ones(3, device="meta"), "sum", "tp:0", overlap=True)


def test_a_call_that_overlaps_asks_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be captured: its first use orders the stream behind it, and nothing asks whether it is complete."""
    handle = Queued()
    made = reduced(monkeypatch, handle)
    assert handle.waits == 0
    assert functional.wait_tensor(made) is RESULT
    assert handle.waits == 1


def test_a_refused_call_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the error is the caller's, it comes out of the call and not out of the first use of its result."""
    with pytest.raises(UsageError, match="wrong dtype"):
        reduced(monkeypatch, Queued(UsageError("wrong dtype")))
