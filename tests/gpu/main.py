"""Runs all steps, each for itself, and writes the report: `python -m tests.gpu.main --out DIRECTORY`."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.gpu.report import exit_status, write_report
from tests.gpu.steps import STEPS, Step, StepResult, allot, run_step

__all__ = ["main", "run_all"]

Runner = Callable[[Step, float, Path], StepResult]


def host_facts() -> dict[str, str]:
    """Return what is known of the host without a GPU. No names: a report is read elsewhere."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    count = len(os.sched_getaffinity(0))
    return {
        "date": time.strftime("%Y-%m-%d"),
        "host": f"{model}, {count} processors, {platform.system()} {platform.release()}",
        "Python": platform.python_version(),
    }


def run_all(
    steps: Sequence[Step], seconds: float, directory: Path, run: Runner = run_step
) -> list[StepResult]:
    """Run the steps one after the other within `seconds`, and say of each that found no time that it did not."""
    end = time.monotonic() + seconds
    results: list[StepResult] = []
    for number, step in enumerate(steps):
        given = allot(step, steps[number + 1 :], end - time.monotonic())
        if given:
            print(f"{step.name}: {step.title} (up to {given:.0f} s) ...", flush=True)
            try:
                result = run(step, given, directory / step.name)
            except Exception as error:
                result = StepResult(step.name, step.title, "failed", f"{type(error).__name__}: {error}", 0.0)
        else:
            result = StepResult(step.name, step.title, "skipped", "no time was left", 0.0)
        print(f"{step.name}: {result.status} in {result.seconds:.1f} s {result.reason}", flush=True)
        results.append(result)
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run; return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the report goes")
    parser.add_argument("--seconds", type=float, default=420.0, help="for all steps together")
    parser.add_argument("--only", default="", help="names of steps, separated by commas")
    chosen = parser.parse_args(arguments)
    names = [name for name in chosen.only.split(",") if name]
    unknown = set(names) - {step.name for step in STEPS}
    if unknown:
        parser.error(f"no steps {sorted(unknown)}; there are {[step.name for step in STEPS]}")
    steps = [step for step in STEPS if not names or step.name in names]
    start = time.monotonic()
    # Short: sockets in it have paths of at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="gg-") as directory:
        results = run_all(steps, chosen.seconds, Path(directory))
    write_report(results, host_facts(), time.monotonic() - start, chosen.out)
    print(f"report: {chosen.out / 'gpu-report.md'}")
    return exit_status(results)


if __name__ == "__main__":
    sys.exit(main())
