"""The region and the table of channels run as threads under the sanitizers, which report each edge that is missing.

The edges with seq_cst on both sides order a store before a load of another word. The thread sanitizer sees neither
this order nor fences. `tests/native/model/test_handshakes.py` shows with a search that they are needed and suffice.
"""

import shutil
from pathlib import Path

import pytest

from tests.native.threads import ASAN, ROOT, TSAN, built, run, weakened
from tests.probes import requires

FOLDERS = ("device_comm/csrc", "shm_broadcast/csrc")
REGION = Path(__file__).with_name("region_threads.cpp")
CHANNELS = Path(__file__).with_name("channel_threads.cpp")

# The memory order of each end of the edges in shared_region.hpp that guard data. In the product a rank that leaves has
# written nothing but its posts, which `slot->ranks` guards too. The driver's leaver also writes a note.
WEAKENED_REGION = {
    "slot->ranks (release)": r"(own\.step\.store\(step_, std::memory_order_)release",
    "slot->ranks (acquire)": r"(\.step\.load\(std::memory_order_)acquire",
    "leave->ranks (release)": r"(exit\.closed\.store\(1, std::memory_order_)release",
    "leave->ranks (acquire)": r"(exit\.closed\.load\(std::memory_order_)acquire",
}
# The same for channels.hpp. A claim that makes the channel also acquires what an earlier maker, which failed, wrote.
# That acquire cannot be weakened alone: g++ refuses an exchange whose success orders less than its failure.
WEAKENED_CHANNELS = {
    "channel->peer (release)": r"(\.store\(made \? kReady : kNone, std::memory_order_)seq_cst",
    "channel->peer (acquire) of a claim": r"(, std::memory_order_acquire, std::memory_order_)acquire",
    "channel->peer (acquire) of a look": r"(words_\[index\(from, to\)\]\.load\(std::memory_order_)seq_cst",
}


def region_driver(folder: Path, sources: Path, options: tuple[str, ...]) -> Path:
    """Compile the region's driver against the headers in `sources`."""
    return built(folder, (REGION, sources / "call.cpp"), (*options, f"-I{sources}"))


def channel_driver(folder: Path, sources: Path, options: tuple[str, ...]) -> Path:
    """Compile the channels' driver against the headers in `sources`."""
    return built(folder, (CHANNELS,), (*options, f"-I{sources}"))


def copied(folder: Path, header: str, edge: str, pattern: str) -> Path:
    """Copy the sources with one memory order relaxed; return where those of device_comm are."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name)
    sources = folder / FOLDERS[0] / "cpu"
    path = sources / header
    path.write_text(weakened(path.read_text(), edge.partition(" of ")[0], pattern))
    return sources


@pytest.mark.guarantee("D14")
@pytest.mark.thorough
@requires("sanitizers")
@pytest.mark.parametrize("options", [TSAN, ASAN], ids=["thread", "address"])
def test_the_region_is_clean_as_threads(tmp_path: Path, options: tuple[str, ...]) -> None:
    """There is no race, bad access, wrong result or lost wake-up, and a rank that leaves has completed its calls."""
    program = region_driver(tmp_path, ROOT / FOLDERS[0] / "cpu", options)
    for ranks, calls, mode in (
        (2, 1500, "mixed"),
        (2, 1500, "sleep"),
        (3, 1500, "mixed"),
        (4, 1500, "sleep"),
        (4, 1500, "mixed"),
        (3, 500, "spin"),
    ):
        outcome = run(program, ranks, calls, ranks * 10 + 1, mode)
        assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.stderr[-4000:]
        assert outcome.stdout == f"ok: {calls} calls of {ranks} ranks\n"


@pytest.mark.guarantee("D14")
@pytest.mark.thorough
@requires("sanitizers")
@pytest.mark.parametrize("edge", WEAKENED_REGION)
def test_each_end_of_an_edge_of_the_region_is_needed(tmp_path: Path, edge: str) -> None:
    """The thread sanitizer reports a race on a slot, a post or a leaver's note if either end is relaxed."""
    sources = copied(tmp_path, "shared_region.hpp", edge, WEAKENED_REGION[edge])
    outcome = run(region_driver(tmp_path, sources, TSAN), 2, 1000, 5, "spin")
    assert "WARNING: ThreadSanitizer: data race" in outcome.stderr, outcome.stdout + outcome.stderr


@pytest.mark.guarantee("D15")
@pytest.mark.thorough
@requires("sanitizers")
@pytest.mark.parametrize("options", [TSAN, ASAN], ids=["thread", "address"])
def test_the_table_of_channels_is_clean_as_threads(tmp_path: Path, options: tuple[str, ...]) -> None:
    """One of two ranks makes the channel, its messages arrive whole, and no rank waits for one that has left."""
    program = channel_driver(tmp_path, ROOT / FOLDERS[0] / "cpu", options)
    for seed in (1, 2):
        outcome = run(program, 2000, seed)
        assert (outcome.returncode, outcome.stderr) == (0, ""), outcome.stderr[-4000:]
        assert outcome.stdout == "ok: 2000 rounds\n"


@pytest.mark.guarantee("D15")
@pytest.mark.thorough
@requires("sanitizers")
@pytest.mark.parametrize("edge", WEAKENED_CHANNELS)
def test_each_end_of_an_edge_of_the_channels_is_needed(tmp_path: Path, edge: str) -> None:
    """The thread sanitizer reports a race on the ring's layout if either end is relaxed."""
    sources = copied(tmp_path, "channels.hpp", edge, WEAKENED_CHANNELS[edge])
    outcome = run(channel_driver(tmp_path, sources, TSAN), 20000, 5)
    assert "WARNING: ThreadSanitizer: data race" in outcome.stderr, outcome.stdout + outcome.stderr
