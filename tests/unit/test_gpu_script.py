"""The script for one GPU, as far as it goes without one: runner, report, and the computations over g++'s kernels."""

from __future__ import annotations

import ctypes
import importlib
import json
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.driver import PreparedLaunch
from shm_broadcast.errors import CudaError
from tests.fake_cuda import FakeDriver, FakeGraph, fake_cubin, fake_devices
from tests.gpu import main as gpu_main
from tests.gpu import step_figures
from tests.gpu.device import compile_text, program_source
from tests.gpu.emulation import Emulation
from tests.gpu.loopback import Loopback, Timer, moved_bytes, two_shot_bytes
from tests.gpu.notes import Notes, SkipCheckError
from tests.gpu.processes import run_ranks, values_of
from tests.gpu.report import MUST_REACH, NOT_SHOWN, exit_status, page, write_report
from tests.gpu.step_emulation import check_variant, judge_sanitizer
from tests.gpu.step_streams import StreamWorld, absent_rank
from tests.gpu.steps import STEPS, Step, StepResult, allot, run_step
from tests.gpu.values import SIZES
from tests.native.cuda.host_build import build_host_library

SCRIPT = Path(__file__).parents[1] / "gpu" / "run.sh"
STEP = Step("trial", "a step of the test", 1.0, 30.0)


# --- the runner -----------------------------------------------------------------------------------------------


def run_text(text: str, directory: Path, seconds: float = 20.0) -> StepResult:
    """Run a step whose body is `text`."""
    body = textwrap.indent(textwrap.dedent(text), "    ")
    program = f"import sys\nfrom tests.gpu.step import run_module\ndef run(notes):\n{body}\n"
    program += "raise SystemExit(run_module(run, sys.argv[1:]))"
    return run_step(STEP, seconds, directory, [sys.executable, "-c", program])


def test_a_step_that_raises_is_reported_with_what_it_had_found(tmp_path: Path) -> None:
    """A check that raises does not stop the next one; one that skips says why; what escapes is a failure."""
    result = run_text(
        """
        from tests.gpu.notes import SkipCheckError
        with notes.check("bad"):
            raise ValueError("so it is")
        with notes.check("absent"):
            raise SkipCheckError("no such tool")
        with notes.check("good"):
            notes.figure("time", 1.5, "us")
        raise RuntimeError("outside of all checks")
        """,
        tmp_path,
    )
    found = {check["name"]: check["status"] for check in result.checks}
    assert found == {"the step as a whole": "failed", "bad": "failed", "absent": "skipped", "good": "passed"}
    assert result.status == "failed"
    assert "ValueError: so it is" in result.checks[1]["reason"]
    assert result.figures == {"time": {"value": 1.5, "unit": "us"}}
    assert run_text("with notes.check('x'):\n    pass", tmp_path / "2").status == "passed"


def test_a_step_that_dies_names_the_check_that_was_running(tmp_path: Path) -> None:
    """What passed before stays passed; what was running failed, and how the process ended is said."""
    result = run_text(
        """
        import os
        with notes.check("good"):
            pass
        with notes.check("fatal"):
            os._exit(7)
        """,
        tmp_path,
    )
    assert result.status == "failed"
    assert [check["status"] for check in result.checks] == ["failed", "passed", "failed"]
    assert result.checks[2]["reason"] == "its process ended with 7 while this ran"


