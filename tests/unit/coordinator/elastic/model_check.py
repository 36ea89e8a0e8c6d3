"""Explore every order in which the ranks of an agreement can be scheduled, crash, give up waiting and be interrupted.

A state is what the store holds and where each rank's generator is, with its local variables. Two ways to the same state
are explored once. What only its own rank notices is done together with the step before it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

from coordinator.elastic import protocol
from coordinator.elastic.protocol import (
    Build,
    Choose,
    Chosen,
    Dead,
    Discard,
    End,
    Get,
    Judge,
    Pause,
    Put,
    Swap,
    TearDown,
    Tell,
)

__all__ = ["REFUSAL", "Gone", "Limits", "Result", "explore"]

REFUSAL: Final = "it has no place for them"
"""Why a rank cannot go on with what was chosen."""


@dataclasses.dataclass(frozen=True)
class Limits:
    """What may happen in the explored runs.

    Attributes:
        crashes: How many ranks may crash, each at any step.
        strikes: How often members are interrupted, each at any step, and call `rebuild` once more.
        give_ups: How often a rank that waits may have waited long enough although others go on.
        overwrites: Keys that end with this are overwritten by `Swap`: a seeded bug. Empty for none.
        joiners: How many ranks join in a planned change.
        leavers: Members that leave in a planned change.
        is_planned: Whether it is one.
        rebuilders: Members that call `rebuild` while the others plan a change; these do so once that has failed.
        forgets: Whether interrupted members forget what they have built: a seeded bug.
        failing: Ranks that cannot create their groups, for reasons of their own.
        refusing: Ranks that cannot go on with what was chosen, and say so before anything has changed.
        strays: Members that call `rebuild` where they should commit what is prepared.
        members: How many there are; `explore` fills it in.
    """

    crashes: int = 0
    strikes: int = 0
    give_ups: int = 0
    overwrites: str = ""
    joiners: int = 0
    leavers: tuple[int, ...] = ()
    is_planned: bool = False
    rebuilders: tuple[int, ...] = ()
    failing: tuple[int, ...] = ()
    refusing: tuple[int, ...] = ()
    forgets: bool = False
    strays: tuple[int, ...] = ()
    members: int = 0


@dataclasses.dataclass
class Result:
    """What was found.

    Attributes:
        states: How many states there are.
        ends: How often all ranks have ended in each way.
        reasons: Why ranks were refused.
    """

    states: int = 0
    ends: dict[tuple[str, ...], int] = dataclasses.field(default_factory=dict)
    reasons: set[str] = dataclasses.field(default_factory=set)


# Local variables that are not used any more where a generator rests: they would only tell equal states apart.
_STALE: Final = (
    *(
        "alive",
        "chosen",
        "ended",
        "failure",
        "found",
        "gone",
        "keys",
        "known",
        "notes",
        "present",
        "presences",
    ),
    *("refusal", "said", "silent", "is_enough", "present", "value"),
)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a rank is.

    Attributes:
        told: One series of answers that leads there.
        wants: What it has yielded; None at its end.
        end: What it has returned.
        is_planned: Whether it plans a change, where it agrees on members; else None.
    """

    told: tuple[Any, ...]
    wants: Any
    end: End | None
    is_planned: bool | None = None


class _Program:
    """The program of one rank as a graph of places. A generator cannot be copied: each edge is replayed, once."""

    def __init__(self, make: Callable[[], Any], refusal: str = "") -> None:
        self._make = make
        self._refusal = refusal
        self._places: dict[str, _Place] = {}
        self._edges: dict[tuple[int, Any], _Place] = {}
        self.start = self._place(())

    def after(self, place: _Place, answer: Any) -> _Place:
        """Return where the rank is once it was told `answer`."""
        edge = id(place), repr(answer)
        found = self._edges.get(edge)
        if found is None:
            found = self._edges[edge] = self._place((*place.told, answer))
        return found

    def _place(self, told: tuple[Any, ...]) -> _Place:
        generator = self._make()
        try:
            wants = _next(generator, None, self._refusal)
            for answer in told:
                wants = _next(generator, answer, self._refusal)
        except StopIteration as stop:
            return self._places.setdefault(repr(stop.value), _Place(told, None, stop.value))
        parts, inner, is_planned = [repr(wants)], generator, None
        while inner is not None:
            local = {
                name: value for name, value in inspect.getgeneratorlocals(inner).items() if name not in _STALE
            }
            parts.append(f"{inner.gi_frame.f_lasti} {sorted(local.items())!r}")
            is_planned = local.get("is_planned", is_planned)
            inner = inner.gi_yieldfrom
        return self._places.setdefault("; ".join(parts), _Place(told, wants, None, is_planned))


