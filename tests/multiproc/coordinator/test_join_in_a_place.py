"""Processes that take the places of lost members, and layout rules of one's own in planned changes."""

import time
from typing import Any

import pytest

from coordinator.elastic.joining import join_distributed_environment
from coordinator.errors import UsageError
from tests.rebuild_cycles import Crowd


def started(crowd: Crowd, size: int, tensor: int = 1) -> list[int]:
    """Start members; return their numbers."""
    members = [crowd.spawn() for _ in range(size)]
    for rank, number in enumerate(members):
        crowd.tell(number, "start", rank, size, tensor)
    for number in members:
        crowd.answer(number)
    return members


def joining(crowd: Crowd, replaces: int | None, member: int, among: int = 1) -> int:
    """Start a process that joins, once `member` sees that `among` wait; return its number."""
    number = crowd.spawn()
    crowd.tell(number, "join", replaces)
    crowd.ask([member], "see_waiting", among)
    return number


@pytest.mark.guarantee("E11")
def test_a_process_takes_the_place_of_a_lost_member_though_another_came_before() -> None:
    """Ranks are as before the loss, with all planes in order; who names no place comes behind all."""
    with Crowd() as crowd:
        members = started(crowd, 3)
        crowd.kill(members[0])
        crowd.ask(members[1:], "rebuild")
        behind = joining(crowd, None, members[1])
        first = joining(crowd, 0, members[1], 2)
        crowd.ask(members[1:], "exchange", [], 2)
        now = [first, *members[1:], behind]
        new = crowd.answer(behind)
        assert crowd.answer(first)[:2] == [0, 4]
        assert new[:2] == [3, 4]
        said = crowd.ask(now, "change")
        assert [each["places"][:3] for each in said] == [[0, 1, 2]] * 4
        assert said[1]["places"][3] > 2
        assert said[1]["joined"] == [0, 3]
        assert said[1]["old_to_new"] == {0: 1, 1: 2}
        crowd.ask(now, "use", 1)
        # It has the place, and not the number, of its predecessor, and can be lost and replaced itself.
        crowd.kill(first)
        crowd.ask(now[1:], "rebuild")
        again = joining(crowd, 0, members[1])
        crowd.ask(now[1:], "exchange", [], 1)
        assert crowd.answer(again)[:2] == [0, 4]
        crowd.ask([again, *now[1:]], "use", 2)
        crowd.end([again, *now[1:]])


@pytest.mark.guarantee("E11")
def test_a_whole_replica_is_replaced_in_its_place() -> None:
    """The processes come in another order than their places: each gets the shard whose weights it has loaded."""
    with Crowd() as crowd:
        members = started(crowd, 4, tensor=2)
        crowd.kill(members[1])
        excluded, *others = members[0], members[2], members[3]
        crowd.tell(excluded, "fail")
        assert crowd.ask(others, "rebuild") == [[0, 2, 1, [0, 1]], [1, 2, 1, [0, 1]]]
        assert crowd.answer(excluded) == "ExcludedError"
        second = joining(crowd, 1, others[0])
        first = joining(crowd, 0, others[0], 2)
        crowd.ask(others, "exchange", [], 2)
        now = [first, second, *others]
        assert [crowd.answer(first)[0], crowd.answer(second)[0]] == [0, 1]
        assert [each["tp"] for each in crowd.ask(now, "change")] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        crowd.ask(now, "use", 1)
        crowd.end([excluded, *now])


@pytest.mark.thorough
@pytest.mark.guarantee("E11")
def test_processes_that_would_tear_a_replica_apart_are_refused() -> None:
    """One has a place before the replica that goes on, one behind it: no two whole replicas come out of that."""
    with Crowd() as crowd:
        members = started(crowd, 4, tensor=2)
        crowd.kill(members[1])
        crowd.tell(members[0], "fail")
        crowd.ask(members[2:], "rebuild")
        assert crowd.answer(members[0]) == "ExcludedError"
        joined = [joining(crowd, 0, members[2]), joining(crowd, None, members[2], 2)]
        for text in crowd.ask(members[2:], "refused", 2):
            assert "would join in the middle of the replicas of ranks [[0, 1]]" in text
        for number in joined:
            assert "would join in the middle of the replicas" in crowd.answer(number)
        crowd.ask(members[2:], "use", 1)
        crowd.end([members[0], *members[2:], *joined])


