"""torch.distributed takes a world that we opened, and the process groups of our groups, for what they are: Gloo."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh

from coordinator.host.process_groups import set_own_world
from tests.harness import RankPool
from tests.ports import listening_addresses
from tests.worlds import meet, new_group, world

LIMIT = timedelta(seconds=30)


def use(group: dist.ProcessGroup | None, rank: int, world_size: int) -> None:
    """Call those functions of torch.distributed that engines call on a Gloo group."""
    assert dist.get_backend(group) == dist.Backend.GLOO == "gloo"
    assert dist.get_backend_config(group) == "cpu:gloo,cuda:gloo"
    dist.monitored_barrier(group, LIMIT)
    dist.barrier(group, timeout=LIMIT)
    total = torch.full((3,), float(rank))
    dist.all_reduce(total, group=group)
    assert total.tolist() == [sum(range(world_size))] * 3
    objects: list[Any] = [{"from": rank}, None] if rank == 0 else [None, None]
    dist.broadcast_object_list(objects, 0, group=group)
    assert objects == [{"from": 0}, None]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, ("rank", rank), group=group)
    assert gathered == [("rank", each) for each in range(world_size)]
    ahead, behind, got = (rank + 1) % world_size, (rank - 1) % world_size, torch.empty(1)
    moves = [
        dist.P2POp(dist.isend, torch.tensor([float(rank)]), ahead, group),
        dist.P2POp(dist.irecv, got, behind, group),
    ]
    for work in dist.batch_isend_irecv(moves):
        work.wait()
    assert got.item() == behind


def on_every_group(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as tp:
        use(None, rank, world_size)
        use(tp.cpu_group, rank, world_size)
        use(tp.device_group, rank, world_size)
        use(tp.make_sibling_device_group(), rank, world_size)
        use(dist.new_group(), rank, world_size)
        use(init_device_mesh("cpu", (world_size,)).get_group(), rank, world_size)
        found = listening_addresses()
        everyone.barrier()
    return found


@pytest.mark.guarantee("G31")
@pytest.mark.guarantee("G12")
def test_torch_takes_the_world_and_its_groups_for_gloo(ranks2: RankPool) -> None:
    """`get_backend` says "gloo", and the functions that insist on it work. All of them listen on loopback only."""
    for addresses in ranks2.run(on_every_group):
        assert addresses == ["127.0.0.1"]


def late(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory):
        # Ranks that have not met in the world before would wait longer, for their connection.
        dist.barrier()
        text = ""
        if rank == 0:
            with pytest.raises(RuntimeError) as raised:
                dist.monitored_barrier(timeout=timedelta(seconds=0.5), wait_all_ranks=True)
            text = str(raised.value)
        meet(rank, range(world_size), directory, "late")
    return text


def test_a_monitored_barrier_of_torch_names_the_rank_that_does_not_come(ranks2: RankPool) -> None:
    """It reaches Gloo, which waits until the deadline of the call."""
    assert "Ranks 1 failed to pass" in ranks2.run(late)[0]


def in_our_world(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as everyone:
        assert dist.group.WORLD is not None
        # As on several hosts: the world listens on the address of an interface, not on loopback.
        set_own_world(dist.group.WORLD, "127.0.0.7")
        created = dist.new_group()
        dist.barrier(created)
        # To torch's own tests of the class each Gloo backend is of that class, whoever created it.
        backend = created._get_backend(torch.device("cpu"))
        assert isinstance(backend, dist.distributed_c10d.ProcessGroupGloo)
        assert isinstance(backend, ProcessGroupGloo)
        everyone.barrier()
        return listening_addresses()


def at_an_address(rank: int, world_size: int, directory: Path) -> list[list[str]]:
    found = [in_our_world(rank, world_size, directory)]
    # After our world another one is the user's business again.
    dist.init_process_group("gloo", init_method=f"file://{directory}/user", rank=rank, world_size=world_size)
    dist.barrier()
    found.append(listening_addresses())
    dist.barrier()
    dist.destroy_process_group()
    return found


@pytest.mark.guarantee("G31")
def test_what_a_user_creates_listens_where_the_world_does(ranks2: RankPool) -> None:
    """`new_group` takes the address of our world. In a world of the user's own torch chooses, as without us."""
    for ours, theirs in ranks2.run(at_an_address):
        assert "127.0.0.7" in ours
        assert "127.0.0.7" not in theirs
        assert theirs


def debugged(rank: int, world_size: int, directory: Path) -> list[str]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with world(rank, world_size, directory) as everyone, new_group(everyone) as tp:
            total = torch.ones(2)
            dist.all_reduce(total)
            dist.all_reduce(total, group=tp.cpu_group)
            assert total.tolist() == [4.0, 4.0]
            found = listening_addresses()
            everyone.barrier()
            return found
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def test_the_debug_mode_of_torch_listens_there_too(ranks2: RankPool) -> None:
    """At level DETAIL torch gives each group a second one, in which it compares the calls."""
    assert ranks2.run(debugged) == [["127.0.0.1"]] * 2
