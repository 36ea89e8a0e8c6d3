"""The benchmarks of calls on CUDA without a device run with few calls, and print and write a row for each form."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.probes import requires

ROOT = Path(__file__).parents[3]
SUMS = ("all_reduce_", "all_reduce_into_output", "all_reduce")
ROWS = {
    "nccl-calls": (
        "ncclAllReduce by ctypes, nothing converted",
        "torch.empty_like",
        *SUMS,
        *(f"{name}, with a StreamOrder" for name in SUMS),
    ),
    "kernel-calls": (
        "a prepared launch by the bindings",
        "torch.empty_like",
        "our kernels: all_reduce",
        "our kernels: fused norm",
        "communicator: all_reduce, with its result",
    ),
}


@pytest.mark.slow
@requires("compiler")
@pytest.mark.parametrize("name", ROWS)
def test_a_benchmark_of_calls_prints_its_rows(name: str, tmp_path: Path) -> None:
    """Each form has a row with a median that is at least the least figure, and the file has the same rows."""
    if name == "kernel-calls":
        pytest.importorskip("cuda.bindings.driver", exc_type=ImportError)
    file = tmp_path / "calls.json"
    few = ("--rounds", "3", "--calls", "5", "--json", str(file))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", name, *few],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^(.+?) +median +([\d.]+) +least +([\d.]+)$", done.stdout, re.MULTILINE)
    assert tuple(row[0] for row in rows) == ROWS[name]
    assert all(float(median) >= float(least) > 0 for _, median, least in rows)
    written = json.loads(file.read_text())
    assert tuple(written["calls"]) == ROWS[name]
    assert written["machine"]["python"] == platform.python_version()
    assert "torch" in written["machine"]["packages"]
