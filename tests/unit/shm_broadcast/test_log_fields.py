"""The fields of log records: their names, and what the records of a queue's ends say."""

import asyncio
import io
import json
import logging
from collections.abc import Callable
from typing import Any

import pytest
import zmq

from shm_broadcast.endpoint import RemoteKeys
from shm_broadcast.errors import CommTimeoutError, PeerLostError
from shm_broadcast.queue import QueueReader
from shm_broadcast.reports.log_fields import LogFields, log_fields
from shm_broadcast.settings import MIN_RING_BYTES
from tests.log_records import PREFIX, fields_of
from tests.queue_ranks import DEADLINE_S
from tests.queues import queue
from tests.remotes import remote_queue, until_full
from tests.security.test_remote import dialled
from tests.waiting import wait_until


class Owner:
    """The guard of an owner that has a group, and never fails."""

    def log_fields(self) -> LogFields:
        """Name a group."""
        return log_fields(group="tp:0", rank=6)

    def look(self, call: str) -> None:
        """Do nothing."""

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Do nothing."""

    def failed(self, call: str, error: PeerLostError) -> None:
        """Do nothing."""


class JsonFormatter(logging.Formatter):
    """Print a record as one line of JSON, with every field that it has."""

    def format(self, record: logging.LogRecord) -> str:
        ours = {name: value for name, value in vars(record).items() if name.startswith(PREFIX)}
        return json.dumps({"level": record.levelname, "text": record.getMessage(), **ours})


# --- names --------------------------------------------------------------------------------------------------------


def test_a_field_that_is_not_given_is_absent() -> None:
    """It is not None, so that the default values of a formatter serve."""
    assert log_fields() == {}
    assert log_fields(rank=0, call="all_reduce") == {"comm_rank": 0, "comm_call": "all_reduce"}
    every = log_fields(group="tp:0", rank=5, call="send", algorithm="nccl", queue="tp:0/1")
    assert set(every) == set(LogFields.__annotations__)
    formatter = logging.Formatter("%(comm_rank)s %(comm_queue)s", defaults={"comm_queue": "-"})
    record = logging.makeLogRecord(dict(log_fields(rank=5)))
    assert formatter.format(record) == "5 -"


def test_no_field_is_an_attribute_of_a_record() -> None:
    """`logging` would raise from the call that logs."""
    record = logging.makeLogRecord({})
    logging.Formatter("%(asctime)s").format(record)
    assert not set(LogFields.__annotations__) & set(vars(record))
    assert all(name.startswith(PREFIX) for name in LogFields.__annotations__)


def test_an_application_that_adds_the_rank_to_every_record_keeps_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a prefix the call that logs would raise `KeyError` here."""
    stock = logging.getLogRecordFactory()

    def make(*args: Any, **how: Any) -> logging.LogRecord:
        record = stock(*args, **how)
        record.rank, record.group = "engine", "engine"
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", make)
    with queue(warn_after_s=0.05) as (_, [reader]), pytest.raises(CommTimeoutError):
        reader.dequeue(0.5)
    record = caplog.records[0]
    assert (record.__dict__["rank"], record.__dict__["comm_rank"]) == ("engine", 0)


# --- queues -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_owner", [False, True])
def test_a_slow_wait_names_queue_rank_and_call(has_owner: bool, caplog: pytest.LogCaptureFixture) -> None:
    """At both ends of a ring. A queue of a group has the group's fields too."""
    owned = {"group": "tp:0", "rank": 6} if has_owner else {}
    with queue(readers=2, warn_after_s=0.05, writer=3) as (writer, readers):
        if has_owner:
            writer.guard(Owner())
            readers[1].guard(Owner())
        waits: dict[str, Callable[[QueueReader], Any]] = {
            "dequeue": lambda reader: reader.dequeue(0.5),
            "adequeue": lambda reader: asyncio.run(reader.adequeue(0.5)),
        }
        for call, wait in waits.items():
            caplog.clear()
            with pytest.raises(CommTimeoutError):
                wait(readers[1])
            assert fields_of(caplog.records[0]) == {"queue": "steps", "rank": 1, "call": call, **owned}
        caplog.clear()
        with pytest.raises(CommTimeoutError):
            writer.enqueue(bytes(3 * MIN_RING_BYTES), 0.5)
        assert fields_of(caplog.records[0]) == {"queue": "steps", "rank": 3, "call": "enqueue", **owned}


def test_the_writer_without_a_rank_names_none(caplog: pytest.LogCaptureFixture) -> None:
    """An engine's own process is no rank."""
    with queue(warn_after_s=0.05) as (writer, _), pytest.raises(CommTimeoutError):
        writer.enqueue(bytes(3 * MIN_RING_BYTES), 0.5)
    assert fields_of(caplog.records[0]) == {"queue": "steps", "call": "enqueue"}


def test_both_ends_between_hosts_name_queue_rank_and_call(caplog: pytest.LogCaptureFixture) -> None:
    """As those of a ring; the writer's thread, which is in no call, names none."""
    with remote_queue(writer=4, high_water_bytes=64 << 10, warn_after_s=0.05) as (writer, readers):
        with pytest.raises(CommTimeoutError):
            readers[1].dequeue(0.5)
        assert fields_of(caplog.records[0]) == {"queue": "steps", "rank": 1, "call": "dequeue"}
        caplog.clear()
        until_full(writer, bytes(30_000), 0.5)
        assert fields_of(caplog.records[0]) == {"queue": "steps", "rank": 4, "call": "enqueue"}
        caplog.clear()
        writer.guard(Owner())
        assert writer.handle.remote is not None
        with dialled(writer.handle.remote, zmq.DEALER, RemoteKeys.generate()):
            wait_until(lambda: bool(caplog.records), "the refusal", DEADLINE_S)
    (record, *_) = caplog.records
    assert record.getMessage().startswith("refused a connection from 127.0.0.1")
    assert fields_of(record) == {"queue": "steps", "group": "tp:0", "rank": 6}


def test_a_formatter_prints_the_fields_as_json() -> None:
    """Ten lines suffice, which know the prefix only."""
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("shm_broadcast")
    logger.addHandler(handler)
    try:
        with queue(warn_after_s=0.1) as (_, [reader]), pytest.raises(CommTimeoutError):
            reader.dequeue(0.5)
    finally:
        logger.removeHandler(handler)
    line = json.loads(handler.stream.getvalue().splitlines()[0])
    assert line.pop("text").startswith(
        "dequeue on queue 'steps' (reader, rank 0, message #1): waiting for 0 s"
    )
    assert line == {"level": "WARNING", "comm_queue": "steps", "comm_rank": 0, "comm_call": "dequeue"}
