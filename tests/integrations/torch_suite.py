"""Run torch's own suite for backends with Gloo and with ours, and write both results side by side.

    python -m tests.integrations.torch_suite run --world-size 2 --slice-s 600 STATE
    python -m tests.integrations.torch_suite table STATE benchmarks/results/torch-suite.md

`run` appends each result to a file in the directory STATE, and goes on where it stopped; `table` reads those files. The
suite comes with torch: `torch.testing._internal.distributed.distributed_test`. Its decorators decide by the name of the
backend which tests to skip, and know no name but those of torch's own backends. Therefore the module is imported with
the name "gloo" in both cases, and the processes of each test then make groups of the backend under test.

The ranks of a test are forked from the process that has imported torch, which saves some seconds for each rank.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
import types
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BACKENDS = ("gloo", "group_coordinator")
LIMIT_S = 60
"""Seconds that one test may take."""

INTRODUCTION = """\
`torch.testing._internal.distributed.distributed_test` of torch {torch}, run by
`python -m tests.integrations.torch_suite` with each backend in turn. A test that passes with Gloo must pass with
`group_coordinator`; a skip counts as a failure. Tests that both skip are left out: most need a GPU or another number of
ranks. What the suite asserts of profiler events it asserts only for the backends that it lists by name."""


def stand_in_for_expecttest() -> None:
    """Let torch's test helpers be imported without `expecttest`, whose comparisons this suite does not use."""
    if importlib.util.find_spec("expecttest") is None:
        module: Any = types.ModuleType("expecttest")
        module.TestCase = unittest.TestCase
        sys.modules["expecttest"] = module


def load(backend: str, world_size: int, state: Path) -> type[unittest.TestCase]:
    """Return the suite as a test case whose groups have the given backend. Call this once in a process."""
    os.environ.update(
        BACKEND="gloo",
        WORLD_SIZE=str(world_size),
        DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(LIMIT_S),
        GLOO_SOCKET_IFNAME="lo",
        # One test makes its groups over this file.
        INIT_METHOD=f"file://{state.resolve()}/store-{os.getpid()}",
    )
    stand_in_for_expecttest()
    import torch
    import torch.testing._internal.common_distributed as common
    import torch.testing._internal.distributed.distributed_test as suite

    torch.set_num_threads(1)
    for overridden in list(common.TIMEOUT_OVERRIDE):
        common.TIMEOUT_OVERRIDE[overridden] = max(LIMIT_S, 2 * LIMIT_S)
    if backend != "gloo":
        import coordinator.torch_backend  # noqa: F401 - registers the backend

        os.environ["BACKEND"] = suite.BACKEND = backend
        for names in common.DistTestCases.backend_feature.values():
            if "gloo" in names:
                names.add(backend)

    class Suite(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        """The suite, with ranks that are forked."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _test_accumulate_gradients_no_sync(self, *args: Any, **options: Any) -> None:
            # Its body makes a model for the backends that it lists, and none for others.
            suite.BACKEND = "gloo"
            super()._test_accumulate_gradients_no_sync(*args, **options)

    return Suite


def run_one(suite: type[unittest.TestCase], name: str) -> dict[str, Any]:
    """Run one test; return its outcome and, for other outcomes than success, why."""
    result = unittest.TestResult()
    started = time.monotonic()
    try:
        suite(name).run(result)
    except BaseException:
        # The harness of the suite may end the process; the next test goes on.
        result.errors.append((None, traceback.format_exc()))  # type: ignore[arg-type]
    problems = [text for _, text in (*result.errors, *result.failures)]
    outcome = "failed" if problems else "skipped" if result.skipped else "passed"
    detail = problems[0][-3000:] if problems else result.skipped[0][1] if result.skipped else ""
    return {
        "test": name,
        "outcome": outcome,
        "seconds": round(time.monotonic() - started, 2),
        "detail": detail,
    }


def state_file(state: Path, backend: str, world_size: int) -> Path:
    """Return the file that holds the results of one backend."""
    return state / f"{backend}-{world_size}.jsonl"


def results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results in a file by test; of a test that was run again, the last one."""
    if not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["test"]: row for row in rows}


