"""Explore every order in which the ranks of an agreement can be scheduled, crash, give up waiting and be interrupted.

A state is what the store holds and where each rank's generator is, with its local variables. Two ways to the same state
are explored once. What only its own rank notices is done together with the step before it.
"""

from __future__ import annotations

import dataclasses
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
        reads_singly: Whether others may write between the answers to the keys of one `Get`, as on a store. There are
            many more states then.
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
    reads_singly: bool = False
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


@dataclasses.dataclass(frozen=True, eq=False)
class _Place:
    """Where a rank is. There is one object for each place, so that they are compared at once.

    Attributes:
        told: One series of answers that leads there.
        wants: What it has yielded; None at its end. If it reads singly, a `Get` has the keys that are left.
        end: What it has returned.
        is_planned: Whether it plans a change, where it agrees on members; else None.
    """

    told: tuple[Any, ...]
    wants: Any
    end: End | None
    is_planned: bool | None = None


class _Program:
    """The program of one rank as a graph of places. A generator cannot be copied: each edge is replayed, once."""

    def __init__(self, make: Callable[[], Any], refusal: str, reads_singly: bool) -> None:
        self._make = make
        self._refusal = refusal
        self._reads_singly = reads_singly
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
        read: dict[str, str] = {}
        try:
            wants = _next(generator, None, self._refusal)
            for each in told:
                answer = each
                if self._reads_singly and isinstance(wants, Get) and each != _STRUCK:
                    read |= each
                    if wants.keys[1:]:
                        wants = Get(wants.keys[1:])
                        continue
                    answer = read
                wants, read = _next(generator, answer, self._refusal), {}
        except StopIteration as stop:
            return self._places.setdefault(repr(stop.value), _Place(told, None, stop.value))
        parts, inner, is_planned = [repr((wants, read))], generator, None
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


class _Store:
    """What the store holds, once for each content.

    Attributes:
        held: The values by their keys.
        relevant: What decides how ranks go on: behind the outcome of a step nobody asks who has said what in it. Stores
            for which that is equal share it.
    """

    def __init__(self, held: dict[str, str], relevant: _Relevant) -> None:
        self.held = held
        self.relevant = relevant
        self.after: dict[tuple[str, str], _Store] = {}


class _Relevant:
    """Stands for what `_Store.relevant` says; it is equal to itself alone, which is compared at once."""


class _Stores:
    """Every store that was met.

    Args:
        all_count: Whether every key counts, because a rank may have read an outcome before it was there and reads now
            who has said what.
    """

    def __init__(self, all_count: bool) -> None:
        self._all_count = all_count
        self._stores: dict[tuple[tuple[str, str], ...], _Store] = {}
        self._relevant: dict[tuple[tuple[str, str], ...], _Relevant] = {}
        self.empty = self._store({})

    def put(self, store: _Store, key: str, value: str) -> _Store:
        """Return what `store` is once `key` has this value."""
        found = store.after.get((key, value))
        if found is None:
            found = store.after[key, value] = self._store({**store.held, key: value})
        return found

    def _store(self, held: dict[str, str]) -> _Store:
        content = tuple(sorted(held.items()))
        found = self._stores.get(content)
        if found is None:
            counts = content if self._all_count else _relevant(content)
            relevant = self._relevant.setdefault(counts, _Relevant())
            found = self._stores[content] = _Store(held, relevant)
        return found


