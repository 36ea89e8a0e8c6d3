"""How pages are found and kept: seldom searched for, let go in the end, and never trusted."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from coordinator.diagnosis import pages
from coordinator.diagnosis.blame.live import look_at_jobs
from coordinator.diagnosis.pages import find_pages
from coordinator.diagnosis.processes import look_at
from coordinator.diagnosis.top import sampling
from coordinator.diagnosis.top.sampling import SEARCH_S, SEARCH_SHARE, Sampler, Seen
from shm_broadcast.liveness import this_process
from shm_broadcast.status.layout import NAME
from tests.fake_pages import FakeRank

GOOD = "from shm_broadcast.status.shown_calls import ShownCalls; ShownCalls('kept:0', 0, [0])"
# A process with a group, and one in another PID namespace that holds its page, beside which a third one looks.
LOOK = """
from coordinator.diagnosis.blame.live import look_at_jobs
from coordinator.diagnosis.top.rows import rows_of
from coordinator.diagnosis.top.sampling import Sampler
(evidence,) = look_at_jobs((), 1.0)
(row,) = rows_of(None, Sampler().sample())
print(evidence.processes[0].page.groups[0].name, evidence.processes[0].state, row.state)
"""
HOLD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {LOOK!r}], check=True)"
APART = f"""
import os, subprocess, sys
from shm_broadcast.status.page import own_page
from shm_broadcast.status.shown_calls import ShownCalls
shown = ShownCalls('far:0', 0, [0, 1])
apart = ["unshare", "--pid", "--fork", "--mount-proc", *([] if os.geteuid() == 0 else ["--map-root-user"])]
subprocess.run([*apart, sys.executable, "-c", {HOLD!r}], pass_fds=[own_page().segment.descriptor], check=True)
"""
# What a process may hold under the name of a page: too short, not sealed, sealed and without sense.
BAD = """
import fcntl, os
from shm_broadcast.status.layout import NAME, PAGE_BYTES
for nbytes, seals in ((4096, 7), (PAGE_BYTES, 0), (PAGE_BYTES, 7)):
    made = os.memfd_create(NAME, os.MFD_ALLOW_SEALING)
    os.write(made, b"x" * 64)
    os.ftruncate(made, nbytes)
    fcntl.fcntl(made, 1033, seals)
"""


@contextmanager
def child(program: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that runs a program and then waits for the end of the test."""
    code = f"import sys\n{program}\nprint(flush=True)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    """Return a sampler."""
    made = Sampler()
    yield made
    made.close()


def of(sampler: Sampler, pid: int) -> list[Seen]:
    """Return what a sample shows of a process."""
    return [seen for seen in sampler.sample().seen if seen.page.pid == pid]


def pages_held(pid: int) -> set[int]:
    """Return the inodes of the pages that a process has open. The sampler finds those of other jobs on the host too."""
    held = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if f"memfd:{NAME}" in str(descriptor.readlink()):
                held.add(descriptor.stat().st_ino)
        except FileNotFoundError:  # closed meanwhile
            continue
    return held


def test_memory_that_is_no_page_hides_no_other(sampler: Sampler) -> None:
    """The process is named with what is wrong, in a search and in a sample; its page is shown."""
    with child(f"{GOOD}\n{BAD}") as process:
        search = find_pages([process.pid])
        assert [found.pid for found in search.found] == [process.pid]
        assert process.pid in search.faults
        sample = sampler.sample()
        assert process.pid in sample.faults
        assert [seen.pid for seen in sample.seen if seen.page.pid == process.pid] == [process.pid]


def test_a_process_that_reads_the_pages_of_two_jobs_does_not_join_them(sampler: Sampler) -> None:
    """It has a page itself, as an engine has that exports metrics of all ranks on its host."""
    with child(GOOD) as one, child(GOOD) as other:
        links = [
            memory.link for each in (one, other) for memory in pages.find_memory(each.pid) if memory.is_page
        ]
        read = f"{GOOD}\nimport os\nopened = [os.open(link, os.O_RDONLY) for link in {links!r}]"
        with child(read) as reader:
            sampler.sample()
            found = [of(sampler, each.pid)[0] for each in (one, other, reader)]
    assert [each.holders for each in found] == [(one.pid,), (other.pid,), (reader.pid,)]
    assert len({each.job for each in found}) == 3


def test_processes_are_searched_seldom(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at each look, and after a search that took long not before its share of the time has passed."""
    searched: list[float] = []

    def counted() -> list[int]:
        searched.append(time.monotonic())
        return []

    now_s, spent_s = 1000.0, 0.0
    monkeypatch.setattr(pages, "processes", counted)
    with monkeypatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: now_s)
        patch.setattr(time, "thread_time", lambda: spent_s * len(searched))
        sampler.sample()
        sampler.sample()
        assert len(searched) == 1
        now_s += SEARCH_S
        spent_s = 0.1
        sampler.sample()
        assert len(searched) == 2
        now_s += 0.1 / SEARCH_SHARE - 1
        sampler.sample()
        assert len(searched) == 2
        now_s += 1
        sampler.sample()
        assert len(searched) == 3


