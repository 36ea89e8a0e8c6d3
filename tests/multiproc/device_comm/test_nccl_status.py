"""What the status page shows of the calls that NcclCommunicator queues, over the stub of NCCL."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Lane
from coordinator.errors import GroupBrokenError, NcclError
from device_comm.nccl.communicator import NcclCommunicator
from shm_broadcast import _core
from shm_broadcast.status.page import own_page
from tests.harness import RankPool, run_ranks
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import FakeProgress, nccl_world, stub_of
from tests.waiting import wait_until
from tests.worlds import meet

PROMPT_S = 10.0


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_stub(tmp_path_factory.mktemp("nccl")))


def lanes_of(it: NcclCommunicator, plane: str) -> list[Lane]:
    """Return what this process's page shows of the communicator's group in a plane."""
    page = decode_page(_core.status_copy(own_page().segment.memory))
    group = [group for group in page.groups if group.name == it.context.name][-1]
    return [lane for lane in group.lanes if lane.plane == plane]


def counted_calls(rank: int, world_size: int, directory: Path, stub: str) -> dict[str, list[int]]:
    with nccl_world(rank, world_size, directory, stub) as (_, it):
        own = torch.ones(8)
        it.all_reduce(own)
        it.all_reduce_(own.clone())
        it.reduce(own.double(), 1)
        it.all_gather(own)
        if rank == 0:
            it.send(own, 1)
        else:
            it.recv((8,), torch.float32, 0)
        knobs = stub_of(it.library)
        knobs.stub_fail(b"ncclAllReduce", 3, 1)
        with pytest.raises((NcclError, GroupBrokenError)):
            it.all_reduce(own)
        (lane,) = lanes_of(it, "nccl")
        assert (lane.state, lane.call, lane.root, lane.nbytes) == ("idle", "all_reduce", None, 32)
        meet(rank, range(world_size), directory, "told")
        return {each.call: [each.calls, each.errors, each.nbytes] for each in lane.counters}


def test_queued_calls_are_counted_with_their_bytes(ranks2: RankPool, stub: str) -> None:
    """A call counts when it is queued; one that the library refuses counts as an error too."""
    one, other = ranks2.run(counted_calls, stub)
    for found in (one, other):
        assert found["all_reduce"] == [3, 1, 96]
        assert found["reduce"] == [1, 0, 64]
        assert found["all_gather"] == [1, 0, 32]
        assert found["connect"] == [1, 0, 0]
    assert (one["send"], other["recv"]) == ([1, 0, 32], [1, 0, 0])


def stuck_on_the_device(rank: int, world_size: int, directory: Path, stub: str) -> dict[str, Any]:
    progress = FakeProgress()
    with nccl_world(rank, world_size, directory, stub, progress, timeout_s=3.0) as (_, it):
        it.all_reduce(torch.ones(1))
        progress.stuck = rank == 0
        it.all_reduce(torch.ones(1))
        found: dict[str, Any] = {}
        if rank == 0:
            wait_until(lambda: lanes_of(it, "nccl waits")[0].state == "asleep", "the keeper", PROMPT_S)
            (waits,), (queued,) = lanes_of(it, "nccl waits"), lanes_of(it, "nccl")
            assert (queued.state, queued.call) == ("idle", "all_reduce")
            found = {"state": waits.state, "call": waits.call, "same": waits.number == queued.number}
            progress.stuck = False
            wait_until(lambda: lanes_of(it, "nccl waits")[0].state == "idle", "the end of it", PROMPT_S)
        meet(rank, range(world_size), directory, "told")
        return found


def test_a_call_that_the_device_does_not_complete_is_shown_as_a_wait(stub: str) -> None:
    """It has the number of the queued call, whose own lane is free for the next one."""
    found = run_ranks(stuck_on_the_device, 2, stub)[0]
    assert found == {"state": "asleep", "call": "all_reduce", "same": True}
