"""Ranks that have groups and do nothing: which threads they have, and how often these wake."""

import os
import threading
import time
from pathlib import Path

import pytest
import torch

from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.settings import CoordinatorSettings
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.harness import run_ranks
from tests.ports import free_port
from tests.waiting import wait_until
from tests.worlds import meet, new_group

IDLE_S = 2.0

GLOO = "gloo_tcp_loop"
"""Gloo's thread for its connections: it looks at them each 10 ms, as with every process group of torch over Gloo."""

RUNS_WORKS = ["pt_gloo_runloop"] * 2
"""The threads in which torch runs the works of a process group over Gloo."""

STORE = "pt_tcpstore"
"""torch's server of a store, in the rank at which the others meet."""

Switches = dict[str, tuple[str, int]]


def switches() -> Switches:
    """Return the name of each thread of this process, and how often it has given its processor away to wait."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        try:
            lines = (task / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):  # the thread has just ended
            continue
        words = dict(line.split(":", 1) for line in lines)
        found[task.name] = words["Name"].strip(), int(words["voluntary_ctxt_switches"])
    return found


def lasting(rank: int, has_store: bool) -> list[str]:
    """Return the names of the threads that a rank with groups has, without its main thread."""
    return [GLOO, *RUNS_WORKS, *[STORE] * (rank == 0 and has_store)]


def idles(rank: int, world_size: int, directory: Path, method: str) -> list[list[tuple[str, int]]]:
    """Return the threads and their wake-ups, of the main thread and of others, while this rank sleeps once."""
    init_distributed_environment(
        world_size,
        rank,
        method or f"file://{directory}/rendezvous",
        backend="gloo",
        settings=CoordinatorSettings.resolve({}),
    )
    world = get_world_group()
    tp = new_group(world, "tp")
    queue = world.create_mq_broadcaster(0)
    # Everything that begins with a first call has begun.
    world.barrier()
    tp.all_reduce(torch.ones(4))
    if isinstance(queue, QueueWriter):
        queue.enqueue("step")
    else:
        assert isinstance(queue, QueueReader)
        assert queue.dequeue() == "step"
    meet(rank, range(world_size), directory, "idle")
    # A thread that was joined leaves Python's list, and then the kernel's, a moment after `join` has returned.
    wait_until(lambda: threading.enumerate() == [threading.main_thread()], "Python's threads have ended")
    threads = 1 + len(lasting(rank, bool(method)))
    wait_until(lambda: len(switches()) == threads, "threads that have ended are on the list no more")
    before = switches()
    time.sleep(IDLE_S)
    after = switches()
    meet(rank, range(world_size), directory, "end")
    tp.destroy()
    destroy_distributed_environment()
    assert before.keys() == after.keys()
    grown = {thread: (name, count - before[thread][1]) for thread, (name, count) in after.items()}
    return [[grown.pop(str(os.getpid()))], sorted(grown.values())]


@pytest.mark.guarantee("S5")
@pytest.mark.parametrize("way", ["a directory", "a store"])
def test_idle_ranks_have_no_thread_that_wakes(way: str) -> None:
    """With a world, a group in it and a queue a rank wakes once from its own sleep; only Gloo's own thread polls."""
    method = f"tcp://127.0.0.1:{free_port()}" if way == "a store" else ""
    for rank, ((main,), others) in enumerate(run_ranks(idles, 2, method)):
        assert main[1] == 1
        assert [name for name, _ in others] == lasting(rank, way == "a store")
        assert [(name, count) for name, count in others if count and name != GLOO] == []
