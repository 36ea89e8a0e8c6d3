"""Index what was seen of a job: which process is which member of a group, and how far each has come in each plane."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from coordinator.diagnosis.blame.evidence import Evidence, Failure, Process
from coordinator.diagnosis.blame.verdict import Culprit, called
from coordinator.diagnosis.model import Group, Lane, Page, Record
from coordinator.diagnosis.queues import Ring
from coordinator.diagnosis.same_calls import is_shared
from shm_broadcast.status.layout import TABLES
from shm_broadcast.status.page import LEFT_GROUPS
from shm_broadcast.status.shown_calls import WAITS

__all__ = ["GroupKey", "Job", "LaneKey", "Node", "Position", "folded", "newest_groups"]

Node = int
"""A process: its place in the evidence, or a negative number for one of which nothing was seen.

That is -1 - rank, or `_STRANGERS` and below for a member of a group that is no known rank of the world.
"""

_MOST_RANK: Final = 1 << 32
# Below the numbers of all ranks.
_STRANGERS: Final = -2 * _MOST_RANK


def folded(detail: int) -> int:
    """Return the hash of a lane as records hold it."""
    return (detail ^ detail >> 32) & 0xFFFFFFFF


class GroupKey(NamedTuple):
    """One group of the job. Groups that are created together with other members have the same name."""

    name: str
    epoch: int
    ranks: tuple[int, ...]


class LaneKey(NamedTuple):
    """One order of calls that several ranks share. Shared memory has one for each host (`carrier` is its boot id)."""

    of: GroupKey
    plane: str
    carrier: str

    @property
    def group(self) -> str:
        """Return the name of the group."""
        return self.of.name


class Position(NamedTuple):
    """How far a process has come in one order of calls.

    Attributes:
        lane: The last call.
        reached: Its number.
        blocked: The call that has not ended, or has failed; None if there is none.
        outcome: How the last call ended: "done", "failed" or "disagreed"; empty while it goes on, or if that is not
            known.
    """

    lane: Lane
    reached: int
    blocked: Lane | None
    outcome: str


class Wait(NamedTuple):
    """A process waits for one other rank: `place` in the group, or None if it waits for any."""

    group: Group
    plane: str
    lane: Lane
    place: int | None


class Job:
    """What was seen of the processes of one job."""

    def __init__(self, evidence: Evidence) -> None:
        """Index `evidence`."""
        self.processes: tuple[Process, ...] = evidence.processes
        self.rings: tuple[Ring, ...] = evidence.rings
        self.ended: Mapping[int, str] = evidence.ended
        self._members: dict[GroupKey, dict[int, Node]] = {}
        self.groups: dict[GroupKey, Group] = {}
        self._by_rank: dict[int, list[Node]] = {}
        # By group and rank in it; None for any of those that no page names.
        self._strangers: dict[tuple[GroupKey, int | None], Node] = {}
        for node, process in enumerate(self.processes):
            if process.page.rank is not None:
                self._by_rank.setdefault(process.page.rank, []).append(node)
            for group in process.page.groups:
                if group.is_torn:
                    continue
                self.groups[key_of(group)] = group
                self._members.setdefault(key_of(group), {})[group.place] = node
        self.records: list[Mapping[LaneKey, Mapping[int, Record]]] = [
            _records(process) for process in self.processes
        ]
        self.positions: list[Mapping[LaneKey, Position]] = [
            _positions(process, records)
            for process, records in zip(self.processes, self.records, strict=True)
        ]
        self.waits: list[tuple[Wait, ...]] = [tuple(_waits(process)) for process in self.processes]

    def rank(self, node: Node) -> int | None:
        """Return the rank of a process in the world; None if it has none, or if that is not known."""
        if node >= 0:
            return self.processes[node].page.rank
        return -1 - node if node > _STRANGERS else None

    def member(self, group: Group, place: int) -> Node:
        """Return which process has a place in a group."""
        found = self._members.get(key_of(group), {}).get(place)
        if found is not None:
            return found
        return self._unseen(group, group.ranks[place] if place < len(group.ranks) else None)

    def _unseen(self, group: Group, rank: int | None) -> Node:
        """Return who has a rank in a group that no page shows there; None for a rank that is not known either."""
        if rank is not None and self._counts_as_the_world(group):
            of_rank = self._by_rank.get(rank, [])
            if not of_rank:
                return -1 - rank
            hiding = [node for node in of_rank if _may_hide_groups(self.processes[node].page)]
            if len(hiding) == 1:
                return hiding[0]
        return self._strangers.setdefault((key_of(group), rank), _STRANGERS - len(self._strangers))

    def with_rank(self, group: Group, rank: int) -> Node | None:
        """Return who has a rank in a group; None if nobody has."""
        if rank in group.ranks:
            return self.member(group, group.ranks.index(rank))
        # A hostile dump may state any number.
        if group.world_size <= len(group.ranks) or not 0 <= rank < _MOST_RANK:
            return None
        if self._counts_as_the_world(group):
            for place, node in self._members.get(key_of(group), {}).items():
                if place >= len(group.ranks) and self.processes[node].page.rank == rank:
                    return node
        return self._unseen(group, rank)

    def _counts_as_the_world(self, group: Group) -> bool:
        """Return whether a group may have the ranks of the world; those of a stateless group count from 0 again."""
        return all(
            self.processes[node].page.rank == group.ranks[place]
            for place, node in self._members.get(key_of(group), {}).items()
            if place < len(group.ranks)
        )

    def strangers(self) -> Iterator[str]:
        """Return the names of members of which nothing was seen, and that are no known ranks of the world."""
        return map(self.name, self._strangers.values())

    def end_of(self, rank: int | None, pid: int | None) -> Node | None:
        """Return the process at an end of a queue; None if it is none of this job, or no page shows it."""
        if pid is None:
            return None
        # The engine that writes to the ranks of one job may be a rank of another one.
        return next(
            (
                node
                for node, each in enumerate(self.processes)
                if (each.page.rank, each.page.pid) == (rank, pid)
            ),
            None,
        )

    def group_of(self, node: Node, key: GroupKey) -> Group | None:
        """Return what a process says of a group; None if it says nothing."""
        if node < 0:
            return None
        # A world that was joined again has a group of the same name, which comes later.
        for group in reversed(self.processes[node].page.groups):
            if key_of(group) == key and not group.is_torn:
                return group
        return None

    def members(self, key: LaneKey) -> list[Node]:
        """Return the processes that share an order of calls: in shared memory those of its host.

        A page names the first 256 members of a group. All behind them that were not seen are one stranger.
        """
        group = self.groups[key.of]
        behind = sorted(place for place in self._members[key.of] if place >= len(group.ranks))
        found = [self.member(group, place) for place in (*range(len(group.ranks)), *behind)]
        if len(found) < group.world_size:
            found.append(self._unseen(group, None))
        if not key.carrier:
            return found
        hosts = {self.processes[node].page.boot_id for node in found if node >= 0}
        # A member that was not seen is taken to be on this host if all others are.
        return [
            node
            for node in found
            if (len(hosts) == 1 if node < 0 else self.processes[node].page.boot_id == key.carrier)
        ]

    def culprit(self, node: Node, what: str = "") -> Culprit:
        """Return how a process is named; `what` is by default what it does or did last."""
        if node < 0:
            rank = self.rank(node)
            role = "" if rank is not None else self.name(node)
            return Culprit(rank, None, "", what or "its page and its dump are missing", role)
        page = self.processes[node].page
        role = "" if page.rank is not None else self.role(node)
        return Culprit(page.rank, page.pid, page.hostname, what or self.doing(node), role)

    def name(self, node: Node) -> str:
        """Return `rank 2`, `process 4242` for one without a rank, or `rank 0 of 'weights:0'` for a stranger."""
        if node <= _STRANGERS:
            group, number = list(self._strangers)[_STRANGERS - node]
            which = f"rank {number}" if number is not None else f"a rank behind the first {len(group.ranks)}"
            return f"{which} of {group.name!r}"
        rank = self.rank(node)
        return f"process {self.processes[node].page.pid}" if rank is None else f"rank {rank}"

    def role(self, node: Node) -> str:
        """Return what a process is that has no rank: `writer of queue 'steps'`."""
        queues = self.processes[node].page.queues
        for end, role in ((-1, "writer"), (0, "reader")):
            names = sorted({repr(queue.name) for queue in queues if min(queue.reader, 0) == end})
            if names:
                return f"{role} of queue{'s' * (len(names) > 1)} {', '.join(names)}"
        return "process without a rank"

    def doing(self, node: Node) -> str:
        """Return what a process does, or did last."""
        if node < 0:
            return "nothing was seen of it"
        process = self.processes[node]
        if not process.page.groups:
            return self._doing_outside(node)
        state = "stopped, " if process.state == "stopped" else ""
        for key, position in self.positions[node].items():
            if position.blocked is not None:
                lane = position.blocked
                how = "in" if lane.state != "idle" else "last in"
                for_s = _for(process, lane.begin_ns) if lane.state != "idle" else ""
                return f"{state}{how} {called(lane.call, lane.number, key.group, key.plane)}{for_s}"
        for wait in self.waits[node]:
            text = called(wait.lane.call, 0, wait.group.name, wait.plane)
            return f"{state}in {text}{_for(process, wait.lane.begin_ns)}"
        last = max(
            (
                (position.lane.end_ns, key, position)
                for key, position in self.positions[node].items()
                if position.reached
            ),
            default=None,
            key=lambda each: each[0],
        )
        if last is None:
            return f"{state}in no call, and it has made none"
        end_ns, key, position = last
        text = called(position.lane.call, position.reached, key.group, key.plane)
        where = "in no call"
        if all(group.state == "left" for group in process.page.groups):
            where = "in no group any more"
        return f"{state}{where}{_for(process, end_ns)}; its last was {text}"

    def _doing_outside(self, node: Node) -> str:
        """Return what a process does that is in no group."""
        process = self.processes[node]
        written = [ring for ring in self.rings if self.end_of(ring.rank, ring.pid) == node and ring.messages]
        told = [process.state, "in no group"]
        if written:
            last = max(written, key=lambda ring: ring.published_ns)
            told.append(f"wrote message #{last.messages} of {last.name!r}{_ago(process, last.published_ns)}")
        return ", ".join(told)

    def is_outside(self, node: Node) -> bool:
        """Return whether a process is in no call that it was seen in."""
        return (
            node >= 0
            and not self.waits[node]
            and all(
                position.blocked is None and position.lane.state == "idle"
                for position in self.positions[node].values()
            )
        )

    def failures(self) -> Iterator[tuple[Node, Failure]]:
        """Return what broke groups, as each process knows it, each process's first one first."""
        for node, process in enumerate(self.processes):
            for failure in process.failures:
                yield node, failure

    def broken(self, failure: Failure, node: Node) -> Group | None:
        """Return the group that a failure broke; `node` has its record."""
        groups = reversed(self.processes[node].page.groups)
        return next((group for group in groups if group.name == failure.group and not group.is_torn), None)

    def at_fault(self, failure: Failure, node: Node) -> list[Node]:
        """Return the processes that a failure record names; `node` has that record."""
        group = self.broken(failure, node)
        if group is None:
            return []
        found = (self.with_rank(group, rank) for rank in failure.ranks)
        return [each for each in found if each is not None]


