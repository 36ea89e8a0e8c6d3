"""NcclCommunicator over real processes and the stub of NCCL: its values, its lifecycle, and whom errors name."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import (
    CapabilityError,
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    NcclError,
    PeerLostError,
    UsageError,
)
from coordinator.testing import check_device_communicator
from device_comm.nccl.agreement import roots_of
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.library import NcclLibrary
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from tests.harness import RankPool, run_ranks
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import FakeProgress, HostStreams, context_of, nccl_world, stub_of
from tests.rank_exit import RankExit
from tests.waiting import wait_until
from tests.worlds import meet, outcome_of, world

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
# A death is noticed in under a second, or in a few seconds on a busy machine.
PROMPT_S = 10.0


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_stub(tmp_path_factory.mktemp("nccl")))


@pytest.fixture(scope="module")
def old_stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_stub(tmp_path_factory.mktemp("nccl"), "-DVERSION=21903", name="libnccl-old.so"))


# --- values ---------------------------------------------------------------------------------------------------


def keeps_contract(rank: int, world_size: int, directory: Path, stub: str) -> None:
    with nccl_world(rank, world_size, directory, stub) as (group, communicator):
        check_device_communicator(communicator, host=group, dtypes=DTYPES)


def test_the_contract_is_kept_by_two_ranks(ranks2: RankPool, stub: str) -> None:
    """Every clause holds, with the bits of the stub's sums in rank order."""
    ranks2.run(keeps_contract, stub)


def every_call(rank: int, world_size: int, directory: Path, stub: str) -> None:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        everyone = range(world_size)
        inputs = [torch.arange(12.0).view(3, 4) * (r + 1) + r for r in everyone]
        own = inputs[rank]
        total = reduce_in_rank_order(inputs, ReduceOperation.SUM)
        for op in ReduceOperation:
            expected = reduce_in_rank_order(inputs, op)
            assert torch.equal(it.all_reduce(own, op), expected), op
        assert torch.equal(it.all_reduce_(own.clone()), total)
        sizes = [1, 0, 2, 1][:world_size]
        start = sum(sizes[:rank])
        part = it.reduce_scatterv(own, 1, sizes)
        assert torch.equal(part, total[:, start : start + sizes[rank]])
        assert torch.equal(it.reduce_scatter(own, 1), total[:, rank : rank + 1])
        for dim in (0, 1):
            assert torch.equal(it.all_gather(own, dim), torch.cat(inputs, dim))
            uneven = [each.narrow(dim, 0, r % 3) for r, each in enumerate(inputs)]
            whole = it.all_gatherv(uneven[rank], dim, [r % 3 for r in everyone])
            assert torch.equal(whole, torch.cat(uneven, dim))
        sent = [r + 1 for r in everyone]
        received = it.all_to_all(torch.full((sum(sent),), rank), 0, sent, [rank + 1] * world_size)
        assert received.tolist() == [r for r in everyone for _ in range(rank + 1)]
        gathered = it.gather(own, 2, 1)
        assert (gathered is None) == (rank != 2)
        assert gathered is None or torch.equal(gathered, torch.cat(inputs, 1))
        out = torch.empty(2)
        it.scatter(out, torch.arange(2.0 * world_size) if rank == 1 else None, 1)
        assert out.tolist() == [2.0 * rank, 2.0 * rank + 1]


def test_every_call_on_four_ranks(ranks4: RankPool, stub: str) -> None:
    """Parts are even and uneven, along both dimensions, in the first call of a communicator and in later ones."""
    ranks4.run(every_call, stub)


def special_dtypes(rank: int, world_size: int, directory: Path, stub: str) -> list[str]:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            assert it.all_reduce(torch.full((3,), 2.0 + rank).to(dtype)).float().tolist() == [5.0] * 3
        for dtype in (torch.uint32, torch.uint64, torch.int8, torch.int32):
            assert it.all_reduce(torch.full((2,), 3 + rank).to(dtype)).tolist() == [7, 7]
        flags = torch.tensor([False, rank == 1, True])
        assert it.all_reduce(flags).tolist() == [False, True, True]
        assert it.all_reduce(flags, ReduceOperation.PRODUCT).tolist() == [False, False, True]
        numbers = torch.tensor([1 + 2j, rank * 1j])
        assert it.all_reduce(numbers, ReduceOperation.MEAN).tolist() == [1 + 2j, 0.5j]
        assert it.all_gather(torch.tensor([rank], dtype=torch.int16)).tolist() == [0, 1]
        texts = []
        for tensor, op in ((torch.ones(2, dtype=torch.int16), "sum"), (numbers, "product")):
            with pytest.raises(CapabilityError) as caught:
                it.all_reduce(tensor, op)  # type: ignore[arg-type]
            texts.append(str(caught.value))
        assert it.all_reduce(torch.ones(1)).tolist() == [2.0], "the group is intact"
        return texts


