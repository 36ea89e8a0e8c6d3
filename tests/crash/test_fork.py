"""Groups are inert in a forked child: it cannot use them, and its end does not disturb the parent or its peers."""

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from types import FrameType
from typing import Any, Never
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coordinator import parallel_state
from coordinator.bootstrap.blocking_calls import no_check, run_interruptibly
from coordinator.elastic.driver import Deadlines, Driver
from coordinator.elastic.protocol import agree_on_members
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from tests.handlers import alarm_in, handling_at
from tests.harness import RankPool
from tests.ports import free_port
from tests.rank_exit import RankExit
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import WAITS, HostsPool, new_group, outcome_of, small, tell_when_waiting, world

# A child that runs longer than this hangs.
CHILD_S = 20.0
# A program also creates groups and has a child.
PROGRAM_S = 100.0


def fork() -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn when a process with threads forks, which is the case under test.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def hard() -> Never:
    os._exit(0)


def by_sys_exit() -> Never:
    raise RankExit(0)


ENDS = {"os._exit": hard, "sys.exit": by_sys_exit}


def ended(child: int, limit_s: float = CHILD_S) -> int:
    """Return the exit status of `child`; kill it if it hangs."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def in_child(work: Callable[[], Any], report: Path, end: str) -> int:
    """Fork a child that does `work`, writes its result to `report` and ends; return its pid."""
    child = fork()
    if child == 0:
        try:
            report.write_text(json.dumps(work()))
        except BaseException as error:
            report.write_text(json.dumps(repr(error)))
            os._exit(1)
        ENDS[end]()
    return child


OTHER_CALLS: dict[str, Callable[[GroupCoordinator], Any]] = {
    "all_reduce_": lambda group: group.all_reduce_(small()),
    "all_gatherv": lambda group: group.all_gatherv(small()),
    "reduce_scatterv": lambda group: group.reduce_scatterv(small()),
    "broadcast_object_list": lambda group: group.broadcast_object_list([1]),
    "isend_object": lambda group: group.isend_object(1, 1 - group.rank_in_group),
    "cpu_group": lambda group: group.cpu_group,
    "device_group": lambda group: group.device_group,
    "create_mq_broadcaster": lambda group: group.create_mq_broadcaster(),
    "make_sibling_device_group": lambda group: group.make_sibling_device_group(),
    "prepare buffers": lambda group: group.prepare_communication_buffer_for_model(torch.nn.Linear(1, 1)),
}


def use_everything(group: GroupCoordinator, handles: list[Any], queue: Any) -> dict[str, str]:
    """Call every kind of method in a child; return the error of each, by name."""
    peer = 1 - group.rank_in_group
    kinds = {name: outcome_of(lambda: call(group, peer, 1.0))["kind"] for name, call in WAITS.items()}  # noqa: B023
    kinds |= {name: outcome_of(lambda: call(group))["kind"] for name, call in OTHER_CALLS.items()}  # noqa: B023
    for index, handle in enumerate(handles):
        kinds[f"wait {index}"] = outcome_of(handle.wait)["kind"]
        kinds[f"is_completed {index}"] = outcome_of(handle.is_completed)["kind"]
    move = (lambda: queue.enqueue(1)) if group.rank_in_group == 0 else queue.dequeue
    kinds["queue"] = outcome_of(move)["kind"]
    # These do nothing and do not wait.
    group.destroy()
    group.destroy()
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    return kinds


def forked(rank: int, world_size: int, directory: Path, end: str) -> list[Any]:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        queue = group.create_mq_broadcaster()
        peer = 1 - rank
        received = torch.zeros(8)
        handles = [
            group.device_communicator.irecv(received, peer),
            group.isend_object(bytes(8 << 20), peer),
        ]
        report = directory / f"report-{rank}"
        child = in_child(lambda: use_everything(group, handles, queue), report, end)
        status = ended(child)
        # In the parent, transfers in flight and everything else go on.
        group.device_communicator.send(small() + rank, peer)
        for handle in (handles[0],):
            handle.wait()
        assert group.recv_object(peer) == bytes(8 << 20)
        handles[1].wait()
        assert received.tolist() == (small() + peer).tolist()
        assert group.all_reduce(small()).tolist() == (2 * small()).tolist()
        assert group.all_gather_object(rank) == [0, 1]
        with new_group(first, "late") as late:
            late.barrier()
        return [status, json.loads(report.read_text())]


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("end", ENDS)
def test_every_call_of_a_forked_child_is_a_usage_error_and_the_parent_goes_on(
    ranks2: RankPool, end: str
) -> None:
    """Every call raises `UsageError` in the child; transfers in flight arrive in the parent."""
    for status, kinds in ranks2.run(forked, end):
        assert status == 0, kinds
        refused = {name: kind for name, kind in kinds.items() if kind != "UsageError"}
        assert refused == {}


def broadcast_through_queue(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as first, new_group(first, timeout_s=1e10) as group:
        group.enable_broadcaster(0)
        assert group.broadcast_object("before") == "before"
        report = directory / f"report-{rank}"
        assert ended(in_child(lambda: outcome_of(group.broadcast_object)["text"], report, "os._exit")) == 0
        assert group.broadcast_object("after") == "after"
        text: str = json.loads(report.read_text())
        return text


@pytest.mark.guarantee("G10")
def test_a_broadcast_through_the_queue_in_a_forked_child_names_the_call_and_the_group(
    ranks2: RankPool,
) -> None:
    """The error is that of every other call; the longest deadline that a setting allows suits the queue too."""
    for text in ranks2.run(broadcast_through_queue):
        assert text.startswith("broadcast_object on 'tp:0'"), text
        assert "a forked child must create its own groups" in text


def parallel_groups_in_child(rank: int, world_size: int, directory: Path, end: str) -> list[Any]:
    with world(rank, world_size, directory) as first:
        groups = ParallelGroups.create(ParallelLayout(tensor=2), world=first)

        def leave() -> str:
            with groups.as_current():
                kind: str = outcome_of(parallel_state.get_tp_group().barrier)["kind"]
            groups.destroy()
            return kind

        status = ended(in_child(leave, directory / f"report-{rank}", end))
        groups.tp.barrier()
        groups.destroy()
        first.barrier()
        return [status, json.loads((directory / f"report-{rank}").read_text())]


@pytest.mark.parametrize("end", ENDS)
def test_a_record_of_groups_is_inert_in_a_child(ranks2: RankPool, end: str) -> None:
    """`ParallelGroups.destroy` in a child does not affect the parent's groups."""
    assert ranks2.run(parallel_groups_in_child, end) == [[0, "UsageError"], [0, "UsageError"]]