def test_a_step_that_hangs_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step and a child that it left are killed when the time is up, and the check that ran is named."""
    monkeypatch.setattr("tests.gpu.steps._GRACE_S", 0.0)
    program = (
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "checks = [{'name': 'slow', 'status': 'running', 'reason': '', 'seconds': 0.0}]\n"
        "text = json.dumps({'checks': checks, 'figures': {}, 'goals': [], 'facts': {'child': str(child.pid)}})\n"
        "open(sys.argv[1], 'w').write(text)\n"
        "time.sleep(60)"
    )
    start = time.monotonic()
    result = run_step(STEP, 2.0, tmp_path, [sys.executable, "-c", program])
    assert time.monotonic() - start < 20.0
    assert result.status == "failed"
    assert "the time was up while this ran" in result.checks[0]["reason"]
    state = Path(f"/proc/{result.facts['child']}/stat")
    # It was killed with its parent; how soon the kernel gets to it is the kernel's.
    while time.monotonic() - start < 20.0 and _runs(state):
        time.sleep(0.01)
    assert not _runs(state)


def _runs(state: Path) -> bool:
    try:
        return state.read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_step_that_writes_nothing_fails_with_its_output(tmp_path: Path) -> None:
    """A step that cannot even begin shows what it printed."""
    result = run_step(
        STEP, 10.0, tmp_path, [sys.executable, "-c", "print('cannot begin'); raise SystemExit(3)"]
    )
    assert result.status == "failed"
    assert "cannot begin" in result.reason


def test_steps_of_which_every_check_is_skipped_are_skipped(tmp_path: Path) -> None:
    """The reason of the checks is the reason of the step."""
    text = "from tests.gpu.notes import SkipCheckError\nwith notes.check('x'):\n    raise SkipCheckError('no device')"
    result = run_text(text, tmp_path)
    assert (result.status, result.reason) == ("skipped", "no device")


def test_later_steps_keep_their_least(tmp_path: Path) -> None:
    """A step takes what is free, up to its most; where it is short the first ones run."""
    a, b, c = (Step(name, name, 10.0, 50.0) for name in "abc")
    assert allot(a, [b, c], 200.0) == 50.0
    assert allot(a, [b, c], 45.0) == 25.0
    assert allot(a, [b, c], 15.0) == 10.0
    assert allot(a, [b, c], 9.0) == 0.0
    assert allot(c, [], 12.0) == 12.0
    # The whole plan fits into what run.sh gives it, the build aside, and nobody's most is below its least.
    assert sum(step.least_s for step in STEPS) <= 300.0
    assert all(step.least_s <= step.most_s for step in STEPS)


def test_a_runner_that_fails_and_a_budget_that_ends_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The steps behind a failure run; the one that finds no time is skipped, with the reason."""

    def runner(step: Step, seconds: float, directory: Path) -> StepResult:
        if step.name == "a":
            raise OSError("no disk")
        return StepResult(step.name, step.title, "passed", "", seconds)

    steps = [Step("a", "a", 1.0, 2.0), Step("b", "b", 1.0, 2.0), Step("c", "c", 200.0, 300.0)]
    results = gpu_main.run_all(steps, 100.0, tmp_path, runner)
    assert [result.status for result in results] == ["failed", "passed", "skipped"]
    assert results[2].reason == "no time was left"
    assert "no disk" in results[0].reason
    assert "c: skipped" in capsys.readouterr().out


def test_ranks_say_what_they_return_and_why_not(tmp_path: Path) -> None:
    """One rank of two fails: its traceback is there, the other's value too."""
    text = "def body(rank, world_size, directory, text):\n"
    text += "    if rank:\n        raise ValueError(f'rank {rank} of {world_size}')\n"
    text += "    return f'{rank}{text}'\n"
    (tmp_path / "some_body.py").write_text(text)
    environment = {"PYTHONPATH": str(tmp_path)}
    outcomes = run_ranks("some_body:body", 2, tmp_path, 60.0, {"text": "x"}, environment=environment)
    assert outcomes[0].value == "0x"
    assert "ValueError: rank 1" in outcomes[1].problem
    assert values_of(outcomes, [0]) == ["0x"]
    with pytest.raises(AssertionError, match="rank 1"):
        values_of(outcomes)


# --- the report -----------------------------------------------------------------------------------------------


