"""Measure all-reduces between two hosts over a line of a given rate, beside torch over Gloo.

The hosts are two network namespaces of this machine, joined by a virtual cable whose both ends a token bucket filter
slows down. In each of several rounds our calls and torch's take turns. Creating namespaces needs root.

Both hosts use the congestion control "cubic", if the kernel lets namespaces use it; the report says what they used. To
let them: echo "reno bbr cubic" > /proc/sys/net/ipv4/tcp_allowed_congestion_control

    python -m benchmarks two-hosts [--mbit 1000] [--ranks-per-host 2] [--json FILE]

With --model it measures float32 of 1 to 16 MiB at three rates, fits what a call takes besides the line at the first and
the last one, and says how far that is off at the one between:

    python -m benchmarks two-hosts --model 250 500 1000
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.line_model import Measured, fitted, off
from benchmarks.results import BenchmarkError, write_figures

SIZES: Final = {
    "8 KiB": 8 << 10,
    "64 KiB": 64 << 10,
    "256 KiB": 256 << 10,
    "1 MiB": 1 << 20,
    "4 MiB": 4 << 20,
    "16 MiB": 16 << 20,
    "64 MiB": 64 << 20,
}
# The sizes of the model: below them four ranks on two cores mostly wait for a core.
MODEL_SIZES: Final = ("1 MiB", "4 MiB", "16 MiB")
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ROUNDS: Final = 5
# What a round moves, at least two and at most a hundred calls.
ROUND_BYTES: Final = 8 << 20
PORT: Final = 29570
CONTROL: Final = "/proc/sys/net/ipv4/tcp_congestion_control"
LIMIT_S: Final = 1800.0
# The filter lets this much pass at once. It must hold what the line carries between two ticks of the kernel's clock.
BURST_TICKS: Final = 1 / 250

# The first shell is the first host, its child the second one, which lives as long as the first.
HOSTS: Final = """
set -e
export RATE="$3" BURST="$4" CONTROL="$5"
cases="$6"
unshare --net sh -c '
    set -e
    ip link set lo up
    : > "$0/ready"
    while [ ! -e "$0/go" ]; do sleep 0.02; done
    ip address add 10.78.0.2/24 dev far
    ip link set far up
    echo cubic > "$CONTROL" || true
    tc qdisc add dev far root tbf rate "$RATE" burst "$BURST" latency 50ms
    : > "$0/connected"
    exec sleep 100000
' "$1" &
other=$!
trap 'kill $other' EXIT
ip link set lo up
while [ ! -e "$1/ready" ]; do sleep 0.02; done
ip link add near type veth peer name far netns $other
ip address add 10.78.0.1/24 dev near
ip link set near up
echo cubic > "$CONTROL" || true
tc qdisc add dev near root tbf rate "$RATE" burst "$BURST" latency 50ms
: > "$1/go"
while [ ! -e "$1/connected" ]; do sleep 0.02; done
rank=0
while [ $rank -lt $(($2 * 2)) ]; do
    if [ $rank -lt "$2" ]; then
        "$0" -m benchmarks.two_hosts --rank $rank --ranks-per-host "$2" $cases --out "$1/found" &
    else
        nsenter --net=/proc/$other/ns/net "$0" -m benchmarks.two_hosts --rank $rank --ranks-per-host "$2" $cases &
    fi
    ranks="$ranks $!"
    rank=$((rank + 1))
