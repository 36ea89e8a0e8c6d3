"""Processes meet by ticket: rank 0 serves from the descriptor of its offer; the environment is not read."""

import os
import time
from pathlib import Path

import msgspec
import pytest
import torch

from coordinator import (
    GroupCoordinator,
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.meeting import Offer, Ticket, make_tickets, offer, report_loss, withdraw
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommTimeoutError, PeerLostError, UsageError
from tests.harness import RankPool
from tests.hosts import report, run_on_two_hosts
from tests.probes import requires
from tests.waiting import wait_until

HERE = "127.0.0.1"


def exchange(directory: Path, rank: int, world_size: int, host: str | None = None, round_: int = 0) -> Ticket:
    """Do the driver's part through files: rank 0 makes the tickets of all offers."""
    made = offer(host or HERE) if rank == 0 else offer()
    put(directory / f"offer-{round_}-{rank}", msgspec.json.encode(made))
    if rank == 0:
        offers = [
            msgspec.json.decode(got(directory / f"offer-{round_}-{each}"), type=Offer)
            for each in range(world_size)
        ]
        for each, ticket in enumerate(make_tickets(offers, [(n, world_size) for n in range(world_size)])):
            put(directory / f"ticket-{round_}-{each}", msgspec.json.encode(ticket))
    return msgspec.json.decode(got(directory / f"ticket-{round_}-{rank}"), type=Ticket)


def put(path: Path, content: bytes) -> None:
    path.with_suffix(".new").write_bytes(content)
    path.with_suffix(".new").rename(path)


def got(path: Path) -> bytes:
    wait_until(path.exists, f"{path} to be written", timeout_s=30)
    return path.read_bytes()


def meet_twice(rank: int, world_size: int, directory: Path) -> None:
    """Two worlds after each other; the old ticket is good for neither."""
    os.environ.update({"RANK": "7", "WORLD_SIZE": "nonsense", "MASTER_ADDR": "192.0.2.1", "LOCAL_RANK": "9"})
    first = exchange(directory, rank, world_size)
    init_distributed_environment(meeting=first, rank=rank, world_size=world_size, timeout=30)
    group = get_world_group()
    assert (group.rank, group.world_size, group.local_rank) == (rank, world_size, rank)
    total = group.all_reduce(torch.tensor([float(rank + 1)]))
    assert total.item() == world_size * (world_size + 1) / 2
    assert group.broadcast_object({"of": rank}, src=1) == {"of": 1}
    with pytest.raises(UsageError, match="in a world already"):
        init_distributed_environment(meeting=first)
    destroy_distributed_environment()
    with pytest.raises(UsageError, match="has used the ticket before"):
        init_distributed_environment(meeting=first)
    second = exchange(directory, rank, world_size, round_=1)
    assert second.meeting != first.meeting
    init_distributed_environment(meeting=second, timeout=30)
    get_world_group().barrier()
    destroy_distributed_environment()
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "LOCAL_RANK"):
        del os.environ[name]


@pytest.mark.guarantee("M1")
@pytest.mark.guarantee("M4")
def test_ranks_meet_by_ticket_and_again_with_new_ones(ranks2: RankPool) -> None:
    """Variables of a launcher, which are wrong here, are not looked at; collectives and objects work."""
    ranks2.run(meet_twice)


def mix(rank: int, world_size: int, directory: Path) -> str:
    """Rank 1 comes to the port of rank 0's meeting with the ticket of another meeting."""
    ticket = exchange(directory, rank, world_size)
    if rank == 1:
        ticket = msgspec.structs.replace(ticket, meeting="0" * 32)
    try:
        init_distributed_environment(meeting=ticket, settings=CoordinatorSettings(create_timeout_s=1.0))
    except CommTimeoutError as error:
        return f"missing {error.missing}"
    destroy_distributed_environment()
    return "joined"


@pytest.mark.guarantee("M3")
def test_ranks_of_two_meetings_do_not_mix(ranks2: RankPool) -> None:
    """Each waits for the ranks of its own meeting, though both reach one port."""
    assert ranks2.run(mix) == ["missing (1,)", "missing (0,)"]


def hear(rank: int, world_size: int, directory: Path) -> str:
    """Rank 1 does not come; a driver tells rank 0, first while it joins, then while it is in a world."""
    ticket = exchange(directory, rank, world_size)
    if rank == 1:
        withdraw(ticket.offer)
    else:
        report_loss(1, "Ray says that its actor is dead")
        with pytest.raises(
            PeerLostError, match=r"lost rank\(s\) 1 .*Ray says that its actor is dead"
        ) as caught:
            init_distributed_environment(meeting=ticket, timeout=30)
        assert caught.value.peers == (1,)
    init_distributed_environment(meeting=exchange(directory, rank, world_size, round_=1), timeout=30)
    group = get_world_group()
    if rank == 0:
        report_loss(1, "its node is gone")
        report_loss(5, "no rank of this world")
    else:
        got(directory / "broken")
    with pytest.raises(PeerLostError) as caught:
        group.barrier()
    assert caught.value.peers == (1,)
    if rank == 0:
        put(directory / "broken", b"")
        with pytest.raises(PeerLostError, match="its node is gone") as later:
            GroupCoordinator([[0, 1]], 0, "gloo", True, group_name="later")
        assert later.value.peers == (1,)
    destroy_distributed_environment()
    return str(caught.value)


@pytest.mark.guarantee("M5")
def test_a_loss_that_is_reported_ends_the_calls_that_wait(ranks2: RankPool) -> None:
    """It ends a rendezvous too; a new offer forgets the losses of the last meeting."""
    first, second = ranks2.run(hear)
    assert "lost rank 1 (pid" in first
    assert "its node is gone" in first
    assert "its node is gone) (found by rank 0" in second


def main(directory: Path, rank: int) -> None:
    """Meet over two hosts by ticket; rank 3 waits while the others are told that it is dead, and rank 3 is not."""
    ticket = exchange(directory, rank, 4, "10.77.0.1")
    found: dict[str, object] = {"host": ticket.host}
    settings = CoordinatorSettings(timeout_s=60, create_timeout_s=30)
    init_distributed_environment(meeting=ticket, local_rank=rank % 2, settings=settings)
    group = get_world_group()
    found["sum"] = group.all_reduce(torch.tensor([float(rank)])).item()
    pair = GroupCoordinator([[0, 1], [2, 3]], rank % 2, "gloo", True, group_name="pair", settings=settings)
    start = time.monotonic()
    try:
        if rank == 3:
            got(directory / "told")
        else:
            if rank == 0:
                report_loss(3, "says the driver")
            group.all_reduce(torch.tensor([1.0]))
    except PeerLostError as error:
        found |= {"peers": list(error.peers), "text": str(error), "after_s": time.monotonic() - start}
    if rank < 2:
        found["pair"] = pair.all_gather_object(rank)
    report(directory, rank, found)
    if rank == 0:
        for each in (1, 2):
            got(directory / f"report-{each}")
        put(directory / "told", b"")
    destroy_distributed_environment()


@pytest.mark.thorough
@requires("network_namespaces")
@pytest.mark.guarantee("M5")
def test_a_reported_loss_reaches_the_other_host() -> None:
    """One rank is told; all that wait for the lost one name it, also on the other host, long before the deadline."""
    found = run_on_two_hosts(__name__)
    assert [each["sum"] for each in found] == [6.0] * 4
    for each in found[:3]:
        assert each["peers"] == [3]
        assert "says the driver" in each["text"]
        assert each["after_s"] < 30
    for each in found[:2]:
        assert each["pair"] == [0, 1], "a group without the lost rank works"
