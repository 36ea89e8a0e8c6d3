"""Build the graph of who waits for whom, over all groups and queues of a job, and find what no rank can leave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from coordinator.diagnosis.blame.evidence import Process
from coordinator.diagnosis.blame.members import (
    GroupKey,
    Job,
    LaneKey,
    Node,
    Position,
    Wait,
    key_of,
    operation_of,
)
from coordinator.diagnosis.blame.verdict import called
from coordinator.diagnosis.queues import Reader, Ring
from coordinator.diagnosis.same_calls import lets_all_meet

__all__ = ["Edge", "WaitGraph", "slowest_readers"]

# Calls in which a process group lets ranks wait for the root alone, and not for each other.
_FROM_ROOT: Final = frozenset({"broadcast", "scatter", "broadcast_object_list", "scatter_object_list"})
# Of two ranks that wait for each other, one sends and the other receives: that is a transfer, and no circle.
_SENDS: Final = frozenset({"send", "send_object", "send_tensor_dict"})


class Edge(NamedTuple):
    """One process waits for another.

    Attributes:
        source: Who waits.
        target: For whom.
        call: In which call.
        number: Its number; 0 for a call between two ranks or on a queue.
        group: Its group, or the queue.
        plane: Its plane; empty for a queue.
        is_idle: Whether this is the wait of a reader for work, which is nobody's fault by itself, unless the writer is
            stopped.
    """

    source: Node
    target: Node
    call: str
    number: int
    group: str
    plane: str
    is_idle: bool = False

    def text(self, job: Job) -> str:
        """Return `rank 0 waits in all_reduce #7 on 'tp:0' (device) for rank 2`."""
        where = called(self.call, self.number, self.group, self.plane)
        return f"{job.name(self.source)} waits in {where} for {job.name(self.target)}"


class WaitGraph:
    """Who waits for whom.

    Attributes:
        edges: By who waits.
    """

    def __init__(self, job: Job) -> None:
        """Build the graph.

        A stopped process waits for nobody, nor does one that died before its group broke.
        """
        self._job = job
        self.edges: dict[Node, list[Edge]] = {}
        self._absolved = _absolved(job)
        for node, process in enumerate(job.processes):
            if not _may_wait(process):
                continue
            for edge in (*self._collectives(node), *_pairs(job, node)):
                self.edges.setdefault(node, []).append(edge)
        for edge in _queue_edges(job):
            if _may_wait(job.processes[edge.source]):
                self.edges.setdefault(edge.source, []).append(edge)
        for edge in list(self._premature()):
            self.edges[edge.source].remove(edge)

    def _collectives(self, node: Node) -> Iterator[Edge]:
        for key, position in self._job.positions[node].items():
            lane = position.blocked
            if lane is None:
                continue
            for other in self._waited_for(node, key, position):
                yield Edge(node, other, lane.call, lane.number, key.group, key.plane)

    def _waited_for(self, node: Node, key: LaneKey, position: Position) -> list[Node]:
        """Return the members that have not come to the call in which `node` is."""
        job, lane = self._job, position.blocked
        assert lane is not None
        members = job.members(key)
        group = job.group_of(node, key.of)
        is_from_root = lane.call in _FROM_ROOT and not lets_all_meet(lane.algorithm, lane.call)
        if is_from_root and lane.root is not None and group:
            members = [job.member(group, lane.root)]
        arrived = self._absolved.get((key.of, lane.call, lane.number))
        found = []
        for other in members:
            if other == node or (arrived is not None and other not in arrived):
                continue
            if other < 0:
                found.append(other)
                continue
            theirs = job.positions[other].get(key)
            if theirs is None or theirs.reached < lane.number:
                found.append(other)
        return found

    def _premature(self) -> Iterator[Edge]:
        """Return waits for work that do not count, because the reader has left a call out.

        Another reader of the same queue got the same messages and waits in a call for this reader, and the
        writer waits for that other reader. So the writer cannot write the work for which this reader waits.
        """
        for ring in self._job.rings:
            writer = self._job.end_of(ring.rank, ring.pid)
            ends = (self._job.end_of(reader.rank, reader.pid) for reader in ring.readers)
            readers = {node for node in ends if node is not None and node != writer}
            behind = self._behind(writer)
            awaited = {
                edge.target
                for node in readers & behind
                for edge in self.edges.get(node, [])
                if not edge.is_idle
            }
            for node in readers & awaited:
                for edge in self.edges.get(node, []):
                    if edge.is_idle and (edge.target, edge.group) == (writer, ring.name):
                        yield edge

    def _behind(self, node: Node | None) -> set[Node]:
        """Return the processes for which a process waits, through others too."""
        found: set[Node] = set()
        todo = [] if node is None else [node]
        while todo:
            for edge in self.edges.get(todo.pop(), []):
                if edge.target not in found:
                    found.add(edge.target)
                    todo.append(edge.target)
        return found

    def reachable(self) -> set[Node]:
        """Return the processes that somebody waits for, other than a reader that waits for work."""
        found: set[Node] = set()
        todo = [edge.target for edges in self.edges.values() for edge in edges if not edge.is_idle]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += [edge.target for edge in self.edges.get(node, [])]
        return found

    def sinks(self) -> list[Node]:
        """Return the processes that somebody waits for and that wait for nobody."""
        return sorted(node for node in self.reachable() if not self.edges.get(node))

    def cycle(self) -> list[Edge]:
        """Return the edges of a shortest circle of waits, in order; none if there is none."""
        return self._shortest(frozenset())

    def pivots(self, circle: Sequence[Edge]) -> list[Edge]:
        """Return the edges of `circle` from ranks that all circles go through; all of it if there is no such rank.

        A rank that has missed a call and waits in the next one is in a circle with each of the others, which wait for
        it and not for each other.
        """
        found = [edge for edge in circle if not self._shortest(frozenset((edge.source,)))]
        return found or list(circle)

    def _shortest(self, without: frozenset[Node]) -> list[Edge]:
        """Return a shortest circle that avoids the processes `without`."""
        best: list[Edge] = []
        for start in sorted(set(self.edges) - without):
            found = self._circle(start, without)
            if found and (not best or len(found) < len(best)):
                best = found
        return best

    def _circle(self, start: Node, without: frozenset[Node]) -> list[Edge]:
        """Return the shortest way from `start` back to it."""
        ways: dict[Node, list[Edge]] = {start: []}
        todo = [start]
        while todo:
            node = todo.pop(0)
            for edge in self.edges.get(node, []):
                way = [*ways[node], edge]
                if edge.target == start:
                    if any(not each.is_idle for each in way) and not _is_transfer(way):
                        return way
                elif edge.target not in ways and edge.target not in without:
                    ways[edge.target] = way
                    todo.append(edge.target)
        return []


def _may_wait(process: Process) -> bool:
    """Return whether the waits of a process count: it runs, or it ended after one of its groups broke."""
    if process.state == "dead":
        return any(group.state == "broken" for group in process.page.groups)
    return process.state != "stopped"


def _is_transfer(way: Sequence[Edge]) -> bool:
    """Return whether two ranks wait for each other because one sends what the other receives."""
    pair = [edge for edge in way if not edge.number]
    return len(way) == len(pair) == 2 and len({edge.call in _SENDS for edge in pair}) == 2


def _absolved(job: Job) -> Mapping[tuple[GroupKey, str, int], set[Node]]:
    """Return who was missing in a call, by group, call and number, where the ranks have agreed on that."""
    found = {}
    for node, failure in job.failures():
        call, number = operation_of(failure)
        group = job.broken(failure, node)
        if failure.kind == "timeout" and number and group is not None:
            found[key_of(group), call, number] = set(job.at_fault(failure, node))
    return found


def _pairs(job: Job, node: Node) -> Iterator[Edge]:
    for wait in job.waits[node]:
        for other in _awaited(job, node, wait):
            yield Edge(node, other, wait.lane.call, 0, wait.group.name, wait.plane)


def _awaited(job: Job, node: Node, wait: Wait) -> list[Node]:
    if wait.place is not None:
        return [job.member(wait.group, wait.place)] if wait.place < wait.group.world_size else []
    # A receive from any rank goes on as soon as another one comes: only with two ranks is that one known.
    others = [job.member(wait.group, place) for place in range(len(wait.group.ranks))]
    return [other for other in others if other != node] if len(others) == 2 else []


def _queue_edges(job: Job) -> Iterator[Edge]:
    for ring in job.rings:
        writer = job.end_of(ring.rank, ring.pid)
        if writer is None or ring.fault:
            continue
        slow = slowest_readers(ring) if ring.writer_waits else []
        for reader in ring.readers:
            node = job.end_of(reader.rank, reader.pid)
            if node is None or node == writer:
                continue
            if reader.waits and not reader.behind_bytes and not ring.is_closed:
                is_idle = job.processes[writer].state != "stopped"
                yield Edge(node, writer, "dequeue", 0, ring.name, "", is_idle)
            if reader in slow:
                yield Edge(writer, node, "enqueue", 0, ring.name, "")


def slowest_readers(ring: Ring) -> list[Reader]:
    """Return the readers that have given back least: a writer without room waits for these."""
    behind = [reader for reader in ring.readers if reader.state == "attached" and reader.behind_bytes]
    most = max((reader.behind_bytes for reader in behind), default=0)
    return [reader for reader in behind if reader.behind_bytes == most]
