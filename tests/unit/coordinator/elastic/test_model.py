"""The agreement on members, explored in every order of its steps."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from coordinator.elastic import protocol
from coordinator.elastic.protocol import Get
from coordinator.errors import InternalError
from tests.unit.coordinator.elastic.model_check import REFUSAL, Limits, explore


@pytest.mark.guarantee("E1")
def test_ranks_that_all_come_are_complete() -> None:
    """Whatever the order of their steps, without a crash nobody is left out and the first attempt is complete."""
    assert list(explore(3, Limits()).ends) == [("Complete 1 (0, 1, 2)",) * 3]


@pytest.mark.guarantee("E5")
def test_a_crash_at_any_step_leaves_one_membership() -> None:
    """The other rank is complete alone, whenever the first one crashes: in this attempt or in the next."""
    ends = explore(2, Limits(crashes=1)).ends
    assert ("Complete 1 (0,)", "crashed") in ends, "it has crashed before anybody decided"
    assert ("Complete 2 (0,)", "crashed") in ends, "it has crashed behind the decision"
    for end in ends:
        assert all(each == "crashed" or each.startswith("Complete") for each in end)


@pytest.mark.guarantee("E2")
def test_ranks_that_give_up_waiting_too_early_agree_all_the_same() -> None:
    """A rank may take another for silent that only comes late: that one is excluded, or all go to the next attempt."""
    ends = explore(2, Limits(crashes=1, give_ups=2)).ends
    for end in ends:
        complete = {each for each in end if each.startswith("Complete")}
        assert len(complete) <= 1


def minorities(members: int, limits: Limits) -> set[str]:
    """Return the ends of ranks that go on as half of the members or fewer, of which none has crashed."""
    assert not limits.crashes
    return {
        f"{each} of {members}"
        for end in explore(members, limits).ends
        for each in end
        if each.startswith("Complete") and 2 * sum(one == each for one in end) <= members
    }


@pytest.mark.guarantee("E2")
@pytest.mark.parametrize(
    ("members", "give_ups"), [(2, 1), (2, 2), pytest.param(3, 1, marks=pytest.mark.thorough)]
)
def test_no_minority_goes_on_without_ranks_that_are_only_silent(members: int, give_ups: int) -> None:
    """However early a rank takes the others for silent, half of the members and fewer wait for them."""
    assert not minorities(members, Limits(give_ups=give_ups))


@pytest.mark.guarantee("E2")
def test_without_the_rule_of_the_majority_a_minority_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seeded bug: whichever of two ranks is first goes on alone, and leaves out the other, which is only late."""
    monkeypatch.setattr(protocol, "is_majority", lambda alive, electorate: True)
    assert minorities(2, Limits(give_ups=1)) == {"Complete 1 (0,) of 2", "Complete 1 (1,) of 2"}


