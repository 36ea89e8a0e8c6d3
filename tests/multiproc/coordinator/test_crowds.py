"""Many more ranks than cores, beside processes that never sleep: every call ends, with the right result."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.harness import run_ranks
from tests.queue_ranks import DEADLINE_S, Marks, offer, take
from tests.worlds import world

RANKS = 16
ROUNDS = 60
# Elements of the all-reduces: one shot and two, with a share of each rank.
ELEMENTS = (1, 1 << 10, 1 << 14)


def crowded(rank: int, world_size: int, directory: Path, rounds: int = ROUNDS) -> int:
    """Mix the calls of a step many times; return how often this rank's results were right."""
    torch.set_num_threads(1)
    right = 0
    with world(rank, world_size, directory) as everyone:
        everyone.enable_broadcaster()
        for number in range(rounds):
            everyone.barrier()
            elements = ELEMENTS[number % len(ELEMENTS)]
            summed = everyone.all_reduce(torch.full((elements,), float(rank + number)))
            expected = float(world_size * number + world_size * (world_size - 1) // 2)
            # Only what the writer of the queue broadcasts goes through it.
            told = [everyone.broadcast_object([src, number] if rank == src else None, src) for src in (0, 1)]
            right += bool((summed == expected).all()) and told == [[0, number], [1, number]]
        everyone.barrier()
    return right


@contextmanager
def busy_cores() -> Iterator[None]:
    """Run a process that never sleeps for each core, beside the body."""
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


@pytest.mark.guarantee("D72")
def test_a_crowd_beside_busy_loops_gets_every_result() -> None:
    """Sixteen ranks make barriers, sums, and broadcasts over the queue and beside it; no call runs into its time-out.

    Starting them beside the loops takes most of the time of this test.
    """
    with busy_cores():
        assert run_ranks(crowded, RANKS, timeout_s=120.0) == [ROUNDS] * RANKS


@pytest.mark.thorough
@pytest.mark.guarantee("D72")
@pytest.mark.parametrize("ranks", [2, 4, 8, 32, 64, 128])
def test_a_crowd_of_any_size_beside_busy_loops_gets_every_result(ranks: int) -> None:
    """It takes less than a minute, starts and ends included, with fewer rounds the more ranks there are."""
    rounds = min(ROUNDS, 640 // ranks)
    with busy_cores():
        assert run_ranks(crowded, ranks, rounds, timeout_s=60.0) == [rounds] * ranks


def read_all(rank: int, world_size: int, directory: Path, messages: int) -> int:
    """Write to a queue that all other processes read, or read from it; return how many messages were right."""
    marks = Marks(directory)
    if rank == 0:
        with offer(marks, range(1, world_size)) as writer:
            writer.wait_until_ready(DEADLINE_S)
            for number in range(messages):
                writer.enqueue([number, bytes(number * 100)], DEADLINE_S)
            for other in range(1, world_size):
                marks.wait(f"read-{other}")
        return messages
    with take(marks, rank) as reader:
        found = [reader.dequeue(DEADLINE_S) for _ in range(messages)]
        marks.mark(f"read-{rank}")
    return sum(each == [number, bytes(number * 100)] for number, each in enumerate(found))


@pytest.mark.thorough
@pytest.mark.guarantee("D72")
def test_64_readers_of_a_queue_beside_busy_loops_get_every_message() -> None:
    """Each reads all of them, in order and whole, and no call runs into its time-out."""
    messages = 300
    with busy_cores():
        assert run_ranks(read_all, 65, messages, timeout_s=60.0) == [messages] * 65
