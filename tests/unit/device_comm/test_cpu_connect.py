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
        ranks=(0, 1),
        device=torch.device("cpu"),
        health=GroupHealth("tp:0", 0, (0, 1), FakeWatch(), FakeStatusStore()),  # type: ignore[arg-type]
        timeout_s=1.0,
        **{"process_group": object(), **options},
    )


@pytest.mark.parametrize("process_group", [None, object()])
def test_without_shared_memory_an_exchange_is_required(process_group: object) -> None:
    """The ranks could not learn who shares a host, with a process group or without."""
    with pytest.raises(UsageError, match=r"'tp:0'.*needs `exchange`"):
        connect_cpu(context(process_group=process_group))


def test_ranks_of_one_host_without_memory_use_the_process_group() -> None:
    """None is made for them; the path says why."""
    theirs = shared_memory.host_id().encode()
    communicator = connect_cpu(context(exchange=lambda own: [own, theirs]))
    assert type(communicator) is ProcessGroupCommunicator
    path = communicator.path("all_reduce", 1024, torch.float32)
    assert (path.algorithm, path.reason) == (
        "gloo",
        "the ranks are on one host and were given no memory to share",
    )
    communicator.destroy()


def test_ranks_on_several_hosts_need_connections() -> None:
    """Nothing is sent before the mistake is found."""
    with pytest.raises(UsageError, match=r"'tp:0'.*needs `connect`"):
        connect_cpu(context(exchange=lambda own: [own, b"elsewhere"]))
