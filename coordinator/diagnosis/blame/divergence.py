"""Find the first call that the ranks of a group made differently: same plane, same number, another call."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from coordinator.diagnosis.blame.members import Job, LaneKey, Node, folded
from coordinator.diagnosis.model import Lane, Record
from coordinator.diagnosis.same_calls import is_shared
from device_comm import _core

__all__ = ["Divergence", "View", "first_divergence"]

# Calls to which every rank brings as many elements, whatever carries them.
_EQUAL_COUNTS: Final = frozenset({"all_reduce", "reduce"})
_OPERATIONS: Final = ("SUM", "MEAN", "PRODUCT", "MIN", "MAX")
_REDUCING: Final = frozenset({"all_reduce", "reduce_scatter", "reduce"})


class View(NamedTuple):
    """What must be equal in the calls with one number. A word that the ranks need not agree on is None."""

    call: str
    root: int | None
    dtype: int | None
    op: int | None
    elements: int | None
    detail: int | None

    def __str__(self) -> str:
        """Return `all_reduce of 1024 elements, float32, SUM`."""
        parts = [self.call]
        if self.elements:
            parts[0] += f" of {self.elements} {'elements' if self.call in _REDUCING else 'bytes'}"
        if self.dtype is not None and self.call != "barrier":
            parts.append(_core.TYPE_NAMES.get(self.dtype, f"dtype {self.dtype}"))
        if self.op is not None and self.call in _REDUCING:
            parts.append(_OPERATIONS[self.op] if self.op < len(_OPERATIONS) else f"reduction {self.op}")
        if self.root is not None:
            parts.append(f"root {self.root}")
        if self.detail:
            parts.append(f"layout {self.detail & 0xFFFF:04x}")
        return ", ".join(parts)


class Divergence(NamedTuple):
    """A call that ranks made differently.

    Attributes:
        key: In which order of calls.
        number: Of the call.
        views: What each process called.
        begin_ns: When each came to it, on its own clock.
        is_past: Whether the same ranks have agreed on a later call, so that it was dealt with.
    """

    key: LaneKey
    number: int
    views: Mapping[Node, View]
    begin_ns: Mapping[Node, int]
    is_past: bool

    @property
    def odd(self) -> list[Node]:
        """Return the processes that made another call than most; all of them if no call has a majority."""
        by_view: dict[View, list[Node]] = {}
        for node, view in self.views.items():
            by_view.setdefault(view, []).append(node)
        most = max(len(nodes) for nodes in by_view.values())
        if 2 * most <= len(self.views):
            return sorted(self.views)
        return sorted(node for nodes in by_view.values() if len(nodes) < most for node in nodes)


def first_divergence(job: Job) -> Divergence | None:
    """Return the first call that ranks made differently, or None. Calls that were dealt with come last."""
    found = list(_divergences(job))
    found.sort(key=functools.cmp_to_key(_order))
    return found[0] if found else None


def _order(one: Divergence, other: Divergence) -> int:
    """Order two divergences by the clock of a process that was in both; clocks of two hosts are never compared."""
    if one.is_past != other.is_past:
        return 1 if one.is_past else -1
    for node in sorted(set(one.begin_ns) & set(other.begin_ns)):
        return one.begin_ns[node] - other.begin_ns[node]
    return (one.key > other.key) - (one.key < other.key)


def _divergences(job: Job) -> Iterator[Divergence]:
    calls: dict[LaneKey, dict[Node, dict[int, tuple[View, int, str]]]] = {}
    for node in range(len(job.processes)):
        for key, records in job.records[node].items():
            for number, record in records.items():
                entry = _view(record), record.begin_ns, record.outcome
                calls.setdefault(key, {}).setdefault(node, {})[number] = entry
        for key, position in job.positions[node].items():
            entry = _view(position.lane), position.lane.begin_ns, position.outcome
            calls.setdefault(key, {}).setdefault(node, {})[position.lane.number] = entry
    for key, of_nodes in calls.items():
        numbers = sorted({number for entries in of_nodes.values() for number in entries})
        for number in numbers:
            entries = {node: entries[number] for node, entries in of_nodes.items() if number in entries}
            views = {node: entry[0] for node, entry in entries.items()}
            if len(set(views.values())) < 2:
                continue
            yield Divergence(
                key,
                number,
                views,
                {node: entry[1] for node, entry in entries.items()},
                is_past=all(
                    any(later > number and entry[2] == "done" for later, entry in of_nodes[node].items())
                    for node in views
                ),
            )


def _view(call: Lane | Record) -> View:
    """Return what ranks must agree on: all of it in shared memory, less where a process group carries the call."""
    if is_shared(call.algorithm):
        return View(call.call, call.root, call.dtype, call.op, call.count, folded(call.detail))
    count = call.count if call.call in _EQUAL_COUNTS else None
    return View(call.call, call.root, None, None, count, None)