def _may_hide_groups(page: Page) -> bool:
    """Return whether a process may be in a group, or have left one, that its page does not show."""
    left = sum(group.state == "left" for group in page.groups)
    is_full = left >= LEFT_GROUPS or len(page.groups) >= TABLES["groups"].number
    return is_full or page.refused > 0 or any(group.is_torn for group in page.groups)


def key_of(group: Group) -> GroupKey:
    """Return what tells a group from all others of the job."""
    return GroupKey(group.name, group.epoch, group.ranks)


def operation_of(failure: Failure) -> tuple[str, int]:
    """Return the name and the number of the call in which a failure was found; 0 for calls between two ranks."""
    match = re.fullmatch(r"(.*) #([0-9]{1,18})", failure.operation)
    name, number = (match[1], int(match[2])) if match else (failure.operation, 0)
    return name.partition(" ")[0], number


def _for(process: Process, since_ns: int) -> str:
    """Return ` for 12.3 s`, on the clock of the process's own host; nothing if that is not known."""
    ago = _ago(process, since_ns)
    return f" for{ago.removesuffix(' ago')}" if ago else ""


def _ago(process: Process, since_ns: int) -> str:
    """Return ` 12.3 s ago`, as `_for`."""
    if not process.now_ns or not since_ns or process.now_ns < since_ns:
        return ""
    return f" {(process.now_ns - since_ns) / 1e9:.1f} s ago"


