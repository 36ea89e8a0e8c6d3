"""Define what the analysis of a failure says: findings, the most certain kind first, and whom they name."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Culprit", "Finding", "Rule", "Verdict"]

Rule = Literal["dead", "divergent", "order", "root cause", "behind", "stalled", "straggler"]
"""Why somebody is named, in the order in which the rules are asked."""

_TITLES = {
    "dead": "A process died, or was interrupted",
    "divergent": "The ranks made different calls",
    "order": "Ranks wait for each other in a circle",
    "root cause": "The others wait for a process that does not come",
    "behind": "A rank had not come when the others gave up",
    "stalled": "All ranks have come, and the call does not end",
    "straggler": "A rank keeps the others waiting",
}


class Culprit(msgspec.Struct, frozen=True):
    """A process that is named: a rank, or one that only writes or reads queues, as the core of an engine does.

    Attributes:
        rank: In the world; None if it has none, or if that is not known.
        pid: Of its process, in its own PID namespace; None if nothing was seen of it.
        host: Name of its host; empty if nothing was seen of it.
        what: What it does, did last, or called.
        role: What a process without a rank is to the ranks, such as "writer of queue 'steps'", or "rank 0 of
            'weights:0'" for a member of a group of another world; empty for a rank.
    """

    rank: int | None
    pid: int | None
    host: str
    what: str
    role: str = ""

    def __str__(self) -> str:
        """Return `rank 2 (pid 4242 on node1): …`, or `writer of queue 'steps' (pid 4242 on node1): …`."""
        where = "of which nothing was seen" if self.pid is None else f"pid {self.pid} on {self.host}"
        who = self.role if self.rank is None else f"rank {self.rank}"
        return f"{who} ({where}): {self.what}"


class Finding(msgspec.Struct, frozen=True):
    """One reason, and whom it names.

    Attributes:
        rule: The reason.
        culprits: Who is named, by rank.
        call: The call that does not end, such as "all_reduce"; empty if there is none.
        group: Its group, or the queue.
        plane: Its plane.
        number: Its number in the plane, from the group's creation; 0 for calls between two ranks.
        details: Sentences: who waits for whom, and what each rank called.
    """

    rule: Rule
    culprits: tuple[Culprit, ...]
    call: str = ""
    group: str = ""
    plane: str = ""
    number: int = 0
    details: tuple[str, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that are named; a process without a rank is among the `culprits` alone."""
        return tuple(culprit.rank for culprit in self.culprits if culprit.rank is not None)

    @property
    def title(self) -> str:
        """Return the reason as a sentence."""
        return _TITLES[self.rule]

    def text(self) -> str:
        """Return lines for people."""
        lines = [f"{self.title}."]
        if self.call:
            lines.append(f"  call: {called(self.call, self.number, self.group, self.plane)}")
        lines += [f"  {culprit}" for culprit in self.culprits]
        lines += [f"    {line}" for line in self.details]
        return "\n".join(lines)


class Verdict(msgspec.Struct, frozen=True):
    """What the evidence says.

    Attributes:
        findings: The first one is the cause, what is behind it a consequence; empty if nobody is to blame.
        seen: What was looked at.
        broken: Why groups are broken, as each rank was told.
        unseen: What was not seen, and could change the verdict.
    """

    findings: tuple[Finding, ...]
    seen: str
    broken: tuple[str, ...]
    unseen: tuple[str, ...]

    def text(self) -> str:
        """Return the verdict for people."""
        parts = [finding.text() for finding in self.findings] or [
            "Nobody is to blame for anything that was seen."
        ]
        parts.append(f"Seen: {self.seen}.")
        if self.broken:
            parts.append("\n".join(["Broken:", *(f"  {line}" for line in self.broken)]))
        if self.unseen:
            parts.append("\n".join(["Not seen:", *(f"  {line}" for line in self.unseen)]))
        return "\n\n".join(parts)


def called(call: str, number: int, group: str, plane: str) -> str:
    """Return `all_reduce #7 on 'tp:0' (device)`."""
    numbered = f"{call} #{number}" if number else call
    return f"{numbered} on {group!r} ({plane})" if plane else f"{numbered} on {group!r}"
