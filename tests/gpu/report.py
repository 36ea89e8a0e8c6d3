"""The report of a GPU session: one JSON file for programs, one page for people."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["GOALS", "GROUPS", "NOT_SHOWN", "page", "short_reason", "write_report"]

GROUPS = {
    "probe": "versions, memory shared by two processes",
    "processes": "ranks as processes that share the GPU",
    "streams": "ranks as streams of one process",
    "emulation": "all ranks in one cooperative launch",
    "figures": "figures that one GPU can show",
    "oracles": "torch's symmetric memory, NCCL",
}
"""In the order in which they run: what is shipped comes right after what everything stands on."""

GOALS = (
    *(f"all-reduce emulated for {world} ranks, bit-exact" for world in (2, 4, 8)),
    "10,000 graph replays with random skew",
    "noticed: phase_forced_to_0",
    "loopback kernel, 8 to 64 KiB",
    "two-shot of 8 MiB against a plain copy",
    "fused norm against its parts",
    "two processes over CUDA IPC",
    "four processes over CUDA IPC",
    "a killed rank",
    "compile time of a module",
    "module from the cache",
    "Python per custom all-reduce",
)
"""Every goal by name, in the order of the report. A goal that no test recorded is shown as not measured."""

NOT_SHOWN = (
    "several GPUs: no byte has crossed from one GPU to another",
    "NVLink and PCIe: order, speed and failures of links",
    "multimem (NVLink SHARP): there is no such path here, and one GPU could not show it",
    "speed beside other libraries: one GPU cannot show it",
)
"""What a single GPU cannot show, whatever passes."""

Result = Mapping[str, Any]
"""What became of a test: group, name, outcome, reason, seconds, figures, goals, facts."""


def write_report(folder: Path, results: Sequence[Result], seconds: float) -> None:
    """Write `gpu-report.json` and `gpu-report.md`."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "version": 2,
        "machine": machine(results),
        "seconds": round(seconds, 1),
        "goals": goals(results),
        "not_shown": NOT_SHOWN,
        "tests": results,
    }
    for name, text in (("json", json.dumps(content, indent=1) + "\n"), ("md", page(results, seconds))):
        part = folder / f"gpu-report.{name}.part"
        part.write_text(text)
        part.replace(folder / f"gpu-report.{name}")


def machine(results: Iterable[Result]) -> dict[str, str]:
    """Return what is known of the machine. No host name: a report is read elsewhere."""
    model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processors = f"{len(os.sched_getaffinity(0))} processors"
    found = {
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{model[1] if model else 'unknown'}, {processors}, {platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }
    for result in results:
        found.update(result["facts"])
    return found


def goals(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Return every goal by name, those of `GOALS` first and in order."""
    found = {name: {"target": "", "found": "not measured", "reached": None} for name in GOALS}
    for result in results:
        found.update(result["goals"])
    return found


def short_reason(reason: str) -> str:
    """Return the line that says most: the last error of a failed rank, or what the harness says of the rank."""
    first, *others = reason.splitlines() or [""]
    ranks = [line for line in others if line.startswith("--- rank")]
    errors = [line for line in others if re.match(r"[\w.]*(Error|Exception|Exit)\b", line)]
    return [first, *ranks[:1], *errors][-1]


def page(results: Sequence[Result], seconds: float) -> str:
    """Return the readable report."""
    about = machine(results)
    gpu = about.get("GPU", "no GPU")
    counts = {
        kind: sum(each["outcome"] == kind for each in results) for kind in ("passed", "failed", "skipped")
    }
    told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    words = {True: "yes", False: "**no**", None: "not measured"}
    lines = [f"# What one GPU showed: {gpu}", "", *_table(["machine", ""], about.items())]
    lines += [f"{len(results)} tests in {seconds:.0f} s: {told}.", "", "## Goals", ""]
    lines += _table(
        ["goal", "target", "found", "reached"],
        [
            (name, goal["target"], goal["found"], words[goal["reached"]])
            for name, goal in goals(results).items()
        ],
    )
    shown = []
    for group, title in GROUPS.items():
        own = [each for each in results if each["group"] == group]
        if not own:
            continue
        if {each["outcome"] for each in own} == {"passed"}:
            shown.append(title)
        lines += [f"## {group}: {title}", ""]
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
    lines += ["## What this shows, and what it does not", ""]
    lines += [
        f"Verified on one {gpu}: {'; '.join(shown) or 'no whole group'}. Not verified:",
        "",
        *(f"* {each}" for each in NOT_SHOWN),
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    cells = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *cells)] + [""]
