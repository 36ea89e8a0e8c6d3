"""The ring's protocol runs as threads under the sanitizers, and without an edge the sanitizer would say so."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.probes import requires

ROOT = Path(__file__).parents[3]
HEADER = ROOT / "shm_broadcast" / "csrc" / "ring.hpp"
DRIVER = Path(__file__).with_name("ring_threads.cpp")
TSAN = ("-fsanitize=thread", "-Wno-tsan")  # it knows no fences: none of them guards data
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS")

# The memory order of each end of the three edges that guard payloads, as it stands in the header.
WEAKENED = {
    "payload->reader (release)": r"(published\.store\(published \+ .*, std::memory_order_)release",
    "payload->reader (acquire)": r"(return writer\(\)\.published\.load\(std::memory_order_)acquire",
    "room->writer (release)": r"(consumed\.store\(consumed \+ .*, std::memory_order_)release",
    "room->writer (acquire)": r"(consumed\.load\(std::memory_order_)acquire",
    "fill->reader (release)": r"(filled\.store\(stream_start_ \+ bytes, std::memory_order_)release",
    "fill->reader (acquire)": r"(filled\.load\(std::memory_order_)acquire",
}


def built(folder: Path, header: Path, options: tuple[str, ...]) -> Path:
    """Compile the driver against `header`."""
    compiler = shutil.which("g++") or "g++"
    program = folder / "ring_threads"
    flags = [
        "-std=c++20",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-missing-field-initializers",
        "-pthread",
    ]
    define = f'-DRING_HEADER="{header}"'
    subprocess.run(
        [compiler, *flags, *options, define, str(DRIVER), "-o", str(program)], check=True, timeout=120
    )
    return program


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the driver; where the sanitizer cannot bear randomised addresses, without them."""
    command = [str(program), *map(str, words)]
    environment = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    for prefix in ([], ["setarch", platform.machine(), "-R"]):
        outcome = subprocess.run(
            [*prefix, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        if "unexpected memory mapping" not in outcome.stderr:
            break
    return outcome


@pytest.mark.guarantee("B11", "B12")
@requires("sanitizers")
@pytest.mark.parametrize("options", [TSAN, ASAN], ids=["thread", "address"])
def test_the_protocol_is_clean_as_threads(tmp_path: Path, options: tuple[str, ...]) -> None:
    """No data race, no bad access, no torn, lost, doubled or reordered record and no lost wake-up."""
    program = built(tmp_path, HEADER, options)
    for readers, records, mode in (
        (1, 1500, "mixed"),
        (2, 1500, "park"),
        (3, 1500, "mixed"),
        (2, 1000, "spin"),
    ):
        outcome = run(program, readers, records, readers * 10 + 1, mode)
        assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.stderr[-4000:]
        assert outcome.stdout == f"ok: {records} records to {readers} readers\n"


@pytest.mark.guarantee("B12")
@requires("sanitizers")
@pytest.mark.parametrize("edge", WEAKENED)
def test_each_end_of_an_edge_is_needed(tmp_path: Path, edge: str) -> None:
    """With either end of an edge relaxed the thread sanitizer reports a race on the payload."""
    source = HEADER.read_text()
    weak, count = re.subn(WEAKENED[edge], r"\g<1>relaxed", source)
    assert count == 1, "the header has changed: say here where the edge is now"
    assert f"SYNC {edge}" in source
    header = tmp_path / "ring.hpp"
    header.write_text(weak)
    outcome = run(built(tmp_path, header, TSAN), 2, 2000, 5, "spin")
    assert "WARNING: ThreadSanitizer: data race" in outcome.stderr, outcome.stdout + outcome.stderr
