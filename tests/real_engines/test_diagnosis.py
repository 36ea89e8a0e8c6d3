"""A real vLLM over our groups and queues is seen from outside: by `top` while it serves, by `blame` while it hangs.

The commands run in this environment, the engine in one of its own; nothing but the status pages connects them.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.engine_server import ask, serve
from benchmarks.process_tree import process_tree, title_of
from coordinator.diagnosis.dump import decode_dump
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

# The groups that vLLM makes in each worker: of all, tensor, pipeline, data, and context (decode and prefill) parallel.
# With two tensor-parallel workers these have both, or each worker alone; of the latter `top` shows those with calls.
BOTH, ALONE = ("world:0", "tp:0"), ("pp:0", "dp:0", "dcp:0", "pcp:0")
# What a rank that serves may be seen in; "torn" if the kernel took its core while it wrote its row.
SERVING = {"computing", "waiting", "elsewhere", "idle", "loading", "running", "sleeping", "blocked", "torn"}


class Engine(NamedTuple):
    """A server: its address, the processes of the engine's core and of its two workers, and their record directory."""

    address: str
    core: int
    workers: tuple[int, int]
    record: Path


class Row(NamedTuple):
    """A row of a rank in what `top` prints."""

    group: str
    rank: int
    pid: int
    state: str
    rest: str


