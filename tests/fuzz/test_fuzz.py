"""Changed messages make no decoder crash, hang or raise anything but its own errors, and they reach its lines."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shm_broadcast import liveness, segment
from tests.fuzz.builds import CORES, LOAD, ROOT, SANITIZED, built_cores, compiled, linked
from tests.fuzz.coverage import LEAST, MEASURED, NATIVE, PAGE, PYTHON, measure, source_of
from tests.fuzz.driver import CURRENT, FuzzError, Mutator, fuzz
from tests.fuzz.entries import check_entered
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.probes import requires

pytestmark = pytest.mark.proof

SAMPLE = 6_000
ALL = 10_000_000
COUNTED = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return where everything native is compiled once for all workers."""
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "fuzz"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.mark.guarantee("C10", "B10", "B17")
@pytest.mark.parametrize("name", TARGETS)
def test_a_sample_of_changed_messages_is_decoded_or_refused(folder: Path, name: str) -> None:
    """Some thousand inputs enter each decoder; `make test-thorough` takes ten million, under the sanitizers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns of dtypes that nobody should use
        counts = check_entered(TARGETS[name](), PYTHON.get(name, []), folder, SAMPLE)
    assert sum(counts.values()) == SAMPLE
    assert counts["accepted"] > 100


def test_a_stand_in_that_is_not_used_is_found(folder: Path) -> None:
    """The sample fails if the decoder calls its own function where the target meant another one."""
    target = TARGETS["handover"]()
    vars(segment)["this_process"] = liveness.this_process  # `close` of the target puts back what was there
    with pytest.raises(AssertionError, match=r"handover: no input entered targets\.py:\d+ <lambda>$"):
        check_entered(target, PYTHON["handover"], folder, SAMPLE)


def test_a_decoder_that_is_not_entered_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample fails if what reads the messages is not called, though no input is refused wrongly."""

    def dropped(owner: Any, visitor: Any) -> None:
        for descriptor in visitor.peer._descriptors:
            vars(segment)["os"].close(descriptor)

    monkeypatch.setattr(segment.Handover, "_give", dropped)
    with pytest.raises(AssertionError, match=r"no input entered segment\.py:\d+ _give, "):
        check_entered(TARGETS["handover"](), PYTHON["handover"], folder, SAMPLE)


def test_a_result_that_never_comes_is_found(folder: Path) -> None:
    """The sample fails if native code never gives a result that the target names."""
    target = Target(
        "idle", [b"abc"], lambda data, number: None, (ValueError,), results=("accepted", "received")
    )
    with pytest.raises(AssertionError, match="^idle: no input had the result received$"):
        check_entered(target, [], folder, 100)


def test_an_input_is_the_same_in_every_run(folder: Path) -> None:
    """Its number names it, so a failure can be repeated alone."""
    seeds = [bytes(range(200)), b"other" * 20]
    first = [Mutator(seeds, folder).input(number) for number in range(500)]
    later = Mutator(seeds, folder)
    assert [later.input(number) for number in range(500)] == first
    assert len(set(first)) > 400
    fixed = Mutator(seeds, folder, is_fixed=True)
    assert {len(fixed.input(number)) for number in range(100)} == {100, 200}


def test_another_error_is_reported_with_its_input(folder: Path) -> None:
    """The driver names number and bytes of an input whose decoder raises what it should not."""

    def run(data: bytes, number: int) -> None:
        if data[:1] != b"a":
            raise KeyError("unexpected")

    with pytest.raises(FuzzError, match=r"broken, input \d+: KeyError.*--first \d+ --inputs 1"):
        fuzz(Target("broken", [b"abc"], run, (ValueError,)), folder, 1000)


def read_rows() -> dict[tuple[str, str], tuple[float, str]]:
    """Return by decoder and language, from `coverage.md`, how many percent are reached, and the digest of the code."""
    rows = re.findall(
        r"^\| ([\w ]+) \| (Python|C\+\+) \| \d+ of \d+ \| ([\d.]+)% \| [^|]* \| (\w+) \|$",
        PAGE.read_text(),
        re.MULTILINE,
    )
    return {(name, language): (float(percent), source) for name, language, percent, source in rows}


def test_the_committed_figures_are_high_enough() -> None:
    """`coverage.md` has a row for each decoder and language, and each reaches 95 % of the lines."""
    rows = read_rows()
    assert set(rows) == set(MEASURED)
    assert {row for row, (percent, _) in rows.items() if percent < 100 * LEAST} == set()


def test_the_committed_figures_are_those_of_the_present_decoders() -> None:
    """No decoder has changed since `python -m tests.fuzz.coverage` wrote its row: figures and lines are not stale."""
    present = {row: source_of(*row) for row in MEASURED}
    assert {row: source for row, (_, source) in read_rows().items()} == present


