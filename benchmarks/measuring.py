"""How a call is timed: implementations in turn, so that a ratio compares figures of the same second.

Every round runs each implementation once, one after the other, for about as long. A rank keeps its own samples; the
figures are those of the slowest rank that measures, which for one-way latencies is a receiver.
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
from device_comm.paths import CallPath

__all__ = ["Bench", "Effort", "Sampler", "Subject", "of_calls"]

Sampler = Callable[[int], list[float]]
"""Makes so many calls, on every rank of the group; returns their seconds, or nothing on a rank that only helps."""

WARM_UP: Final = 3
FEWEST_CALLS: Final = 3
MOST_CALLS: Final = 2000


@dataclass(frozen=True)
class Effort:
    """How long a run may measure.

    Attributes:
        rounds: How often the implementations alternate.
        turn_s: How long one implementation goes on in a round, at least three calls.
        is_quick: Whether only to see that everything works.
    """

    rounds: int = 5
    turn_s: float = 0.05
    is_quick: bool = False


@dataclass(frozen=True)
class Subject:
    """One implementation's calls, and the way they take."""

    sample: Sampler
    path: CallPath = CallPath("", "")  # noqa: RUF009 - it is frozen


@dataclass
class Bench:
    """One rank's share in a run; all ranks of `group` call its methods alike.

    Attributes:
        group: The ranks that measure; it also carries what they tell each other about it.
        effort: How long to measure.
        tell: Told what is measured next, on rank 0.
    """

    group: GroupCoordinator
    effort: Effort
    tell: Callable[[str], None] = lambda _: None
    measurements: list[Measurement] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def on(self, group: GroupCoordinator) -> Bench:
        """Return the same for other ranks, whose findings come to the same lists."""
        return Bench(group, self.effort, self.tell, self.measurements, self.regions, self.skipped)

    def skip(self, what: str, reason: str) -> None:
        """Note that something was not measured. Not collective."""
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
        """Time `subjects` in turn. Collective.

        Args:
            case: See `Measurement`.
            variant: See `Measurement`.
            subjects: By the name of the implementation.
            nbytes: See `Measurement`.
            turn_s: In place of the effort's.
            calls: How many calls in a round; by default as many as `turn_s` allows, the same on all ranks.
            rounds: In place of the effort's, of which a quick run makes no more than two.
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
        """Return how many calls fill a turn, as all ranks see it; the calls that tell are the warm-up."""
        subject.sample(WARM_UP)
        start = time.perf_counter()
        subject.sample(WARM_UP)
        took_s = max(self.group.all_gather_object(time.perf_counter() - start)) / WARM_UP
        turn_s = self.effort.turn_s if turn_s is None else turn_s
        if self.effort.is_quick:
            turn_s = min(turn_s, self.effort.turn_s)
        return max(FEWEST_CALLS, min(MOST_CALLS, int(turn_s / max(took_s, 1e-7))))

    def find_regions(self, operation: str, first_bytes: int, last_bytes: int) -> None:
        """Note which algorithm of ours carries which sizes. Collective at its first call on CUDA."""
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
    """Return the largest size up to `last` that is alike, to four bytes; they change once in a doubling at most."""
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
    """Return a sampler that times each call; on a device with streams, calls by the dozen until they are done."""

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
