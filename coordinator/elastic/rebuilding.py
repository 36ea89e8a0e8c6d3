"""Rebuilding, planned changes and joining: the agreements, and the errors in which they end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Generic, Literal

import msgspec

from coordinator.bootstrap.world import Line, World
from coordinator.elastic import joiners, protocol
from coordinator.elastic.driver import Deadlines, Driver, ask
from coordinator.elastic.ending import NOTHING, Ending, Meeting
from coordinator.elastic.layouts import LayoutRule, drop_replicas
from coordinator.elastic.part import Change, Groups, Note, Part, Recipe, settings_facts
from coordinator.elastic.protocol import Complete, Excluded, Prepared, Refused
from coordinator.elastic.revoking import revoke
from coordinator.layout import ParallelLayout
from coordinator.settings import CoordinatorSettings
from device_comm.health import GroupHealth
from shm_broadcast.errors import CommTimeoutError, DisagreementError, ExcludedError, UsageError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, fork_count, name_host, this_process

__all__ = ["Create", "Membership", "Plan", "PlanStatus", "has_begun", "join_members", "prepare", "rebuild"]

Create = Callable[[World, Recipe, ParallelLayout, float], Groups]
"""Creates all groups of a layout in a world, as a recipe says, within some seconds."""

Phase = Literal["prepared", "committed", "aborted"]


class Membership(msgspec.Struct, frozen=True):
    """What an agreement must know of this rank and its groups.

    Attributes:
        world: Their world.
        processes: The processes of the world's ranks.
        settings: Those of the groups.
        recipe: How to create such groups.
        callbacks: How many callbacks get the next groups.
    """

    world: World
    processes: Mapping[int, ProcessIdentity]
    settings: CoordinatorSettings
    recipe: Recipe
    callbacks: int = 0

    def note(self, progress: int, call: str, timeout_s: float) -> Note:
        """Return what this rank tells the others."""
        facts = {"layout": str(self.recipe.layout), "call": call, "timeout_s": str(timeout_s)}
        settings = settings_facts(self.settings, self.callbacks)
        line, rank = self.world.line(), self.world.rank
        return Note(
            this_process(),
            settings,
            facts,
            progress,
            line.places[rank],
            founders=line.founders,
            rank=rank,
            recipe=self.recipe,
            create_s=Deadlines(timeout_s).step_s,
        )

    def others(self, line: Line) -> dict[int, ProcessIdentity]:
        """Return the other members' processes, by member."""
        return {
            line.members[rank]: process for rank, process in self.processes.items() if rank != self.world.rank
        }


@contextmanager
def _taking_part(
    line: Line,
    note: Note,
    others: Mapping[int, ProcessIdentity],
    timeout_s: float,
    where: str,
    create: Create[Groups],
    ending: Ending,
    **choices: Any,
) -> Iterator[tuple[Part[Groups], Driver]]:
    """Yield this process's part in an agreement, and who drives it; `choices` are those of `Part`."""
    deadlines = Deadlines(timeout_s)
    with (
        closing(PeerWatch(note.process, others)) as watch,
        closing(Part(line, note, watch, create, ending, deadlines.step_s, **choices)) as part,
    ):
        yield part, Driver(line.store, line.me, part, deadlines, where)


def rebuild(
    old: Membership,
    rule: LayoutRule,
    progress: int,
    min_members: int,
    timeout_s: float,
    create: Create[Groups],
    ending: Ending,
    healths: Sequence[GroupHealth],
    unreturned: list[Groups],
) -> Groups:
    """Agree with the other ranks on who is left, and create their groups. See `ParallelGroups.rebuild`.

    If this is interrupted, `unreturned` has the groups that may be those of the next epoch; see `has_begun`.
    """
    line = old.world.line()
    revoke(healths)
    note = old.note(progress, f"rebuild with min_members={min_members}", timeout_s)
    where = f"rebuild (rank {old.world.rank} of epoch {line.epoch})"
    choices = {"rule": rule, "min_members": min_members, "old": old.world, "unreturned": unreturned}
    with _taking_part(line, note, old.others(line), timeout_s, where, create, ending, **choices) as (
        part,
        driver,
    ):
        part.check_device()
        end = driver.run(protocol.agree_on_members(line.me, line.epoch, line.members, _text(note)))
        if isinstance(end, Complete):
            return part.begin(end.number, end.members)
    failure = _failure(end, where, line, timeout_s)
    if part.unfit is None:
        raise failure from part.rule_error
    raise ExcludedError(f"{failure}; it cannot go on with its device: {part.unfit}") from part.unfit


