"""A receive of the torch backend into a tensor that is not contiguous."""

import threading
from itertools import count

import torch

from coordinator.torch_interop.works import Landing
from device_comm.handles import CompletedHandle
from tests.handlers import handling_at


def test_a_signal_handler_may_ask_for_a_receive_that_is_being_finished() -> None:
    """At every place: the tensor is filled once the call returns, and nobody waits for the call that is interrupted."""
    steps = list[int]()

    def step_through() -> None:
        for step in count():
            into = torch.zeros(4, 2)[:, 0]
            landing = Landing(CompletedHandle(), into, torch.ones(4))
            comes = handling_at(step, landing.wait, landing.is_completed, ("torch_interop/works.py",))
            assert into.tolist() == [1.0] * 4
            assert landing.is_completed()
            if not comes:
                steps.append(step)
                return

    thread = threading.Thread(target=step_through, daemon=True)
    thread.start()
    thread.join(30.0)
    assert steps, "a handler waits for the call that it has interrupted"
    assert steps[0] > 2