@pytest.mark.thorough
@pytest.mark.guarantee("E11")
def test_a_process_waits_as_long_as_its_place_is_not_free() -> None:
    """While the member serves it is not counted, unless that member is to leave; of two for one place, one waits."""
    with Crowd() as crowd:
        members = started(crowd, 3)
        first = crowd.spawn()
        crowd.tell(first, "join", 2)
        crowd.ask([members[0]], "see_waiting", 1, [2])
        second = crowd.spawn()
        crowd.tell(second, "join", 2)
        assert crowd.ask([members[0]], "waiting") == [0]
        assert crowd.ask([members[0]], "waiting", [2]) == [1]
        # The straggler leaves, and the first of them comes, in one change.
        said = crowd.ask(members, "exchange", [2], 1)
        assert said[2] == []
        assert crowd.answer(first)[:2] == [2, 3]
        crowd.end([members[2]])
        now = [*members[:2], first]
        crowd.ask(now, "use", 1)
        assert crowd.ask([now[0]], "waiting") == [0]
        crowd.kill(first)
        crowd.ask(now[:2], "rebuild")
        crowd.ask([now[0]], "see_waiting", 1)
        crowd.ask(now[:2], "exchange", [], 1)
        assert crowd.answer(second)[:2] == [2, 3]
        crowd.ask([*now[:2], second], "use", 2)
        crowd.end([*now[:2], second])


@pytest.mark.guarantee("E11")
def test_a_place_that_nobody_ever_had_is_refused() -> None:
    """By whoever looks who waits; the others are not disturbed. Nor is a value sent that is no number."""
    with Crowd() as crowd:
        members = started(crowd, 2)
        lost = crowd.spawn()
        crowd.tell(lost, "join", 17)
        while not crowd.has_answered(lost):
            assert crowd.ask([members[0]], "waiting") == [0]
            time.sleep(0.01)
        assert "there was never a member 17" in crowd.answer(lost)
        crowd.ask(members, "use", 1)
        crowd.end([*members, lost])
    wrong: list[Any] = [-1, True, "3"]
    for bad in wrong:
        with pytest.raises(UsageError, match="replaces must be the number of a member"):
            join_distributed_environment("file:///nowhere", replaces=bad)


# --- layout rules -------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("E12")
def test_a_planned_change_takes_a_layout_rule_of_ones_own() -> None:
    """Four replicas become two of two ranks, and a process that joins gets that layout without knowing the rule."""
    with Crowd() as crowd:
        members = started(crowd, 4)
        crowd.ask(members, "exchange", [], 0, "pairs")
        assert [each["tp"] for each in crowd.ask(members, "change")] == [[0, 1], [0, 1], [2, 3], [2, 3]]
        crowd.ask(members, "use", 1)
        joined = [joining(crowd, None, members[0], among) for among in (1, 2)]
        crowd.ask(members, "exchange", [], 2, "pairs")
        for number in joined:
            crowd.answer(number)
        now = [*members, *joined]
        assert [each["tp"] for each in crowd.ask(now, "change")][4:] == [[4, 5], [4, 5]]
        crowd.ask(now, "use", 2)
        crowd.end(now)


def thorough(rule: str, text: str) -> Any:
    """Return a case that shows what others show, too."""
    return pytest.param(rule, text, marks=pytest.mark.thorough)


@pytest.mark.guarantee("E12")
@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("another shape on rank 0", "it must be a pure function"),
        thorough("another order on rank 1", "it must be a pure function"),
        ("raises on rank 0", "the layout rule has failed: ZeroDivisionError"),
        thorough("raises", "the layout rule has failed: ZeroDivisionError"),
        thorough("is malformed", "the layout rule has failed: TypeError"),
        thorough("drops rank 2", "the layout has no place for rank(s) [2]: let them leave too"),
    ],
)
def test_a_rule_that_fails_or_differs_is_refused_on_all_ranks(rule: str, text: str) -> None:
    """They get one reason, also where the rule would have worked, and their groups serve on; a joiner waits on."""
    with Crowd() as crowd:
        members = started(crowd, 3)
        told = crowd.ask(members, "refused", 0, [2] if "drops" not in rule else [1], rule)
        assert len(set(told)) == 1
        assert text in told[0]
        crowd.ask(members, "use", 1)
        crowd.end(members)
