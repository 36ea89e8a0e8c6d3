"""When a rank dies or does not come, torch's functions over our backend say which one, as errors that torch knows."""

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.nn.parallel import DistributedDataParallel

from coordinator.errors import CommError
from coordinator.torch_backend import creation
from coordinator.torch_backend.process_group import BackendProcessGroup
from tests.handlers import raising_at
from tests.harness import RankPool, run_ranks
from tests.torch_groups import OURS, torch_world
from tests.worlds import meet

# Deadlines are a minute; a death is noticed within a second, and a busy machine may take a few.
PROMPT_S = 20.0


def outcome(call: Callable[[], Any]) -> dict[str, Any]:
    """Return what a call raised, in a form that msgpack carries."""
    started = time.monotonic()
    try:
        call()
    except RuntimeError as error:
        return {
            "kind": type(error).__name__,
            "ours": isinstance(error, CommError) and isinstance(error, dist.DistBackendError),
            "ranks": [*getattr(error, "peers", ()), *getattr(error, "missing", ())],
            "text": str(error),
            "seconds": time.monotonic() - started,
        }
    return {"kind": "none"}


CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(8)),
    "work": lambda: dist.all_reduce(torch.ones(8), async_op=True).wait(),
    "barrier": dist.barrier,
    "recv": lambda: dist.recv(torch.ones(8), 2),
    "recv from any rank": lambda: dist.recv(torch.ones(8)),
    "object": lambda: dist.all_gather_object([None] * 3, "x"),
    "monitored_barrier": dist.monitored_barrier,
    "new_group": dist.new_group,
}


def one_dies(rank: int, world_size: int, directory: Path, name: str) -> list[dict[str, Any]]:
    with torch_world(rank, world_size, directory):
        dist.barrier()
        if rank == 2:
            meet(rank, range(world_size), directory, "ready")
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        meet(rank, range(world_size), directory, "ready")
        found = [outcome(CALLS[name])]
        if name != "new_group":
            found.append(outcome(dist.barrier))
        meet(rank, [0, 1], directory, "told")
        return found


@pytest.mark.guarantee("G43")
@pytest.mark.parametrize("name", CALLS)
def test_survivors_name_the_dead_rank(name: str) -> None:
    """The error is ours and torch's, and every later call on the group raises at once."""
    for first, *later in run_ranks(one_dies, 3, name, expect_dead=[2])[:2]:
        assert (first["kind"], first["ranks"], first["ours"]) == ("BackendPeerLostError", [2], True)
        assert first["seconds"] < PROMPT_S
        assert all(each["kind"] == "BackendBrokenError" for each in later)