def results() -> list[StepResult]:
    """Return a run with a bit of everything."""
    goal = {"name": MUST_REACH[0], "target": "equal", "found": "equal for [2, 4, 8]", "holds": True}
    missed = {"name": MUST_REACH[2], "target": "3 us", "found": "4 | us", "holds": False}
    check = {"name": "a|b", "status": "failed", "reason": "first line\nsecond", "seconds": 1.0}
    figures = {"floor": {"value": 1.25, "unit": "us"}}
    return [
        StepResult("probe", "the machine", "passed", "", 2.0, facts={"GPU": "NVIDIA H200", "driver": "580"}),
        StepResult("figures", "speed", "failed", "failed: a|b", 3.0, [check], figures, [goal, missed]),
        StepResult("oracles", "others", "skipped", "no time was left", 0.0),
    ]


def test_the_report_names_the_machine_and_what_was_not_shown(tmp_path: Path) -> None:
    """Machine, goals in order, cells with bars, what one GPU cannot show; and no word of NCCL's speed."""
    write_report(results(), {"host": "a processor"}, 5.0, tmp_path)
    content = json.loads((tmp_path / "gpu-report.json").read_text())
    assert content["machine"] == {"host": "a processor", "GPU": "NVIDIA H200", "driver": "580"}
    assert [goal["name"] for goal in content["must_reach"]] == list(MUST_REACH)
    assert content["must_reach"][1]["found"] == "not measured"
    assert content["must_reach"][1]["holds"] is None
    text = (tmp_path / "gpu-report.md").read_text()
    assert text.startswith("# What one GPU showed: NVIDIA H200\n")
    assert "| a\\|b | failed | 1.0 | first line |" in text
    assert "4 \\| us | **no** |" in text
    assert all(each in text for each in NOT_SHOWN)
    assert "Verified on one NVIDIA H200: the machine." in text
    assert "NCCL" not in text


def test_the_exit_status_is_1_if_a_step_failed() -> None:
    """Skipped steps do not fail a run, and a report without a device says so."""
    assert exit_status(results()) == 1
    assert exit_status(results()[::2]) == 0
    assert page([], {}, 0.0).startswith("# What one GPU showed: no GPU\n")


def test_notes_are_on_disk_after_each_thing(tmp_path: Path) -> None:
    """A check that runs says so in the file before it has ended."""
    notes = Notes(tmp_path / "notes.json", 1.0)
    notes.goal("g", "t", "f", True)
    with notes.check("x"):
        assert json.loads(notes.path.read_text())["checks"][0]["status"] == "running"
    with notes.check("y"):
        notes.need(100.0, "a long thing")
    assert json.loads(notes.path.read_text())["checks"][1]["reason"] == "no time left for a long thing"


# --- what needs no GPU to be wrong ----------------------------------------------------------------------------


def test_the_script_is_valid_shell() -> None:
    """Bash reads it, it can be executed, and it refuses what it does not know."""
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True, timeout=10)
    assert SCRIPT.stat().st_mode & 0o111
    refused = subprocess.run(
        [str(SCRIPT), "--nonsense"], capture_output=True, text=True, check=False, timeout=10
    )
    assert refused.returncode == 2
    assert "--wheels DIR" in refused.stdout


def test_every_step_is_a_module_that_imports_without_cuda() -> None:
    """Nothing of a step needs a device before it runs; the bodies that ranks run are there."""
    for step in STEPS:
        module = importlib.import_module(f"tests.gpu.step_{step.name}")
        assert callable(module.run)
    for name in ("whole", "shipped", "fails", "two_ranks_of_nccl", "symmetric_memory", "peer_memory"):
        assert callable(getattr(importlib.import_module("tests.gpu.bodies"), name))
    assert len(SIZES) >= 40


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_programs_compile(dtype: str) -> None:
    """NVRTC makes code of what the tests launch, and its log is in the error where it cannot."""
    assert compile_text(program_source(), 90, dtype)[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="error"):
        compile_text("nonsense", 90, dtype)


