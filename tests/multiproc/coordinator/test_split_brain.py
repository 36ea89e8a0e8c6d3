"""Too few ranks are there and the others are silent: nobody goes on without them, and a later call does with them."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import CommTimeoutError, GroupBrokenError
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, failing, use
from tests.waiting import wait_until
from tests.worlds import meet

RANKS = 4
# How long too few wait. Behind a third of it a majority leaves out who is silent: all meet before they call again.
TIMEOUT_S = 6.0


def goes_on_later(
    rank: int, world_size: int, directory: Path, silent: list[int], dead: list[int], marks: str
) -> dict[str, Any]:
    groups = elastic_groups(rank, world_size, directory)
    use(groups)
    meet(rank, range(world_size), directory, "ready")
    if rank in dead:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank in silent:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the others have waited in vain
    failing(groups, timeout_s=1.0)
    first = dict[str, Any]()
    if rank not in silent:
        with pytest.raises(CommTimeoutError) as caught:
            groups.rebuild(timeout_s=TIMEOUT_S)
        first = {"missing": list(caught.value.missing), "text": str(caught.value).partition(": ")[2]}
        with pytest.raises(GroupBrokenError):  # as it was, and not destroyed
            groups.world.barrier()
        Path(marks, f"in vain {rank}").touch()
    meet(rank, [each for each in range(world_size) if each not in dead], directory, "again")
    groups = groups.rebuild(timeout_s=TIMEOUT_S)
    change = groups.change
    assert change is not None
    found = {**first, "epoch": change.epoch, "lost": list(change.lost), "sums": use(groups)}
    end(groups)
    return found


@pytest.mark.guarantee("E2")
@pytest.mark.parametrize(
    ("silent", "dead"),
    [
        ([2, 3], []),
        pytest.param([0, 1], [], marks=pytest.mark.thorough),
        pytest.param([1, 2, 3], [], marks=pytest.mark.thorough),
        ([2], [3]),
    ],
    ids=["half are silent", "half, rank 0 too", "all but one", "one is silent and one is dead"],
)
def test_without_a_majority_nobody_goes_on_without_silent_ranks(
    silent: list[int], dead: list[int], tmp_path: Path
) -> None:
    """Those that are there raise with the missing ranks, and their attempt stays open: it is complete when all come."""
    present = [rank for rank in range(RANKS) if rank not in (*silent, *dead)]

    def resume(pids: Sequence[int]) -> None:
        for rank in present:
            wait_until((tmp_path / f"in vain {rank}").exists, "the others to wait in vain", 40.0)
        for rank in silent:
            os.kill(pids[rank], signal.SIGCONT)

    found = run_ranks(
        goes_on_later, RANKS, silent, dead, str(tmp_path), expect_dead=dead, while_running=resume
    )
    left = [each for each in found if each is not None]
    who = ", ".join(map(str, silent))
    for rank in present:
        assert found[rank]["missing"] == silent
        assert found[rank]["text"] == f"rank(s) {who} did not come within {TIMEOUT_S:.1f} s, or ended"
    assert [each["epoch"] for each in left] == [1] * len(left), "the attempt that was open, and no other one"
    assert [each["lost"] for each in left] == [dead] * len(left)
    size = len(left)
    assert [each["sums"] for each in left] == [
        [size * (size - 1) / 2, float(rank), size * (size - 1) / 2] for rank in range(size)
    ]