def work(
    backend: str, world_size: int, state: Path, until: float, names: Sequence[str], *, again: bool
) -> int:
    """Run the tests that have no result yet, until the time `until`; return how many are left."""
    path = state_file(state, backend, world_size)
    done = {} if again else results(path)
    suite = load(backend, world_size, state)
    todo = [name for name in names or unittest.defaultTestLoader.getTestCaseNames(suite) if name not in done]
    # Ranks write to their own standard output and error; only the results count here.
    log = os.open(state / f"{backend}-{world_size}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for at, name in enumerate(todo):
        if time.time() > until:
            return len(todo) - at
        row = run_one(suite, name)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
    return 0


def run(arguments: argparse.Namespace) -> int:
    """Run the suite with each backend in turn, each in a process of its own."""
    arguments.state.mkdir(parents=True, exist_ok=True)
    until = time.time() + arguments.slice_s
    for backend in arguments.backends:
        command = [sys.executable, "-m", "tests.integrations.torch_suite", "work", backend]
        command += [str(arguments.world_size), str(arguments.state), str(until), *arguments.tests]
        command += ["--again"] if arguments.again else []
        code = subprocess.run(command, check=False).returncode
        found = results(state_file(arguments.state, backend, arguments.world_size))
        counts = {
            kind: sum(row["outcome"] == kind for row in found.values())
            for kind in ("passed", "skipped", "failed")
        }
        print(f"{backend}, {arguments.world_size} ranks: {counts}, exit code {code}", flush=True)
    return 0


def verdict(theirs: str, ours: str) -> str:
    """Return whether our outcome is what the bar asks for: what passes with Gloo passes with ours."""
    return "" if theirs != "passed" or ours == "passed" else "**behind**"


def table(state: Path, target: Path) -> int:
    """Write the results side by side; return how many tests pass with Gloo and not with ours."""
    import torch

    lines = ["# torch's suite for backends", "", INTRODUCTION.format(torch=torch.__version__), ""]
    lines += [f"{platform.machine()} with {os.cpu_count()} cores, Python {platform.python_version()}.", ""]
    behind = 0
    for path in sorted(state.glob("gloo-*.jsonl")):
        world_size = path.stem.removeprefix("gloo-")
        theirs, ours = results(path), results(state_file(state, BACKENDS[1], int(world_size)))
        rows = []
        for name in sorted(theirs):
            pair = [theirs[name]["outcome"], ours.get(name, {"outcome": "not run"})["outcome"]]
            behind += bool(verdict(*pair))
            if pair != ["skipped", "skipped"]:
                rows.append(f"| `{name}` | {pair[0]} | {pair[1]} | {verdict(*pair)} |")
        counts = [sum(row["outcome"] == "passed" for row in found.values()) for found in (theirs, ours)]
        lines += [
            f"## {world_size} ranks",
            "",
            f"{counts[0]} tests pass with Gloo, {counts[1]} with ours; {len(theirs) - len(rows)} are left out.",
            "",
            "| test | gloo | group_coordinator | |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    target.write_text("\n".join(lines))
    print(f"{behind} tests pass with Gloo and not with group_coordinator")
    return behind


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run the tests that have no result yet")
    runner.add_argument("state", type=Path)
    runner.add_argument("--tests", nargs="+", default=[], help="only these tests")
    runner.add_argument("--world-size", type=int, default=2)
    runner.add_argument("--slice-s", type=float, default=3600.0)
    runner.add_argument("--backends", nargs="+", default=BACKENDS, choices=BACKENDS)
    runner.add_argument("--again", action="store_true", help="run tests that have a result, too")
    worker = commands.add_parser("work")
    worker.add_argument("backend")
    worker.add_argument("world_size", type=int)
    worker.add_argument("state", type=Path)
    worker.add_argument("until", type=float)
    worker.add_argument("names", nargs="*")
    worker.add_argument("--again", action="store_true")
    writer = commands.add_parser("table", help="write the results side by side")
    writer.add_argument("state", type=Path)
    writer.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments)
    if arguments.command == "table":
        return min(table(arguments.state, arguments.target), 1)
    return min(
        work(
            arguments.backend,
            arguments.world_size,
            arguments.state,
            arguments.until,
            arguments.names,
            again=arguments.again,
        ),
        1,
    )


if __name__ == "__main__":
    sys.exit(main())