def test_a_changed_decoder_makes_its_row_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """The digest of a row is another one after a change of a function in Python, of a file in C++, or of the seeds."""
    rows = [("handle", "Python"), ("board", "C++"), ("channels", "C++")]
    before = [source_of(*row) for row in rows]
    monkeypatch.setitem(PYTHON, "handle", [*PYTHON["handle"], read_rows])
    monkeypatch.setitem(NATIVE, "board", NATIVE["channels"])
    monkeypatch.setitem(TARGETS, "channels", TARGETS["board"])
    assert [row for row, old in zip(rows, before, strict=True) if source_of(*row) == old] == []


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "language"), MEASURED)
def test_the_inputs_reach_the_lines_of_the_decoders(
    folder: Path, tmp_path: Path, name: str, language: str
) -> None:
    """Less than 5 % of the lines of each decoder are out of reach of the inputs."""
    total, missed = measure(name, language, COUNTED, tmp_path, folder / "counting")
    assert sum(map(len, missed.values())) <= (1 - LEAST) * total, missed


@pytest.fixture(scope="module")
def sanitized(folder: Path) -> list[str]:
    """Return names and paths of both cores, built with the sanitizers."""
    return built_cores(folder / "sanitized", SANITIZED)


def sanitizers() -> str:
    """Return the libraries that the interpreter must load first."""
    compiler = shutil.which("g++") or "g++"
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    return " ".join(
        subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() for ask in asked
    )


def run_under_sanitizers(
    cores: Sequence[str], built: Path, kept: Path, name: str, numbers: range, allocator: str
) -> subprocess.CompletedProcess[str]:
    """Give the inputs of these numbers to target `name`, whose cores are built with the sanitizers.

    Args:
        cores: Their names and paths.
        built: Where the maker of the inputs is kept.
        kept: The file that keeps the current input.
        name: The target.
        numbers: Of the inputs.
        allocator: Of Python's own objects: "malloc" gives each a block of its own, "pymalloc" those above 512 bytes.
    """
    environ = {
        **os.environ,
        "LD_PRELOAD": sanitizers(),
        # One caller of each allocation is kept: to keep more takes half as long as the allocation.
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16:malloc_context_size=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": allocator,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    options = ["--inputs", str(len(numbers)), "--first", str(numbers.start), "--input-file", str(kept)]
    command = [sys.executable, "-c", LOAD, *cores, "--", "tests.fuzz.driver", name, *options]
    return subprocess.run(
        [*command, "--built", str(built)],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=2400,
        check=False,
    )


@pytest.mark.guarantee("C10", "C13", "B10", "B17")
@pytest.mark.thorough
@pytest.mark.long
@requires("sanitizers")
@pytest.mark.parametrize("allocator", ["malloc", "pymalloc"])
@pytest.mark.parametrize("name", TARGETS)
def test_ten_million_changed_messages_are_decoded_or_refused_under_sanitizers(
    sanitized: list[str], folder: Path, tmp_path: Path, name: str, allocator: str
) -> None:
    """The sanitizers report nothing. Ten million inputs of a decoder take 1 to 7 minutes of processor time.

    The native cores, and the blocks in which they find the inputs, are checked for all inputs. For the first tenth,
    each object that Python allocates has a block of its own as well; that takes twice as long.
    """
    numbers = {"malloc": range(ALL // 10), "pymalloc": range(ALL // 10, ALL)}[allocator]
    kept = tmp_path / "input"
    found = run_under_sanitizers(sanitized, folder, kept, name, numbers, allocator)
    said = found.stdout + found.stderr
    number, size = CURRENT.unpack_from(kept.read_bytes())
    data = kept.read_bytes()[CURRENT.size :][: min(size, 400)]
    assert found.returncode == 0, f"{said[-6000:]}\nthe last input, {number}, began with {data.hex()}"
    assert "runtime error" not in said
    assert f"{name}: {len(numbers)} inputs" in said


@pytest.mark.thorough
@requires("sanitizers")
def test_a_read_of_one_byte_beyond_the_input_is_found(
    sanitized: list[str], folder: Path, tmp_path: Path
) -> None:
    """A decoder that lets a buffer end one byte beyond its frame fails, and so does the kept input alone."""
    name = "shm_broadcast._core"
    source = CORES[name] / "codec" / "decode.cpp"
    right, wrong = "nbytes > total_ - from)", "nbytes > total_ - from + 1)"
    assert source.read_text().count(right) == 1
    changed = tmp_path / "decode.cpp"
    changed.write_text(source.read_text().replace(right, wrong))
    others = [made for made in (folder / "sanitized" / name).glob("*.o") if made.stem != source.stem]
    core = linked([compiled(changed, name, tmp_path, SANITIZED), *others], tmp_path, SANITIZED)
    cores = [str(core) if path.endswith(f"{name}/{core.name}") else path for path in sanitized]
    kept = tmp_path / "input"
    found = run_under_sanitizers(cores, folder, kept, "codec", range(100_000), "pymalloc")
    assert found.returncode != 0
    assert "heap-buffer-overflow" in found.stderr
    number, _ = CURRENT.unpack_from(kept.read_bytes())
    alone = range(number, number + 1)
    again = run_under_sanitizers(cores, folder, kept, "codec", alone, "pymalloc")
    assert "heap-buffer-overflow" in again.stderr
    assert run_under_sanitizers(sanitized, folder, kept, "codec", alone, "pymalloc").returncode == 0
