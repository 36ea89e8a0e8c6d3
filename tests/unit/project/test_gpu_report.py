"""The report of a GPU session: parts that are joined, claims of README.md, comparisons of variants."""

from __future__ import annotations

import dataclasses
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from device_comm.cuda.kernels import FAMILIES
from tests.gpu.claims import CLAIMS, NOT_LAUNCHED, Statement, matches, verdict
from tests.gpu.comparison import Comparison, compare, row_of, take_turns
from tests.gpu.emulation import EMULATED
from tests.gpu.fused_emulation import FUSED_EMULATED
from tests.gpu.notes import Notes, read_notes
from tests.gpu.report import GpuSession, Report, sources_of
from tests.gpu.steps import STEPS
from tests.unit.project.test_gpu_steps import marked

ROOT = Path(__file__).parents[3]


# --- parts ----------------------------------------------------------------------------------------------------


def written(folder: Path, part: int | None, began: str, tests: dict[str, str], **facts: str) -> Report:
    """Write the report of a session with planted outcomes."""
    report = Report.begin(folder, GpuSession(part, facts.pop("sources", "s1"), began))
    for name, outcome in tests.items():
        report.result_of(name).update(outcome=outcome, seconds=1.0, facts=facts)
    report.write(100.0)
    return report


def test_parts_in_one_folder_are_one_report(tmp_path: Path) -> None:
    """The second part goes on with the first; a test that runs in both has its last result; the order is the steps'."""
    facts = {"GPU": "Planted H200", "driver": "1"}
    written(
        tmp_path, 1, "2026-01-01 10:00:00", {"probe::device": "failed", "processes::x": "passed"}, **facts
    )
    written(tmp_path, 3, "2026-01-01 10:20:00", {"figures::f": "passed"}, **facts)
    written(
        tmp_path, 2, "2026-01-01 10:30:00", {"probe::device": "passed", "streams::s[1]": "failed"}, **facts
    )
    report = Report.read(tmp_path)
    assert report is not None
    found = [(each["group"], each["name"], each["outcome"]) for each in report.in_order()]
    assert found == [
        *(("probe", "device", "passed"), ("processes", "x", "passed")),
        *(("streams", "s[1]", "failed"), ("figures", "f", "passed")),
    ]
    assert [session.part for session in report.sessions] == [1, 3, 2]
    assert report.tests["probe::device"]["session"] == report.sessions[2].name
    page = (tmp_path / "gpu-report.md").read_text()
    assert "4 tests in 300 s: 3 passed, 1 failed, 0 skipped." in page
    assert page.count("| Planted H200 | 1 | s1 |") == 3
    assert "do not read them as one run" not in page
    # A session that is no part begins anew.
    assert list(written(tmp_path, None, "2026-01-01 11:00:00", {"probe::y": "passed"}).tests) == ["probe::y"]


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"GPU": "Another"}, "on different machines"),
        ({"driver": "2"}, "on different machines"),
        ({"sources": "s2"}, "with different sources"),
    ],
)
def test_parts_that_do_not_belong_together_are_marked(
    tmp_path: Path, changed: dict[str, str], warning: str
) -> None:
    """Another GPU, another driver or other sources: joined, but the page says so."""
    facts = {"GPU": "Planted H200", "driver": "1", "sources": "s1"}
    written(tmp_path, 1, "2026-01-01 10:00:00", {"probe::x": "passed"}, **facts)
    written(tmp_path, 2, "2026-01-01 10:10:00", {"streams::x": "passed"}, **{**facts, **changed})
    assert (
        f"**The parts ran {warning}: do not read them as one run.**"
        in (tmp_path / "gpu-report.md").read_text()
    )


def test_reports_of_several_folders_are_joined(tmp_path: Path) -> None:
    """As for parts in one folder, whatever the order of the folders; a session in two of them counts once."""
    written(tmp_path / "a", 1, "2026-01-01 10:00:00", {"probe::x": "failed", "processes::p": "passed"})
    written(tmp_path / "b", 2, "2026-01-01 10:10:00", {"probe::x": "passed"})
    written(tmp_path / "a", 3, "2026-01-01 10:20:00", {"figures::f": "passed"})
    command = [sys.executable, "-m", "tests.gpu.report", str(tmp_path / "all")]
    folders = [str(tmp_path / name) for name in ("b", "a", "a")]
    subprocess.run([*command, *folders], cwd=ROOT, check=True, timeout=30)
    report = Report.read(tmp_path / "all")
    assert report is not None
    assert [session.part for session in report.sessions] == [1, 2, 3]
    assert {name: test["outcome"] for name, test in report.tests.items()} == {
        "probe::x": "passed",
        "processes::p": "passed",
        "figures::f": "passed",
    }
    refused = subprocess.run(
        [*command, str(tmp_path / "none")], cwd=ROOT, check=False, capture_output=True, text=True, timeout=30
    )
    assert "no report of version 3" in refused.stderr


