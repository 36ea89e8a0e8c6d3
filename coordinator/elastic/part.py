"""What one process does for an agreement on members: it judges who goes on, and creates the next groups."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, Generic, Protocol, Self, TypeVar

import msgspec
import torch.distributed as dist

from coordinator.bootstrap import fork_guard
from coordinator.bootstrap.world import Line, World
from coordinator.elastic.ending import TELL_S, Ending, Meeting
from coordinator.elastic.layouts import LayoutRule, Placement, grown, merged, torn_replicas
from coordinator.elastic.protocol import Chosen
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings, differences, permitted
from shm_broadcast.errors import (
    CapabilityError,
    CommError,
    CommTimeoutError,
    CudaError,
    InternalError,
    NativeError,
    UsageError,
)
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, fork_count
from shm_broadcast.reports.log_fields import log_fields

__all__ = ["Change", "Groups", "Joiner", "Note", "Part", "Rebuildable", "Recipe", "note_of", "settings_facts"]

logger: logging.Logger = logging.getLogger(__name__)


class Change(msgspec.Struct, frozen=True):
    """What has changed with an epoch.

    Attributes:
        epoch: How often the members have changed, counting attempts that failed.
        lost: Old ranks that are no members any more, ascending: those that have ended, did not come, or have left.
        joined: New ranks of members that were none before, ascending.
        old_to_new: The new rank of each old rank that goes on.
        progress: What each new rank has passed as `progress`.
        places: The place of each new rank, a number that stays with its member: its rank in the first epoch, that of
            the member that it replaces, or a larger one for a process that has joined behind all. Ranks of
            the first epoch that are missing here can be replaced; see `join_distributed_environment`.
    """

    epoch: int
    lost: tuple[int, ...]
    joined: tuple[int, ...]
    old_to_new: dict[int, int]
    progress: tuple[int, ...]
    places: tuple[int, ...]


class Recipe(msgspec.Struct, frozen=True):
    """How to create groups like those of the last epoch, for a process that has none.

    Attributes:
        layout: Their layout.
        extra_groups: Names of the extra groups.
        has_queues: Whether `world` and `tp` have an `mq_broadcaster`.
        has_token_group: Whether `ep.token_group` is set.
        backend: torch backend of the device groups.
    """

    layout: ParallelLayout
    extra_groups: tuple[str, ...]
    has_queues: bool
    has_token_group: bool
    backend: str


class Note(msgspec.Struct, frozen=True):
    """What a process tells the others in an attempt.

    Attributes:
        process: The process.
        settings: Settings that must be equal on all ranks.
        facts: Further facts that must be equal on those that were members before.
        progress: What the caller has passed.
        place: Its place in the order of ranks.
        founders: How many members the first epoch had; 0 from one that joins.
        rank: Its rank in the last epoch; None for one that joins.
        recipe: None for one that joins.
        create_s: How long to create the groups at most, in seconds; equal on those that were members before, whose
            limit holds for those that join, too. 0 for one that joins.
    """

    process: ProcessIdentity
    settings: dict[str, str]
    facts: dict[str, str]
    progress: int
    place: int
    founders: int = 0
    rank: int | None = None
    recipe: Recipe | None = None
    create_s: float = 0.0


class Joiner(msgspec.Struct, frozen=True):
    """A process that waits to join.

    Attributes:
        member: Its number as a member.
        place: Its place in the order of ranks.
    """

    member: int
    place: int


_decoder: Final = msgspec.json.Decoder(Note)


def note_of(text: str) -> Note:
    """Return the note that a process has written.

    Raises:
        msgspec.MsgspecError: It is none.
    """
    return _decoder.decode(text)


def settings_facts(settings: CoordinatorSettings, callbacks: int) -> dict[str, str]:
    """Return the settings, and the number of callbacks, that must be equal on all ranks, as text by name."""
    facts = {f"setting {field}": str(value) for field, value in permitted(settings).agreed().items()}
    return {**facts, "on_rebuild callbacks": str(callbacks)}


class Rebuildable(Protocol):
    """All groups of an epoch: `ParallelGroups`."""

    def destroy(self) -> None:
        """Destroy the groups. Idempotent."""

    def with_change(self, change: Change) -> Self:
        """Return a record of the same groups that says what has changed with them."""


Groups = TypeVar("Groups", bound=Rebuildable)


class Part(Generic[Groups]):
    """One process's part in one agreement; see `Actions`.

    Attributes:
        line: The epochs so far. For one that joins it has no members.
        note: What it tells the others.
        rule_error: What the layout rule has raised last, if it has.
    """

    def __init__(
        self,
        line: Line,
        note: Note,
        watch: PeerWatch,
        create: Callable[[World, Recipe, ParallelLayout, float], Groups],
        ending: Ending,
        step_s: float,
        *,
        rule: LayoutRule | None = None,
        min_members: int = 1,
        leave: Collection[int] = (),
        pending: Callable[[Collection[int]], Sequence[Joiner]] | None = None,
        joins: int = 0,
        old: World | None = None,
        leave_store: Callable[[], None] | None = None,
        unreturned: list[Groups] | None = None,
    ) -> None:
        """Do nothing yet.

        Args:
            line: See above.
            note: See above.
            watch: The processes of the members of the last epoch, by member; it stays the caller's.
            create: Creates the groups of a layout in a world, as a recipe says, within some seconds.
            ending: How the groups of the last epoch end.
            step_s: How long a step may take, in seconds.
            rule: Chooses the ranks that go on; None for a process that joins.
            min_members: Refuse to go on with fewer.
            leave: Ranks that leave.
            pending: Returns who waits to join, in the order in which they came, beside members with these places.
            joins: How many of these are to join.
            old: The world of the last epoch; None for a process that joins.
            leave_store: Lets go of the store of a process that joins, once the groups that it gets are destroyed.
            unreturned: Gets the groups that may be those of the next epoch though nobody has them yet; see `keep`.
        """
        self.line: Line = line
        self.note: Note = note
        self._watch = watch
        self._create = create
        self._ending = ending
        self._step_s = step_s
        self._forks = fork_count()
        # Whether this process has let go of the groups of the last epoch, to make the next ones.
        self._is_at_rest = False
        self._rule = rule
        self._min_members = min_members
        self._leave = frozenset(leave)
        self._pending = pending
        self._joins = joins
        self._old = old
        # Lets go of the store; set while neither the groups of the last epoch nor those of the next one do.
        self._leave_store = leave_store
        self._unreturned: list[Groups] = [] if unreturned is None else unreturned
        self._joining: PeerWatch | None = None
        self._made: Groups | None = None
        self._world: World | None = None
        self._notes: dict[int, Note] = {}
        self._layout: ParallelLayout | None = None
        self.rule_error: Exception | None = None
        # Why this process cannot go on with its device.
        self.unfit: CommError | None = None

    def check_device(self) -> None:
        """Find out whether this process can go on with its device; if not, it counts as one that has ended."""
        try:
            self._ending.check()
        except CommError as error:
            if raised_by_handler(error):
                raise
            self.unfit = error

    def dead(self) -> frozenset[int]:
        """Return the members whose processes have provably ended, and this one if it cannot go on with its device."""
        joining = () if self._joining is None else self._joining.lost()
        unfit = () if self.unfit is None else (self.line.me,)
        return frozenset(self._watch.lost()).union(joining, unfit)

    def choose(self, alive: tuple[int, ...]) -> Chosen | None:
        """Return the next members and their layout; None if too few wait to join."""
        members = self.line.members
        try:
            kept = self._kept([members.index(member) for member in alive])
            places = [self.line.places[rank] for rank in kept.ranks]
            joining = tuple(self._pending(places))[: self._joins] if self._pending is not None else ()
            if len(joining) < self._joins:
                return None
            layout = grown(kept.layout, len(joining))
        except UsageError as error:
            return Chosen(alive, refusal=f"rank {self.note.rank} cannot go on: {error}")
        by_place = dict(zip(places, (members[rank] for rank in kept.ranks), strict=True))
        by_place |= {each.place: each.member for each in joining}
        order = merged(places, [each.place for each in joining])
        return Chosen(tuple(by_place[place] for place in order), msgspec.json.encode(layout).decode())

    def _kept(self, ranks: Collection[int]) -> Placement:
        """Return what the rule chooses of `ranks`, without those that leave."""
        if self._rule is None or self.note.recipe is None:
            raise InternalError("a process that joins has no groups to choose from")
        left = tuple(rank for rank in sorted(ranks) if rank not in self._leave)
        try:
            found, kept = self._rule(self.note.recipe.layout, left)
            is_fitting = set(kept) <= set(left) and found.world_size == len(kept) == len(set(kept))
        except UsageError:
            raise
        except Exception as error:
            if raised_by_handler(error):
                raise
            self.rule_error = error
            raise UsageError(f"the layout rule has failed: {type(error).__name__}: {error}") from error
        if not is_fitting:
            raise UsageError(f"the layout rule has chosen ranks {list(kept)} of {list(left)} for {found}")
        return Placement(found, tuple(kept))

    def judge(self, chosen: Chosen, notes: Mapping[int, str]) -> str:
        """Return why this process cannot go on with what was chosen, or an empty text."""
        said = self._notes = {member: note_of(note) for member, note in notes.items()}
        fresh = {member: note.process for member, note in said.items() if note.rank is None}
        self._forget_joining()
        self._joining = PeerWatch(
            self.note.process, {k: v for k, v in fresh.items() if v != self.note.process}
        )
        if chosen.refusal:
            return chosen.refusal
        members = chosen.members
        settings = {rank: said[member].settings for rank, member in enumerate(members)}
        facts = {note.rank: note.facts for note in said.values() if note.rank is not None}
        # The settings of members that leave are not compared: they create no groups.
        if any(each != settings[0] for each in settings.values()):
            return f"new ranks disagree: {'; '.join(differences(settings))}"
        if any(each != next(iter(facts.values())) for each in facts.values()):
            return f"ranks disagree: {'; '.join(differences(facts))}"
        if len(members) < self._min_members:
            return f"{len(members)} members are left, min_members is {self._min_members}"
        self._layout = msgspec.json.decode(chosen.layout, type=ParallelLayout)
        return "" if self.note.rank is None else self._judge_layout(members, self._layout)

    def _judge_layout(self, members: tuple[int, ...], layout: ParallelLayout) -> str:
        """Return why this rank of the last epoch would not have chosen this layout of these members."""
        old = {rank: self._notes[member].rank for rank, member in enumerate(members)}
        kept = tuple(each for each in old.values() if each is not None)
        before = {note.rank for note in self._notes.values() if note.rank is not None}
        stranded = sorted(before.difference(kept, self._leave))
        if stranded:
            return f"the layout has no place for rank(s) {stranded}: let them leave too"
        try:
            own = self._kept(kept)
            expected = grown(own.layout, len(members) - len(kept))
        except UsageError as error:
            return f"rank {self.note.rank} cannot go on with ranks {list(kept)}: {error}"
        if (own.ranks, expected) != (kept, layout):
            return (
                f"the layout rule chooses ranks {list(own.ranks)} for {expected} on rank {self.note.rank}, and "
                f"{list(kept)} for {layout} on another: it must be a pure function of the layout and the ranks that "
                "are left"
            )
        torn = torn_replicas(own.layout, layout, [rank for rank, each in old.items() if each is not None])
        if torn:
            ranks = [[kept[each] for each in replica] for replica in torn]
            places = [self._notes[member].place for rank, member in enumerate(members) if old[rank] is None]
            return f"members with places {places} would join in the middle of the replicas of ranks {ranks}"
        return ""

    def _recipe(self) -> Recipe:
        for note in self._notes.values():
            if note.recipe is not None:
                return note.recipe
        raise UsageError("nobody of the last epoch goes on")

    def tear_down(self) -> None:
        """Stop all work of the last epoch; `build` destroys its groups once all members have come that far.

        If the device does not allow that, `build` raises the error, and this process takes part in no further attempt.
        """
        self._keep_store()
        self._is_at_rest = True
        try:
            self._ending.quiesce(self._step_s / 2)
        except CommError as error:
            if raised_by_handler(error):
                raise
            self.unfit = error

    def _keep_store(self) -> None:
        if self._old is not None and self._leave_store is None:
            self._leave_store = self._old.hand_over()

    def _free(self, number: int, members: Collection[int]) -> None:
        """Meet `members`, which have come to rest, and destroy the groups of the last epoch."""
        ranks = {}
        for member in members:
            rank = self._notes[member].rank
            if rank is not None:
                ranks[member] = rank
        self._meeting(number).come(ranks, self._step_s)
        self._ending.met(ranks.values())
        self._ending.destroy()

    def _meeting(self, number: int) -> Meeting:
        return Meeting(self.line.store, number, self.line.me, self.dead, self._where)

    @property
    def _where(self) -> str:
        return f"the end of epoch {self.line.epoch}"

    def finish(self, number: int) -> None:
        """End the groups of the last epoch after the commit of a planned change, with all of its members.

        The change is decided, so the new groups find a member that is lost meanwhile. In that case, and if
        the device stays busy with other work, the memory is freed as that of groups which a rank ends alone.

        Raises:
            CudaError: The device has failed: this process cannot go on.
        """
        self._keep_store()
        try:
            self._ending.quiesce(self._step_s / 2)
            self._free(number, self.line.members)
        except BaseException as error:
            if not isinstance(error, CommError) or raised_by_handler(error):
                self._refuse(
                    number, f"rank {self.note.rank} was interrupted ({type(error).__name__})", TELL_S
                )
                raise
            fields = log_fields(rank=self.note.rank, call="commit")
            reason = str(error).removeprefix(f"{self._where}: ")
            logger.warning("%s: %s", self._where, reason, extra=fields)
            self._refuse(number, reason, self._step_s)
            if isinstance(error, CudaError):
                self.discard()
                raise
        finally:
            self._ending.destroy()
            self._ending.follow(self.line.epoch, number)

    def _refuse(self, number: int, reason: str, timeout_s: float) -> None:
        if self._forks != fork_count():  # the change is that of the parent
            return
        try:
            self._meeting(number).refuse(reason, timeout_s)
        except (CapabilityError, CommTimeoutError, NativeError) as error:
            if raised_by_handler(error):
                raise
            fields = log_fields(rank=self.note.rank, call="commit")
            logger.warning("the others wait for this rank: %s", error, extra=fields)

    def build(self, number: int, members: tuple[int, ...]) -> None:
        """Create the groups of these members; if the last groups were torn down, destroy those before."""
        if self.unfit is not None:
            raise self.unfit
        if self._is_at_rest:
            self._free(number, members)
        notes = [self._notes[member] for member in members]
        places, founders = tuple(note.place for note in notes), max(note.founders for note in notes)
        line = Line(self.line.store, self.line.me, number, members, places, founders)
        store = dist.PrefixStore(f"epoch/{number}", line.store)
        fork_guard.protect(store)
        processes = {rank: note.process for rank, note in enumerate(notes)}
        self._world = World(
            members.index(line.me), len(members), store, _nothing, processes, line, self._forks
        )
        create_s = max(note.create_s for note in self._notes.values())
        if self._layout is None:
            raise InternalError("groups are to be created without a layout")
        self._made = self._create(self._world, self._recipe(), self._layout, create_s)
        if self._is_at_rest:
            self.keep()

    def keep(self) -> None:
        """Put what `build` has made into the record of the last epoch, before the others rely on it.

        If this process is interrupted, the others may go on with these groups. Its next `rebuild` then goes
        on from them too, as after an error in a callback.
        """
        if self._made is not None:
            self._unreturned[:] = [self._made]

    def discard(self) -> None:
        """Destroy what `build` has made."""
        made, world = self._made, self._world
        self._unreturned[:] = [each for each in self._unreturned if each is not made]
        try:
            if made is not None:
                made.destroy()
        finally:
            if world is not None:
                world.leave()
        self._made = self._world = None  # behind it: another call finishes one that was interrupted

    def begin(self, number: int, members: tuple[int, ...]) -> Groups:
        """Return the groups of the next epoch, which begins now."""
        if self._made is None or self._world is None:
            raise InternalError("a change is complete though this process has made no groups")
        if self._leave_store is not None:
            self._world.take_over(self._leave_store)
            self._leave_store = None
        self._ending.follow(self.line.epoch, number)
        self._world.show()
        begun = self._made.with_change(self.change(number, members))
        self._made = self._world = None
        return begun

    def change(self, number: int, members: tuple[int, ...]) -> Change:
        """Return what has changed with an epoch."""
        notes = [self._notes[member] for member in members]
        old_to_new = {note.rank: rank for rank, note in enumerate(notes) if note.rank is not None}
        return Change(
            epoch=number,
            lost=tuple(rank for rank in range(self._recipe().layout.world_size) if rank not in old_to_new),
            joined=tuple(rank for rank, note in enumerate(notes) if note.rank is None),
            old_to_new=old_to_new,
            progress=tuple(note.progress for note in notes),
            places=tuple(note.place for note in notes),
        )

    def _forget_joining(self) -> None:
        joining, self._joining = self._joining, None
        if joining is not None:
            joining.close()

    def leave(self) -> None:
        """Let go of the store, on a rank that has left."""
        leave, self._leave_store = self._leave_store, None
        if leave is not None:
            leave()

    def close(self) -> None:
        """Stop watching processes that join, and destroy groups that nobody has. Idempotent."""
        self._forget_joining()
        if not any(each is self._made for each in self._unreturned):
            self.discard()
        # If no groups have followed those that were torn down, another attempt needs the store.
        owner = self._old if self._made is None else self._world
        if self._old is not None and owner is not None and self._leave_store is not None:
            owner.take_over(self._leave_store)
            self._leave_store = None


def _nothing() -> None:
    """Do nothing: the store belongs to the world of the first epoch."""
