"""Find who has died, and whether that is why others wait or have failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.diagnosis.blame.members import Job, Node, key_of
from coordinator.diagnosis.blame.wait_graph import WaitGraph
from coordinator.diagnosis.queues import Ring

__all__ = ["deaths"]

Reasons = Mapping[Node, Sequence[str]]


def deaths(job: Job, graph: WaitGraph) -> tuple[Reasons, Reasons]:
    """Return who has died or was interrupted, and how that is known: those whom others miss, and the rest.

    The rest died of a failure that they had seen themselves, or outside of calls, where nobody waits for them.
    """
    missed = _missed(job)
    dead: dict[Node, list[str]] = {node: list(dict.fromkeys(lines)) for node, lines in missed.items()}
    for node, process in enumerate(job.processes):
        if process.state == "dead" and not _has_left_all(job, node):
            dead.setdefault(node, [])
    waited_for = {edge.target for edges in graph.edges.values() for edge in edges}
    # What an interrupted rank has seen may be its own interruption, so it counts as a cause all the same.
    interrupted = {
        other
        for node, failure in job.failures()
        if failure.kind == "interrupted"
        for other in job.at_fault(failure, node)
    }
    causes = {
        node: lines
        for node, lines in dead.items()
        if (node in interrupted or not _has_seen_failure(job, node))
        and (node in missed or node in waited_for or not job.is_outside(node))
    }
    return causes, {node: lines for node, lines in dead.items() if node not in causes}


def _missed(job: Job) -> dict[Node, list[str]]:
    """Return whom others have found dead or interrupted when a group broke, or of whom nothing is left."""
    found: dict[Node, list[str]] = {}
    for node, process in enumerate(job.processes):
        for name, states in process.others.items():
            group = next((each for each in reversed(process.page.groups) if each.name == name), None)
            if group is None:
                continue
            for rank in (rank for rank, state in states.items() if state == "dead"):
                other = job.with_rank(group, rank)
                theirs = None if other is None else job.group_of(other, key_of(group))
                if other is not None and (theirs is None or theirs.state != "left"):
                    found.setdefault(other, []).append(f"{job.name(node)} saw that its process had ended")
    for node, failure in job.failures():
        if failure.kind in ("lost", "interrupted"):
            for other in job.at_fault(failure, node):
                found.setdefault(other, []).append(
                    f"{job.name(node)}: {failure.group!r} broke in {failure.operation}: {failure.detail}"
                )
    for rank, why in job.ended.items():
        found.setdefault(-1 - rank, []).append(why)
    return found


def _has_left_all(job: Job, node: Node) -> bool:
    page = job.processes[node].page
    if not page.groups:
        return not any(_is_open(job, ring, node) for ring in job.rings)
    return all(group.state in ("left", "free") for group in page.groups)


def _is_open(job: Job, ring: Ring, node: Node) -> bool:
    """Return whether a process has ended without closing its end of a queue."""
    if ring.is_closed or ring.fault:
        return False
    return job.end_of(ring.rank, ring.pid) == node or any(
        reader.state == "attached" and job.end_of(reader.rank, reader.pid) == node for reader in ring.readers
    )


def _has_seen_failure(job: Job, node: Node) -> bool:
    """Return whether a group of a process had broken, or its last call was refused, before it ended."""
    return node >= 0 and (
        any(group.state == "broken" for group in job.processes[node].page.groups)
        or any(position.outcome == "disagreed" for position in job.positions[node].values())
    )