def dies_in_training(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with torch_world(rank, world_size, directory), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(lambda: model(torch.ones(1, 4)).sum().backward())


@pytest.mark.guarantee("G43")
def test_a_death_ends_a_backward_pass_with_an_error() -> None:
    """C++ waits for the future there: the error passes through it as text."""
    found = run_ranks(dies_in_training, 2, expect_dead=[1], check_leaks=False)[0]
    assert "lost rank" in found["text"]
    assert found["seconds"] < PROMPT_S


def one_is_late(rank: int, world_size: int, directory: Path) -> list[dict[str, Any]]:
    found = []
    with torch_world(rank, world_size, directory, timeout_s=30.0):
        group = dist.new_group(timeout=timedelta(seconds=1))
        other, brief = dist.new_group(), dist.new_group()
        if rank == 0:
            found.append(outcome(lambda: dist.all_reduce(torch.ones(2), group=group)))
            found.append(outcome(lambda: dist.barrier(group=brief, timeout=timedelta(milliseconds=5))))
            work = dist.all_reduce(torch.ones(2), group=other, async_op=True)
            found.append(outcome(lambda: work.wait(timedelta(seconds=0.2))))
        meet(rank, range(world_size), directory, "late")
        if rank == 0:
            work.wait()
        else:
            dist.all_reduce(torch.ones(2), group=other)
        dist.barrier()
    return found


@pytest.mark.guarantee("G43")
def test_a_deadline_names_the_missing_rank(ranks2: RankPool) -> None:
    """The call's own timeout counts, else the group's; that of `wait` ends only the wait, and the call goes on."""
    call, barrier, wait = ranks2.run(one_is_late)[0]
    assert (call["kind"], call["ranks"], call["ours"]) == ("BackendTimeoutError", [1], True)
    assert "Timed out waiting 1000ms" in call["text"]
    assert call["seconds"] >= 1.0
    assert "Timed out waiting 5ms" in barrier["text"]
    assert (wait["kind"], wait["ranks"]) == ("BackendTimeoutError", [])


def alone(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    def start() -> None:
        with torch_world(rank, 2, directory, timeout_s=1.0):
            pass

    return outcome(start)


@pytest.mark.guarantee("G43")
def test_a_rank_that_never_comes_is_named_at_the_start() -> None:
    """`init_process_group` raises it after its timeout."""
    (found,) = run_ranks(alone, 1)
    assert (found["kind"], found["ranks"]) == ("BackendTimeoutError", [1])


def aborted(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory):
        group = dist.new_group()
        found: list[Any] = []
        if rank == 0:
            timer = threading.Timer(0.3, group.abort)
            timer.start()
            found = [outcome(lambda: dist.all_reduce(torch.ones(2), group=group))]
            timer.join()
            started = time.monotonic()
            group.abort()
            group.shutdown()
            found += [outcome(lambda: dist.barrier(group=group)), time.monotonic() - started]
        meet(rank, range(world_size), directory, "aborted")
        if rank == 1:
            # What the other rank had brought to its call is there, the next call finds it gone.
            found = [outcome(lambda: dist.all_reduce(torch.ones(2), group=group)) for _ in range(2)]
        dist.barrier()
        return found


@pytest.mark.guarantee("G48")
def test_abort_ends_a_call_that_waits(ranks2: RankPool) -> None:
    """Here with an error that says so, on the other rank as if this one had left; other groups are not concerned."""
    (here, closed, seconds), (_, there) = ranks2.run(aborted)
    assert (here["kind"], closed["kind"]) == ("BackendClosedError", "BackendClosedError")
    assert seconds < PROMPT_S
    assert (there["kind"], there["ranks"]) == ("BackendPeerLostError", [0])


class InterruptedStack(ExitStack):
    """Ends as a signal handler leaves it that raises at its end."""

    def __exit__(self, *exc_info: object) -> bool:
        super().__exit__(None, None, None)
        raise KeyboardInterrupt


TAKEOVERS: dict[str, tuple[Any, str, Any]] = {
    "while the offer is withdrawn": (creation, "ExitStack", InterruptedStack),
    "in the constructor": (BackendProcessGroup, "__init__", mock.Mock(side_effect=KeyboardInterrupt)),
}


def interrupted_creation(rank: int, world_size: int, directory: Path, place: str) -> list[Any]:
    with torch_world(rank, world_size, directory):
        found: list[Any] = []
        if rank == 0:
            with mock.patch.object(*TAKEOVERS[place]), pytest.raises(KeyboardInterrupt):
                dist.new_group()
        else:
            # Already here, if it still waits until both have mapped the memory.
            found = [outcome(lambda: dist.all_reduce(torch.ones(2), group=dist.new_group()))]
        dist.barrier()
        return found


@pytest.mark.guarantee("G37")
@pytest.mark.parametrize("place", TAKEOVERS)
def test_an_interrupt_of_a_group_that_is_ready_ends_it(ranks2: RankPool, place: str) -> None:
    """The engine never gets it here, so the other rank is told, and nothing of the group stays."""
    _, (there,) = ranks2.run(interrupted_creation, place)
    assert (there["kind"], there["ranks"]) == ("BackendPeerLostError", [0])
    assert there["seconds"] < PROMPT_S


ENDING = (
    "torch_backend/process_group.py",
    "bootstrap/group_parts.py",
    "device_comm/health.py",
    "coordinator/calls.py",
    "/contextlib.py",
)


def interrupted_end(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Interrupt the end of a group at every other place, a group for each; return the places, and what stayed."""
    left = list[Any]()
    with torch_world(rank, world_size, directory):
        for step in count(0, 2):
            before = descriptors()
            group: Any = dist.new_group()
            dist.all_reduce(torch.ones(2), group=group)
            meet(rank, range(world_size), directory, f"reduced {step}")
            if rank == 0:
                backend = group._get_backend(torch.device("cpu"))
                if not raising_at(step, backend.shutdown, ENDING):
                    (directory / "all").touch()
                # Where that has come before anything was begun, this does all.
                backend.shutdown()
                if (more := descriptors() - before) > 0:
                    left.append([step, more])
                del backend
            else:
                found = outcome(partial(dist.all_reduce, torch.ones(2), group=group))
                assert found["ranks"] == [0], found
            dist.destroy_process_group(group)
            del group
            meet(rank, range(world_size), directory, f"ended {step}")
            if (directory / "all").exists():
                return [step, left]
    raise AssertionError("the places come to an end")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.guarantee("G48")
def test_an_interrupt_of_the_end_releases_everything(ranks2: RankPool) -> None:
    """The other rank learns at once that this one has left, and nothing of the group stays."""
    (steps, left), _ = ranks2.run(interrupted_end)
    assert steps > 30
    assert left == []


def forked(rank: int, world_size: int, directory: Path) -> list[int]:
    statuses = []
    with torch_world(rank, world_size, directory):
        dist.barrier()
        child = os.fork()
        if child == 0:
            kind = outcome(lambda: dist.all_reduce(torch.ones(2)))["kind"]
            os._exit(0 if kind == "BackendUsageError" else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        x = torch.ones(2)
        dist.all_reduce(x)
        statuses.append(int(x[0].item()))
    return statuses


@pytest.mark.guarantee("G10")
def test_a_forked_child_cannot_use_a_group_of_the_backend(ranks2: RankPool) -> None:
    """It gets an error that says so, and its end disturbs nobody."""
    assert ranks2.run(forked) == [[0, 2]] * 2


def started_twice(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory):
        options = Backend.Options(OURS)
        return [outcome(lambda: dist.new_group(pg_options=options))]


def test_options_are_refused(ranks2: RankPool) -> None:
    """The backend has none; the error comes on every rank, before anything is made."""
    assert [found[0]["kind"] for found in ranks2.run(started_twice)] == ["BackendUsageError"] * 2
