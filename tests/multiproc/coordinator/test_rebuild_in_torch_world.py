"""Members that change in a world which torch.distributed had before, with a store of the engine's."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.errors import (
    CapabilityError,
    DisagreementError,
    ExcludedError,
    NativeError,
    PeerLostError,
    UsageError,
)
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from coordinator.queues.external_writer import ExternalWriter
from shm_broadcast.queue import QueueWriter
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import TIMEOUT_S, failing, use
from tests.ports import free_port
from tests.waiting import wait_until
from tests.worlds import meet, run_at

LOOPBACK = "127.0.0.1"


@contextmanager
def torch_world(store: dist.Store, rank: int, world_size: int) -> Iterator[None]:
    """Initialise torch.distributed as an engine does, before this package is called."""
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        yield
    finally:
        destroy_distributed_environment()
        dist.destroy_process_group()


def store_at(port: int) -> dist.TCPStore:
    """Return a connection to a store that another process serves."""
    return dist.TCPStore(LOOPBACK, port, is_master=False, use_libuv=False)


@contextmanager
def served() -> Iterator[int]:
    """Serve a store in this process, which is no rank; yield its port."""
    store = dist.TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False, use_libuv=False)
    yield store.port
    del store


def goes_on(rank: int, world_size: int, directory: Path, port: int, victim: int) -> list[Any]:
    with torch_world(store_at(port), rank, world_size):
        init_distributed_environment(world_size, rank, backend="gloo", timeout=10.0, elastic=True)
        groups = ParallelGroups.from_sizes()
        use(groups)
        if rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) is PeerLostError
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
        assert groups.change is not None
        found = [*use(groups), list(groups.change.lost)]
        groups.destroy()
    return found


@pytest.mark.guarantee("E5")
@pytest.mark.parametrize("victim", [0, 2])
def test_the_ranks_that_are_left_go_on_in_the_world_of_an_engine(victim: int) -> None:
    """The store is served by a process that is no rank, so rank 0 may be lost too."""
    with served() as port:
        found = run_ranks(goes_on, 3, port, victim, expect_dead=[victim])
    left = [each for each in found if each is not None]
    assert left == [[1.0, 0.0, 1.0, [victim]], [1.0, 1.0, 1.0, [victim]]]


@pytest.mark.guarantee("E5")
@pytest.mark.parametrize("places", [["one", "one", "two", "two"], ["one", "one", "one", "two"]])
def test_ranks_on_several_hosts_go_on_in_the_world_of_an_engine(places: list[str]) -> None:
    """The host of the lost rank may have others or none. No thread that asks for a connection outlives the groups."""
    with served() as port:
        found = run_ranks(run_at, 4, places, __name__, "goes_on", port, 3, expect_dead=[3])
    assert found[:3] == [[3.0, rank, 3.0, [3]] for rank in range(3)]


SERVER = f"""
import sys
import torch.distributed as dist
store = dist.TCPStore({LOOPBACK!r}, 0, is_master=True, wait_for_workers=False, use_libuv=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def finds_no_store(rank: int, world_size: int, directory: Path, port: int, marks: str) -> float:
    with torch_world(store_at(port), rank, world_size):
        init_distributed_environment(world_size, rank, backend="gloo", timeout=10.0, elastic=True)
        groups = ParallelGroups.from_sizes()
        use(groups)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) is PeerLostError
        Path(marks, f"failed-{rank}").touch()
        wait_until(Path(marks, "gone").exists, "the end of the store")
        began = time.monotonic()
        with pytest.raises(NativeError):
            groups.rebuild(timeout_s=TIMEOUT_S)
        took_s = time.monotonic() - began
        groups.destroy()
    return took_s


