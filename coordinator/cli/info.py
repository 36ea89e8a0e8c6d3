"""`python -m coordinator info`: the facts that a bug report needs. A failing query becomes a line of the report.

With `--pid` it tells only what the groups of running processes did, which it reads without their help.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from coordinator.cli.output import write_out
from coordinator.diagnosis.group_reports import ProcessReport, in_lines, report_of
from coordinator.diagnosis.pages import Search, find_pages
from coordinator.settings import CoordinatorSettings, cuda_visible_devices
from device_comm.cpu import communicator
from device_comm.cuda.driver import Driver
from device_comm.cuda.policy.decision import CallFacts, Capacity, GroupFacts, choose
from device_comm.cuda.policy.file import read_policy_file, table_of
from device_comm.cuda.policy.table import BUILT_IN, PolicyTable
from device_comm.cuda.topology import probe
from device_comm.nccl.library import NcclLibrary, version_text
from shm_broadcast.errors import CommError

__all__ = ["collect", "show_info"]

PACKAGES: Final = ("group-coordinator", "torch", "pyzmq", "msgspec", "cuda-python", "cuda-bindings", "numpy")
GROUPS: Final = "groups of the processes on this host"
# Deadline of the trial start. Two interpreters that import torch take a few seconds on a busy host.
START_S: Final = 60.0
GROUP_SIZES: Final = (2, 4, 8)
SIZES: Final = (8 << 10, 256 << 10, 1 << 20, 16 << 20)


def show_info(*, as_json: bool, tries: bool = True, pids: Sequence[int] = ()) -> int:
    """Print the report of `collect`, or only that on the groups of `pids`; return the exit status."""
    if pids:
        search = find_pages(pids, records=False)
        missing = sorted(set(pids) - {each.pid for each in search.found})
        if missing:
            sys.stderr.write("".join(f"{_why_missing(pid, search)}\n" for pid in missing))
            return 1
        found = {GROUPS: _reports(report_of(each for each in search.found if each.pid in pids))}
    else:
        found = collect(tries=tries)
    if as_json:
        write_out(json.dumps(found, indent=1) + "\n")
    else:
        found[GROUPS] = in_lines(msgspec.convert(found[GROUPS], tuple[ProcessReport, ...])) or "none"
        lines = [line for title, section in found.items() for line in (title, *_lines(section, "  "))]
        write_out("".join(f"{line}\n" for line in lines))
    return 0


def _reports(reports: tuple[ProcessReport, ...]) -> Any:
    return msgspec.to_builtins(reports)


def _why_missing(pid: int, search: Search) -> str:
    if pid in search.refused:
        return f"process {pid} does not let this user read it"
    if pid in search.faults:
        return f"the status page of process {pid} cannot be decoded: {search.faults[pid]}"
    return f"process {pid} has no groups: it has ended, or uses none of ours"


def _lines(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if isinstance(inner, (Mapping, list)) and inner:
                yield f"{indent}{name}:"
                yield from _lines(inner, indent + "  ")
            else:
                yield f"{indent}{name}: {inner if inner not in ({}, []) else 'none'}"
    elif isinstance(value, list):
        for inner in value:
            yield f"{indent}{inner}"
    else:
        yield f"{indent}{value}"


def collect(*, tries: bool = True) -> dict[str, Any]:
    """Return the report by section, as JSON types. With `tries`, start two ranks on this host and report that too."""
    settings = _try(CoordinatorSettings.from_env)
    drivers = _try(_drivers)
    running = find_pages(records=False).found  # before the trial start, whose ranks would be among them
    return {
        "versions": {
            **{name: _version(name) for name in PACKAGES},
            "python": platform.python_version(),
            "CUDA version of torch": torch.version.cuda or "none (CPU build)",
        },
        "host": {
            "system": f"{platform.system()} {platform.release()} on {platform.machine()}",
            "processors": f"{len(os.sched_getaffinity(0))} for this process, {os.cpu_count()} in all",
            "instruction set of CPU reductions": communicator.instruction_set(),
        },
        "settings": _settings(settings),
        "trial start of two ranks": _start_up() if tries else "skipped (--no-start)",
        GROUPS: _reports(report_of(running)),
        "CUDA_VISIBLE_DEVICES": _visible(cuda_visible_devices(), drivers),
        "CUDA devices": _devices(drivers),
        "NCCL": _try(lambda: _nccl(settings)),
        "all_reduce on the CPU, all ranks on one host": {
            f"{size} ranks": {
                _size(nbytes): _path(communicator.call_path("all_reduce", nbytes, size)) for nbytes in SIZES
            }
            for size in GROUP_SIZES
        },
        "all_reduce on CUDA, if all devices are like the first": _cuda_paths(drivers, settings),
    }


def _try(
    question: Callable[[], Any], errors: tuple[type[Exception], ...] = (CommError, OSError, RuntimeError)
) -> Any:
    """Return the answer, or the error as one line."""
    try:
        return question()
    except errors as error:
        return f"{type(error).__name__}: {error}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _settings(settings: Any) -> Any:
    if not isinstance(settings, CoordinatorSettings):
        return settings
    default, given = CoordinatorSettings().agreed(), settings.agreed()
    changed = {name: value for name, value in given.items() if value != default.get(name)}
    return {"fingerprint": settings.fingerprint(), "changed from the defaults": changed}


def _visible(text: str | None, drivers: Any) -> Any:
    """Return the devices that CUDA shows, the entry at which the list ended, and all devices of the host."""
    if text is None:
        return "not set"
    # Other errors, such as a missing package, say nothing about the list.
    is_known = isinstance(drivers, list) or "there is no CUDA device" in drivers
    shown = [_try(driver.uuid) for driver in drivers] if isinstance(drivers, list) else []
    return {
        "text": text,
        "shows": shown if isinstance(drivers, list) else drivers,
        "ended by": _ended_by(text, len(shown)) if is_known else "unknown",
        "plugged in": _plugged_in(),
    }


def _ended_by(text: str, shown: int) -> str:
    """Return why CUDA shows only the first `shown` entries of a list of devices: CUDA itself gives no reason."""
    entries = [entry.strip() for entry in text.split(",")] if text.strip() else []
    if shown >= len(entries):
        return "nothing, all entries are shown"
    entry = entries[shown]
    kind = entry[:4].upper()
    if not shown and len({each.lower() for each in entries}) < len(entries):
        why = "a duplicate entry hides all devices"
    elif shown and any(each.upper().startswith("MIG-") for each in entries[: shown + 1]):
        why = "a process sees a single MIG instance and no other device"
    elif kind in ("GPU-", "MIG-"):
        why = "no device has this UUID, or several begin with it"
    elif not entry.lstrip("+-").isdecimal():
        why = "neither a number nor a UUID that begins with GPU- or MIG-"
    elif entry.startswith("-"):
        why = "a negative number ends the list"
    else:
        why = "there is no device with this number"
    return f"entry {shown + 1} of {len(entries)}, {entry!r}: {why}"


def _plugged_in() -> Any:
    """Return every device and MIG instance as NVML lists them: CUDA_VISIBLE_DEVICES does not affect NVML."""
    try:
        from cuda.bindings import nvml
    except ImportError as error:
        return f"unknown: NVML needs cuda-bindings: {error}"

    def listed() -> list[str]:
        nvml.init_v2()
        found = []
        for index in range(nvml.device_get_count_v2()):
            device = nvml.device_get_handle_by_index_v2(index)
            found.append(f"{index}: {nvml.device_get_uuid(device)} {nvml.device_get_name(device)}")
            for number in range(nvml.device_get_max_mig_device_count(device)):
                with contextlib.suppress(nvml.NotFoundError):  # the instances may leave gaps
                    part = nvml.device_get_mig_device_handle_by_index(device, number)
                    found.append(f"{index}: {nvml.device_get_uuid(part)}")
        return found

    return _try(listed, (nvml.NvmlError, RuntimeError))


def _start_up() -> list[str]:
    """Start two ranks, create their groups, and return the lines of their start-up report."""
    from coordinator.cli.jobs import REPORT
    from coordinator.cli.local_ranks import run_job

    lines: list[str] = []

    def collect_report(directory: Path) -> None:
        if (directory / REPORT).is_file():
            lines.extend((directory / REPORT).read_text(encoding="utf-8").splitlines())

    status = run_job("start-up", 2, START_S, collect=collect_report)
    return (
        lines
        if status == 0
        else [*lines, "failed: the groups could not be created, see the errors on stderr"]
    )


def _drivers() -> list[Driver]:
    """Return the driver of each device.

    Raises:
        CapabilityError: CUDA cannot be used; the text says why.
    """
    from device_comm.cuda.driver_bindings import CudaDriver

    first = CudaDriver(0)
    return [first, *(CudaDriver(index) for index in range(1, first.device_count()))]


def _devices(drivers: Any) -> Any:
    if not isinstance(drivers, list):
        return drivers
    facts = [probe(driver) for driver in drivers]
    devices = {
        str(index): {
            "name": each.name,
            "arch": each.arch,
            "memory": f"{each.memory_bytes / 2**30:.1f} GiB",
            "multiprocessors": each.multiprocessors,
            "uuid": each.uuid,
            "bus": each.pci_bus_id,
            "driver": each.driver_version,
            "memory sharing between processes": f"CUDA IPC {_yes(each.ipc)}, descriptors {_yes(each.vmm)}",
            "problems": dict(each.problems),
        }
        for index, each in enumerate(facts)
    }
    matrix = [
        f"{index}: " + " ".join(_link(one, other) for other in facts) for index, one in enumerate(facts)
    ]
    return {**devices, "access from one device (row) to another (column)": matrix}


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _link(one: Any, other: Any) -> str:
    if one.uuid == other.uuid:
        return "self"
    link = one.links.get(other.uuid)
    if link is None:
        return "unknown"
    return ("nvlink" if link.native_atomics else "pcie") if link.access else "none"


def _nccl(settings: Any) -> dict[str, str]:
    path = settings.cuda.nccl_library if isinstance(settings, CoordinatorSettings) else None
    library = NcclLibrary(path)
    return {"version": version_text(library.version), "file": str(library.path)}


def _cuda_paths(drivers: Any, settings: Any) -> Any:
    if not isinstance(drivers, list) or not isinstance(settings, CoordinatorSettings):
        return "no CUDA device"
    cuda = settings.cuda
    facts = probe(drivers[0])
    has_nvlink = all(link.native_atomics for uuid, link in facts.links.items() if uuid != facts.uuid)
    # A group computes its capacities from its workspace. Here all equal the arena, so the policy table decides.
    room = Capacity(**dict.fromkeys(Capacity.__struct_fields__, cuda.arena_bytes))
    paths = {}
    for size in GROUP_SIZES:
        group = GroupFacts(
            world_size=size,
            device_name=facts.name,
            arch=facts.arch,
            multiprocessors=facts.multiprocessors,
            has_nvlink=has_nvlink and len(drivers) > 1,
            is_exportable=True,
            has_multicast=facts.multicast and facts.vmm and cuda.multimem and has_nvlink and len(drivers) > 1,
            multimem_one_shot_bytes=cuda.multimem_one_shot_bytes,
            is_deterministic=cuda.deterministic,
            is_enabled=cuda.custom_all_reduce,
            capacity=room,
        )
        table = _try(partial(_table, cuda.policy_file, group))
        if isinstance(table, str):
            return table
        paths[f"{size} ranks"] = {
            _size(nbytes): _path(
                choose(group, CallFacts(operation="all_reduce", dtype="bfloat16", nbytes=nbytes), table)
            )
            for nbytes in SIZES
        }
    return paths


def _table(path: str | None, group: GroupFacts) -> PolicyTable:
    return BUILT_IN if path is None else table_of(read_policy_file(path), group, path)


def _path(path: Any) -> str:
    return f"{path.algorithm}: {path.reason}"


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
