"""The ring's protocol runs as threads under the sanitizers, which report each edge that is missing."""

import shutil
from pathlib import Path

import pytest

from tests.native.threads import ASAN, ROOT, TSAN, built, run, weakened
from tests.probes import requires

HEADER = ROOT / "shm_broadcast" / "csrc" / "ring" / "ring.hpp"
DRIVER = Path(__file__).with_name("ring_threads.cpp")

# A pattern for the memory order of each end of the three edges that guard payloads, as the header spells it.
WEAKENED = {
    "payload->reader (release)": r"(published\.store\(published \+ .*, std::memory_order_)release",
    "payload->reader (acquire)": r"(return writer\(\)\.published\.load\(std::memory_order_)acquire",
    "room->writer (release)": r"(consumed\.store\(consumed \+ .*, std::memory_order_)release",
    "room->writer (acquire)": r"(consumed\.load\(std::memory_order_)acquire",
    "fill->reader (release)": r"(filled\.store\(stream_start_ \+ bytes, std::memory_order_)release",
    "fill->reader (acquire)": r"(filled\.load\(std::memory_order_)acquire",
}


def driver(folder: Path, header: Path, options: tuple[str, ...]) -> Path:
    """Compile the driver against `header`."""
    return built(folder, (DRIVER,), (*options, f'-DRING_HEADER="{header}"'))


@pytest.mark.guarantee("B11", "B12")
@pytest.mark.thorough
@requires("sanitizers")
@pytest.mark.parametrize("options", [TSAN, ASAN], ids=["thread", "address"])
def test_the_protocol_is_clean_as_threads(tmp_path: Path, options: tuple[str, ...]) -> None:
    """There is no data race, no bad access, no torn, lost, doubled or reordered record, and no lost wake-up."""
    program = driver(tmp_path, HEADER, options)
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
@pytest.mark.thorough
@requires("sanitizers")
@pytest.mark.parametrize("edge", WEAKENED)
def test_each_end_of_an_edge_is_needed(tmp_path: Path, edge: str) -> None:
    """The thread sanitizer reports a race on the payload if either end of an edge is relaxed."""
    for name in ("bell.hpp", "futex.hpp"):
        shutil.copy(HEADER.with_name(name), tmp_path)
    header = tmp_path / "ring.hpp"
    header.write_text(weakened(HEADER.read_text(), edge, WEAKENED[edge]))
    outcome = run(driver(tmp_path, header, TSAN), 2, 2000, 5, "spin")
    assert "WARNING: ThreadSanitizer: data race" in outcome.stderr, outcome.stdout + outcome.stderr
