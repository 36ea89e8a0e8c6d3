"""The report of GPU sessions: one JSON file for programs, one page for people. Parts of a session are joined.

python -m tests.gpu.report OUT DIR...     joins the reports in several folders, of parts on several machines
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.gpu.controls import CONTROLS, DELAYS_ALONE
from tests.gpu.notes import KINDS
from tests.gpu.page import page
from tests.gpu.steps import STEPS

__all__ = ["GOALS", "GpuSession", "Report", "sources_of"]

VERSION = 3
GOALS = (
    *(f"all-reduce emulated for {world} ranks, bit-exact" for world in (2, 4, 8)),
    "10,000 graph replays with random skew",
    *(f"noticed: {name}" for name in CONTROLS if name != DELAYS_ALONE),
    "loopback kernel, 8 KiB",
    "loopback kernel, 8 to 64 KiB",
    "two-shot of 8 MiB against a plain copy",
    "fused norm against its parts",
    "asynchronous all-reduce beside a matrix product",
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
    "multimem (NVLink SHARP): it needs several GPUs and a switch",
    "speed beside other libraries: one GPU cannot show it",
)
"""What a single GPU cannot show, whatever passes."""


@dataclasses.dataclass
class GpuSession:
    """One run of pytest.

    Attributes:
        part: Its part; None if it was not a part.
        sources: What `sources_of` returned.
        began: When, in a form that sorts by time.
        name: Unique.
        seconds: How long it took.
        machine: What its tests found out about the machine. No host name: a report is read elsewhere.
    """

    part: int | None
    sources: str
    began: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    seconds: float = 0.0
    machine: dict[str, str] = dataclasses.field(default_factory=dict)


class Report:
    """What became of every test, of one session or of several parts.

    Attributes:
        sessions: In the order of their beginnings.
        tests: By "group::name": group, name, session, outcome, reason, in_setup, seconds, and its notes by kind. A test
            that several sessions ran has the result of the last one.
    """

    def __init__(
        self, folder: Path, sessions: Sequence[GpuSession], tests: Mapping[str, dict[str, Any]]
    ) -> None:
        """Keep the content; `write` writes it to `folder`."""
        self.folder = folder
        self.sessions = sorted(sessions, key=lambda session: session.began)
        self.tests = dict(tests)

    @classmethod
    def begin(cls, folder: Path, session: GpuSession) -> Self:
        """Begin the report of a session. That of a part goes on with what `folder` holds, others replace it."""
        session.machine.update(_host())
        earlier = cls.read(folder) if session.part is not None else None
        if earlier is None:
            return cls(folder, [session], {})
        return cls(folder, [*earlier.sessions, session], earlier.tests)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the report in `folder`; None if there is none of this version."""
        path = folder / "gpu-report.json"
        if not path.exists():
            return None
        content = json.loads(path.read_text())
        if content.get("version") != VERSION:
            return None
        sessions = [GpuSession(**each) for each in content["sessions"]]
        return cls(folder, sessions, {f"{each['group']}::{each['name']}": each for each in content["tests"]})

    @classmethod
    def joined(cls, folder: Path, reports: Iterable[Report]) -> Self:
        """Return the report of all sessions of `reports`, some of which may contain the same sessions."""
        sessions: dict[str, GpuSession] = {}
        tests: dict[str, dict[str, Any]] = {}
        for report in reports:
            sessions.update((each.name, each) for each in report.sessions)
            for name, test in report.tests.items():
                other = tests.get(name)
                if other is None or sessions[other["session"]].began <= sessions[test["session"]].began:
                    tests[name] = test
        return cls(folder, list(sessions.values()), tests)

    def result_of(self, name: str) -> dict[str, Any]:
        """Return the result of a test in the session that runs now, to be updated."""
        session = self.sessions[-1].name
        if name not in self.tests or self.tests[name]["session"] != session:
            group, _, test = name.partition("::")
            self.tests[name] = {
                "group": group,
                "name": test,
                "session": session,
                "outcome": "running",
                "reason": "",
                "in_setup": False,
                "seconds": 0.0,
                **{kind: {} for kind in KINDS},
            }
        return self.tests[name]

    def in_order(self) -> list[dict[str, Any]]:
        """Return the results in the order of the steps."""
        return sorted(self.tests.values(), key=lambda each: list(STEPS).index(each["group"]))

    def goals(self) -> dict[str, dict[str, Any]]:
        """Return every goal by name, those of `GOALS` first and in order."""
        found = {name: {"target": "", "found": "not measured", "reached": None} for name in GOALS}
        for result in self.in_order():
            found.update(result["goals"])
        return found

    def write(self, seconds: float | None = None) -> None:
        """Write `gpu-report.json` and `gpu-report.md`; `seconds`: how long the session has taken so far."""
        current = self.sessions[-1]
        if seconds is not None:
            current.seconds = round(seconds, 1)
            for result in self.tests.values():
                if result["session"] == current.name:
                    current.machine.update(result["facts"])
        content = {
            "version": VERSION,
            "sessions": [dataclasses.asdict(each) for each in self.sessions],
            "goals": self.goals(),
            "not_shown": NOT_SHOWN,
            "tests": self.in_order(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in (("json", json.dumps(content, indent=1) + "\n"), ("md", page(content))):
            part = self.folder / f"gpu-report.{name}.part"
            part.write_text(text)
            part.replace(self.folder / f"gpu-report.{name}")


def _host() -> dict[str, str]:
    """Return what is known of the machine without its GPU."""
    model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    processors = f"{len(os.sched_getaffinity(0))} processors"
    return {
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{model[1] if model else 'unknown'}, {processors}, {platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }


def sources_of(tree: Path) -> str:
    """Return a fingerprint of the device plane and of its tests on a GPU: parts of other sources are marked."""
    digest = hashlib.sha256()
    for folder in ("device_comm", "tests/gpu", "tests/native/cuda"):
        for path in sorted((tree / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cpp", ".hpp", ".patch") and path.is_file():
                digest.update(f"{path.relative_to(tree)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def main(arguments: Sequence[str]) -> None:
    """Join the reports of the folders after the first one into the first one."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m tests.gpu.report OUT DIR...")
    out, *folders = map(Path, arguments)
    found = [(folder, Report.read(folder)) for folder in folders]
    missing = [str(folder) for folder, report in found if report is None]
    if missing:
        raise SystemExit(f"no report of version {VERSION} in {', '.join(missing)}")
    Report.joined(out, [report for _, report in found if report is not None]).write()


if __name__ == "__main__":
    main(sys.argv[1:])