def child_outlives(rank: int, world_size: int, directory: Path, end: str) -> int:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        group.barrier()

        def wait() -> bool:
            left = directory / f"left-{rank}"
            wait_until(left.exists, f"the parent of rank {rank} left", CHILD_S)
            return True

        child = in_child(wait, directory / f"report-{rank}", end)
        group.barrier()
    (directory / f"left-{rank}").touch()
    return ended(child)


@pytest.mark.parametrize("end", ENDS)
def test_a_child_that_ends_after_its_parent_has_left_does_not_hang(ranks2: RankPool, end: str) -> None:
    """A child still holds copies of the parent's groups after the parent destroyed them, and ends cleanly."""
    assert ranks2.run(child_outlives, end) == [0, 0]


def leave_and_return(rank: int, world_size: int, directory: Path) -> bool:
    rendezvous = directory / "rendezvous"
    with world(rank, world_size, directory) as group:
        group.barrier()
        assert ended(in_child(lambda: None, directory / f"report-{rank}", "sys.exit")) == 0
        before = sorted(path.name for path in rendezvous.rglob("*"))
        group.barrier()
        with new_group(group, "through the store") as late:
            late.barrier()
    with world(rank, world_size, directory) as group:
        group.barrier()
    return any(name.startswith("generation-") for name in before)


def test_the_end_of_a_child_leaves_the_rendezvous_directory_alone(ranks2: RankPool) -> None:
    """A child is not the last user of a file store, so its end does not remove the store's file."""
    assert ranks2.run(leave_and_return) == [True, True]