def _key(process: Process, group: Group, plane: str, algorithm: str) -> LaneKey:
    carrier = process.page.boot_id if is_shared(algorithm) else ""
    return LaneKey(key_of(group), plane.removesuffix(WAITS), carrier)


def newest_groups(page: Page) -> Iterable[Group]:
    """Return the groups of a process; of those that one key means, as of a world that was joined again, the last."""
    found: dict[GroupKey, Group] = {}
    for group in page.groups:
        if not group.is_torn:
            found.pop(key_of(group), None)  # the order is that of their creation
            found[key_of(group)] = group
    return found.values()


def _records(process: Process) -> dict[LaneKey, dict[int, Record]]:
    """Return the numbered calls that have ended, by their order of calls and number."""
    groups = {(group.name, group.epoch): group for group in newest_groups(process.page)}
    found: dict[LaneKey, dict[int, Record]] = {}
    for record in process.page.records:
        group = groups.get((record.group, record.epoch))
        if group is None or record.begin_ns < group.created_ns:
            continue
        if record.number and not record.plane.endswith(WAITS):
            key = _key(process, group, record.plane, record.algorithm)
            found.setdefault(key, {})[record.number] = record
    return found


def _positions(process: Process, records: Mapping[LaneKey, Mapping[int, Record]]) -> dict[LaneKey, Position]:
    found: dict[LaneKey, Position] = {}
    for group in newest_groups(process.page):
        # A wait for a call that was queued on a device has a lane of its own, which comes last.
        lanes = sorted(enumerate(group.lanes), key=lambda item: item[1].plane.endswith(WAITS))
        for index, lane in lanes:
            is_settling = (group.name, group.created_ns, index) in process.settling
            if lane.is_torn or not lane.number:
                continue
            key = _key(process, group, lane.plane, lane.algorithm)
            before = found.get(key)
            goes_on = lane.state != "idle"
            if lane.plane.endswith(WAITS):
                if goes_on and not is_settling:
                    base = before or Position(lane, lane.number, None, "")
                    found[key] = Position(base.lane, max(base.reached, lane.number), lane, "")
                continue
            record = records.get(key, {}).get(lane.number)
            outcome = "" if goes_on or record is None else record.outcome
            # A process that has left a group waits for nobody in it, and may be in other groups by now.
            is_blocked = group.state != "left" and (outcome == "failed" or (goes_on and not is_settling))
            found[key] = Position(lane, lane.number, lane if is_blocked else None, outcome)
    return found


def _waits(process: Process) -> Iterator[Wait]:
    """Return the waits for single ranks."""
    for group in newest_groups(process.page):
        for index, lane in enumerate(group.lanes):
            if (
                lane.plane.endswith(WAITS)
                and not lane.number
                and not lane.is_torn
                and (group.name, group.created_ns, index) not in process.settling
                and (lane.state != "idle" or _has_failed(process, group, lane))
            ):
                yield Wait(group, lane.plane.removesuffix(WAITS), lane, lane.root)


def _has_failed(process: Process, group: Group, lane: Lane) -> bool:
    """Return whether the last wait in a lane has ended with an error that broke the group."""
    if group.state != "broken":
        return False
    last = max(
        (
            record
            for record in process.page.records
            if (record.group, record.epoch, record.plane) == (group.name, group.epoch, lane.plane)
        ),
        default=None,
        key=lambda record: record.index,
    )
    return last is not None and last.outcome == "failed" and last.begin_ns == lane.begin_ns