class _StruckError(Exception):
    """Interrupts a rank."""


_STRUCK: Final = "struck"
"""The answer by which a rank is interrupted."""


class Gone(NamedTuple):
    """The end of a rank that was interrupted in a planned change."""

    number: int


class _Serve(NamedTuple):
    """Have groups of an epoch, until somebody breaks them; then return True. Return False once all others are done."""

    number: int


def _next(generator: Any, answer: Any, refusal: str) -> Any:
    """Tell the generator `answer`, and do what concerns its rank alone; return what it wants next.

    It judges what was chosen with `refusal`.
    """
    wants = generator.throw(_StruckError()) if answer == _STRUCK else generator.send(answer)
    while isinstance(wants, (TearDown, Discard, Judge)):
        wants = generator.send(refusal if isinstance(wants, Judge) else None)
    return wants


class _State(NamedTuple):
    store: tuple[tuple[str, str], ...]
    places: tuple[_Place, ...]
    crashed: frozenset[int]
    building: frozenset[tuple[int, int]]
    give_ups: int
    # Ranks for which something has changed since they last paused: only these look again without a time-out.
    stirred: frozenset[int]
    strikes: int = 0

    def key(self) -> tuple[Any, ...]:
        """Return what tells this state from others. Where a rank that has crashed was does not matter."""
        places = tuple(-1 if me in self.crashed else id(place) for me, place in enumerate(self.places))
        running = frozenset(
            me for me, place in enumerate(self.places) if place.end is None and me not in self.crashed
        )
        stirred = self.stirred & running
        return (
            _relevant(self.store),
            places,
            self.crashed,
            self.building,
            self.give_ups,
            stirred,
            self.strikes,
        )


