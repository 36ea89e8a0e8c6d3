"""What the tests of `tests/gpu` compute, over kernels that g++ compiled: streams, loopbacks and figures."""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.cuda.kernels import family_of
from shm_broadcast.errors import UsageError
from tests.fake_cuda import fake_cubin
from tests.fake_gpu import FakeGpu
from tests.gpu import overlap as overlaps
from tests.gpu import test_figures as figures
from tests.gpu import test_patterns as patterns
from tests.gpu import test_probe as probe
from tests.gpu import test_variants as variants
from tests.gpu.comparison import take_turns
from tests.gpu.controls import CONTROLS, DELAYS_ALONE
from tests.gpu.device import compile_mutant, compile_text, program_source
from tests.gpu.loopback import Loopback, Timer, two_shot_bytes
from tests.gpu.notes import Notes, read_notes
from tests.gpu.patches import FOLDERS, patched_source
from tests.gpu.report import GOALS
from tests.gpu.streams import StreamWorld, absent_rank, norms, noticed
from tests.gpu.values import SIZES, WrongResultError
from tests.native.cuda.host_build import LIBRARY, build_host_library, compile_host, shared_folder
from tests.nccl_ranks import DeviceStreams

REPLAYED = (128, 512, 1024, 2048)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels of two ranks for bfloat16."""
    return build_host_library(2, "bfloat16", shared_folder(tmp_path_factory))


def world_of(
    library: Path, directory: Path, deadline_s: float = 20.0, limits: dict[str, int] | None = None
) -> tuple[StreamWorld, list[FakeGpu]]:
    """Return two ranks as threads. One module of kernels stands for all dtypes: only bfloat16 is called."""
    drivers = [FakeGpu(directory, rank) for rank in range(2)]
    small = {"push_one_shot": 256, "push_two_shot": 512, "pull_one_shot": 1024, "pull_two_shot": 4096}
    cubin = partial(lambda built, _family, _dtype: fake_cubin(built), library)
    options: dict[str, Any] = {"blocks": 2, "memory_bytes": 1 << 20, "deadline_s": deadline_s}
    made = StreamWorld(drivers, "bfloat16", cubin, b"\x7fELF", directory, limits=limits or small, **options)
    return made, drivers


def end(world: StreamWorld, drivers: list[FakeGpu], *, broken: bool = False) -> None:
    """Close; nothing is left, except the memory of a broken group: nobody knows who may still use it."""
    world.close()
    for driver in drivers:
        assert all(broken and each.startswith("memory ") for each in driver.leaks()), driver.leaks()
        driver.release()


# --- streams --------------------------------------------------------------------------------------------------


def test_streams_reduce_eagerly_and_in_graphs(library: Path, tmp_path: Path) -> None:
    """Every algorithm is in the graph; a replay with a wrong input is counted."""
    world, drivers = world_of(library, tmp_path)
    assert world.eager((1, 100, 200), 3) == 9
    assert world.replays(REPLAYED, 12, 60.0) == 12
    assert "elements were wrong" in str(noticed(world, (128,), 2, 60.0, lie=7))
    assert noticed(world, (128,), 4, 60.0) is None
    end(world, drivers)


def test_streams_compare_norms_of_wide_rows(library: Path, tmp_path: Path) -> None:
    """A row of 8192 is fused, and alone, with the bits of the reference."""
    world, drivers = world_of(library, tmp_path, limits={"push_one_shot": 1 << 15})
    assert norms(world, 1, 8192, 2) == 4
    end(world, drivers)


# Longer than a launch takes here, where each makes threads: a rank that is not late overtakes one that is.
LATE = ("-DLATE_NS=2000000", *LIBRARY)
# The sizes of the controls are for a device; these have the same algorithms.
SMALL = {512: 64, 2048: 256, 8192: 1024, 32768: 4096}
SAMPLE = (DELAYS_ALONE, "clear_dropped", "wrong_input")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each in SAMPLE else pytest.mark.thorough) for each in CONTROLS]
)
def test_the_controls_notice_their_mistakes_and_nothing_else(
    library: Path, folder: Path, tmp_path: Path, name: str
) -> None:
    """The controls of the device, with the same patches. Right kernels bear the delays; each mistake is noticed."""
    control = CONTROLS[name]
    if control.mistake or control.is_late:
        library = folder / f"{name.replace(' ', '_')}.so"
        source = library.with_suffix(".cu")
        source.write_text(control.source())
        compile_host(source, "host_library.cpp", library, 2, "bfloat16", LATE)
    limits = {algorithm: SMALL.get(2 * size, 4 * size) // 2 for algorithm, size in control.limits.items()}
    world, drivers = world_of(library, tmp_path, deadline_s=2.0, limits=limits)
    found = noticed(world, [SMALL[size] for size in control.calls], 8, 60.0, lie=control.lie)
    assert (found is None) == (name == DELAYS_ALONE), found
    end(world, drivers, broken=found is not None and "elements were wrong" not in found)


def test_a_rank_that_does_not_launch_is_named(library: Path, tmp_path: Path) -> None:
    """Rank 0 hears of rank 1 when the deadline has passed, not before."""
    world, drivers = world_of(library, tmp_path, deadline_s=0.3)
    assert absent_rank(world, 0.3) >= 0.27
    end(world, drivers, broken=True)


# --- loopbacks and figures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["push_one_shot", "push_two_shot", "push_add_rms_norm"])
def test_a_loopback_finds_its_peers_data_and_can_be_refilled(
    library: Path, tmp_path: Path, kernel: str
) -> None:
    """Each lane has the right result; without a refill the second launch waits in vain, so the filling is needed."""
    driver = FakeGpu(tmp_path, 0)
    loopback = Loopback(
        driver,
        *(kernel, 2, "bfloat16", 256, lambda _family: fake_cubin(library)),
        lanes=3,
        stream=driver.stream_create(),
        norm=(2, 64) if kernel.endswith("norm") else None,
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


def test_bytes_moved_are_those_of_the_kernel() -> None:
    """Two ranks, 32 bytes: shards of 16; read 1 + 1 + 1 + 1 of them, written 1 + 1 + 1 + 1 + 1 + 1."""
    assert two_shot_bytes(32, 2) == 160
    assert two_shot_bytes(8 << 20, 8) == 58 << 20


def test_every_figure_can_be_made(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small, and of no meaning here: each goal is recorded once, and nothing is left."""
    small = {"LANES": 2, "KIB": 16, "MIB": 256, "WORLDS": (2,), "ONE_WORLD": 2, "NORM_SHAPE": (2, 64)}
    for name, value in small.items():
        monkeypatch.setattr(figures, name, value)
    monkeypatch.setattr(figures, "compile_mutant", lambda *_: fake_cubin(library))
    driver: Any = FakeGpu(tmp_path, 0)
    notes: Any = Notes(tmp_path / "notes")
    timer = Timer(driver, driver.stream_create(), fake_cubin(library))
    for measure in figures.FIGURES.values():
        if measure is not figures.compile_times:
            measure(notes, timer, lambda *_: fake_cubin(library))
    timer.close()
    driver.stream_destroy(timer.stream)
    assert driver.leaks() == []
    driver.release()
    found = read_notes(notes.path)
    assert set(found["goals"]) <= set(GOALS)
    assert len(found["goals"]) == 4
    assert len(found["figures"]) == 1 + 8 + 4 + 2 + 1


