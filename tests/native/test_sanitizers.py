"""The native core passes its tests under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.probes import requires

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/unit/test_codec_values.py",
    "tests/unit/test_codec_errors.py",
    "tests/unit/test_codec_frame.py",
    "tests/unit/test_codec_tensors.py",
    "tests/native/test_codec_native.py",
    "tests/security/test_codec_hostile.py",
    "tests/native/test_ring_native.py",
    "tests/native/test_port_native.py",
    "tests/unit/test_ring.py",
    "tests/unit/test_ring_waiting.py",
    "tests/unit/test_long_messages.py",
)
# They measure memory, and the sanitizer keeps what was freed.
LEFT_OUT = "not under_a_memory_limit and not used_again_and_bounded"
LOAD = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("shm_broadcast._core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
sys.modules["shm_broadcast._core"] = core
"""
RUN = (
    LOAD
    + """
import pytest
options = ["-q", "-x", "-p", "no:cacheprovider", "-k", sys.argv[2]]
raise SystemExit(pytest.main([*options, *sys.argv[3:]]))
"""
)
OVERFLOW = (
    LOAD
    + """
import ctypes
small = ctypes.create_string_buffer(64)
core.copy_into(ctypes.addressof(small), 128, bytes(128))
"""
)


def runtime(compiler: str, name: str) -> str | None:
    """Return the path of a sanitizer's run-time library, None where the compiler lacks it."""
    found = subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    return str(path) if path.is_absolute() and path.exists() else None


def built(compiler: str, folder: Path) -> Path:
    """Compile the native core with the sanitizers into `folder`."""
    library = folder / "_core.abi3.so"
    sources = [str(path) for path in sorted((ROOT / "shm_broadcast/csrc").glob("*.cpp"))]
    flags = ["-std=c++20", "-O1", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-strict-aliasing"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(
        [compiler, *flags, *checks, "-DPy_LIMITED_API=0x030B0000", include, *sources, "-o", str(library)],
        check=True,
        timeout=120,
    )
    return library


def run(code: str, library: Path, libraries: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` in an interpreter with the sanitizers, the core's path as its first argument."""
    return subprocess.run(
        [sys.executable, "-c", code, str(library), *arguments],
        cwd=ROOT,
        env={
            **os.environ,
            "LD_PRELOAD": " ".join(libraries),
            "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "PYTHONMALLOC": "malloc",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )


@pytest.mark.guarantee("B10", "C13")
@requires("sanitizers")
def test_the_codec_and_the_ring_are_clean_under_sanitizers(tmp_path: Path) -> None:
    """No test of the codec or the ring makes a sanitizer report anything, and an overflow would be reported."""
    compiler = shutil.which("g++") or "g++"
    libraries = [path for name in ("libasan.so", "libubsan.so") if (path := runtime(compiler, name))]
    assert len(libraries) == 2, "the compiler has libasan but no libubsan"
    library = built(compiler, tmp_path)
    overflow = run(OVERFLOW, library, libraries)
    assert "AddressSanitizer: heap-buffer-overflow" in overflow.stderr
    clean = run(RUN, library, libraries, LEFT_OUT, *TESTS)
    assert clean.returncode == 0, clean.stdout[-6000:] + clean.stderr[-6000:]
    assert "runtime error" not in clean.stderr
    assert " passed" in clean.stdout
