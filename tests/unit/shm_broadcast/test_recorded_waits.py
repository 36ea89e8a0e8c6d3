"""What an end of a queue writes down of its waits, if its process keeps a record."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import msgspec
import pytest

from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.liveness import PeerWatch
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import BroadcastSettings
from shm_broadcast.status import page as own
from shm_broadcast.status.failure_dump import FailureDump
from shm_broadcast.status.page import OwnPage
from shm_broadcast.status.record_file import DUMP_SUFFIX, RunFolder
from tests.waiting import wait_until

RUN = "run-20261126T000000Z-00000001"
Queue = tuple[QueueWriter, QueueReader, QueueReader]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    """Return the ends of a queue in this process, which keeps a record."""
    tmp_path.chmod(0o700)
    page = OwnPage(RunFolder(tmp_path, RUN, "rank-0-host-1-1"))
    monkeypatch.setattr(own._Own, "page", page)
    settings = BroadcastSettings(ring_bytes=1 << 16, warn_after_s=0.2)
    with (
        QueueWriter.create("steps", [0, 1], settings, writer=2) as writer,
        QueueReader.open(writer.handle, writer.key, 0) as first,
        QueueReader.open(writer.handle, writer.key, 1) as second,
    ):
        yield writer, first, second
    page.segment.close()


def written(tmp_path: Path) -> FailureDump | None:
    """Return what was written down."""
    path = tmp_path / RUN / f"rank-0-host-1-1-0{DUMP_SUFFIX}"
    return msgspec.msgpack.decode(path.read_bytes(), type=FailureDump) if path.exists() else None


def state(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    """Let every process be in a state."""
    monkeypatch.setattr(PeerWatch, "state", lambda *_: said)


@pytest.mark.guarantee("S20")
@pytest.mark.parametrize(("said", "is_written"), [("alive", False), ("stopped", True), ("dead", True)])
def test_a_read_that_is_late_is_written_down_if_the_writer_is_at_fault(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, is_written: bool
) -> None:
    """A reader that is idle writes nothing."""
    state(monkeypatch, said)
    with pytest.raises(CommTimeoutError):
        queue[2].dequeue(0.01)
    dump = written(tmp_path)
    assert (dump is not None) == is_written
    if dump is not None:
        assert (dump.queue, dump.place, dump.error, dump.group) == ("steps", 1, "CommTimeoutError", "")
        assert {end.place: end.state for end in dump.ends} == {-1: said, 1: "alive"}
        assert dump.readers == [0, 1]


@pytest.mark.guarantee("S20")
def test_a_write_without_room_is_written_down_with_all_readers(queue: Queue, tmp_path: Path) -> None:
    """One of them never reads."""
    writer, first, _ = queue

    def fill() -> None:
        while True:
            writer.enqueue(bytes(8192), 0.01)
            first.dequeue(1.0)

    with pytest.raises(CommTimeoutError):
        fill()
    dump = written(tmp_path)
    assert dump is not None
    assert (dump.place, dump.error) == (-1, "CommTimeoutError")
    assert {end.place for end in dump.ends} == {-1, 0, 1}


@pytest.mark.guarantee("S20")
def test_a_wait_is_written_down_while_it_goes_on(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read without a deadline writes behind `warn_after_s`, though it may not warn."""
    state(monkeypatch, "stopped")
    queue[1].warns = False
    with pytest.raises(CommTimeoutError):
        queue[1].dequeue(0.5)
    dump = written(tmp_path)
    assert dump is not None
    assert dump.error == ""


@pytest.mark.guarantee("S20")
def test_what_was_written_goes_once_the_end_waits_behind_further_messages(
    queue: Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not before, as who polls begins a new wait each time; and it writes once a second at most."""
    state(monkeypatch, "stopped")
    writer, first, second = queue
    for _ in range(2):
        with pytest.raises(CommTimeoutError):
            first.dequeue(0.01)
    before = written(tmp_path)
    assert before is not None
    assert time.monotonic_ns() > before.monotonic_ns
    for reader in (first, second):
        with pytest.raises(CommTimeoutError):
            first.dequeue(0.01)
        assert written(tmp_path) == before, reader
    state(monkeypatch, "alive")
    writer.enqueue(1)
    assert first.dequeue(1.0) == 1
    with pytest.raises(CommTimeoutError):
        first.dequeue(0.01)
    wait_until(lambda: written(tmp_path) is None, "what was written to go")


def refuse_unlinks(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> list[Path]:
    """Let no file be removed from now on; return those for which that was tried."""
    tried: list[Path] = []

    def unlink(path: Path, *, missing_ok: bool = False) -> None:
        tried.append(path)
        raise error

    monkeypatch.setattr(Path, "unlink", unlink)
    return tried


@pytest.mark.guarantee("S20")
@pytest.mark.parametrize("number", [errno.EROFS, errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_removes_nothing_ends_no_call(
    queue: Queue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """What was written stays, which is logged; the read that would remove it gets its message, and so do later ones."""
    state(monkeypatch, "stopped")
    writer, first, _ = queue
    with pytest.raises(CommTimeoutError):
        first.dequeue(0.01)
    writer.enqueue(0)
    assert first.dequeue(1.0) == 0
    tried = refuse_unlinks(monkeypatch, OSError(number, os.strerror(number)))
    state(monkeypatch, "alive")
    for message in range(1, 4):
        with pytest.raises(CommTimeoutError):
            first.dequeue(0.01)
        writer.enqueue(message)
        assert first.dequeue(1.0) == message
    assert tried
    said = [record for record in caplog.records if "'steps' has waited for was not removed" in record.message]
    assert len(said) == 1
    assert said[0].__dict__["comm_queue"] == "steps"


@pytest.mark.guarantee("R14", "S20")
def test_what_a_handler_raises_while_a_file_is_removed_passes_unchanged(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `TimeoutError` of a handler is an `OSError`, but none of the file system."""

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError("of a handler")

    state(monkeypatch, "stopped")
    writer, first, _ = queue
    with pytest.raises(CommTimeoutError):
        first.dequeue(0.01)
    writer.enqueue(1)
    assert first.dequeue(1.0) == 1
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", lambda *_, **__: signal.raise_signal(signal.SIGALRM))
            with pytest.raises(TimeoutError, match="of a handler"):
                first.dequeue(0.01)
    finally:
        signal.signal(signal.SIGALRM, before)
    writer.enqueue(2)
    assert first.dequeue(1.0) == 2
