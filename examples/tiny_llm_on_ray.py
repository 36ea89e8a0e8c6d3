"""Serve the tiny LLM with tensor and pipeline parallelism from actors of Ray.

    python -m examples.tiny_llm_on_ray --tp 2 --pp 2

Options are those of `python -m examples.tiny_llm`, and these two: `--address` of a Ray cluster (default: `RAY_ADDRESS`,
else a small cluster of this host's own), and `--cpus-per-rank`. Without `--model`, rank 0 trains a model and writes it
below its temporary directory, which the other hosts must see under the same path.
"""

import argparse
import contextlib
import io
import json
import logging
import sys
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group

from coordinator import CoordinatorSettings
from coordinator.integrations.ray import RankActor, Seat, meet, plan, rank_actor, watch
from examples.tiny_llm.options import parse_options

# Ray's object store holds results of methods only: its smallest size.
STORE_BYTES = 80 * 1024 * 1024


class TinyLlmRank(RankActor):
    """One rank of the tiny LLM."""

    def serve(self, arguments: Sequence[str]) -> str:
        """Serve all prompts together with the other ranks; return the report as JSON on rank 0, else "".

        Args:
            arguments: The options of the tiny LLM, equal on all ranks.
        """
        from examples.tiny_llm.rank import run_rank

        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            # The program joins a world; this process is in one, so it takes that.
            run_rank(parse_options([*arguments, "--json"]))
        return written.getvalue()


def main(arguments: Sequence[str]) -> int:
    """Run the example; return 0 if all tokens equal those of one process, else 1."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--address", default=None)
    parser.add_argument("--cpus-per-rank", type=float, default=1.0)
    own, rest = parser.parse_known_args(arguments)
    options = parse_options(rest)
    ranks = options.world_size
    connect(own.address, ranks)
    try:
        group = placement_group([{"CPU": own.cpus_per_rank}] * ranks)
        seats = plan(group)
        made = rank_actor(TinyLlmRank, num_cpus=own.cpus_per_rank)
        actors = [made.options(scheduling_strategy=seat.strategy(group)).remote() for seat in seats]
        ray.get([actor.__ray_ready__.remote() for actor in actors])
        start_s = time.perf_counter()
        meeting = meet(actors, seats, CoordinatorSettings(), backend="gloo")
        met_s = time.perf_counter() - start_s
        if not options.as_json:
            show_seats(seats, met_s)
        reports = watch([actor.serve.remote(rest) for actor in actors], meeting)
    finally:
        ray.shutdown()
    report = json.loads(reports[0])
    if options.as_json:
        print(reports[0], end="")
        return 0 if report["identical"] else 1
    return show_report(report)


def connect(address: str | None, ranks: int) -> None:
    """Connect to a Ray cluster, or start one on this host with a processor for each rank."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        # Without an address: RAY_ADDRESS, or a cluster that was started on this host.
        ray.init(address=address or "auto", **quiet)
    except ConnectionError:
        if address is not None:
            raise
        ray.init(
            address="local", num_cpus=ranks, include_dashboard=False, object_store_memory=STORE_BYTES, **quiet
        )


def show_seats(seats: Sequence[Seat], seconds: float) -> None:
    """Print which rank sits where."""
    nodes = {seat.address for seat in seats}
    print(f"{len(seats)} ranks on {len(nodes)} node(s) met in {seconds:.2f} s")
    for seat in seats:
        print(f"  rank {seat.rank}: {seat.address}, local rank {seat.local_rank} of {seat.local_world_size}")


def show_report(report: dict[str, Any]) -> int:
    """Print the answers and whether they are right."""
    for one in report["continuations"]:
        print(f"{one['prompt']} |{one['text']}")
    layout = f"TP {report['tensor']} x PP {report['pipeline']}"
    print(f"{report['tokens']} tokens in {report['steps']} steps and {report['seconds']:.2f} s")
    if not report["identical"]:
        print(f"FAILED: tokens of {layout} on Ray differ from those of one process")
        return 1
    print(f"OK: all {report['tokens']} tokens of {layout} on Ray are identical to those of one process")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