@pytest.fixture(scope="module")
def engine(vllm: Path, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Start a server with two tensor-parallel workers, which keep a record."""
    folder = tmp_path_factory.mktemp("diagnosis")
    log, record = folder / "server.log", folder / "record"
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("GROUP_COORDINATOR_RECORD_DIR", str(record))
        environ.setenv("GROUP_COORDINATOR_BROADCAST__WARN_AFTER_S", "2")
        yield from serving(vllm, model, log, record)


def serving(vllm: Path, model: Path, log: Path, record: Path) -> Iterator[Engine]:
    """Yield a server that has answered once."""
    with serve(vllm, model, "group_coordinator", log) as (address, server):
        titles = {title_of(process.pid): process.pid for process in process_tree(server)}
        core, first, second = (titles[f"VLLM::{each}"] for each in ("EngineCore", "Worker_TP0", "Worker_TP1"))
        warm_up(address)
        yield Engine(address, core, (first, second), record)


def warm_up(address: str) -> None:
    """Get the first answer, for which the workers compile code: with busy cores longer than a client waits.

    That also makes semaphores in /dev/shm, which vLLM keeps, and a test would seem to leave behind.
    """

    def is_answered() -> bool:
        try:
            ask(address, "the first request")
        except TimeoutError:
            return False
        return True

    wait_until(is_answered, "the answer to the first request", timeout_s=300)


def coordinator(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of `python -m coordinator`, as a user does."""
    command = [sys.executable, "-m", "coordinator", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def top(*arguments: str) -> str:
    """Return one look."""
    done = coordinator("top", "--once", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(text: str) -> list[Row]:
    """Return the rows of ranks that are in groups."""
    found = re.findall(r"^(\S+:0)(?: [a-z ]*?)? +(\d+) +(\d+) (\w+) +(.*)$", text, re.MULTILINE)
    return [Row(group, int(rank), int(pid), state, rest) for group, rank, pid, state, rest in found]


def queue_lines(text: str, name: str) -> list[str]:
    """Return the lines of a queue, one for each reader."""
    return [line for line in text.splitlines() if line.startswith(f"{name} ")]


def blame(*pids: int) -> tuple[int, dict[str, Any]]:
    """Return the exit status of `blame --live`, and its verdict on the only job of these processes."""
    done = coordinator("blame", "--live", "--json", *(word for pid in pids for word in ("--pid", str(pid))))
    assert done.returncode in (0, 3), done.stderr
    (verdict,) = json.loads(done.stdout)["jobs"]
    return done.returncode, verdict


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def load(address: str) -> Iterator[None]:
    """Send one request after the other meanwhile."""
    is_over = threading.Event()
    failures: list[Exception] = []

    def send() -> None:
        try:
            while not is_over.is_set():
                ask(address, "a request of many", max_tokens=200)
        except Exception as error:
            failures.append(error)

    client = threading.Thread(target=send)
    client.start()
    try:
        yield
    finally:
        is_over.set()
        client.join()
    assert not failures


def test_top_shows_the_groups_and_queues_of_an_engine_that_serves(engine: Engine) -> None:
    """Each worker has a row for each group that both are in, and the scheduler's queue one for each worker."""
    with load(engine.address):
        text = top()
        core_only = top("--pid", str(engine.core))
    ours = [row for row in rows(text) if row.pid in engine.workers]
    assert {(row.group, row.rank, row.pid) for row in ours if row.group not in ALONE} == {
        (group, rank, pid) for group in BOTH for rank, pid in enumerate(engine.workers)
    }
    assert {row.state for row in ours} <= SERVING

    steps = f"vllm/pid {engine.core}/0"
    for look in (text, core_only):
        lines = queue_lines(look, steps)
        assert [line.removeprefix(steps).split()[:3] for line in lines] == [
            [str(engine.core), "rank", str(rank)] for rank in (0, 1)
        ]
        assert all(float(line.removeprefix(steps).split()[3].rstrip("kM")) > 0 for line in lines), lines
        for rank in (0, 1):
            (answers,) = queue_lines(look, f"vllm/rank {rank}/0")
            assert answers.split()[2:5] == ["rank", str(rank), str(engine.core)]


def test_dump_has_the_pages_of_both_workers_with_all_their_groups(engine: Engine) -> None:
    """The engine has made six groups in each worker: all are usable, with their members and the worker's place."""
    done = coordinator("dump", *(word for pid in engine.workers for word in ("--pid", str(pid))))
    assert done.returncode == 0, done.stderr
    dump = decode_dump(done.stdout.encode())
    pages = {each.pid: each.page for each in dump.pages if each.pid in engine.workers}
    for rank, pid in enumerate(engine.workers):
        assert (pages[pid].rank, pages[pid].world_size) == (rank, 2)
        assert {group.name: (group.state, group.ranks, group.place) for group in pages[pid].groups} == {
            **dict.fromkeys(BOTH, ("usable", (0, 1), rank)),
            **dict.fromkeys(ALONE, ("usable", (rank,), 0)),
        }


def test_top_tells_an_idle_engine_from_one_that_works(engine: Engine) -> None:
    """Calls per second under load are above zero; without a request both workers sleep in `dequeue`."""
    with load(engine.address):
        text = top("--pid", str(engine.workers[0]))
    column = text.splitlines()[2].index("calls/s")
    (busy,) = [line for line in text.splitlines() if re.match(r"tp:0 shared +0 ", line)]
    assert re.fullmatch(r" *[1-9][0-9.]*[kM]?", busy[column : column + len("calls/s")]), text

    def is_idle() -> bool:
        found = rows(top())
        return all(row.state == "idle" for row in found if row.pid in engine.workers)

    wait_until(is_idle, "both workers to be shown as idle")


@pytest.mark.parametrize("rank", [1, 0])
def test_blame_names_a_stopped_worker(engine: Engine, rank: int) -> None:
    """The other worker waits for it in the step of a request, which is answered once it goes on."""
    prompt = "a request that finds a worker stopped"
    before = ask(engine.address, prompt)
    victim, other = engine.workers[rank], engine.workers[1 - rank]
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(ask(engine.address, prompt)))
    verdict: dict[str, Any] = {}

    def is_blamed() -> bool:
        nonlocal verdict
        status, verdict = blame(other)
        return status == 3 and verdict["findings"][0]["rule"] == "root cause"

    os.kill(victim, signal.SIGSTOP)
    try:
        client.start()
        wait_until(is_blamed, "blame to see that a worker waits", timeout_s=30)
        said = coordinator("blame", "--live", "--pid", str(victim))
        look = top()
    finally:
        os.kill(victim, signal.SIGCONT)
        client.join()
    assert answers == [before]

    (finding,) = verdict["findings"]
    assert (finding["group"], finding["plane"]) == ("tp:0", "shared")
    (culprit,) = finding["culprits"]
    assert (culprit["rank"], culprit["pid"]) == (rank, victim)
    assert culprit["what"].startswith("stopped, in no call for ")
    assert said.returncode == 3
    assert f"rank {rank} (pid {victim} on " in said.stdout
    call = f"{finding['call']} #{finding['number']}"
    assert f"rank {1 - rank} waits in {call} on 'tp:0' (shared) for rank {rank}" in said.stdout
    seen = rows(look)
    assert {row.state for row in seen if row.pid == victim} == {"stopped"}
    (waiting,) = [row for row in seen if row.pid == other and row.state == "waiting"]
    assert waiting.rest.startswith(f"{call} "), waiting
    assert f" s {rank} " in waiting.rest
    step = queue_lines(look, f"vllm/pid {engine.core}/0")[rank]
    assert step.endswith("nobody, reader is behind")


def test_blame_names_a_stopped_core_of_the_engine(engine: Engine) -> None:
    """It is in no group, and no request is needed: the workers wait for its next step, and a record tells it too."""
    prompt = "a request before and behind"
    before = ask(engine.address, prompt)
    said: list[str] = []

    def is_named(*where: str) -> bool:
        done = coordinator("blame", *where)
        said.append(done.stdout)
        return done.returncode == 3

    with stopped(engine.core):
        for where in (("--live", "--pid", str(engine.workers[0])), (str(engine.record),)):
            wait_until(lambda where=where: is_named(*where), f"blame {where[0]}", timeout_s=60)  # type: ignore[misc]
            name = f"vllm/pid {engine.core}/0"
            assert (
                f"  call: dequeue on '{name}'\n  writer of queue '{name}' (pid {engine.core} on " in said[-1]
            )
            assert "): stopped, in no group, wrote message #" in said[-1]
    assert ask(engine.address, prompt) == before
