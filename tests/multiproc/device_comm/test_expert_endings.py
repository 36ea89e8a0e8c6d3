"""How the expert-parallel kernels end and fail with the others of their group; see `test_expert_exchange.py`."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shm_broadcast.errors import GroupBrokenError, UsageError
from tests.cuda_worlds import STREAM, cuda_world
from tests.harness import RankPool, run_ranks
from tests.multiproc.device_comm.test_expert_exchange import ARENA, Tokens, plane_of, same, sent_by
from tests.nccl_ranks import HostStreams
from tests.waiting import wait_until
from tests.worlds import meet, outcome_of

_FREED = ("mem_free", "host_free", "vmm_unmap", "ipc_close", "module_unload")


def ends_beside_another_group(
    rank: int, world_size: int, directory: Path, native: str
) -> tuple[float, bool, list[str]]:
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (group, it, driver):
        sent_by(it, Tokens(rank, 3, 4), rank, (4, 4), capacity=4)
        assert it.all_reduce(torch.ones(4))[0] == 2.0
        group.barrier()

        def freed() -> int:
            return sum(driver.calls.get(name, 0) for name in _FREED)

        before = freed()
        with driver.hang():
            start = time.monotonic()
            it.destroy()
            took_s, was_freed = time.monotonic() - start, freed() > before or driver._closed
        wait_until(lambda: driver._closed, "the driver to be closed", 10.0, 0.01)
        return took_s, was_freed, driver.leaks()


@pytest.mark.guarantee("D75")
def test_both_kinds_of_kernels_end_behind_other_work(ranks2: RankPool, native: str) -> None:
    """Nothing is freed while the device is busy, for one second in all; the driver closes behind the last memory."""
    for took_s, was_freed, left in ranks2.run(ends_beside_another_group, native):
        assert took_s < 1.9
        assert not was_freed
        assert left == []


def ends_while_a_kernel_waits(
    rank: int, world_size: int, directory: Path, native: str
) -> tuple[float, dict[str, Any]]:
    settings: dict[str, Any] = {"expert_arena_bytes": ARENA, "deadline_s": 60.0}
    with cuda_world(rank, world_size, directory, native, None, False, **settings) as (group, it, _):
        tokens = Tokens(rank, 3, 4)
        sent_by(it, tokens, rank, (4, 4), capacity=4)
        group.barrier()
        took_s = 0.0
        if rank == 0:
            waiting = threading.Thread(
                target=sent_by, args=(it, tokens, rank, (4, 4)), kwargs={"capacity": 4}
            )
            waiting.start()
            waiting.join(0.3)
            assert waiting.is_alive()
            start = time.monotonic()
            it.end_calls(0.1)
            waiting.join(30.0)
            took_s = time.monotonic() - start
        else:
            it.end_calls(0.1)
        outcome = outcome_of(lambda: sent_by(it, tokens, rank, (4, 4), capacity=4))
        meet(rank, range(world_size), directory, "told")
        return took_s, outcome


@pytest.mark.guarantee("D75")
def test_a_kernel_that_waits_leaves_before_any_group_frees_memory(native: str) -> None:
    """`end_calls` ends a dispatch that waits for a stopped peer, long before its deadline, and refuses later ones."""
    for took_s, outcome in run_ranks(ends_while_a_kernel_waits, 2, native):
        assert took_s < 10.0
        assert outcome["kind"] == "ClosedError"


def ends_with_a_failure(rank: int, world_size: int, directory: Path, native: str) -> float:
    with cuda_world(rank, world_size, directory, native, None, False, expert_arena_bytes=ARENA) as made:
        group, it, driver = made
        sent_by(it, Tokens(rank, 3, 4), rank, (4, 4), capacity=4)
        meet(rank, range(world_size), directory, "queued")
        driver.unfinished = -1
        failing = threading.Timer(0.3, group._health.fail, [GroupBrokenError("a kernel gave up")])
        failing.start()
        start = time.monotonic()
        it.end_calls(30.0)
        took_s = time.monotonic() - start
        failing.join()
        meet(rank, range(world_size), directory, "told")
        return took_s


@pytest.mark.guarantee("D75")
def test_the_wait_for_queued_calls_ends_when_the_group_breaks(native: str) -> None:
    """The failure of either kind of kernels does that; calls behind it, of the other kind too, will not be done."""
    for took_s in run_ranks(ends_with_a_failure, 2, native):
        assert 0.2 < took_s < 15.0


def loses_its_stream(rank: int, world_size: int, directory: Path, native: str) -> list[str]:
    with cuda_world(rank, world_size, directory, native, None, False, expert_arena_bytes=ARENA) as made:
        _, it, driver = made
        tokens, streams, own = Tokens(rank, 3, 4), it._streams, driver.stream_create()
        assert isinstance(streams, HostStreams)
        streams.number = own
        sent_by(it, tokens, rank, (4, 4), capacity=4)
        # Not by a barrier of the group, which the other rank may break before this one has left it.
        meet(rank, range(world_size), directory, "queued")
        driver.stream_destroy(own)
        streams.number = STREAM
        first = outcome_of(lambda: sent_by(it, tokens, rank, (4, 4), capacity=4))
        again = outcome_of(lambda: sent_by(it, tokens, rank, (4, 4), capacity=4))
        meet(rank, range(world_size), directory, "told")
        return [first["kind"], again["kind"]]


@pytest.mark.guarantee("D55")
def test_a_call_that_cannot_be_ordered_breaks_the_group(native: str) -> None:
    """The stream of the last dispatch was destroyed: the peers may have queued the call, so the group is broken."""
    for first, again in run_ranks(loses_its_stream, 2, native):
        # A rank may learn of the other's failure first.
        assert first in ("CudaError", "GroupBrokenError")
        assert again == "GroupBrokenError"


def leaves_a_capture(rank: int, world_size: int, directory: Path, native: str) -> list[Any]:
    with cuda_world(rank, world_size, directory, native, expert_arena_bytes=ARENA) as (group, it, driver):
        tokens, streams, graph_stream = Tokens(rank, 3, 4), it._streams, driver.stream_create()
        assert isinstance(streams, HostStreams)
        sent_by(it, tokens, rank, (4, 4), capacity=4)
        expert = it.expert_exchange()
        assert expert is not None

        def captured() -> None:
            with it.capture(graph_stream):
                streams.number = graph_stream
                driver.begin_capture(graph_stream)
                try:
                    sent_by(it, tokens, rank, (4, 4), capacity=4, is_captured=True)
                    raise UsageError("the body's own")
                finally:
                    streams.number = STREAM
                    driver.end_capture(graph_stream)

        outcome = outcome_of(captured)
        driver.stream_destroy(graph_stream)
        routed = sent_by(it, tokens, rank, (4, 4), capacity=4)
        assert same(routed, sent_by(plane_of(group), tokens, rank, (4, 4), capacity=4))
        return [outcome["kind"], expert.stream]


@pytest.mark.guarantee("D85")
def test_a_capture_that_fails_leaves_the_kernels_on_their_stream(ranks2: RankPool, native: str) -> None:
    """An exception in the body drops the graph; the next dispatch goes on where the last eager one was."""
    assert ranks2.run(leaves_a_capture, native) == [["UsageError", STREAM]] * 2
