"""The report: one JSON for programs, one page for people."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu.steps import StepResult

__all__ = ["MUST_REACH", "NOT_SHOWN", "exit_status", "page", "write_report"]

MUST_REACH = (
    "all-reduce emulated for 2, 4 and 8 ranks, bit-exact",
    "10,000 graph replays with random skew",
    "loopback kernel, 8 to 64 KiB",
    "two-shot of 8 MiB against a plain copy",
    "fused norm against its parts",
    "two and four processes over CUDA IPC",
    "a killed rank",
    "compile time of a module",
    "module from the cache",
    "Python per custom all-reduce",
)
"""The goals by name, in the order of the report. One that no step could write down is shown as not measured."""

NOT_SHOWN = (
    "several GPUs: no byte has crossed from one GPU to another",
    "NVLink and PCIe: order, speed and failures of links",
    "multimem (NVLink SHARP): there is no such path here, and one GPU could not show it",
    "speed beside other libraries: it needs several GPUs, and is not told from one",
)
"""What a single GPU cannot show, whatever passes."""


def exit_status(results: Sequence[StepResult]) -> int:
    """Return 1 if a step failed, else 0."""
    return int(any(result.status == "failed" for result in results))


def write_report(
    results: Sequence[StepResult], host: Mapping[str, str], seconds: float, folder: Path
) -> None:
    """Write `gpu-report.json` and `gpu-report.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "version": 1,
        "machine": machine(results, host),
        "seconds": round(seconds, 1),
        "must_reach": goals(results),
        "not_shown": list(NOT_SHOWN),
        "steps": [dataclasses.asdict(result) for result in results],
    }
    (folder / "gpu-report.json").write_text(json.dumps(content, indent=1) + "\n")
    (folder / "gpu-report.md").write_text(page(results, host, seconds))


def machine(results: Sequence[StepResult], host: Mapping[str, str]) -> dict[str, str]:
    """Return what the steps found out about the machine, behind what is known without them."""
    found = dict(host)
    for result in results:
        found.update(result.facts)
    return found


def goals(results: Sequence[StepResult]) -> list[dict[str, object]]:
    """Return every goal, those of `MUST_REACH` first and in order."""
    written = {goal["name"]: goal for result in results for goal in result.goals}
    absent = {"target": "", "found": "not measured", "holds": None}
    names = [*MUST_REACH, *(name for name in written if name not in MUST_REACH)]
    return [written.get(name, {"name": name, **absent}) for name in names]


def _cell(text: object) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def page(results: Sequence[StepResult], host: Mapping[str, str], seconds: float) -> str:
    """Return the readable report."""
    about = machine(results, host)
    device = about.get("GPU", "no GPU")
    lines = [f"# What one GPU showed: {device}", "", "| | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in about.items()]
    counts = {status: sum(r.status == status for r in results) for status in ("passed", "failed", "skipped")}
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    lines += ["", f"{len(results)} steps in {seconds:.0f} s: {told}.", "", *_goal_lines(results)]
    for result in results:
        lines += ["", *_step_lines(result)]
    shown = [result.title for result in results if result.status == "passed"]
    lines += ["", "## What this says, and what not", ""]
    lines += [f"Verified on one {device}: {'; '.join(shown) or 'nothing'}. Not verified:", ""]
    lines += [f"* {each}" for each in NOT_SHOWN]
    return "\n".join(lines) + "\n"


def _goal_lines(results: Sequence[StepResult]) -> list[str]:
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = ["## What had to be reached", "", "| goal | target | found | holds |", "|---|---|---|---|"]
    for goal in goals(results):
        cells = (goal["name"], goal["target"], goal["found"], words[goal["holds"]])  # type: ignore[index]
        lines.append("| " + " | ".join(_cell(each) for each in cells) + " |")
    return lines


def _step_lines(result: StepResult) -> list[str]:
    lines = [f"## {result.name}: {result.title}", "", f"{result.status} in {result.seconds:.1f} s"]
    if result.reason:
        lines += ["", "    " + result.reason.replace("\n", "\n    ")]
    if result.checks:
        lines += ["", "| check | result | s | why |", "|---|---|---|---|"]
        lines += [
            f"| {_cell(check['name'])} | {check['status']} | {check['seconds']:.1f} | "
            f"{_cell(check['reason'].partition(chr(10))[0])} |"
            for check in result.checks
        ]
    if result.figures:
        lines += ["", "| figure | value | unit |", "|---|---|---|"]
        lines += [
            f"| {_cell(name)} | {figure['value']:g} | {_cell(figure['unit'])} |"
            for name, figure in result.figures.items()
        ]
    return lines