@pytest.mark.guarantee("E5")
def test_members_that_find_no_store_are_told_at_once(tmp_path: Path) -> None:
    """They can agree on nothing. The error is that of the store, and nobody waits for the deadline of the attempt."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None

        def end_the_store(_: Sequence[int]) -> None:
            for rank in range(2):
                wait_until((tmp_path / f"failed-{rank}").exists, "the survivors")
            server.kill()
            server.wait()
            (tmp_path / "gone").touch()

        try:
            port = int(server.stdout.readline())
            found = run_ranks(
                finds_no_store, 3, port, str(tmp_path), expect_dead=[2], while_running=end_the_store
            )
        finally:
            server.kill()
    assert all(took_s < TIMEOUT_S / 4 for took_s in found[:2])


def served_by_rank_0(rank: int, world_size: int, directory: Path, port: int) -> list[str]:
    store = dist.TCPStore(LOOPBACK, port, world_size, is_master=rank == 0, use_libuv=False)
    found = []
    with torch_world(dist.PrefixStore("engine", store), rank, world_size):
        for _ in range(2):
            with pytest.raises((UsageError, CapabilityError)) as caught:
                init_distributed_environment(world_size, rank, backend="gloo", elastic=True)
            found.append(str(caught.value))
        init_distributed_environment(world_size, rank, backend="gloo")
        with pytest.raises(UsageError, match="elastic=True, but this world was started without it"):
            init_distributed_environment(elastic=True)
        with ParallelGroups.from_sizes() as groups:
            use(groups)
            with pytest.raises(UsageError, match="the members of this world cannot change"):
                groups.rebuild()
    return found


@pytest.mark.guarantee("E7")
def test_a_store_that_rank_0_serves_is_refused_at_the_start() -> None:
    """On every rank, each time; without `elastic` the same world works, and cannot be rebuilt."""
    for found in run_ranks(served_by_rank_0, 2, free_port()):
        for text in found:
            assert "elastic=True needs a store that outlives every rank, and rank 0 serves the store" in text


def one_is_elastic(rank: int, world_size: int, directory: Path) -> str:
    with torch_world(dist.FileStore(f"{directory}/store", world_size), rank, world_size):
        with pytest.raises(DisagreementError) as caught:
            init_distributed_environment(world_size, rank, backend="gloo", timeout=10.0, elastic=rank == 0)
        return str(caught.value)


@pytest.mark.guarantee("E7")
def test_ranks_of_an_engine_that_differ_in_elastic_do_not_start() -> None:
    """Some could rebuild their groups, and would wait for those that cannot."""
    for text in run_ranks(one_is_elastic, 2):
        assert "elastic: 'True' (rank 0), 'False' (rank 1)" in text


def stopped(rank: int, world_size: int, directory: Path, port: int, marks: str) -> str:
    with torch_world(store_at(port), rank, world_size):
        init_distributed_environment(world_size, rank, backend="gloo", timeout=10.0, elastic=True)
        groups = ParallelGroups.from_sizes()
        use(groups)
        meet(rank, range(world_size), directory, "ready")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)  # until the others have gone on
            with pytest.raises(ExcludedError) as caught:
                groups.world.barrier()
            text = str(caught.value)
            groups.destroy()
            return text
        failing(groups, timeout_s=1.0)
        groups = groups.rebuild(timeout_s=3.0)
        Path(marks, f"rebuilt-{rank}").touch()
        found = use(groups)
        groups.destroy()
        return str(found)


@pytest.mark.guarantee("E3")
def test_a_stopped_rank_of_an_engine_learns_in_its_old_groups_that_it_is_out(tmp_path: Path) -> None:
    """The first epoch of such a world has its fences as well."""

    def resume(pids: Any) -> None:
        for rank in (0, 1):
            wait_until((tmp_path / f"rebuilt-{rank}").exists, "the others to go on", 40.0)
        os.kill(pids[2], signal.SIGCONT)

    with served() as port:
        found = run_ranks(stopped, 3, port, str(tmp_path), while_running=resume)
    assert found[:2] == ["[1.0, 0.0, 1.0]", "[1.0, 1.0, 1.0]"]
    assert "the others have gone on without this rank, as members [0, 1] of epoch" in found[2]


def reads_from_outside(rank: int, world_size: int, directory: Path, port: int, given: list[bytes]) -> str:
    with torch_world(store_at(port), rank, world_size):
        init_distributed_environment(world_size, rank, backend="gloo", timeout=10.0, elastic=True)
        groups = ParallelGroups.from_sizes()
        handle, key = given
        writer = ExternalWriter(handle, key)
        groups.world.create_mq_broadcaster(0, writer)
        if rank == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) is PeerLostError
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
        with pytest.raises(UsageError) as caught:
            groups.world.create_mq_broadcaster(0, writer)
        groups.destroy()
        return str(caught.value)


@pytest.mark.guarantee("E6")
def test_the_queue_of_an_external_writer_is_of_the_first_epoch_of_an_engine_too() -> None:
    """A handle that was used in epoch 0 is refused in the next one."""
    with served() as port, QueueWriter.create("engine", [0, 1, 2]) as writer:
        given = [writer.handle.to_bytes(writer.key), writer.key]
        found = run_ranks(reads_from_outside, 3, port, given, expect_dead=[2])
    for text in found[:2]:
        assert "queue 'engine' is of epoch 0, and this is epoch" in text