def test_the_sanitizer_is_believed_only_when_the_subset_ran() -> None:
    """An error is a failure, silence too; a tool that refuses the machine or is too slow is skipped."""
    say = [sys.executable, "-c"]
    judge_sanitizer([*say, "print('small subset compared: 3 calls')"], 20.0)
    with pytest.raises(AssertionError, match="ended with 9"):
        judge_sanitizer([*say, "print('ERROR SUMMARY: 1 error'); raise SystemExit(9)"], 20.0)
    with pytest.raises(AssertionError, match="ended with 0"):
        judge_sanitizer([*say, "pass"], 20.0)
    with pytest.raises(SkipCheckError, match="refuses"):
        judge_sanitizer([*say, "print('Device not supported'); raise SystemExit(1)"], 20.0)
    with pytest.raises(SkipCheckError, match="longer"):
        judge_sanitizer([*say, "import time; time.sleep(9)"], 0.3)


def test_bytes_moved_are_those_of_the_kernels() -> None:
    """Two ranks, two-shot, 32 bytes: shards of 16; read 1 + 1 + 1 + 1 of them, written 1 + 1 + 1 + 1 + 1 + 1."""
    assert two_shot_bytes(32, 2) == 160
    assert moved_bytes(32, 2) == 6 * 32
    assert two_shot_bytes(8 << 20, 8) == 58 << 20


# --- the same code over kernels that g++ compiled --------------------------------------------------------------


class FakeGpu(FakeDriver):
    """A `Gpu` without one: graphs are lists, the tests' programs are Python, block rows are threads."""

    def __init__(self, directory: Path, rank: int, library: Path | None = None, world: int = 2) -> None:
        devices = fake_devices(1, multiprocessors=4 * world)
        programs = {"fill": self._fill, "check": self._check, "tick": _tick, "spin": None}
        super().__init__(directory, rank, devices=devices, device_index=0, kernels=programs)
        self.library = None if library is None else ctypes.CDLL(str(library))
        self.rows: dict[int, str] = {}

    def module_function(self, module: int, name: str) -> int:
        function = super().module_function(module, name)
        self.rows[function] = name
        return function

    def launch_cooperative(
        self, function: int, grid: tuple[int, int], block_x: int, stream: int, arguments: PreparedLaunch
    ) -> None:
        if grid[0] * grid[1] > self.multiprocessors() or self.library is None:
            raise self._error("launch_cooperative", 720)
        name = self.rows[function].encode()
        sizes = [ctypes.c_uint(each) for each in (*grid, block_x)]
        if self.library.launch_rows(name, *sizes, ctypes.c_void_p(arguments.pointers)):
            raise self._error("launch_cooperative", 719)

    def replay(self, graph: FakeGraph, stream: int = 0) -> None:
        super().replay(graph)

    def forget(self, graph: FakeGraph) -> None:
        graph.steps.clear()

    def timed_event(self) -> list[float]:
        return [0.0]

    def mark(self, event: list[float], stream: int) -> None:
        event[0] = time.perf_counter()

    def microseconds(self, start: list[float], end: list[float]) -> float:
        return (end[0] - start[0]) * 1e6

    def drop(self, event: list[float]) -> None:
        event.clear()

    def _fill(self, grid: int, block: int, arguments: PreparedLaunch) -> None:
        place, count, rank, step = (arguments.words[at] for at in arguments.word_of)
        values = _values(rank & 0xFFFFFFFF, ctypes.c_uint32.from_address(step).value, count)
        ctypes.memmove(place, values.bfloat16().view(torch.uint8).numpy().tobytes(), 2 * count)

    def _check(self, grid: int, block: int, arguments: PreparedLaunch) -> None:
        place, count, world, step, wrong = (arguments.words[at] for at in arguments.word_of)
        number = ctypes.c_uint32.from_address(step).value
        total = sum(_values(rank, number, count) for rank in range(world & 0xFFFFFFFF))
        assert isinstance(total, torch.Tensor)
        found = torch.frombuffer(bytearray(ctypes.string_at(place, 2 * count)), dtype=torch.bfloat16)
        ctypes.c_uint32.from_address(wrong).value += int((found.int() != total).sum())


