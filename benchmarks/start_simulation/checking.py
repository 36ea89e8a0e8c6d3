"""What an agreement of real processes takes, beside what the model says."""

from __future__ import annotations

import dataclasses
import os
import time
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

from benchmarks.agreement import LIMIT_S, connect, lent, server, view_of
from benchmarks.launching import die_with_parent
from benchmarks.results import BenchmarkError
from benchmarks.start_simulation.costs import Costs
from benchmarks.start_simulation.model import Network, simulate
from benchmarks.start_simulation.requests import record
from coordinator.bootstrap.agreement.agreeing import agree

__all__ = ["check"]

# How late the last rank comes: the others wait in the store by then.
LATE_S = 3.0


def check(costs: Costs, ranks: int) -> tuple[float, float]:
    """Return the seconds of an agreement from the coming of the last rank on: those of the model, and measured ones."""
    world = dataclasses.replace(record(ranks)[0], behind=[])
    loopback = Network(one_way_s=0.0, bytes_per_s=float("inf"))
    # The server has one core, and the ranks share the others.
    cores = max((os.cpu_count() or 1) - 1, 1)
    (said,) = simulate([world], costs, ranks, LATE_S, loopback, cores).over_s
    return said, _measure(ranks)


def _measure(ranks: int) -> float:
    context = get_context("fork")
    early, last = context.Event(), context.Event()
    with server(ranks) as (port, _):
        pipes, processes = [], []
        for rank in range(ranks):
            own, theirs = context.Pipe(duplex=False)
            gate = last if rank == ranks - 1 else early
            process = context.Process(target=_be_a_rank, args=(port, rank, ranks, gate, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(own)
            processes.append(process)
        try:
            for pipe in pipes:
                _told(pipe)  # it has connected
            early.set()
            time.sleep(LATE_S)
            came = time.monotonic()
            last.set()
            return max(map(_told, pipes)) - came
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.join()
                pipe.close()


def _told(pipe: Connection) -> float:
    if not pipe.poll(LIMIT_S):
        raise BenchmarkError(f"a rank said nothing for {LIMIT_S:.0f} s")
    return float(pipe.recv())


def _be_a_rank(port: int, rank: int, ranks: int, gate: Event, pipe: Connection) -> None:
    die_with_parent()
    usual, waiting = connect(port), connect(port)
    pipe.send(time.monotonic())
    gate.wait()
    view = view_of(rank, {"world_size": str(ranks), "backend": "gloo"})
    agree(usual, "the world", rank, range(ranks), view, LIMIT_S, connect=partial(lent, waiting))
    pipe.send(time.monotonic())
    time.sleep(LIMIT_S)  # until it is killed: its end would cost the others time
