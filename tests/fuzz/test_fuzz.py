"""Changed messages make no decoder crash, hang or raise anything but its own errors, and they reach its lines."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from shm_broadcast import liveness, segment
from tests.fuzz.builds import CORES, LOAD, ROOT, SANITIZED, build_core
from tests.fuzz.coverage import LEAST, NATIVE, PAGE, PYTHON, of_native, of_python
from tests.fuzz.driver import FuzzError, Mutator, fuzz
from tests.fuzz.entries import check_entered
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS
from tests.probes import requires

SAMPLE = 6_000
ALL = 10_000_000
# Each decoder's inputs are divided, so that processes share them and none takes longer than a quarter of an hour.
PARTS = 4
COUNTED = 100_000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where the mutations are compiled once."""
    return tmp_path_factory.mktemp("fuzz")


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


def test_the_committed_figures_are_high_enough() -> None:
    """`coverage.md` has a row for each decoder and language, and each reaches 95 % of the lines."""
    rows = re.findall(
        r"^\| ([\w ]+) \| (Python|C\+\+) \| \d+ of \d+ \| ([\d.]+)% \|", PAGE.read_text(), re.MULTILINE
    )
    assert {(name, language) for name, language, _ in rows} == {
        *((name, "Python") for name in PYTHON),
        *((name, "C++") for name in NATIVE),
    }
    assert [row for row in rows if float(row[2]) < 100 * LEAST] == []


@pytest.mark.thorough
@pytest.mark.proof
@pytest.mark.parametrize("name", TARGETS)
def test_the_inputs_reach_the_lines_of_the_decoders(tmp_path: Path, name: str) -> None:
    """Less than 5 % of the lines of each decoder are out of reach of the inputs."""
    for table, measure in ((PYTHON, of_python), (NATIVE, of_native)):
        if name in table:
            total, missed = measure(name, COUNTED, tmp_path)
            assert sum(map(len, missed.values())) <= (1 - LEAST) * total, missed


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Build both cores with the sanitizers; return their names and paths."""
    place = tmp_path_factory.mktemp("sanitized")
    return [text for core in CORES for text in (core, str(build_core(core, place / core, SANITIZED)))]


def sanitizers() -> str:
    """Return the libraries that the interpreter must load first."""
    compiler = shutil.which("g++") or "g++"
    asked = [[compiler, f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    return " ".join(
        subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() for ask in asked
    )


@pytest.mark.guarantee("C10", "C13", "B10", "B17")
@pytest.mark.thorough
@pytest.mark.proof
@requires("sanitizers")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("name", TARGETS)
def test_ten_million_changed_messages_are_decoded_or_refused_under_sanitizers(
    sanitized: list[str], tmp_path: Path, name: str, part: int
) -> None:
    """The sanitizers report nothing. All parts of a decoder take 5 to 40 minutes of processor time."""
    environ = {
        **os.environ,
        "LD_PRELOAD": sanitizers(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=16",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }
    inputs = int(os.environ.get("FUZZ_INPUTS", ALL)) // PARTS
    kept = tmp_path / "input"
    options = ["--inputs", str(inputs), "--first", str(part * inputs), "--input-file", str(kept)]
    command = [sys.executable, "-c", LOAD, *sanitized, "--", "tests.fuzz.driver", name, *options]
    found = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=2400, check=False
    )
    said = found.stdout + found.stderr
    assert found.returncode == 0, f"{said[-6000:]}\nthe last input began with {kept.read_bytes()[:400].hex()}"
    assert "runtime error" not in said
    assert f"{name}: {inputs} inputs" in said
