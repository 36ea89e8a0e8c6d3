"""A process dies in the middle of a planned change: the others change all, or all stay, and go on without it."""

import pytest

from tests.rebuild_cycles import Crowd
from tests.waiting import wait_until

RANKS = 4
LEAVES = 3
ROLES = {"rank 0": 0, "another rank": 1, "one that leaves": LEAVES, "one that joins": RANKS}
STEPS = 19
"""A member has fewer in a planned change in which nobody dies; see `protocol.py`."""


def die_in_a_change(role: str, step: int) -> str:
    """Kill the process of a role before a step of a change with one that leaves and one that joins.

    Returns:
        What the others have done.
    """
    victim = ROLES[role]
    with Crowd() as crowd:
        members = [crowd.spawn() for _ in range(RANKS)]
        for rank, number in enumerate(members):
            crowd.tell(number, "start", rank, RANKS)
        for number in members:
            crowd.answer(number)
        joins = crowd.spawn()
        crowd.ask([victim], "die_before", step)
        crowd.tell(joins, "join")
        for number in members:
            crowd.tell(number, "try_exchange", [LEAVES], 1)
        found = {number: crowd.answer(number) for number in members if number != victim}
        stays = [number for number in found if number != LEAVES]
        what: str = found[stays[0]]
        assert all(found[number] == what for number in stays), found
        if LEAVES in found:
            assert found[LEAVES] == ("left" if what == "changed" else what), found
        # A victim with fewer steps than that has come to the end.
        if not crowd.has_died(victim):
            crowd.kill(victim)
        else:
            crowd.bury(victim)
        has_joiner = joins != victim
        now = sorted({*stays, joins} - {victim} if what == "changed" else found)
        if has_joiner and what == "changed":
            assert crowd.answer(joins)[:2] == [RANKS - 1, RANKS]
        assert crowd.ask(now, "go_on", 1) == [[rank, len(now)] for rank in range(len(now))]
        if has_joiner and what == "stayed":
            # It may be about to say that it waits, or to learn that the change was given up.
            wait_until(
                lambda: crowd.has_answered(joins) or crowd.ask(now[:1], "waiting") == [1],
                "the process that joins to wait, or to be refused",
            )
            if not crowd.has_answered(joins):
                # The change was given up before anybody had invited it.
                crowd.ask(now, "exchange", [], 1)
                assert crowd.answer(joins)[:2] == [len(now), len(now) + 1]
                crowd.ask([*now, joins], "use", 2)
            else:
                assert isinstance(crowd.answer(joins), str), "why the change was given up"
        crowd.end([*found, *([joins] if has_joiner else [])])
        assert not (crowd.directory / "store").exists()
        return what


@pytest.mark.guarantee("E8")
@pytest.mark.parametrize(("role", "step"), [("rank 0", 12), ("one that joins", 8)])
def test_whoever_dies_in_a_planned_change_the_others_do_the_same(role: str, step: int) -> None:
    """All others have the new groups, or the old ones; then they go on without the one that has died."""
    die_in_a_change(role, step)


@pytest.mark.thorough
@pytest.mark.guarantee("E8")
@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_die_at_every_step_of_a_planned_change(role: str) -> None:
    """Before an early step nobody changes, behind the last one all have."""
    found = [die_in_a_change(role, step) for step in range(STEPS)]
    assert found[0] == "stayed"
    assert found[-1] == "changed"
