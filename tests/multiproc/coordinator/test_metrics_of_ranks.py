"""Metrics of real ranks: an exporter of its own tells them while the ranks hang, stop, come and go."""

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from coordinator.diagnosis.metrics import collect
from coordinator.diagnosis.metrics.reader import MetricsReader, read_host, read_own
from coordinator.diagnosis.metrics.totals import Key
from coordinator.diagnosis.pages import find_pages
from shm_broadcast.status.layout import TABLES
from shm_broadcast.status.page import LEFT_GROUPS
from tests.harness import RankPool, run_ranks
from tests.probes import requires
from tests.queue_ranks import Marks
from tests.waiting import wait_until
from tests.worlds import new_group, world

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def read(text: str) -> Series:
    return {
        (sample.name.removeprefix("group_coordinator_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def value(series: Series, name: str, **labels: str) -> float:
    """The sum of the series that have these labels."""
    return sum(each for (of, has), each in series.items() if of == name and labels.items() <= has)


@contextmanager
def exporter(*arguments: str) -> Iterator[str]:
    """Run `python -m coordinator metrics`; yield where it says that the metrics are, and end it as systemd does."""
    command = [sys.executable, "-m", "coordinator", "metrics", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            first = process.stdout.readline()
            assert first.startswith("metrics of this host's ranks: "), process.communicate(timeout=10)
            yield first.removeprefix("metrics of this host's ranks: ").partition(",")[0].strip()
            process.terminate()
            out, err = process.communicate(timeout=20)
            assert (process.returncode, out, err) == (0, "", "")
        finally:
            process.kill()


def scrape(url: str) -> Series:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return read(answer.read().decode())


# --- Ranks that do not answer ---------------------------------------------------------------------------------


@pytest.fixture
def name() -> str:
    """Of a group: the exporter also sees the ranks of other tests that run on this host."""
    return f"metrics{os.getpid()}"


def wait_for_rank_1(rank: int, world_size: int, directory: Path, where: str, name: str) -> None:
    marks = Marks(where)
    with world(rank, world_size, directory) as everybody:
        group = new_group(everybody, name)
        for _ in range(10):
            group.all_reduce(torch.ones(8))
        marks.mark(f"ready {rank}", group.unique_name)
        if rank == 1:
            marks.wait("go on")
        group.all_reduce(torch.ones(8))
        marks.wait("go on")
        group.destroy()


@pytest.mark.slow
def test_it_answers_while_all_ranks_are_stopped(tmp_path: Path, name: str) -> None:
    """Rank 0 hangs in a call, then both are stopped: each scrape is answered, and the call's time goes on."""
    marks = Marks(tmp_path)

    def watch(pids: Sequence[int]) -> None:
        group, _ = (marks.wait(f"ready {rank}") for rank in range(2))
        calls = {"group": group, "op": "all_reduce"}
        wait_until(
            lambda: value(scrape(url), "inflight_seconds", rank="0", **calls) > 0, "the call of rank 0"
        )
        before = scrape(url)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        try:
            seen = [scrape(url) for _ in range(3)]
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        times = [value(each, "inflight_seconds", rank="0", **calls) for each in (before, *seen)]
        assert times == sorted(set(times))
        assert value(seen[-1], "inflight_seconds", rank="1", **calls) == 0
        for label in ("0", "1"):
            assert value(seen[-1], "calls_total", rank=label, **calls) == 10
            assert value(seen[-1], "bytes_total", rank=label, **calls) == 10 * 8 * 4
            assert value(seen[-1], "group_usable", rank=label, group=group) == 1
        marks.mark("go on")

    # Started first, because rank 1 waits no longer than a minute to be told to go on.
    with exporter("--listen", "127.0.0.1:0") as url:
        run_ranks(wait_for_rank_1, 2, str(tmp_path), name, while_running=watch)


@requires("promtool")
def test_promtool_accepts_what_an_exporter_answers(tmp_path: Path, name: str) -> None:
    """While ranks of a group are in calls: names, types, help texts and values, as Prometheus would get them."""
    marks = Marks(tmp_path)

    def watch(pids: Sequence[int]) -> None:
        with exporter("--listen", "127.0.0.1:0") as url:
            group, _ = (marks.wait(f"ready {rank}") for rank in range(2))
            wait_until(
                lambda: value(scrape(url), "inflight_seconds", rank="0", group=group) > 0,
                "the call of rank 0",
            )
            with urllib.request.urlopen(url, timeout=10) as answer:
                text = answer.read().decode()
            marks.mark("go on")
        assert f'group="{group}"' in text
        command = ["promtool", "check", "metrics"]
        said = subprocess.run(command, input=text, capture_output=True, text=True, check=False, timeout=60)
        assert (said.returncode, said.stdout, said.stderr) == (0, "", "")

    run_ranks(wait_for_rank_1, 2, str(tmp_path), name, while_running=watch)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_textfile_is_kept_up_to_date_and_removed_at_the_end(tmp_path: Path, name: str) -> None:
    """node_exporter would show the values of an exporter that has ended for ever."""
    marks, folder = Marks(tmp_path), tmp_path / "textfile"
    folder.mkdir()

    def watch(pids: Sequence[int]) -> None:
        with exporter("--textfile", str(folder), "--interval", "0.05") as where:
            file = Path(where)
            assert file == folder / "group_coordinator.prom"
            group, _ = (marks.wait(f"ready {rank}") for rank in range(2))
            wait_until(
                lambda: value(read(file.read_text()), "inflight_seconds", rank="0", group=group) > 0,
                "the call of rank 0 in the file",
            )
            first = file.stat().st_ino
            wait_until(lambda: file.stat().st_ino != first, "another file")
            marks.mark("go on")
        assert os.listdir(folder) == []

    run_ranks(wait_for_rank_1, 2, str(tmp_path), name, while_running=watch)


# --- Ranks that come and go -----------------------------------------------------------------------------------


BATCH = LEFT_GROUPS // 2
BATCHES = TABLES["groups"].number // BATCH + 2
"""More groups than a page has places for. A page keeps those of a batch after they were left, until they are seen."""


def make_groups(rank: int, world_size: int, directory: Path, where: str) -> None:
    marks = Marks(where)
    with world(rank, world_size, directory) as everybody:
        for batch in range(BATCHES):
            for _ in range(BATCH):
                group = new_group(everybody, "reused")
                for _ in range(5):
                    group.all_reduce(torch.ones(8))
                group.destroy()
            marks.mark(f"made {batch} {rank}")
            marks.wait(f"seen {batch}")


def test_no_sum_falls_while_groups_come_and_go(tmp_path: Path) -> None:
    """Groups take the places of others in the page. Each look counts at least what the last one did, and all calls."""
    marks = Marks(tmp_path)

    def watch(pids: Sequence[int]) -> None:
        reader = MetricsReader(lambda: find_pages(pids, records=False))
        before = reader.read().counts
        for batch in range(BATCHES):
            is_made = False
            while not is_made:
                is_made = all(marks.has(f"made {batch} {rank}") for rank in range(2))
                after = reader.read().counts
                assert all(after[key] == after[key].most(counts) for key, counts in before.items())
                before = after
            for rank in range(2):
                calls = sum(
                    of.calls
                    for key, of in before.items()
                    if (key.rank, key.op) == (str(rank), "all_reduce") and key.group.startswith("reused")
                )
                assert calls == 5 * BATCH * (batch + 1)
            marks.mark(f"seen {batch}")

    run_ranks(make_groups, 2, str(tmp_path), while_running=watch)


def count_and_end(rank: int, world_size: int, directory: Path, marks: str) -> None:
    with world(rank, world_size, directory) as group:
        group.all_reduce(torch.ones(8))
        Marks(marks).mark(f"ready {rank}")
        Marks(marks).wait("seen")


def test_a_rank_that_is_started_again_goes_on_counting(tmp_path: Path) -> None:
    """Two runs of a job: the second adds to what the first has done, and its gauges are those of live ranks only."""
    pids: list[int] = []
    reader = MetricsReader(lambda: find_pages(pids, records=False))
    key = Key("0", "world:0", "shared", "all_reduce")
    for run in (1, 2):
        marks = Marks(tmp_path / str(run))
        (tmp_path / str(run)).mkdir()

        def watch(started: Sequence[int], marks: Marks = marks, run: int = run) -> None:
            for rank in range(2):
                marks.wait(f"ready {rank}")
            pids[:] = started
            reading = reader.read()
            assert reading.counts[key].calls == run
            assert reading.processes == 2
            marks.mark("seen")

        run_ranks(count_and_end, 2, str(tmp_path / str(run)), while_running=watch)
        ended = reader.read()
        assert ended.counts[key].calls == run
        assert (ended.processes, ended.inflight_s, ended.usable) == (0, {}, {})


# --- What only real calls show --------------------------------------------------------------------------------


def disagree(rank: int, world_size: int, directory: Path) -> list[dict[str, Any]]:
    from coordinator.errors import CommError

    with world(rank, world_size, directory) as group:
        group.all_reduce(torch.ones(8))
        with pytest.raises(CommError):
            group.all_reduce(torch.ones(8 + rank))
        return [
            {**sample.labels, "value": sample.value}
            for family in collect()
            for sample in family.samples
            if sample.name == "group_coordinator_errors_total" and sample.value
        ]


def test_a_disagreement_is_counted_as_one(ranks2: RankPool) -> None:
    """Ranks that pass different sizes both count an error, under its own label."""
    for rank, found in enumerate(ranks2.run(disagree)):
        ours = [each for each in found if each["op"] == "all_reduce" and each["group"].startswith("world")]
        assert [(each["error"], each["value"], each["rank"]) for each in ours] == [
            ("disagreed", 1, str(rank))
        ]


def leave_messages(rank: int, world_size: int, directory: Path, name: str) -> list[list[Any]]:
    with world(rank, world_size, directory) as everybody:
        group = new_group(everybody, name)
        end: Any = group.create_mq_broadcaster(writer_rank=0)
        if rank == 0:
            for number in range(5):
                end.enqueue({"step": number, "data": b"x" * 1000})
        else:
            for _ in range(2):
                end.dequeue(timeout_s=20)
        group.barrier()
        found = [
            [*reader, lag.messages, 3000 < lag.nbytes < 6000]
            for search in (read_host, read_own)
            for reader, lag in MetricsReader(search).read().lags.items()
            if reader.group == group.unique_name
        ]
        group.barrier()
        if rank == 1:
            for _ in range(3):
                end.dequeue(timeout_s=20)
        group.destroy()
        return found


def test_the_lag_of_each_reader_is_exported(ranks2: RankPool, name: str) -> None:
    """Three messages that rank 1 has not taken. A process that sees only its own page knows only its own rank."""
    of_rank_0, of_rank_1 = ranks2.run(leave_messages, name)
    group = f"{name}:0"
    assert of_rank_0 == [["0", group, "1", 3, True], ["0", group, "#0", 3, True]]
    assert of_rank_1 == [["0", group, "1", 3, True], ["", group, "1", 3, True]]
