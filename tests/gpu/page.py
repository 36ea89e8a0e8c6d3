"""The page of a GPU session's report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.gpu.claims import CLAIMS, verdict
from tests.gpu.comparison import ROW_HEAD, row_of
from tests.gpu.steps import STEPS

__all__ = ["page", "short_reason"]

_WORDS = {True: "yes", False: "**no**", None: "not measured"}


def short_reason(reason: str) -> str:
    """Return the line that says most: the last error of a failed rank, or what the harness says of the rank."""
    first, *others = reason.splitlines() or [""]
    ranks = [line for line in others if line.startswith("--- rank")]
    errors = [line for line in others if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return [first, *ranks[:1], *errors][-1]


def page(content: Mapping[str, Any]) -> str:
    """Return the readable form of `gpu-report.json`."""
    tests, sessions = content["tests"], content["sessions"]
    machine = {key: value for session in sessions for key, value in session["machine"].items()}
    gpu = machine.get("GPU", "no GPU")
    counts = {
        kind: sum(each["outcome"] == kind for each in tests) for kind in ("passed", "failed", "skipped")
    }
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    seconds = sum(session["seconds"] for session in sessions)
    lines = [f"# What one GPU showed: {gpu}", "", *_table(["machine", ""], machine.items())]
    lines += [f"{len(tests)} tests in {seconds:.0f} s: {told}.", ""]
    lines += [*_sessions(sessions), "## Claims of README.md", "", *_claims(tests, sessions), "## Goals", ""]
    lines += _table(
        ["goal", "target", "found", "reached"],
        [
            (name, goal["target"], goal["found"], _WORDS[goal["reached"]])
            for name, goal in content["goals"].items()
        ],
    )
    shown = []
    for group, step in STEPS.items():
        own = [each for each in tests if each["group"] == group]
        if own and {each["outcome"] for each in own} == {"passed"}:
            shown.append(step.title)
        lines += _group(f"## {group}: {step.title}", own) if own else []
    lines += ["## What this shows, and what it does not", ""]
    where = f"one {gpu}" if "GPU" in machine else gpu
    lines += [
        f"Verified on {where}: {'; '.join(shown) or 'no whole group'}. Not verified:",
        "",
        *(f"* {each}" for each in content["not_shown"]),
    ]
    return "\n".join(lines) + "\n"


def _group(title: str, own: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [title, ""]
    lines += _table(
        ["test", "result", "s", "why"],
        [
            (each["name"], each["outcome"], f"{each['seconds']:.1f}", short_reason(each["reason"]))
            for each in own
        ],
    )
    figures = [(name, figure) for each in own for name, figure in each["figures"].items()]
    if figures:
        lines += _table(
            ["figure", "value", "unit"],
            [(name, f"{each['value']:g}", each["unit"]) for name, each in figures],
        )
    compared = [(name, each) for test in own for name, each in test["comparisons"].items()]
    if compared:
        lines += _table(ROW_HEAD, [row_of(name, each) for name, each in compared])
    return lines


def _sessions(sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table of the parts, if there are several, and a warning if they do not belong together."""
    if len(sessions) == 1 and sessions[0]["part"] is None:
        return []
    lines = _table(
        ["part", "began", "s", "GPU", "driver", "sources"],
        [
            (
                *(session["part"] or "all", session["began"], f"{session['seconds']:.0f}"),
                *(session["machine"].get(key, "unknown") for key in ("GPU", "driver")),
                session["sources"],
            )
            for session in sessions
        ],
    )
    for what, found in (
        (
            "on different machines",
            {tuple(each["machine"].get(key) for key in ("GPU", "driver", "host")) for each in sessions},
        ),
        ("with different sources", {each["sources"] for each in sessions}),
    ):
        if len(found) > 1:
            lines += [f"**The parts ran {what}: do not read them as one run.**", ""]
    return lines


def _claims(tests: Sequence[Mapping[str, Any]], sessions: Sequence[Mapping[str, Any]]) -> list[str]:
    by_name = {
        f"{each['group']}::{each['name']}": {**each, "reason": short_reason(each["reason"])} for each in tests
    }
    parts = [session["part"] for session in sessions]
    return _table(
        ["claim", "", "this run"],
        [
            (claim, statement.text, verdict(statement, by_name, parts))
            for claim, statements in CLAIMS.items()
            for statement in statements
        ],
    )


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)] + [""]
