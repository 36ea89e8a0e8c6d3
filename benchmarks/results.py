"""What a run of the benchmarks leaves behind: every figure with its spread, and the machine that it is about."""

from __future__ import annotations

import datetime as dt
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from os import cpu_count, sched_getaffinity
from pathlib import Path
from typing import Final

import msgspec

__all__ = [
    "LEVELS",
    "SCHEMA_VERSION",
    "BenchmarkError",
    "Machine",
    "Measurement",
    "Region",
    "Results",
    "Skipped",
    "describe_machine",
    "percentile",
    "percentiles",
    "read_results",
    "write_results",
]

SCHEMA_VERSION: Final = 1
"""Raised when a field or the meaning of one changes; files of other versions are refused."""

LEVELS: Final = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 95, 97, 98, 99, 99.5, 99.9, 100)
"""Percentiles that are kept: enough to draw the distribution, without every sample."""

_PACKAGES: Final = ("torch", "numpy", "msgspec", "pyzmq", "cuda-python", "nvidia-cuda-nvrtc")


class BenchmarkError(Exception):
    """What whoever called the benchmarks did, or lacks; told without a traceback."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where figures come from.

    Attributes:
        cpu: Name of the processor.
        cores: Cores that this process may use.
        all_cores: Cores of the machine.
        memory_gib: Its memory.
        kernel: The operating system.
        python: Version of Python.
        packages: Versions by package.
        gpus: Names of the CUDA devices.
    """

    cpu: str
    cores: int
    all_cores: int
    memory_gib: float
    kernel: str
    python: str
    packages: dict[str, str]
    gpus: list[str]


class Measurement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The time of one kind of call by one implementation.

    Attributes:
        case: What is called, such as "all_reduce".
        variant: Which kind of it: a dtype, a payload, how far apart.
        implementation: Whose: "ours", "torch gloo", "vllm".
        world_size: Ranks that take part.
        nbytes: Bytes of a rank's input, where that says something.
        algorithm: What carries the call; of ours as `DeviceCommunicator.path` says.
        reason: Why that.
        calls: How many calls stand behind the figures.
        percentiles_us: Of the time of a call on the slowest rank that measures, by `LEVELS`.
        rounds_us: The median of each round: rounds alternate between implementations.
        cpu_us: Processor time of that rank for one call, all of its threads.
        cpu_percent: The same as a share of the wall clock.
        rate_per_s: Calls a second, pauses between them included.
    """

    case: str
    variant: str
    implementation: str
    world_size: int
    nbytes: int | None = None
    algorithm: str = ""
    reason: str = ""
    calls: int
    percentiles_us: list[float]
    rounds_us: list[float]
    cpu_us: float
    cpu_percent: float
    rate_per_s: float

    @property
    def key(self) -> tuple[str, str, str, int, int]:
        """Return what tells this measurement from all others of a run."""
        return (self.case, self.variant, self.implementation, self.world_size, self.nbytes or 0)

    def at(self, level: float) -> float:
        """Return the percentile of one of `LEVELS`, in microseconds."""
        return self.percentiles_us[LEVELS.index(level)]

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Return the bytes of a rank's input by the median time, in GB/s."""
        return None if not self.nbytes or not self.at(50) else self.nbytes / self.at(50) / 1e3


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """From which size to which an algorithm of ours carries an operation.

    Attributes:
        operation: Such as "all_reduce".
        world_size: Ranks of the group.
        first_bytes: The smallest size.
        last_bytes: The largest.
        algorithm: What carries calls of these sizes.
        reason: Why, at the smallest.
    """

    operation: str
    world_size: int
    first_bytes: int
    last_bytes: int
    algorithm: str
    reason: str


class Skipped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was not measured, and why."""

    what: str
    reason: str


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One run.

    Attributes:
        schema: `SCHEMA_VERSION`.
        date: When it began, in UTC.
        took_s: How long it took.
        is_quick: Whether it only tried the benchmarks: its figures mean nothing.
        machine: Where.
        measurements: What was measured, in order.
        regions: Which algorithms of ours carry which sizes.
        skipped: What was not.
    """

    schema: int
    date: str
    took_s: float
    is_quick: bool
    machine: Machine
    measurements: list[Measurement]
    regions: list[Region] = []
    skipped: list[Skipped] = []

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if self.schema != SCHEMA_VERSION:
            raise ValueError(f"it is of version {self.schema}, this program reads version {SCHEMA_VERSION}")
        for each in self.measurements:
            if len(each.percentiles_us) != len(LEVELS):
                raise ValueError(f"{each.case} has {len(each.percentiles_us)} percentiles, not {len(LEVELS)}")
            if not each.rounds_us:
                raise ValueError(f"{each.case} has no rounds")


def percentile(ordered: Sequence[float], level: float) -> float:
    """Return a percentile of sorted values, between two of them in proportion."""
    if not ordered:
        raise ValueError("no values")
    place = (len(ordered) - 1) * level / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def percentiles(values: Iterable[float]) -> list[float]:
    """Return the percentiles of `LEVELS`."""
    ordered = sorted(values)
    return [percentile(ordered, level) for level in LEVELS]


def describe_machine() -> Machine:
    """Return the machine at hand."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Machine(
        cpu=_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(sched_getaffinity(0)),
        all_cores=cpu_count() or 0,
        memory_gib=round(int((_field("/proc/meminfo", "MemTotal") or "0").split()[0]) / 2**20, 1),
        kernel=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        gpus=gpus,
    )


def _field(path: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", Path(path).read_text(), re.MULTILINE)
    return found[1].strip() if found else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def now() -> str:
    """Return the present time, as files hold it."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def write_results(path: Path, results: Results) -> None:
    """Write `results` to `path`, whose folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = msgspec.structs.replace(results, measurements=[_rounded(each) for each in results.measurements])
    # A line for each measurement: a diff of two runs can be read, and the file stays small.
    head = msgspec.json.encode(msgspec.structs.replace(rounded, measurements=[])).decode()
    lines = ",\n".join(msgspec.json.encode(each).decode() for each in rounded.measurements)
    path.write_text(head.replace('"measurements":[]', f'"measurements":[\n{lines}\n]', 1) + "\n")


def _rounded(each: Measurement) -> Measurement:
    return msgspec.structs.replace(
        each,
        percentiles_us=[_short(value) for value in each.percentiles_us],
        rounds_us=[_short(value) for value in each.rounds_us],
        cpu_us=_short(each.cpu_us),
        cpu_percent=_short(each.cpu_percent),
        rate_per_s=_short(each.rate_per_s),
    )


def _short(value: float) -> float:
    """Return four digits: more than any of these figures is worth."""
    return float(f"{value:.4g}")


def read_results(path: Path) -> Results:
    """Return what a file holds.

    Raises:
        BenchmarkError: It cannot be read, or is no file of this version.
    """
    if path.is_dir():
        path /= "results.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise BenchmarkError(f"cannot read {path}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path} holds no results that can be read: {error}") from error
