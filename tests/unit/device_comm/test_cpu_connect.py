"""Which communicator a group on the CPU gets when the context lacks shared memory."""

from typing import Any

import pytest
import torch

from device_comm.base import CommunicatorContext
from device_comm.cpu import shared_memory
from device_comm.cpu.connect import connect_cpu
from device_comm.health import GroupHealth
from device_comm.process_group import ProcessGroupCommunicator
from shm_broadcast.errors import UsageError
from tests.unit.device_comm.test_health import FakeStatusStore, FakeWatch


def context(**options: Any) -> CommunicatorContext:
    """Return a context of two ranks, with a process group that no call here uses."""
    return CommunicatorContext(
        name="tp:0",
        rank_in_group=0,
        device=torch.device("cpu"),
        timeout_s=1.0,
        **{
            "ranks": (0, 1),
            "health": GroupHealth("tp:0", 0, (0, 1), FakeWatch(), FakeStatusStore()),  # type: ignore[arg-type]
            "process_group": object(),
            **options,
        },
    )


@pytest.mark.parametrize("process_group", [None, object()])
def test_without_shared_memory_an_exchange_is_required(process_group: object) -> None:
    """The ranks could not learn who shares a host, with a process group or without."""
    with pytest.raises(UsageError, match=r"'tp:0'.*needs `exchange`"):
        connect_cpu(context(process_group=process_group))


@pytest.mark.parametrize("other", ["elsewhere", ""])
def test_ranks_that_share_no_memory_use_the_process_group(other: str) -> None:
    """Ranks on two hosts, and ranks on one that were given no memory; the path says why."""
    theirs = (other or shared_memory.host_id()).encode()
    communicator = connect_cpu(context(exchange=lambda own: [own, theirs]))
    assert type(communicator) is ProcessGroupCommunicator
    path = communicator.path("all_reduce", 1024, torch.float32)
    assert (path.algorithm, path.reason) == ("gloo", "no two ranks share memory")
    communicator.destroy()


def test_ranks_on_several_hosts_of_which_some_share_one_need_connections() -> None:
    """Nothing is sent before the mistake is found."""
    here = shared_memory.host_id().encode()
    health = GroupHealth("tp:0", 0, (0, 1, 2), FakeWatch(), FakeStatusStore())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"'tp:0'.*needs `connect`"):
        connect_cpu(context(ranks=(0, 1, 2), health=health, exchange=lambda own: [own, here, b"elsewhere"]))
