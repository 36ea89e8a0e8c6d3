"""Torch's profiler shows the calls of groups while `profiling` is in force, and only then."""

import inspect
import json
import re
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from coordinator import (
    GroupCoordinator,
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
    profiling,
)
from coordinator.calls import Calls
from coordinator.torch_interop.profiling import PREFIX, RECORDED
from tests.harness import run_ranks
from tests.waiting import wait_until

LATE_S = 0.3
OURS = re.compile(re.escape(PREFIX) + r"\w+ on \S+")


def recorded(call: Callable[[], object], file: Path) -> list[tuple[str, float]]:
    """Return the names and microseconds of our records in the trace of `call`."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    profiler.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    # Torch itself records the operations of compiled graphs, whose names do not tell the group.
    return [(each["name"], each["dur"]) for each in events if OURS.fullmatch(each.get("name", ""))]


def calls_are_recorded(rank: int, world_size: int, directory: Path) -> None:
    """Make calls of all planes in a profiler, with and without `profiling`."""
    init_distributed_environment(world_size, rank, f"file://{directory}/rendezvous", backend="gloo")
    group = get_world_group()
    group.enable_broadcaster()
    tensor = torch.ones(4)
    times = count()

    def calls() -> None:
        begun = directory / f"begun-{next(times)}"
        if rank:
            # Late by much more than a busy machine takes to let the other rank go from its file to its call.
            wait_until(begun.exists, "the other rank's first call", 20.0)
            time.sleep(LATE_S)
        else:
            begun.touch()
        group.all_reduce(tensor)
        group.all_gather(tensor, 0)
        group.barrier()
        group.monitored_barrier()
        group.broadcast_object({"step": 1} if rank == 0 else None)
        group.broadcast_tensor_dict({"x": tensor} if rank == 0 else None)
        if rank == 0:
            group.send(tensor)
        else:
            group.recv((4,), torch.float32)
        group.all_reduce(tensor, async_op=True).wait()
        dist.all_reduce(tensor, group=group.as_process_group())

    file = directory / f"{rank}.json"
    assert recorded(calls, file) == []
    with profiling():
        found = recorded(calls, file)
    expected = ["all_reduce", "all_gather", "barrier", "monitored_barrier", "broadcast_object"]
    expected += ["broadcast_tensor_dict", "recv" if rank else "send", "all_reduce", "all_reduce"]
    names = [name for name, _ in found]
    assert names == [f"{PREFIX}{call} on world:0" for call in expected]
    if rank == 0:
        # It waited in the first call for the rank that came later by `LATE_S`.
        assert found[0][1] > 40_000
    assert recorded(calls, file) == []
    destroy_distributed_environment()


def test_the_profiler_shows_each_call_of_every_plane_once() -> None:
    """With its name and group; a call that makes others is one record, and a late rank shows in its time."""
    run_ranks(calls_are_recorded, 2, check_leaks=False)  # torch's profiler keeps descriptors


def compiled_calls_are_recorded(rank: int, world_size: int, directory: Path) -> None:
    """Run a compiled function with and without `profiling`."""
    init_distributed_environment(world_size, rank, f"file://{directory}/rendezvous", backend="gloo")
    group = get_world_group()

    @torch.compile(backend="eager", fullgraph=True)
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return group.all_reduce(tensor) * 2

    tensor, file = torch.ones(4), directory / f"{rank}.json"
    for _ in range(2):
        assert recorded(lambda: double(tensor), file) == []
        with profiling():
            found = [name for name, _ in recorded(lambda: double(tensor), file)]
            assert found == [f"{PREFIX}all_reduce on world:0"]
    destroy_distributed_environment()


@pytest.mark.thorough
def test_calls_of_a_compiled_function_are_recorded_where_the_graph_makes_them() -> None:
    """The graph does not break, and holds no record of its own."""
    run_ranks(compiled_calls_are_recorded, 2, check_leaks=False)


def methods() -> dict[tuple[type, str], Any]:
    """Return the methods of a group as they are in their classes now."""
    found: dict[tuple[type, str], Any] = {(Calls, "_make"): vars(Calls)["_make"]}
    for cls in GroupCoordinator.__mro__:
        found |= {(cls, name): vars(cls)[name] for name in RECORDED if name in vars(cls)}
    return found


def test_nothing_differs_outside_so_that_a_call_takes_no_longer() -> None:
    """The methods are the same objects as before, also after an exception, and while it is nested they are replaced."""
    before = methods()
    assert {name for _, name in before} == {*RECORDED, "_make"}
    with profiling():
        assert not set(map(id, methods().values())) & set(map(id, before.values()))
        with profiling():
            pass
        assert methods() != before
    assert methods() == before
    with pytest.raises(KeyError), profiling():
        raise KeyError
    assert methods() == before


def test_every_method_that_waits_for_ranks_is_recorded() -> None:
    """A method with a deadline waits; two that make no call themselves are left out."""
    waiting = {
        name
        for name, method in inspect.getmembers(GroupCoordinator, callable)
        if not name.startswith("_") and "timeout_s" in inspect.signature(method).parameters
    }
    assert waiting - set(RECORDED) == {"coalescing"}
    assert all(callable(getattr(GroupCoordinator, name)) for name in RECORDED)
