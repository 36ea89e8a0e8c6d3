"""Measure how long groups are out of work when their members change: after a kill, and as planned.

Ranks add up numbers in a loop. In each cycle one of them, chosen at random, is killed at a random time, and the others
create their groups again: the time from the kill to the first good sum of the last of them. Then a new process takes
the place of the lost one, by a planned change: the time for which its commit blocks the ranks that serve, from the last
sum of the old groups to the first one of the new groups, and the time from the kill until all ranks work again. This
one holds the start of the new process, without its imports. At the end of the cycle a rank chosen at random leaves as
planned, and another new process takes its place in the same change: the time for which that blocks the ranks that stay.

    python -m benchmarks rebuild [--cycles 40] [--ranks 4] [--seed N] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch

from benchmarks.launching import die_with_parent
from benchmarks.results import BenchmarkError, write_figures
from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import CommTimeoutError, GroupBrokenError, PeerLostError
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment

# How long ranks may take to start, and to go on.
LIMIT_S = 60.0
MOST_PAUSE_S = 0.05
# How often rank 0 looks whether a process waits to join.
LOOK_S = 0.005
# What rank 0 adds to the sum: nothing, or what all ranks are to do. From `LEAVE` on it says which rank leaves.
GO_ON, JOIN, END, LEAVE = 0.0, 1.0, 2.0, 3.0

Times: TypeAlias = tuple[float, float]


class Cycle(NamedTuple):
    """Seconds.

    Attributes:
        error: From the kill to the error of the last rank.
        rebuilt: From the kill to the first good sum of the last rank that is left.
        blocked: The most that the commit of the replacement has blocked a rank that served.
        replaced: From the kill to the first good sum of the last rank, with the new process.
        exchanged: The most that the commit of a change by which one rank leaves and another comes has blocked one that
            stays.
    """

    error: float
    rebuilt: float
    blocked: float
    replaced: float
    exchanged: float


NAMES = (
    "the last rank's error",
    "its first good sum",
    "blocked by the commit",
    "all ranks again",
    "blocked as one leaves",
)
"""What the figures of a `Cycle` are called."""


# --- a rank -------------------------------------------------------------------------------------------------------


def serve(rank: int, ranks: int, method: str, told: Connection, *, joins: bool) -> None:
    """Add up, and change members when a rank is lost or the parent wants it; tell the times of both."""
    die_with_parent()
    torch.set_num_threads(1)
    if joins:
        groups = join_distributed_environment(method, replaces=rank, timeout_s=LIMIT_S)
    else:
        init_distributed_environment(ranks, rank, method, backend="gloo", elastic=True)
        groups = ParallelGroups.from_sizes()
    add_up(groups, GO_ON)
    told.send((time.monotonic(), time.monotonic()))
    is_asked, look_at = GO_ON, 0.0
    while True:
        if groups.world.rank == 0 and is_asked == GO_ON and told.poll():
            is_asked = told.recv()
        wants = GO_ON if is_asked != END else END
        if is_asked not in (GO_ON, END) and time.monotonic() >= look_at:
            look_at = time.monotonic() + LOOK_S
            wants = is_asked if groups.pending_members(leave=leaving(is_asked)) else GO_ON
        try:
            wanted = add_up(groups, wants)
        except (PeerLostError, CommTimeoutError, GroupBrokenError):
            failed_at = time.monotonic()
            groups = groups.rebuild()
            add_up(groups, GO_ON)
            told.send((failed_at, time.monotonic()))
            continue
        if wanted == END:
            groups.destroy()
            break
        if wanted != GO_ON:
            changed, times = change(groups, leaving(wanted))
            if changed is None:
                break
            groups, is_asked = changed, GO_ON
            told.send(times)
    if not joins:
        destroy_distributed_environment()


def add_up(groups: ParallelGroups, wants: float) -> float:
    """Add up ones, and what the ranks want; return that."""
    tensor = torch.ones(256)
    tensor[0] = wants
    found = groups.dp.all_reduce(tensor)
    if found[1].item() != groups.dp.world_size:
        raise BenchmarkError(f"rank {groups.world.rank} has a wrong sum")
    return found[0].item()


def leaving(wanted: float) -> list[int]:
    """Return the ranks that leave in the change which the ranks want."""
    return [int(wanted - LEAVE)] if wanted >= LEAVE else []


def change(groups: ParallelGroups, leave: Sequence[int]) -> tuple[ParallelGroups | None, Times]:
    """Let ranks leave, and take the process in that waits.

    Returns:
        The groups, or None on a rank that leaves; and when the last good sums were before and behind the change.
    """
    plan = groups.prepare(join=1, leave=leave)
    # Ranks end the preparation one after the other; this is no part of what the commit costs.
    add_up(groups, GO_ON)
    stays = groups.world.rank not in leave
    start = time.monotonic()
    committed = plan.commit()
    if (committed is not None) != stays:
        raise BenchmarkError("a rank that stays was told to leave, or one that leaves to stay")
    if committed is not None:
        add_up(committed, GO_ON)
    return committed, (start, time.monotonic())


# --- the parent ---------------------------------------------------------------------------------------------------


class Members:
    """The ranks, in their order, and the ends of their pipes."""

    def __init__(self, ranks: int, method: str) -> None:
        """Start nothing yet."""
        self._ranks = ranks
        self._method = method
        self._processes: list[ForkProcess] = []
        self._pipes: list[Connection] = []

    def start(self, rank: int, *, joins: bool) -> None:
        """Start the process of a rank."""
        context = get_context("fork")
        own, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(rank, self._ranks, self._method, theirs), kwargs={"joins": joins}, daemon=True
        )
        process.start()
        theirs.close()
        self._processes.insert(rank, process)
        self._pipes.insert(rank, own)

    def told(self) -> list[Times]:
        """Return what each rank tells next."""
        found: list[Times] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(LIMIT_S):
                raise BenchmarkError(f"rank {rank} said nothing for {LIMIT_S:.0f} s")
            found.append(pipe.recv())
        return found

    def ask(self, wants: float) -> None:
        """Let rank 0 ask all ranks for something."""
        self._pipes[0].send(wants)

    def kill(self, rank: int) -> float:
        """Kill a rank; return when."""
        killed_at = time.monotonic()
        os.kill(self._processes[rank].pid or 0, signal.SIGKILL)
        self._processes.pop(rank).join()
        self._pipes.pop(rank).close()
        return killed_at

    def exchange(self, rank: int) -> list[Times]:
        """Let a rank leave and a new process take its place; return what each rank tells then."""
        self.ask(LEAVE + rank)
        process, pipe = self._processes.pop(rank), self._pipes.pop(rank)
        self.start(rank, joins=True)
        try:
            return self.told()
        finally:
            process.join(LIMIT_S)
            process.kill()
            pipe.close()

    def end(self) -> None:
        """Kill those that still run."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()


