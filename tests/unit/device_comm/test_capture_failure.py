"""A rank whose capture has failed tells the others, or breaks the group; it raises nothing itself."""

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from device_comm.cuda.custom import capture_failure
from device_comm.cuda.custom.capture_failure import tell_failure
from shm_broadcast.errors import CapabilityError, DecodeError, DisagreementError
from shm_broadcast.reports.failure_record import FailureRecord
from shm_broadcast.reports.log_fields import LogFields, log_fields
from tests.log_records import fields_of


class Health:
    """What `tell_failure` uses of a group's health."""

    def __init__(self) -> None:
        """Start healthy."""
        self.rank = 5
        self.broken = threading.Event()
        self.failures: list[tuple[BaseException, str, FailureRecord]] = []

    @property
    def is_broken(self) -> bool:
        return self.broken.is_set()

    def where(self, operation: str) -> str:
        return f"{operation} on 'tp:0'"

    def log_fields(self, call: str) -> LogFields:
        return log_fields(group="tp:0", rank=self.rank, call=call)

    def fail(self, error: BaseException, what: str, failure_record: FailureRecord) -> None:
        self.failures.append((error, what, failure_record))
        self.broken.set()


class Inputs:
    """Captured inputs, whose exchange ends as `ends` says, one after the other."""

    def __init__(self, *ends: BaseException | Callable[[], None]) -> None:
        """Take the ends of the exchanges."""
        self.ends = list(ends)
        self.told: list[str] = []

    def finish(self, failure: str) -> None:
        self.told.append(failure)
        end = self.ends.pop(0)
        if isinstance(end, BaseException):
            raise end
        end()


ERROR = RuntimeError("no memory")


def tell(inputs: Inputs, timeout_s: float = 20.0) -> Health:
    """Tell the other ranks of `ERROR`; return the health afterwards."""
    health: Any = Health()
    either: Any = inputs
    tell_failure(either, health, ERROR, timeout_s)
    assert not any(isinstance(each, threading.Timer) for each in threading.enumerate())
    result: Health = health
    return result


def test_ranks_that_were_told_keep_their_group() -> None:
    """The exchange raises on this rank too. A call of another rank that it meets first is not the end."""
    inputs = Inputs(DisagreementError("another call"), CapabilityError("told"))
    assert tell(inputs).failures == []
    assert inputs.told == ["its graph capture has failed: RuntimeError: no memory"] * 2


@pytest.mark.parametrize("trouble", [DecodeError("nonsense"), TypeError("no bytes")])
def test_ranks_that_could_not_be_told_lose_their_group(
    trouble: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """The record names the rank and its exception. What went wrong is logged, as the caller raises that exception."""
    with caplog.at_level(logging.WARNING):
        ((error, what, record),) = tell(Inputs(trouble)).failures
    assert (error, what) == (ERROR, "graph_capture")
    assert (record.kind, record.ranks, record.by) == ("interrupted", (5,), 5)
    assert record.detail == "5 (its graph capture has failed: RuntimeError: no memory)"
    assert str(trouble) in caplog.text
    assert fields_of(caplog.records[0]) == {"group": "tp:0", "rank": 5, "call": "graph_capture"}


def test_ranks_that_do_not_come_lose_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the time for it, or half the group's deadline, the group is broken, which ends the exchange."""
    for limit_s, timeout_s in ((0.1, 20.0), (20.0, 0.2)):
        monkeypatch.setattr(capture_failure, "TELL_WITHIN_S", limit_s)
        health: Any = Health()

        def waits(health: Any = health) -> None:
            assert health.broken.wait(10.0)
            raise DecodeError("the group was broken")

        inputs: Any = Inputs(waits)
        start = time.monotonic()
        tell_failure(inputs, health, ERROR, timeout_s)
        assert 0.1 <= time.monotonic() - start < 5.0
        assert [failure[0] for failure in health.failures] == [ERROR]