def test_dtypes_that_nccl_lacks_are_moved_but_refused_in_sums(ranks2: RankPool, stub: str) -> None:
    """A bool is combined as a byte and a complex number by its parts. All ranks refuse the other dtypes alike."""
    one, other = ranks2.run(special_dtypes, stub)
    assert one == other
    assert "int16" in one[0]
    assert "complex64" in one[1]


def fail_in_group(it: NcclCommunicator) -> None:
    with it.group():
        it.all_reduce(torch.ones(1))
        raise ZeroDivisionError


def grouped(rank: int, world_size: int, directory: Path, stub: str) -> None:
    with nccl_world(rank, world_size, directory, stub) as (group, it):
        peer, streams = 1 - rank, it._streams
        it.connect()
        ends = stub_of(it.library).stub_calls(3)
        assert not it.is_collecting
        with it.group(), it.group():
            assert it.is_collecting
        assert not it.is_collecting
        # This exceeds the ring between two ranks: one after the other the sends would wait for each other.
        large, landing = torch.full((1 << 19,), float(rank)), torch.empty(2, 1 << 18)
        with it.group():
            it.isend(large, peer).wait()
            handle = it.irecv(landing.t(), peer)
            summed = it.all_reduce(torch.ones(3))
            gathered = it.all_gather(torch.full((2, 1), float(rank)), 1)
        handle.wait()
        assert landing.eq(peer).all()
        assert summed.tolist() == [2.0] * 3
        assert gathered.tolist() == [[0.0, 1.0]] * 2
        assert stub_of(it.library).stub_calls(3) == ends + 1
        # Both ranks receive first. The receive is not queued before the send for which the other rank waits.
        into = [torch.empty(3), torch.empty(3)]
        receives = [it.irecv(each, peer) for each in into]
        sends = [it.isend(torch.full((3,), 10.0 * rank + i), peer) for i in range(2)]
        for each in (*receives, *sends):
            each.wait()
        assert [each[0].item() for each in into] == [10.0 * peer, 10.0 * peer + 1]
        # A receive whose handle was not waited for comes before the next collective, as on the peer.
        late = torch.empty(1)
        (it.irecv(late, 0) if rank else it.isend(torch.full((1,), 5.0), 1))
        assert it.all_reduce(torch.ones(1)).tolist() == [2.0]
        assert rank == 0 or late.item() == 5.0
        assert isinstance(streams, HostStreams)
        with streams.use(9):
            handle = it.isend(torch.ones(1), peer)
            it.recv((1,), torch.float32, peer)
        assert streams.waits == []
        handle.wait()
        assert streams.waits == [(7, 9)]
        with pytest.raises(ZeroDivisionError):
            fail_in_group(it)
        assert not it.is_collecting
        assert it.all_reduce(torch.ones(1)).tolist() == [2.0], "the group of calls was closed"
        group.barrier()


def test_grouped_and_point_to_point_calls(ranks2: RankPool, stub: str) -> None:
    """A group makes one call of many. Receives and sends in any order do not wait for each other."""
    ranks2.run(grouped, stub)


# --- life -----------------------------------------------------------------------------------------------------


def leave_twice(rank: int, world_size: int, directory: Path, stub: str) -> None:
    with nccl_world(rank, world_size, directory, stub) as (group, it):
        assert it.all_reduce(torch.ones(1)).item() == 2.0
        group.barrier()
        it.destroy()
        it.destroy()
        calls = stub_of(it.library).stub_calls
        assert (calls(0), calls(1), calls(2)) == (0, 1, 1)


