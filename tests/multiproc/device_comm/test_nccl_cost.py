"""What a collective of NcclCommunicator costs: calls of the library, waits, threads and checks, over real processes."""

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import UsageError
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.library import NcclLibrary
from device_comm.reduction import ReduceOperation
from tests.harness import RankPool, run_ranks
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import FakeProgress, HostStreams, context_of, nccl_world, stub_of
from tests.worlds import world


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_stub(tmp_path_factory.mktemp("nccl"), "-DVERSION=22809"))


def calls_in_progress(rank: int, world_size: int, directory: Path, stub: str, blocking: str) -> int:
    if blocking:
        os.environ["NCCL_COMM_BLOCKING"] = blocking
    try:
        with nccl_world(rank, world_size, directory, stub) as (_, it):
            for number in range(100):
                assert it.all_reduce(torch.full((2,), float(number))).tolist() == [2.0 * number] * 2
            with it.group():
                summed = [it.all_reduce(torch.ones(1)) for _ in range(3)]
            assert [each.item() for each in summed] == [2.0] * 3
            it.isend(torch.full((3,), float(rank)), 1 - rank).wait()
            assert it.recv((3,), torch.float32, 1 - rank).tolist() == [1.0 - rank] * 3
        calls = stub_of(it.library).stub_calls
        assert (calls(0), calls(1), calls(2)) == (0, 1, 1)
        return int(calls(4))
    finally:
        os.environ.pop("NCCL_COMM_BLOCKING", None)


def test_no_call_costs_a_thread_of_the_library(stub: str) -> None:
    """The library does a call itself, and is not asked whether it is done. With the variable it is, and all works."""
    assert run_ranks(calls_in_progress, 2, stub, "") == [0, 0]
    assert all(count > 100 for count in run_ranks(calls_in_progress, 2, stub, "0"))


def recorded(library: NcclLibrary) -> list[str]:
    """Return a list to which this thread's calls of the library are appended from now on, by name."""
    calls: list[str] = []
    own = threading.get_ident()

    def recording(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if threading.get_ident() == own:
                calls.append(name)
            return function(*arguments)

        return call

    for name, function in library.functions.items():
        library.functions[name] = recording(name, function)
    return calls


def one_library_call_each(rank: int, world_size: int, directory: Path, stub: str) -> list[list[str]]:
    library, progress = NcclLibrary(stub), FakeProgress()
    calls = recorded(library)
    with world(rank, world_size, directory) as group:
        it = NcclCommunicator(context_of(group), library=library, streams=HostStreams(), progress=progress)
        it.connect()
        tensor, output = torch.ones(3), torch.empty(3)
        forms: list[Any] = [
            lambda: it.all_reduce(tensor),
            lambda: it.all_reduce_(tensor),
            lambda: it.all_reduce_into_output(tensor, output),
            lambda: it.all_reduce_into_output(tensor, tensor),
            lambda: it.all_gather(tensor),
            lambda: it.broadcast(tensor),
        ]

        def refuse(*_: Any) -> None:
            raise AssertionError("a call must not do this")

        found, threads, marks = [], threading.active_count(), progress.marks
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            patch.setattr(time, "sleep", refuse)
            patch.setattr(it._health, "wait", refuse)
            for form in forms:
                calls.clear()
                form()
                found.append(list(calls))
        assert (threading.active_count(), progress.marks - marks) == (threads, len(forms))
        it.destroy()
        return found


def test_a_collective_is_one_call_of_the_library(stub: str) -> None:
    """It asks nothing else of the library, does not sleep or wait, and starts no thread."""
    sums = [["ncclAllReduce"]] * 4
    assert run_ranks(one_library_call_each, 2, stub) == [[*sums, ["ncclAllGather"], ["ncclBroadcast"]]] * 2


def sums_without_checks(rank: int, world_size: int, directory: Path, stub: str) -> None:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        it.connect()
        checked: list[str] = []
        check = it._check_reduction

        def note(name: str, *arguments: Any) -> ReduceOperation:
            checked.append(name)
            return check(name, *arguments)

        it._check_reduction = note  # type: ignore[assignment, method-assign]
        both = torch.ones(8)
        low, high = both[:4], both[4:]
        assert it.all_reduce(low).tolist() == [2.0] * 4
        assert it.all_reduce_(low) is low
        assert it.all_reduce_into_output(low, high) is high
        assert it.all_reduce_into_output(high, high) is high
        assert (low.tolist(), high.tolist()) == ([2.0] * 4, [8.0] * 4)
        assert checked == []
        # Everything else takes the way with all checks.
        with pytest.raises(UsageError, match="shares memory"):
            it.all_reduce_into_output(both[:4], both[2:6])
        with pytest.raises(UsageError):
            it.all_reduce_into_output(low, both)
        with pytest.raises(UsageError):
            it.all_reduce_into_output(low, high.double())
        assert it.all_reduce_(torch.ones(2, 3).t()).tolist() == [[2.0] * 2] * 3
        assert it.all_reduce_(torch.ones(2), ReduceOperation.MAX).tolist() == [1.0] * 2
        assert it.all_reduce_(torch.ones(0)).tolist() == []
        assert it.all_reduce_into_output(torch.ones(2, 3).t(), torch.empty(3, 2)).tolist() == [[2.0] * 2] * 3
        assert len(checked) >= 7
        with it.group():
            it.all_reduce_(low)
            assert low.tolist() == [2.0] * 4, "it is queued at the end"
        assert low.tolist() == [4.0] * 4


def test_contiguous_sums_skip_the_checks_and_only_they(ranks2: RankPool, stub: str) -> None:
    """A new tensor, an output and in place: their values are right either way, and mistakes are refused."""
    ranks2.run(sums_without_checks, stub)