def has_begun(line: Line, number: int, call: str, timeout_s: float) -> bool:
    """Return whether epoch `number`, whose groups an interrupted call has made, has begun; see `settle`.

    Raises:
        CommTimeoutError: The store does not answer.
        NativeError: It is gone.
    """
    where = f"{call} (member {line.me})"
    found: bool = ask(line.store, protocol.settle(number), where, timeout_s)
    if found:
        # In a planned change the others wait for this member before they free memory that it might still use.
        Meeting(line.store, number, line.me, tuple, where).refuse(
            f"member {line.me} was interrupted", timeout_s
        )
    return found


def prepare(
    old: Membership,
    rule: LayoutRule,
    progress: int,
    leave: Collection[int],
    join: int,
    timeout_s: float,
    create: Create[Groups],
    ending: Ending,
    then: Callable[[Groups], None],
    unreturned: list[Groups],
    give_up: Callable[[BaseException], None],
) -> Plan[Groups]:
    """Agree on a planned change, and create its groups beside those that serve. See `ParallelGroups.prepare`."""
    size = old.world.size
    is_change = leave or join or rule is not drop_replicas
    if not set(leave) <= set(range(size)) or join < 0 or not is_change:
        raise UsageError(f"prepare: leave={tuple(leave)} and join={join} is no change of {size} ranks")
    line = old.world.line()
    note = old.note(progress, f"prepare with leave={sorted(leave)}, join={join}", timeout_s)
    where = f"prepare (rank {old.world.rank} of epoch {line.epoch})"
    choices = {
        "rule": rule,
        "leave": leave,
        "pending": lambda staying: joiners.pending(line, staying, where, timeout_s),
        "joins": join,
        "old": old.world,
        "unreturned": unreturned,
    }
    taking_part = _taking_part(line, note, old.others(line), timeout_s, where, create, ending, **choices)
    held = ExitStack()
    try:
        part, driver = held.enter_context(taking_part)
        steps = protocol.agree_on_members(line.me, line.epoch, line.members, _text(note), is_planned=True)
        end = driver.run(steps)
        if isinstance(end, Prepared):
            return Plan(part, old, end, timeout_s, held, then, give_up)
    except BaseException:
        held.close()
        raise
    held.close()
    raise _failure(end, where, line, timeout_s) from part.rule_error


def join_members(
    line: Line,
    settings: CoordinatorSettings,
    timeout_s: float,
    create: Create[Groups],
    leave_store: Callable[[], None],
    callbacks: int,
) -> Groups:
    """Wait for a planned change with a place for this process, and take part. See `join_distributed_environment`."""
    (place,) = line.places
    name_host(settings.host_id)
    note = Note(this_process(), settings_facts(settings, callbacks), {}, 0, place)
    is_behind = place == line.me
    where = f"join (member {line.me})" if is_behind else f"join (member {line.me}, in the place of {place})"
    taking_part = _taking_part(line, note, {}, timeout_s, where, create, NOTHING, leave_store=leave_store)
    groups: Groups | None = None
    try:
        with taking_part as (part, driver):
            end = driver.run(protocol.join(line.me, _text(note)))
            if isinstance(end, Complete):
                groups = part.begin(end.number, end.members)
    except BaseException:
        # The part lets go of the groups as it returns them, and the caller does not have them yet.
        if groups is not None:
            groups.destroy()
        raise
    if groups is not None:
        return groups
    if isinstance(end, Refused):
        raise (DisagreementError if end.number else UsageError)(f"{where}: {end.reason}")
    hint = "" if is_behind else f"; the place is free once member {place} is lost or leaves"
    raise CommTimeoutError(f"{where}: nobody has taken it in within {timeout_s:.1f} s{hint}")


class PlanStatus(msgspec.Struct, frozen=True):
    """How far a planned change is.

    Attributes:
        operation_id: Names the change; equal on all ranks.
        phase: "prepared", "committed" or "aborted".
        may_end: Old ranks that no group needs any more, and that may therefore be ended; empty before the commit.
    """

    operation_id: str
    phase: Phase
    may_end: tuple[int, ...]