def cycle(members: Members, victim: int, leaver: int) -> Cycle:
    """Kill a rank, and replace it; then let another one leave, and replace that."""
    killed_at = members.kill(victim)
    failed, good = (max(each) for each in zip(*members.told(), strict=True))
    members.ask(JOIN)  # the first of those that are left: the new process may come before it
    members.start(victim, joins=True)
    times = members.told()
    blocked = max(end - start for start, end in times)
    replaced = max(end for _, end in times)
    exchanged = max(end - start for start, end in members.exchange(leaver))
    return Cycle(failed - killed_at, good - killed_at, blocked, replaced - killed_at, exchanged)


def measure(ranks: int, cycles: int, chance: random.Random) -> list[Cycle]:
    """Return the times of all cycles of one run."""
    found = []
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as folder:
        members = Members(ranks, f"file://{folder}/world")
        try:
            for rank in range(ranks):
                members.start(rank, joins=False)
            members.told()
            for _ in range(cycles):
                time.sleep(chance.uniform(0.0, MOST_PAUSE_S))
                found.append(cycle(members, chance.randrange(ranks), chance.randrange(ranks)))
            members.ask(END)
        finally:
            members.end()
    return found


def at_quantile(values: Sequence[float], part: float) -> float:
    """Return the value that `part` of `values` do not exceed."""
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks rebuild", description=__doc__)
    parser.add_argument("--cycles", type=int, default=40)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.ranks, options.cycles, random.Random(options.seed))
    figures = {}
    print(f"{options.ranks} ranks, one of them killed and replaced, {options.cycles} cycles; ms")
    for name, times in zip(NAMES, zip(*found, strict=True), strict=True):
        median, p99, most = statistics.median(times), at_quantile(times, 0.99), max(times)
        figures[name] = {"median_s": median, "p99_s": p99, "most_s": most}
        print(f"{name:25} median {median * 1e3:7.1f}   p99 {p99 * 1e3:7.1f}   most {most * 1e3:7.1f}")
    if options.json is not None:
        write_figures(options.json, {"cycles": options.cycles, "ranks": options.ranks, "times": figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
