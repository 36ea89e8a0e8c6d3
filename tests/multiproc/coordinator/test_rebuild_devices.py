"""The device plane of groups that are created again: NCCL's communicators, and workspaces in device memory."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.errors import CommTimeoutError, ExcludedError, PeerLostError
from device_comm.nccl.connection import NcclConnection
from tests.device_groups import over_nccl, stub_faults
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, failing, use
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import stub_of
from tests.waiting import wait_until
from tests.worlds import meet

TIMEOUT_S = 20.0
OLD, NEW = 5, 3
"""Groups of several ranks: `world`, `tp`, `dp`, `rdp` and `ep` of two replicas of two ranks, three of one replica."""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_stub(tmp_path_factory.mktemp("nccl")))


def connect_all(groups: Any) -> None:
    """Make a call in each group, so that NCCL connects it."""
    for group in groups.by_name().values():
        group.device_communicator.prepare_buffers(0)
    use(groups)


def loses_a_rank(rank: int, world_size: int, directory: Path, stub: str, mistake: str) -> dict[str, Any]:
    lost = world_size - 1
    with over_nccl(stub) as library, pytest.MonkeyPatch.context() as patch:
        control = stub_of(library)
        control.stub_aborts_together(1)
        groups = elastic_groups(rank, world_size, directory, tensor=2)
        connect_all(groups)
        old = list(library.ids)
        meet(rank, range(world_size), directory, "ready")
        if rank == lost:
            os.kill(os.getpid(), signal.SIGKILL)
        plant(mistake, patch)
        assert failing(groups) is PeerLostError
        try:
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
        except ExcludedError:
            end(groups)
            return {
                "aborts": control.stub_calls(0),
                "finalized": control.stub_calls(2),
                "faults": stub_faults(stub),
            }
        patch.undo()
        found = {
            "aborts": control.stub_calls(0),
            "finalized": control.stub_calls(2),
            "faults": stub_faults(stub),
        }
        connect_all(groups)
        new = library.ids[len(old) :]
        found |= {"old": len(set(old)), "new": len(set(new)), "shared": len(set(old) & set(new))}
        end(groups)
        return {
            **found,
            "finalized at the end": control.stub_calls(2),
            "faults at the end": stub_faults(stub),
        }


def plant(mistake: str, patch: pytest.MonkeyPatch) -> None:
    """Make a mistake in the end of NCCL's communicators."""
    if mistake == "one by one":
        lock, end_one = threading.Lock(), NcclConnection._end

        def in_turn(connection: NcclConnection) -> None:
            with lock:
                end_one(connection)

        patch.setattr(NcclConnection, "_end", in_turn)
    elif mistake == "finalize":
        patch.setattr(NcclConnection, "_drain", lambda _connection, _deadline: True)


@pytest.mark.guarantee("D87")
@pytest.mark.guarantee("E6")
def test_all_communicators_of_a_lost_epoch_are_aborted_at_once_and_made_anew(stub: str) -> None:
    """None is finalized, not even `tp`, which has lost nobody; the next ones have new ids, and end in order."""
    *going_on, excluded, _ = run_ranks(loses_a_rank, 4, stub, "", expect_dead=[3])
    for each in going_on:
        assert each == {
            "aborts": OLD,
            "finalized": 0,
            "faults": "",
            "old": OLD,
            "new": NEW,
            "shared": 0,
            "finalized at the end": NEW,
            "faults at the end": "",
        }
    assert excluded == {"aborts": OLD, "finalized": 0, "faults": ""}


@pytest.mark.guarantee("D87")
@pytest.mark.parametrize(
    ("mistake", "fault"),
    [
        ("one by one", "ncclCommAbort waits for kernels that nobody aborts"),
        ("finalize", "ncclCommFinalize of a communicator with a lost rank"),
    ],
)
def test_a_wrong_end_of_communicators_is_noticed(stub: str, mistake: str, fault: str) -> None:
    """Seeded mistakes: aborts that wait for each other, and an orderly end of what has lost a rank."""
    *found, _ = run_ranks(loses_a_rank, 4, stub, mistake, expect_dead=[3], check_leaks=False)
    assert all(fault in each["faults"] for each in found)


def loses_a_stopped_rank(
    rank: int, world_size: int, directory: Path, stub: str, marks: str
) -> dict[str, Any]:
    with over_nccl(stub) as library:
        groups = elastic_groups(rank, world_size, directory)
        connect_all(groups)
        meet(rank, range(world_size), directory, "ready")
        if rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)  # until it is killed
        assert failing(groups, timeout_s=1.0) is CommTimeoutError
        groups = groups.rebuild(timeout_s=3.0)
        found = {"finalized": stub_of(library).stub_calls(2), "faults": stub_faults(stub)}
        connect_all(groups)
        end(groups)
        Path(marks, f"done-{rank}").touch()
        return found


@pytest.mark.guarantee("D87")
def test_a_communicator_with_a_stopped_rank_is_not_finalized_either(stub: str, tmp_path: Path) -> None:
    """It lives, but would not take part: only a time-out tells that it is lost."""

    def kill(pids: Sequence[int]) -> None:
        for rank in (0, 1):
            wait_until((tmp_path / f"done-{rank}").exists, "the others to go on", 40.0)
        os.kill(pids[2], signal.SIGKILL)

    found = run_ranks(loses_a_stopped_rank, 3, stub, str(tmp_path), expect_dead=[2], while_running=kill)
    assert found[:2] == [{"finalized": 0, "faults": ""}] * 2
