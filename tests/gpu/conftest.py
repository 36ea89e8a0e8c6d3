"""Runs the tests of a GPU within a time budget, each in processes of its own, and reports what they found."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.notes import read_notes
from tests.gpu.report import GROUPS, write_report
from tests.gpu.running import GpuRun, allot
from tests.probes import skip

LONGEST_REASON = 8000

session_start = pytest.StashKey[float]()
results = pytest.StashKey[dict[str, dict[str, Any]]]()
least_of_later = pytest.StashKey[float]()
notes_file = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the time of the session."""
    config.stash[session_start] = time.monotonic()
    config.stash[results] = {}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the groups into their order, behind all other tests, and add up what the tests behind each one need."""
    own = [item for item in items if item.get_closest_marker("gpu_seconds")]
    own.sort(key=lambda item: list(GROUPS).index(_group_of(item)))
    items[:] = [item for item in items if item not in own] + own
    total = 0.0
    for item in reversed(own):
        item.stash[least_of_later] = total
        total += _seconds_of(item)[0]


def _group_of(item: pytest.Item) -> str:
    return item.path.stem.removeprefix("test_")


def _seconds_of(item: pytest.Item) -> tuple[float, float]:
    mark = item.get_closest_marker("gpu_seconds")
    assert mark is not None
    least, most = mark.args
    return least, most


@pytest.fixture(scope="session")
def gpu_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory for compiled kernels: no test compiles what an earlier one has compiled."""
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def gpu(request: pytest.FixtureRequest, tmp_path: Path, gpu_cache: Path) -> GpuRun:
    """Return the test's part of the GPU's time; skip the test if there is none."""
    item, config = request.node, request.config
    if hasattr(config, "workerinput"):
        skip(item, "tests on a GPU need it for themselves: run them with `make test-gpu`")
    left = config.option.gpu_seconds - (time.monotonic() - config.stash[session_start])
    given = allot(*_seconds_of(item), item.stash[least_of_later], left)
    if not given:
        skip(item, "no time is left of --gpu-seconds")
    item.stash[notes_file] = tmp_path / "notes"
    return GpuRun(item, item.stash[notes_file], gpu_cache, given)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what became of a test. The report is written at each step: whoever ends this process leaves it behind."""
    report = yield
    folder = item.config.option.gpu_report
    if folder is None or not item.get_closest_marker("gpu_seconds"):
        return report
    name = item.name.removeprefix("test_")
    result = item.config.stash[results].setdefault(
        item.nodeid,
        {"group": _group_of(item), "name": name, "outcome": "running", "reason": "", "seconds": 0.0},
    )
    result["seconds"] += report.duration
    if not report.passed and result["outcome"] != "failed":
        text = call.excinfo.exconly() if call.excinfo else str(report.longrepr)
        result.update(outcome=report.outcome, reason=text.removeprefix("Skipped: ")[:LONGEST_REASON])
    if report.when == "teardown" and result["outcome"] == "running":
        result["outcome"] = "passed"
    result.update(read_notes(item.stash.get(notes_file, item.path.parent / "absent")))
    seconds = time.monotonic() - item.config.stash[session_start]
    write_report(Path(folder), list(item.config.stash[results].values()), seconds)
    return report
