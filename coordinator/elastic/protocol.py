"""The agreement on the members of the next epoch, as a program without input and output.

`agree_on_members` yields what it wants done and gets the results: the driver does it on a store, and the model checker
of the tests explores every order in which ranks can be scheduled, crash, give up and be interrupted. What interrupts a
member is thrown into its program, which tells the others. `DESIGN.md` has the protocol under "Elastic membership".
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from shm_broadcast.errors import InternalError

__all__ = [
    "Build",
    "Choose",
    "Chosen",
    "Complete",
    "Dead",
    "Discard",
    "End",
    "Excluded",
    "Get",
    "Judge",
    "Late",
    "Operation",
    "Pause",
    "Prepared",
    "Presence",
    "Put",
    "Refused",
    "Steps",
    "Swap",
    "TearDown",
    "Tell",
    "abort",
    "agree_on_members",
    "await_decision",
    "commit",
    "decided_without",
    "join",
    "settle",
]

OK: Final = "ok"
"""The value that records the success of a step; any other value is the reason why the step has failed."""

LOST: Final = "lost "
"""Begins the reason of a step that ended because members are gone or silent: the next attempt goes on without them."""


LATE: Final = "late "
"""Begins the reason of a planned change for which too few came; the members that did not come follow as JSON."""


_OVERTAKEN: Final = "the members have changed otherwise"
"""The reason for which a member gives a planned change up when it changes the members by another call."""


class Put(msgspec.Struct, frozen=True):
    """Set a key whatever it holds: only this member writes it, or all writers mean the same."""

    key: str
    value: str


class Get(msgspec.Struct, frozen=True):
    """Return those of the keys that are set, with their values.

    The keys are read one after the other, in this order, and others write meanwhile. So the key that is written last
    comes first: if it is found, then so are those that were written before.
    """

    keys: tuple[str, ...]


class Swap(msgspec.Struct, frozen=True):
    """Set a key unless it is set; return the value that holds."""

    key: str
    value: str


class Tell(msgspec.Struct, frozen=True):
    """Do as `Swap`, for the sake of the others only: an interrupted member says why it goes on no further.

    It and what follows it take no longer than a moment. Return None if the store has not answered by then.
    """

    key: str
    value: str


class Dead(msgspec.Struct, frozen=True):
    """Return which members' processes have provably ended, as a frozen set."""


class Chosen(msgspec.Struct, frozen=True):
    """Who is a member next.

    Attributes:
        members: In the order of the new ranks.
        layout: The layout that they get, as the driver writes it.
        refusal: Why nobody can go on; empty if the members can.
    """

    members: tuple[int, ...]
    layout: str = ""
    refusal: str = ""


class Choose(msgspec.Struct, frozen=True):
    """Return who is `Chosen`: of those that are alive, and of those that join. None as long as too few wait to join."""

    alive: tuple[int, ...]


class Pause(msgspec.Struct, frozen=True):
    """Wait for a moment, as nothing has changed in a step of an attempt.

    Return 0, 1 if members that are silent have had their time to come, or 2 if this member has waited long enough.
    """

    number: int
    step: str


class Judge(msgspec.Struct, frozen=True):
    """Return why this voter cannot go on with what was chosen, or an empty text. Nothing has changed yet.

    `presences` has the notes of all voters.
    """

    number: int
    chosen: Chosen
    presences: dict[int, str]


class TearDown(msgspec.Struct, frozen=True):
    """Stop all work of the last epoch; `Build` destroys its groups."""


class Build(msgspec.Struct, frozen=True):
    """Create the groups of these members, together with them; return why that has failed, or an empty text.

    The reason begins with `LOST` if it is that members are gone or silent.
    """

    number: int
    members: tuple[int, ...]


class Discard(msgspec.Struct, frozen=True):
    """Destroy what `Build` has made."""


Operation: TypeAlias = Put | Get | Swap | Tell | Dead | Choose | Pause | Judge | TearDown | Build | Discard


class Presence(msgspec.Struct, frozen=True):
    """What a member says of itself in an attempt.

    Attributes:
        dead: Members that it knows to have ended.
        note: What the driver lets the others know of this member.
    """

    dead: tuple[int, ...]
    note: str = ""


