"""A stateless group: processes that share no world of torch meet at an address and work together as any group."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator import (
    CoordinatorSettings,
    GroupCoordinator,
    ParallelGroups,
    ParallelLayout,
    create_stateless_group,
    functional,
)
from coordinator.diagnosis.metrics.reader import read_own
from coordinator.errors import CapabilityError, CommTimeoutError, UsageError
from tests.harness import RankPool
from tests.ports import free_port, listening_addresses
from tests.waiting import wait_until
from tests.worlds import ApartPool, meet, outcome_of, refused, world

QUICK = CoordinatorSettings(create_timeout_s=60.0, timeout_s=60.0)


def create(port: int, rank: int, world_size: int, **how: Any) -> GroupCoordinator:
    return create_stateless_group(
        "127.0.0.1", port, rank, world_size, backend="gloo", **{"settings": QUICK, **how}
    )


def use(group: GroupCoordinator) -> None:
    """Make a call of each kind, and check its result."""
    rank, size = group.rank_in_group, group.world_size
    total = group.all_reduce(torch.full((5,), float(rank)))
    assert total.tolist() == [sum(range(size))] * 5
    assert group.all_gather(torch.tensor([rank])).tolist() == list(range(size))
    assert group.broadcast(torch.tensor([rank]), size - 1).tolist() == [size - 1]
    assert group.all_gather_object({"rank": rank}) == [{"rank": each} for each in range(size)]
    assert group.broadcast_object(("from", rank), src=size - 1) == ("from", size - 1)
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    sent = group.isend(torch.tensor([float(rank)]), ahead)
    assert group.recv([1], torch.float32, behind).item() == behind
    sent.wait()
    group.send_object([rank], ahead)
    assert group.recv_object(behind) == [behind]
    group.send_tensor_dict({"weight": torch.full((3, 3), rank)}, ahead)
    received = group.recv_tensor_dict(behind)
    assert received is not None
    assert torch.equal(received["weight"], torch.full((3, 3), behind))
    group.barrier()


def alone(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    before = (dist.is_initialized(), dist.group.WORLD, dict(dist.distributed_c10d._world.pg_map))
    with create(port, rank, world_size, use_message_queue_broadcaster=True, group_name="weights") as group:
        use(group)
        part = group.create_subgroup([1, 0])
        assert part is not None
        use(part)
        part.destroy()
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group.cpu_group)
        assert tensor.tolist() == [2.0, 2.0]
        addresses = listening_addresses()
        after = (dist.is_initialized(), dist.group.WORLD, dict(dist.distributed_c10d._world.pg_map))
        assert before == after == (False, None, {})
        group.barrier()
    return [group.ranks, group.unique_name, addresses]


@pytest.mark.guarantee("G34")
@pytest.mark.guarantee("G35")
def test_a_stateless_group_needs_no_world(ranks2: RankPool) -> None:
    """Every kind of call works, torch's state does not change, and nothing listens beyond the address."""
    port = free_port()
    for found in ranks2.run(alone, port):
        assert found == [[0, 1], f"weights@127.0.0.1.{port}:0", ["127.0.0.1"]]


def several(rank: int, world_size: int, directory: Path, ports: list[int]) -> list[Any]:
    # A trainer's ranks and an engine's number themselves otherwise than the world does.
    with (
        world(rank, world_size, directory) as everyone,
        create(ports[0], world_size - 1 - rank, world_size) as turned,
    ):
        assert turned.rank == turned.rank_in_group == world_size - 1 - rank
        use(everyone)
        use(turned)
        with create(ports[1], turned.rank, world_size) as third:
            use(third)
            use(turned)
        # Its ranks are not those of the world, which the groups of a layout need.
        layout = ParallelLayout(tensor=world_size)
        assert refused(lambda: ParallelGroups.create(layout, backend="gloo", world=turned))
        # Ranks of torch's world name its groups only.
        assert functional.find_group(list(range(world_size))) is everyone
        total = functional.all_reduce(torch.ones(1), group=list(range(world_size)))
        use(everyone)
        names = sorted({everyone.unique_name, turned.unique_name, third.unique_name})
        everyone.barrier()
    return [total.item(), len(names)]


