"""Calls on objects and sends that need no second process."""

import threading
import time
from collections import UserList
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coordinator.host.open_sends import OpenSends
from coordinator.queues.broadcast_order import BroadcastOrder
from coordinator.testing.fakes import FakeGroupCoordinator
from device_comm.handles import Handle
from shm_broadcast.errors import DecodeError, UsageError


@pytest.mark.parametrize("src", [None, True, 0.0, "0", -1, 2])
def test_a_source_that_is_no_rank_is_refused(src: int) -> None:
    """This holds for a group without a queue too."""
    with FakeGroupCoordinator(0, 2) as group, pytest.raises(UsageError, match="src"):
        group.broadcast_object("an object", src)


def test_both_forms_of_a_call_take_the_same_sequences() -> None:
    """The asynchronous form takes every sequence of tensors, and refuses a sequence of anything else."""
    with FakeGroupCoordinator(0, 2) as group:
        tensors = UserList([torch.ones(2), torch.zeros(1)])
        blocking = group.all_gatherv(tensors, 0)
        later = group.all_gatherv(tensors, 0, async_op=True).wait()
        assert [each.tolist() for each in later] == [each.tolist() for each in blocking]
        with pytest.raises(UsageError, match="tensor"):
            group.all_gatherv("text", 0, async_op=True)  # type: ignore[call-overload]


@pytest.mark.guarantee("D67")
@pytest.mark.parametrize("later", [1, 0])
def test_the_message_of_a_broadcast_that_could_not_be_decoded_is_dropped(later: int) -> None:
    """It comes behind the nonsense, or the source is another rank than was asked; the next call has its own object."""
    health: Any = SimpleNamespace(where=lambda operation: f"{operation} on 'tp:0'", ranks=(0, 1, 2))
    order = BroadcastOrder(health)
    with pytest.raises(DecodeError, match="rank 1 sent no message"):
        order.receive(1, lambda: "nonsense")
    messages = iter([(1, False, "first"), (2, False, "second")])
    assert order.receive(later, lambda: next(messages)) == "second"


class SlowHandle(Handle):
    """A send that never completes."""

    def is_completed(self) -> bool:
        """Let the other thread run."""
        time.sleep(0.001)
        return False

    def wait(self) -> None:
        """Return at once."""


def test_a_send_that_starts_while_the_group_is_destroyed_does_no_harm() -> None:
    """The flush waits for the sends that were open when it began, up to its deadline."""
    sends = OpenSends()
    for _ in range(20):
        sends.keep(SlowHandle())
    others = [threading.Timer(0.005 * number, sends.keep, [SlowHandle()]) for number in range(1, 10)]
    for each in others:
        each.start()
    sends.flush(0.1)
    for each in others:
        each.join()
