"""The clocks of two hosts are aligned by the calls that their ranks have really made over a network."""

import re
from pathlib import Path

import pytest
import torch

from coordinator.cli import main as command
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from shm_broadcast.status.layout import TABLES
from shm_broadcast.status.record_file import PAGE_SUFFIX
from tests.hosts import report, run_on_two_hosts
from tests.probes import requires
from tests.trace_format import check_trace

pytestmark = requires("network_namespaces")

CALLS = 30
HOUR_NS = 3600 * 10**9


def main(directory: Path, records: str, rank: int) -> None:
    """Make barriers and exchanges of objects, of which each host keeps its own record."""
    own = Path(records) / f"host{rank // 2}"
    own.mkdir(mode=0o700, exist_ok=True)
    settings = CoordinatorSettings.resolve({}, record_dir=str(own))
    init_distributed_environment(4, rank, "tcp://10.77.0.1:29510", backend="gloo", settings=settings)
    group = get_world_group()
    for _ in range(CALLS):
        group.barrier()
        group.all_gather_object(rank)
        group.all_reduce(torch.ones(4))
    destroy_distributed_environment()
    report(directory, rank, {})


def set_clock(file: Path, by_ns: int, boot_id: bytes) -> None:
    """Change a page as if its host had been started at another time, so that its clock shows `by_ns` more."""
    content = bytearray(file.read_bytes())
    add(content, TABLES["header"].offset + 32, by_ns)
    add(content, TABLES["header"].offset + 40 + 8, -by_ns)
    content[88:128] = boot_id.ljust(40, b"\0")
    groups = TABLES["groups"]
    for place in range(groups.number):
        at = groups.offset + place * groups.nbytes
        if content[at + 4]:
            add(content, at + 24, by_ns)
    file.write_bytes(content)


def add(content: bytearray, at: int, by: int) -> None:
    """Add to a word of 8 bytes."""
    value = (int.from_bytes(content[at : at + 8], "little") + by) % 2**64
    content[at : at + 8] = value.to_bytes(8, "little")


@pytest.mark.thorough
def test_the_offset_between_two_hosts_is_found_within_the_error_that_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The hosts are network namespaces of one machine, so the true offset is known: nothing, and then one hour."""
    run_on_two_hosts(__name__, str(tmp_path))
    for file in (tmp_path / "host1").rglob(f"*{PAGE_SUFFIX}"):
        set_clock(file, HOUR_NS, b"another boot")
    out = tmp_path / "out.json"
    assert command(["trace", str(out), str(tmp_path / "host0"), str(tmp_path / "host1")]) == 0
    text = capsys.readouterr().out
    found = re.search(r"offset (-[0-9.]+) ms to clock 0 .*, error at most ([0-9.]+) us, from ([0-9]+)", text)
    assert found is not None, text
    offset_us, error_us, calls = float(found[1]) * 1000, float(found[2]), int(found[3])
    assert calls >= 2 * CALLS
    # The text rounds to microseconds.
    assert abs(offset_us + HOUR_NS / 1000) <= error_us + 1, text
    assert "contradict" not in text
    # An hour apart the calls would not meet: with the offset each rank waits for the last one to a barrier.
    barriers: dict[str, list[tuple[float, float]]] = {}
    for each in check_trace(out.read_bytes()):
        if each["ph"] == "X" and each["args"].get("Collective name") == "barrier" and "Seq" in each["args"]:
            span = each["ts"], each["ts"] + each["dur"]
            barriers.setdefault(each["name"], []).append(span)
    whole = [spans for spans in barriers.values() if len(spans) == 4]
    assert len(whole) >= CALLS
    for spans in whole:
        assert max(begin for begin, _ in spans) <= min(end for _, end in spans) + 2 * error_us
