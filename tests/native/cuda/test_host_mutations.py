"""Mistakes planted in the host side of the CUDA plane and of NCCL are noticed by the tests of that side."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from tests.native.cuda.host_build import FOLDER, shared_folder
from tests.samples import sampled

ROOT: Final = Path(__file__).parents[3]
UNIT: Final = "tests/unit/device_comm"
MULTIPROC: Final = "tests/multiproc/device_comm"


class Mistake(NamedTuple):
    """A place in `device_comm` that is replaced, and the tests that must fail then."""

    file: str
    right: str
    wrong: str
    tests: str


MISTAKES: Final = {
    "streams are not ordered": Mistake(
        "cuda/custom/streams.py",
        "            driver.stream_wait_event(stream, event)\n",
        "            pass\n",
        f"{UNIT}/test_stream_order.py",
    ),
    "one group may fill the device": Mistake(
        "cuda/policy/shapes.py",
        "multiprocessors // 2",
        "multiprocessors",
        f"{UNIT}/test_launch_shapes.py",
    ),
    "a grid of half a cluster": Mistake(
        "cuda/policy/shapes.py",
        "cluster * max(1, min(rows, most // cluster))",
        "max(1, min(cluster * rows, most - 1))",
        f"{UNIT}/test_launch_shapes.py",
    ),
    "the sums of a two-shot norm are left out of its arena": Mistake(
        "cuda/policy/norm.py",
        "norm_arena(rows, row_vectors, world_size) <= arena",
        "norm_arena(rows, row_vectors, world_size) // 2 <= arena",
        f"{UNIT}/test_launch_shapes.py",
    ),
    "the last piece of a large sum is too short": Mistake(
        "cuda/custom/all_reduce.py",
        "output + route.piece, count - whole",
        "output + route.piece, count - whole - 8",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_a_large_deterministic_sum_goes_in_pieces",
    ),
    "input and output change places": Mistake(
        "cuda/custom/all_reduce.py",
        "        words[first] = input_\n        words[first + 1] = output\n",
        "        words[first] = output\n        words[first + 1] = input_\n",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_sums_are_those_in_rank_order",
    ),
    "the epsilon of the first norm is kept": Mistake(
        "cuda/custom/fused_calls.py",
        "        if eps != self._eps:\n",
        "        if self._eps == 0.0:\n",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_sums_are_those_in_rank_order",
    ),
    "our collectives wait for the end of the kernel before them": Mistake(
        "cuda/custom/all_reduce.py",
        "cluster=cluster, is_dependent=self._is_dependent",
        "cluster=cluster, is_dependent=False",
        f"{MULTIPROC}/test_cuda_communicator.py::test_all_kernels_begin_while_the_one_before_them_ends",
    ),
    "the kernels for experts wait for the end of the kernel before them": Mistake(
        "cuda/custom/expert_parallel.py",
        "_THREADS, is_dependent=self._is_dependent",
        "_THREADS, is_dependent=False",
        f"{MULTIPROC}/test_cuda_communicator.py::test_all_kernels_begin_while_the_one_before_them_ends",
    ),
    "dependent launches cannot be switched off": Mistake(
        "cuda/custom/all_reduce.py",
        "self._is_dependent = context.settings.dependent_launch",
        "self._is_dependent = True",
        f"{MULTIPROC}/test_cuda_communicator.py::test_all_kernels_begin_while_the_one_before_them_ends",
    ),
    "a digest of the policy without its rows": Mistake(
        "cuda/policy/decision.py",
        'numbers = [msgspec.structs.replace(row, source="") for row in table.thresholds]',
        "numbers = [row.operation for row in table.thresholds]",
        f"{UNIT}/test_policy.py",
    ),
    "attributes of a launch are lost": Mistake(
        "cuda/driver_bindings.py",
        "        native.numAttrs = len(attributes)\n",
        "        native.numAttrs = 0\n",
        "tests/native/test_cuda_driver.py",
    ),
    "a launch stays on the stream of the one before": Mistake(
        "cuda/driver_bindings.py",
        "        if stream != configuration.stream:\n",
        "        if configuration.stream < 0:\n",
        "tests/native/test_cuda_driver.py",
    ),
    "queued NCCL work has no deadline": Mistake(
        "nccl/connection.py",
        "left_s = None if within_s is None else max(within_s - (now - self._since), 0.001)",
        "left_s = None",
        f"{MULTIPROC}/test_nccl.py::test_queued_work_has_a_deadline",
    ),
    "the keeper does not ask NCCL for its error": Mistake(
        "nccl/connection.py",
        '        self.state("ncclCommGetAsyncError")\n        now = ',
        "        now = ",
        f"{MULTIPROC}/test_nccl.py::test_errors_name_the_library_and_the_call_that_failed",
    ),
    "a communicator that was given up is not aborted": Mistake(
        "nccl/background.py",
        "        if self._is_given_up:\n            self._abort()",
        "        if False:\n            self._abort()",
        f"{MULTIPROC}/test_nccl.py::test_a_rank_that_does_not_connect_is_named",
    ),
    "a communicator is finalized beneath queued work": Mistake(
        "nccl/connection.py",
        "            if self.progress is None or self.progress.is_done():\n"
        "                return True\n"
        "            if time",
        "            return True\n            if time",
        f"{UNIT}/test_nccl_connection.py",
    ),
    "a communicator is aborted beneath a call that has its handle": Mistake(
        "nccl/connection.py",
        "        self._await_call()\n",
        "",
        f"{UNIT}/test_nccl_connection.py::test_an_abort_waits_for_a_call_that_may_hold_the_handle",
    ),
    "the fast path is open again behind the end": Mistake(
        "nccl/connection.py",
        "        if self._aborting or self._closed:\n            self.hot = None\n",
        "",
        f"{UNIT}/test_nccl_connection.py::test_what_ends_behind_the_communicator_does_not_open_the_fast_path",
    ),
    "a rank that has left is waited for": Mistake(
        "nccl/background.py",
        "        self._look()\n",
        "",
        f"{UNIT}/test_nccl_connection.py::test_a_join_in_vain_ends_when_a_rank_has_left",
    ),
    "an orderly end aborts the communicator": Mistake(
        "nccl/connection.py",
        "        if self._health.is_broken:\n            self.hot = None\n",
        "        if True:\n            self.hot = None\n",
        f"{UNIT}/test_nccl_connection.py::test_the_end_of_a_healthy_group_aborts_no_communicator",
    ),
    "a communicator that was finalized is aborted": Mistake(
        "nccl/connection.py",
        'self._free("ncclCommDestroy", comm)',
        'self._free("ncclCommAbort", comm)',
        f"{UNIT}/test_nccl_connection.py::test_the_end_of_a_healthy_group_aborts_no_communicator",
    ),
    "a group that closes publishes a failure": Mistake(
        "nccl/connection.py",
        "if not self._health.is_broken and not self._health.is_closed:",
        "if not self._health.is_broken:",
        f"{UNIT}/test_nccl_connection.py::test_a_failure_that_shows_while_the_group_closes_is_not_published",
    ),
    "memory is freed while a thread registers it": Mistake(
        "nccl/connection.py",
        "not self._is_quiet() or (self._registration is not None and not self._registration.is_over)",
        "not self._is_quiet()",
        f"{UNIT}/test_nccl_window.py::test_memory_is_kept_while_a_thread_registers_it_for_a_group_that_has_ended",
    ),
    "a call of NCCL is never counted as returned": Mistake(
        "nccl/connection.py",
        "        finally:\n            self.returned = self.entered",
        "        finally:\n            pass",
        f"{UNIT}/test_nccl_connection.py",
    ),
    "the window is deregistered behind the end": Mistake(
        "nccl/connection.py",
        "        self._leave_window(comm)\n"
        '        status = self.library.call("ncclCommFinalize", comm, comm=comm)\n',
        '        status = self.library.call("ncclCommFinalize", comm, comm=comm)\n'
        "        self._leave_window(comm)\n",
        f"{UNIT}/test_nccl_window.py",
    ),
    "the window is deregistered beneath queued work": Mistake(
        "nccl/connection.py",
        "        if self._is_quiet():\n            self._leave_window(comm)",
        "        self._leave_window(comm)",
        f"{UNIT}/test_nccl_window.py",
    ),
    "memory of the window is freed beneath a copy": Mistake(
        "nccl/connection.py",
        "        self._free_window(is_used=True)",
        "        self._free_window(is_used=False)",
        f"{UNIT}/test_nccl_window.py",
    ),
    "one rank alone goes without a window": Mistake(
        "nccl/agreement.py",
        "return _first(context, _shared(context, trouble, str))",
        "return _first(context, [trouble] * len(_shared(context, trouble, str)))",
        f"{MULTIPROC}/test_nccl_window.py::test_what_one_rank_lacks_leaves_all_without_a_window",
    ),
    "the result stays in the window": Mistake(
        "nccl/window.py",
        "        self._copy(result, address, nbytes, stream)\n",
        "",
        f"{MULTIPROC}/test_nccl_window.py::test_sums_that_fit_are_staged_on_all_ranks",
    ),
    "sums of NCCL on two streams are not ordered": Mistake(
        "nccl/communicator.py",
        "        if order is None or stream != order.hot:\n",
        "        if order is None:\n",
        f"{MULTIPROC}/test_side_stream.py::test_calls_of_a_group_never_run_at_once",
    ),
    "a captured call counts as queued": Mistake(
        "cuda/event_progress.py",
        "if driver is None or driver.stream_is_capturing(stream):",
        "if driver is None:",
        f"{UNIT}/test_event_progress.py",
    ),
    "the side stream does not wait for the caller's": Mistake(
        "cuda/side_stream.py",
        "            streams.wait(side, caller)\n",
        "",
        f"{MULTIPROC}/test_side_stream.py::test_a_call_runs_beside_the_callers_stream",
    ),
    "inputs may be reused while the side stream reads them": Mistake(
        "cuda/side_stream.py",
        "                streams.keep(tensor, side)\n",
        "                pass\n",
        f"{MULTIPROC}/test_side_stream.py::test_a_call_runs_beside_the_callers_stream",
    ),
    "a handle lets no stream wait": Mistake(
        "cuda/side_stream.py",
        "        self._event.wait(current)\n",
        "",
        f"{MULTIPROC}/test_side_stream.py::test_a_call_runs_beside_the_callers_stream",
    ),
    "a handle of one capture is waited for in another": Mistake(
        "cuda/side_stream.py",
        "if self._capture_of(stream) not in (0, self._capture):",
        "if False:",
        f"{MULTIPROC}/test_side_stream_failures.py::test_what_is_of_one_capture_is_refused_by_another",
    ),
    "a link that can only be read has access": Mistake(
        "cuda/nvml.py",
        "found[name] = (read and write, nvlink)",
        "found[name] = (read, nvlink)",
        "tests/native/test_nvml.py",
    ),
    "NVML is left open": Mistake(
        "cuda/nvml.py",
        "            nvml.shutdown()",
        "            pass",
        "tests/native/test_nvml.py",
    ),
    "other bindings of NVML end the probe of one rank": Mistake(
        "cuda/nvml.py",
        "RuntimeError, OSError, AttributeError)",
        "RuntimeError, OSError)",
        "tests/native/test_nvml.py",
    ),
    "NVML overrides what CUDA says of a link": Mistake(
        "cuda/topology.py",
        "links.setdefault(uuid, Link(access, is_nvlink))",
        "links[uuid] = Link(access, is_nvlink)",
        f"{UNIT}/test_topology.py",
    ),
    "an unknown link counts as NVLink": Mistake(
        "cuda/topology.py",
        '<= {"nvlink", "same device"}',
        '<= {"nvlink", "same device", "unknown"}',
        f"{UNIT}/test_topology.py",
    ),
    "what was queued on an own stream is not waited for": Mistake(
        "cuda/custom/own_stream.py",
        "        driver.stream_synchronize(stream)\n",
        "",
        f"{UNIT}/test_own_stream.py",
    ),
    "a new group waits for the whole device": Mistake(
        "cuda/custom/own_stream.py",
        "driver.stream_synchronize(stream)",
        "driver.context_synchronize()",
        f"{MULTIPROC}/test_building.py",
    ),
    "memory is freed while a peer has it open": Mistake(
        "cuda/custom/peer_memory.py",
        "if barrier is not None and attempt(trouble, barrier):",
        "if barrier is None or attempt(trouble, barrier):",
        f"{MULTIPROC}/test_peer_memory.py::test_memory_that_a_living_peer_may_have_open_is_not_freed",
    ),
    "the end of a group waits for ever for other work": Mistake(
        "cuda/custom/release.py",
        "self._ended.wait(IDLE_S)",
        "self._ended.wait()",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_the_end_of_a_group_does_not_wait_for_another_groups_kernel",
    ),
    "memory is freed although a capture hides what is done": Mistake(
        "cuda/custom/release.py",
        "                return False\n",
        "                return True\n",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_memory_stays_where_a_capture_hides_what_is_done",
    ),
    "a rank that left alone waits for the others": Mistake(
        "cuda/custom/resources.py",
        "self._free(barrier if is_awaited else None, is_quiet=is_quiet)",
        "self._free(barrier, is_quiet=is_quiet)",
        f"{MULTIPROC}/test_custom_all_reduce.py::test_the_end_of_a_group_does_not_wait_for_another_groups_kernel",
    ),
    "what was made first is freed first": Mistake(
        "cuda/custom/resources.py",
        "self._undo.pop())",
        "self._undo.pop(0))",
        f"{UNIT}/test_custom_end.py::test_what_was_made_last_is_freed_first",
    ),
    "the end relies on a stop that was interrupted": Mistake(
        "cuda/custom/resources.py",
        "        self.stop()\n\n        def release(",
        "        def release(",
        f"{UNIT}/test_custom_end.py::test_the_end_behind_a_stop_that_a_handler_interrupts_is_whole",
    ),
    "the end of a capture waits for another group's kernel": Mistake(
        "cuda/custom/graph_inputs.py",
        "_SLOT_BYTES, slots, stream)",
        "_SLOT_BYTES, slots)",
        f"{UNIT}/test_graph_inputs.py::test_the_end_of_a_capture_waits_for_no_other_kernel",
    ),
    "multimem memory is freed beneath a peer's store": Mistake(
        "cuda/custom/resources.py",
        "self._free(barrier if is_awaited else None, is_quiet=is_quiet)",
        "self._free(barrier if is_awaited else None, is_quiet=True)",
        f"{MULTIPROC}/test_multicast.py::test_memory_that_a_peer_may_use_after_a_failure_is_kept",
    ),
}


def copy_of_the_tree(folder: Path) -> Path:
    """Return a copy of the packages and their tests."""
    for part in ("coordinator", "device_comm", "shm_broadcast", "tests"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def run_in(tree: Path, folder: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """Run tests in a copy of the tree. What they compile is in `folder`: three libraries take 9 s of processor time."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(tree),
        "PYTHONDONTWRITEBYTECODE": "1",
        FOLDER: str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-m", "not engine", *tests]
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def test_every_mistake_fits_the_source() -> None:
    """Each replaces one place. One that fits nowhere any more would test nothing."""
    for name, mistake in MISTAKES.items():
        text = (ROOT / "device_comm" / mistake.file).read_text()
        assert text.count(mistake.right) == 1, name


# `make test-native` takes a third of them, `make test-thorough` the others.
@pytest.mark.thorough
@pytest.mark.parametrize("name", sampled(3, MISTAKES, pytest.mark.proof))
def test_every_mistake_is_noticed(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The tests that name the mistake's part fail with it, and not for another reason than an assertion."""
    mistake = MISTAKES[name]
    tree = copy_of_the_tree(tmp_path)
    path = tree / "device_comm" / mistake.file
    path.write_text(path.read_text().replace(mistake.right, mistake.wrong))
    done = run_in(tree, shared_folder(tmp_path_factory).parent, mistake.tests)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]
    assert "failed" in done.stdout.splitlines()[-1], done.stdout[-3000:]


@pytest.mark.thorough
def test_without_a_mistake_the_same_tests_pass(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Neither the copy nor the folder with the kernels is a reason to fail."""
    done = run_in(
        copy_of_the_tree(tmp_path),
        shared_folder(tmp_path_factory).parent,
        f"{UNIT}/test_launch_shapes.py",
        f"{MULTIPROC}/test_side_stream.py::test_a_call_runs_beside_the_callers_stream",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