class Plan(Generic[Groups]):
    """A planned change: the groups of the next epoch are there, and those of the last one serve until it is committed.

    Every rank of the last epoch commits it, or one of them aborts it.
    """

    def __init__(
        self,
        part: Part[Groups],
        old: Membership,
        end: Prepared,
        timeout_s: float,
        held: ExitStack,
        then: Callable[[Groups], None],
        give_up: Callable[[BaseException], None],
    ) -> None:
        """Use `ParallelGroups.prepare`.

        `held` is closed once the change is decided. `then` gets the new groups; `give_up` breaks them if the commit is
        interrupted after the decision.
        """
        self._held = held
        self._give_up = give_up
        self._then = then
        self._part = part
        self._old = old
        self._forks = fork_count()
        self._end = end
        self._timeout_s = timeout_s
        self._phase: Phase = "prepared"
        change = part.change(end.number, end.members)
        self._may_end = change.lost

    @property
    def change(self) -> Change:
        """Return what the change changes."""
        return self._part.change(self._end.number, self._end.members)

    def status(self) -> PlanStatus:
        """Return how far the change is, as this rank knows; asks nobody."""
        is_over = self._phase == "committed"
        return PlanStatus(f"epoch-{self._end.number}", self._phase, self._may_end if is_over else ())

    def _run(self, call: str, steps: protocol.Steps) -> str:
        if self._forks != fork_count():
            raise UsageError(f"{call}: the change belongs to the process that forked this one")
        line = self._old.world.line()
        where = f"{call} (rank {self._old.world.rank} of epoch {line.epoch})"
        driver = Driver(line.store, line.me, self._part, Deadlines(self._timeout_s), where)
        decision: str = driver.run(steps)
        return decision

    def commit(self) -> Groups | None:
        """Go over to the groups of the next epoch, with all other ranks. Collective over old and new members.

        The groups of the last epoch, the world group too, are destroyed. No call of theirs may be in flight.

        Returns:
            The new groups; None on a rank that leaves, which may end then.

        Raises:
            DisagreementError: A rank has aborted the change or has ended; the groups of the last epoch serve on.
            UsageError: The change is over.
            CommTimeoutError: The store does not answer.
            NativeError: The store is gone.
            CudaError: The change is made, but this rank cannot go on with its device. The others find it gone.
            Others: What a callback has raised; see `ParallelGroups.on_rebuild`. The change is made.

        If this is interrupted before the decision, it may be called again. After the decision the change is
        made: `rebuild` of the old record then goes on from the new groups, as after an error in a callback.
        """
        line, end = self._old.world.line(), self._end
        if self._phase != "prepared":
            raise UsageError(f"commit: the change is {self._phase}")
        if line.me in end.members:
            self._part.keep()
            decision = self._run("commit", protocol.commit(line.me, end.number, end.members))
        else:
            decision = self._run("commit", protocol.await_decision(end.number))
        if decision != protocol.OK:
            self._held.close()
            self._phase = "aborted"
            self._part.discard()
            reason = decision.removeprefix(protocol.LOST)
            raise DisagreementError(f"commit: the change was given up, the old groups serve on: {reason}")
        self._phase = "committed"
        groups = None
        try:
            with self._held:
                self._part.finish(end.number)
                if line.me in end.members:
                    groups = self._part.begin(end.number, end.members)
                else:
                    self._part.leave()
            if groups is not None:
                self._then(groups)
        except BaseException as error:
            self._give_up(error)
            raise
        return groups

    def abort(self, reason: str = "a rank has aborted it") -> None:
        """Give the change up, for all ranks; those that call `commit` get `DisagreementError` with the reason.

        Not collective. The groups that were prepared are destroyed; those of the last epoch serve on.

        Raises:
            UsageError: All members have committed before, or the change is over on this rank.
            CommTimeoutError: The store does not answer.
            NativeError: The store is gone.
        """
        if self._phase != "prepared":
            raise UsageError(f"abort: the change is {self._phase}")
        if self._run("abort", protocol.abort(self._end.number, reason)) == protocol.OK:
            raise UsageError("abort: all members have committed the change; call commit too")
        self._held.close()
        self._phase = "aborted"
        self._part.discard()


def _failure(
    end: Excluded | Refused | protocol.Late, where: str, line: Line, timeout_s: float
) -> CommTimeoutError | DisagreementError | ExcludedError:
    """Return the error in which an agreement has ended."""
    if isinstance(end, Excluded):
        return ExcludedError(
            f"{where}: the others go on without this rank, as members {list(end.members)} of epoch {end.number}"
        )
    if isinstance(end, Refused):
        return DisagreementError(f"{where}: {end.reason}")
    ranks = tuple(line.members.index(member) for member in end.missing)
    who = f"rank(s) {', '.join(map(str, ranks))}" if ranks else "the ranks that are to join"
    why = f"; the attempt before this one has failed: {end.failure}" if end.failure else ""
    return CommTimeoutError(
        f"{where}: {who} did not come within {timeout_s:.1f} s, or ended{why}", missing=ranks
    )


def _text(note: Note) -> str:
    return msgspec.json.encode(note).decode()
