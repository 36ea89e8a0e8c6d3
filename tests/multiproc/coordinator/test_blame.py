"""Who is named for planted faults: by the record of the run and by a look at the live processes."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.live import look_at_jobs
from coordinator.diagnosis.blame.recorded import read_run, run_folders
from coordinator.diagnosis.blame.verdict import Finding, Verdict
from shm_broadcast.errors import UsageError
from tests.harness import run_ranks
from tests.planted_faults import FAULTS, RANKS, Fault, suffer

# A look counts as a wait what goes on for this long.
WAITING_S = 0.3


def assert_right(found: Finding, fault: Fault, how: str) -> None:
    """The rank and the call are those of the fault."""
    seen = found.rule, tuple(sorted(found.ranks)), found.call, found.number
    assert seen == (fault.rule, fault.ranks, fault.call, fault.number), f"{how}: {found.text()}"


def look(pids: Sequence[int]) -> Verdict:
    """Look at the live processes until somebody is named."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        try:
            jobs = look_at_jobs(pids, WAITING_S)
        except UsageError:
            continue  # they are starting, as also if they share no memory yet
        if len(jobs) == 1 and (verdict := judge(jobs[0])).findings:
            return verdict
    raise AssertionError("nobody was named")


def plant(name: str, record: Path) -> None:
    """Run the ranks; check who is named live, from all that they leave, and without what an innocent one leaves."""
    fault, live = FAULTS[name], list[Verdict]()

    def while_running(pids: Sequence[int]) -> None:
        if fault.looks:
            live.append(look(pids))
            (record.parent / f"{record.name}-looked").touch()
        if fault.dead == tuple(range(RANKS)):
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    run_ranks(suffer, RANKS, name, str(record), expect_dead=fault.dead, while_running=while_running)
    for verdict in live:
        (found, *_) = verdict.findings
        if not found.call:
            # The ends of a queue are closed when its group breaks, and show nothing of it any more.
            assert all(f"{fault.call} on " in line for line in verdict.broken), verdict.text()
            found = msgspec.structs.replace(found, call=fault.call)
        assert_right(found, fault, "live")
    if not fault.reads:
        return
    (folder,) = run_folders([record])
    assert_right(judge(read_run([folder])).findings[0], fault, "the record")
    for innocent in set(range(RANKS)) - set(fault.ranks):
        partial = record.parent / f"{record.name}-without-{innocent}"
        kept = shutil.ignore_patterns(f"rank-{innocent}-*")
        shutil.copytree(folder, partial / folder.name, ignore=kept)
        partial.chmod(0o700)
        verdict = judge(read_run(run_folders([partial])))
        assert_right(verdict.findings[0], fault, f"without rank {innocent}")
        assert f"rank {innocent}: neither a page nor a dump" in verdict.unseen


@pytest.mark.parametrize("name", FAULTS)
def test_the_right_rank_and_call_are_named(name: str, tmp_path: Path) -> None:
    """Each planted fault once."""
    plant(name, tmp_path / "record")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_the_right_rank_and_call_are_named_each_of_twenty_times(name: str, tmp_path: Path) -> None:
    """Each planted fault twenty times."""
    for number in range(20):
        plant(name, tmp_path / f"record-{number}")