done
for each in $ranks; do wait $each; done
"""


def measure(mbit: int, ranks_per_host: int, is_for_model: bool = False) -> dict[str, Any]:
    """Let ranks on both hosts measure; return a row for each size and dtype, and the congestion control."""
    if os.geteuid():
        raise BenchmarkError("creating network namespaces needs root")
    burst = max(64 << 10, int(mbit * 1e6 / 8 * BURST_TICKS))
    with tempfile.TemporaryDirectory(prefix="two-hosts-") as directory:
        words = [sys.executable, directory, str(ranks_per_host), f"{mbit}mbit", str(burst), CONTROL]
        words.append("--for-model" if is_for_model else "")
        with subprocess.Popen(  # noqa: S603 - ours
            ["unshare", "--net", "sh", "-c", HOSTS, *words],  # noqa: S607 - of util-linux
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        ) as process:
            try:
                status = process.wait(LIMIT_S)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if status:
            raise BenchmarkError("a rank failed; its error is above")
        found: dict[str, Any] = json.loads((Path(directory) / "found").read_text())
        return found


# --- a rank -------------------------------------------------------------------------------------------------------


def be_a_rank(rank: int, ranks_per_host: int, out: Path | None, is_for_model: bool) -> None:
    """Measure with the other ranks; rank 0 writes the rows to `out`."""
    from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment

    torch.set_num_threads(1)
    address = f"tcp://10.78.0.1:{PORT}"
    init_distributed_environment(2 * ranks_per_host, rank, address, backend="gloo")
    world = get_world_group()

    def torchs(tensor: torch.Tensor) -> None:
        dist.all_reduce(tensor)

    def ours(tensor: torch.Tensor) -> None:
        world.device_communicator.all_reduce_(tensor)

    implementations = {"ours": ours} if is_for_model else {"ours": ours, "torch": torchs}
    rows = []
    for type_name, dtype in DTYPES.items():
        for name, nbytes in SIZES.items():
            if not is_for_model or (dtype is torch.float32 and name in MODEL_SIZES):
                row = measured_row(torch.ones(nbytes // dtype.itemsize, dtype=dtype), implementations)
                rows.append({"dtype": type_name, "size": name, "nbytes": nbytes, **row})
    if out is not None:
        control = Path(CONTROL).read_text().strip()
        out.write_text(json.dumps({"congestion_control": control, "rows": rows}))
    destroy_distributed_environment()


def measured_row(
    tensor: torch.Tensor, implementations: Mapping[str, Callable[[torch.Tensor], None]]
) -> dict[str, Any]:
    """Let the implementations take turns; return the number of calls, and for each its times in microseconds."""
    from coordinator import get_world_group

    world = get_world_group()
    calls = min(max(ROUND_BYTES // tensor.nbytes, 2), 100)
    times: dict[str, list[float]] = {each: [] for each in implementations}
    for _ in range(ROUNDS):
        for each, call in implementations.items():
            times[each].append(timed(call, tensor, calls, world.barrier))
    # A call takes as long as its slowest rank.
    everyone = world.all_gather_object(times)
    row: dict[str, Any] = {"calls": calls * ROUNDS}
    for each in implementations:
        slowest = [max(taken) for taken in zip(*(found[each] for found in everyone), strict=True)]
        row[each] = {"median_us": statistics.median(slowest) * 1e6, "most_us": max(slowest) * 1e6}
    return row


def timed(
    call: Callable[[torch.Tensor], None], tensor: torch.Tensor, calls: int, barrier: Callable[[], None]
) -> float:
    """Return the seconds of a call, the mean of several in a row; check the first sum.

    Between calls there is no barrier: four ranks on two cores leave it milliseconds apart.
    """
    tensor.fill_(1)
    call(tensor)
    if not bool((tensor == tensor[:1].clone()).all()):
        raise BenchmarkError("a wrong sum")
    tensor.zero_()  # what is added up many times in place stays finite
    barrier()
    start = time.perf_counter()
    for _ in range(calls):
        call(tensor)
    return (time.perf_counter() - start) / calls


def check_model(rates: Sequence[int], ranks_per_host: int) -> dict[str, Any]:
    """Measure at three rates in Mbit/s, fit the model at the outer ones, and print how far off the middle one is."""
    low, middle, high = sorted(rates)
    found = {mbit: measure(mbit, ranks_per_host, is_for_model=True) for mbit in (low, high, middle)}
    figures = {
        mbit: [
            Measured(mbit * 1e6 / 8, row["nbytes"], row["ours"]["median_us"] / 1e6) for row in each["rows"]
        ]
        for mbit, each in found.items()
    }
    model = fitted(figures[low] + figures[high])
    print(
        f"alpha {model.alpha_s * 1e3:.2f} ms, {model.used:.2f} of the line used, fitted at {low} and {high} Mbit/s"
    )
    predicted = []
    for each, part in zip(figures[middle], off(model, figures[middle]), strict=True):
        expected = model.seconds(each.rate, each.nbytes)
        predicted.append(
            {"nbytes": each.nbytes, "predicted_us": expected * 1e6, "measured_us": each.seconds * 1e6}
        )
        print(
            f"{middle} Mbit/s, {each.nbytes >> 20:3} MiB: predicted {expected * 1e3:7.1f} ms, "
            f"measured {each.seconds * 1e3:7.1f} ms, {part:+.1%}"
        )
    fit = {"alpha_us": model.alpha_s * 1e6, "used": model.used, "fitted_mbit": [low, high], "mbit": middle}
    return {
        "ranks_per_host": ranks_per_host,
        "congestion_control": found[middle]["congestion_control"],
        "model": {**fit, "predicted": predicted},
        "rows": [{"mbit": mbit, **row} for mbit in (low, middle, high) for row in found[mbit]["rows"]],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks two-hosts", description=__doc__)
    parser.add_argument("--mbit", type=int, default=1000, help="rate of the line in Mbit/s (default 1000)")
    parser.add_argument("--ranks-per-host", type=int, default=2, help="ranks of each host (default 2)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument(
        "--model", type=int, nargs=3, metavar="MBIT", help="fit at two rates and predict the one between"
    )
    parser.add_argument("--for-model", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        be_a_rank(options.rank, options.ranks_per_host, options.out, options.for_model)
        return 0
    if options.model is not None:
        figures = check_model(options.model, options.ranks_per_host)
        if options.json is not None:
            write_figures(options.json, figures)
        return 0
    found = measure(options.mbit, options.ranks_per_host)
    control = found["congestion_control"]
    print(f"two hosts, {options.ranks_per_host} ranks each, {options.mbit} Mbit/s, {control}; medians")
    for row in found["rows"]:
        ours, others = (row[each]["median_us"] for each in ("ours", "torch"))
        print(
            f"all_reduce {row['dtype']:8} {row['size']:>7}: ours {ours:10.1f} us, torch {others:10.1f} us, "
            f"ours/torch {ours / others:.2f}"
        )
    if options.json is not None:
        figures = {"mbit": options.mbit, "ranks_per_host": options.ranks_per_host}
        write_figures(options.json, {**figures, **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
