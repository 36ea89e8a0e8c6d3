"""Define what the analysis of a failure starts from: what each process was seen to do, and what was not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from coordinator.diagnosis.model import Page
from coordinator.diagnosis.queues import Ring

__all__ = ["Evidence", "Failure", "Process", "ProcessState", "Source"]

Source = Literal["live", "dump", "file"]
"""Where a page was read: in a process that runs, in a dump, or in the file that a process has left."""

ProcessState = Literal["alive", "stopped", "dead", "unknown"]


class Failure(msgspec.Struct, frozen=True):
    """What broke a group: the failure record on which its ranks have agreed.

    Attributes:
        group: The group's unique name.
        kind: "timeout", "lost", "left", "interrupted" or "failed"; empty if the ranks have no record of it.
        ranks: Ranks at fault, as the group counts ranks of its world.
        by: The rank that found it.
        operation: In which call, such as "all_reduce #7"; without a number it is a call between two ranks.
        within_s: Deadline of that call in seconds, or 0.
        detail: Text of the error.
    """

    group: str
    kind: str = ""
    ranks: tuple[int, ...] = ()
    by: int = -1
    operation: str = ""
    within_s: float = 0.0
    detail: str = ""


class Process(msgspec.Struct, frozen=True):
    """One process of the job.

    Attributes:
        page: What its status page says.
        source: Where the page was read.
        state: Of the process when it was looked at; "dead" only if it had died before its job ended.
        now_ns: CLOCK_MONOTONIC of its host at the look; 0 if that is not known.
        failures: What broke its groups, in the order in which they broke.
        others: Which states it saw its groups' processes in when the first of them broke, by group and rank.
        settling: Lanes whose call has only just begun, and is no wait yet, as (group, `created_ns` of the
            group, place among its lanes). The time tells groups apart whose world was joined again, maybe
            with other ranks, since these have the same names.
    """

    page: Page
    source: Source = "live"
    state: ProcessState = "alive"
    now_ns: int = 0
    failures: tuple[Failure, ...] = ()
    others: Mapping[str, Mapping[int, str]] = {}
    settling: frozenset[tuple[str, int, int]] = frozenset()


class Evidence(msgspec.Struct, frozen=True):
    """All that is known of one job.

    Attributes:
        processes: One for each process that was seen.
        rings: The queues whose positions are known.
        ended: Ranks of which nothing is left though others share memory with them, and how that is known.
        unseen: Sentences on what was not seen.
        earlier: The same with the dumps of processes that have gone on after the failure; None if none has.
    """

    processes: tuple[Process, ...]
    rings: tuple[Ring, ...] = ()
    ended: Mapping[int, str] = {}
    unseen: tuple[str, ...] = ()
    earlier: Evidence | None = None
