"""The device plane of groups that are created again: NCCL's communicators, and workspaces in device memory."""

import itertools
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from coordinator.elastic.ending import Meeting
from coordinator.elastic.part import Part
from coordinator.errors import CommTimeoutError, CudaError, ExcludedError, GroupBrokenError, PeerLostError
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import destroy_distributed_environment
from device_comm.cuda.custom.release import await_idle
from device_comm.nccl.connection import NcclConnection
from tests.device_groups import over_cuda, over_nccl, stub_faults
from tests.fake_cuda import FakeFaults, violations
from tests.harness import run_ranks
from tests.log_records import records_of
from tests.multiproc.coordinator.test_rebuild import elastic_groups, end, failing, use
from tests.native.nccl_stub.build import build_stub
from tests.nccl_ranks import stub_of
from tests.waiting import wait_until
from tests.worlds import meet

TIMEOUT_S = 20.0
GROUPS_OF_THREE = 4
"""`world`, `dp`, `rdp` and `ep` of three replicas of one rank."""
# The keeper of a communicator may find the loss before a call does.
LOST = (PeerLostError, GroupBrokenError)
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
        assert failing(groups) in LOST
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
        pytest.param(
            "finalize", "ncclCommFinalize of a communicator with a lost rank", marks=pytest.mark.thorough
        ),
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
        assert failing(groups, timeout_s=1.0) in (CommTimeoutError, GroupBrokenError)
        groups = groups.rebuild(timeout_s=3.0)
        found = {"finalized": stub_of(library).stub_calls(2), "faults": stub_faults(stub)}
        connect_all(groups)
        end(groups)
        Path(marks, f"done-{rank}").touch()
        return found


@pytest.mark.thorough
@pytest.mark.guarantee("D87")
def test_a_communicator_with_a_stopped_rank_is_not_finalized_either(stub: str, tmp_path: Path) -> None:
    """It lives, but would not take part: only a time-out tells that it is lost."""

    def kill(pids: Sequence[int]) -> None:
        for rank in (0, 1):
            wait_until((tmp_path / f"done-{rank}").exists, "the others to go on", 40.0)
        os.kill(pids[2], signal.SIGKILL)

    found = run_ranks(loses_a_stopped_rank, 3, stub, str(tmp_path), expect_dead=[2], while_running=kill)
    assert found[:2] == [{"finalized": 0, "faults": ""}] * 2


def changes_as_planned(rank: int, world_size: int, directory: Path, stub: str) -> dict[str, Any]:
    with over_nccl(stub) as library:
        groups = elastic_groups(rank, world_size, directory)
        connect_all(groups)
        plan = groups.prepare(leave=[1], timeout_s=TIMEOUT_S)
        connect_all(groups)
        library.ends.clear()
        after = plan.commit()
        found = {"ends": list(library.ends), "aborts": stub_of(library).stub_calls(0)}
        if after is None:
            destroy_distributed_environment()
        else:
            connect_all(after)
            end(after)
        return {**found, "faults": stub_faults(stub)}


@pytest.mark.guarantee("D87")
def test_a_planned_change_finalizes_communicators_in_one_order(stub: str) -> None:
    """All ranks are alive: nothing is aborted, and each communicator is finalized and freed in the same turn on all."""
    found = run_ranks(changes_as_planned, 3, stub)
    for each in found:
        assert (each["aborts"], each["faults"]) == (0, "")
        functions, ids = [name for name, _ in each["ends"]], [which for _, which in each["ends"]]
        assert functions == ["ncclCommFinalize", "ncclCommDestroy"] * GROUPS_OF_THREE
        assert ids[::2] == ids[1::2] == [which for _, which in found[0]["ends"]][::2]


