"""`ParallelGroups.rebuild`: create the groups again, on the ranks that are left."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.world import Line, World
from coordinator.elastic.driver import Deadlines, Driver
from coordinator.elastic.layouts import LayoutRule, Placement
from coordinator.elastic.protocol import Complete, Excluded, Refused
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings, differences
from shm_broadcast.errors import CommTimeoutError, DisagreementError, ExcludedError, InternalError, UsageError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, this_process

__all__ = ["Change", "rebuild"]


class Change(msgspec.Struct, frozen=True):
    """What has changed with an epoch.

    Attributes:
        epoch: How often the members have changed, counting attempts that failed.
        lost: Old ranks that are gone, ascending: those whose process ended, and those that did not come.
        joined: New ranks of members that were none before, ascending.
        old_to_new: The new rank of each old rank that goes on.
        progress: What each new rank has passed as `progress`.
    """

    epoch: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    old_to_new: dict[int, int]
    progress: tuple[int, ...]


class _Note(msgspec.Struct, frozen=True):
    """What a rank tells the others in an attempt.

    Attributes:
        process: Its process.
        facts: What must be equal on all ranks.
        progress: What the caller has passed.
    """

    process: ProcessIdentity
    facts: dict[str, str]
    progress: int


_note_decoder: Final = msgspec.json.Decoder(_Note)


class Rebuildable(Protocol):
    """All groups of an epoch: `ParallelGroups`."""

    @property
    def layout(self) -> ParallelLayout:
        """Return the layout of the groups."""

    def destroy(self) -> None:
        """Destroy the groups. Idempotent."""

    def destroy_everything(self) -> None:
        """Destroy the groups, and the world group also if it is not theirs. Idempotent."""


Groups = TypeVar("Groups", bound=Rebuildable)

Create = Callable[[World, ParallelLayout, float], Groups]
"""Creates all groups of a layout in a world, within some seconds."""


def rebuild(
    old: Groups,
    world: World,
    processes: Mapping[int, ProcessIdentity],
    settings: CoordinatorSettings,
    rule: LayoutRule,
    progress: int,
    min_members: int,
    timeout_s: float,
    create: Create[Groups],
) -> tuple[Groups, Change]:
    """Agree with the other ranks on who is left, and create their groups. See `ParallelGroups.rebuild`."""
    line = world.line()
    facts = {
        "layout": str(old.layout),
        "min_members": str(min_members),
        "timeout_s": str(timeout_s),
        **{f"setting {field}": str(value) for field, value in settings.agreed().items()},
    }
    note = _Note(this_process(), facts, progress)
    deadlines = Deadlines(timeout_s)

    def within(own: World, layout: ParallelLayout) -> Groups:
        return create(own, layout, deadlines.step_s)

    actions = _Actions(old, line, rule, min_members, note, within)
    where = f"rebuild (rank {world.rank} of epoch {line.epoch})"
    others = {line.members[rank]: process for rank, process in processes.items() if rank != world.rank}
    with closing(PeerWatch(note.process, others)) as watch:
        driver = Driver(line.store, line.me, watch, actions, deadlines, where)
        end = driver.run(line.epoch, line.members, msgspec.json.encode(note).decode())
        if isinstance(end, Complete):
            return actions.made(), actions.change(end)
        if isinstance(end, Excluded):
            raise ExcludedError(
                f"{where}: the others go on without this rank, as members {list(end.members)} of epoch {end.number}"
            )
        if isinstance(end, Refused):
            raise DisagreementError(f"{where}: {end.reason}")
        ranks = tuple(line.members.index(member) for member in end.missing)
        raise CommTimeoutError(
            f"{where}: rank(s) {', '.join(map(str, ranks))} did not come within {timeout_s:.1f} s, and are not known "
            "to have ended; without them there is no majority of the last members",
            missing=ranks,
        )


class _Actions(Generic[Groups]):
    """What this rank does for an agreement; see `Actions`."""

    def __init__(
        self,
        old: Groups,
        line: Line,
        rule: LayoutRule,
        min_members: int,
        note: _Note,
        create: Callable[[World, ParallelLayout], Groups],
    ) -> None:
        self._old = old
        self._line = line
        self._rule = rule
        self._min_members = min_members
        self._note = note
        self._create = create
        self._made: Groups | None = None
        self._world: World | None = None
        self._progress: tuple[int, ...] = ()

    def _placed(self, members: tuple[int, ...]) -> Placement:
        ranks = [self._line.members.index(member) for member in members]
        placed = self._rule(self._old.layout, tuple(sorted(ranks)))
        layout, kept = placed
        if not set(kept) <= set(ranks) or len(set(kept)) != len(kept) or layout.world_size != len(kept):
            raise UsageError(f"the layout rule has chosen ranks {list(kept)} of {sorted(ranks)} for {layout}")
        return Placement(layout, tuple(kept))

    def choose(self, alive: tuple[int, ...]) -> tuple[int, ...]:
        try:
            return tuple(self._line.members[rank] for rank in self._placed(alive).ranks)
        except UsageError:
            # All of them refuse, with the reason: every rank asks its own rule.
            return alive

    def judge(self, number: int, members: tuple[int, ...], notes: Mapping[int, str]) -> str:
        del number
        said = {member: _note_decoder.decode(notes[member]) for member in members}
        facts = {self._line.members.index(member): note.facts for member, note in said.items()}
        if any(each != self._note.facts for each in facts.values()):
            return f"ranks disagree: {'; '.join(differences(facts))}"
        if len(members) < self._min_members:
            return f"{len(members)} members are left, min_members is {self._min_members}"
        ranks = tuple(self._line.members.index(member) for member in members)
        try:
            placed = self._placed(members)
        except UsageError as error:
            return f"rank {self._line.members.index(self._line.me)} cannot go on with ranks {list(ranks)}: {error}"
        if placed.ranks != ranks:
            return (
                f"the layout rule chooses ranks {list(placed.ranks)} on one rank and {list(ranks)} on another: it must "
                "be a pure function of the layout and the ranks that are left"
            )
        return ""

    def tear_down(self) -> None:
        self._old.destroy_everything()

    def build(self, number: int, members: tuple[int, ...], notes: Mapping[int, str]) -> None:
        said = [_note_decoder.decode(notes[member]) for member in members]
        line = dataclasses.replace(self._line, epoch=number, members=members)
        store = dist.PrefixStore(f"epoch/{number}", self._line.store)
        fork_guard.protect(store)
        processes = {rank: note.process for rank, note in enumerate(said)}
        self._world = World(members.index(self._line.me), len(members), store, _nothing, processes, line)
        self._progress = tuple(note.progress for note in said)
        self._made = self._create(self._world, self._placed(members).layout)

    def discard(self) -> None:
        made, self._made = self._made, None
        world, self._world = self._world, None
        if made is not None:
            made.destroy()
        if world is not None:
            world.leave()

    def made(self) -> Groups:
        """Return the groups of the complete epoch."""
        if self._made is None:
            raise InternalError("an agreement is complete though this rank has made no groups")
        return self._made

    def change(self, end: Complete) -> Change:
        """Return what has changed with the complete epoch."""
        old = self._line.members
        old_to_new = {old.index(member): rank for rank, member in enumerate(end.members) if member in old}
        return Change(
            epoch=end.number,
            lost=tuple(rank for rank in range(len(old)) if rank not in old_to_new),
            joined=tuple(rank for rank, member in enumerate(end.members) if member not in old),
            old_to_new=old_to_new,
            progress=self._progress,
        )


def _nothing() -> None:
    """Do nothing: the store belongs to the world of the first epoch."""
