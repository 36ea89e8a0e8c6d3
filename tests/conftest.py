"""The rules for every test: it leaves nothing behind, and it is skipped only for a listed reason."""

import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator

import hypothesis
import pytest

from shm_broadcast.status.layout import pack_record
from shm_broadcast.status.page import own_page
from tests import rank_processes
from tests.frame_evaluator import COMPILED, frames_compiled
from tests.harness import RankPool
from tests.late_alarms import take_late_alarms
from tests.leaks import Snapshot, leaked_since
from tests.probes import PROBES, missing_gpus, skip, skipped_by_rule

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID",
)

temporary = pytest.StashKey[str]()
hidden = {"modules": 0}
"""How many modules the garbage collector no longer looks through."""

hypothesis.settings.register_profile("steady", deadline=None, derandomize=True)
# The sanitizers use this profile: an example takes ten times as long under them. The full number runs without them.
hypothesis.settings.register_profile("brief", deadline=None, derandomize=True, max_examples=20)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that turn skips into failures, and those of `tests/gpu`."""
    parser.addoption(
        "--require-gpu", action="store_true", help="fail instead of skipping tests that need GPUs"
    )
    parser.addoption("--require-all", action="store_true", help="fail instead of skipping any test")
    parser.addoption(
        "--gpu-report", metavar="DIR", help="write what the tests on a GPU found to this directory"
    )
    parser.addoption(
        "--gpu-seconds",
        type=float,
        help="time for all tests on a GPU together (tests/gpu/steps.py says how long)",
    )
    parser.addoption(
        "--gpu-part", type=int, choices=(1, 2, 3), help="run this part of the tests on a GPU only"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Give this run a temporary directory of its own and a clean environment."""
    config.addinivalue_line("markers", "requires_gpus(count): the test needs that many CUDA devices")
    config.addinivalue_line("markers", "requires(probe): the test needs what the probe looks for")
    config.addinivalue_line(
        "markers", "gpu_seconds(least, most): time of a test on a GPU; tests.gpu.running.on_gpu"
    )
    directory = tempfile.mkdtemp(prefix="gc-")  # short: Unix sockets in it have paths of at most 107 bytes
    config.stash[temporary] = directory
    tempfile.tempdir = os.environ["TMPDIR"] = directory
    for name in list(os.environ):
        if name.startswith("GROUP_COORDINATOR_") or name in LAUNCHER_VARIABLES:
            del os.environ[name]
    # A shell that runs pytest in the background makes it ignore Ctrl-C, and the ranks would inherit that.
    for number in (signal.SIGINT, signal.SIGQUIT):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    take_late_alarms()
    # This is set before any test imports torch. torch's threads spin: with two in each rank on few cores the
    # conformance suite takes four times the processor time. A test whose result depends on threads asks for them.
    os.environ.update(rank_processes.ONE_THREAD)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the temporary directory and end the rank server."""
    rank_processes.stop_server()
    shutil.rmtree(config.stash[temporary], ignore_errors=True)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of native code, of which `make test-native` runs what is thorough and no proof."""
    if item.nodeid.startswith("tests/native/"):
        item.add_marker("native")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the tests that take minutes begin first, so that none of them is alone at the end while cores are idle."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


def pytest_collection_finish() -> None:
    """Hide torch and all tests from the garbage collector, to which they cost 0.4 s each time."""
    hide_modules()


def hide_modules() -> None:
    """Hide all that is there from the garbage collector."""
    gc.collect()
    gc.freeze()
    hidden["modules"] = len(sys.modules)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test if this machine lacks what it needs, or fail it if the options say that."""
    for mark in item.iter_markers("requires_gpus"):
        reason = missing_gpus(*mark.args)
        if reason is not None and item.config.option.require_gpu:
            pytest.fail(reason)
        if reason is not None:
            skip(item, reason)
    for mark in item.iter_markers("requires"):
        reason = PROBES[mark.args[0]]()
        if reason is not None:
            skip(item, reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip for an unlisted reason into a failure, because it could hide an error."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not item.stash.get(skipped_by_rule, False):
        report.outcome = "failed"
        report.longrepr = f"skipped otherwise than by requires_gpus or requires: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module into a failure."""
    report = yield
    if report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"a whole module is skipped: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> Iterator[None]:
    """Fail the test if this process holds more resources after it than before. Ranks check themselves."""
    before, compiled = Snapshot.take(), frames_compiled()
    yield
    leaks = leaked_since(
        before,
        ignored_descriptors=rank_processes.own_descriptors,
        ignored_children=rank_processes.own_children,
    )
    if frames_compiled() != compiled:
        leaks.append(COMPILED)
    if leaks:
        pytest.fail("left behind:\n  " + "\n  ".join(leaks), pytrace=False)
    # Tests import more of torch: each collection would take 0.2 s for it.
    if len(sys.modules) > hidden["modules"] + 100:
        hide_modules()


@pytest.fixture(autouse=True)
def leaves_no_group_in_the_status_page() -> Iterator[None]:
    """Give back the places of groups that a test has made in part, as their health alone, and so never leaves."""
    page = own_page()
    free = set(page._free_groups)
    yield
    for place in free.difference(page._free_groups, page._left_groups):
        page._core.release(place)
        page.write_group(place, pack_record("groups"))
        page._free_groups.append(place)


@pytest.fixture
def two_torch_threads() -> Iterator[None]:
    """Let torch use two threads, which may change results."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ranks2() -> Iterator[RankPool]:
    """Start two processes that run one function after another."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session")
def ranks4() -> Iterator[RankPool]:
    """Start four processes that run one function after another. Those of `ranks2` show that torch can end too."""
    with RankPool(4, brief=True) as pool:
        yield pool


@pytest.fixture(scope="session")
def compilers2() -> Iterator[RankPool]:
    """Start two processes that run one function after another, which may use `torch.compile`."""
    with RankPool(2, brief=True, compiles=True) as pool:
        yield pool