@functools.cache
def _relevant(store: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return what decides how ranks go on: behind the outcome of a step nobody asks who has said what in it."""
    keys = {key for key, _ in store}
    outcomes = {"present": "members", "confirm": "go", "made": "result", "commit": "decision"}

    def is_over(key: str) -> bool:
        number, step, *member = key.split("/")
        return bool(member) and f"{number}/{outcomes[step]}" in keys

    return tuple((key, value) for key, value in store if not is_over(key))


def explore(members: int, limits: Limits) -> Result:
    """Explore all runs of `members` ranks that lose epoch 0 together.

    Raises:
        AssertionError: Two ranks have different members for one epoch, a rank is complete though another member has not
            built its groups, one is past what it does before it builds though another one refuses, ranks wait for each
            other for ever, or one that joins says that nobody has invited it though it has taken part.
    """
    limits = dataclasses.replace(limits, members=members)
    everybody = tuple(range(members))
    make: Callable[[int], Any] = lambda me: protocol.agree_on_members(me, 0, everybody)  # noqa: E731 - one of three
    if limits.is_planned:
        make = partial(_planned, members=everybody, limits=limits)
    elif limits.strikes:
        make = partial(_serving, everybody=everybody, limits=limits)
    programs = [_Program(partial(make, me), REFUSAL if me in limits.refusing else "") for me in everybody]
    programs += [_Program(partial(_joining, members + each)) for each in range(limits.joiners)]
    places = tuple(program.start for program in programs)
    start = _State((), places, frozenset(), frozenset(), limits.give_ups, frozenset(), limits.strikes)
    result, seen, stack = Result(), set[Any](), [start]
    while stack:
        state = stack.pop()
        key = state.key()
        if key in seen:
            continue
        seen.add(key)
        result.states += 1
        _check(state, limits)
        following = list(_following(state, programs, limits))
        if not following:
            _check_over(state)
            end = tuple(
                "crashed" if me in state.crashed else _shown(place.end)
                for me, place in enumerate(state.places)
            )
            result.ends[end] = result.ends.get(end, 0) + 1
            result.reasons.update(
                place.end.reason for place in state.places if isinstance(place.end, protocol.Refused)
            )
        stack += following
    return result


def _planned(me: int, members: tuple[int, ...], limits: Limits) -> Any:
    if me not in limits.rebuilders:
        try:
            end = yield from protocol.agree_on_members(me, 0, members, is_planned=True)
        except _StruckError:
            return Gone(0)
        if me not in limits.strays or not isinstance(end, protocol.Prepared):
            end = yield from _decided(me, end)
        has_failed = isinstance(end, (protocol.Refused, protocol.Late, protocol.Prepared))
        if not (has_failed and (limits.rebuilders or limits.strays)):
            return end
        del end  # it would tell equal states apart
    return (yield from protocol.agree_on_members(me, 0, members))


def _serving(me: int, everybody: tuple[int, ...], limits: Limits) -> Any:
    """Call `rebuild` until it returns groups that nobody breaks."""
    epoch, members = 0, everybody
    while True:
        try:
            end = yield from protocol.agree_on_members(me, epoch, members)
            if not isinstance(end, protocol.Complete):
                return end
            if not (yield _Serve(end.number)):
                return end
            epoch, members = end.number, end.members
        except _StruckError:
            built = yield from _built(me, epoch)
            if built and not limits.forgets and (yield from protocol.settle(built)):
                found = yield Get((f"{built}/members",))
                epoch, members = built, protocol._decided_decoder.decode(found[f"{built}/members"]).members
                yield Put(f"broken/{epoch}", "")
                del found
            del built


def _built(me: int, epoch: int) -> Any:
    """Return the last attempt behind `epoch` in which a member says that it has built; 0 if there is none."""
    found = yield Get(tuple(f"{number}/made/{me}" for number in range(epoch + 1, epoch + 9)))
    return max(
        (int(key.partition("/")[0]) for key, value in found.items() if value == protocol.OK), default=0
    )


def _joining(me: int) -> Any:
    is_planned = True  # noqa: F841 - marks where it may be interrupted
    try:
        return (yield from protocol.join(me, ""))
    except _StruckError:
        return Gone(0)


def _decided(me: int, end: End) -> Any:
    """Return how a planned change ends for a rank: it commits at once, or waits for the decision if it leaves."""
    if not isinstance(end, protocol.Prepared):
        return end
    if me in end.members:
        decision = yield from protocol.commit(me, end.number, end.members)
    else:
        decision = yield from protocol.await_decision(end.number)
    if decision != protocol.OK:
        return protocol.Refused(end.number, decision)
    is_left = me not in end.members
    return (
        protocol.Excluded(end.number, end.members)
        if is_left
        else protocol.Complete(end.number, end.members, (0, ()))
    )


def _shown(end: End | None) -> str:
    return (
        "waits" if end is None else f"{type(end).__name__} {end.number} {getattr(end, 'members', '')}".strip()
    )


def _following(state: _State, programs: list[_Program], limits: Limits) -> Iterator[_State]:
    store = dict(state.store)
    running = [me for me, place in enumerate(state.places) if place.end is None and me not in state.crashed]
    moved, everybody = False, frozenset(range(len(programs)))

    def told(me: int, answer: Any, **changed: Any) -> _State:
        place = programs[me].after(state.places[me], answer)
        places = (*state.places[:me], place, *state.places[me + 1 :])
        if isinstance(state.places[me].wants, Pause):
            changed["stirred"] = state.stirred - {me}
        elif _relevant(changed.get("store", state.store)) != _relevant(state.store):
            changed["stirred"] = everybody
        return state._replace(places=places, **changed)

    for me in running:
        if (
            isinstance(state.places[me].wants, Build)
            and (state.places[me].wants.number, me) not in state.building
        ):
            moved = True
            yield state._replace(building=state.building | {(state.places[me].wants.number, me)})
            continue
        for answer, changed in _answers(me, state, store, limits):
            moved = True
            yield told(me, answer, **changed)
        place = state.places[me]
        if state.strikes and place.is_planned is not None and not isinstance(place.wants, Tell):
            yield told(me, _STRUCK, strikes=state.strikes - 1)
        if isinstance(state.places[me].wants, Pause) and state.give_ups:
            for waited in (1, 2):
                yield told(me, waited, give_ups=state.give_ups - 1)
    if not moved:
        # All wait: time passes, and each of them may be the first to have waited long enough.
        if all(isinstance(state.places[me].wants, _Serve) for me in running):
            for me in running:
                yield told(me, False)
        for me in running:
            if isinstance(state.places[me].wants, Pause):
                yield told(me, 1)
                yield told(me, 2)
    if len(state.crashed) < limits.crashes:
        for me in running:
            yield state._replace(crashed=state.crashed | {me}, stirred=everybody)


def _answers(
    me: int, state: _State, store: dict[str, str], limits: Limits
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield what a rank may be told next, and what changes with it."""
    wants = state.places[me].wants
    if isinstance(wants, Choose) and not state.places[me].is_planned:
        yield Chosen(wants.alive), {}
    elif isinstance(wants, Choose):
        joiners = tuple(
            me
            for me in range(limits.members, len(state.places))
            if f"joining/{me}" in store and f"refused/{me}" not in store and f"invited/{me}" not in store
        )
        stay = tuple(member for member in wants.alive if member not in limits.leavers)
        yield (None if len(joiners) < limits.joiners else Chosen(stay + joiners)), {}
    elif isinstance(wants, Put):
        yield None, {"store": _sorted({**store, wants.key: wants.value})}
    elif isinstance(wants, Get):
        yield {key: store[key] for key in wants.keys if key in store}, {}
    elif isinstance(wants, _Serve):
        if f"broken/{wants.number}" in store:
            yield True, {}
    elif isinstance(wants, (Swap, Tell)):
        is_kept = wants.key in store and not (limits.overwrites and wants.key.endswith(limits.overwrites))
        value = store[wants.key] if is_kept else wants.value
        yield value, {"store": _sorted({**store, wants.key: value})}
    elif isinstance(wants, Dead):
        yield state.crashed, {}
    elif isinstance(wants, Pause):
        if me in state.stirred:
            yield 0, {}
    elif isinstance(wants, Build):
        if me in limits.failing:
            yield "there is no memory", {}
        elif all((wants.number, member) in state.building for member in wants.members):
            yield "", {}
        elif state.crashed.intersection(wants.members) or _has_left(wants, store):
            yield f"{protocol.LOST}a member is gone", {}
    else:
        raise TypeError(f"there is no operation {wants!r}")


def _has_left(wants: Build, store: Mapping[str, str]) -> bool:
    """Return whether the step has ended without this rank, or a member that is needed has left it."""
    keys = [f"{wants.number}/result", *(f"{wants.number}/made/{member}" for member in wants.members)]
    return any(store.get(key, protocol.OK) != protocol.OK for key in keys)


def _sorted(store: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(store.items()))


def _check(state: _State, limits: Limits) -> None:
    if set(limits.refusing) - state.crashed:
        # What was torn down would be torn down already: a rank does that together with the step before `Build`.
        building = [me for me, place in enumerate(state.places) if isinstance(place.wants, Build)]
        assert not building, f"ranks {building} build though {limits.refusing} refuse"
    if all(place.end is None for place in state.places):
        return
    store = dict(state.store)
    memberships: dict[int, set[tuple[int, ...]]] = {}
    for me, place in enumerate(state.places):
        end = place.end
        if isinstance(end, protocol.Late) and me >= limits.members:
            assert end == protocol.Late(0, ()), (
                f"rank {me} has taken part in attempt {end.number}, and ends with {end}"
            )
        if isinstance(end, protocol.Complete):
            assert me in end.members, f"rank {me} is none of {end.members}"
            memberships.setdefault(end.number, set()).add(end.members)
            for member in end.members:
                made = store.get(f"{end.number}/made/{member}")
                assert made == protocol.OK, f"epoch {end.number} is complete, rank {member} has made {made}"
    assert all(len(found) == 1 for found in memberships.values()), f"several memberships: {memberships}"
    completed = sorted(memberships)
    assert len(completed) < 2, f"several epochs follow the same one: {memberships}"


def _check_over(state: _State) -> None:
    waiting = [me for me, place in enumerate(state.places) if place.end is None and me not in state.crashed]
    assert not waiting, f"ranks {waiting} wait for ever"