def _values(rank: int, step: int, count: int) -> torch.Tensor:
    return (torch.arange(count) * 7 + step * 13 + rank * 29) % 61 - 30


def _tick(grid: int, block: int, arguments: PreparedLaunch) -> None:
    ctypes.c_uint32.from_address(arguments.words[0]).value += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def library(folder: Path) -> Path:
    """The kernels of two ranks for bfloat16."""
    return build_host_library(2, "bfloat16", folder)


def test_the_emulation_compares_every_algorithm(folder: Path, tmp_path: Path) -> None:
    """The tables, the workspaces and the references fit the kernels: all ranks in one launch of block rows."""
    library = build_host_library(2, "bfloat16", folder, emulate=True)
    driver = FakeGpu(tmp_path, 0, library)
    emulation = Emulation(driver, 2, "bfloat16", lambda _family: fake_cubin(library), largest=4096)
    compared = check_variant(emulation, (1, 9, 100, 513), full=False)
    assert compared == 4 * 4 + 5 + 5 + 2
    # A word that is wrong is seen.
    inputs = [torch.ones(16, dtype=torch.bfloat16)] * 2
    right = emulation.sum
    emulation.sum = lambda kernel, inputs: [each + 1 for each in right(kernel, inputs)]  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="differ, the first at 0"):
        check_variant(emulation, (16,), full=False)
    assert torch.equal(right("push_one_shot", inputs)[1], torch.full((16,), 2.0, dtype=torch.bfloat16))
    emulation.close()
    assert driver.leaks() == []
    driver.release()


@pytest.mark.parametrize("kernel", ["push_one_shot", "push_two_shot", "push_add_rms_norm"])
def test_a_loopback_finds_its_peers_data_and_can_be_refilled(
    library: Path, tmp_path: Path, kernel: str
) -> None:
    """Each lane has the right result; without a refill the second launch waits in vain, so the filling is needed."""
    driver = FakeGpu(tmp_path, 0)
    norm = (2, 64) if kernel.endswith("norm") else None
    loopback = Loopback(
        driver,
        *(kernel, 2, "bfloat16", 256, lambda _family: fake_cubin(library)),
        lanes=3,
        stream=driver.stream_create(),
        norm=norm,
        deadline_s=0.2,
    )
    for _ in range(3):
        loopback.refill()
        loopback.launch_all()
        loopback.check()
    loopback.launch_one(0)
    with pytest.raises(AssertionError, match="deadline"):
        loopback.check()
    loopback.close()
    driver.stream_destroy(loopback.stream)
    assert driver.leaks() == []
    driver.release()


def world_of(library: Path, directory: Path, deadline_s: float = 20.0) -> tuple[StreamWorld, list[FakeGpu]]:
    """Return two ranks as threads."""
    drivers = [FakeGpu(directory, rank) for rank in range(2)]
    limits = {"push_one_shot": 256, "push_two_shot": 512, "pull_one_shot": 1024, "pull_two_shot": 4096}
    programs: Callable[[str], bytes] = lambda _dtype: b"\x7fELF"  # noqa: E731
    cubin = partial(lambda built, _family, _dtype: fake_cubin(built), library)
    made = StreamWorld(
        drivers,
        *("bfloat16", cubin, programs, directory),
        blocks=2,
        limits=limits,
        memory_bytes=1 << 20,
        deadline_s=deadline_s,
    )
    return made, drivers


def end(world: StreamWorld, drivers: list[FakeGpu]) -> None:
    """Close, and find nothing left."""
    world.close()
    assert [driver.leaks() for driver in drivers] == [[], []]
    for driver in drivers:
        driver.release()