def cannot_abort(rank: int, world_size: int, directory: Path, stub: str) -> list[Any]:
    with over_nccl(stub) as library:
        groups = elastic_groups(rank, world_size, directory)
        connect_all(groups)
        meet(rank, range(world_size), directory, "ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 0:
            stub_of(library).stub_fail(b"ncclCommAbort", 1, 2)
        with records_of("device_comm.nccl.connection") as records:
            assert failing(groups) in LOST
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
        told = [each.getMessage() for each in records if "ncclCommAbort" in each.getMessage()]
        sums = use(groups)
        end(groups)
        return [len(told), sums, stub_faults(stub)]


@pytest.mark.thorough
@pytest.mark.guarantee("D87")
def test_an_abort_that_fails_is_logged_and_keeps_nobody_from_going_on(stub: str) -> None:
    """The device says whether anything still runs; here nothing does."""
    found = run_ranks(cannot_abort, 3, stub, expect_dead=[1])
    assert found[0] == [2, [1.0, 0.0, 1.0], ""]
    assert found[2] == [0, [1.0, 1.0, 1.0], ""]


# --- workspaces ----------------------------------------------------------------------------------------------


def prepare_all(groups: ParallelGroups) -> None:
    """Let each group of several ranks have a workspace and a communicator of NCCL."""
    for group in groups.by_name().values():
        group.device_communicator.prepare_buffers(0)


def loses_a_rank_with_workspaces(
    rank: int, world_size: int, directory: Path, stub: str, mistake: bool
) -> dict[str, Any]:
    with over_cuda(rank, directory, stub, FakeFaults(vmm=False)) as (driver, log):
        groups = elastic_groups(rank, world_size, directory)
        prepare_all(groups)
        meet(rank, range(world_size), directory, "ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) in LOST
        meet(rank, [0, 2], directory, "lost")
        if rank == 0:
            log.write_text("")
        meet(rank, [0, 2], directory, "begun")
        with pytest.MonkeyPatch.context() as patch:
            if mistake:
                patch.setattr(Meeting, "come", lambda *_: None)
            if rank == 2:
                let_go_late(patch, directory)
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
        ended, left = log.read_text().splitlines(), driver.leaks()
        meet(rank, [0, 2], directory, "looked")
        prepare_all(groups)
        steps = log.read_text().splitlines()
        meet(rank, [0, 2], directory, "prepared again")
        end(groups)
        return {
            "ended": ended,
            "steps": steps,
            "left": left,
            "violations": violations(driver.directory),
            "faults": stub_faults(stub),
        }


def let_go_late(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let this rank come to rest when the other one has its new groups, unless that waits for this one."""
    tear_down = Part.tear_down

    def late(part: Part[ParallelGroups]) -> None:
        until = time.monotonic() + 0.5
        while "0 mem_free" not in (directory / "order").read_text() and time.monotonic() < until:
            time.sleep(0.005)
        tear_down(part)

    patch.setattr(Part, "tear_down", late)


@pytest.mark.guarantee("D88")
@pytest.mark.guarantee("D89")
def test_workspaces_are_freed_when_all_have_let_go_and_before_new_ones_are_made(stub: str) -> None:
    """On both ranks the device rests before a workspace is unmapped, and both have unmapped before one is freed."""
    found = run_ranks(loses_a_rank_with_workspaces, 3, stub, False, expect_dead=[1])
    for each in (found[0], found[2]):
        assert each["left"] == []
        assert each["violations"] == []
        assert each["faults"] == ""
        first_free = next(at for at, line in enumerate(each["ended"]) if line.endswith("mem_free"))
        for rank in (0, 2):
            own = [line for line in each["ended"][:first_free] if line.startswith(f"{rank} ")]
            assert own[0] == f"{rank} context_synchronize"
            assert own.count(f"{rank} ipc_close") >= GROUPS_OF_THREE, "the others' workspaces, in each group"
    for rank, each in ((0, found[0]), (2, found[2])):
        # To make workspaces frees some memory, too.
        frees = [at for at, line in enumerate(each["ended"]) if line == f"{rank} mem_free"]
        makes = [at for at, line in enumerate(each["steps"]) if line == f"{rank} mem_alloc"]
        assert len(makes) >= GROUPS_OF_THREE, "a new workspace in each group"
        assert makes[0] > frees[-1], "all old ones are free before"
        assert len(frees) >= GROUPS_OF_THREE, "the old ones"


@pytest.mark.thorough
@pytest.mark.guarantee("D89")
def test_workspaces_that_are_freed_without_a_meeting_are_noticed(stub: str) -> None:
    """The seeded mistake: rank 0 frees what rank 2 has still open, which is undefined with CUDA IPC."""
    found = run_ranks(loses_a_rank_with_workspaces, 3, stub, True, expect_dead=[1])
    assert any("rank 0" in each and "open" in each for each in found[2]["violations"])


def dies_at_rest(rank: int, world_size: int, directory: Path, stub: str) -> list[Any]:
    with over_cuda(rank, directory, stub, FakeFaults(vmm=False)) as (driver, _):
        groups = elastic_groups(rank, world_size, directory)
        prepare_all(groups)
        meet(rank, range(world_size), directory, "ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) in LOST
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                patch.setattr(Meeting, "come", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
        assert groups.change is not None
        found = [groups.change.epoch, list(groups.change.lost), driver.leaks(), violations(driver.directory)]
        prepare_all(groups)
        end(groups)
        return [*found, stub_faults(stub)]


def changes_workspaces_as_planned(
    rank: int, world_size: int, directory: Path, stub: str, why: str
) -> dict[str, Any]:
    with over_cuda(rank, directory, stub, FakeFaults(vmm=False)) as (driver, log):
        groups = elastic_groups(rank, world_size, directory)
        prepare_all(groups)
        plan = groups.prepare(leave=[1], timeout_s=TIMEOUT_S)
        meet(rank, range(world_size), directory, "prepared")
        if rank == 0:
            log.write_text("")
        meet(rank, range(world_size), directory, "begun")
        begun = time.monotonic()
        error = ""
        with pytest.MonkeyPatch.context() as patch:
            if rank == 2:
                be_late(patch, directory)
            if rank == 0 and why == "failed":
                driver.faults.fail["context_synchronize"] = (driver.calls["context_synchronize"] + 1, 700)
            try:
                after = plan.commit()
            except CudaError as caught:
                error, after = str(caught), None
        took_s = time.monotonic() - begun
        left, found = driver.leaks(), violations(driver.directory)
        meet(rank, range(world_size), directory, "looked")
        if after is None:
            destroy_distributed_environment()
        else:
            end(after)
        return {
            "left": left,
            "violations": found,
            "error": error,
            "is quick": took_s < TIMEOUT_S / 3,
            "faults": stub_faults(stub),
        }


def be_late(patch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let this rank unmap the last workspaces when rank 0 has freed all of its own, unless that waits for this one.

    Before the last group the ranks wait for each other, where they finalize NCCL's communicators.
    """
    rest, groups = await_idle, itertools.count(1)

    def late(*arguments: Any) -> None:
        until = time.monotonic() + (1.5 if next(groups) == GROUPS_OF_THREE else 0.0)
        # A group frees its workspace, the state of its kernels and the table of captured inputs.
        while (directory / "order").read_text().count("0 mem_free") < 3 * GROUPS_OF_THREE:
            if time.monotonic() >= until:
                break
            time.sleep(0.005)
        rest(*arguments)

    patch.setattr("device_comm.cuda.custom.ending.await_idle", late)


@pytest.mark.guarantee("D89")
def test_a_planned_change_frees_workspaces_when_all_have_let_go(stub: str) -> None:
    """Also the rank that leaves: nothing is left, and nothing is freed that a rank has open."""
    for each in run_ranks(changes_workspaces_as_planned, 3, stub, ""):
        assert each == {"left": [], "violations": [], "error": "", "is quick": True, "faults": ""}


@pytest.mark.thorough
@pytest.mark.guarantee("D88")
def test_a_device_that_fails_behind_a_commit_keeps_nobody_waiting(stub: str) -> None:
    """The rank gets the error; the others are told, keep what it may have open, and go on."""
    first, *others = run_ranks(changes_workspaces_as_planned, 3, stub, "failed")
    assert "context_synchronize" in first["error"]
    assert first["violations"] == []
    for each in others:
        assert len(each["left"]) == GROUPS_OF_THREE
        assert (each["violations"], each["error"], each["is quick"]) == ([], "", True)


@pytest.mark.thorough
@pytest.mark.guarantee("D89")
@pytest.mark.guarantee("E5")
def test_a_rank_that_dies_between_rest_and_the_meeting_is_left_out(stub: str) -> None:
    """The others meet again in the next attempt, and free what both lost ranks had open."""
    found = run_ranks(dies_at_rest, 4, stub, expect_dead=[1, 2])
    assert found[0] == found[3] == [2, [1, 2], [], [], ""]


def has_a_bad_device(rank: int, world_size: int, directory: Path, stub: str, when: str) -> list[Any]:
    with over_cuda(rank, directory, stub, FakeFaults(vmm=False)) as (driver, _):
        groups = elastic_groups(rank, world_size, directory)
        prepare_all(groups)
        meet(rank, range(world_size), directory, "ready")
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert failing(groups) in LOST
        if rank == 2:
            function = "event_create" if when == "before" else "context_synchronize"
            driver.faults.fail[function] = (driver.calls.get(function, 0) + 1, 700)
        try:
            groups = groups.rebuild(timeout_s=TIMEOUT_S)
        except ExcludedError as error:
            told = [type(error).__name__, str(error), type(error.__cause__).__name__]
            driver.faults.fail.clear()
            end(groups)
            return [*told, violations(driver.directory)]
        assert groups.change is not None
        found = [groups.change.epoch, groups.world.world_size, list(groups.change.lost)]
        use(groups)
        end(groups)
        return [*found, violations(driver.directory)]


@pytest.mark.guarantee("D88")
@pytest.mark.parametrize(
    ("when", "epoch"), [pytest.param("before", 1, marks=pytest.mark.thorough), ("meanwhile", 2)]
)
def test_a_rank_whose_device_has_failed_does_not_survive(stub: str, when: str, epoch: int) -> None:
    """It knows so before it comes, or when it synchronizes: the others leave it out, and it is told why."""
    found = run_ranks(has_a_bad_device, 4, stub, when, expect_dead=[1])
    for going_on in (found[0], found[3]):
        assert going_on == [epoch, 2, [1, 2], []]
    name, text, cause, faults = found[2]
    assert (name, cause, faults) == ("ExcludedError", "CudaError", [])
    assert "it cannot go on with its device" in text
    assert "700" in text
