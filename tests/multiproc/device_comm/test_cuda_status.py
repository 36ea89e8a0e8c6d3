"""What the status page shows of the calls that our own kernels carry, over a driver that needs no GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.diagnosis.decoding import decode_page
from coordinator.errors import CudaError
from shm_broadcast import _core
from shm_broadcast.status.page import own_page
from tests.cuda_worlds import cuda_world
from tests.harness import RankPool
from tests.worlds import meet

FLOATS = 1 << 17


def counted_calls(rank: int, world_size: int, directory: Path, native: str) -> dict[str, Any]:
    with cuda_world(rank, world_size, directory, native, meets=False, deterministic=True) as (
        group,
        it,
        driver,
    ):
        own, large = torch.ones(64), torch.ones(FLOATS)
        it.all_reduce(own)
        before = len(driver.configured)
        assert it.all_reduce(large)[-1] == 2.0
        assert len(driver.configured) > before + 1, "the call goes in pieces"
        it.reduce_scatter(own)
        it.all_gather(own)
        custom: Any = it._custom

        def launch(*arguments: object) -> None:
            raise CudaError("launch failed", library="libcuda", function="cuLaunchKernel", code=719)

        custom._launch = launch
        with pytest.raises(CudaError, match="launch"):
            it.all_reduce(own)
        page = decode_page(_core.status_copy(own_page().segment.memory))
        shown = [each for each in page.groups if each.name == group.unique_name][-1]
        (lane,) = [lane for lane in shown.lanes if lane.plane == "custom"]
        meet(rank, range(world_size), directory, "told")
        return {
            "lane": [lane.state, lane.call, lane.number, lane.algorithm],
            **{each.call: [each.calls, each.errors, each.nbytes] for each in lane.counters},
        }


def test_kernels_that_are_queued_are_counted_with_their_bytes(ranks2: RankPool, native: str) -> None:
    """A call in several pieces counts once, and one that the driver refuses counts as an error too."""
    for found in ranks2.run(counted_calls, native):
        assert found == {
            "lane": ["idle", "all_reduce", 5, "our kernels"],
            "all_reduce": [3, 1, 2 * 64 * 4 + FLOATS * 4],
            "reduce_scatter": [1, 0, 64 * 4],
            "all_gather": [1, 0, 64 * 4],
        }