class Complete(msgspec.Struct, frozen=True):
    """All members have their groups.

    Attributes:
        number: The epoch.
        members: In the order of their ranks.
        last: Number and members of the epoch before it.
    """

    number: int
    members: tuple[int, ...]
    last: tuple[int, tuple[int, ...]]


class Prepared(msgspec.Struct, frozen=True):
    """All members of a planned change have their groups; the groups of the last epoch serve until it is decided.

    Attributes:
        number: The epoch.
        members: In the order of their ranks. A member that leaves is none of them.
    """

    number: int
    members: tuple[int, ...]


class Excluded(msgspec.Struct, frozen=True):
    """The others go on without this member: it came too late, or has no place in their layout."""

    number: int
    members: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True):
    """A member could not go on with the others, or could not create its groups, so nobody goes on.

    The groups of the last epoch are as they were, unless a rebuild had destroyed them to create the new ones.
    """

    number: int
    reason: str


class Late(msgspec.Struct, frozen=True):
    """Too few members have come in time, or too few to join.

    Attributes:
        number: The attempt.
        missing: The members that did not come.
        failure: Why the attempt before it has failed, if there was one.
    """

    number: int
    missing: tuple[int, ...]
    failure: str = ""


End: TypeAlias = Complete | Prepared | Excluded | Refused | Late

Steps: TypeAlias = Generator[Operation, Any, Any]


class _Decided(msgspec.Struct, frozen=True):
    """The value of `members`.

    Attributes:
        chosen: Who they are.
        voters: Who confirms that: the members, and those that leave in a planned change.
        is_planned: Whether it is one.
    """

    chosen: Chosen
    voters: tuple[int, ...]
    is_planned: bool

    @property
    def members(self) -> tuple[int, ...]:
        """Return who they are, in the order of their ranks."""
        return self.chosen.members


_presence_decoder: Final = msgspec.json.Decoder(Presence)
_decided_decoder: Final = msgspec.json.Decoder(_Decided)
_late_decoder: Final = msgspec.json.Decoder(tuple[int, ...])


def agree_on_members(
    me: int, epoch: int, members: Sequence[int], note: str = "", *, is_planned: bool = False
) -> Steps:
    """Go through attempts until one is complete, refused, goes on without this member, or too few members come.

    Args:
        me: This member.
        epoch: The last epoch that this member has groups of; see `settle`.
        members: Its members, who decide on the next one.
        note: What the other members are to know of this one.
        is_planned: Whether all members are there, and the groups of the last epoch serve until the change is decided.
            A planned change has one attempt.

    Returns:
        An `End`.
    """
    electorate = tuple(members)
    number, failure = epoch, ""
    while True:
        number += 1
        state = yield from _state_of(number)
        if state == "open":
            try:
                decided = yield from _decide(me, number, electorate, note, is_planned=is_planned)
            except GeneratorExit:
                raise
            except BaseException as error:
                # If this member is chosen all the same, the others find this at once, unless it comes back
                # before and confirms.
                yield Tell(_key(number, "confirm", me), _interrupted(me, error))
                raise
            if isinstance(decided, Late):
                return msgspec.structs.replace(decided, failure=failure)
            if isinstance(decided, Refused):
                return decided
            if decided is not None and (is_planned or not decided.is_planned):
                if me not in decided.voters:
                    return Excluded(number, decided.members)
                ended = yield from _take_part(me, number, decided)
                if isinstance(ended, Complete):
                    return msgspec.structs.replace(ended, last=(epoch, electorate))
                if not isinstance(ended, str):
                    return ended
                failure = ended
                continue
            # A rebuild takes part in no planned change of others: it gives that up, unless it is complete.
            state = "failed" if decided is None else (yield from _overtake(number, decided))
        if state != "failed":
            if me in state.members:
                raise InternalError(f"member {me} is one of epoch {number} and goes on from epoch {epoch}")
            return Excluded(number, state.members)


