"""Time calls of several implementations alternately, so that a ratio compares figures of the same second.

Every round runs each implementation once, for about the same time. Each rank keeps its own samples. The published
figures are those of the slowest rank that measures; for one-way latencies that is a receiver.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import torch

from benchmarks.results import Measurement, Region, Skipped, percentiles
from coordinator.group import GroupCoordinator
from device_comm.base import CallPath

__all__ = ["Bench", "Effort", "Sampler", "Subject", "of_calls"]

Sampler = Callable[[int], list[float]]
"""Makes the given number of calls on every rank of a group; returns their seconds, none on a rank that only helps."""

WARM_UP: Final = 3
FEWEST_CALLS: Final = 3
MOST_CALLS: Final = 2000


@dataclass(frozen=True)
class Effort:
    """How long a run may measure.

    Attributes:
        rounds: Number of rounds.
        turn_s: Seconds per implementation and round; at least three calls are made.
        is_quick: Whether the run only checks that everything works.
    """

    rounds: int = 5
    turn_s: float = 0.05
    is_quick: bool = False


@dataclass(frozen=True)
class Subject:
    """One implementation's calls and their algorithm."""

    sample: Sampler
    path: CallPath = CallPath("", "")  # noqa: RUF009 - CallPath is frozen


@dataclass
class Bench:
    """One rank's part in a run; all ranks of `group` make the same calls.

    Attributes:
        group: The ranks that measure; they also exchange their findings through it.
        effort: How long to measure.
        tell: Called with the name of the next measurement; rank 0 shows it.
    """

    group: GroupCoordinator
    effort: Effort
    tell: Callable[[str], None] = lambda _: None
    measurements: list[Measurement] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def on(self, group: GroupCoordinator) -> Bench:
        """Return a bench for another group that appends to the same lists."""
        return Bench(group, self.effort, self.tell, self.measurements, self.regions, self.skipped)

    def skip(self, what: str, reason: str) -> None:
        """Record that something was not measured. Not collective."""
        entry = Skipped(what=what, reason=reason)
        if self.group.rank_in_group == 0 and entry not in self.skipped:
            self.skipped.append(entry)

    def measure(
        self,
        case: str,
        variant: str,
        subjects: Mapping[str, Subject],
        *,
        nbytes: int | None = None,
        turn_s: float | None = None,
        calls: int | None = None,
        rounds: int | None = None,
    ) -> None:
        """Time `subjects` alternately. Collective.

        Args:
            case: See `Measurement`.
            variant: See `Measurement`.
            subjects: The subjects by implementation name.
            nbytes: See `Measurement`.
            turn_s: Overrides that of `effort`.
            calls: Number of calls per round, equal on all ranks; default: as many as fit into `turn_s`.
            rounds: Overrides that of `effort`; a quick run makes at most two.
        """
        size = "" if nbytes is None else f" {nbytes >> 10} KB"
        self.tell(f"{case}, {variant}{size}, {self.group.world_size} ranks")
        counts = {name: calls or self._count(each, turn_s) for name, each in subjects.items()}
        tallies = {name: _Tally() for name in subjects}
        rounds = rounds or self.effort.rounds
        for _ in range(min(rounds, 2) if self.effort.is_quick else rounds):
            for name, subject in subjects.items():
                self.group.barrier()
                tallies[name].add(subject.sample, counts[name])
        for name, subject in subjects.items():
            told = self.group.all_gather_object(tallies[name].told())
            slowest = max(told, key=lambda each: each[0][len(each[0]) // 2] if each[0] else -1.0)
            if self.group.rank_in_group == 0:
                levels, medians, cpu_s, wall_s, made = slowest
                self.measurements.append(
                    Measurement(
                        case=case,
                        variant=variant,
                        implementation=name,
                        world_size=self.group.world_size,
                        nbytes=nbytes,
                        algorithm=subject.path.algorithm,
                        reason=subject.path.reason,
                        calls=made,
                        percentiles_us=[value * 1e6 for value in levels],
                        rounds_us=[value * 1e6 for value in medians],
                        cpu_us=cpu_s / made * 1e6,
                        cpu_percent=100 * cpu_s / wall_s,
                        rate_per_s=made / wall_s,
                    )
                )

    def _count(self, subject: Subject, turn_s: float | None) -> int:
        """Return how many calls fill a turn, equal on all ranks; measured by the warm-up calls."""
        subject.sample(WARM_UP)
        start = time.perf_counter()
        subject.sample(WARM_UP)
        took_s = max(self.group.all_gather_object(time.perf_counter() - start)) / WARM_UP
        turn_s = self.effort.turn_s if turn_s is None else turn_s
        if self.effort.is_quick:
            turn_s = min(turn_s, self.effort.turn_s)
        return max(FEWEST_CALLS, min(MOST_CALLS, int(turn_s / max(took_s, 1e-7))))

    def find_regions(self, operation: str, first_bytes: int, last_bytes: int) -> None:
        """Record which algorithm of ours carries which sizes. The first call on CUDA is collective."""
        path = self.group.device_communicator.path
        dtype = torch.float32
        start = first_bytes
        while start <= last_bytes:
            found = path(operation, start, dtype)
            end = _last_alike(
                lambda nbytes, found=found: path(operation, nbytes, dtype).algorithm == found.algorithm,  # type: ignore[misc]
                start,
                last_bytes,
            )
            if self.group.rank_in_group == 0:
                self.regions.append(
                    Region(
                        operation=operation,
                        world_size=self.group.world_size,
                        first_bytes=start,
                        last_bytes=end,
                        algorithm=found.algorithm,
                        reason=found.reason,
                    )
                )
            start = end + 4


def _last_alike(is_alike: Callable[[int], bool], first: int, last: int) -> int:
    """Return the largest size up to `last`, a multiple of 4, with the same result; at most one change per doubling."""
    low = first
    while low * 2 <= last and is_alike(low * 2):
        low *= 2
    high = min(low * 2, last)
    if is_alike(high):
        return high
    while high - low > 4:
        middle = (low + high) // 8 * 4
        low, high = (middle, high) if is_alike(middle) else (low, middle)
    return low


class _Tally:
    """One implementation's samples on this rank."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self.medians: list[float] = []
        self.cpu_s = self.wall_s = 0.0
        self.made = 0

    def add(self, sample: Sampler, count: int) -> None:
        cpu, wall = time.process_time(), time.perf_counter()
        found = sample(count)
        self.cpu_s += time.process_time() - cpu
        self.wall_s += time.perf_counter() - wall
        self.made += count
        self.samples += found
        if found:
            self.medians.append(statistics.median(found))

    def told(self) -> tuple[list[float], list[float], float, float, int]:
        levels = percentiles(self.samples) if self.samples else []
        return levels, self.medians, self.cpu_s, self.wall_s, self.made


def of_calls(call: Callable[[], object], device: torch.device) -> Sampler:
    """Return a sampler that times each call; on a device with streams, it times batches of 12 until completion."""

    def sample(count: int) -> list[float]:
        samples = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            samples.append(time.perf_counter() - start)
        return samples

    def sample_queued(count: int) -> list[float]:
        samples = []
        for _ in range(-(-count // _QUEUED)):
            torch.accelerator.synchronize(device)
            start = time.perf_counter()
            for _ in range(_QUEUED):
                call()
            torch.accelerator.synchronize(device)
            samples.append((time.perf_counter() - start) / _QUEUED)
        return samples

    return sample if device.type == "cpu" else sample_queued


_QUEUED: Final = 12
