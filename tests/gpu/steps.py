"""The steps of a GPU session: their order, the time of each, and what a session that is late leaves out.

    python -m tests.gpu.steps [PART]     prints the seconds of a whole session, or of one part of it

A session of 16 minutes may have to be three commands of less than 10 minutes each: the parts. Every part has its own
time, and begins with the facts about the machine. Nothing here needs torch: `run.sh` asks before torch is imported.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

__all__ = ["IN_EVERY_PART", "PARTS", "STEPS", "PlannedTest", "Schedule", "Step", "allot", "seconds_of"]

START_S = {1: 60.0, 2: 60.0, 3: 60.0}
"""By part, from the start of `run.sh` to the first test of its own. The first part builds the native cores and reads
torch from a cold disk. The others find both if they are on the same machine and get the same `--build`; if not, they
are a little late."""
MARGIN_S = 60.0
"""How long after its time `run.sh` still waits for pytest to end."""
IN_EVERY_PART = "test_the_machine_says_what_it_is"
"""Its facts belong to the report of every part, which may have been on another machine."""
_NEVER = 0


@dataclasses.dataclass(frozen=True)
class Step:
    """A group of tests, `tests/gpu/test_GROUP.py`.

    Attributes:
        title: What it is about.
        part: The command that it belongs to.
        box_s: The most time of all its tests together.
        cut: Its place, from 1, among the steps that a late session leaves out; 0 if it is never left out.
    """

    title: str
    part: int
    box_s: float
    cut: int = _NEVER


STEPS = {
    "probe": Step("the machine, memory shared by two processes", 1, 60.0),
    "processes": Step("ranks as processes that share the GPU", 1, 150.0),
    "streams": Step("ranks as streams of one process", 2, 130.0),
    "controls": Step("kernels with a mistake, which must be noticed", 2, 90.0),
    "emulation": Step("all ranks in one cooperative launch", 2, 150.0, cut=3),
    "figures": Step("figures that one GPU can show", 3, 80.0),
    "variants": Step("pairs of variants, measured in turns", 3, 120.0, cut=4),
    "oracles": Step("torch's symmetric memory, NCCL", 3, 60.0, cut=2),
    "patterns": Step("two groups in opposite order, forked captures, compiled graphs", 3, 60.0, cut=1),
}
"""By group, in the order in which they run: what is shipped comes right after what everything stands on. The boxes
are two to three times what a machine with an H200 and 16 cores took."""
PARTS = tuple(START_S)


def seconds_of(part: int | None) -> float:
    """Return the time of a part, its start included; None stands for the whole session in one command."""
    if part is None:
        return START_S[1] + sum(step.box_s for step in STEPS.values())
    return START_S[part] + sum(step.box_s for step in STEPS.values() if step.part == part)


def allot(least_s: float, most_s: float, later_s: float, left_s: float) -> float:
    """Return the seconds for a test, 0 if it cannot be run.

    Later tests keep the least that they need, `later_s`. If that is impossible the earlier test runs.
    """
    free = max(left_s - later_s, min(left_s, least_s))
    return 0.0 if free < least_s else min(free, most_s)


@dataclasses.dataclass(frozen=True)
class PlannedTest:
    """A test of a session: its group, and the least and the most time that it takes."""

    group: str
    least_s: float
    most_s: float


class Schedule:
    """Gives the tests of a session their time, in their order.

    A step has its box: what one step does not use is not added to another's box. A session can be late because it
    began late or because a step ended late. Then the steps with a `cut` are left out in that order: a step is not begun
    unless the time that is left also covers the boxes of all later steps that are cut after it or never. Once a test of
    such a step got no time, the rest of the step gets none either: the end of a step is cut, not its middle.
    """

    def __init__(self, tests: Sequence[PlannedTest], end: float, clock: Callable[[], float]) -> None:
        """Plan `tests` until `end` by `clock`, in seconds."""
        self._tests, self._end, self._clock = list(tests), end, clock
        self._begun: dict[str, float] = {}
        self._cut: set[str] = set()

    def seconds_for(self, at: int) -> tuple[float, str]:
        """Return the seconds for test number `at`, which begins now; 0 and the reason if it gets none."""
        test, now = self._tests[at], self._clock()
        step = STEPS[test.group]
        if test.group in self._cut:
            return 0.0, f"left out with an earlier test of {test.group}"
        own = sum(each.least_s for each in self._tests[at + 1 :] if each.group == test.group)
        box = step.box_s - (now - self._begun.setdefault(test.group, now))
        given = allot(test.least_s, test.most_s, own, box)
        reason = "" if given else f"the {step.box_s:.0f} s of {test.group} are used up"
        if given:
            left = self._end - now - self._kept_boxes(at)
            given = min(given, allot(test.least_s, test.most_s, own + self._kept_least(at), left))
            reason = "" if given else self._reason(at)
        if not given and step.cut:
            self._cut.add(test.group)
        return given, reason

    def _kept_groups(self, at: int) -> list[str]:
        """Return the later steps that are left out after this one or never; none if this one is never left out."""
        cut = STEPS[self._tests[at].group].cut
        later = dict.fromkeys(each.group for each in self._tests[at + 1 :])
        return [group for group in later if cut and (STEPS[group].cut == _NEVER or STEPS[group].cut > cut)]

    def _kept_boxes(self, at: int) -> float:
        """Return the time that this test must leave to later steps, which may need less than their boxes."""
        total = 0.0
        for group in self._kept_groups(at):
            most = sum(each.most_s for each in self._tests[at + 1 :] if each.group == group)
            total += min(STEPS[group].box_s, most)
        return total

    def _kept_least(self, at: int) -> float:
        """Return the least time of later steps that are never left out, if this one is not left out either."""
        if STEPS[self._tests[at].group].cut:
            return 0.0
        own = self._tests[at].group
        later = [each for each in self._tests[at + 1 :] if each.group != own]
        return sum(each.least_s for each in later if STEPS[each.group].cut == _NEVER)

    def _reason(self, at: int) -> str:
        kept = self._kept_groups(at)
        if kept:
            return f"late: {self._tests[at].group} is left out, so that there is time for {', '.join(kept)}"
        return "no time is left of --gpu-seconds"


def main(arguments: Sequence[str]) -> None:
    """Print the seconds of a part or of the whole session."""
    part = int(arguments[0]) if arguments else None
    if part is not None and part not in PARTS:
        raise SystemExit(f"there is no part {part}, only {', '.join(map(str, PARTS))}")
    print(round(seconds_of(part)))


if __name__ == "__main__":
    main(sys.argv[1:])