def join(me: int, note: str) -> Steps:
    """Wait until a planned change has a place for this process, and take part in it; see `agree_on_members`.

    Returns:
        `Complete` once the change is decided; `Refused` if a member could not go on or did not come, or, with number 0,
        if nobody will ever take it in; `Late` if nobody has invited it in time.
    """
    try:
        invitation = yield from _await_invitation(me, note)
    except GeneratorExit:
        raise
    except BaseException as error:
        yield from _stop_waiting(me, _interrupted(me, error), Tell)
        raise
    if isinstance(invitation, (Late, Refused)):
        return invitation
    number, decided = invitation
    end = yield from _take_part(me, number, decided)
    if isinstance(end, Late):
        # One member gave the attempt up because members are missing, before another one chose the members.
        who = f"member(s) {_listed(end.missing)}" if end.missing else "all that are to join"
        return Refused(number, f"the change was given up: {who} did not come in time, or ended")
    if not isinstance(end, Prepared):
        return end
    try:
        decision = yield from commit(me, number, end.members)
    except GeneratorExit:
        raise
    except BaseException as error:
        yield Tell(_key(number, "decision"), _interrupted(me, error))
        raise
    if decision != OK:
        yield Discard()
        return Refused(number, f"the change was given up: {decision.removeprefix(LOST)}")
    return Complete(number, end.members, (0, ()))


def _await_invitation(me: int, note: str) -> Steps:
    """Return the attempt that has a place for a process, and what was decided in it; or `Late` or `Refused`."""
    yield Put(f"joining/{me}", msgspec.json.encode(Presence((), note)).decode())
    while True:
        found = yield Get((f"invited/{me}", f"refused/{me}"))
        if f"refused/{me}" in found:
            return Refused(0, found[f"refused/{me}"])
        if found:
            number = msgspec.json.decode(found[f"invited/{me}"], type=int)
            decided = yield Get((_key(number, "members"),))
            return number, _decided_decoder.decode(decided[_key(number, "members")])
        if (yield Pause(0, "invited")) == 2:
            yield from _stop_waiting(me, f"member {me} has given up waiting", Put)
            return Late(0, ())


def _stop_waiting(me: int, reason: str, say: type[Put | Tell]) -> Steps:
    """Keep this process from being chosen; if it has been chosen already, let that attempt fail.

    Voters look for `refused` after they write `invited`, and this looks for `invited` after it writes
    `refused`, so one of the two sees the other.
    """
    yield say(f"refused/{me}", reason)
    found = yield Get((f"invited/{me}",))
    if found:
        yield say(_key(msgspec.json.decode(found[f"invited/{me}"], type=int), "confirm", me), reason)


def settle(number: int) -> Steps:
    """Return whether an attempt in which this member has made its groups is complete; an undecided one fails.

    A member that was interrupted after it had made them must go on from the epoch that the others are in.
    """
    found = yield Get((_key(number, "members"),))
    decided = _decided_decoder.decode(found[_key(number, "members")])
    reason = _OVERTAKEN if decided.is_planned else f"{LOST}a member was interrupted"
    return (yield from _overtake(number, decided, reason)) != "failed"


def commit(me: int, number: int, members: tuple[int, ...]) -> Steps:
    """Return the decision on a prepared change, once all of its members have committed: `OK`, or why it is given up."""
    yield Put(_key(number, "commit", me), OK)
    return (yield from _gather(number, "commit", "decision", members))


def await_decision(number: int) -> Steps:
    """Return the decision on a prepared change that this member leaves; it has no part in it."""
    while True:
        found = yield Get((_key(number, "decision"),))
        if found:
            return found[_key(number, "decision")]
        if (yield Pause(number, "decision")) == 2:
            return (yield Swap(_key(number, "decision"), f"{LOST}nobody has decided"))


def abort(number: int, reason: str) -> Steps:
    """Give a prepared change up, unless it is decided; return the decision."""
    return (yield Swap(_key(number, "decision"), reason))


def decided_without(me: int, epoch: int, known: Callable[[str], str | None]) -> Excluded | None:
    """Return the attempt behind `epoch` in which the others go on without a member; None if there is none so far.

    Decides nothing, so that it may be asked at any time.

    Args:
        me: The member.
        epoch: The last epoch that it knows to be complete.
        known: Returns the value of a key, or None.
    """
    number = epoch
    while True:
        number += 1
        value = known(_key(number, "members"))
        go, result, decision = (known(_key(number, name)) for name in ("go", "result", "decision"))
        if any(each not in (None, OK) for each in (go, result, decision)):
            continue  # this attempt has failed, but a later one may not have
        if value is None:
            return None
        decided = _decided_decoder.decode(value)
        return None if me in decided.voters else Excluded(number, decided.members)


