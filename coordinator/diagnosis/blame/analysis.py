"""Find who is at fault, from what was seen of all processes. Pure: pages in, verdict out.

The rules are asked in a fixed order; the first that names somebody gives the cause. No rule compares the clocks of two
hosts: numbers of calls, which count from a group's creation, tell who is behind.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from coordinator.diagnosis.blame.deaths import deaths
from coordinator.diagnosis.blame.divergence import first_divergence
from coordinator.diagnosis.blame.evidence import Evidence, Failure
from coordinator.diagnosis.blame.members import GroupKey, Job, Node, key_of, operation_of
from coordinator.diagnosis.blame.verdict import Culprit, Finding, Rule, Verdict, called
from coordinator.diagnosis.blame.wait_graph import Edge, WaitGraph, slowest_readers
from coordinator.diagnosis.model import Record
from coordinator.diagnosis.stragglers import FEWEST_CALLS, LaneCount, is_suspect

__all__ = ["judge"]

_MOST_DETAILS: Final = 16
# Words in the names of what carries calls that CUDA graphs can hold.
_CAPTURED: Final = ("nccl", "cuda", "our kernels")
_MOST_RANKS: Final = 1 << 16


def judge(evidence: Evidence) -> Verdict:
    """Return who is at fault, and what was not seen.

    A failure after which processes went on counts only if the evidence shows no later one.
    """
    verdict = _judge(evidence)
    if evidence.earlier is not None and all(found.rule == "straggler" for found in verdict.findings):
        earlier = _judge(evidence.earlier)
        if earlier.findings:
            return msgspec.structs.replace(earlier, seen=f"{earlier.seen}; some went on after this failure")
    return verdict


def _judge(evidence: Evidence) -> Verdict:
    job = Job(evidence)
    graph = WaitGraph(job)
    causes, others = deaths(job, graph)
    rules: tuple[Callable[[], Iterator[Finding]], ...] = (
        lambda: _dead(job, graph, causes),
        lambda: _divergent(job),
        lambda: _circles(job, graph),
        lambda: _root_causes(job, graph),
        lambda: _behind(job),
        lambda: _stalled(job, graph),
        lambda: _stragglers(job),
    )
    found: list[Finding] = []
    for rule in rules:
        found += rule()
        if found:
            break
    # Processes that ended for another reason, or that nobody misses, are named after the cause.
    found += _dead(job, graph, others)
    groups = sorted({group.name for group in job.groups.values()})
    processes = f"{len(job.processes)} process{'es' * (len(job.processes) != 1)}"
    return Verdict(
        tuple(found),
        f"{processes}, groups: {', '.join(groups) or 'none'}",
        tuple(_broken(job)),
        (*_unseen(job), *evidence.unseen),
    )


def _broken(job: Job) -> Iterator[str]:
    """Return why groups are broken, as each rank was told."""
    for node, process in enumerate(job.processes):
        for group in process.page.groups:
            if group.cause and not group.is_torn:
                yield f"{job.name(node)}: {group.cause}"


def _dead(job: Job, graph: WaitGraph, nodes: Mapping[Node, Sequence[str]]) -> Iterator[Finding]:
    """Name who has died."""
    if nodes:
        details = [line for node in sorted(nodes) for line in nodes[node]]
        yield _finding(job, "dead", sorted(nodes), _broken_call(job) or _call_to(graph, nodes), details)


def _divergent(job: Job) -> Iterator[Finding]:
    """Name who made the first call that differs, unless the ranks went on together."""
    found = first_divergence(job)
    if found is None or found.is_past:
        return
    odd = found.odd
    culprits = [job.culprit(node, f"called {found.views[node]}") for node in odd]
    others = sorted(set(found.views) - set(odd))
    details = [f"{job.name(node)} called {found.views[node]}" for node in others]
    if len(odd) == len(found.views):
        details.append("no call has a majority, so that all are named")
    yield Finding(
        "divergent",
        tuple(culprits),
        found.views[odd[0]].call,
        found.key.group,
        found.key.plane,
        found.number,
        tuple(details[:_MOST_DETAILS]),
    )


def _circles(job: Job, graph: WaitGraph) -> Iterator[Finding]:
    """Name the ranks that wait for each other: they entered groups, or calls between two ranks, in different orders."""
    circle = graph.cycle()
    if not circle:
        return
    named = graph.pivots(circle)
    culprits = [job.culprit(edge.source, _waits(edge, job)) for edge in named]
    first = named[0]
    orders = len({(edge.group, edge.plane) for edge in circle})
    details = [f"the circle goes through {orders} groups or planes"] if orders > 1 else []
    details += [edge.text(job) for edge in circle if edge not in named]
    yield Finding(
        "order", tuple(culprits), first.call, first.group, first.plane, first.number, tuple(details)
    )


def _waits(edge: Edge, job: Job) -> str:
    where = called(edge.call, edge.number, edge.group, edge.plane)
    return f"waits in {where} for {job.name(edge.target)}"


def _root_causes(job: Job, graph: WaitGraph) -> Iterator[Finding]:
    """Name those for whom others wait and who wait for nobody, the surest kind first."""
    sinks = graph.sinks()
    kinds: tuple[list[Node], ...] = (
        [node for node in sinks if node >= 0 and job.processes[node].state in ("stopped", "dead")],
        [node for node in sinks if node >= 0 and job.is_outside(node)],
        [node for node in sinks if node >= 0 and not job.is_outside(node)],
        [node for node in sinks if node < 0],
    )
    for nodes in kinds:
        if nodes:
            into = [edge for edges in graph.edges.values() for edge in edges if edge.target in nodes]
            hard = [edge for edge in into if not edge.is_idle] or into
            details = [edge.text(job) for edge in sorted(hard)]
            details += _lags(job, nodes)
            yield _finding(job, "root cause", nodes, hard[0] if hard else None, details)
            return


def _lags(job: Job, nodes: Sequence[Node]) -> Iterator[str]:
    """Return how far the readers among `nodes` are behind in queues whose writers have no room."""
    for ring in job.rings:
        for reader in slowest_readers(ring) if ring.writer_waits else ():
            node = job.end_of(reader.rank, reader.pid)
            if node in nodes and node is not None:
                yield (
                    f"{job.name(node)} is {reader.behind_messages} messages and {reader.behind_bytes} bytes behind "
                    f"in queue {ring.name!r}"
                )


def _behind(job: Job) -> Iterator[Finding]:
    """Name who had not come to the call in which a group timed out, as its ranks have agreed."""
    for node, failure in job.failures():
        if failure.kind not in ("timeout", "left", "failed"):
            continue
        nodes = job.at_fault(failure, node)
        if failure.kind == "failed" and not nodes:
            nodes = job.at_fault(_by(failure), node)
        if not nodes:
            continue
        within = f" within {failure.within_s:.1f} s" if failure.within_s else ""
        verb = {"timeout": "had not come", "left": "had destroyed the group", "failed": "failed"}[
            failure.kind
        ]
        names = ", ".join(job.name(each) for each in sorted(nodes))
        details = [f"rank {failure.by} found in {failure.operation}: {names} {verb}{within}"]
        details += [line for each in nodes for line in _came_late(job, each, failure)]
        call, number = operation_of(failure)
        culprits = tuple(job.culprit(each) for each in sorted(nodes))
        plane = _plane_of(job, failure, node)
        yield Finding("behind", culprits, call, failure.group, plane, number, tuple(details))
        return


def _by(failure: Failure) -> Failure:
    return Failure(failure.group, failure.kind, (failure.by,), failure.by, failure.operation)


def _plane_of(job: Job, failure: Failure, node: Node) -> str:
    """Return the plane of the call in which a group broke, as a page shows it; `node` has the record of the failure."""
    call, number = operation_of(failure)
    group = job.broken(failure, node)
    for positions in job.positions if group is not None and number else ():
        for key, position in positions.items():
            lane = position.lane
            if group is not None and (key.of, lane.call, lane.number) == (key_of(group), call, number):
                return key.plane
    return ""


def _came_late(job: Job, node: Node, failure: Failure) -> Iterator[str]:
    """Say what a rank did before it came; on its own clock."""
    if node < 0:
        return
    call, number = operation_of(failure)
    for key, position in job.positions[node].items():
        lane = position.lane
        if key.group != failure.group or (lane.call, lane.number) != (call, number) or not number:
            continue
        before = job.records[node].get(key, {}).get(number - 1)
        if before is not None:
            apart_s = (lane.begin_ns - before.end_ns) / 1e9
            yield f"{job.name(node)} came {apart_s:.1f} s after the end of its {before.call} #{before.number}"


def _stalled(job: Job, graph: WaitGraph) -> Iterator[Finding]:
    """Name who is in a call that all have come to and that does not end: whoever still computes, or else all."""
    for positions in job.positions:
        for key, position in positions.items():
            lane = position.blocked
            if lane is None or (lane.state == "idle" and not _timed_out_together(job, key.of)):
                continue
            members = job.members(key)
            theirs = {node: job.positions[node].get(key) for node in members if node >= 0}
            if len(theirs) < len(members) or any(
                each is None or each.blocked is None or each.reached != lane.number
                for each in theirs.values()
            ):
                continue
            if any(node in graph.edges or job.waits[node] for node in members):
                continue
            busy = [
                node
                for node, each in theirs.items()
                if job.processes[node].state == "stopped"
                or (each is not None and each.lane.state == "computing")
            ]
            culprits = [job.culprit(node) for node in sorted(busy or members)]
            yield Finding("stalled", tuple(culprits), lane.call, key.group, key.plane, lane.number)
            return


def _timed_out_together(job: Job, key: GroupKey) -> bool:
    for node, failure in job.failures():
        group = job.broken(failure, node)
        if group is not None and key_of(group) == key and failure.kind == "timeout" and not failure.ranks:
            return True
    return False


def _stragglers(job: Job) -> Iterator[Finding]:
    """Name who comes last to most calls of a group, by the rule of `stragglers` for a single window."""
    named: set[tuple[str, str, Node]] = set()
    for process in job.processes:
        groups = {(group.name, group.epoch): group for group in process.page.groups}
        lanes: dict[tuple[str, int, str], list[Record]] = {}
        for record in process.page.records:
            group = groups.get((record.group, record.epoch))
            if group is None or record.begin_ns < group.created_ns:
                continue
            if record.last is not None and record.outcome == "done":
                lanes.setdefault((record.group, record.epoch, record.plane), []).append(record)
        for (name, epoch, plane), records in lanes.items():
            group = groups[name, epoch]
            if len(records) < FEWEST_CALLS:
                continue
            window_ns = max(records[-1].end_ns - records[0].begin_ns, 1)
            late = [_counted(records, place) for place in range(len(group.ranks))]
            for place, count in enumerate(late):
                others = max((each.late_ns for each in late if each is not count), default=0)
                if not is_suspect(count, others, len(late), window_ns):
                    continue
                node = job.member(group, place)
                if (name, plane, node) in named:
                    continue
                named.add((name, plane, node))
                what = (
                    f"came last to {count.last} of {count.calls} calls, and kept the others waiting for "
                    f"{100 * count.late_ns / window_ns:.0f} % of {window_ns / 1e9:.1f} s"
                )
                yield Finding(
                    "straggler", (job.culprit(node, what),), records[-1].call, name, plane, records[-1].number
                )


def _counted(records: Sequence[Record], place: int) -> LaneCount:
    """Return to how many of some calls the member in a place came last, and how late it was in these."""
    late_ns = [record.late_ns for record in records if record.last == place]
    return LaneCount(place, len(records), len(late_ns), sum(late_ns))


def _broken_call(job: Job) -> Edge | None:
    """Return the call in which the first group broke."""
    for node, failure in job.failures():
        call, number = operation_of(failure)
        if call:
            return Edge(node, node, call, number, failure.group, _plane_of(job, failure, node))
    return None


def _call_to(graph: WaitGraph, nodes: Container[Node]) -> Edge | None:
    """Return a call in which somebody waits for one of `nodes`; rather one that is no wait for work."""
    into = [edge for edges in graph.edges.values() for edge in edges if edge.target in nodes]
    return min(into, key=lambda edge: (edge.is_idle, edge), default=None)


def _finding(
    job: Job, rule: Rule, nodes: Sequence[Node], call: Edge | None, details: Iterable[str]
) -> Finding:
    culprits: tuple[Culprit, ...] = tuple(job.culprit(node) for node in nodes)
    told = tuple(dict.fromkeys(details))
    if len(told) > _MOST_DETAILS:
        told = (*told[:_MOST_DETAILS], f"and {len(told) - _MOST_DETAILS} more")
    if call is None:
        return Finding(rule, culprits, details=told)
    return Finding(rule, culprits, call.call, call.group, call.plane, call.number, told)


def _unseen(job: Job) -> Iterator[str]:
    """Return sentences on what the pages do not show."""
    ranks = {process.page.rank for process in job.processes}
    world_size = max((process.page.world_size for process in job.processes), default=0)
    # A hostile page may state any size.
    missing = [rank for rank in range(min(world_size, _MOST_RANKS)) if rank not in ranks]
    if missing:
        more = f" and {len(missing) - _MOST_DETAILS} more" if len(missing) > _MOST_DETAILS else ""
        listed = ", ".join(map(str, missing[:_MOST_DETAILS]))
        yield f"rank{'s' * (len(missing) > 1)} {listed}{more}: neither a page nor a dump"
    for name in job.strangers():
        yield f"{name}: neither a page nor a dump"
    for node, process in enumerate(job.processes):
        if process.page.refused:
            yield f"{job.name(node)}: {process.page.refused} groups, queues or lanes, for which its page had no room"
        known = {ring.name for ring in job.rings if not ring.fault}
        if lost := sorted({queue.name for queue in process.page.queues} - known):
            yield f"{job.name(node)}: the positions of its queues {', '.join(lost)}"
    torn = sum(group.is_torn for process in job.processes for group in process.page.groups)
    torn += sum(
        lane.is_torn for process in job.processes for group in process.page.groups for lane in group.lanes
    )
    if torn:
        yield f"{torn} record{'s' * (torn > 1)} that were being written"
    algorithms = {
        lane.algorithm for process in job.processes for group in process.page.groups for lane in group.lanes
    }
    if any(word in each.lower() for each in algorithms for word in _CAPTURED):
        yield "calls inside of CUDA graphs that were replayed: only their capture is in the pages"
