"""Who is named for planted faults: by the record of the run and by a look at the live processes."""

import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from coordinator.cli import main
from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.live import look_at_jobs
from coordinator.diagnosis.blame.recorded import read_run, run_folders
from coordinator.diagnosis.blame.verdict import Finding, Verdict
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from shm_broadcast.errors import UsageError
from tests.harness import run_ranks
from tests.planted_faults import FAULTS, RANKS, Fault, suffer
from tests.waiting import wait_until
from tests.worlds import join_world, meet, run_at

# A look counts as a wait what goes on for this long.
WAITING_S = 0.3

# How much longer than stated a brief fault lasts: a machine with other work may not let this process look within the
# first time, which is short because most runs need no more.
LONGER = (1.0, 10.0)

# A live look behind the end of the survivors' calls sees no call: a queue's ends are closed when its group breaks, and
# a call that has raised is over. The groups say then in which call they broke.
WITHOUT_CALL = ("dead writer", "kill")


def assert_right(found: Finding, fault: Fault, how: str) -> None:
    """The rank and the call are those of the fault."""
    seen = found.rule, tuple(sorted(found.ranks)), found.call, found.number
    assert seen == (fault.rule, fault.ranks, fault.call, fault.number), f"{how}: {found.text()}"


def look(pids: Sequence[int], fault: Fault, record: Path) -> Verdict | None:
    """Look at the live processes until somebody is named, and a call. Each look has to name the right one.

    A look may come when a process has ended, and before the others have waited for it for long or were told.

    Returns:
        What was found; None if a brief fault was over before a look of this process, which had no core in time.
    """
    deadline, named = time.monotonic() + 20.0, ""
    while time.monotonic() < deadline:
        if fault.is_brief and any(Path(f"{record}-over-{rank}").exists() for rank in range(RANKS)):
            return None
        try:
            jobs = look_at_jobs(pids, WAITING_S)
        except UsageError:
            continue  # they are starting, as also if they share no memory yet
        if len(jobs) == 1 and (verdict := judge(jobs[0])).findings:
            (found, *_), named = verdict.findings, verdict.text()
            if found.call or verdict.broken:
                return verdict
            rule = fault.live_rule or fault.rule
            assert (found.rule, tuple(sorted(found.ranks))) == (rule, fault.ranks), named
    raise AssertionError(f"nobody was named, or no call: {named}")


def plant(name: str, record: Path) -> None:
    """Run the ranks; check who is named live, from all that they leave, and without what an innocent one leaves."""
    for longer in LONGER:
        if plant_once(name, record.with_name(f"{record.name}-{longer:.0f}"), longer):
            return
    raise AssertionError(f"{name}: the fault was over before a look")


def plant_once(name: str, record: Path, longer: float) -> bool:
    """Return whether a look came in time; who was named is checked all the same."""
    fault, live = FAULTS[name], list[Verdict]()

    def while_running(pids: Sequence[int]) -> None:
        # A rank that comes late to an earlier call would be named for that.
        begun = [Path(f"{record}-begins-{rank}") for rank in range(RANKS)]
        wait_until(lambda: all(path.exists() for path in begun), "the fault")
        if (seen := look(pids, fault, record)) is not None:
            live.append(seen)
        (record.parent / f"{record.name}-looked").touch()
        if fault.dead == tuple(range(RANKS)):
            # None may run on to see another one end: that would be what the record tells.
            for end in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    os.kill(pid, end)

    run_ranks(suffer, RANKS, name, str(record), longer, expect_dead=fault.dead, while_running=while_running)
    for verdict in live:
        (found, *_) = verdict.findings
        if name in WITHOUT_CALL and not found.call:
            # Each survivor was told which call broke its group.
            call = f"{fault.call} #{fault.number} on " if fault.number else f"{fault.call} on "
            told = [line for line in verdict.broken if call in line]
            assert len(told) == len(verdict.broken) >= 1, verdict.text()
            assert_right(found, fault._replace(call="", number=0), "live")
        else:
            assert_right(found, fault._replace(rule=fault.live_rule or fault.rule), "live")
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
    return bool(live)


# What each run tests: each rule by which somebody is named, and what is left of the dead. `thorough` tests all, twenty
# times.
OFTEN = [
    "kill",
    "missed call",
    "cross-group cycle",
    "late rank",
    "slow reader",
    "dead writer",
    "kill -9 of all",
]


@pytest.mark.parametrize("name", OFTEN)
def test_the_right_rank_and_call_are_named(name: str, tmp_path: Path) -> None:
    """Each planted fault once."""
    plant(name, tmp_path / "record")


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAULTS)
def test_the_right_rank_and_call_are_named_each_of_twenty_times(name: str, tmp_path: Path) -> None:
    """Each planted fault twenty times."""
    for number in range(20):
        plant(name, tmp_path / f"record-{number}")


APART = [
    "sleep",
    *(pytest.param(name, marks=pytest.mark.thorough) for name in ("missed call", "late rank", "p2p cycle")),
]


@pytest.mark.parametrize("name", APART)
def test_the_right_rank_is_named_where_no_two_ranks_share_memory(name: str, tmp_path: Path) -> None:
    """Ranks that pretend to be on four hosts call over Gloo, which compares no calls."""
    record = tmp_path / "record"
    (tmp_path / "record-looked").touch()
    places = [f"host {rank}" for rank in range(RANKS)]
    run_ranks(run_at, RANKS, places, suffer.__module__, suffer.__name__, name, str(record))
    verdict = judge(read_run(run_folders([record])))
    fault = FAULTS[name]
    assert verdict.findings[0].ranks == fault.ranks, verdict.text()
    assert verdict.findings[0].call in (fault.call, "all_reduce"), verdict.text()


def work(rank: int, world_size: int, directory: Path, stop: str, is_idle: bool) -> None:
    """Make calls, or none, until `stop` is there."""
    join_world(rank, world_size, directory)
    group = get_world_group()
    if is_idle:
        wait_until(Path(stop).exists, "the end")
    # All ranks stop behind the same call.
    while not is_idle and not group.all_gather_object(Path(stop).exists())[0]:
        group.all_reduce(torch.ones(16))
    meet(rank, range(world_size), directory, "done")
    destroy_distributed_environment()


@pytest.mark.guarantee("W3")
@pytest.mark.parametrize(
    "is_idle", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["busy", "idle"]
)
def test_nobody_is_named_in_a_job_that_runs(is_idle: bool, tmp_path: Path) -> None:
    """The command exits with 0, however often it looks."""
    statuses: list[int] = []

    def while_running(pids: Sequence[int]) -> None:
        wait_until(lambda: main(["blame", "--live", "--pid", str(pids[0])]) != 1, "a page")
        statuses.extend(main(["blame", "--live", "--pid", str(pids[0])]) for _ in range(3))
        (tmp_path / "stop").touch()

    run_ranks(work, RANKS, str(tmp_path / "stop"), is_idle, while_running=while_running)
    assert statuses == [0, 0, 0]
