"""Simulate the start of thousands of ranks with costs that are measured here.

What is simulated: each rank connects to the store, agrees on the world, takes names, and agrees on the groups of a
layout. What is not: importing, connecting Gloo and NCCL, compiling kernels. Before that the model is checked: it
predicts an agreement of processes on this machine, which is then run for real.

    python -m benchmarks start-simulation [--ranks 1000,2000,5000,10000] [--late-s 0] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Final

from benchmarks.results import write_figures
from benchmarks.start_simulation import costs
from benchmarks.start_simulation.checking import check
from benchmarks.start_simulation.model import CONNECTIONS, simulate
from benchmarks.start_simulation.requests import record

# Numbers of processes that agree for real.
CHECKED: Final = (50, 200)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks start-simulation", description=__doc__)
    parser.add_argument(
        "--ranks", default="1000,2000,5000,10000", help="numbers of ranks (default %(default)s)"
    )
    parser.add_argument("--late-s", type=float, default=0.0, help="how late the last one comes (default 0)")
    parser.add_argument(
        "--checked", default=",".join(map(str, CHECKED)), help="numbers of threads that are run"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    measured = costs.measure()
    print(
        f"the store: {measured.request_s * 1e6:.1f} us a request, {measured.wake_s * 1e6:.1f} us a rank that waits, "
        f"{measured.connection_s * 1e6:.0f} us a connection, {measured.key_s * 1e6:.2f} us a further key"
    )
    checked = []
    for ranks in (int(each) for each in options.checked.split(",") if each):
        said, took = check(measured, ranks)
        checked.append({"ranks": ranks, "simulated_s": said, "measured_s": took})
        print(f"{ranks} processes here agree: {said:.3f} s simulated, {took:.3f} s measured", flush=True)
    rows = []
    for ranks in map(int, options.ranks.split(",")):
        start = simulate(record(ranks), measured, ranks, options.late_s)
        world_s, groups_s = start.over_s
        rows.append({"ranks": ranks, **dataclasses.asdict(start)})
        print(
            f"{ranks} ranks, simulated: the world after {world_s:.2f} s, its groups after {groups_s:.2f} s; "
            f"a rank asks {start.requests} things besides {CONNECTIONS} connections and gets {start.received:,} bytes; "
            f"the store is busy {start.busy:.0%} of the time",
            flush=True,
        )
    if options.json is not None:
        figures = {"costs": dataclasses.asdict(measured), "checked": checked, "late_s": options.late_s}
        write_figures(options.json, {**figures, "simulated": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
