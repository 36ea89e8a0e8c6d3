"""The native parts that Python need not be there for run as aarch64 programs, in an emulator.

The emulator runs each thread on a core of this machine, whose memory order is stronger: it cannot show that an edge is
missing. `test_ring_threads.py` and `test_region_threads.py` show that, as the thread sanitizer goes by the edges and
not by the machine. What is shown here is that the sources compile for aarch64, and that waiting, waking and the
arithmetic work there.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.native.threads import ROOT, built
from tests.probes import requires

pytestmark = [pytest.mark.thorough, requires("aarch64")]

NATIVE = ROOT / "tests" / "native"
CPU = ROOT / "device_comm" / "csrc" / "cpu"
REDUCE = ROOT / "device_comm" / "csrc" / "reduce"
COMPILER = "aarch64-linux-gnu-g++"
STATUS = ROOT / "shm_broadcast" / "csrc" / "status"
RING = f'-DRING_HEADER="{ROOT / "shm_broadcast" / "csrc" / "ring" / "ring.hpp"}"'


def emulated(program: Path, *words: object) -> str:
    """Return what the program prints."""
    command = [shutil.which("qemu-aarch64-static") or "", str(program), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.guarantee("B11")
def test_the_ring_works_on_aarch64(tmp_path: Path) -> None:
    """No record is torn, lost, doubled or reordered, and no wake-up is lost, however readers and writer wait."""
    program = built(tmp_path, (NATIVE / "ring" / "ring_threads.cpp",), ("-static", RING), COMPILER)
    for readers, mode in ((1, "mixed"), (2, "park"), (3, "mixed"), (2, "spin")):
        assert emulated(program, readers, 1500, 7, mode) == f"ok: 1500 records to {readers} readers\n"


@pytest.mark.guarantee("B8", "S1")
@pytest.mark.parametrize(
    ("part", "header"),
    [("ring", RING), ("status", f'-DPAGE_HEADER="{STATUS / "page.hpp"}"')],
    ids=["ring", "status"],
)
def test_the_layout_in_shared_memory_is_the_same(tmp_path: Path, part: str, header: str) -> None:
    """Offsets, sizes and codes of the ring and of the status page do not depend on the processor."""
    source = NATIVE / part / "layout.cpp"
    (tmp_path / "own").mkdir()
    here = subprocess.run(
        [built(tmp_path / "own", (source,), (header,))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert emulated(built(tmp_path, (source,), ("-static", header), COMPILER)) == here.stdout != ""


@pytest.mark.guarantee("D14", "D15")
def test_the_region_and_its_channels_work_on_aarch64(tmp_path: Path) -> None:
    """Every rank gets the others' values in each call, and messages arrive whole."""
    options = ("-static", f"-I{CPU}")
    region = built(tmp_path, (NATIVE / "region" / "region_threads.cpp", CPU / "call.cpp"), options, COMPILER)
    for ranks, mode in ((2, "sleep"), (3, "mixed"), (4, "mixed")):
        assert emulated(region, ranks, 800, 7, mode) == f"ok: 800 calls of {ranks} ranks\n"
    channels = built(tmp_path, (NATIVE / "region" / "channel_threads.cpp",), options, COMPILER)
    assert emulated(channels, 1000, 1) == "ok: 1000 rounds\n"


@pytest.mark.guarantee("S2")
def test_the_status_page_works_on_aarch64(tmp_path: Path) -> None:
    """A copy that is made while a thread writes mixes no two calls."""
    options = ("-static", f"-I{STATUS}")
    threads = built(tmp_path, (NATIVE / "status" / "status_threads.cpp",), options, COMPILER)
    assert emulated(threads, 300) == "ok: 300 copies\n"


def test_reductions_have_the_same_bits_on_aarch64(tmp_path: Path) -> None:
    """Random bits of every dtype give the same results there as at each level of this machine, NaNs counted as one."""
    sources = (Path(__file__).with_name("reduce_levels.cpp"), *sorted(REDUCE.glob("*.cpp")))
    options = ("-g0", "-fno-strict-aliasing", f"-I{REDUCE}")
    (tmp_path / "own").mkdir()
    here = subprocess.run(
        [built(tmp_path / "own", sources, options)], capture_output=True, text=True, timeout=120, check=True
    )
    # Optimised as in the product, because a compiler may then round a product and a sum once.
    there = emulated(built(tmp_path, sources, ("-static", "-O3", *options), COMPILER))
    sums: dict[tuple[str, str], set[str]] = {}
    levels = set()
    for line in [*here.stdout.splitlines(), *there.splitlines()]:
        dtype, operation, level, _, checksum = line.split()
        sums.setdefault((dtype, operation), set()).add(checksum)
        levels.add(level)
    assert {"baseline", "neon"} <= levels
    assert len(sums) == 81
    assert [pair for pair, found in sums.items() if len(found) > 1] == []