def test_streams_reduce_eagerly_and_in_graphs(library: Path, tmp_path: Path) -> None:
    """Every algorithm is in the graph; a replay that computed something else would be counted."""
    # One module of kernels for both dtypes that are asked for: nothing but bfloat16 is called.
    world, drivers = world_of(library, tmp_path)
    assert world.eager((1, 100, 200), 3) == 9
    assert world.replays((128, 512, 1024, 2048), 12, 60.0) == 12
    pristine = FakeGpu._fill

    def stale(self: FakeGpu, grid: int, block: int, arguments: PreparedLaunch) -> None:
        pristine(self, grid, block, arguments)
        if self.rank == 1:
            ctypes.c_uint16.from_address(arguments.words[0]).value ^= 0x4000

    for driver in drivers:
        for key, (module, name, call) in list(driver._functions.items()):
            if name == "fill":
                driver._functions[key] = (module, name, partial(stale, driver))
                assert call is not None
    with pytest.raises(AssertionError, match="elements were wrong"):
        world.replays((128,), 2, 60.0)
    end(world, drivers)


def test_a_rank_that_does_not_launch_is_named(library: Path, tmp_path: Path) -> None:
    """Rank 0 hears of rank 1 when the deadline has passed, not before."""
    world, drivers = world_of(library, tmp_path, deadline_s=0.3)
    assert absent_rank(world, 0.3) >= 0.27
    # Broken: without a meeting nobody knows who may still use the workspaces.
    world.close()
    for driver in drivers:
        assert all(each.startswith("memory ") for each in driver.leaks())
        driver.release()


def test_the_fake_refuses_block_rows_that_cannot_run_at_once(tmp_path: Path) -> None:
    """As a cooperative launch does: the emulation must choose its grid by the multiprocessors."""
    driver = FakeGpu(tmp_path, 0)
    arguments: Any = PreparedLaunch([b"\0" * 8])
    with pytest.raises(CudaError):
        driver.launch_cooperative(1, (100, 2), 128, 0, arguments)
    driver.release()


def test_every_figure_can_be_made(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and of no meaning here: each goal is written down once, and nothing is left."""
    for name, value in {
        "LANES": 2,
        "KIB": 16,
        "MIB": 256,
        "WORLDS": (2,),
        "ONE_WORLD": 2,
        "NORM_SHAPE": (2, 64),
    }.items():
        monkeypatch.setattr(step_figures, name, value)
    monkeypatch.setattr(step_figures, "HANDSHAKES", (16, 128))
    monkeypatch.setattr(step_figures, "compile_text", lambda *_: fake_cubin(library))
    driver: Any = FakeGpu(tmp_path, 0)
    notes = Notes(tmp_path / "notes.json", 60.0)
    timer = Timer(driver, driver.stream_create(), fake_cubin(library))

    def cubin(world: int, dtype: str, family: str) -> bytes:
        return fake_cubin(library)

    floor = step_figures.launch_floor(notes, timer, cubin)
    step_figures.small_loopbacks(notes, timer, cubin, floor)
    step_figures.large_loopbacks(notes, timer, cubin)
    step_figures.fusion(notes, timer, cubin)
    step_figures.fence_cost(notes, timer, cubin, 90)
    timer.close()
    driver.stream_destroy(timer.stream)
    assert driver.leaks() == []
    driver.release()
    assert {goal["name"] for goal in notes.goals} <= set(MUST_REACH)
    assert len(notes.goals) == 3
    assert len(notes.figures) == 1 + 8 + 4 + 2 + 1


def test_a_handshake_is_timed(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of two streams is made and closed, and the goal written down."""
    monkeypatch.setattr(step_figures, "HANDSHAKES", (16, 128))
    monkeypatch.setattr(step_figures, "chained", lambda _world, _nbytes: 1.0)
    monkeypatch.setattr(step_figures, "python_overhead", lambda _world: 1.0)
    drivers = [FakeGpu(tmp_path, rank) for rank in range(2)]
    notes = Notes(tmp_path / "notes.json", 60.0)
    cubin = partial(lambda built, _family, _dtype: fake_cubin(built), library)
    step_figures.handshake(notes, drivers, cubin, b"", tmp_path, blocks=2, memory_bytes=1 << 20)
    assert notes.goals[0]["holds"]
    for driver in drivers:
        assert driver.leaks() == []
        driver.release()