def test_leaving_flushes(stub: str) -> None:
    """The communicator is finalized and freed once, not aborted."""
    run_ranks(leave_twice, 2, stub)


def old_library(rank: int, world_size: int, directory: Path, stub: str) -> str:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        fp8 = torch.ones(2).to(torch.float8_e5m2)
        with pytest.raises(CapabilityError) as caught:
            it.all_reduce(fp8)
        assert it.all_reduce(torch.ones(1)).item() == 2.0
        assert it.all_gather(fp8).float().tolist() == [1.0] * 4
        return str(caught.value)


def test_what_an_old_library_lacks_is_told_by_version(ranks2: RankPool, old_stub: str) -> None:
    """What it lacks is a `CapabilityError` that names what is needed, on all ranks; the group is intact."""
    for text in ranks2.run(old_library, old_stub):
        assert "2.24.0" in text
        assert "2.19.3" in text


def unfit(rank: int, world_size: int, directory: Path, stub: str, old_stub: str) -> list[str]:
    texts = []
    with nccl_world(rank, world_size, directory, old_stub if rank else stub) as (_, it):
        with pytest.raises(DisagreementError) as caught:
            it.all_reduce(torch.ones(1))
        texts.append(str(caught.value))
    with nccl_world(rank, world_size, directory / "second", stub) as (group, it):
        if rank == 0:
            stub_of(it.library).stub_fail(b"ncclGetUniqueId", 2, 1)
        with pytest.raises(NcclError) as failed:
            it.connect()
        assert failed.value.code == 2
        texts.append(str(failed.value))
        assert it.all_reduce(torch.ones(1)).item() == 2.0, "the group is intact"
        group.barrier()
    return texts


def test_ranks_that_cannot_connect_are_all_told_why(ranks2: RankPool, stub: str, old_stub: str) -> None:
    """Different versions, or no unique id on rank 0, give the same error on all ranks, and the group is intact."""
    for different, no_id in ranks2.run(unfit, stub, old_stub):
        assert "2.19.3" in different
        assert "2.32.3" in different
        for part in ("ncclGetUniqueId", "ncclSystemError", "the stub was told to fail", "2.32.3", stub):
            assert part in no_id


def meets_at_two_roots(rank: int, world_size: int, directory: Path, stub: str, old_stub: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("device_comm.nccl.agreement.RANKS_PER_ROOT", 2)
        with nccl_world(rank, world_size, directory, stub) as (group, it):
            control = stub_of(it.library)
            before = control.stub_calls(11)
            if rank == 2:
                control.stub_fail(b"ncclGetUniqueId", 2, 1)
            with pytest.raises(NcclError) as no_id:
                it.connect()
            assert it.all_reduce(torch.ones(1)).item() == 4.0, "the group is intact"
            assert control.stub_calls(11) - before == 2
            group.barrier()
        with nccl_world(rank, world_size, directory / "old", old_stub) as (_, it):
            assert it.all_reduce(torch.ones(1)).item() == 4.0
            assert "ncclCommInitRankScalable" not in it.library.functions
    return [str(no_id.value)]


def test_several_roots_share_the_ranks_of_a_large_group(ranks4: RankPool, stub: str, old_stub: str) -> None:
    """Each creates an id, and a root that cannot is named on all ranks. An older library has one root."""
    for (no_id,) in ranks4.run(meets_at_two_roots, stub, old_stub):
        assert "rank 2 could not begin: ncclGetUniqueId returned 2" in no_id


def test_a_root_serves_128_ranks() -> None:
    """At most, and where all ranks' libraries take several ids."""
    assert list(roots_of(2, True)) == list(roots_of(128, True)) == [0]
    assert list(roots_of(129, True)) == [0, 128]
    assert list(roots_of(512, True)) == [0, 128, 256, 384]
    assert list(roots_of(512, False)) == [0]


def transfers_first(rank: int, world_size: int, directory: Path, stub: str) -> str:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        with pytest.raises(UsageError) as caught:
            it.isend(torch.ones(1)) if rank % 2 else it.irecv(torch.ones(1))
        it.prepare_buffers(0)
        it.isend(torch.full((1,), float(rank)))
        assert it.recv((1,), torch.float32).item() == (rank - 1) % world_size
        return str(caught.value)


def test_a_first_transfer_is_refused_with_more_than_two_ranks(ranks4: RankPool, stub: str) -> None:
    """A transfer before any collective cannot connect all ranks. The error says what to do instead."""
    assert all("eager=True" in text for text in ranks4.run(transfers_first, stub))


# --- failures -------------------------------------------------------------------------------------------------


def tell_when_in_library(it: NcclCommunicator, told: Path) -> None:
    """Create `told` when the keeper, which looks for dead ranks all the time, finds that a call is in the library."""
    health: Any = it.context.health
    check, connection = health.check_peers, it._connection

    def tell_and_check(operation: Any) -> None:
        if connection.returned != connection.entered:
            told.touch()
        check(operation)

    health.check_peers = tell_and_check


def survive(rank: int, world_size: int, directory: Path, stub: str) -> list[dict[str, object]]:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        it.all_reduce(torch.ones(1))
        meet(rank, range(world_size), directory, "ready")
        if rank == 1:
            meet(rank, range(world_size), directory, "in the library")
            raise RankExit(0)
        tell_when_in_library(it, directory / f"in the library-{rank}")
        found = [outcome_of(lambda: it.all_reduce(torch.ones(1))) for _ in range(2)]
        wait_until(lambda: stub_of(it.library).stub_calls(0), "the abort", PROMPT_S)
        assert stub_of(it.library).stub_calls(0) == 1, "aborted once"
        meet(rank, (0, 2), directory, "told")
        return found


def test_survivors_of_a_dead_rank_name_it_and_abort(stub: str) -> None:
    """A rank that dies while the library waits for it is named at once, and the communicator is aborted."""
    results = run_ranks(survive, 3, stub, expect_dead=[1], check_leaks=False)
    for first, second in (results[0], results[2]):
        assert first["kind"] == PeerLostError.__name__, first
        assert first["peers"] == [1]
        assert first["seconds"] < PROMPT_S
        assert second["kind"] == GroupBrokenError.__name__


def joining_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "group-coordinator-nccl-join"]


