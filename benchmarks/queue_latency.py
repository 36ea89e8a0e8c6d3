"""Latency, throughput and processor time of the broadcast from a scheduler to a worker.

Two processes on this machine. Every round runs every implementation once, one after the other, so that a
ratio compares figures of the same minute; a figure is the median over the rounds. One-way latencies use
CLOCK_MONOTONIC, which is one clock for the machine; processor time is the waiting reader's.

    python -m benchmarks.queue_latency [--rounds 3] [--cases tiny,sched,…] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.settings import CoordinatorSettings

WAITS = ("adaptive", "spin", "park")
IMPLEMENTATIONS = (*(f"ours {wait}" for wait in WAITS), "torch gloo")


def scheduler_output(step: int) -> dict[str, Any]:
    """Return what a scheduler sends for a decode step of eight requests: about 0.5 KB."""
    return {
        "step": step,
        "ts": 0,
        "reqs": [
            {"id": f"req-{i}", "tokens": list(range(16)), "blocks": list(range(8)), "t": 0.7}
            for i in range(8)
        ],
    }


def irregular_gaps() -> list[float]:
    """Return the gaps of a lognormal load with a median of 5 ms, in seconds; the same on both ranks."""
    gaps = np.random.default_rng(7).lognormal(np.log(0.005), 1.0, 300).clip(0.0002, 0.05)
    return [float(gap) for gap in gaps]


Case = tuple[Callable[[int], dict[str, Any]], list[float]]

LATENCIES: dict[str, Case] = {
    "tiny, 2 ms apart": (lambda i: {"ts": 0, "i": i}, [0.002] * 600),
    "scheduler step, 2 ms apart": (scheduler_output, [0.002] * 600),
    "256 KB array, 2 ms apart": (lambda _: {"ts": 0, "a": np.zeros(1 << 18, np.uint8)}, [0.002] * 600),
    "8 MB array, 20 ms apart": (lambda _: {"ts": 0, "a": np.zeros(8 << 20, np.uint8)}, [0.02] * 40),
    "tiny, 20 ms apart": (lambda i: {"ts": 0, "i": i}, [0.02] * 150),
    "tiny, 2 s apart": (lambda i: {"ts": 0, "i": i}, [2.0] * 5),
    "tiny, irregular": (lambda i: {"ts": 0, "i": i}, irregular_gaps()),
}
RATES: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
    "tiny, back to back": (lambda i: {"step": i}, 20000),
    "scheduler step, back to back": (scheduler_output, 10000),
}


class Gloo:
    """torch.distributed alone, behind the same verb."""

    def broadcast_object(self, obj: Any = None) -> Any:
        """Return rank 0's object."""
        box = [obj]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def time_latency(group: Any, rank: int, case: Case) -> dict[str, float]:
    """Return the one-way latencies in µs and the reader's processor time in percent, on rank 1."""
    make, gaps = case
    latencies = []
    dist.barrier()
    cpu, wall = time.process_time(), time.monotonic()
    for i, gap in enumerate(gaps):
        if rank == 0:
            time.sleep(gap)
            message = make(i)
            message["ts"] = time.monotonic_ns()
            group.broadcast_object(message)
        else:
            message = group.broadcast_object(None)
            latencies.append((time.monotonic_ns() - message["ts"]) / 1e3)
    cpu, wall = time.process_time() - cpu, time.monotonic() - wall
    if rank == 0:
        return {}
    kept = sorted(latencies[5:] or latencies)
    return {
        "p50 us": round(statistics.median(kept), 1),
        "p99 us": round(kept[min(len(kept) - 1, int(0.99 * len(kept)))], 1),
        "reader cpu %": round(100 * cpu / wall, 1),
    }


def time_rate(group: Any, rank: int, make: Callable[[int], dict[str, Any]], count: int) -> dict[str, float]:
    """Return messages per second, on rank 1; each is checked."""
    messages = [make(i) for i in range(64)]
    dist.barrier()
    start = time.monotonic()
    for i in range(count):
        message = group.broadcast_object(messages[i % 64] if rank == 0 else None)
        if rank and message["step"] != i % 64:
            raise AssertionError(f"message {i} is {message}")
    dist.barrier()
    return {"messages/s": round(count / (time.monotonic() - start))} if rank else {}


def run_rank(rank: int, implementation: str, directory: str, cases: list[str]) -> None:
    """Measure one implementation as one of two ranks; rank 1 prints the figures as JSON."""
    torch.set_num_threads(1)
    wait = implementation.removeprefix("ours ") if implementation.startswith("ours") else "adaptive"
    settings = CoordinatorSettings.resolve({}, broadcast={"wait": wait})
    init_distributed_environment(2, rank, f"file://{directory}", backend="gloo", settings=settings)
    group: Any = Gloo()
    if implementation.startswith("ours"):
        group = get_world_group()
        group.enable_broadcaster()
    figures = {}
    for name, case in LATENCIES.items():
        if any(wanted in name for wanted in cases):
            figures[name] = time_latency(group, rank, case)
    for name, (make, count) in RATES.items():
        if any(wanted in name for wanted in cases):
            figures[name] = time_rate(group, rank, make, count)
    dist.barrier()
    if rank == 1:
        print(json.dumps(figures), flush=True)
    destroy_distributed_environment()


def run(implementation: str, cases: list[str]) -> dict[str, dict[str, float]]:
    """Run both ranks of one implementation; return rank 1's figures."""
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as directory:
        command = [
            sys.executable,
            "-m",
            "benchmarks.queue_latency",
            "--cases",
            ",".join(cases),
            "--directory",
            directory,
        ]
        ranks = [
            subprocess.Popen(  # noqa: S603 - our own module
                [*command, "--rank", str(rank), "--implementation", implementation], stdout=subprocess.PIPE
            )
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=600)[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{implementation}: a rank failed")
    figures: dict[str, dict[str, float]] = json.loads(outputs[1])
    return figures


def main() -> None:
    """Measure all implementations in turn, and print a table of medians with the ratio to torch's Gloo."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--cases", default=",", help="parts of the names of the cases to run, with commas between"
    )
    parser.add_argument("--json", type=Path, help="write the medians to this file")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--implementation", help=argparse.SUPPRESS)
    parser.add_argument("--directory", help=argparse.SUPPRESS)
    args = parser.parse_args()
    cases = args.cases.split(",")
    if args.rank is not None:
        run_rank(args.rank, args.implementation, args.directory, cases)
        return
    samples: dict[str, dict[str, dict[str, list[float]]]] = {}
    for number in range(args.rounds):
        for implementation in IMPLEMENTATIONS:
            print(f"round {number + 1} of {args.rounds}: {implementation}", file=sys.stderr, flush=True)
            for case, figures in run(implementation, cases).items():
                for name, value in figures.items():
                    samples.setdefault(case, {}).setdefault(implementation, {}).setdefault(name, []).append(
                        value
                    )
    medians = {
        case: {
            implementation: {name: statistics.median(values) for name, values in figures.items()}
            for implementation, figures in by.items()
        }
        for case, by in samples.items()
    }
    for case, by in medians.items():
        print(case)
        for implementation, figures in by.items():
            print(
                f"  {implementation:14s}"
                + "".join(f"  {name} {value:>10,.1f}" for name, value in figures.items())
            )
    if args.json:
        args.json.write_text(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