def small_pair(name: str) -> variants.Pair:
    """Return a pair that threads of this process run in a moment, and whose sides still have different shapes."""
    pair = variants.PAIRS[name]
    norm = (2, 8192) if pair.norm else None
    nbytes = 65536 if pair.kernel == "push_two_shot" else 32768 if norm else 256
    return dataclasses.replace(pair, worlds=(2,), nbytes=nbytes, lanes=2, norm=norm)


@pytest.fixture
def compiled(library: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the kernels of two ranks stand for all variants; return the list of the sources that were compiled."""
    sources: list[str] = []

    def compile_mutant(text: str, *_: object) -> bytes:
        sources.append(text)
        return fake_cubin(library)

    monkeypatch.setattr(variants, "compile_mutant", compile_mutant)
    return sources


@pytest.mark.parametrize("name", variants.PAIRS)
def test_every_pair_of_variants_can_be_measured(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str], name: str
) -> None:
    """Of no meaning here: both sides run in turns, each as it says, with right results, and nothing is left."""
    pair = small_pair(name)
    monkeypatch.setitem(variants.PAIRS, name, pair)
    driver: Any = FakeGpu(tmp_path, 0)
    notes = Notes(tmp_path / "notes")
    timer = Timer(driver, driver.stream_create(), fake_cubin(library))
    variants.measure(notes, timer, name, turns=6)
    timer.close()
    driver.stream_destroy(timer.stream)
    assert driver.leaks() == []
    ((title, found),) = read_notes(notes.path)["comparisons"].items()
    assert title.startswith(f"{name}, {pair.kernel}, 2 ranks")
    assert (found["shipped"], found["changed"]) == (pair.shipped.name, pair.changed.name)
    assert found["turns"] == 6
    assert found["shipped_us"] > 0
    sides = [pair.shipped, pair.changed]
    assert compiled == [patched_source(*each.patches) for each in sides]
    seen = [
        ((each.grid, each.threads, each.cluster), each.is_dependent)
        for each in dict.fromkeys(driver.configured)
    ]
    assert seen == [(variants.shape_for(driver, pair, each, 2), each.is_dependent) for each in sides]
    is_reshaped = pair.changed.fills_device or not pair.changed.has_clusters
    assert (seen[0][0] != seen[1][0]) == is_reshaped
    driver.release()


def test_variants_with_a_wrong_result_are_not_compared(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[str]
) -> None:
    """Even if only the last launch was wrong: a variant that does less would seem to be faster."""
    made: list[Loopback] = []

    class Watched(Loopback):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    def spoils(
        first: Callable[[], float], second: Callable[[], float], turns: int
    ) -> list[tuple[float, float]]:
        pairs = take_turns(first, second, turns)
        ctypes.memset(made[1].outputs[0], 0x55, 4)
        return pairs

    monkeypatch.setattr(variants, "Loopback", Watched)
    monkeypatch.setattr(variants, "take_turns", spoils)
    driver: Any = FakeGpu(tmp_path, 0)
    timer = Timer(driver, driver.stream_create(), fake_cubin(library))
    with pytest.raises(WrongResultError):
        variants.in_turns(timer, small_pair("entry fence"), 2, 6)
    assert len(compiled) == 2
    driver.release()


def test_the_patches_of_pairs_change_the_machine_code() -> None:
    """A patch that the compiler makes ineffective would compare a variant with itself."""
    compiled = cache(lambda source, family: compile_mutant(source, 90, 2, "bfloat16", family))
    for pair in variants.PAIRS.values():
        sources = [patched_source(*each.patches) for each in (pair.shipped, pair.changed)]
        code = [compiled(each, family_of(pair.kernel)) for each in sources]
        assert (code[0] != code[1]) == (pair.changed.patches != ())


def test_a_pair_differs_in_one_thing() -> None:
    """Otherwise nobody could say what the difference is due to. The report has a name for each side."""
    for pair in variants.PAIRS.values():
        sides = [dataclasses.asdict(each) for each in (pair.shipped, pair.changed)]
        different = [key for key in sides[0] if sides[0][key] != sides[1][key]]
        assert different[0] == "name"
        assert len(different) == 2
        assert pair.shipped.patches == ()


def test_a_handshake_is_timed(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group of two streams is made and closed, and the goal recorded."""
    monkeypatch.setattr(figures, "chained", lambda _world, _nbytes: 1.0)
    monkeypatch.setattr(figures, "python_overhead", lambda _world: 1.0)
    world, drivers = world_of(library, tmp_path, limits={"push_one_shot": 4096})
    notes = Notes(tmp_path / "notes")
    figures.handshake(notes, world)
    assert read_notes(notes.path)["goals"]["Python per custom all-reduce"]["reached"]
    end(world, drivers)


def test_an_asynchronous_all_reduce_is_beside_the_product(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only in the rounds that say so the all-reduces have a stream of their own, and the last one is waited for."""
    for name, value in {"ROUNDS": 2, "REDUCES": 3, "TURNS": 1}.items():
        monkeypatch.setattr(overlaps, name, value)
    world, drivers = world_of(library, tmp_path)
    driver, caller = drivers[0], world.streams[0]
    device = DeviceStreams(driver)
    made = overlaps.Overlap(world, device, lambda: driver.queue(device.current(), "product"), 100)
    notes = Notes(tmp_path / "notes")
    assert set(overlaps.overlap(notes, made)) == set(overlaps.PARTS)
    begun = len(driver.works)
    for name, stream in (("one after the other", caller), ("beside each other", 900)):
        made.time_us(overlaps.PARTS[name])
        works = [each for each in enumerate(driver.works) if each[0] >= begun and each[1].name != "spin"]
        begun = len(driver.works)
        assert [(each.name, each.stream) for _, each in works] == (
            [*[("push_one_shot", stream)] * 3, ("product", caller)] * 2
        )
        first, product, next_product = works[2], works[3], works[7]
        assert product[1].follows(first[0]) == (stream == caller)
        # The caller waits for all of a round before the next one.
        assert next_product[1].follows(first[0])
    assert list(read_notes(notes.path)["goals"]) == [overlaps.GOAL]
    assert overlaps.GOAL in GOALS
    made.expected = made.expected + 1
    with pytest.raises(WrongResultError, match="rank 0"):
        made.time_us(overlaps.PARTS["beside each other"])
    end(world, drivers)


# --- what needs no device to be wrong -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_programs_compile(dtype: str) -> None:
    """NVRTC compiles what the tests launch, and its log is in the error where it cannot."""
    assert compile_text(program_source(), 90, dtype)[:4] == b"\x7fELF"
    with pytest.raises(RuntimeError, match="error"):
        compile_text("nonsense", 90, dtype)


def test_the_patches_apply_to_the_kernels() -> None:
    """Each fits the kernels as they are, the controls' ones together; one that does not fit is refused."""
    names = [*(path.stem for path in FOLDERS[0].glob("*.patch")), "order_swapped"]
    assert len({patched_source(name) for name in names} | {patched_source()}) == len(names) + 1
    assert len({control.source() for control in CONTROLS.values()}) == len(CONTROLS)
    with pytest.raises(ValueError, match="does not apply to the kernels any more"):
        patched_source("clear_dropped", "clear_dropped")
    with pytest.raises(ValueError, match="there are 0 patches nothing"):
        patched_source("nothing")


def test_the_patched_kernels_compile() -> None:
    """NVRTC compiles the controls, and a mistake for an emulation too."""
    for name, control in CONTROLS.items():
        family = "pull" if name == "end_barrier_dropped" else "one_shot"
        assert compile_mutant(control.source(), 90, 2, "bfloat16", family)[:4] == b"\x7fELF"
    cubin = compile_mutant(patched_source("order_swapped"), 90, 4, "float32", "one_shot", "-DEMULATE=1")
    assert cubin[:4] == b"\x7fELF"


def test_the_facts_about_a_machine_can_be_asked(tmp_path: Path) -> None:
    """What needs no device is told here too; the bindings know the attributes that the device is asked for."""
    notes: Any = Notes(tmp_path / "notes")
    getattr(probe.versions, "__wrapped__")(notes)  # noqa: B009 - functools.wraps sets it
    facts = read_notes(notes.path)["facts"]
    assert set(facts) == {"torch", "CUDA of torch", "NVRTC", "cuda-bindings", "nvcc", "g++", "cc"}
    assert facts["torch"] == torch.__version__
    assert facts["nvcc"] == "none" or "cuda" in facts["nvcc"]
    assert any(character.isdigit() for character in facts["g++"])
    attributes = importlib.import_module("cuda.bindings.driver").CUdevice_attribute
    for name in ("COMPUTE_MODE", "MULTICAST_SUPPORTED"):
        assert hasattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")


def test_an_unusual_order_may_end_in_right_bits_or_in_our_errors_only() -> None:
    """Wrong bits and errors of others are raised; ours are told, also from inside of what the compiler raises."""

    def wrapped() -> None:
        try:
            raise UsageError("it is captured")
        except UsageError as error:
            raise RuntimeError("the compiler failed") from error

    def wrong() -> None:
        raise WrongResultError("3 differ")

    assert patterns.outcome_of(lambda: None) == patterns.RIGHT
    told = patterns.outcome_of(wrapped)
    assert told == "UsageError: it is captured"
    with pytest.raises(WrongResultError):
        patterns.outcome_of(wrong)
    patterns.judge([patterns.RIGHT, told])
    with pytest.raises(AssertionError, match="rank 1: InternalError"):
        patterns.judge([told, "InternalError: x"])


def test_the_bodies_can_be_run_by_ranks() -> None:
    """Ranks import a body by its name: each stands at the top level of its module. There are 40 sizes at least."""
    for name in (
        "test_probe:peer_memory",
        "test_processes:whole_life",
        "test_processes:loses_rank_1",
        "test_controls:report_of",
        "test_variants:one_pair",
        "test_patterns:opposite_order",
        "test_patterns:forked_capture",
        "test_patterns:reduce_overhead",
        "test_oracles:two_ranks",
        "test_oracles:symmetric_memory",
    ):
        module, _, body = name.partition(":")
        assert getattr(importlib.import_module(f"tests.gpu.{module}"), body).__qualname__ == body
    assert len(SIZES) >= 40
