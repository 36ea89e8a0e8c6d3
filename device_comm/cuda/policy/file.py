"""A file of thresholds measured on this machine; its rows replace those of the built-in table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.policy.table import (
    BUILT_IN,
    AlgorithmName,
    Link,
    Mode,
    Operation,
    PolicyTable,
    Threshold,
    family_of,
)
from device_comm.cuda.whole_file import write_whole
from shm_broadcast.errors import SettingsError

__all__ = [
    "POLICY_VERSION",
    "MeasuredThreshold",
    "PolicyFile",
    "read_policy_file",
    "table_of",
    "write_policy_file",
]

POLICY_VERSION: Final = 1
"""Incremented when a field or its meaning changes; files of other versions are refused."""

MAX_FILE_BYTES: Final = 1 << 20
MAX_ROWS: Final = 1000

# The other algorithms carry an all-reduce.
_CARRIED: Final[dict[str, Operation]] = {
    "push_reduce_scatter": "reduce_scatter",
    "push_all_gather": "all_gather",
    "staged_all_gather": "all_gather",
}
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


class MeasuredThreshold(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The size up to which an algorithm was the fastest; see `policy.table.Threshold`.

    Attributes:
        operation: The collective.
        algorithm: One of our algorithms for it.
        world_size: Number of ranks in the measurement.
        mode: Whether it was measured in CUDA graphs, outside of them, or in both.
        max_bytes: Bytes of the largest call for which it was the fastest.
    """

    operation: Operation
    algorithm: AlgorithmName
    world_size: Annotated[int, msgspec.Meta(ge=2, le=8)]
    mode: Mode
    max_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]

    def __post_init__(self) -> None:
        """Check that the algorithm carries the operation."""
        if self.operation != _CARRIED.get(self.algorithm, "all_reduce"):
            raise ValueError(f"{self.algorithm} cannot carry {self.operation}")


class PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a policy file.

    Attributes:
        version: `POLICY_VERSION`.
        device_name: The driver's name of the measured devices: "NVIDIA H200".
        arch: Their architecture: "sm_90".
        link: The link between them.
        host: Name of the host.
        driver: Version of the driver.
        date: Day of the measurement: "2026-05-31".
        thresholds: The results. For an operation and a world size that occurs here, the built-in rows are ignored;
            if no row is for a call's mode, NCCL is used.
    """

    version: int
    device_name: _Text
    arch: str
    link: Link
    host: _Text
    driver: _Text
    date: _Text
    thresholds: Annotated[tuple[MeasuredThreshold, ...], msgspec.Meta(max_length=MAX_ROWS)]

    def __post_init__(self) -> None:
        """Check what the types do not express."""
        if self.version != POLICY_VERSION:
            raise ValueError(f"it is of version {self.version}, this program reads version {POLICY_VERSION}")
        if not family_of(self.arch):
            raise ValueError(
                f"arch is {self.arch!r}, but must be that of a device with kernels, such as 'sm_90'"
            )
        seen: set[tuple[str, str, int, str]] = set()
        for row in self.thresholds:
            for mode in ("graph", "eager") if row.mode == "any" else (row.mode,):
                key = (row.operation, row.algorithm, row.world_size, mode)
                if key in seen:
                    raise ValueError(
                        f"{row.algorithm} of {row.world_size} ranks has two thresholds in mode {mode}"
                    )
                seen.add(key)


def write_policy_file(path: str | Path, content: PolicyFile) -> None:
    """Write `content` atomically: a concurrent reader finds the old file or the new one.

    Raises:
        SettingsError: `read_policy_file` would refuse the content, or the file cannot be written; an older file is
            unchanged.
    """
    try:
        data = msgspec.json.encode(content)
        # The constructors of these types do not check ranges and lengths, only decoding does.
        msgspec.json.decode(data, type=PolicyFile)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise SettingsError(f"the content for the policy file {path} cannot be used: {error}") from error
    text = msgspec.json.format(data, indent=2)
    try:
        # Ranks of other users may read it.
        write_whole(Path(path), text + b"\n", 0o644)
    except OSError as error:
        raise SettingsError(f"cannot write the policy file {path}: {error}") from error


def read_policy_file(path: str | Path) -> PolicyFile:
    """Return the content of a policy file.

    Raises:
        SettingsError: It cannot be read or is not a valid file of this version; the text names the place.
    """
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"cannot read the policy file {path}: {error}") from error
    if len(data) > MAX_FILE_BYTES:
        raise SettingsError(f"the policy file {path} is longer than {MAX_FILE_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=PolicyFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"the policy file {path} cannot be used: {error}") from error


def table_of(content: PolicyFile, facts: GroupFacts, path: str = "policy file") -> PolicyTable:
    """Return the built-in table, with rows replaced by those of the file.

    Raises:
        SettingsError: The file was measured on other devices than the group's.
    """
    link = "nvlink" if facts.has_nvlink else "pcie"
    expected = (facts.device_name, facts.arch, link)
    if (content.device_name, content.arch, content.link) != expected:
        raise SettingsError(
            f"the policy file {path} is about {content.device_name} ({content.arch}, {content.link}), "
            f"but the group has {' ('.join(expected[:2])}, {link}); run `tune` on this machine, or drop the setting"
        )
    family = family_of(content.arch)
    source = f"measured on {content.host}, driver {content.driver}, {content.date}"
    covered = {(row.operation, row.world_size) for row in content.thresholds}
    rows = [
        Threshold(
            operation=row.operation,
            algorithm=row.algorithm,
            family=family,  # type: ignore[arg-type]
            link=content.link,
            min_world_size=row.world_size,
            max_world_size=row.world_size,
            mode=row.mode,
            max_bytes=row.max_bytes,
            source=source,
        )
        for row in content.thresholds
    ]
    for row in BUILT_IN.thresholds:
        for size in range(row.min_world_size, row.max_world_size + 1):
            is_replaced = (row.operation, size) in covered and (row.family, row.link) == (
                family,
                content.link,
            )
            if not is_replaced:
                rows.append(msgspec.structs.replace(row, min_world_size=size, max_world_size=size))
    return PolicyTable(thresholds=tuple(rows), origin=str(path))
