"""The native cores pass their tests under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.probes import requires

ROOT = Path(__file__).parents[2]
REDUCE_TESTS = "tests/native/reduce/test_reduce_kernels.py"
SWEEP = f"{REDUCE_TESTS}::test_length_and_alignment_change_nothing"
# The tests of each core, in parts that run side by side and take about equally long.
QUEUE_TESTS = (
    (
        "tests/unit/shm_broadcast/test_codec_values.py",
        "tests/unit/shm_broadcast/test_codec_errors.py",
        "tests/unit/shm_broadcast/test_codec_frame.py",
        "tests/unit/shm_broadcast/test_codec_tensors.py",
        "tests/native/test_codec_native.py",
        "tests/security/test_codec_hostile.py",
        "tests/security/test_codec_damage.py",
    ),
    (
        "tests/native/test_ring_native.py",
        "tests/native/test_endpoints.py",
        "tests/native/test_read_endpoint.py",
        "tests/unit/shm_broadcast/test_ring.py",
        "tests/unit/shm_broadcast/test_ring_waiting.py",
        "tests/unit/shm_broadcast/test_long_messages.py",
    ),
)
DEVICE_TESTS = (
    (
        "tests/native/test_shared_region.py",
        "tests/native/test_refusals.py",
        "tests/native/test_ordinary_tensors.py",
        SWEEP,
    ),
    (REDUCE_TESTS, f"--deselect={SWEEP}"),
)
# These tests measure memory, and the sanitizer keeps memory that was freed.
LEFT_OUT = "not under_a_memory_limit and not used_again_and_bounded"
REDUCE_DRIVER = ROOT / "tests" / "native" / "reduce" / "reduce_driver.cpp"
LOAD = """
import importlib.util, sys
name, path = sys.argv[1:3]
spec = importlib.util.spec_from_file_location(name, path)
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
sys.modules[name] = core
"""
# The tests of the kernels use a library that they build. Here that library is the core, with the same driver.
RUN = (
    LOAD
    + """
import pytest

class Kernels:
    def pytest_collection_finish(self, session):
        for module in {item.module for item in session.items}:
            if module.__name__.endswith("test_reduce_kernels"):
                assert callable(module.build)
                module.build = lambda folder: (folder / "reduce.so").symlink_to(path)

options = ["-q", "-x", "-p", "no:cacheprovider", "-k", sys.argv[3]]
raise SystemExit(pytest.main([*options, *sys.argv[4:]], plugins=[Kernels()]))
"""
)
OVERFLOW = """
import ctypes
small = ctypes.create_string_buffer(64)
"""
QUEUE_OVERFLOW = LOAD + OVERFLOW + "core.copy_into(ctypes.addressof(small), 128, bytes(128))"
# This sums 32 float32 of one rank into room for 16; the type and the reduction have the number 0.
DEVICE_OVERFLOW = (
    LOAD
    + OVERFLOW
    + """
whole = ctypes.create_string_buffer(128)
inputs = (ctypes.c_void_p * 1)(ctypes.addressof(whole))
one, many = ctypes.c_size_t(1), ctypes.c_size_t(32)
ctypes.CDLL(path).reduce_run(0, 0, b"baseline", 0, small, inputs, one, many)
"""
)


def runtime(compiler: str, name: str) -> str | None:
    """Return the path of a sanitizer's run-time library, or None if the compiler lacks it."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return str(path) if path.is_absolute() and path.exists() else None


def built(compiler: str, folder: Path, sources: Sequence[Path]) -> Path:
    """Compile a native core with the sanitizers into `folder`, several files at a time."""
    library = folder / "_core.abi3.so"
    flags = ["-std=c++20", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    folders = sorted({source.parent for source in sources})
    places = [f"-I{folder}" for folder in (sysconfig.get_path("include"), *folders)]

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        defines = ["-DPy_LIMITED_API=0x030B0000"]
        command = [compiler, *flags, *checks, *defines, *places, "-c", str(source), "-o", made]
        subprocess.run(command, check=True, timeout=240)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        # The files with the last names are the largest ones.
        objects = list(pool.map(compiled, sorted(sources, reverse=True)))
    subprocess.run([compiler, "-shared", *checks, *objects, "-o", str(library)], check=True, timeout=120)
    return library


def run(code: str, libraries: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter with the sanitizers; a core's name and path are its first arguments."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "HYPOTHESIS_PROFILE": "brief",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


def check(
    folder: Path, name: str, sources: Sequence[Path], overflow: str, parts: Sequence[Sequence[str]]
) -> None:
    """Build a core, check that an overflow in it is reported, and run the parts of its tests side by side."""
    compiler = shutil.which("g++") or "g++"
    libraries = [path for lib in ("libasan.so", "libubsan.so") if (path := runtime(compiler, lib))]
    assert len(libraries) == 2, "the compiler has libasan but no libubsan"
    core = (name, str(built(compiler, folder, sources)))
    found = run(overflow, libraries, *core)
    assert "AddressSanitizer: heap-buffer-overflow" in found.stderr, found.stderr[-6000:]
    with ThreadPoolExecutor(len(parts)) as pool:
        outcomes = pool.map(lambda tests: run(RUN, libraries, *core, LEFT_OUT, *tests), parts)
        for clean in outcomes:
            assert clean.returncode == 0, clean.stdout[-6000:] + clean.stderr[-6000:]
            assert "runtime error" not in clean.stderr
            assert " passed" in clean.stdout


@pytest.mark.guarantee("B10", "C13")
@pytest.mark.thorough
@requires("sanitizers")
def test_the_codec_and_the_ring_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """The sanitizers report no error in the tests of the codec and the ring, and they do report an overflow."""
    sources = list((ROOT / "shm_broadcast/csrc").rglob("*.cpp"))
    check(tmp_path, "shm_broadcast._core", sources, QUEUE_OVERFLOW, QUEUE_TESTS)


@pytest.mark.guarantee("D2", "D14")
@pytest.mark.thorough
@requires("sanitizers")
def test_the_region_and_the_reductions_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """The sanitizers report no error in the tests of the region and the kernels, and they do report an overflow."""
    sources = [*(ROOT / "device_comm/csrc").rglob("*.cpp"), REDUCE_DRIVER]
    check(tmp_path, "device_comm._core", sources, DEVICE_OVERFLOW, DEVICE_TESTS)