def fork_in_a_handler(
    rank: int, world_size: int, directory: Path, name: str, does: str
) -> tuple[str, list[float]]:
    """Let a handler of rank 0 fork inside of a call; the child returns from it or raises, then the other rank comes."""
    with world(rank, world_size, directory) as first, new_group(first) as group:
        pids = group.all_gather_object(os.getpid())
        report = directory / "report"
        if rank == 1:
            wait_until((directory / "waits-0").exists, "rank 0 waits")
            os.kill(pids[0], signal.SIGALRM)
            wait_until(report.exists, "the child has left the call")
            ANSWERS.get(name, WAITS[name])(group, 0, CHILD_S)
        else:

            def handle(_number: int, _frame: FrameType | None) -> None:
                if fork() == 0 and does == "raises":
                    raise RankExit(0)

            signal.signal(signal.SIGALRM, handle)
            tell_when_waiting(group, directory)
            error: BaseException | None = None
            try:
                WAITS[name](group, 1, CHILD_S)
            except BaseException as raised:
                error = raised
            if os.getpid() != pids[0]:
                part = directory / "part"
                part.write_text(type(error).__name__)
                part.rename(report)
                os._exit(0)
            assert error is None
            os.wait()
        group.barrier()
        # Ranks that wait for long look for one.
        assert group._health._status_store.failure_record() is None
        return report.read_text(), group.all_reduce(small()).tolist()


# What rank 1 does for calls in which not all ranks do the same.
ANSWERS: dict[str, Callable[..., Any]] = {
    "recv_object": lambda group, peer, _: group.send_object("x", peer),
    "irecv": lambda group, peer, _: group.send(small(), peer),
}


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(
    ("name", "does", "places"),
    [
        (name, does, places)
        for name in ("all_reduce", "barrier", "all_gather_object", "recv_object", "irecv")
        for does in ("returns", "raises")
        for places in ("AA", "AB")
    ],
)
def test_a_handler_that_forks_inside_of_a_call_leaves_the_parent_its_call(
    ranks2: RankPool, name: str, does: str, places: str
) -> None:
    """In the child the call ends with a `UsageError`, or with what the handler raises there; the group is intact."""
    expected = "UsageError" if does == "returns" else "RankExit"
    for left, total in HostsPool(ranks2, places).run(fork_in_a_handler, name, does):
        assert left == expected
        assert total == (2 * small()).tolist()


def fork_in_a_creation(rank: int, world_size: int, directory: Path, method: str, does: str) -> list[Any]:
    """Let a handler of rank 0 fork while it waits for rank 1 in a creation, which comes once the child has left it."""
    parallel_state.init_distributed_environment(
        world_size, rank, method.format(directory=directory), backend="gloo"
    )
    group, parent, report = parallel_state.get_world_group(), os.getpid(), directory / "report"
    error: BaseException | None = None
    part: GroupCoordinator | None = None
    if rank == 1:
        wait_until(report.exists, "the child has left the creation")
        part = group.create_subgroup([0, 1])
    else:

        def handle() -> None:
            if fork() == 0 and does == "raises":
                raise RankExit(0)

        try:
            with alarm_in("create_subgroup", handle):
                part = group.create_subgroup([0, 1])
        except BaseException as raised:
            error = raised
        if os.getpid() != parent:
            (directory / "part").write_text(type(error).__name__)
            (directory / "part").rename(report)
            os._exit(0)
        assert error is None
        os.wait()
    assert part is not None
    with part:
        found = [report.read_text(), part.all_reduce(small()).tolist()]
    parallel_state.destroy_distributed_environment()
    return found


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("does", ["returns", "raises"])
@pytest.mark.parametrize("way", ["file", "tcp"])
def test_a_handler_that_forks_inside_of_a_creation_leaves_the_parent_its_group(
    ranks2: RankPool, way: str, does: str
) -> None:
    """The child tells nobody that the rank has left, and does not wait for a thread that runs in the parent."""
    method = "file://{directory}/rendezvous" if way == "file" else f"tcp://127.0.0.1:{free_port()}"
    expected = "UsageError" if does == "returns" else "RankExit"
    assert ranks2.run(fork_in_a_creation, method, does) == [[expected, (2 * small()).tolist()]] * 2


