"""Measure what `python -m coordinator top` takes of a core while it shows four ranks once a second on its screen.

python -m benchmarks top [--seconds 30] [--ranks 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from benchmarks.launching import die_with_parent
from benchmarks.results import BenchmarkError, write_figures
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import init_distributed_environment

# Until the command has started and drawn its first screens.
START_S = 60.0
LIMIT_S = 60.0
# Between two calls: ranks of an engine compute as long as this.
STEP_S = 0.01


def run_rank(rank: int, ranks: int, method: str, told: Connection) -> None:
    """Make calls until the parent ends."""
    die_with_parent()
    torch.set_num_threads(1)
    init_distributed_environment(ranks, rank, method, backend="gloo")
    groups = ParallelGroups.from_sizes(tensor_parallel_size=ranks)
    tensor = torch.ones(256)
    told.send("ready")
    while True:
        groups.tp.all_reduce(tensor)
        time.sleep(STEP_S)


def processor_s(pid: int) -> float:
    """Return the processor time that a process has taken, in seconds."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def read_for(terminal: int, seconds: float) -> int:
    """Read what a command writes to its terminal for a time; return how many bytes that were."""
    end, nbytes = time.monotonic() + seconds, 0
    while (left := end - time.monotonic()) > 0:
        if select.select([terminal], [], [], left)[0]:
            nbytes += len(os.read(terminal, 1 << 16))
    return nbytes


def measure(seconds: float, ranks: int) -> dict[str, float]:
    """Return the share of a core, and the bytes per second that the screen takes."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory(prefix="group-coordinator-bench-") as folder:
        ends = [context.Pipe(duplex=False) for _ in range(ranks)]
        processes = [
            context.Process(target=run_rank, args=(rank, ranks, f"file://{folder}/world", write), daemon=True)
            for rank, (_, write) in enumerate(ends)
        ]
        for process in processes:
            process.start()
        try:
            if not all(read.poll(LIMIT_S) for read, _ in ends):
                raise BenchmarkError(f"a rank said nothing for {LIMIT_S:.0f} s")
            ours, its = pty.openpty()
            command = [sys.executable, "-m", "coordinator", "top"]
            with subprocess.Popen(command, stdin=its, stdout=its, stderr=its) as top:  # noqa: S603 - our own module
                try:
                    os.close(its)
                    if not read_for(ours, START_S):
                        raise BenchmarkError(f"top drew nothing within {START_S:.0f} s")
                    before, began = processor_s(top.pid), time.monotonic()
                    nbytes = read_for(ours, seconds)
                    took_s = time.monotonic() - began
                    share = (processor_s(top.pid) - before) / took_s
                finally:
                    top.kill()
                    os.close(ours)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {"share_of_a_core": share, "bytes_per_s": nbytes / took_s}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks top", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.seconds, options.ranks)
    print(
        f"top of {options.ranks} ranks, once a second for {options.seconds:g} s: "
        f"{found['share_of_a_core']:.2%} of a core, {found['bytes_per_s']:.0f} B/s to the terminal"
    )
    if options.json is not None:
        write_figures(options.json, {"seconds": options.seconds, "ranks": options.ranks, **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
