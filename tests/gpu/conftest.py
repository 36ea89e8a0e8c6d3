"""Runs the tests of a GPU within a time budget, each in processes of its own, and reports what they found."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.notes import read_notes
from tests.gpu.report import GpuSession, Report, sources_of
from tests.gpu.running import GpuRun
from tests.gpu.steps import IN_EVERY_PART, STEPS, PlannedTest, Schedule, seconds_of
from tests.probes import skip

LONGEST_REASON = 8000

session_start = pytest.StashKey[float]()
reports = pytest.StashKey[Report]()
schedules = pytest.StashKey[Schedule]()
number_of = pytest.StashKey[int]()
notes_file = pytest.StashKey[Path]()


def pytest_configure(config: pytest.Config) -> None:
    """Begin the time of the session, and take up the report of an earlier part."""
    config.stash[session_start] = time.monotonic()
    folder, part = config.option.gpu_report, config.option.gpu_part
    if folder is not None:
        session = GpuSession(part=part, sources=sources_of(Path(__file__).parents[2]))
        config.stash[reports] = Report.begin(Path(folder), session)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the groups into their order, behind all other tests; leave out what belongs to another part."""
    part = config.option.gpu_part
    own = [item for item in items if item.get_closest_marker("gpu_seconds")]
    other = [item for item in own if part is not None and not _is_in(item, part)]
    if other:
        config.hook.pytest_deselected(items=other)
    items[:] = [item for item in items if item not in own]
    own = [item for item in own if item not in other]
    own.sort(key=lambda item: list(STEPS).index(_group_of(item)))
    items.extend(own)
    given = config.option.gpu_seconds
    seconds = seconds_of(part) if given is None else given
    planned = [PlannedTest(_group_of(item), *_seconds_of(item)) for item in own]
    config.stash[schedules] = Schedule(planned, config.stash[session_start] + seconds, time.monotonic)
    for number, item in enumerate(own):
        item.stash[number_of] = number


def _is_in(item: pytest.Item, part: int) -> bool:
    return STEPS[_group_of(item)].part == part or item.name.startswith(IN_EVERY_PART)


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
    given, reason = config.stash[schedules].seconds_for(item.stash[number_of])
    if not given:
        skip(item, reason)
    item.stash[notes_file] = tmp_path / "notes"
    return GpuRun(item, item.stash[notes_file], gpu_cache, given)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep what became of a test. The report is written at each step: whoever ends this process leaves it behind."""
    report = yield
    stash = item.config.stash
    if reports not in stash or not item.get_closest_marker("gpu_seconds"):
        return report
    name = item.name.removeprefix("test_")
    result: dict[str, Any] = stash[reports].result_of(f"{_group_of(item)}::{name}")
    result["seconds"] += report.duration
    if not report.passed and result["outcome"] != "failed":
        text = call.excinfo.exconly() if call.excinfo else str(report.longrepr)
        result.update(outcome=report.outcome, reason=text.removeprefix("Skipped: ")[:LONGEST_REASON])
        result["in_setup"] = report.when == "setup"
    if report.when == "teardown" and result["outcome"] == "running":
        result["outcome"] = "passed"
    result.update(read_notes(item.stash.get(notes_file, item.path.parent / "absent")))
    stash[reports].write(time.monotonic() - stash[session_start])
    return report
