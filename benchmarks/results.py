"""The stored results of a run: every figure with its spread, and the machine."""

from __future__ import annotations

import datetime as dt
import json
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
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
    "write_figures",
    "write_results",
]

SCHEMA_VERSION: Final = 1
"""Incremented when a field or its meaning changes; files of other versions are refused."""

LEVELS: Final = (0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 75, 80, 85, 90, 95, 97, 98, 99, 99.5, 99.9, 100)
"""The stored percentiles: enough to plot the distribution without every sample."""

_PACKAGES: Final = ("torch", "numpy", "msgspec", "pyzmq", "cuda-python", "nvidia-cuda-nvrtc")


class BenchmarkError(Exception):
    """A mistake of the user, or a missing requirement; shown without a traceback."""


class Machine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machine of a run.

    Attributes:
        cpu: Name of the processor.
        cores: Cores that this process may use.
        all_cores: Cores of the machine.
        memory_gib: Memory of the machine, in GiB.
        kernel: Name and release of the operating system.
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
        case: The measured call, such as "all_reduce".
        variant: Its kind: a dtype, a payload, a gap between messages.
        implementation: "ours", "torch gloo", "vllm", …
        world_size: Number of ranks.
        nbytes: Bytes of a rank's input, if the case has a size.
        algorithm: Algorithm of the call; for ours, from `DeviceCommunicator.path`.
        reason: Why this algorithm.
        calls: Number of measured calls.
        percentiles_us: Time of a call on the slowest rank that measures, in microseconds, by `LEVELS`.
        rounds_us: The median of each round, in microseconds; rounds alternate between implementations.
        cpu_us: Processor time per call on that rank, in microseconds, over all threads.
        cpu_percent: That time in percent of the wall clock.
        rate_per_s: Calls per second, including pauses between them.
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
        """Return the key that identifies this measurement in a run."""
        return (self.case, self.variant, self.implementation, self.world_size, self.nbytes or 0)

    def at(self, level: float) -> float:
        """Return the percentile of one of `LEVELS`, in microseconds."""
        return self.percentiles_us[LEVELS.index(level)]

    @property
    def bandwidth_gb_s(self) -> float | None:
        """Return the bytes of a rank's input divided by the median time, in GB/s."""
        return None if not self.nbytes or not self.at(50) else self.nbytes / self.at(50) / 1e3


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A range of sizes for which an operation of ours uses one algorithm.

    Attributes:
        operation: The operation, such as "all_reduce".
        world_size: Ranks of the group.
        first_bytes: The smallest size.
        last_bytes: The largest size.
        algorithm: Algorithm for these sizes.
        reason: Why this algorithm, at the smallest size.
    """

    operation: str
    world_size: int
    first_bytes: int
    last_bytes: int
    algorithm: str
    reason: str


class Skipped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A measurement that was not made, and why."""

    what: str
    reason: str


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The results of one run.

    Attributes:
        schema: `SCHEMA_VERSION`.
        date: End of the run, in UTC.
        took_s: Duration of the run, in seconds.
        is_quick: Whether it was a quick run, whose figures mean nothing.
        machine: The machine.
        measurements: All measurements, in order.
        regions: The algorithms of ours by size.
        skipped: The measurements that were not made.
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
        """Check what the types cannot express."""
        if self.schema != SCHEMA_VERSION:
            raise ValueError(f"it is of version {self.schema}, this program reads version {SCHEMA_VERSION}")
        for each in self.measurements:
            if len(each.percentiles_us) != len(LEVELS):
                raise ValueError(f"{each.case} has {len(each.percentiles_us)} percentiles, not {len(LEVELS)}")
            if not each.rounds_us:
                raise ValueError(f"{each.case} has no rounds")


def percentile(ordered: Sequence[float], level: float) -> float:
    """Return a percentile of sorted values, with linear interpolation."""
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
    """Return this machine."""
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


def write_figures(path: Path, figures: Mapping[str, object]) -> None:
    """Write `figures` to a JSON file, behind the time and the machine; create its folder."""
    head = {"date": now(), "machine": msgspec.to_builtins(describe_machine())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, **figures}, indent=1) + "\n")


def now() -> str:
    """Return the current UTC time as text."""
    return dt.datetime.now(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")


def write_results(path: Path, results: Results) -> None:
    """Write `results` to `path`; create its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rounded = msgspec.structs.replace(results, measurements=[_rounded(each) for each in results.measurements])
    # One line per measurement keeps the file small and a diff of two runs readable.
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
    """Return `value` rounded to four digits, more than any of these figures is accurate to."""
    return float(f"{value:.4g}")


def read_results(path: Path) -> Results:
    """Return the results in a file, or in results.json of a folder.

    Raises:
        BenchmarkError: The file cannot be read, or has another version.
    """
    if path.is_dir():
        path /= "results.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise BenchmarkError(f"cannot read {path}: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"{path} holds no readable results: {error}") from error