def _state_of(number: int) -> Steps:
    """Return "failed", "open", or what was decided in an attempt that is complete. A prepared change is given up."""
    names = ("decision", "result", "go", "members")
    known = yield Get(tuple(_key(number, name) for name in names))
    decision, result, go, _ = (known.get(_key(number, name)) for name in names)
    if result == OK:
        decided = _decided_decoder.decode(known[_key(number, "members")])
        if decided.is_planned and decision is None:
            decision = yield Swap(_key(number, "decision"), _OVERTAKEN)
        return decided if not decided.is_planned or decision == OK else "failed"
    return "open" if go in (None, OK) and result is None and decision is None else "failed"


def _outcomes(number: int, decided: _Decided) -> tuple[str, ...]:
    """Return the keys that are all `OK` once an attempt is complete, in the order in which they are decided."""
    names = ("go", "result", "decision") if decided.is_planned else ("go", "result")
    return tuple(_key(number, name) for name in names)


def _overtake(number: int, decided: _Decided, reason: str = _OVERTAKEN) -> Steps:
    """Give an attempt up in whichever step it is; return "failed", or what was decided if it is complete."""
    for key in _outcomes(number, decided):
        if (yield Swap(key, reason)) != OK:
            return "failed"
    return decided


def _take_part(me: int, number: int, decided: _Decided) -> Steps:
    """Return the end of an attempt for one of its voters; if the next one is to follow, why this one has failed.

    A voter that is interrupted lets the attempt fail unless it is complete.
    """
    try:
        return (yield from _vote(me, number, decided))
    except GeneratorExit:
        raise
    except BaseException as error:
        # The others find this where they wait for what this member has not said yet; where they come to rest
        # they look at `made` too.
        go, *others = _outcomes(number, decided)
        made = [_key(number, "made", me)] if me in decided.members else []
        for key in (_key(number, "confirm", me), go, *made, *others):
            if (yield Tell(key, _interrupted(me, error))) != OK:
                break
        raise


def _vote(me: int, number: int, decided: _Decided) -> Steps:
    """Go through the steps of an attempt; see `_take_part`."""
    members, is_planned = decided.members, decided.is_planned
    notes, left = yield from _notes(number, decided.voters)
    refusal = yield Judge(number, decided.chosen, notes)
    if left:
        refusal = refusal or f"member(s) {_listed(left)} no longer wait to join"
    yield Put(_key(number, "confirm", me), refusal or OK)
    go = yield from _gather(number, "confirm", "go", decided.voters)
    if go != OK:
        return go.removeprefix(LOST) if go.startswith(LOST) and not is_planned else _given_up(number, go)
    if not is_planned:
        yield TearDown()
    if me in members:
        failure = yield Build(number, members)
        yield Put(_key(number, "made", me), failure or OK)
    result = yield from _gather(number, "made", "result", members)
    if result != OK:
        yield Discard()
        reason = result.removeprefix(LOST)
        return reason if result.startswith(LOST) and not is_planned else Refused(number, reason)
    return Prepared(number, members) if is_planned else Complete(number, members, (number, members))


def _notes(number: int, members: tuple[int, ...]) -> Steps:
    """Return the notes of voters, those that join included, and which of these have gone; invite them."""
    found = yield Get(
        tuple(key for each in members for key in (_key(number, "present", each), f"joining/{each}"))
    )
    notes, joining = {}, []
    for member in members:
        present = found.get(_key(number, "present", member))
        if present is None:
            present = found[f"joining/{member}"]
            yield Put(f"invited/{member}", str(number))
            joining.append(member)
        notes[member] = _presence_decoder.decode(present).note
    refused = (yield Get(tuple(f"refused/{member}" for member in joining))) if joining else ()
    return notes, [member for member in joining if f"refused/{member}" in refused]


def _interrupted(me: int, error: BaseException) -> str:
    return f"{LOST}member {me} was interrupted ({type(error).__name__})"