def test_the_fingerprint_is_that_of_what_is_tested(tmp_path: Path) -> None:
    """A changed kernel or patch changes it, a cached bytecode does not."""
    kernels = tmp_path / "device_comm" / "csrc" / "a.cu"
    kernels.parent.mkdir(parents=True)
    kernels.write_text("1")
    first = sources_of(tmp_path)
    (kernels.parent / "a.pyc").write_text("x")
    assert sources_of(tmp_path) == first
    kernels.write_text("2")
    assert sources_of(tmp_path) != first


# --- claims ---------------------------------------------------------------------------------------------------


def claims_of_readme() -> list[str]:
    """Return the first cells of the table "What is verified"."""
    section = (ROOT / "README.md").read_text().split("\n## What is verified\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def test_every_claim_of_the_readme_has_an_answer() -> None:
    """Each row of the table has its statements, in the same order, and no statement is about a row that is gone."""
    assert len(claims_of_readme()) >= 7
    assert list(CLAIMS) == claims_of_readme()
    for statements in CLAIMS.values():
        assert statements
        assert all(bool(each.tests) != bool(each.why_not) for each in statements)


def test_every_statement_names_tests_that_exist() -> None:
    """And every test of what is shipped, and every control, belongs to a statement."""
    names = {f"{group}::{name.removeprefix('test_')}" for group in STEPS for name, _ in marked(group)}
    patterns = {each for statements in CLAIMS.values() for one in statements for each in one.tests}
    for pattern in patterns:
        assert any(matches(pattern, name) for name in names), pattern
    unclaimed = {name for name in names if not any(matches(pattern, name) for pattern in patterns)}
    groups = {name.partition("::")[0] for name in unclaimed}
    assert groups <= {"probe", "figures", "variants", "oracles"}, unclaimed


def test_every_kernel_is_launched_by_a_test_or_named_as_not_launched() -> None:
    """A new kernel may not hide behind the claims about the others."""
    launched = {*EMULATED, *FUSED_EMULATED, *FAMILIES["expert"], "add_rms_norm"}
    kernels = [kernel for family in FAMILIES.values() for kernel in family]
    assert sorted(kernels) == sorted([*launched, *NOT_LAUNCHED])


def result(outcome: str, reason: str = "", *, in_setup: bool = False) -> dict[str, Any]:
    """Return what a report holds of a test, as far as a verdict needs it."""
    return {"outcome": outcome, "reason": reason, "in_setup": in_setup}


def test_a_claim_is_shown_refuted_or_not_run() -> None:
    """Shown needs every test of every pattern; one failure refutes; whatever else is missing is named."""
    statement = Statement("x", ("streams::a", "controls"))
    passed = {"streams::a[1]": result("passed"), "controls::b": result("passed")}
    assert verdict(statement, passed, [2]) == "shown"
    assert verdict(statement, {**passed, "streams::a[2]": result("failed")}, [2]) == "refuted (streams::a[2])"
    # A test of a longer name is another test.
    assert verdict(statement, {**passed, "streams::a_b": result("failed")}, [2]) == "shown"
    late = {**passed, "controls::c": result("skipped", "late")}
    assert verdict(statement, late, [2]) == "not run (controls::c: late)"
    unprepared = {**passed, "controls::c": result("failed", "needs 1 GPUs", in_setup=True)}
    assert verdict(statement, unprepared, [2]) == "not run (controls::c: needs 1 GPUs)"
    assert (
        verdict(statement, {**passed, "controls::c": result("running")}, [2])
        == "not run (controls::c had not ended)"
    )
    assert verdict(statement, {}, [1, 3]) == "not run (part 2 of the session was not run)"
    assert verdict(statement, {"controls::b": result("passed")}, [2]) == "not run (streams::a was not run)"
    assert verdict(statement, {}, [None]) == "not run (streams::a was not run)"
    assert verdict(Statement("x", why_not="needs two"), passed, [2]) == "not run (needs two)"


def test_the_page_answers_every_claim(tmp_path: Path) -> None:
    """With a failure, a part that is missing and what one GPU cannot show."""
    tests = {
        "processes::a_lost_rank_is_named[killed]": "failed",
        "processes::a_group_of_the_coordinator_uses_our_kernels[x]": "passed",
    }
    written(tmp_path, 1, "2026-01-01 10:00:00", tests)
    page = (tmp_path / "gpu-report.md").read_text()
    rows = [
        line
        for line in page.split("## Claims of README.md")[1].split("## Goals")[0].splitlines()
        if "|" in line
    ]
    assert len(rows) == 2 + sum(map(len, CLAIMS.values()))
    assert any("| refuted (processes::a_lost_rank_is_named[killed]) |" in row for row in rows)
    assert any("in calls and in captures | shown |" in row for row in rows)
    assert sum("| not run (part 3 of the session was not run) |" in row for row in rows) == 4
    assert "| ARM | the suite passes on ARM | not run (needs an ARM machine) |" in rows


# --- comparisons ----------------------------------------------------------------------------------------------


def planted(turns: int, difference: float, noise: float, drift: float = 0.0) -> list[tuple[float, float]]:
    """Return times of two variants on a machine that gets slower, with noise that is the same for neither."""
    chance = random.Random(3)
    return [
        (
            10.0 + drift * turn + chance.uniform(0, noise),
            10.0 + difference + drift * turn + chance.uniform(0, noise),
        )
        for turn in range(turns)
    ]


def test_a_difference_is_found_below_the_drift_of_the_machine() -> None:
    """Half a microsecond, while both get 5 us slower during the measurement."""
    found = compare("with", "without", planted(21, -0.5, 0.2, drift=0.25))
    assert found.faster == "without"
    assert found.low_us <= -0.5 <= found.high_us < 0
    assert found.difference_us == pytest.approx(-0.5, abs=0.15)
    assert found.turns == 21
    assert compare("with", "without", planted(21, 0.5, 0.2)).faster == "with"


def test_noise_is_no_difference() -> None:
    """Neither where both are equal nor where the noise is larger than the difference."""
    assert compare("a", "b", planted(21, 0.0, 1.0)).faster == "no difference seen"
    assert compare("a", "b", planted(6, 0.05, 3.0)).faster == "no difference seen"
    assert compare("a", "b", [(1.0, 1.0)] * 9).faster == "no difference seen"


@pytest.mark.parametrize(
    ("turns", "low", "high"), [(6, 1, 6), (8, 1, 8), (9, 2, 8), (15, 4, 12), (20, 6, 15), (21, 6, 16)]
)
def test_the_interval_is_that_of_the_sign_test(turns: int, low: int, high: int) -> None:
    """As in published tables of the confidence interval of a median, by the ranks of the sorted differences."""
    shuffled = [(0.0, float(number)) for number in range(1, turns + 1)]
    random.Random(1).shuffle(shuffled)
    found = compare("a", "b", shuffled)
    assert (found.low_us, found.high_us) == (low, high)


def test_too_few_turns_are_refused() -> None:
    """Five differences can never exclude zero with 95 %."""
    with pytest.raises(ValueError, match="5 turns are too few"):
        compare("a", "b", [(1.0, 2.0)] * 5)


def test_variants_take_turns_and_change_who_begins() -> None:
    """Each is measured once in a turn, and its time stands in its own place."""
    order: list[str] = []

    def measured(name: str, value: float) -> float:
        order.append(name)
        return value

    pairs = take_turns(lambda: measured("a", 1.0), lambda: measured("b", 2.0), 3)
    assert pairs == [(1.0, 2.0)] * 3
    assert order == ["a", "b", "b", "a", "a", "b"]


def test_a_comparison_is_a_row_of_the_page(tmp_path: Path) -> None:
    """From the notes of a body through the report to the table."""
    notes = Notes(tmp_path / "notes")
    notes.comparison("one-shot, 2 ranks", compare("with", "without", planted(9, 0.5, 0.0)))
    kept = read_notes(notes.path)
    report = Report.begin(tmp_path, GpuSession(3, "s"))
    report.result_of("variants::x").update(kept, outcome="passed")
    report.write(1.0)
    row = "| one-shot, 2 ranks: with, against without | 10.00 | 10.50 | +0.50 (+5.0%) | +0.50 to +0.50 | 9 | with |"
    assert row in (tmp_path / "gpu-report.md").read_text()
    assert cells(kept["comparisons"]["one-shot, 2 ranks"])[-1] == "with"


def cells(content: dict[str, Any]) -> Sequence[str]:
    """Return the cells of a row; the content has every field."""
    assert set(content) == {field.name for field in dataclasses.fields(Comparison)}
    return row_of("x", content)
