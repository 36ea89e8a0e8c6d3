"""An engine that is in no group and only writes to the ranks is named, if it is stopped: live and from a record."""

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import ExternalWriter
from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.live import look_at_jobs
from coordinator.diagnosis.blame.recorded import read_run, run_folders
from coordinator.diagnosis.blame.verdict import Finding, Verdict
from shm_broadcast.errors import CommTimeoutError, PeerLostError, UsageError
from shm_broadcast.handle import new_key
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.settings import BroadcastSettings
from tests.harness import run_ranks
from tests.queue_ranks import DEADLINE_S, Marks
from tests.waiting import wait_until
from tests.worlds import world

WORKERS = 2
# Live, a wait counts that goes on for this long.
WAITING_S = 0.3


def schedule(marks: Marks, has_answers: bool) -> None:
    """Be the engine's process: write steps, and read an answer from each worker if these answer."""
    settings = BroadcastSettings(ring_bytes=1 << 20, warn_after_s=0.4)
    writer = QueueWriter.create("engine", range(WORKERS), settings)
    marks.mark("steps", f"{writer.handle.to_bytes(writer.key).hex()} {writer.key.hex()}")
    readers = []
    for worker in range(WORKERS) if has_answers else ():
        handle, key = map(bytes.fromhex, marks.wait(f"answers-{worker}").split())
        readers.append(QueueReader.open(handle, key, 0, DEADLINE_S))
    writer.wait_until_ready(DEADLINE_S)
    step = 0
    while not marks.has("end"):
        step += 1
        writer.enqueue(step, DEADLINE_S)
        assert [reader.dequeue(DEADLINE_S) for reader in readers] == [float(step * WORKERS)] * len(readers)
        if step == 5:
            marks.mark("serving")
        time.sleep(0.01)
    writer.enqueue(0, DEADLINE_S)
    marks.wait("told")
    writer.close()
    for reader in readers:
        reader.close()


def work(rank: int, marks: Marks, directory: Path, record: str, has_answers: bool, within_s: float) -> str:
    """Be a worker: take steps and add up with the other one; return what it was told if the engine was lost."""
    own = QueueWriter.create(f"answers:{rank}", [0], key=new_key()) if has_answers else None
    if own is not None:
        marks.mark(f"answers-{rank}", f"{own.handle.to_bytes(own.key).hex()} {own.key.hex()}")
    handle, key = map(bytes.fromhex, marks.wait("steps").split())
    said = ""
    with world(rank, WORKERS, directory, record_dir=record) as group:
        steps: Any = group.create_mq_broadcaster(0, ExternalWriter(handle, key))
        while True:
            try:
                step = steps.dequeue(within_s or None)
            except CommTimeoutError:
                continue
            except PeerLostError as error:
                said = str(error)
                break
            if not step:
                break
            total = group.all_reduce(torch.tensor([float(step)])).item()
            if own is not None:
                own.enqueue(total, DEADLINE_S)
        marks.mark(f"told-{rank}")
        for other in range(WORKERS):
            marks.wait(f"told-{other}")
    marks.mark("told")
    if own is not None:
        own.close()
    return said


def serve(
    rank: int, world_size: int, directory: Path, marked: str, record: str, has_answers: bool, within_s: float
) -> str:
    """Run the engine in the last process, and workers in the others."""
    marks = Marks(marked)
    if rank == WORKERS:
        schedule(marks, has_answers)
        return ""
    return work(rank, marks, directory, record, has_answers, within_s)


def live(pids: Sequence[int]) -> Verdict | None:
    """Return what is said of the live processes; None if nobody is named."""
    try:
        jobs = look_at_jobs(pids, WAITING_S)
    except UsageError:
        return None
    verdicts = [judge(job) for job in jobs]
    return verdicts[0] if len(verdicts) == 1 and verdicts[0].findings else None


def recorded(record: Path) -> Verdict | None:
    """Return what the record says; None if nobody is named."""
    verdict = judge(read_run(run_folders([record])))
    return verdict if verdict.findings else None


def assert_engine_named(found: Finding, engine: int, rule: str) -> None:
    """It has no rank, but a pid, a host and a queue."""
    assert (found.rule, found.ranks) == (rule, ()), found.text()
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.pid, culprit.host) == (None, engine, os.uname().nodename)
    assert culprit.role.startswith("writer of queue 'engine'")
    state = {"root cause": "stopped", "dead": "dead"}[rule]
    assert culprit.what.startswith(f"{state}, in no group, wrote message #"), culprit


def plant(tmp_path: Path, has_answers: bool, within_s: float) -> None:
    """Stop the engine; check who is named live and by the record, and that nobody is once it goes on."""
    marks, record = Marks(tmp_path), tmp_path / "record"
    verdicts: dict[str, Verdict] = {}
    engines: list[int] = []

    def while_running(pids: Sequence[int]) -> None:
        marks.wait("serving")
        engine = pids[WORKERS]
        engines.append(engine)
        os.kill(engine, signal.SIGSTOP)
        try:
            for name, look in (("live", lambda: live(pids)), ("record", lambda: recorded(record))):
                found: list[Verdict] = []
                wait_until(lambda look=look, found=found: found.append(look()) or found[-1], name)  # type: ignore[misc]
                verdicts[name] = found[-1]
        finally:
            os.kill(engine, signal.SIGCONT)
        wait_until(lambda: recorded(record) is None, "the record to name nobody")
        marks.mark("end")

    arguments = (str(tmp_path), str(record), has_answers, within_s)
    run_ranks(serve, WORKERS + 1, *arguments, while_running=while_running)
    for name in ("live", "record"):
        (found,) = verdicts[name].findings
        assert_engine_named(found, engines[0], "root cause")
        assert (found.call, found.group) == ("dequeue", "engine"), name
        assert any("waits in dequeue on 'engine' for process" in line for line in found.details), name


KINDS = pytest.mark.parametrize(
    ("has_answers", "within_s"),
    [(False, 0.0), pytest.param(False, 0.2, marks=pytest.mark.thorough), (True, 0.2)],
    ids=["waits-for-ever", "polls", "answers"],
)


@KINDS
def test_a_stopped_engine_is_named_live_and_from_the_record(
    tmp_path: Path, has_answers: bool, within_s: float
) -> None:
    """Its readers wait, for ever or until a deadline. When it goes on, nobody is named any more."""
    plant(tmp_path, has_answers, within_s)


@pytest.mark.thorough
@KINDS
def test_a_stopped_engine_is_named_each_of_twenty_times(
    tmp_path: Path, has_answers: bool, within_s: float
) -> None:
    """The same twenty times."""
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir(mode=0o700)
        plant(folder, has_answers, within_s)


def test_a_killed_engine_is_named_from_the_record(tmp_path: Path) -> None:
    """Nothing of it is left but what its readers have written down."""
    marks, record = Marks(tmp_path), tmp_path / "record"
    engines: list[int] = []

    def while_running(pids: Sequence[int]) -> None:
        marks.wait("serving")
        engines.append(pids[WORKERS])
        os.kill(pids[WORKERS], signal.SIGKILL)

    arguments = (str(tmp_path), str(record), False, 0.0)
    told = run_ranks(serve, WORKERS + 1, *arguments, expect_dead=[WORKERS], while_running=while_running)
    assert all(f"pid {engines[0]}, dead" in each for each in told[:WORKERS]), told
    verdict = recorded(record)
    assert verdict is not None
    (found,) = verdict.findings
    assert_engine_named(found, engines[0], "dead")