def _decide(me: int, number: int, electorate: tuple[int, ...], note: str, *, is_planned: bool) -> Steps:
    """Return what the first member that could decide has chosen; `Late` or `Refused` without a decision.

    Return None if others had planned a change in this attempt and gave it up: another attempt follows.
    """
    told: frozenset[int] | None = None
    waited = 0
    while True:
        dead: frozenset[int] = yield Dead()
        if dead != told:
            presence = Presence(tuple(sorted(dead)), note)
            yield Put(_key(number, "present", me), msgspec.json.encode(presence).decode())
            told = dead
        keys = {member: _key(number, "present", member) for member in electorate}
        found = yield Get((_key(number, "go"), _key(number, "members"), *keys.values()))
        if _key(number, "members") in found:
            return _decided_decoder.decode(found[_key(number, "members")])
        if _key(number, "go") in found:
            # Only planned changes are given up so early.
            return _given_up(number, found[_key(number, "go")]) if is_planned else None
        present = {
            member: _presence_decoder.decode(found[key]) for member, key in keys.items() if key in found
        }
        ended = dead.union(*(each.dead for each in present.values()))
        alive = tuple(member for member in present if member not in ended)
        silent = tuple(member for member in electorate if member not in present and member not in ended)
        is_enough = not silent or (waited > 0 and is_majority(alive, electorate))
        gone = tuple(sorted(ended.intersection(electorate))) if is_planned else ()
        if is_enough and not (is_planned and (silent or gone)):
            chosen = yield Choose(alive)
            if chosen is not None:
                leave = (member for member in electorate if is_planned and member not in chosen.members)
                decided = _Decided(chosen, (*chosen.members, *leave), is_planned)
                value = yield Swap(_key(number, "members"), msgspec.json.encode(decided).decode())
                return _decided_decoder.decode(value)
        if gone or (waited == 2 and is_planned):
            # This ends the attempt for all members; the next planned change is another attempt.
            reason = LATE + msgspec.json.encode(gone or silent).decode()
            return _given_up(number, (yield Swap(_key(number, "go"), reason)))
        if waited == 2:
            return Late(number, silent)
        waited = max(waited, (yield Pause(number, "members")))


def _given_up(number: int, reason: str) -> Late | Refused:
    """Return the end of a planned change that was given up before it was prepared."""
    if not reason.startswith(LATE):
        return Refused(number, reason.removeprefix(LOST))
    return Late(number, _late_decoder.decode(reason.removeprefix(LATE)))


def is_majority(alive: Sequence[int], electorate: Sequence[int]) -> bool:
    """Return whether `alive` are more than half of `electorate`: of two such sets, one member is in both."""
    return 2 * len(alive) > len(electorate)


def _gather(number: int, what: str, outcome: str, members: tuple[int, ...]) -> Steps:
    """Return the outcome of a step that each member records: `OK`, or the first reason that was found."""
    keys = {member: _key(number, what, member) for member in members}
    while True:
        found = yield Get((_key(number, outcome), *keys.values()))
        if _key(number, outcome) in found:
            return found[_key(number, outcome)]
        said = [found[key] for key in keys.values() if key in found]
        # A reason without `LOST` comes first: a member gives it for itself, and the others then often find
        # only that this member is gone.
        reasons = sorted((each for each in said if each != OK), key=lambda each: each.startswith(LOST))
        reason = next(iter(reasons), OK if len(said) == len(members) else "")
        if not reason:
            missing = [member for member, key in keys.items() if key not in found]
            dead: frozenset[int] = yield Dead()
            gone = dead.intersection(missing)
            if gone:
                reason = f"{LOST}member(s) {_listed(gone)} ended"
            elif (yield Pause(number, outcome)) == 2:
                reason = f"{LOST}member(s) {_listed(missing)} did not answer"
        if reason:
            return (yield Swap(_key(number, outcome), reason))


def _key(number: int, name: str, member: int | None = None) -> str:
    return f"{number}/{name}" if member is None else f"{number}/{name}/{member}"


def _listed(members: Iterable[int]) -> str:
    return ", ".join(str(member) for member in sorted(members))