def fork_while_members_agree(rank: int, world_size: int, directory: Path, does: str) -> list[Any]:
    """Let a handler fork while this member waits for another that never comes."""
    store, parent, report = dist.HashStore(), os.getpid(), directory / f"report-{rank}"

    def handle() -> None:
        if fork() == 0 and does == "raises":
            raise RankExit(0)

    ended: Any = None
    try:
        driver = Driver(store, 0, mock.Mock(dead=frozenset), Deadlines(1.0), "here")
        with alarm_in("run", handle):
            ended = driver.run(agree_on_members(0, 0, (0, 1)))
    except BaseException as raised:
        ended = raised
    keys = [key for key in ("1/present/0", "1/confirm/0", "1/members") if store.check([key])]
    found = [type(ended).__name__, keys]
    if os.getpid() != parent:
        report.write_text(json.dumps(found))
        os._exit(0)
    os.wait()
    return [found, json.loads(report.read_text())]


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize("does", ["returns", "raises"])
def test_a_handler_that_forks_while_members_agree_leaves_the_agreement_to_the_parent(
    ranks2: RankPool, does: str
) -> None:
    """The child writes nothing: neither the next steps, nor that this member was interrupted."""
    expected = "UsageError" if does == "returns" else "RankExit"
    for parent, child in ranks2.run(fork_while_members_agree, does):
        assert child == [expected, ["1/present/0"]]
        assert parent[0] == "Late"


def fork_as_a_thread_starts(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Fork at each place where Python runs handlers in the start of a thread that asks a store."""
    found: list[Any] = []
    for step in count():
        report, parent = directory / f"report-{rank}-{step}", os.getpid()
        answer: list[object] = []

        def ask() -> None:
            answer.append(run_interruptibly(lambda: "answer", "store", no_check))  # noqa: B023

        try:
            has_come = handling_at(step, ask, fork, ["shm_broadcast/threads.py"])
        except BaseException as error:
            answer.append(type(error).__name__)
        if os.getpid() != parent:
            report.write_text(json.dumps(answer))
            os._exit(0)
        if not has_come:
            return found
        os.wait()
        found.append([answer, json.loads(report.read_text())])
    raise AssertionError


@pytest.mark.guarantee("G10")
def test_a_handler_that_forks_while_a_thread_starts_leaves_the_thread_to_the_parent(ranks2: RankPool) -> None:
    """In the child the thread has not begun: nobody joins it, and the call says whose it is."""
    for found in ranks2.run(fork_as_a_thread_starts):
        assert len(found) > 3
        assert all(parent == ["answer"] for parent, _ in found)
        assert {name for _, [name] in found} <= {"UsageError", "answer"}
        assert ["UsageError"] in [child for _, child in found]


def program(rank: int, method: str, who: str) -> None:
    """Run a program that forks; its child and it end without destroying their groups."""
    if who == "user":
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    parallel_state.init_distributed_environment(2, rank, method, backend="gloo")
    parallel_state.initialize_model_parallel(2)
    group = parallel_state.get_tp_group()
    group.barrier()
    child = fork()
    if child:
        _, status = os.waitpid(child, 0)
        group.barrier()
        print("parent", status, group.all_gather_object(rank), flush=True)
        if who == "user":
            dist.destroy_process_group()
    else:
        print("child", flush=True)


def run_program(
    rank: int, world_size: int, directory: Path, way: str, who: str, port: int
) -> tuple[int, list[str]]:
    """Run `program` in a process that ends as a program does; return its exit status and what it printed."""
    path = f"file://{directory}/rendezvous"
    output = directory / f"output-{rank}"
    process = fork()
    if process == 0:
        # What Python prints at the end of a program is a part of the result.
        descriptor = os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdin.close()  # the harness opened it
        sys.unraisablehook = sys.__unraisablehook__
        threading.excepthook = threading.__excepthook__
        program(rank, path if way == "file" else f"tcp://127.0.0.1:{port}", who)
        raise RankExit(0)
    return ended(process, PROGRAM_S), output.read_text().splitlines()


@pytest.mark.guarantee("G10")
@pytest.mark.parametrize(("way", "who"), sampled(3, product(("file", "tcp"), ("ours", "user"))))
def test_programs_that_fork_and_fall_off_their_end_do_not_hang(ranks2: RankPool, way: str, who: str) -> None:
    """Child and parent exit normally although neither destroys its groups."""
    for status, output in ranks2.run(run_program, way, who, free_port(), timeout_s=2 * PROGRAM_S):
        assert status == 0, output
        assert output == ["child", "parent 0 [0, 1]"]
