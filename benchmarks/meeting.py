"""Measure what it takes to bring actors of Ray together as the ranks of a world.

Four actors of a cluster of this machine meet, leave, and meet again. The time of `meet` is measured in the driver, from
the call until it has returned, when the actors are ready. What it adds is that time without the longest time for
which an actor was in `init_distributed_environment`: offers, tickets and results, which Ray carries. The first meeting
of an actor, with what a process does once, is shown apart.

    python -m benchmarks meeting [--ranks 4] [--starts 3] [--meetings 10] [--json FILE]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.results import write_figures
from coordinator.errors import CapabilityError
from coordinator.integrations.ray import RankActor, meet, plan, rank_actor
from coordinator.integrations.ray.library import import_ray
from coordinator.meeting import Ticket
from coordinator.settings import CoordinatorSettings

# Ray's smallest object store: nothing but results of methods is in it.
STORE_BYTES: Final = 80 * 1024 * 1024
LIMIT_S: Final = 120.0


class Times(NamedTuple):
    """Seconds of one meeting.

    Attributes:
        meeting: The call of `meet`.
        joining: The longest of the actors' calls of `init_distributed_environment`.
    """

    meeting: float
    joining: float

    @property
    def added(self) -> float:
        """Return what the meeting adds to joining."""
        return self.meeting - self.joining


class TimedRank(RankActor):
    """A rank that measures how long it takes to join."""

    joining_s = 0.0

    def join(
        self, ticket: Ticket, settings: CoordinatorSettings | None = None, backend: str | None = None
    ) -> None:
        """Join the world of the ticket."""
        start = time.perf_counter()
        RankActor.join(self, ticket, settings, backend)
        self.joining_s = time.perf_counter() - start

    def took_s(self) -> float:
        """Return how long it took to join the last time."""
        return self.joining_s


def measure(ray: Any, ranks: int, starts: int, meetings: int) -> tuple[list[Times], list[Times]]:
    """Return the times of the first meetings of new actors, and of those that follow."""
    first, others = list[Times](), list[Times]()
    settings = CoordinatorSettings.resolve({}, create_timeout_s=LIMIT_S)
    group = ray.util.placement_group([{"CPU": 1}] * ranks)
    seats = plan(group)
    made = rank_actor(TimedRank, num_cpus=1)
    for _ in range(starts):
        actors = [made.options(scheduling_strategy=seat.strategy(group)).remote() for seat in seats]
        ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=LIMIT_S)
        for number in range(1 + meetings):
            start = time.perf_counter()
            meet(actors, seats, settings, backend="gloo")
            took_s = time.perf_counter() - start
            joining_s = max(ray.get([actor.took_s.remote() for actor in actors]))
            (others if number else first).append(Times(took_s, joining_s))
            ray.get([actor.leave.remote() for actor in actors])
        for actor in actors:
            ray.kill(actor)
    return first, others


def summary(times: Sequence[Times]) -> dict[str, Any]:
    """Return the median and the longest of each figure in seconds, and how many there are."""
    figures: dict[str, Sequence[float]] = {
        "meeting": [each.meeting for each in times],
        "joining": [each.joining for each in times],
        "added": [each.added for each in times],
    }
    return {
        "count": len(times),
        **{
            name: {"median_s": statistics.median(found), "most_s": max(found)}
            for name, found in figures.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks meeting", description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="how many actors meet (default %(default)s)")
    parser.add_argument("--starts", type=int, default=3, help="how often actors are started (default 3)")
    parser.add_argument(
        "--meetings", type=int, default=10, help="how often they meet behind the first time (default 10)"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    try:
        ray = import_ray()
    except CapabilityError as error:
        sys.stderr.write(f"benchmarks: error: {error}; in this repository `make test-ray` installs it\n")
        return 2
    ray.init(
        address="local",
        num_cpus=options.ranks,
        include_dashboard=False,
        object_store_memory=STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    try:
        first, others = measure(ray, options.ranks, options.starts, options.meetings)
    finally:
        ray.shutdown()
    found = {"first": summary(first), **({"again": summary(others)} if others else {})}
    print(f"{options.ranks} actors on this machine; ms")
    for kind, figures in found.items():
        for name in ("meeting", "joining", "added"):
            median, most = (figures[name][each] * 1e3 for each in ("median_s", "most_s"))
            print(f"{kind:6} {name:8} median {median:7.1f}   most {most:7.1f}   of {figures['count']}")
    if options.json is not None:
        write_figures(options.json, {"ranks": options.ranks, "ray": ray.__version__, "times": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
