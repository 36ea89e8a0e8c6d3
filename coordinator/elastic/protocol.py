"""The agreement on the members of the next epoch, as a program without input and output.

`agree_on_members` yields what it wants done and gets the results: the driver does it on a store, and the model checker
of the tests explores every order in which ranks can be scheduled, crash and give up. `DESIGN.md` has the protocol under
"Elastic membership".
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

__all__ = [
    "Build",
    "Choose",
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
    "Presence",
    "Put",
    "Refused",
    "Swap",
    "TearDown",
    "agree_on_members",
]

OK: Final = "ok"
"""What a step that has succeeded is recorded as; everything else is the reason why it has not."""

LOST: Final = "lost "
"""Begins the reason of a step that ended because members are gone or silent: the next attempt goes on without them."""


class Put(msgspec.Struct, frozen=True):
    """Set a key that only this member writes."""

    key: str
    value: str


class Get(msgspec.Struct, frozen=True):
    """Return those of the keys that are set, with their values."""

    keys: tuple[str, ...]


class Swap(msgspec.Struct, frozen=True):
    """Set a key unless it is set; return the value that holds."""

    key: str
    value: str


class Dead(msgspec.Struct, frozen=True):
    """Return which members' processes have provably ended, as a frozen set."""


class Choose(msgspec.Struct, frozen=True):
    """Return which of the members that are alive go on, in the order of their new ranks."""

    alive: tuple[int, ...]


class Pause(msgspec.Struct, frozen=True):
    """Wait for a moment, as nothing has changed in a step of an attempt.

    Return 0, 1 if members that are silent have had their time to come, or 2 if this member has waited long enough.
    """

    number: int
    step: str


class Judge(msgspec.Struct, frozen=True):
    """Return why this member cannot go on with these members, or an empty text. Nothing has changed yet."""

    number: int
    members: tuple[int, ...]
    presences: dict[int, str]


class TearDown(msgspec.Struct, frozen=True):
    """Destroy the groups of the last epoch."""


class Build(msgspec.Struct, frozen=True):
    """Create the groups of these members, together with them; return why that has failed, or an empty text."""

    number: int
    members: tuple[int, ...]


class Discard(msgspec.Struct, frozen=True):
    """Destroy what `Build` has made."""


Operation: TypeAlias = Put | Get | Swap | Dead | Choose | Pause | Judge | TearDown | Build | Discard


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


class Excluded(msgspec.Struct, frozen=True):
    """The others go on without this member: it came too late, or has no place in their layout."""

    number: int
    members: tuple[int, ...]


class Refused(msgspec.Struct, frozen=True):
    """A member could not go on with the others, so nobody does. The groups of the last epoch are as they were."""

    number: int
    reason: str


class Late(msgspec.Struct, frozen=True):
    """Too few members have come in time."""

    number: int
    missing: tuple[int, ...]


End: TypeAlias = Complete | Excluded | Refused | Late

Steps: TypeAlias = Generator[Operation, Any, Any]

_presence_decoder: Final = msgspec.json.Decoder(Presence)
_members_decoder: Final = msgspec.json.Decoder(tuple[int, ...])


def agree_on_members(me: int, epoch: int, members: Sequence[int], note: str = "") -> Steps:
    """Go through attempts until one is complete, refused, goes on without this member, or too few members come.

    Args:
        me: This member.
        epoch: The last epoch that this member knows to be complete.
        members: Its members, who decide on the next one.
        note: What the other members are to know of this one.

    Returns:
        An `End`.
    """
    electorate, last = tuple(members), epoch
    number = epoch
    while True:
        number += 1
        known = yield Get(_keys(number, "members", "go", "result"))
        go, result = known.get(_key(number, "go")), known.get(_key(number, "result"))
        if go not in (None, OK) or result not in (None, OK):
            continue  # the attempt has failed
        if result == OK and me in _members(known[_key(number, "members")]):
            # This member was interrupted when all was done: the others know it as one of theirs.
            last, electorate = number, _members(known[_key(number, "members")])
            continue
        end = yield from _attempt(me, number, electorate, note)
        if isinstance(end, Complete):
            return msgspec.structs.replace(end, last=(last, electorate))
        if end is not None:
            return end


def _attempt(me: int, number: int, electorate: tuple[int, ...], note: str) -> Steps:
    """Return the end of one attempt; None if the next one is to follow."""
    decided = yield from _decide(me, number, electorate, note)
    if isinstance(decided, Late):
        return decided
    if me not in decided:
        return Excluded(number, decided)
    presences = yield Get(tuple(_key(number, "present", member) for member in decided))
    notes = {
        member: _presence_decoder.decode(presences[_key(number, "present", member)]).note
        for member in decided
    }
    refusal = yield Judge(number, decided, notes)
    yield Put(_key(number, "confirm", me), refusal or OK)
    go = yield from _gather(number, "confirm", "go", decided)
    if go != OK:
        return None if go.startswith(LOST) else Refused(number, go)
    yield TearDown()
    failure = yield Build(number, decided)
    yield Put(_key(number, "made", me), LOST + failure if failure else OK)
    result = yield from _gather(number, "made", "result", decided)
    if result != OK:
        yield Discard()
        return None
    return Complete(number, decided, (number, decided))


def _decide(me: int, number: int, electorate: tuple[int, ...], note: str) -> Steps:
    """Return the members that the first who could decide has chosen, or `Late`."""
    told: frozenset[int] | None = None
    waited = 0
    while True:
        dead: frozenset[int] = yield Dead()
        if dead != told:
            presence = Presence(tuple(sorted(dead)), note)
            yield Put(_key(number, "present", me), msgspec.json.encode(presence).decode())
            told = dead
        keys = {member: _key(number, "present", member) for member in electorate}
        found = yield Get((_key(number, "members"), *keys.values()))
        if _key(number, "members") in found:
            return _members(found[_key(number, "members")])
        present = {
            member: _presence_decoder.decode(found[key]) for member, key in keys.items() if key in found
        }
        ended = dead.union(*(each.dead for each in present.values()))
        alive = tuple(member for member in present if member not in ended)
        silent = [member for member in electorate if member not in present and member not in ended]
        if not silent or (waited and is_majority(alive, electorate)):
            chosen = yield Choose(alive)
            value = yield Swap(_key(number, "members"), msgspec.json.encode(chosen).decode())
            return _members(value)
        if waited == 2:
            return Late(number, tuple(silent))
        waited = max(waited, (yield Pause(number, "members")))


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
        reason = next((each for each in said if each != OK), OK if len(said) == len(members) else "")
        if not reason:
            missing = [member for member, key in keys.items() if key not in found]
            dead: frozenset[int] = yield Dead()
            gone = dead.intersection(missing)
            if gone:
                reason = f"{LOST}{_listed(gone)} ended"
            elif (yield Pause(number, outcome)) == 2:
                reason = f"{LOST}{_listed(missing)} did not answer"
        if reason:
            return (yield Swap(_key(number, outcome), reason))


def _key(number: int, name: str, member: int | None = None) -> str:
    return f"{number}/{name}" if member is None else f"{number}/{name}/{member}"


def _keys(number: int, *names: str) -> tuple[str, ...]:
    return tuple(_key(number, name) for name in names)


def _members(value: str) -> tuple[int, ...]:
    return _members_decoder.decode(value)


def _listed(members: Iterable[int]) -> str:
    return ", ".join(str(member) for member in sorted(members))
