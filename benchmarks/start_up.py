"""Measure how long four processes on this machine take to join a world and to create its groups.

The processes start once. In each cycle all of them join a world, create the groups of tensor 2 x pipeline 2, use each
group once and leave. The figure of a cycle is that of the slowest rank. The table shows median and minimum, because
other load on the machine only adds time. Processor time is the sum over all ranks.

    python -m benchmarks.start_up [--cycles 30] [--schemes file,tcp] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from coordinator import (
    ParallelGroups,
    ParallelLayout,
    destroy_distributed_environment,
    init_distributed_environment,
)

WORLD_SIZE = 4
WARM_UP = 3
# Methods of a store; calls are counted by wrapping them.
STORE_CALLS = ("set", "get", "add", "check", "compare_set", "multi_get", "wait")


def count_store_calls() -> dict[str, int]:
    """Count this process's calls of prefix stores from now on; all our stores are prefix stores."""
    counts = dict.fromkeys(STORE_CALLS, 0)

    def counting(name: str) -> None:
        original = getattr(dist.PrefixStore, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return original(*args)

        setattr(dist.PrefixStore, name, call)

    for name in STORE_CALLS:
        counting(name)
    return counts


def run_cycle(rank: int, method: str) -> dict[str, float]:
    """Join, create, use and leave once; return the duration of each step in ms."""
    layout = ParallelLayout(tensor=2, pipeline=2)
    cpu, start = time.process_time(), time.perf_counter()
    init_distributed_environment(WORLD_SIZE, rank, method, backend="gloo")
    joined = time.perf_counter()
    with ParallelGroups.create(layout, use_message_queue_broadcaster=False) as groups:
        created, spent = time.perf_counter(), time.process_time()
        phases = groups.startup_report().phases
        for group in dict.fromkeys(groups.by_name().values()):
            group.barrier()
        used = time.perf_counter()
    destroy_distributed_environment()
    left = time.perf_counter()
    steps = {"world": (start, joined), "tp + pp": (joined, created), "created": (start, created)}
    steps |= {"first use": (created, used), "destroy": (used, left)}
    figures = {name: (until - since) * 1e3 for name, (since, until) in steps.items()}
    figures |= {f"- {name.replace('_', ' ')}": seconds * 1e3 for name, seconds in phases.items()}
    return figures | {"cpu": (spent - cpu) * 1e3}


def run_rank(rank: int) -> None:
    """Run a cycle for each line on stdin, and answer with a line of JSON."""
    torch.set_num_threads(1)
    counts = count_store_calls()
    for line in sys.stdin:
        before = sum(counts.values())
        figures = run_cycle(rank, line.strip())
        print(json.dumps(figures | {"store calls": sum(counts.values()) - before}), flush=True)


def free_port() -> int:
    """Return a port that is currently free on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(pipe: IO[str], line: str) -> None:
    """Start a rank's next cycle."""
    pipe.write(line + "\n")
    pipe.flush()


def measure(schemes: list[str], cycles: int) -> dict[str, dict[str, list[float]]]:
    """Return the figures of each scheme of a rendezvous address, one per cycle."""
    command = [sys.executable, "-m", "benchmarks.start_up", "--rank"]
    samples: dict[str, dict[str, list[float]]] = {scheme: {} for scheme in schemes}
    ranks = [
        subprocess.Popen(  # noqa: S603 - our own module
            [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as directory:
            for number in range(WARM_UP + cycles):
                for scheme in schemes:
                    method = (
                        f"tcp://127.0.0.1:{free_port()}" if scheme == "tcp" else f"file://{directory}/world"
                    )
                    for rank in ranks:
                        assert rank.stdin is not None
                        ask(rank.stdin, method)
                    answers = [
                        json.loads(rank.stdout.readline()) for rank in ranks if rank.stdout is not None
                    ]
                    if number >= WARM_UP:
                        for name in answers[0]:
                            added = name in ("cpu", "store calls")
                            value = (sum if added else max)(answer.get(name, 0.0) for answer in answers)
                            samples[scheme].setdefault(name, []).append(value)
    finally:
        for rank in ranks:
            if rank.stdin is not None:
                rank.stdin.close()
        for rank in ranks:
            rank.wait(timeout=60)
    return samples


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cycles", type=int, default=30)
    parser.add_argument("--schemes", default="file,tcp", help="schemes of the rendezvous address: file, tcp")
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        run_rank(args.rank)
        return
    samples = measure(args.schemes.split(","), args.cycles)
    medians: dict[str, dict[str, dict[str, float]]] = {}
    for scheme, figures in samples.items():
        print(f"{scheme}: ms of {WORLD_SIZE} ranks, {args.cycles} cycles")
        for name, values in figures.items():
            found = {"median": round(statistics.median(values), 2), "min": round(min(values), 2)}
            medians.setdefault(scheme, {})[name] = found
            print(f"  {name:24s}  median {found['median']:8.1f}  min {found['min']:8.1f}")
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
