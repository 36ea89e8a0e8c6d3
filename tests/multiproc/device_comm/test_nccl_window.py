"""The symmetric window of NCCL over real processes, the stub of NCCL and a driver without a GPU."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from coordinator.errors import CommError, GroupBrokenError, NcclError
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda_settings import CudaSettings
from device_comm.nccl.library import NcclLibrary
from tests.cuda_worlds import STREAM, cuda_world
from tests.harness import RankPool, run_ranks
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import HostStreams, nccl_world, stub_of
from tests.waiting import wait_until
from tests.worlds import meet

WINDOW = 1 << 16
ABORTS, FINALIZES, ALLOCATIONS, FREES, REGISTERED, DEREGISTERED, STAGED, LEFT_BEHIND = 0, 2, 5, 6, 7, 8, 9, 10
NO_WINDOW = "no symmetric window: "


def staging(**more: Any) -> dict[str, Any]:
    return {"custom_all_reduce": False, "nccl_window_bytes": WINDOW, **more}


def counters(library: NcclLibrary) -> Callable[..., list[int]]:
    """Return a function that returns how much counters of the stub have grown since."""
    calls = stub_of(library).stub_calls
    before = [calls(which) for which in range(11)]
    return lambda *which: [calls(each) - before[each] for each in which]


def staged_sums(rank: int, world_size: int, directory: Path, native: str) -> list[int]:
    grown = counters(NcclLibrary(f"{native}/libnccl-stub.so"))
    with cuda_world(rank, world_size, directory, native, **staging()) as (_, it, _driver):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            whole = torch.full((8, 8), rank + 1.0, dtype=dtype)
            # Contiguous sums skip the checks from the second call on, transposed ones do not: all are staged alike.
            for own in (whole, whole, whole if rank else whole.t(), whole.clone()):
                assert it.all_reduce(own).tolist() == [[3.0] * 8] * 8
            output = torch.empty_like(whole)
            assert it.all_reduce_into_output(whole, output).tolist() == [[3.0] * 8] * 8
            assert it.all_reduce_(output).tolist() == [[6.0] * 8] * 8
        full = torch.full((WINDOW // 4,), rank + 1.0)
        assert it.all_reduce(full).eq(3.0).all()
        assert grown(STAGED) == [19]
        # Beyond the window's size, of other dtypes and reductions, and collected calls go as without a window.
        assert it.all_reduce(torch.ones(WINDOW // 4 + 1)).eq(2.0).all()
        assert it.all_reduce(torch.ones(3, dtype=torch.int32)).tolist() == [2] * 3
        assert it.all_reduce(torch.full((3,), float(rank)), "max").tolist() == [1.0] * 3  # type: ignore[arg-type]
        assert it.all_gather(torch.ones(2)).tolist() == [1.0] * 4
        assert it.all_reduce(torch.ones(0)).tolist() == []
        with it.group():
            summed = it.all_reduce(torch.ones(3))
        assert summed.tolist() == [2.0] * 3
        assert grown(STAGED) == [19]
        about = [
            it.path("all_reduce", nbytes, dtype).reason
            for nbytes, dtype in ((64, torch.float32), (WINDOW + 4, torch.float32), (64, torch.int32))
        ]
        assert about[0].endswith("; staged through the symmetric window")
        assert all(f"floats of up to {WINDOW} bytes" in each for each in about[1:])
        assert "window" not in it.path("all_gather", 64, torch.float32).reason
    return grown(ABORTS, FINALIZES, ALLOCATIONS, FREES, REGISTERED, DEREGISTERED, LEFT_BEHIND)


def test_sums_that_fit_are_staged_on_all_ranks(ranks2: RankPool, native: str) -> None:
    """Whatever way a rank's call takes, all stage the same sums, and values are right. The end leaves nothing."""
    assert ranks2.run(staged_sums, native) == [[0, 1, 1, 1, 1, 1, 0]] * 2


def captured(rank: int, world_size: int, directory: Path, native: str) -> list[float]:
    with cuda_world(rank, world_size, directory, native, **staging()) as (_, it, driver):
        streams = it._streams
        assert isinstance(streams, HostStreams)
        stream = driver.stream_create()
        own = torch.full((16,), rank + 1.0)
        with it.capture(stream):
            streams.number = stream
            assert it.all_reduce(own)[0] == 3.0
            driver.begin_capture(stream)
            result = it.all_reduce(own)
            graph = driver.end_capture(stream)
            streams.number = STREAM
        window = it._connection.window
        assert window is not None
        # The stub adds at once, when nothing was copied in yet; a replay copies in and out of the same memory.
        assert len(graph.steps) == 2
        own.fill_(7.0)
        driver.replay(graph)
        seen = [float(result[0])]
        assert it.all_reduce(own)[0] == 14.0
        # A call on another stream waits for the last one, which used the same memory.
        before = len(driver.orders)
        streams.number = stream
        assert it.all_reduce(own)[0] == 14.0
        assert driver.orders[before:] == [(STREAM, stream)]
        driver.stream_synchronize(stream)
        driver.stream_destroy(stream)
        return seen


def test_a_staged_sum_can_be_captured(ranks2: RankPool, native: str) -> None:
    """The graph holds the copy in and the copy out, around what NCCL records itself."""
    assert ranks2.run(captured, native) == [[7.0]] * 2


