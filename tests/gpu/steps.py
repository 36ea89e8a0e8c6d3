"""The steps, how much time each may take, and how one is run so that it cannot take the others with it."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["STEPS", "Step", "StepResult", "allot", "run_step"]

# What the interpreter takes to end, and to write, after its step said that the time is up.
_GRACE_S = 5.0
_MOST_TEXT = 3000


@dataclasses.dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
        name: Also its module: `tests.gpu.step_<name>`.
        title: For people.
        least_s: Not begun with less time than this.
        most_s: Ended after this.
        environment: Variables that its process is started with.
    """

    name: str
    title: str
    least_s: float
    most_s: float
    environment: tuple[tuple[str, str], ...] = ()


STEPS = (
    Step("probe", "versions, memory between two processes", 20.0, 60.0),
    Step("emulation", "all ranks in one cooperative launch", 40.0, 110.0),
    # More hardware queues than ranks, else one rank's kernel waits behind another's that waits for it.
    Step(
        "streams",
        "ranks as streams of one process",
        40.0,
        80.0,
        (("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "EAGER")),
    ),
    Step(
        "figures",
        "figures that one GPU can show",
        40.0,
        70.0,
        (("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "EAGER")),
    ),
    Step("processes", "ranks as processes that share the GPU", 60.0, 150.0),
    Step("oracles", "torch's symmetric memory, NCCL", 30.0, 70.0),
)
"""In this order: what the later steps stand on comes first."""


@dataclasses.dataclass
class StepResult:
    """What became of a step: its notes, and `status` over all its checks."""

    name: str
    title: str
    status: str
    reason: str
    seconds: float
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    figures: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    goals: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    facts: dict[str, str] = dataclasses.field(default_factory=dict)


def allot(step: Step, later: Sequence[Step], left_s: float) -> float:
    """Return the seconds that `step` gets of those that are left; 0 if it cannot be run.

    Each later step keeps its least; what is beyond that goes to whoever comes first, up to its most.
    """
    free = left_s - sum(each.least_s for each in later)
    if free < step.least_s:
        # Better this one, whole, than a later one.
        free = min(left_s, step.least_s)
    return 0.0 if free < step.least_s else min(free, step.most_s)


def run_step(step: Step, seconds: float, directory: Path, command: Sequence[str] = ()) -> StepResult:
    """Run a step in a process group of its own and return what it found; never raises because of the step.

    Args:
        step: Which.
        seconds: It is killed, with all its processes, some seconds after so long.
        directory: For its notes and its output; made here.
        command: Run instead of the step's module, for tests; the path of the notes and `seconds` are appended.
    """
    directory.mkdir(parents=True, exist_ok=True)
    notes = directory / "notes.json"
    chosen = list(command) or [sys.executable, "-m", f"tests.gpu.step_{step.name}"]
    start = time.monotonic()
    with (directory / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*chosen, str(notes), str(seconds)],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **dict(step.environment)},
        )
        try:
            code: int | None = process.wait(seconds + _GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(process)
    spent = time.monotonic() - start
    return _judge(step, code, spent, notes, _tail(directory / "output.txt"))


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End what is left of the step: it leads a process group of its own, so nobody else is hit."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def _tail(path: Path) -> str:
    return path.read_bytes()[-_MOST_TEXT:].decode(errors="replace").strip()


def _judge(step: Step, code: int | None, seconds: float, notes: Path, output: str) -> StepResult:
    result = StepResult(step.name, step.title, "passed", "", round(seconds, 2))
    try:
        for name, value in json.loads(notes.read_text()).items():
            setattr(result, name, value)
    except (OSError, ValueError):
        result.status, result.reason = "failed", f"it wrote nothing, and ended with {code}: {output}"
        return result
    for check in result.checks:
        if check["status"] == "running":
            why = "the time was up" if code is None else f"its process ended with {code}"
            check["status"], check["reason"] = "failed", f"{why} while this ran"
    failed = [check["name"] for check in result.checks if check["status"] == "failed"]
    if failed:
        result.status, result.reason = "failed", f"failed: {'; '.join(failed)}"
    elif code != 0:
        end = "was ended when the time was up" if code is None else f"ended with {code}"
        result.status, result.reason = "failed", f"{end}: {output}"
    # The first check is the step itself, which passes when its checks were all skipped.
    inner = result.checks[1:] or result.checks
    if result.status == "passed" and all(check["status"] == "skipped" for check in inner):
        result.status = "skipped"
        result.reason = "; ".join(dict.fromkeys(check["reason"] for check in inner)) or "no checks"
    return result
