"""Reports of where the time goes while a world is joined and its groups are created."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

PHASES: Final = ("rendezvous", "agreement", "shared_memory", "gloo", "communicator", "queue")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CreationReport:
    """How long this rank took to create one group, in seconds by phase, including waits for slower ranks.

    Attributes:
        name: The group's unique name.
        world_size: Number of ranks in the group.
        together: Names of the groups that were created in one agreement, including this one. They share
            `agreement_s`.
        rendezvous_s: Finding the other ranks and agreeing on the world; only for the world group.
        agreement_s: Waiting until all ranks have joined with the same facts.
        shared_memory_s: Creating and mapping the memory that the ranks of one host share.
        gloo_s: Connecting process groups, including those of backends other than Gloo.
        communicator_s: Building the device communicator.
        queue_s: Creating `mq_broadcaster`.
    """

    name: str
    world_size: int
    together: tuple[str, ...] = ()
    rendezvous_s: float = 0.0
    agreement_s: float = 0.0
    shared_memory_s: float = 0.0
    gloo_s: float = 0.0
    communicator_s: float = 0.0
    queue_s: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase by name, in order."""
        return {name: getattr(self, f"{name}_s") for name in PHASES}

    @property
    def total_s(self) -> float:
        """Return the sum of the phases."""
        return sum(self.phases.values())

    def plus(self, **seconds: float) -> CreationReport:
        """Return this report with `seconds` added, by phase name."""
        added = {f"{name}_s": getattr(self, f"{name}_s") + value for name, value in seconds.items()}
        return dataclasses.replace(self, **added)

    def __str__(self) -> str:
        """Return `12.3 ms (agreement 4.1, shared memory 8.2)`."""
        return _listed(self.phases)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartUpReport:
    """How long this rank took to create all of its groups.

    Attributes:
        groups: Each group once, in order of creation.
    """

    groups: tuple[CreationReport, ...]

    @classmethod
    def of(cls, reports: Sequence[CreationReport]) -> StartUpReport:
        """Return the report over `reports`, one per group."""
        return cls(groups=tuple(reports))

    @property
    def phases(self) -> dict[str, float]:
        """Return the seconds of each phase over all groups. An agreement on several groups counts once."""
        sums = dict.fromkeys(PHASES, 0.0)
        agreed: set[tuple[str, ...]] = set()
        for report in self.groups:
            for name, seconds in report.phases.items():
                if name != "agreement" or report.together not in agreed:
                    sums[name] += seconds
            agreed.add(report.together)
        return sums

    @property
    def total_s(self) -> float:
        """Return the sum of the phases."""
        return sum(self.phases.values())

    def __str__(self) -> str:
        """Return one line for all groups, then one line per group."""
        lines = [f"all groups: {_listed(self.phases)}"]
        lines += [f"{report.name} ({report.world_size} ranks): {report}" for report in self.groups]
        return "\n".join(lines)


def _listed(phases: dict[str, float]) -> str:
    parts = ", ".join(
        f"{name.replace('_', ' ')} {seconds * 1e3:.1f}" for name, seconds in phases.items() if seconds
    )
    return f"{sum(phases.values()) * 1e3:.1f} ms ({parts or 'nothing to do'})"


class Stopwatch:
    """Accumulates elapsed seconds by phase."""

    def __init__(self) -> None:
        """Start with no phases."""
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent in the block to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