def late_rank(rank: int, world_size: int, directory: Path, stub: str) -> dict[str, object]:
    with world(rank, world_size, directory) as group:

        def exchange(own: bytes) -> list[bytes]:
            everyone = group.all_gather_object(own)
            if rank == 1:
                meet(rank, range(world_size), directory, "told")
            return everyone

        context = context_of(group, timeout_s=2.0, exchange=exchange)
        it = NcclCommunicator(context, library=NcclLibrary(stub), streams=HostStreams())
        found = outcome_of(it.connect)
        if rank == 1:
            # The stub lets it connect, which NCCL might not. In either case the others have given up.
            found = outcome_of(lambda: it.all_reduce(torch.ones(1)))
        else:
            meet(rank, range(world_size), directory, "told")
            # The library cannot be told to stop joining. When it returns, what it has joined is freed.
            wait_until(lambda: stub_of(it.library).stub_calls(0), "the abort", PROMPT_S)
            wait_until(lambda: not joining_threads(), "the end of the thread", PROMPT_S)
        it.destroy()
        assert stub_of(it.library).stub_calls(0) == 1
        return found


def test_a_rank_that_does_not_connect_is_named(stub: str) -> None:
    """All other ranks wait for it, and at the deadline their error names it."""
    first, late, last = run_ranks(late_rank, 3, stub)
    for found in (first, last):
        assert found["kind"] == CommTimeoutError.__name__
        assert found["missing"] == [1]
    assert late["kind"] in {CommTimeoutError.__name__, GroupBrokenError.__name__}
    assert "[1]" in str(late["missing"]) or "no answer from rank 1" in str(late["text"])


def stuck_collective(rank: int, world_size: int, directory: Path, stub: str) -> dict[str, object]:
    progress = FakeProgress()
    with nccl_world(rank, world_size, directory, stub, progress, timeout_s=0.7) as (_, it):
        it.all_reduce(torch.ones(1))
        it.all_reduce(torch.ones(1))
        assert progress.marks >= 2
        if rank == 0:
            # The device does not finish, while no call of the host waits.
            progress.stuck = True
            it.all_reduce(torch.ones(1))
            wait_until(lambda: it.context.health.is_broken, "the keeper to break the group", PROMPT_S)
            found = outcome_of(lambda: it.all_reduce(torch.ones(1)))
        else:
            it.all_reduce(torch.ones(1))
            found = {}
        meet(rank, range(world_size), directory, "told")
        return found