def without_window(
    rank: int, world_size: int, directory: Path, native: str, spoil: str
) -> tuple[list[str], list[int]]:
    library = NcclLibrary(f"{native}/libnccl-stub.so")
    grown, knobs = counters(library), stub_of(library)
    settings = staging()
    if rank == 1:
        if spoil == "memory":
            knobs.stub_fail(b"ncclMemAlloc", 1, 1)
        if spoil == "declined":
            knobs.stub_declines_windows(1)
        if spoil == "size":
            settings["nccl_window_bytes"] = 2 * WINDOW
        if spoil == "driver":
            cast("Any", CudaCommunicator)._orders = lambda _: False
    try:
        with cuda_world(rank, world_size, directory, native, **settings) as (_, it, _driver):
            for _ in range(2):
                assert it.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
            reason = it.path("all_reduce", 12, torch.float32).reason.partition(NO_WINDOW)[2]
    finally:
        knobs.stub_declines_windows(0)
    assert grown(STAGED, LEFT_BEHIND, ABORTS) == [0, 0, 0]
    return [reason], grown(ALLOCATIONS, FREES, REGISTERED, DEREGISTERED)


@pytest.mark.guarantee("D86")
@pytest.mark.parametrize(
    ("spoil", "text", "counts"),
    [
        ("memory", "rank 1: ncclMemAlloc returned 1", ([1, 1, 0, 0], [0, 0, 0, 0])),
        ("declined", "rank 1: NCCL declined the window", ([1, 1, 1, 1], [1, 1, 0, 0])),
        ("size", "the ranks want windows of [65536, 131072] bytes", ([0] * 4, [0] * 4)),
        ("driver", "rank 1: the driver's bindings are missing", ([0] * 4, [0] * 4)),
    ],
)
def test_what_one_rank_lacks_leaves_all_without_a_window(
    native: str, spoil: str, text: str, counts: tuple[list[int], list[int]]
) -> None:
    """All ranks state the same reason, sums are right, and what one had allocated or registered is given back."""
    found = run_ranks(without_window, 2, native, spoil)
    assert found[0][0] == found[1][0]
    assert text in found[0][0][0]
    assert (found[0][1], found[1][1]) == counts


def plainly(rank: int, world_size: int, directory: Path, stub: str, nbytes: int) -> str:
    settings = CudaSettings(nccl_window_bytes=nbytes)
    with nccl_world(rank, world_size, directory, stub, cuda=settings) as (_, it):
        assert it.path("all_reduce", 12, torch.float32).reason.endswith("not connected yet")
        assert it.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        return it.path("all_reduce", 12, torch.float32).reason.removeprefix(NO_WINDOW)


def test_without_a_driver_or_a_wish_there_is_no_window(ranks2: RankPool, tmp_path: Path) -> None:
    """A communicator without a driver says so, and one that was asked for none names the setting."""
    stub = str(build_stub(tmp_path))
    assert all("has no driver" in each for each in ranks2.run(plainly, stub, WINDOW))
    assert ranks2.run(plainly, stub, 0) == ["cuda.nccl_window_bytes is 0"] * 2


def on_old_library(rank: int, world_size: int, directory: Path, folder: str) -> str:
    with cuda_world(rank, world_size, directory, folder, **staging()) as (_, it, _driver):
        assert it.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        return it.path("all_reduce", 12, torch.float32).reason


def test_a_library_without_windows_is_told_by_version(ranks2: RankPool, tmp_path: Path) -> None:
    """NCCL 2.26 has none of them; its version and the one that is needed are in the reason."""
    build_stub(tmp_path, "-DVERSION=22606")
    for reason in ranks2.run(on_old_library, str(tmp_path)):
        assert "NCCL 2.26.6" in reason
        assert "needs NCCL 2.27.0 or newer" in reason


def registering_fails(rank: int, world_size: int, directory: Path, native: str) -> tuple[str, list[int]]:
    library = NcclLibrary(f"{native}/libnccl-stub.so")
    grown = counters(library)
    if rank == 1:
        stub_of(library).stub_fail(b"ncclCommWindowRegister", 3, 1)
    with cuda_world(rank, world_size, directory, native, meets=False, **staging()) as (_, it, _driver):
        with pytest.raises(CommError) as caught:
            it.all_reduce(torch.ones(3))
        with pytest.raises(GroupBrokenError):
            it.all_reduce(torch.ones(3))
        wait_until(lambda: grown(FREES) == [1], "the end of the window", 10.0)
        meet(rank, range(world_size), directory, "told")
    assert isinstance(caught.value, NcclError if rank else CommError)
    return str(caught.value), grown(ABORTS, FINALIZES, ALLOCATIONS, FREES, REGISTERED, LEFT_BEHIND)


@pytest.mark.guarantee("D86")
def test_a_rank_that_cannot_register_breaks_the_group_on_all(native: str) -> None:
    """The rank that waits for it in the library is told, both abort, and the memory is freed."""
    found = run_ranks(registering_fails, 2, native, check_leaks=False)
    assert "the stub was told to fail in ncclCommWindowRegister" in found[1][0]
    assert [counts for _, counts in found] == [[1, 0, 1, 1, 0, 0]] * 2


def survives(rank: int, world_size: int, directory: Path, native: str) -> list[int]:
    grown = counters(NcclLibrary(f"{native}/libnccl-stub.so"))
    with cuda_world(rank, world_size, directory, native, meets=False, **staging()) as (_, it, _driver):
        assert it.all_reduce(torch.ones(3)).tolist() == [2.0] * 3
        meet(rank, range(world_size), directory, "ready")
        if rank == 1:
            os._exit(0)
        wait_until(lambda: grown(FREES) == [1], "the end of the window", 10.0)
    return grown(ABORTS, FINALIZES, REGISTERED, DEREGISTERED, FREES, LEFT_BEHIND)


def test_the_window_of_a_broken_group_is_deregistered_then_freed(native: str) -> None:
    """When a rank has died while nothing was queued, the other one deregisters before it aborts, and then frees."""
    assert run_ranks(survives, 2, native, expect_dead=[1], check_leaks=False)[0] == [1, 0, 1, 1, 1, 0]