@pytest.mark.guarantee("E8")
@pytest.mark.parametrize(
    "limits",
    [
        Limits(is_planned=True, leavers=(1,)),
        Limits(is_planned=True, leavers=(1,), crashes=1, give_ups=1),
        Limits(is_planned=True, joiners=1),
        pytest.param(Limits(is_planned=True, joiners=1, give_ups=1), marks=pytest.mark.thorough),
        pytest.param(Limits(is_planned=True, joiners=1, crashes=1), marks=pytest.mark.thorough),
        pytest.param(Limits(is_planned=True, joiners=1, leavers=(0,), crashes=1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_a_planned_change_is_made_by_all_or_by_nobody(limits: Limits) -> None:
    """Whoever crashes or gives up, no rank is complete while another one serves on in the old groups."""
    for end in explore(2, limits).ends:
        made = [each for each in end if each.startswith(("Complete", "Excluded"))]
        given_up = [each for each in end if each.startswith(("Refused", "Late"))]
        assert not (made and given_up), end


@pytest.mark.guarantee("E1", "E5")
@pytest.mark.parametrize(
    ("members", "limits"),
    [
        (2, Limits(strikes=1)),
        (2, Limits(strikes=1, crashes=1)),
        pytest.param(2, Limits(strikes=2), marks=pytest.mark.thorough),
        pytest.param(3, Limits(strikes=1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_members_that_are_interrupted_at_any_step_come_back_into_one_epoch(
    members: int, limits: Limits
) -> None:
    """All who are left have groups of one epoch in the end, wherever a member was interrupted and called again."""
    for end in explore(members, limits).ends:
        left = [each for each in end if each != "crashed"]
        assert all(each.startswith("Complete") for each in left), end
        assert len(set(left)) <= 1 or len(left) < members, end


@pytest.mark.guarantee("E5")
def test_a_member_that_forgets_what_it_has_built_is_found() -> None:
    """A seeded bug: it goes on from an epoch that the others have left."""
    with pytest.raises(InternalError, match="is one of epoch 1 and goes on from epoch 0"):
        explore(2, Limits(strikes=1, forgets=True))


@pytest.mark.guarantee("E8")
@pytest.mark.parametrize(
    "limits",
    [
        Limits(is_planned=True, strikes=1),
        Limits(is_planned=True, leavers=(1,), strikes=1),
        pytest.param(Limits(is_planned=True, joiners=1, strikes=1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_who_is_interrupted_in_a_planned_change_ends_it_for_all_or_has_no_say(limits: Limits) -> None:
    """The others do the same; no change is made without a member that is to go on in it."""
    for end in explore(2, limits).ends:
        made = [each for each in end if each.startswith(("Complete", "Excluded"))]
        given_up = [each for each in end if each.startswith(("Refused", "Late"))]
        assert not (made and given_up), end
        stays = [each for rank, each in enumerate(end[:2]) if rank not in limits.leavers]
        assert not (made and "Gone 0" in stays), end


@pytest.mark.guarantee("E4")
@pytest.mark.parametrize("is_planned", [False, True])
def test_what_a_rank_cannot_build_is_refused_by_all(is_planned: bool) -> None:
    """No attempt follows in which the same would fail."""
    assert list(explore(3, Limits(failing=(1,), is_planned=is_planned)).ends) == [("Refused 1",) * 3]


@pytest.mark.guarantee("E4")
@pytest.mark.parametrize(
    ("members", "limits"),
    [
        (3, Limits(refusing=(1,))),
        (3, Limits(refusing=(1,), is_planned=True)),
        (2, Limits(refusing=(0, 1))),
        (2, Limits(refusing=(1,), is_planned=True, joiners=1)),
        (2, Limits(refusing=(1,), give_ups=1)),
        (2, Limits(refusing=(1,), crashes=1)),
    ],
    ids=str,
)
def test_all_get_the_reason_of_a_member_that_refuses_and_the_old_groups_serve_on(
    members: int, limits: Limits
) -> None:
    """Whatever the order of their steps, nobody has torn anything down; those who lose the refuser go on without it."""
    found = explore(members, limits)
    ends = dict(found.ends)
    if limits.crashes:
        assert ends.pop(("Complete 1 (0,)", "crashed")), "it has crashed before anybody decided"
        assert ends.pop(("Complete 2 (0,)", "crashed")), "it has crashed behind the decision"
    # Who has waited long enough before anything was decided is told so instead.
    told = ("Refused", "Late") if limits.give_ups else ("Refused",)
    assert ends
    for end in ends:
        assert all(each == "crashed" or each.startswith(told) for each in end), end
    assert found.reasons == {REFUSAL}


@pytest.mark.guarantee("E3", "E5")
@pytest.mark.parametrize(
    "limits",
    [
        Limits(is_planned=True, leavers=(1,), strays=(1,)),
        Limits(is_planned=True, leavers=(1,), strays=(0,)),
        Limits(is_planned=True, leavers=(1,), rebuilders=(0,)),
        pytest.param(Limits(is_planned=True, joiners=1, rebuilders=(1,)), marks=pytest.mark.thorough),
        pytest.param(
            Limits(is_planned=True, leavers=(1,), strays=(1,), crashes=1), marks=pytest.mark.thorough
        ),
        pytest.param(Limits(is_planned=True, joiners=1, strays=(1,)), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_who_calls_rebuild_beside_a_planned_change_gives_it_up_or_comes_too_late(limits: Limits) -> None:
    """Either all members go on with what was planned, and who leaves is excluded, or all rebuild."""
    for end in explore(2, limits).ends:
        members = [each for each in end[:2] if each != "crashed"]
        complete = {each for each in members if each.startswith("Complete")}
        assert len(complete) <= 1, end
        assert all(each.startswith(("Complete", "Excluded")) for each in members), end


@pytest.mark.guarantee("E3", "E4", "E5", "E8")
@pytest.mark.parametrize(
    ("members", "limits"),
    [
        (3, Limits()),
        (3, Limits(refusing=(1,))),
        (2, Limits(refusing=(0, 1))),
        (2, Limits(refusing=(1,), crashes=1)),
        (2, Limits(refusing=(1,), give_ups=1)),
        (2, Limits(failing=(1,))),
        (2, Limits(crashes=1, give_ups=2)),
        (2, Limits(strikes=1, crashes=1)),
        (2, Limits(is_planned=True, leavers=(1,), crashes=1, give_ups=1)),
        (2, Limits(is_planned=True, leavers=(1,), strikes=1)),
        (2, Limits(is_planned=True, leavers=(1,), strays=(0,))),
        (2, Limits(is_planned=True, leavers=(1,), strays=(1,))),
        (2, Limits(is_planned=True, leavers=(1,), rebuilders=(0,))),
        (2, Limits(is_planned=True, joiners=1, refusing=(1,))),
        pytest.param(3, Limits(give_ups=1), marks=pytest.mark.thorough),
        pytest.param(2, Limits(is_planned=True, joiners=1, crashes=1), marks=pytest.mark.thorough),
        pytest.param(2, Limits(is_planned=True, joiners=1, give_ups=1), marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_others_may_write_while_a_rank_reads_several_keys(members: int, limits: Limits) -> None:
    """A store answers for one key after the other. All runs end as if it answered for all at once."""
    at_once = explore(members, limits)
    singly = explore(members, dataclasses.replace(limits, reads_singly=True))
    assert singly.states > at_once.states
    assert singly.ends.keys() == at_once.ends.keys()
    assert singly.reasons == at_once.reasons


def read_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all ranks read keys in the other order: a seeded bug."""
    monkeypatch.setattr(protocol, "Get", lambda keys: Get(keys[::-1]))


@pytest.mark.guarantee("E4")
def test_a_rank_that_reads_first_what_is_written_first_misses_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A seeded bug: it finds `go` and no `members`, takes that for a planned change, and waits for another attempt."""
    read_backwards(monkeypatch)
    ends = explore(2, Limits(refusing=(1,), reads_singly=True)).ends
    assert ("Late 2", "Refused 1") in ends


@pytest.mark.guarantee("E3")
@pytest.mark.parametrize("count", range(5))
def test_a_rank_is_excluded_that_comes_while_the_others_complete_an_attempt(count: int) -> None:
    """They have written everything when it has read `count` of the keys that tell how the attempt stands."""
    assert end_beside_others(count) == protocol.Excluded(1, (1, 2))


def test_a_rank_that_reads_members_first_finds_an_attempt_complete_that_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A seeded bug: it has read that nobody is chosen, and then that all have built their groups."""
    read_backwards(monkeypatch)
    with pytest.raises(KeyError, match="1/members"):
        end_beside_others(1)


def end_beside_others(count: int) -> protocol.End:
    """Return the end of member 0; when it has read `count` keys, members 1 and 2 complete an attempt without it."""
    decided = protocol._Decided(protocol.Chosen((1, 2)), (1, 2), False)
    written = {
        "1/members": msgspec.json.encode(decided).decode(),
        "1/go": protocol.OK,
        "1/result": protocol.OK,
    }
    store: dict[str, str] = {}
    steps = protocol.agree_on_members(0, 0, (0, 1, 2))
    answer: Any = None
    read = 0
    while True:
        try:
            wants = steps.send(answer)
        except StopIteration as stop:
            end: protocol.End = stop.value
            return end
        answer = frozenset() if isinstance(wants, protocol.Dead) else None
        if isinstance(wants, Get):
            answer = {}
            for key in wants.keys:
                if read == count:
                    store.update(written)
                read += 1
                answer |= {key: store[key]} if key in store else {}


@pytest.mark.guarantee("E8")
@pytest.mark.parametrize(("missing", "who"), [((0,), "member(s) 0"), ((), "all that are to join")])
def test_one_that_joins_learns_why_a_change_was_given_up_before_it_was_invited(
    missing: tuple[int, ...], who: str
) -> None:
    """Member 1 gives up as member 0 ends; then member 2, which has seen neither, chooses and invites."""
    store = {
        "1/go": protocol.LATE + msgspec.json.encode(missing).decode(),
        "1/members": msgspec.json.encode(
            protocol._Decided(protocol.Chosen((0, 1, 2, 3)), (0, 1, 2, 3), True)
        ).decode(),
        **{f"1/present/{member}": msgspec.json.encode(protocol.Presence(())).decode() for member in range(3)},
        "invited/3": "1",
    }
    reason = f"the change was given up: {who} did not come in time, or ended"
    assert _end_of(protocol.join(3, ""), store) == protocol.Refused(1, reason)


def test_who_waits_in_vain_learns_why_the_attempt_before_has_failed() -> None:
    """Member 1 has come to the first attempt, in which member 0 could not create its groups, and not to the second."""
    note = msgspec.json.encode(protocol.Presence(())).decode()
    answers: dict[Any, Any] = {
        protocol.Dead: frozenset[int](),
        protocol.Choose: protocol.Chosen((0, 1)),
        protocol.TearDown: None,
        protocol.Build: "lost rank 1 did not answer",
        protocol.Discard: None,
        protocol.Pause: 2,
    }
    steps = protocol.agree_on_members(0, 0, (0, 1))
    end = _end_of(steps, {"1/present/1": note, "1/confirm/1": protocol.OK}, answers)
    assert end == protocol.Late(2, (1,), "rank 1 did not answer")


def _end_of(steps: protocol.Steps, store: dict[str, str], answers: Mapping[Any, Any] | None = None) -> Any:
    """Return the end of a program, on a store of its own; `answers` are those to what is no question to the store."""
    answer: Any = None
    while True:
        try:
            wants = steps.send(answer)
        except StopIteration as stop:
            return stop.value
        if isinstance(wants, protocol.Put):
            store[wants.key], answer = wants.value, None
        elif isinstance(wants, protocol.Get):
            answer = {key: store[key] for key in wants.keys if key in store}
        elif isinstance(wants, protocol.Swap):
            answer = store.setdefault(wants.key, wants.value)
        else:
            answer = {protocol.Judge: "", **(answers or {})}[type(wants)]


@pytest.mark.parametrize(
    ("key", "finding"),
    [
        ("members", "rank 0 has made None|several memberships"),
        ("go", "wait for ever|several|has made"),
        pytest.param("result", "several epochs|has made", marks=pytest.mark.thorough),
    ],
)
def test_a_seeded_bug_is_found(key: str, finding: str) -> None:
    """Where a decision can be overwritten, ranks have different members, or wait for those that went on."""
    with pytest.raises(AssertionError, match=finding):
        explore(3, Limits(crashes=1, give_ups=1, overwrites=key))


@pytest.mark.thorough
@pytest.mark.long
@pytest.mark.parametrize(("members", "crashes", "give_ups"), [(3, 2, 0), (3, 1, 1), (4, 2, 0)])
def test_every_interleaving_has_one_membership_per_epoch(members: int, crashes: int, give_ups: int) -> None:
    """No two ranks have different members in one epoch, none is complete too early, and none waits for ever."""
    found = explore(members, Limits(crashes=crashes, give_ups=give_ups))
    for end in found.ends:
        assert len({each for each in end if each.startswith("Complete")}) <= 1, end
    assert found.states > 10_000
