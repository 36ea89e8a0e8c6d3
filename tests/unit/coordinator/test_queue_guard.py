"""What the guard of a group's queue makes of an error that the queue's own connection has found."""

from typing import Any

import pytest

from coordinator.queues.guard import GroupQueueGuard
from shm_broadcast.errors import PeerLostError

LOST = PeerLostError("dequeue on queue 'steps' (reader, rank 1): lost the writer (rank 4)", peers=(4,))


class Group:
    """Stand for the health of a group and its watch over processes.

    Rank 4 is lost, unless `lost` says otherwise. Rank 5, on its host, is found lost behind the last of some doubts, or
    never.
    """

    is_closed = is_inherited = False

    def __init__(self, doubts: int, also_lost: tuple[int, ...], lost: tuple[int, ...] = (4,)) -> None:
        self.watch = self
        self.doubts = doubts
        self.also_lost = also_lost
        self.lost_at_once = lost
        self.failures = list[PeerLostError]()
        self.suspects = list[int]()

    def exclusion(self, _where: str) -> None:
        return None

    def where(self, call: object) -> str:
        return str(call)

    def suspect(self, rank: int, _how: str) -> None:
        assert not self.failures
        self.suspects.append(rank)

    def is_in_doubt(self) -> bool:
        self.doubts -= 1
        return self.doubts > 0

    def lost(self) -> tuple[int, ...]:
        return (*self.lost_at_once, *(self.also_lost if self.doubts <= 0 else ()))

    def check_usable(self, call: str) -> None:
        pass

    def check_record(self, call: object) -> None:
        pass

    def check_peers(self, call: object) -> None:
        raise PeerLostError(f"{call}: lost", peers=self.lost())

    def fail(self, error: PeerLostError, _call: str) -> None:
        self.failures.append(error)


def fail(group: Group, call: str = "dequeue") -> None:
    health: Any = group
    GroupQueueGuard(health, has_own_writer=True).failed(call, LOST)


@pytest.mark.guarantee("V1")
@pytest.mark.parametrize("doubts", [0, 5])
def test_all_ranks_of_a_host_are_named_where_the_connection_knows_one(doubts: int) -> None:
    """Its host is asked, and they are waited for while the links are in doubt."""
    group = Group(doubts, (5,))
    with pytest.raises(PeerLostError) as raised:
        fail(group)
    assert raised.value.peers == (4, 5)
    assert group.suspects == [4]
    assert group.failures == []
    assert group.doubts <= 0


@pytest.mark.guarantee("V3")
@pytest.mark.parametrize("doubts", [0, 5])
def test_a_rank_that_is_lost_alone_breaks_the_group_by_the_queues_error(doubts: int) -> None:
    """No rank behind it is lost, so that what the connection says is the whole cause."""
    group = Group(doubts, ())
    fail(group)
    assert group.failures == [LOST]


@pytest.mark.guarantee("V1")
def test_a_doubt_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link to another host may have no answer for longer."""
    monkeypatch.setattr("coordinator.queues.guard.EXPLAIN_S", 0.1)
    group = Group(10**9, (5,))
    fail(group)
    assert group.failures == [LOST]


@pytest.mark.guarantee("R18")
@pytest.mark.parametrize("call", ["adequeue", "try_dequeue"])
def test_a_call_of_an_event_loop_waits_for_no_doubt(call: str) -> None:
    """The loop would stand still: the error names the ranks that are known, all of them if the links know of more."""
    group = Group(5, (5,))
    fail(group, call)
    assert group.failures == [LOST]
    assert (group.doubts, group.suspects) == (4, [])
    with pytest.raises(PeerLostError) as raised:
        fail(Group(0, (5,)), call)
    assert raised.value.peers == (4, 5)


def end(group: Group, call: str = "dequeue", *, has_own_writer: bool = True, by_writer: bool = True) -> None:
    health: Any = group
    GroupQueueGuard(health, has_own_writer=has_own_writer).ended(call, by_writer=by_writer)


@pytest.mark.guarantee("V1")
@pytest.mark.guarantee("V2")
@pytest.mark.parametrize("doubts", [0, 5])
def test_a_queue_whose_writer_has_found_a_host_lost_first_names_that_host(doubts: int) -> None:
    """The writer's rank has broken the group and closed the queue; the record of that has vanished with the store."""
    with pytest.raises(PeerLostError) as raised:
        end(Group(doubts, (4, 5), ()))
    assert raised.value.peers == (4, 5)


@pytest.mark.guarantee("V3")
@pytest.mark.parametrize(
    ("call", "has_own_writer", "doubts_left"),
    [("dequeue", True, 0), ("adequeue", True, 4), ("dequeue", False, 5)],
)
def test_a_queue_that_its_writer_has_closed_ends_without_a_failure(
    call: str, has_own_writer: bool, doubts_left: int
) -> None:
    """Nobody is lost once the doubts have ended. No event loop waits for them, nor for those about an outer writer."""
    group = Group(5, (), ())
    end(group, call, has_own_writer=has_own_writer)
    assert group.doubts == doubts_left


@pytest.mark.guarantee("V3")
def test_an_end_that_its_own_rank_has_closed_waits_for_no_doubt() -> None:
    """Nor does one whose connection has failed: `failed` waits for that, with the rank that it names."""
    group = Group(5, (4, 5), ())
    end(group, by_writer=False)
    assert group.doubts == 5