@pytest.mark.guarantee("G34")
def test_several_stateless_groups_exist_beside_a_world(ranks4: RankPool) -> None:
    """Each has ranks of its own, and none takes calls of another one."""
    assert ranks4.run(several, [free_port(), free_port()]) == [[4.0, 3]] * 4


def parts_of(rank: int, world_size: int, directory: Path, ports: list[int]) -> list[Any]:
    # Two engines of one rank each, and a trainer of two, which is in a group with each of them.
    groups = []
    if rank != 3:
        groups.append(create(ports[0], rank, 3))
    if rank != 2:
        groups.append(create(ports[1], min(rank, 2), 3))
    for group in groups:
        use(group)
    found = [group.rank for group in groups]
    for group in groups:
        group.destroy()
    return found


@pytest.mark.guarantee("G34")
def test_a_process_is_in_groups_with_different_processes(ranks4: RankPool) -> None:
    """The processes of one group need not know those of another one."""
    assert ranks4.run(parts_of, [free_port(), free_port()]) == [[0, 0], [1, 1], [2], [2]]


def apart(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    with create(port, rank, world_size) as group:
        use(group)
        path = group.device_communicator.path
        paths = [path(call, 64, torch.float32).algorithm for call in ("all_reduce", "scatter", "isend")]
        (page,) = [each.page for each in read_own().found]
        (shown,) = [each for each in page.groups if each.name == group.unique_name]
        lanes = {lane.plane: lane.algorithm for lane in shown.lanes}
        group.barrier()
    return [paths, lanes["device"], lanes["host"], group._host.__class__.__name__]


def test_ranks_of_different_hosts_use_the_network(ranks4: RankPool) -> None:
    """They connect in the group's own store, and not in the world's, which there is not. The status page says how."""
    paths = ["two levels", "gloo", "gloo"]
    found = ApartPool(ranks4).run(apart, free_port())
    assert found == [[paths, "two levels", "process group", "GlooHostPlane"]] * 4


def again(rank: int, world_size: int, directory: Path, port: int) -> int:
    kept = []
    for _ in range(8):
        group = create(port, rank, world_size)
        use(group)
        group.destroy()
        kept.append(group)
    return len(kept)


@pytest.mark.guarantee("G35")
def test_an_address_can_be_used_again_at_once(ranks2: RankPool) -> None:
    """The store ends with the group, even while a caller keeps the destroyed group; no rank joins the last one."""
    assert ranks2.run(again, free_port()) == [8, 8]


# --- what goes wrong ------------------------------------------------------------------------------------------


def missing(rank: int, world_size: int, directory: Path, port: int) -> dict[str, Any]:
    # Rank 1 of the group does not come, then rank 0.
    settings = CoordinatorSettings(create_timeout_s=1.0)
    chosen = port if rank == 0 else port + 1
    return outcome_of(lambda: create(chosen, rank, world_size, settings=settings))


@pytest.mark.guarantee("G36")
def test_a_rank_that_does_not_come_is_named(ranks2: RankPool) -> None:
    """Nobody waits longer than `create_timeout_s`."""
    first, second = ranks2.run(missing, free_port())
    assert (first["kind"], first["missing"]) == ("CommTimeoutError", [1]), first
    assert (second["kind"], second["missing"]) == ("CommTimeoutError", [0]), second


def in_vain(rank: int, world_size: int, directory: Path, port: int) -> int:
    failures = 0
    if rank == 0:
        for _ in range(3):
            try:
                create(port, rank, world_size, settings=CoordinatorSettings(create_timeout_s=0.3))
            except CommTimeoutError:
                failures += 1
    meet(rank, range(world_size), directory, "gave up")
    with create(port, rank, world_size) as group:
        use(group)
    return failures


@pytest.mark.guarantee("G35")
def test_a_rank_that_waited_in_vain_can_try_again_at_once(ranks2: RankPool) -> None:
    """Its store ends with the attempt, and holds nothing that the next one finds."""
    assert ranks2.run(in_vain, free_port()) == [3, 0]


def late(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    with create(port, rank, world_size) as group:
        found = outcome_of(lambda: group.barrier(0.3)) if rank == 0 else {}
        meet(rank, range(world_size), directory, "late")
        after = outcome_of(group.barrier)["kind"]
        meet(rank, range(world_size), directory, "end")
    return [found.get("kind"), found.get("missing"), after]


@pytest.mark.guarantee("G36")
def test_a_deadline_names_the_late_rank_and_breaks_the_group(ranks2: RankPool) -> None:
    """As in any group."""
    first, second = ranks2.run(late, free_port())
    assert first == ["CommTimeoutError", [1], "GroupBrokenError"]
    assert second[2] in ("CommTimeoutError", "GroupBrokenError")


def disagree(rank: int, world_size: int, directory: Path, port: int, how: str) -> dict[str, Any]:
    settings = CoordinatorSettings(
        create_timeout_s=20.0, timeout_s=10.0 + rank if how == "settings" else 10.0
    )
    size = world_size + rank if how == "size" else world_size
    found = outcome_of(lambda: create(port, rank, size, settings=settings))
    meet(rank, range(world_size), directory, "end")
    return found


@pytest.mark.guarantee("G36")
@pytest.mark.parametrize("how", ["settings", "size"])
def test_ranks_that_disagree_get_no_group(ranks2: RankPool, how: str) -> None:
    """Each rank raises, with what each rank holds."""
    for found in ranks2.run(disagree, free_port(), how):
        assert found["kind"] == "DisagreementError", found
        assert found["seconds"] < 15.0


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"host": ""}, "host must be"),
        ({"host": "0.0.0.0"}, "wildcard address"),
        ({"port": 0}, "port must be from 1 to 65535"),
        ({"port": "29500"}, "port must be an integer"),
        ({"rank": -1}, "0 <= rank < world_size"),
        ({"rank": 2}, "0 <= rank < world_size"),
        ({"rank": True}, "rank must be an integer"),
        ({"world_size": 0}, "0 <= rank < world_size"),
    ],
)
def test_wrong_arguments_are_refused_at_once(change: dict[str, Any], text: str) -> None:
    """Nothing listens and nobody waits."""
    arguments = {"host": "127.0.0.1", "port": free_port(), "rank": 0, "world_size": 2, **change}
    with pytest.raises(UsageError, match=text):
        create_stateless_group(**arguments, backend="gloo", settings=QUICK)
    # The thread that has looked at the address ends behind its answer.
    wait_until(lambda: threading.active_count() == 1, "no thread of the refused group")


def in_a_group_of_one(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    with create(port, 0, 1) as group:
        assert group.all_reduce(torch.ones(1)).item() == 1.0
        found = [refused(group.as_process_group), group.world_size]
    # Creating further groups of a world that was left is the caller's mistake, too.
    found.append(refused(lambda: group.create_subgroup([0])))
    return found


def in_two_groups_of_one(rank: int, world_size: int, directory: Path, ports: list[int]) -> list[Any]:
    return in_a_group_of_one(rank, world_size, directory, ports[rank])


def test_what_a_stateless_group_cannot_do_is_refused(ranks2: RankPool) -> None:
    """Torch knows no ranks of it, so it is no process group of torch; a group of one needs nobody."""
    assert ranks2.run(in_two_groups_of_one, [free_port(), free_port()]) == [[True, 1, True]] * 2


def test_a_process_group_of_another_backend_is_refused() -> None:
    """Only torch's world could create one."""
    with create(free_port(), 0, 1) as group:
        group._parts.process_groups.backend = "nccl"
        with pytest.raises(CapabilityError, match="stateless group"):
            _ = group.device_group