def _relevant(content: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    keys = {key for key, _ in content}
    outcomes = {"present": "members", "confirm": "go", "made": "result", "commit": "decision"}

    def is_over(key: str) -> bool:
        number, step, *member = key.split("/")
        return bool(member) and f"{number}/{outcomes[step]}" in keys

    return tuple((key, value) for key, value in content if not is_over(key))


class _State(NamedTuple):
    """What tells two states apart.

    Attributes:
        relevant: What counts of the store.
        places: Where each rank is; None if it has crashed.
        building: Attempt and rank, of the ranks that have begun to build.
        give_ups: How often ranks may still give up.
        strikes: How often they may still be interrupted.
        stirred: Ranks that go on, for which something has changed since they last paused: only these look again without
            a time-out. A bit for each.
    """

    relevant: _Relevant
    places: tuple[_Place | None, ...]
    building: frozenset[tuple[int, int]]
    give_ups: int
    strikes: int
    stirred: int


class _Step(NamedTuple):
    """What a rank may do next.

    Attributes:
        place: Where it is then.
        store: What the store holds then.
        starts: The attempt for which it begins to build; None if it does not.
        is_struck: Whether it is interrupted.
        has_given_up: Whether it has waited long enough although others may go on.
        has_paused: Whether it looks again at once only when something changes.
    """

    place: _Place
    store: _Store
    starts: tuple[int, int] | None = None
    is_struck: bool = False
    has_given_up: bool = False
    has_paused: bool = False


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
    singly = limits.reads_singly
    programs = [
        _Program(partial(make, me), REFUSAL if me in limits.refusing else "", singly) for me in everybody
    ]
    programs += [_Program(partial(_joining, members + each), "", singly) for each in range(limits.joiners)]
    return _Explorer(programs, limits).explore()


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


class _Explorer:
    """Explores all runs of some programs."""

    def __init__(self, programs: list[_Program], limits: Limits) -> None:
        self._programs = programs
        self._limits = limits
        self._stores = _Stores(limits.reads_singly)
        # What a rank may do depends on its own place, on the store and on little else: it is found once.
        self._steps: dict[Any, tuple[_Step, ...]] = {}

    def explore(self) -> Result:
        """Do what `explore` does."""
        places = tuple(program.start for program in self._programs)
        limits, empty = self._limits, self._stores.empty
        start = _State(empty.relevant, places, frozenset(), limits.give_ups, limits.strikes, 0)
        result, seen, stack = Result(), {start}, [(start, empty)]
        while stack:
            state, store = stack.pop()
            result.states += 1
            _check(state, store, limits)
            is_over = True
            for following in self._following(state, store):
                is_over = False
                if following[0] not in seen:
                    seen.add(following[0])
                    stack.append(following)
            if is_over:
                _check_over(state)
                _count(state, result)
        return result

    def _following(self, state: _State, store: _Store) -> Iterator[tuple[_State, _Store]]:
        running = [(me, place) for me, place in enumerate(state.places) if place and place.end is None]
        crashed = [me for me, place in enumerate(state.places) if place is None]
        everybody = sum(1 << me for me, _ in running)
        has_moved = False
        for me, place in running:
            for step in self._steps_of(me, place, state, store, crashed):
                has_moved = has_moved or not (step.is_struck or step.has_given_up)
                yield _stepped(state, me, step, everybody), step.store
        if not has_moved:
            # All wait: time passes, and each of them may be the first to have waited long enough.
            all_serve = all(isinstance(place.wants, _Serve) for _, place in running)
            for me, place in running:
                for answer in (False,) if all_serve else (1, 2) if isinstance(place.wants, Pause) else ():
                    step = _Step(self._programs[me].after(place, answer), store, has_paused=not all_serve)
                    yield _stepped(state, me, step, everybody), store
        if len(crashed) < self._limits.crashes:
            for me, _ in running:
                places = (*state.places[:me], None, *state.places[me + 1 :])
                yield state._replace(places=places, stirred=everybody & ~(1 << me)), store

    def _steps_of(
        self, me: int, place: _Place, state: _State, store: _Store, crashed: list[int]
    ) -> tuple[_Step, ...]:
        others: Any = None
        if isinstance(place.wants, Pause):
            others = state.stirred >> me & 1
        elif isinstance(place.wants, Dead):
            others = tuple(crashed)
        elif isinstance(place.wants, Build):
            others = tuple(crashed), state.building
        key = place, store, others, bool(state.strikes), bool(state.give_ups)
        found = self._steps.get(key)
        if found is None:
            found = self._steps[key] = tuple(self._find_steps(me, place, state, store, frozenset(crashed)))
        return found

    def _find_steps(
        self, me: int, place: _Place, state: _State, store: _Store, crashed: frozenset[int]
    ) -> Iterator[_Step]:
        wants, after = place.wants, partial(self._programs[me].after, place)
        if isinstance(wants, Build) and (wants.number, me) not in state.building:
            yield _Step(place, store, starts=(wants.number, me))
            return
        for answer in self._answers(me, place, state, store, crashed):
            written = store
            if isinstance(wants, Put):
                written = self._stores.put(store, wants.key, wants.value)
            elif isinstance(wants, (Swap, Tell)):
                written = self._stores.put(store, wants.key, answer)
            yield _Step(after(answer), written, has_paused=isinstance(wants, Pause))
        if state.strikes and place.is_planned is not None and not isinstance(wants, Tell):
            yield _Step(after(_STRUCK), store, is_struck=True, has_paused=isinstance(wants, Pause))
        if isinstance(wants, Pause) and state.give_ups:
            for waited in (1, 2):
                yield _Step(after(waited), store, has_given_up=True, has_paused=True)

    def _answers(
        self, me: int, place: _Place, state: _State, store: _Store, crashed: frozenset[int]
    ) -> Iterator[Any]:
        """Yield what a rank may be told next."""
        wants, held, limits = place.wants, store.held, self._limits
        if isinstance(wants, Choose):
            yield Chosen(wants.alive) if not place.is_planned else self._choice(wants, held)
        elif isinstance(wants, Put):
            yield None
        elif isinstance(wants, Get):
            yield {key: held[key] for key in wants.keys[: 1 if limits.reads_singly else None] if key in held}
        elif isinstance(wants, _Serve):
            if f"broken/{wants.number}" in held:
                yield True
        elif isinstance(wants, (Swap, Tell)):
            is_kept = not (limits.overwrites and wants.key.endswith(limits.overwrites))
            yield held.get(wants.key, wants.value) if is_kept else wants.value
        elif isinstance(wants, Dead):
            yield crashed
        elif isinstance(wants, Pause):
            if state.stirred >> me & 1:
                yield 0
        elif isinstance(wants, Build):
            if me in limits.failing:
                yield "there is no memory"
            elif all((wants.number, member) in state.building for member in wants.members):
                yield ""
            elif crashed.intersection(wants.members) or _has_left(wants, held):
                yield f"{protocol.LOST}a member is gone"
        else:
            raise TypeError(f"there is no operation {wants!r}")

    def _choice(self, wants: Choose, held: Mapping[str, str]) -> Chosen | None:
        joiners = tuple(
            me
            for me in range(self._limits.members, len(self._programs))
            if f"joining/{me}" in held and f"refused/{me}" not in held and f"invited/{me}" not in held
        )
        stay = tuple(member for member in wants.alive if member not in self._limits.leavers)
        return None if len(joiners) < self._limits.joiners else Chosen(stay + joiners)


def _stepped(state: _State, me: int, step: _Step, everybody: int) -> _State:
    """Return the state behind a step of rank `me`; `everybody` are the ranks that go on before it."""
    places = (*state.places[:me], step.place, *state.places[me + 1 :])
    stirred = state.stirred
    if step.has_paused:
        stirred &= ~(1 << me)
    elif step.store.relevant is not state.relevant:
        stirred = everybody
    if step.place.end is not None:
        stirred &= ~(1 << me)
    building = state.building if step.starts is None else state.building | {step.starts}
    give_ups, strikes = state.give_ups - step.has_given_up, state.strikes - step.is_struck
    return _State(step.store.relevant, places, building, give_ups, strikes, stirred)


def _count(state: _State, result: Result) -> None:
    """Count the end of a run."""
    ends = [place.end for place in state.places if place]
    end = tuple("crashed" if place is None else _shown(place.end) for place in state.places)
    result.ends[end] = result.ends.get(end, 0) + 1
    result.reasons.update(end.reason for end in ends if isinstance(end, protocol.Refused))


def _has_left(wants: Build, store: Mapping[str, str]) -> bool:
    """Return whether the step has ended without this rank, or a member that is needed has left it."""
    keys = [f"{wants.number}/result", *(f"{wants.number}/made/{member}" for member in wants.members)]
    return any(store.get(key, protocol.OK) != protocol.OK for key in keys)


def _check(state: _State, store: _Store, limits: Limits) -> None:
    if any(state.places[me] for me in limits.refusing):
        # What was torn down would be torn down already: a rank does that together with the step before `Build`.
        building = [me for me, place in enumerate(state.places) if place and isinstance(place.wants, Build)]
        assert not building, f"ranks {building} build though {limits.refusing} refuse"
    if all(place is None or place.end is None for place in state.places):
        return
    memberships: dict[int, set[tuple[int, ...]]] = {}
    for me, place in enumerate(state.places):
        end = place.end if place else None
        if isinstance(end, protocol.Late) and me >= limits.members:
            assert end == protocol.Late(0, ()), (
                f"rank {me} has taken part in attempt {end.number}, and ends with {end}"
            )
        if isinstance(end, protocol.Complete):
            assert me in end.members, f"rank {me} is none of {end.members}"
            memberships.setdefault(end.number, set()).add(end.members)
            for member in end.members:
                made = store.held.get(f"{end.number}/made/{member}")
                assert made == protocol.OK, f"epoch {end.number} is complete, rank {member} has made {made}"
    assert all(len(found) == 1 for found in memberships.values()), f"several memberships: {memberships}"
    completed = sorted(memberships)
    assert len(completed) < 2, f"several epochs follow the same one: {memberships}"


def _check_over(state: _State) -> None:
    waiting = [me for me, place in enumerate(state.places) if place and place.end is None]
    assert not waiting, f"ranks {waiting} wait for ever"