def test_queued_work_has_a_deadline(stub: str) -> None:
    """The keeper breaks the group although no call of the host waits, and the next call raises."""
    found = run_ranks(stuck_collective, 2, stub)[0]
    assert found["kind"] == GroupBrokenError.__name__
    assert found["cause"] == CommTimeoutError.__name__
    assert "all_reduce #4" in str(found["text"])


def two_in_group(it: NcclCommunicator) -> None:
    with it.group():
        it.all_reduce(torch.ones(1))
        it.all_reduce(torch.ones(1))


def failing_calls(rank: int, world_size: int, directory: Path, stub: str, way: str) -> str:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        it.all_reduce(torch.ones(1))
        knobs = stub_of(it.library)
        if way == "asynchronous":
            knobs.stub_async_error(6)
            wait_until(lambda: it.context.health.is_broken, "the keeper to break the group", PROMPT_S)
            with pytest.raises(GroupBrokenError) as broken:
                it.all_reduce(torch.ones(1))
            cause: BaseException | None = broken.value.__cause__
        else:
            knobs.stub_fail(way.encode(), 3, 1)
            with pytest.raises((NcclError, GroupBrokenError)) as caught:
                two_in_group(it)
            cause = caught.value
        knobs.stub_async_error(0)
        meet(rank, range(world_size), directory, "told")
        return str(cause)


@pytest.mark.parametrize("way", ["asynchronous", "ncclAllReduce", "ncclGroupEnd"])
def test_errors_name_the_library_and_the_call_that_failed(stub: str, way: str) -> None:
    """They give function, code, the library's text, its file and version, and the call with its group."""
    for text in run_ranks(failing_calls, 2, stub, way):
        code = "ncclRemoteError" if way == "asynchronous" else "ncclInternalError"
        function = "ncclCommGetAsyncError" if way == "asynchronous" else way
        for part in (function, code, stub, "2.32.3", "'world:0'"):
            assert part in text
        assert way == "asynchronous" or "the stub was told to fail" in text


def leave_stuck(rank: int, world_size: int, directory: Path, stub: str) -> tuple[float, list[int], list[int]]:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        it.all_reduce(torch.ones(1))
        knobs = stub_of(it.library)
        knobs.stub_never_finishes(1)
        start = time.monotonic()
        it.destroy()
        seconds = time.monotonic() - start
        before = [knobs.stub_calls(which) for which in range(3)]
        # The keeper began to count a moment behind `destroy`. What is finalized within its time is not aborted.
        time.sleep(0.5)
        knobs.stub_never_finishes(0)
        wait_until(lambda: knobs.stub_calls(0), "the abort", PROMPT_S)
        wait_until(lambda: not keepers(), "the end of the thread", PROMPT_S)
        return seconds, before, [knobs.stub_calls(which) for which in range(3)]


def keepers() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("group-coordinator-nccl")]


def test_destroy_of_a_communicator_that_is_never_finalized_is_bounded(stub: str) -> None:
    """No other thread frees it while the library finalizes it. It is freed when the library returns."""
    for seconds, before, after in run_ranks(leave_stuck, 2, stub):
        assert 2.5 < seconds < 2.5 + PROMPT_S
        assert before == [0, 0, 1]
        assert after == [1, 0, 1]


def leave_busy(rank: int, world_size: int, directory: Path, stub: str) -> tuple[float, list[int]]:
    progress = FakeProgress()
    with nccl_world(rank, world_size, directory, stub, progress) as (_, it):
        it.all_reduce(torch.ones(1))
        progress.stuck = True
        start = time.monotonic()
        it.destroy()
        knobs = stub_of(it.library)
        return time.monotonic() - start, [knobs.stub_calls(which) for which in range(3)]


def test_destroy_aborts_work_that_does_not_end(stub: str) -> None:
    """The device has not done what was queued after some seconds, and the library is not asked to wait for it."""
    for seconds, calls in run_ranks(leave_busy, 2, stub):
        assert 2.5 < seconds < 2.5 + PROMPT_S
        assert calls == [1, 0, 0]
