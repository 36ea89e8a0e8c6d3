"""A part of torch's own suite for backends passes; `tests/integrations/torch_suite.py` runs all of it, beside Gloo."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integrations.torch_suite import results, state_file
from tests.torch_groups import OURS

SAMPLE = [
    "test_DistributedDataParallelCPU",
    "test_batch_isend_irecv_gloo_tags",
    "test_monitored_barrier_gloo_rank_0_timeout",
    "test_scatter_object_list",
    "test_sparse_all_reduce_sum",
]
MORE = [
    "test_accumulate_gradients_no_sync_allreduce_with_then_hook",
    "test_all_gather_coalesced_simple",
    "test_all_reduce_coalesced_sum",
    "test_all_reduce_sum_async",
    "test_barrier_timeout_global",
    "test_ddp_logging_data_cpu",
    "test_monitored_barrier_gloo",
    "test_send_recv_any_source",
]


@pytest.mark.slow
@pytest.mark.guarantee("G41")
@pytest.mark.parametrize(
    "tests", [SAMPLE, pytest.param(MORE, marks=pytest.mark.thorough)], ids=["sample", "more"]
)
def test_a_part_of_torchs_suite_passes(tests: list[str], tmp_path: Path) -> None:
    """None of these is skipped, either."""
    command = [sys.executable, "-m", "tests.integrations.torch_suite", "run", str(tmp_path)]
    subprocess.run([*command, "--backends", OURS, "--tests", *tests], check=True, timeout=400.0)
    found = results(state_file(tmp_path, OURS, 2))
    assert {name: row["detail"] for name, row in found.items() if row["outcome"] != "passed"} == {}
    assert sorted(found) == sorted(tests)