@pytest.mark.guarantee("W2")
def test_blame_finds_a_page_that_came_after_its_first_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine ranks make their pages, and join a group, between the first search and the last look."""
    with child(GOOD) as first, child(GOOD) as later:
        searches = iter([[first.pid], [first.pid, later.pid]])
        monkeypatch.setattr(pages, "processes", lambda: next(searches))
        jobs = look_at_jobs([], 1.0)
    assert {each.page.pid for job in jobs for each in job.processes} == {first.pid, later.pid}


def test_a_page_that_nobody_keeps_is_let_go(sampler: Sampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is shown for a while after its process has ended, and its memory is free then."""
    with child(GOOD) as process:
        assert [seen.has_ended for seen in of(sampler, process.pid)] == [False]
        (memory,) = pages_held(process.pid)
    (dead,) = of(sampler, process.pid)
    assert (dead.has_ended, dead.holders) == (True, (process.pid,))
    assert memory in pages_held(os.getpid())
    monkeypatch.setattr(sampling, "KEPT_S", 0.0)
    monkeypatch.setattr(sampler, "_next_search_s", 0.0)
    (dead,) = of(sampler, process.pid)
    assert dead.holders == ()
    assert of(sampler, process.pid) == []
    assert memory not in pages_held(os.getpid())


def test_memory_without_sense_is_let_go_when_nobody_holds_it(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of another release come and go: the last that was seen of them is no fault for ever, and takes no memory."""
    with child(BAD) as process:
        held = {memory.place for memory in pages.find_memory(process.pid) if memory.is_page}
        assert process.pid in sampler.sample().faults
        assert held & set(sampler._kept)
    monkeypatch.setattr(sampler, "_next_search_s", 0.0)
    assert not {0, process.pid} & set(sampler.sample().faults)
    assert not held & set(sampler._kept)


def test_a_process_with_the_number_of_one_that_has_ended_is_another_one(
    sampler: Sampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its start differs, so the page's process is dead, whatever has its number now."""
    with child(GOOD) as process:
        assert [seen.has_ended for seen in of(sampler, process.pid)] == [False]

        def later(pid: int) -> object:
            its = look_at(pid)
            return None if its is None else msgspec.structs.replace(its, start_ticks=1)

        monkeypatch.setattr(sampling, "look_at", later)
        assert [seen.has_ended for seen in of(sampler, process.pid)] == [True]


@pytest.mark.slow
@pytest.mark.guarantee("L2")
def test_a_process_in_another_pid_namespace_is_unknown() -> None:
    """It lives, and a process in the container keeps its page: there is no process with that number in there."""
    looked = subprocess.run([sys.executable, "-c", APART], capture_output=True, text=True, check=True)
    assert looked.stdout == "far:0 unknown unknown\n"


@pytest.mark.parametrize(
    ("own", "page", "clock", "foreign"),
    [(5, 5, 9, False), (5, 6, 9, True), (0xEFFFFFFC, 6, 9, False), (0xEFFFFFFC, 6, 8, True), (5, 5, 8, True)],
)
def test_what_is_not_seen_may_live_unless_all_is_seen(
    own: int, page: int, clock: int, foreign: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first PID namespace sees all processes; in another time namespace their starts count by another clock."""
    here = msgspec.structs.replace(this_process(), pid_namespace=own)
    monkeypatch.setattr(pages, "this_process", lambda: here)
    monkeypatch.setattr(pages, "time_namespace", lambda: 9)
    shown = msgspec.structs.replace(FakeRank(0, 1).page(), pid_namespace=page, time_namespace=clock)
    assert pages.is_foreign(shown) is foreign


def test_a_closed_sampler_holds_nothing() -> None:
    """Neither a mapping nor a descriptor; to close it twice is no error."""
    with child(GOOD) as process:
        before = len(os.listdir("/proc/self/fd"))
        made = Sampler()
        assert len(of(made, process.pid)) == 1
        assert len(os.listdir("/proc/self/fd")) > before
        made.close()
        made.close()
        assert len(os.listdir("/proc/self/fd")) == before
