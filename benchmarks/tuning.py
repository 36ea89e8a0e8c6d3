"""Compute thresholds from measured times: which algorithm up to how many bytes. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, cast

import msgspec

from device_comm.cuda.policy.file import MeasuredThreshold
from device_comm.cuda.policy.table import AlgorithmName

__all__ = ["NCCL", "Mode", "Operation", "Timing", "bands", "thresholds_of"]

NCCL: Final = "nccl"
Operation = Literal["all_reduce", "reduce_scatter", "all_gather"]
Mode = Literal["graph", "eager"]

_LEAST_GAIN: Final = math.log(1.02)
"""Each further algorithm must gain at least 2 % at one size: less is noise, and each must be compiled and kept."""


@dataclass(frozen=True)
class Timing:
    """How long one call took.

    Attributes:
        operation: The collective.
        algorithm: An algorithm of ours by the policy's name, or "nccl".
        world_size: Ranks of the group.
        mode: "graph" if the call was in a CUDA graph, else "eager".
        nbytes: Bytes of a rank's input.
        time_us: The median, in microseconds.
    """

    operation: Operation
    algorithm: str
    world_size: int
    mode: Mode
    nbytes: int
    time_us: float


def bands(times: Mapping[str, Mapping[int, float]]) -> list[tuple[str, int]]:
    """Return which algorithm to use up to how many bytes, in order; NCCL follows after the last.

    A policy has one limit per algorithm, so the sizes are cut into bands, each algorithm in at most one of them. Of all
    cuts, the result minimizes the product over all sizes of the time divided by the best time at that size.

    Args:
        times: Microseconds by algorithm and size. NCCL has every size, our algorithms the sizes that they support.
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
    """Return the rows of a policy file; equal rows for graphs and eager calls are merged into one.

    If NCCL is best for an operation and world size in every mode, there is no row: the file format cannot express it,
    and the built-in table applies.
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
            row = msgspec.structs.replace(row, mode="any")  # noqa: PLW2901 - the merged row replaces it
        if row not in merged:
            merged.append(row)
    return merged
