"""What belongs to one epoch cannot be used in another one."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.errors import CommError
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment
from shm_broadcast.queue import QueueWriter
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, use
from tests.rebuild_cycles import TIMEOUT_S, Crowd
from tests.worlds import meet, run_at

RANKS = 3
KEY = re.compile(rb"/?group_coordinator/elastic/([A-Za-z0-9_@:/.]+)")


@contextmanager
def crowd_of(ranks: int) -> Iterator[tuple[Crowd, list[int]]]:
    """Yield members that have started."""
    with Crowd() as crowd:
        members = [crowd.spawn() for _ in range(ranks)]
        for rank, number in enumerate(members):
            crowd.tell(number, "start", rank, ranks)
        for number in members:
            crowd.answer(number)
        yield crowd, members


def lose_one(crowd: Crowd, members: list[int]) -> None:
    """Let the last rank be killed, and the others go on."""
    crowd.kill(members.pop())
    crowd.ask(members, "rebuild")


@pytest.mark.guarantee("E6")
def test_an_attempt_writes_no_key_of_another_one() -> None:
    """Behind each change the store has new keys, all of which begin with the number of that attempt."""
    with crowd_of(RANKS) as (crowd, members):
        seen = crowd.store()
        for number in (1, 2):
            lose_one(crowd, members)
            crowd.ask(members, "use", number)
            now = crowd.store()
            keys = set(KEY.findall(now[len(seen) :]))
            seen = now
            assert len(keys) > 10
            of_others = [key for key in keys if not re.match(rb"(epoch/)?%d/" % number, key)]
            # What ends with its group says so under the prefix of its own epoch.
            assert [key for key in of_others if b"/left/" not in key] == []
            assert all(key.startswith(b"epoch/%d/" % (number - 1)) for key in of_others)
        crowd.end(members)


@pytest.mark.thorough
@pytest.mark.guarantee("E6")
def test_the_memory_of_a_group_has_another_number_in_each_epoch() -> None:
    """It stands in the header of what carries the collectives; groups of one epoch differ in it, too."""
    with crowd_of(RANKS) as (crowd, members):
        found = []
        for _ in range(2):
            found += [crowd.ask(members, "number_of", name) for name in ("world", "dp")]
            lose_one(crowd, members)
        crowd.end(members)
    assert all(len(set(of_one)) == 1 for of_one in found), "equal on all ranks of a group"
    assert len({of_one[0] for of_one in found}) == len(found)


@pytest.mark.thorough
@pytest.mark.guarantee("E6")
def test_a_queue_of_an_epoch_is_not_opened_in_the_next() -> None:
    """Its handle leads nowhere; with the key of the next epoch's queue it is taken for forged."""
    with crowd_of(RANKS + 1) as (crowd, members):
        handles = []
        for _ in range(2):
            crowd.ask(members, "make_queues", "world", "dp", 0)
            handles.append(crowd.ask(members[:1], "handle", "write")[0])
            lose_one(crowd, members)
            crowd.ask(members, "use", 1)
        (old, old_key, old_number), (new, new_key, new_number) = handles
        assert old_number != new_number
        assert old_key != new_key
        (told, _) = crowd.ask(members, "open", old, old_key, 1)
        assert (
            "PeerLostError: open on queue 'dp:0/1' (reader, rank 1): the segment is no longer offered" in told
        )
        assert "forged, or was made with another key" in crowd.ask(members, "open", old, new_key, 1)[0]
        assert "forged, or was made with another key" in crowd.ask(members, "open", new, old_key, 1)[0]
        crowd.end(members)


@pytest.mark.guarantee("E6")
@pytest.mark.guarantee("G19")
def test_the_queue_of_an_external_writer_is_of_the_epoch_that_has_used_it_first() -> None:
    """Its process outlives the group, so its handle may still open. All ranks name both epochs, new ones too."""
    with QueueWriter.create("engine", list(range(RANKS))) as first, crowd_of(RANKS) as (crowd, members):
        given = (first.handle.to_bytes(first.key), first.key)
        for number in members:
            crowd.tell(number, "read_from_outside", *given)
        first.wait_until_ready(TIMEOUT_S)
        for message in ("a", "b"):
            first.enqueue(message)
        assert [crowd.answer(number) for number in members] == [["a", "b"]] * RANKS
        lose_one(crowd, members)
        new = crowd.spawn()
        crowd.tell(new, "join")
        crowd.ask(members, "exchange", [], 1)
        crowd.answer(new)
        members.append(new)
        for text in crowd.ask(members, "read_from_outside", *given):
            assert "queue 'engine' is of epoch 0, and this is epoch 2: its writer must create one" in text
        crowd.ask(members, "use", 1)
        with QueueWriter.create("engine", list(range(RANKS))) as second:
            for number in members:
                crowd.tell(number, "read_from_outside", second.handle.to_bytes(second.key), second.key)
            second.wait_until_ready(TIMEOUT_S)
            for message in ("c", "d"):
                second.enqueue(message)
            assert [crowd.answer(number) for number in members] == [["c", "d"]] * RANKS
        crowd.end(members)


def of_two_hosts(rank: int, world_size: int, directory: Path) -> str:
    groups: ParallelGroups | None = elastic_groups(rank, world_size, directory)
    assert groups is not None
    groups = groups.prepare(leave=[4], timeout_s=TIMEOUT_S).commit()
    if groups is None:
        destroy_distributed_environment()
        return ""
    use(groups)
    # As if this leader were still in the groups of the last epoch.
    if rank == 2:
        groups.dp._health.name = groups.dp._health.name.replace("@1", "")
    with pytest.raises(CommError) as caught:
        groups.dp.all_reduce(torch.ones(8))
    meet(rank, range(4), directory, "told")
    end(groups)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.guarantee("E6")
def test_the_leaders_of_hosts_compare_their_epochs() -> None:
    """Their frames would fit: the digest of the call covers the group's name, which ends with the epoch."""
    places = ["one host", "one host", "another", "another", "another"]
    args: list[Any] = [places, __name__, of_two_hosts.__qualname__]
    found = run_ranks(run_at, 5, *args)
    for leader in (0, 2):
        assert found[leader].startswith("DisagreementError"), found
        assert "rank 0: all_reduce #2 in 'dp:0@1'" in found[leader], found
        assert "rank 2: all_reduce #2 in 'dp:0'" in found[leader], found
