"""The native core passes the codec's tests under the address and undefined-behaviour sanitizers."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/unit/test_codec_values.py",
    "tests/unit/test_codec_errors.py",
    "tests/unit/test_codec_frame.py",
    "tests/native/test_codec_native.py",
    "tests/security/test_codec_hostile.py",
)
RUN = """
import importlib.util, sys
import pytest
spec = importlib.util.spec_from_file_location("shm_broadcast._core", sys.argv[1])
core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(core)
sys.modules["shm_broadcast._core"] = core
raise SystemExit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-k", "not under_a_memory_limit", *sys.argv[2:]]))
"""


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


def test_the_codec_is_clean_under_sanitizers(tmp_path: Path) -> None:
    """No test of the codec makes a sanitizer report anything."""
    compiler = shutil.which("g++")
    libraries = (
        [] if compiler is None else [runtime(compiler, name) for name in ("libasan.so", "libubsan.so")]
    )
    if compiler is None or not all(libraries):
        pytest.skip("the compiler has no address sanitizer")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(path for path in libraries if path),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    run = subprocess.run(
        [sys.executable, "-c", RUN, str(built(compiler, tmp_path)), *TESTS],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-6000:]
    assert "runtime error" not in run.stderr
    assert " passed" in run.stdout
