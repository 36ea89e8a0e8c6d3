"""vLLM's own data parallelism over our groups and queues: two replicas behind one server.

Replicas of a model without experts are engines of their own, each with its groups. With experts they share the groups
`dp` and `ep`, over which each layer exchanges tokens.
"""

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from benchmarks.engine_server import ask, serve
from benchmarks.process_tree import process_tree, title_of
from tests.real_engines.test_diagnosis import blame, load, queue_lines, rows, stopped, top, warm_up
from tests.real_engines.test_vllm_server import answers
from tests.waiting import has_ended, wait_until

pytestmark = pytest.mark.engine

REPLICAS = ("--data-parallel-size", "2")
ONE = ("--tensor-parallel-size", "1")


class Replicas(NamedTuple):
    """A server: its address, and the processes of its engines' cores and of their workers, by replica."""

    address: str
    cores: tuple[int, int]
    workers: tuple[int, int]


def processes(server: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the cores and the workers of the two replicas of a server."""
    titles = {process.pid: title_of(process.pid) for process in process_tree(server)}
    cores = sorted((title, pid) for pid, title in titles.items() if title.startswith("VLLM::EngineCore_DP"))
    (_, first), (_, second) = cores
    one, two = (worker_of(core) for core in (first, second))
    return (first, second), (one, two)


def worker_of(core: int) -> int:
    """Return the only worker of an engine."""
    below = [process.pid for process in process_tree(core)]
    (worker,) = [pid for pid in below if title_of(pid).startswith("VLLM::Worker")]
    return worker


@pytest.fixture(scope="module")
def replicas(vllm: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Start a server with two replicas of a mixture of experts."""
    log = tmp_path_factory.mktemp("replicas") / "server.log"
    with serve(vllm, mixture, "group_coordinator", log, REPLICAS) as (address, server):
        warm_up(address)
        yield Replicas(address, *processes(server))


def test_the_answers_of_two_replicas_are_those_of_stock(vllm: Path, model: Path, tmp_path: Path) -> None:
    """Each replica is an engine of its own. When a worker is killed, vLLM ends the other replica too."""
    got = {}
    for plugins in ("", "group_coordinator"):
        log = tmp_path / f"{plugins or 'stock'}.log"
        with serve(vllm, model, plugins, log, REPLICAS) as (address, server):
            got[plugins] = answers(address)
            cores, workers = processes(server)
            os.kill(workers[1], signal.SIGKILL)
            wait_until(lambda pids=(*cores, *workers): all(map(has_ended, pids)), "all to end")  # type: ignore[misc]
        assert log.read_text().count("uses its groups and queues") >= (4 if plugins else 0)
    assert got["group_coordinator"] == got[""]


def test_the_answers_of_two_replicas_with_experts_are_those_of_one_of_stock(
    vllm: Path, mixture: Path, replicas: Replicas, tmp_path: Path
) -> None:
    """Stock itself has no data parallelism with experts on CPUs: its first step raises `NotImplementedError`."""
    with serve(vllm, mixture, "", tmp_path / "stock.log", ONE) as (address, _):
        stock = answers(address)
    assert answers(replicas.address) == stock
    assert len(set(stock["together"])) == len(stock["together"])


def test_top_shows_the_group_of_the_replicas_and_the_queues_of_both_cores(replicas: Replicas) -> None:
    """Rank 0 is the worker of the first replica, rank 1 that of the second one."""
    with load(replicas.address):
        text = top()
    ours = [row for row in rows(text) if row.pid in replicas.workers]
    assert {(row.rank, row.pid) for row in ours if row.group == "dp:0"} == set(enumerate(replicas.workers))
    for rank, core in enumerate(replicas.cores):
        (line,) = queue_lines(text, f"vllm/pid {core}/0")
        assert line.split()[2:5] == [str(core), "rank", str(rank)]


@pytest.mark.parametrize("rank", [1, 0])
def test_blame_names_the_stopped_worker_of_a_replica(replicas: Replicas, rank: int) -> None:
    """The replicas go step by step together; both answer when it goes on."""
    victim, other = replicas.workers[rank], replicas.workers[1 - rank]
    prompts = [f"request {number} of two replicas" for number in range(4)]
    before = [ask(replicas.address, prompt) for prompt in prompts]
    found: dict[int, str] = {}

    def one(number: int) -> None:
        found[number] = ask(replicas.address, prompts[number])

    clients = [threading.Thread(target=one, args=(number,)) for number in range(len(prompts))]
    verdict: dict[str, Any] = {}

    def is_blamed() -> bool:
        nonlocal verdict
        status, verdict = blame(other)
        return status == 3

    with stopped(victim):
        for client in clients:
            client.start()
        wait_until(is_blamed, "blame to name a worker", timeout_s=30)
    for client in clients:
        client.join()
    (finding, *_) = verdict["findings"]
    assert finding["rule"] == "root cause"
    assert [(each["rank"], each["pid"]) for each in finding["culprits"]] == [(rank, victim)]
    assert [found[number] for number in range(len(prompts))] == before


def test_blame_names_the_stopped_core_of_a_replica(replicas: Replicas) -> None:
    """It belongs to the job of both replicas, whose workers share groups."""
    core, worker = replicas.cores[1], replicas.workers[0]
    verdict: dict[str, Any] = {}

    def is_blamed() -> bool:
        nonlocal verdict
        status, verdict = blame(worker)
        return status == 3

    with stopped(core):
        wait_until(is_blamed, "blame to name the core", timeout_s=30)
    (finding, *_) = verdict["findings"]
    (culprit,) = finding["culprits"]
    assert (finding["rule"], culprit["rank"], culprit["pid"]) == ("root cause", None, core)
    assert culprit["role"] == f"writer of queue 'vllm/pid {core}/0'"
