"""The order and the time of a GPU session's steps, with a clock of its own."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.gpu.steps import (
    IN_EVERY_PART,
    MARGIN_S,
    PARTS,
    STEPS,
    PlannedTest,
    Schedule,
    allot,
    seconds_of,
)

ROOT = Path(__file__).parents[3]
SESSION_S, COMMAND_S = 25 * 60, 10 * 60
"""What a lent machine gives to a session, and to one command of it."""


def marked(group: str) -> Iterator[tuple[str, PlannedTest]]:
    """Yield the name and the times of every test of a group, once for each value of its parameters."""
    module = importlib.import_module(f"tests.gpu.test_{group}")
    for name, test in vars(module).items():
        if name.startswith("test_"):
            marks = {mark.name: mark.args for mark in test.pytestmark}
            assert marks["requires_gpus"] == (1,)
            for _ in marks.get("parametrize", ("", [""]))[1]:
                yield name, PlannedTest(group, *marks["gpu_seconds"])


def planned_of(part: int | None) -> list[PlannedTest]:
    """Return the tests of a part in their order."""
    return [
        test
        for group, step in STEPS.items()
        for name, test in marked(group)
        if part in (None, step.part) or name == IN_EVERY_PART
    ]


class Session:
    """Runs tests that take as long as the test says, on a clock that only they advance."""

    def __init__(self, tests: list[PlannedTest], seconds: float, late_s: float = 0.0) -> None:
        self.now = 1000.0
        self._tests = tests
        self._schedule = Schedule(tests, self.now + seconds, lambda: self.now)
        self.now += late_s
        self.given: list[float] = []
        self.reasons: list[str] = []

    def run(self, takes: Mapping[str, float]) -> dict[str, int]:
        """Run all tests, each for a share of its time, by group (1 if not named); return how many ran, by group."""
        for number, test in enumerate(self._tests):
            given, reason = self._schedule.seconds_for(number)
            self.given.append(given)
            self.reasons.append(reason)
            self.now += given * takes.get(test.group, 1.0)
        return {
            group: sum(
                given > 0 for given, test in zip(self.given, self._tests, strict=True) if test.group == group
            )
            for group in dict.fromkeys(test.group for test in self._tests)
        }


# --- the plan -------------------------------------------------------------------------------------------------


def test_every_step_has_its_tests_and_fits_into_its_box() -> None:
    """The least of all tests of a step is in its box; the boxes fit into a session, a part into one command."""
    assert {path.stem.removeprefix("test_") for path in (ROOT / "tests" / "gpu").glob("test_*.py")} == set(
        STEPS
    )
    for group, step in STEPS.items():
        tests = [test for _, test in marked(group)]
        assert tests, group
        assert all(0 < test.least_s <= test.most_s for test in tests)
        assert sum(test.least_s for test in tests) <= step.box_s, group
    assert sum(map(seconds_of, PARTS)) <= SESSION_S
    assert seconds_of(None) <= SESSION_S
    assert all(seconds_of(part) + MARGIN_S < COMMAND_S for part in PARTS)


def test_the_order_is_that_of_the_plan() -> None:
    """What is shipped comes first; what is cut first is what tells least; the parts follow the order."""
    assert list(STEPS) == [
        *("probe", "processes", "streams", "controls"),
        *("emulation", "figures", "variants", "oracles", "patterns"),
    ]
    cut = sorted((step.cut, group) for group, step in STEPS.items() if step.cut)
    assert [group for _, group in cut] == ["patterns", "oracles", "emulation", "variants"]
    parts = [step.part for step in STEPS.values()]
    assert parts == sorted(parts)
    assert set(parts) == set(PARTS)


@pytest.mark.parametrize("part", [None, *PARTS])
def test_a_session_in_time_gives_every_test_its_least(part: int | None) -> None:
    """Nothing is left out, even if every test takes all that it is given."""
    tests = planned_of(part)
    session = Session(tests, seconds_of(part))
    session.run({})
    assert all(given >= test.least_s for given, test in zip(session.given, tests, strict=True)), (
        session.reasons
    )
    assert session.now - 1000.0 <= seconds_of(part)


def test_the_script_asks_for_the_seconds_of_a_part() -> None:
    """As `run.sh` does; another part is refused."""
    command = [sys.executable, "-m", "tests.gpu.steps"]

    def asked(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=30, check=False
        )

    assert int(asked("2").stdout) == seconds_of(2)
    assert int(asked().stdout) == seconds_of(None)
    assert "there is no part 4" in asked("4").stderr


# --- boxes and cuts -------------------------------------------------------------------------------------------


def test_later_tests_keep_the_least_that_they_need() -> None:
    """A test takes what is free, up to its most; where time is short the earlier test runs."""
    assert allot(10.0, 50.0, 20.0, 200.0) == 50.0
    assert allot(10.0, 50.0, 20.0, 45.0) == 25.0
    assert allot(10.0, 50.0, 20.0, 15.0) == 10.0
    assert allot(10.0, 50.0, 20.0, 9.0) == 0.0
    assert allot(10.0, 50.0, 0.0, 12.0) == 12.0


def test_a_step_ends_with_its_box() -> None:
    """However much time the session has left, and whatever the tests before did not use."""
    box = STEPS["streams"].box_s
    tests = (
        [PlannedTest("probe", 5, 30)]
        + [PlannedTest("streams", 40, 60)] * 4
        + [PlannedTest("controls", 5, 30)]
    )
    session = Session(tests, 10_000.0)
    assert session.run({"probe": 0.1}) == {"probe": 1, "streams": 3, "controls": 1}
    assert session.given == [30, 40, 40, 40, 0, 30]
    assert session.reasons[4] == f"the {box:.0f} s of streams are used up"


def test_steps_that_are_never_left_out_keep_the_least_of_each_other() -> None:
    """An early one takes no time that a later one needs; what may be left out keeps nothing from them."""
    tests = [PlannedTest("probe", 5, 60), PlannedTest("streams", 20, 20), PlannedTest("oracles", 30, 30)]
    session = Session(tests, 50.0)
    assert session.run({}) == {"probe": 1, "streams": 1, "oracles": 0}
    assert session.given == [30, 20, 0]


def test_a_late_session_leaves_out_the_steps_in_their_order() -> None:
    """The later the beginning, the more is missing: patterns, oracles, emulation, the end of variants; then no more."""
    tests = planned_of(None)
    whole = Session(tests, seconds_of(None)).run({})
    seen: list[tuple[str, ...]] = []
    for late in range(0, int(seconds_of(None)), 5):
        session = Session(tests, seconds_of(None), late)
        ran = session.run({})
        missing = tuple(group for group in STEPS if ran[group] < whole[group])
        if not seen or seen[-1] != missing:
            seen.append(missing)
        if "variants" not in missing:
            # Two to four, and six, are never left out before the others are.
            assert not {"probe", "processes", "streams", "controls", "figures"} & set(missing), (
                late,
                missing,
            )
        else:
            assert {"patterns", "oracles", "emulation"} <= set(missing), (late, missing)
        if "emulation" in missing:
            assert {"patterns", "oracles"} <= set(missing), (late, missing)
        if "oracles" in missing:
            assert "patterns" in missing, (late, missing)
    assert seen[0] == ()
    assert seen[1:5] == [
        ("patterns",),
        ("oracles", "patterns"),
        ("emulation", "oracles", "patterns"),
        ("emulation", "variants", "oracles", "patterns"),
    ]


def test_the_end_of_a_step_is_cut_and_not_its_middle() -> None:
    """After a test without time no later test of the same step runs, even if it is shorter."""
    tests = [PlannedTest("variants", 10, 10), PlannedTest("variants", 50, 50), PlannedTest("variants", 1, 1)]
    session = Session(tests, 40.0)
    assert session.run({}) == {"variants": 1}
    assert session.reasons[1:] == [
        "no time is left of --gpu-seconds",
        "left out with an earlier test of variants",
    ]


def test_a_step_that_is_left_out_says_for_which_others() -> None:
    """The reader of the report sees what got the time instead."""
    tests = [PlannedTest("emulation", 10, 10), PlannedTest("figures", 5, 500), PlannedTest("oracles", 5, 500)]
    session = Session(tests, STEPS["figures"].box_s + 4.0)
    assert session.run({}) == {"emulation": 0, "figures": 1, "oracles": 0}
    assert session.reasons[0] == "late: emulation is left out, so that there is time for figures"
