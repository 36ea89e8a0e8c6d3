"""`trace` shows running ranks as they are: their calls, who waits for whom, and what has not ended."""

import csv
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from coordinator import (
    CoordinatorSettings,
    ParallelGroups,
    ParallelLayout,
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.cli import main
from coordinator.diagnosis.pages import find_pages
from tests.harness import run_ranks
from tests.probes import requires
from tests.trace_format import Event, check_trace

CALLS = 8
DELAY_S = 0.005


def steps(rank: int, world_size: int, directory: Path, stop: str, pages: str) -> None:
    """Make steps to which rank 1 comes late, and wait in a barrier for rank 3."""
    settings = CoordinatorSettings.resolve(record_dir=pages)
    method = f"file://{directory}/rendezvous"
    init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
    world = get_world_group()
    with ParallelGroups.create(ParallelLayout(tensor=2, pipeline=2)) as groups:
        tensor = torch.ones(16)
        pids = world.all_gather_object(os.getpid())
        for _ in range(CALLS):
            if rank == 1:
                # Whatever else the host does, rank 0 is there before.
                while not waiting([pids[0]], "tp:0", "all_reduce"):
                    time.sleep(0.001)
                time.sleep(DELAY_S)
            groups.tp.all_reduce(tensor)
            world.all_gather_object(rank)
            if groups.pp.is_first_rank:
                groups.pp.send(tensor)
            else:
                groups.pp.recv((16,), torch.float32)
        Path(f"{stop}-{rank}").touch()
        while rank == 3 and not Path(stop).exists():
            time.sleep(0.01)
        world.barrier()
    destroy_distributed_environment()


def trace_of(tmp_path: Path) -> tuple[list[Event], Path]:
    """Return the checked events of a trace of running ranks, and their record directory."""
    stop, pages, out = tmp_path / "stop", tmp_path / "pages", tmp_path / "out.json"
    pages.mkdir(mode=0o700)

    def look(pids: Sequence[int]) -> None:
        try:
            give_up = time.monotonic() + 30
            while (
                len(list(tmp_path.glob("stop-*"))) < 4 or waiting(pids, "world:0", "barrier") < 3
            ) and time.monotonic() < give_up:
                time.sleep(0.02)
            assert main(["trace", str(out), *(word for pid in pids for word in ("--pid", str(pid)))]) == 0
        finally:
            stop.touch()

    run_ranks(steps, 4, str(stop), str(pages), while_running=look)
    return check_trace(out.read_bytes()), pages


def waiting(pids: Sequence[int], group: str, call: str) -> int:
    """Return how many of some processes wait in a call of a group."""
    # A process holds the pages of its peers too, whose groups have the same names.
    found = [each.page for each in find_pages(pids, records=False).found if each.page.pid in pids]
    lanes = [lane for page in found for each in page.groups if each.name == group for lane in each.lanes]
    return sum(lane.call == call and lane.state in ("posted", "asleep") for lane in lanes)


def test_the_trace_of_four_ranks_shows_their_calls_and_who_came_late(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 waits for rank 1 in each sum of their group; three ranks wait in a barrier that goes on."""
    events, pages = trace_of(tmp_path)
    text = capsys.readouterr().out
    assert "4 processes, 3 of them running" in text
    titles = {
        (each["pid"], each["tid"]): each["args"]["name"] for each in events if each["name"] == "thread_name"
    }
    slices = [each for each in events if each["ph"] == "X"]
    sums = [each for each in slices if each["args"].get("Collective name") == "all_reduce"]
    assert {(each["pid"], titles[each["pid"], each["tid"]]) for each in sums} == {
        (rank, "tp:0 · shared") for rank in range(4)
    }
    # The memory says who came last, and an arrow leads from there.
    late = [each for each in sums if each["pid"] == 0 and each["args"]["last to come"] == "rank 1"]
    assert len(late) == CALLS
    assert [each["dur"] for each in late if each["dur"] < DELAY_S * 1e6] == []
    starts = {each["id"]: each for each in events if each["ph"] == "s"}
    into = [
        starts[each["id"]]["pid"]
        for each in events
        if each["ph"] == "f" and each["pid"] == 0 and titles[0, each["tid"]] == "tp:0 · shared"
    ]
    assert into.count(1) == len(late)
    going_on = [each for each in slices if each["name"].endswith(" (running)")]
    assert sorted(each["pid"] for each in going_on) == [0, 1, 2]
    assert {each["args"]["Collective name"] for each in going_on} == {"barrier"}
    check_files(pages, tmp_path / "files.json.gz", sums)


def check_files(pages: Path, out: Path, sums: list[Event]) -> None:
    """Compare the sums with those of a trace of what is left of the run, which is written compressed."""
    command = [sys.executable, "-m", "coordinator", "trace", str(out), str(pages)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "of 4 processes" in text
    content = subprocess.run(["gzip", "-dc", str(out)], check=True, capture_output=True).stdout
    found = [
        (each["pid"], each["name"], each["dur"])
        for each in check_trace(content)
        if each["ph"] == "X" and each["args"].get("Collective name") == "all_reduce"
    ]
    assert found == [(each["pid"], each["name"], each["dur"]) for each in sums]
    assert json.loads(content)["otherData"]["notes"] == []


LOSSES = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
SLICES = (
    "select p.pid, t.tid, s.name, s.dur from slice s join thread_track k on s.track_id = k.id "
    "join thread t using (utid) join process p using (upid)"
)


def asked(trace: Path, query: str) -> list[tuple[str, ...]]:
    """Return the rows that Perfetto's trace processor answers a query with."""
    file = trace.with_suffix(".sql")
    file.write_text(query)
    done = subprocess.run(
        ["trace_processor_shell", "-q", str(file), str(trace)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    _, *rows = csv.reader(done.stdout.splitlines())
    return [tuple(row) for row in rows]


@requires("trace_processor")
def test_the_trace_processor_of_perfetto_loses_nothing_of_the_trace_of_four_ranks(tmp_path: Path) -> None:
    """It has each call with its process, thread, name and duration, and each arrow, and counts no error."""
    events, _ = trace_of(tmp_path)
    trace = tmp_path / "out.json"
    assert asked(trace, LOSSES) == []
    expected = Counter(
        (str(each["pid"]), str(each["tid"]), each["name"], round(each["dur"] * 1000))
        for each in events
        if each["ph"] == "X"
    )
    found = Counter((pid, tid, name, int(dur)) for pid, tid, name, dur in asked(trace, SLICES))
    assert found == expected
    [(arrows,)] = asked(trace, "select count(*) from flow")
    assert int(arrows) == sum(each["ph"] == "s" for each in events) > CALLS
