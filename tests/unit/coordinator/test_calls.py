"""The gate of a group: order, health, deadline, refusal and hand-over, without processes."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from coordinator.calls import Calls
from coordinator.testing import FakeGroupCoordinator
from coordinator.testing.fake_planes import SilentStatusStore
from device_comm.async_calls import CallHandle
from device_comm.health import GroupHealth
from shm_broadcast.errors import CapabilityError, ClosedError, GroupBrokenError, PeerLostError, UsageError
from shm_broadcast.liveness import PeerWatch, this_process
from shm_broadcast.reports.arrivals import Arrival
from tests.handlers import alarm, handling_at
from tests.log_records import fields_of
from tests.waiting import sleeping_in, wait_until

CPU = torch.device("cpu")
PROMPT_S = 20.0


@pytest.fixture
def health() -> GroupHealth:
    """The state of a group of two whose other rank does not exist."""
    return GroupHealth("calls:0", 0, (0, 1), PeerWatch(this_process(), {}), SilentStatusStore())


@pytest.fixture
def calls(health: GroupHealth) -> Iterator[Calls]:
    """The gate of that group."""
    gate = Calls(health, CPU)
    yield gate
    gate.close(5.0)


def double(tensor: torch.Tensor, *, timeout_s: float | None = None) -> torch.Tensor:
    """Stand for a collective."""
    del timeout_s
    return 2 * tensor


def test_a_call_gets_its_arguments_and_its_deadline(calls: Calls) -> None:
    """`run` passes what it is given, and returns what the target returns."""
    found = calls.run("all_reduce", lambda *args, timeout_s: (args, timeout_s), 1, "sum", timeout_s=2.5)
    assert found == ((1, "sum"), 2.5)


@pytest.mark.parametrize("timeout_s", [0, -1.0, True, "1"])
def test_a_deadline_that_is_none_is_refused_by_both_forms(calls: Calls, timeout_s: float) -> None:
    """A deadline must be a positive number of seconds, whichever way a call is made."""
    with pytest.raises(UsageError, match="timeout_s"):
        calls.run("all_reduce", double, torch.ones(1), timeout_s=timeout_s)
    with pytest.raises(UsageError, match="timeout_s"):
        calls.run("all_reduce", double, torch.ones(1), timeout_s=timeout_s, async_op=True)
    with pytest.raises(UsageError, match="timeout_s"), calls.call("send", timeout_s, in_line=False):
        pytest.fail("the block of a refused call was entered")


def test_no_call_passes_when_the_group_is_broken_or_closed(calls: Calls, health: GroupHealth) -> None:
    """The target of a refused call is not called."""
    health.fail(PeerLostError("rank 1 is gone", peers=[1]))
    with pytest.raises(GroupBrokenError):
        calls.run("all_reduce", pytest.fail, "called")
    with pytest.raises(GroupBrokenError):
        calls.run("all_reduce", pytest.fail, torch.ones(1), async_op=True)
    assert health.close()
    with pytest.raises(ClosedError), calls.call("recv", in_line=False):
        pytest.fail("the block of a closed group was entered")


def test_a_collective_waits_for_the_line_and_a_transfer_does_not(calls: Calls) -> None:
    """What must keep its order waits for open calls; a message that an open call may need does not."""
    begin, order = threading.Event(), []

    def slow(*, timeout_s: float | None) -> None:
        del timeout_s
        assert begin.wait(10.0)
        order.append("open")

    handle = calls.run("barrier", slow, async_op=True)
    assert isinstance(handle, CallHandle)
    with calls.call("send", in_line=False):
        order.append("transfer")
    begin.set()
    with calls.call("all_gather_object"):
        order.append("collective")
    assert order == ["transfer", "open", "collective"]


def left_of_call(calls: Calls) -> float | None:
    with calls.call("all_gather_object", 30.0) as left_s:
        return left_s


@pytest.mark.guarantee("D66")
@pytest.mark.parametrize(
    "call",
    [
        lambda calls: calls.run("all_reduce", lambda *, timeout_s: timeout_s, timeout_s=30.0),
        left_of_call,
        lambda calls: calls.receive("gather_object", 30.0, lambda limit_s: limit_s, in_line=True),
    ],
)
def test_the_wait_for_open_calls_counts_towards_the_deadline(
    calls: Calls, call: Callable[[Calls], float]
) -> None:
    """Whichever way the call is made, it gets what is left."""

    def slow(*, timeout_s: float | None) -> None:
        del timeout_s
        wait_until(lambda: sleeping_in("settle"), "the blocking call")
        time.sleep(0.3)

    calls.run("barrier", slow, async_op=True)
    assert call(calls) <= 29.7


@pytest.mark.guarantee("D66")
@pytest.mark.parametrize(
    "name", ["all_reduce", "all_reduce_into_output", "all_reduce_", "all_gather", "barrier"]
)
def test_the_shortest_calls_get_what_open_calls_have_left(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """They pass the gate by themselves."""
    limits: list[float | None] = []

    def made(*_: object, timeout_s: float | None) -> None:
        limits.append(timeout_s)

    monkeypatch.setattr(Calls, "enter", lambda *_: 7.0)
    group = FakeGroupCoordinator(rank=0, world_size=2)
    if name == "barrier":
        monkeypatch.setattr(group._host, name, lambda limit_s: made(timeout_s=limit_s))
        group.barrier(30.0)
    else:
        monkeypatch.setattr(group.device_communicator, name, made)
        how = {"out": torch.ones(1)} if name.endswith("output") else {}
        getattr(group, name.removesuffix("_into_output"))(torch.ones(1), timeout_s=30.0, **how)
    assert limits == [7.0]


def test_what_is_no_tensor_is_refused_before_the_hand_over(calls: Calls) -> None:
    """A handle is given out for tensors of the group's device only."""
    for argument in ("x", [torch.ones(1), 2]):
        with pytest.raises(UsageError, match="tensor"):
            calls.run("all_reduce", double, argument, async_op=True)
    handle = calls.run("all_reduce", double, torch.ones(2), async_op=True)
    assert isinstance(handle, CallHandle)
    assert handle.wait().tolist() == [2.0, 2.0]


