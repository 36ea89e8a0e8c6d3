"""What belongs to an object ends with it, though signal handlers strike in the callbacks of weak references."""

import gc
import os
import re
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap import world
from coordinator.heartbeats import links
from coordinator.heartbeats.watching import Heartbeats
from coordinator.host import process_groups
from coordinator.host.process_groups import LOOPBACK, GlooOptions, new_unregistered_gloo_group
from coordinator.meeting import losses
from coordinator.security import store_thread
from device_comm.cpu.several_hosts import wires
from device_comm.nccl import connection
from shm_broadcast import segment
from shm_broadcast.liveness import PeerWatch, this_process
from shm_broadcast.ring import signal as ring_signal
from shm_broadcast.status import kept_pages
from tests.handlers import raising_at

ROOT = Path(__file__).parents[3]
# Where Python would run a handler while it takes an entry out of a weak container.
PLACES = ("/weakref.py", "/_weakrefset.py")


def ends(keeper: list[Any], table: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let go of the only object in `keeper` while a handler raises; its entry goes, and no exception is dropped."""
    dropped: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", dropped.append)
    before = table()
    assert before
    raising_at(0, keeper.clear, PLACES)
    gc.collect()
    assert not dropped
    assert table() == before - 1


def watch() -> PeerWatch:
    return PeerWatch(this_process(), {})


@pytest.mark.guarantee("G9")
def test_a_gloo_group_that_ends_while_a_handler_raises_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its device has four descriptors and a thread, which stayed until the process ended."""
    descriptors = len(os.listdir("/proc/self/fd"))
    kept: list[Any] = [new_unregistered_gloo_group(dist.HashStore(), 0, 1, "g", 20.0, GlooOptions(LOOPBACK))]
    assert len(os.listdir("/proc/self/fd")) > descriptors
    ends(kept, lambda: len(process_groups._users), monkeypatch)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_watch_that_ends_while_a_handler_raises_is_told_no_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that others report nor those of hosts."""
    kept = [watch()]
    losses.listen_for_losses(kept[0], [1])
    ends(kept, lambda: len(losses._watches), monkeypatch)
    beats, kept = Heartbeats(1.0), [watch()]
    beats.listen(kept[0], [1])
    ends(kept, lambda: len(beats._watches), monkeypatch)


def test_what_belongs_to_a_world_ends_with_it_though_a_handler_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its spare connection, its links, and whether its members may change."""
    for table, add in (
        (world._spares, world._spare_of),
        (world._heartbeats, world._heartbeats_of),
    ):
        kept: list[Any] = [dist.ProcessGroup(dist.HashStore(), 0, 1)]
        assert add(kept[0]) is add(kept[0])
        ends(kept, lambda table=table: len(table), monkeypatch)  # type: ignore[misc]


@pytest.mark.guarantee("S8")
def test_no_python_runs_while_a_kept_page_is_closed() -> None:
    """A signal handler could raise in it, and the descriptor would stay open."""
    read, write = os.pipe()
    os.close(write)
    kept = [kept_pages._Kept(read)]
    ran: list[str] = []
    sys.setprofile(lambda frame, event, _arg: ran.append(frame.f_code.co_name) if event == "call" else None)
    try:
        kept.clear()
    finally:
        sys.setprofile(None)
    assert ran == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(read)


def test_no_table_of_ours_takes_entries_out_by_python() -> None:
    """Python drops what a handler raises in the callback of a weak container, and the entry stays."""
    weak = re.compile(r"\bWeak(Key|Value)Dictionary\b(?!`)|\bWeakSet\b|\bfinalize\(self")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for package in ("coordinator", "device_comm", "shm_broadcast")
        for path in (ROOT / package).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if weak.search(line)
    ]
    assert found == []


SETS: tuple[set[Any], ...] = (
    links._links,
    store_thread._open,
    world._declared_elastic,
    wires._wires,
    connection._connections,
    ring_signal._signals,
    segment._handovers,
)


@pytest.mark.parametrize("table", SETS)
def test_a_set_of_references_loses_what_is_collected(
    table: set[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The callback of its references is its own `discard`."""
    kept = [watch()]
    table.add(weakref.ref(kept[0], table.discard))
    ends(kept, lambda: len(table), monkeypatch)
