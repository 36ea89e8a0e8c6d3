"""A time-out may be a number or a timedelta, in every public function, and one place converts it."""

import inspect
from datetime import timedelta
from typing import Any

import pytest

from coordinator import GroupCoordinator
from coordinator.parallel_state import init_distributed_environment
from coordinator.settings import CoordinatorSettings
from device_comm.async_calls import CallHandle
from shm_broadcast.errors import CommTimeoutError, SettingsError, UsageError
from shm_broadcast.queue import QueueReader, QueueWriter, dequeue_any
from shm_broadcast.timeouts import seconds


@pytest.mark.parametrize(
    ("given", "found"),
    [(None, None), (60, 60.0), (0.5, 0.5), (timedelta(minutes=2), 120.0), (float("inf"), float("inf"))],
)
def test_a_timeout_is_converted_to_seconds(given: object, found: float | None) -> None:
    """The result is a float, or None for the default."""
    assert seconds(given) == found
    assert found is None or type(seconds(given)) is float


@pytest.mark.parametrize(
    "given", [-1, -0.5, timedelta(seconds=-1), float("nan"), True, False, "60", [1], 0, timedelta(0)]
)
def test_what_is_no_timeout_is_refused(given: object) -> None:
    """The error names the argument, its value and the kinds that can be passed."""
    with pytest.raises(UsageError) as raised:
        seconds(given, "timeout")
    assert "timeout must be" in str(raised.value)
    assert repr(given) in str(raised.value)
    assert "a number of seconds, a timedelta, or None" in str(raised.value)


@pytest.mark.parametrize("given", [0, 0.0, timedelta(0)])
def test_a_call_that_can_look_without_waiting_takes_zero(given: object) -> None:
    """A queue's ends do."""
    assert seconds(given, may_be_zero=True) == 0.0


@pytest.mark.guarantee("G33")
@pytest.mark.parametrize("kind", [GroupCoordinator, QueueReader, QueueWriter, CallHandle])
def test_every_public_method_takes_all_forms(kind: type) -> None:
    """A method that is added later must not take numbers only."""
    found = {
        name: parameter.annotation
        for name, method in inspect.getmembers(kind, inspect.isroutine)
        if not name.startswith("_")
        for parameter in inspect.signature(method).parameters.values()
        if parameter.name in ("timeout_s", "timeout")
    }
    assert found
    assert [
        name
        for name, kinds in found.items()
        if "AnyTimeout" not in str(kinds) and "timedelta" not in str(kinds)
    ] == []


@pytest.mark.guarantee("G33")
def test_the_ends_of_a_queue_take_all_forms() -> None:
    """A deadline passes as the same time, whatever its form, and a wrong one changes nothing."""
    with (
        QueueWriter.create("steps", readers=[0]) as writer,
        QueueReader.open(writer.handle, writer.key, 0, timedelta(seconds=30)) as reader,
    ):
        writer.wait_until_ready(timedelta(seconds=30))
        for limit in (5, 5.0, timedelta(seconds=5), None):
            writer.enqueue("step", limit)
            assert reader.dequeue(limit) == "step"
        writer.enqueue("step")
        with reader.loan(timedelta(seconds=5)) as step:
            assert step == "step"
        for none in (timedelta(milliseconds=1), 0, timedelta(0)):
            with pytest.raises(CommTimeoutError):
                reader.dequeue(none)
            with pytest.raises(CommTimeoutError):
                dequeue_any([reader], none)
        for wrong in (-1, float("nan"), True, "5"):
            limit_: Any = wrong
            for call in (reader.dequeue, writer.wait_until_ready, writer.close):
                with pytest.raises(UsageError, match="timeout_s must be"):
                    call(limit_)
            with pytest.raises(UsageError, match="timeout_s must be"):
                writer.enqueue("step", limit_)
        writer.enqueue("still usable")
        assert reader.dequeue(5) == "still usable"


@pytest.mark.guarantee("G33")
def test_settings_and_the_start_take_all_forms() -> None:
    """A setting is kept in seconds, so that ranks that wrote it in two forms agree."""
    written: Any = timedelta(minutes=1)
    assert CoordinatorSettings(timeout_s=written) == CoordinatorSettings(timeout_s=60)
    assert CoordinatorSettings.resolve({}, create_timeout_s=written).create_timeout_s == 60.0
    negative: Any = timedelta(seconds=-1)
    with pytest.raises(SettingsError, match="timeout_s is -1.0"):
        CoordinatorSettings(timeout_s=negative)
    for wrong in (-1, float("nan"), True, timedelta(0)):
        with pytest.raises(UsageError, match="timeout must be"):
            init_distributed_environment(1, 0, "file:///nowhere", timeout=wrong)