@pytest.mark.guarantee("D10")
def test_an_error_of_a_handler_in_the_hand_over_takes_no_number(
    health: GroupHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call may be in the line already, with a number of its own; the error says nothing about a thread."""
    taken: list[object] = []
    monkeypatch.setattr(Calls, "_take_number", lambda *given: taken.append(given))

    def strike() -> None:
        raise CapabilityError("of a handler")

    step, comes = 0, True
    while comes:
        gate = Calls(health, CPU)

        def hand_over(gate: Calls = gate) -> None:
            gate.run("all_reduce", double, torch.ones(1), async_op=True)

        with suppress(CapabilityError):
            comes = handling_at(
                step, hand_over, strike, ("device_comm/async_calls.py", "coordinator/calls.py")
            )
        assert not taken, step
        gate.close(5.0)
        step += 1
    assert step > 20


@pytest.mark.guarantee("D40")
def test_a_handle_for_a_call_that_is_queued_later_is_refused(health: GroupHealth) -> None:
    """Nothing is called, and the group is intact. The host plane and blocking calls are served."""
    is_collecting = True
    gate = Calls(health, CPU, is_collecting=lambda: is_collecting)
    with pytest.raises(UsageError, match=r"all_reduce.*group\(\).*without async_op"):
        gate.run("all_reduce", pytest.fail, torch.ones(1), async_op=True)
    assert gate.run("all_reduce", double, torch.ones(1)).tolist() == [2.0]
    on_host = gate.run("barrier", lambda *, timeout_s: timeout_s, async_op=True, on_host=True, timeout_s=9.0)
    assert isinstance(on_host, CallHandle)
    assert on_host.wait() == 9.0
    is_collecting = False
    handle = gate.run("all_reduce", double, torch.ones(1), async_op=True)
    assert isinstance(handle, CallHandle)
    assert handle.wait().tolist() == [2.0]
    gate.close(5.0)


@pytest.mark.guarantee("D40")
def test_a_group_asks_its_communicator_whether_it_collects_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The refusal is that of the group's own collectives."""
    with FakeGroupCoordinator(0, 2) as group:
        monkeypatch.setattr(type(group.device_communicator), "is_collecting", True)
        with pytest.raises(UsageError, match="without async_op"):
            group.all_reduce(torch.ones(1), async_op=True)
        assert group.all_reduce(torch.ones(1)).numel() == 1


def test_every_refusal_is_noted_in_one_place(calls: Calls, caplog: pytest.LogCaptureFixture) -> None:
    """A refused call is logged with its name, in whichever form it was made."""

    def refuse(*args: object, timeout_s: float | None = None) -> None:
        del args, timeout_s
        raise UsageError("wrong")

    caplog.set_level(logging.DEBUG, "coordinator.calls")
    with pytest.raises(UsageError):
        calls.run("all_reduce", refuse, torch.ones(1))
    with pytest.raises(UsageError), calls.call("send_object", in_line=False):
        refuse()
    handle = calls.run("all_gather", refuse, torch.ones(1), async_op=True)
    assert isinstance(handle, CallHandle)
    with pytest.raises(UsageError):
        handle.wait()
    refused = [record.getMessage().split(" ")[0] for record in caplog.records]
    assert refused == ["all_reduce", "send_object", "all_gather"]
    fields = [fields_of(record) for record in caplog.records]
    assert fields == [{"group": "calls:0", "rank": 0, "call": name} for name in refused]


@pytest.mark.guarantee("D69")
def test_what_a_signal_handler_raises_refuses_no_call(calls: Calls, health: GroupHealth) -> None:
    """A handler may let the error of a call of its own through; the interrupted call may be complete by then."""
    refused: list[str] = []
    health.attach("device", Refusing(refused))

    def handler() -> None:
        raise UsageError("of a call in the handler")

    def target(*, timeout_s: float | None = None) -> None:
        del timeout_s
        with alarm(0.01, handler):
            time.sleep(PROMPT_S)

    with pytest.raises(UsageError, match="of a call in the handler"):
        calls.run("barrier", target)
    assert refused == []
    with pytest.raises(UsageError, match="timeout_s"):
        calls.run("barrier", target, timeout_s=-1)
    assert len(refused) == 1


class Refusing:
    """A plane that notes what is refused."""

    def __init__(self, refused: list[str]) -> None:
        self._refused = refused

    def refuse(self, reason: str) -> None:
        self._refused.append(reason)

    def catch_up(self) -> None:
        """Nothing waits."""

    def last_calls(self) -> dict[int, Arrival]:
        return {}
