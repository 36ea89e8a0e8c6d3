"""Mistakes planted in the host side of the CUDA kernels are noticed by the tests of that side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[3]
UNIT: Final = "tests/unit/device_comm"
MULTIPROC: Final = "tests/multiproc/device_comm"


class Mistake(NamedTuple):
    """A line of `device_comm/cuda` that is replaced, and the tests that must fail then."""

    file: str
    right: str
    wrong: str
    tests: str


MISTAKES: Final = {
    "streams are not ordered": Mistake(
        "custom/streams.py",
        "            driver.stream_wait_event(stream, event)\n",
        "            pass\n",
        f"{UNIT}/test_stream_order.py",
    ),
    "one group may fill the device": Mistake(
        "policy/shapes.py",
        "multiprocessors // 2",
        "multiprocessors",
        f"{UNIT}/test_launch_shapes.py",
    ),
    "a grid of half a cluster": Mistake(
        "policy/shapes.py",
        "cluster * max(1, min(rows, most // cluster))",
        "max(1, min(cluster * rows, most - 1))",
        f"{UNIT}/test_launch_shapes.py",
    ),
    "the sums of a two-shot norm are left out of its arena": Mistake(
        "policy/norm.py",
        "norm_arena(rows, row_vectors, world_size) <= arena",
        "norm_arena(rows, row_vectors, world_size) // 2 <= arena",
        f"{UNIT}/test_launch_shapes.py",
    ),
    "the last piece of a large sum is dropped": Mistake(
        "custom/all_reduce.py",
        "for offset in range(0, nbytes, route.piece):",
        "for offset in range(0, nbytes - route.piece, route.piece):",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_a_large_deterministic_sum_goes_in_pieces",
    ),
    "input and output change places": Mistake(
        "custom/all_reduce.py",
        "        words[first] = input_\n        words[first + 1] = output\n",
        "        words[first] = output\n        words[first + 1] = input_\n",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_sums_are_those_in_rank_order",
    ),
    "the epsilon of the first norm is kept": Mistake(
        "custom/fused_calls.py",
        "        if eps != self._eps:\n",
        "        if self._eps == 0.0:\n",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_sums_are_those_in_rank_order",
    ),
    "our collectives wait for the end of the kernel before them": Mistake(
        "custom/all_reduce.py",
        "cluster=cluster, is_dependent=self._is_dependent",
        "cluster=cluster, is_dependent=False",
        f"{MULTIPROC}/test_cuda_communicator.py::test_all_kernels_begin_while_the_one_before_them_ends",
    ),
    "the kernels for experts wait for the end of the kernel before them": Mistake(
        "custom/expert_parallel.py",
        "_THREADS, is_dependent=self._is_dependent",
        "_THREADS, is_dependent=False",
        f"{MULTIPROC}/test_cuda_communicator.py::test_all_kernels_begin_while_the_one_before_them_ends",
    ),
    "dependent launches cannot be switched off": Mistake(
        "custom/all_reduce.py",
        "self._is_dependent = context.settings.dependent_launch",
        "self._is_dependent = True",
        f"{MULTIPROC}/test_cuda_communicator.py::test_all_kernels_begin_while_the_one_before_them_ends",
    ),
    "a digest of the policy without its rows": Mistake(
        "policy/decision.py",
        'numbers = [msgspec.structs.replace(row, source="") for row in table.thresholds]',
        "numbers = [row.operation for row in table.thresholds]",
        f"{UNIT}/test_policy.py",
    ),
    "attributes of a launch are lost": Mistake(
        "driver_bindings.py",
        "        native.numAttrs = len(attributes)\n",
        "        native.numAttrs = 0\n",
        "tests/native/test_cuda_driver.py",
    ),
    "a launch stays on the stream of the one before": Mistake(
        "driver_bindings.py",
        "        if stream != configuration.stream:\n",
        "        if configuration.stream < 0:\n",
        "tests/native/test_cuda_driver.py",
    ),
}


def copy_of_the_tree(folder: Path) -> Path:
    """Return a copy of the packages and their tests."""
    for part in ("coordinator", "device_comm", "shm_broadcast", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_in(tree: Path, tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the tree."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not engine", tests]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_every_mistake_fits_the_source() -> None:
    """Each replaces one place. One that fits nowhere any more would test nothing."""
    for name, mistake in MISTAKES.items():
        text = (ROOT / "device_comm" / "cuda" / mistake.file).read_text()
        assert text.count(mistake.right) == 1, name


@pytest.mark.thorough
@pytest.mark.parametrize("name", MISTAKES)
def test_every_mistake_is_noticed(name: str, tmp_path: Path) -> None:
    """The tests that name the mistake's part fail with it, and not for another reason than an assertion."""
    mistake = MISTAKES[name]
    tree = copy_of_the_tree(tmp_path)
    path = tree / "device_comm" / "cuda" / mistake.file
    path.write_text(path.read_text().replace(mistake.right, mistake.wrong))
    done = run_in(tree, mistake.tests)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]
    assert "failed" in done.stdout.splitlines()[-1], done.stdout[-3000:]


@pytest.mark.thorough
def test_without_a_mistake_the_same_tests_pass(tmp_path: Path) -> None:
    """The copy itself is no reason to fail."""
    done = run_in(copy_of_the_tree(tmp_path), f"{UNIT}/test_launch_shapes.py")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
