"""From measured times to thresholds: which algorithm up to how many bytes. Pure functions, so they can be tested."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import msgspec

from device_comm.policy_file import MeasuredThreshold
from device_comm.policy_table import AlgorithmName

__all__ = ["NCCL", "Mode", "Operation", "Timing", "bands", "thresholds_of"]

NCCL: Final = "nccl"
Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
Mode = Literal["graph", "eager"]

_LEAST_GAIN: Final = math.log(1.02)
"""An algorithm more must gain at least so much at one size: less is noise, and each one has to be compiled and kept."""


@dataclass(frozen=True)
class Timing:
    """How long one call took.

    Attributes:
        operation: The collective.
        algorithm: One of ours by the policy's name, or "nccl".
        world_size: Ranks of the group.
        mode: Whether it was in a CUDA graph.
        nbytes: Of a rank's input.
        time_us: The median.
    """

    operation: Operation
    algorithm: str
    world_size: int
    mode: Mode
    nbytes: int
    time_us: float


def bands(times: Mapping[str, Mapping[int, float]]) -> list[tuple[str, int]]:
    """Return which algorithm to use up to how many bytes, in order; NCCL above the last.

    A policy knows one limit for each algorithm, and NCCL is what is left: so the sizes are cut into as many bands as
    pay, each algorithm used in one at most. Of all cuts the one is taken whose times, as multiples of the best at each
    size, have the least product.

    Args:
        times: Microseconds by algorithm and size. NCCL is there at every size; ours where they can carry it.
    """
    sizes = sorted(times[NCCL])
    best = {size: min(each[size] for each in times.values() if size in each) for size in sizes}

    def regret(algorithm: str, start: int, end: int) -> float:
        found = times[algorithm]
        if any(size not in found for size in sizes[start:end]):
            return math.inf
        return sum(math.log(found[size] / best[size]) for size in sizes[start:end])

    chosen: tuple[float, list[tuple[str, int]]] = (regret(NCCL, 0, len(sizes)), [])
    own = sorted(name for name in times if name != NCCL)
    for count in range(1, len(own) + 1):
        for names in itertools.permutations(own, count):
            for cuts in itertools.combinations(range(1, len(sizes) + 1), count):
                starts = (0, *cuts[:-1])
                total = sum(map(regret, names, starts, cuts)) + regret(NCCL, cuts[-1], len(sizes))
                total += _LEAST_GAIN * count
                if total < chosen[0] - 1e-9:
                    chosen = (total, [(name, sizes[cut - 1]) for name, cut in zip(names, cuts, strict=True)])
    return chosen[1]


def thresholds_of(timings: Iterable[Timing]) -> tuple[MeasuredThreshold, ...]:
    """Return the rows of a policy file: equal ones of graphs and of eager calls as one.

    An operation and a world size for which nothing of ours pays in any mode has no row: a file cannot say so, and the
    built-in table goes on to hold there.
    """
    tables: dict[tuple[Operation, int, Mode], dict[str, dict[int, float]]] = {}
    for each in timings:
        key = (each.operation, each.world_size, each.mode)
        tables.setdefault(key, {}).setdefault(each.algorithm, {})[each.nbytes] = each.time_us
    rows = []
    for (operation, world_size, mode), times in tables.items():
        rows += [
            MeasuredThreshold(
                operation=operation,
                algorithm=cast("AlgorithmName", algorithm),
                world_size=world_size,
                mode=mode,
                max_bytes=limit,
            )
            for algorithm, limit in bands(times)
        ]
    return tuple(_merged(rows))


def _merged(rows: Sequence[MeasuredThreshold]) -> list[MeasuredThreshold]:
    merged: list[MeasuredThreshold] = []
    for row in rows:
        twin = msgspec.structs.replace(row, mode="eager" if row.mode == "graph" else "graph")
        if twin in rows:
            row = msgspec.structs.replace(row, mode="any")  # noqa: PLW2901 - what becomes of it
        if row not in merged:
            merged.append(row)
    return merged
