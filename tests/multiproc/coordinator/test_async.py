"""Asynchronous collectives give the results of the blocking form, in order, while the caller computes."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import ReduceOperation, UsageError
from coordinator.group import GroupCoordinator
from tests.harness import RankPool
from tests.waiting import wait_until
from tests.worlds import ApartPool, HostsPool, meet, new_group, outcome_of, world

CALLS: dict[str, Callable[..., Any]] = {
    "all_reduce": lambda g, x, **o: g.all_reduce(x, **o),
    "all_reduce max": lambda g, x, **o: g.all_reduce(x, ReduceOperation.MAX, **o),
    "all_reduce_": lambda g, x, **o: g.all_reduce_(x.clone(), **o),
    "all_gather": lambda g, x, **o: g.all_gather(x, 0, **o),
    "all_gatherv": lambda g, x, **o: g.all_gatherv([x, x.long()], 0, **o),
    "reduce": lambda g, x, **o: g.reduce(x, 1, **o),
    "reduce_scatter": lambda g, x, **o: g.reduce_scatter(x, 0, **o),
    "reduce_scatterv": lambda g, x, **o: g.reduce_scatterv(x, 0, uneven(g, x), **o),
    "reduce_scatterv_into_output": lambda g, x, **o: g.reduce_scatterv_into_output(
        x, x.new_empty(uneven(g, x)[g.rank_in_group], *x.shape[1:]), 0, uneven(g, x), **o
    ),
    "gather": lambda g, x, **o: g.gather(x, 0, 0, **o),
    "scatter": lambda g, x, **o: g.scatter(x.new_empty(len(x) // g.world_size, *x.shape[1:]), x, 1, **o),
    "all_to_all": lambda g, x, **o: g.all_to_all(x, **o),
    "broadcast": lambda g, x, **o: g.broadcast(x.clone(), 1, **o),
    "barrier": lambda g, x, **o: g.barrier(**o),
    "all_reduce_coalesced": lambda g, x, **o: g.all_reduce_coalesced([x, x.long(), x[:1]], **o),
    "all_gather_coalesced": lambda g, x, **o: g.all_gather_coalesced([x, x.byte()], **o),
    "reduce_scatter_coalesced": lambda g, x, **o: g.reduce_scatter_coalesced([x, x.long()], **o),
}


def uneven(group: GroupCoordinator, tensor: torch.Tensor) -> list[int]:
    return [len(tensor) - group.world_size + 1, *([1] * (group.world_size - 1))]


def same(first: Any, second: Any) -> bool:
    if isinstance(first, list):
        return len(first) == len(second) and all(map(same, first, second))
    return first is second if first is None or second is None else torch.equal(first, second)


def every_form(rank: int, world_size: int, directory: Path) -> list[str]:
    wrong = []
    with world(rank, world_size, directory) as group:
        for shape in ((8, 3), (4096, 65)):
            x = torch.arange(shape[0] * shape[1]).view(shape).remainder(97).float() * (rank + 1)
            blocking = {name: call(group, x) for name, call in CALLS.items()}
            handles = {name: call(group, x, async_op=True) for name, call in CALLS.items()}
            # Wait for the last call first: calls are carried out although nobody waits for them.
            results = {name: handle.wait() for name, handle in reversed(handles.items())}
            wrong += [name for name in CALLS if not same(blocking[name], results[name])]
            wrong += [f"{name} twice" for name in CALLS if handles[name].wait() is not results[name]]
    return wrong


@pytest.mark.guarantee("D40")
def test_every_collective_has_an_asynchronous_form_with_the_same_result(ranks2: RankPool) -> None:
    """The forms agree over shared memory."""
    assert ranks2.run(every_form) == [[], []]


def test_asynchronous_forms_between_hosts(ranks2: RankPool, ranks4: RankPool) -> None:
    """The forms agree over Gloo and in two levels."""
    assert ApartPool(ranks2).run(every_form) == [[], []]
    assert HostsPool(ranks4, ["a", "a", "b", "b"]).run(every_form) == [[]] * 4


def goes_on(rank: int, world_size: int, directory: Path) -> list[bool]:
    with world(rank, world_size, directory) as group:
        found = []
        handles = [group.all_reduce(torch.full((1 << 18,), float(i)), async_op=True) for i in range(4)]
        # No call waits for the handles.
        wait_until(lambda: all(handle.is_completed() for handle in handles), "the results", 30.0, 0.001)
        found.append(all(handle.is_completed() for handle in handles))
        found.append([handle.wait()[0].item() for handle in handles] == [0.0, 2.0, 4.0, 6.0])
        # Blocking calls of both planes come after calls that are open, also if ranks mix the two forms differently.
        x = torch.ones(1000)
        first: Any
        if rank == 0:
            first = group.all_reduce(x, async_op=True)
            second = group.all_gather(x)
            group.barrier(async_op=True)
            third = group.all_gather_object("x")
        else:
            first = group.all_reduce(x)
            second = group.all_gather(x, async_op=True).wait()
            group.barrier()
            third = group.all_gather_object("x")
        found.append((first if rank else first.wait())[0].item() == 2.0)
        found += [len(second) == 2000, third == ["x", "x"]]
        # Calls whose handles are dropped are carried out too.
        for _ in range(20):
            group.all_reduce(x, async_op=True)
        found.append(group.all_reduce(x)[0].item() == 2.0)
        # A point-to-point call does not wait for open calls. Here the all-reduce needs the message first.
        handle = group.all_reduce(x, async_op=True) if rank == 0 else None
        if rank == 0:
            group.send(x, 1)
        else:
            group.recv((1000,), torch.float32, 0)
            handle = group.all_reduce(x, async_op=True)
        found.append(handle is not None and handle.wait()[0].item() == 2.0)
        return found


@pytest.mark.guarantee("D41")
def test_calls_proceed_in_the_background_and_in_order(ranks2: RankPool) -> None:
    """This also holds if handles are dropped or waited for in another order, or if other calls come between."""
    assert ranks2.run(goes_on) == [[True] * 7] * 2


def handles_of(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as group:
        x = torch.ones(4)
        found: dict[str, Any] = {}
        # A mistake is refused by the call or by `wait`, and nothing is sent.
        found["at once"] = outcome_of(lambda: group.all_reduce([1], async_op=True))["kind"]  # type: ignore[call-overload]
        handle = group.reduce_scatter(torch.ones(3), async_op=True)
        found["by wait"] = [outcome_of(handle.wait)["kind"], outcome_of(handle.is_completed)["kind"]]
        # A wait that gives up does not end the call.
        if rank == 0:
            handle = group.all_reduce(x, async_op=True)
            found["early"] = outcome_of(lambda: handle.wait(0.05))["kind"], handle.is_completed()
        meet(rank, range(world_size), directory, "waited")
        if rank == 1:
            handle = group.all_reduce(x, async_op=True)
        found["late"] = handle.wait().tolist()
        # Futures are requested before and after the call completes.
        handle = group.all_reduce(x, async_op=True)
        threads: list[str] = []

        def double(it: Any) -> list[Any]:
            threads.append(threading.current_thread().name)
            return [it.value() * 2]

        doubled = handle.get_future().then(double)
        found["then"] = doubled.wait()[0].tolist()
        found["after"] = handle.get_future().wait().tolist()
        refused: list[str] = []
        again = group.all_reduce(x, async_op=True)

        def waits(_: Any) -> None:
            # If the future is already complete, the callback runs at once, and would make a call on this rank alone.
            if threading.current_thread() is not threading.main_thread():
                refused.extend(
                    [outcome_of(later.wait)["kind"], outcome_of(lambda: group.all_reduce(x))["kind"]]
                )

        if rank == 0:
            meet(rank, [0], directory, "alone")
        future = again.get_future()
        later = group.all_gather(x, async_op=True)
        future.add_done_callback(waits)
        later.wait()
        found["in a callback"] = set(refused) <= {"UsageError"}
        failed = group.reduce_scatter(torch.ones(3), async_op=True).get_future()
        with pytest.raises(UsageError):
            failed.wait()
        with torch.inference_mode():
            result = group.all_reduce(x, async_op=True).wait()
            found["inference"] = result.is_inference() == group.all_reduce(x).is_inference()
        found["thread"] = [t.name for t in threading.enumerate() if t.name.endswith("-calls")]
        pid = os.fork()
        if pid == 0:
            kinds = [outcome_of(each)["kind"] for each in (later.wait, later.is_completed, later.get_future)]
            os._exit(0 if kinds == ["UsageError"] * 3 else 1)
        found["child"] = os.waitpid(pid, 0)[1]
        name = group.unique_name
    return {**found, "thread": found["thread"] == [f"group-coordinator-{name}-calls"]}


def test_handles_of_asynchronous_calls(ranks2: RankPool) -> None:
    """Mistakes are refused; waits with a deadline, futures, callbacks, inference mode and forks work as documented."""
    for rank, found in enumerate(ranks2.run(handles_of)):
        assert found["at once"] == "UsageError"
        assert found["by wait"] == ["UsageError", "UsageError"]
        assert rank == 1 or found["early"] == ["CommTimeoutError", False]
        assert found["late"] == found["after"] == [2.0] * 4
        assert found["then"] == [4.0] * 4
        assert found["in a callback"]
        assert found["inference"]
        assert found["thread"]
        assert found["child"] == 0


def changed_lists(rank: int, world_size: int, directory: Path) -> list[bool]:
    """Change the lists of calls that stand behind one for which rank 1 has not come."""
    with world(rank, world_size, directory) as group:
        x = torch.arange(4.0) + 10 * rank
        sizes, sent, received = [1, 3], [[1, 3], [3, 1]][rank], [[1, 3], [3, 1]][rank]
        tensors = [x, x.long()]
        outputs = [torch.zeros(4) for _ in range(world_size)]
        own = x[: sizes[rank]]
        expected: list[Any] = [
            group.all_gatherv(tensors),
            group.all_gatherv(own, 0, sizes),
            group.reduce_scatterv(x, 0, sizes),
            group.scatter(torch.zeros(sizes[rank]), x, 1, 0, sizes),
            group.all_to_all(x, 0, sent, received),
            group.all_to_all_single(torch.zeros(4), x, received, sent),
            group.all_gather(x, output_tensor_list=[torch.zeros(4) for _ in range(world_size)]),
        ]
        if rank:
            meet(rank, range(world_size), directory, "changed")
        handles: list[Any] = [
            group.barrier(async_op=True),
            group.all_gatherv(tensors, async_op=True),
            group.all_gatherv(own, 0, sizes, async_op=True),
            group.reduce_scatterv(x, 0, sizes, async_op=True),
            group.scatter(torch.zeros(sizes[rank]), x, 1, 0, sizes, async_op=True),
            group.all_to_all(x, 0, sent, received, async_op=True),
            group.all_to_all_single(torch.zeros(4), x, received, sent, async_op=True),
            group.all_gather(x, output_tensor_list=outputs, async_op=True),
        ]
        parts = list(outputs)
        for each in (tensors, sizes, sent, received, outputs):
            each.clear()
        if not rank:
            meet(rank, range(world_size), directory, "changed")
        found = [handle.wait() for handle in handles[1:]]
        assert found.pop() is outputs
        return [same(one, other) for one, other in zip([*found, parts], expected, strict=True)]


@pytest.mark.guarantee("D40")
def test_lists_may_be_changed_while_their_call_is_open(ranks2: RankPool) -> None:
    """The call has the tensors and sizes of the time when it was made, also if the group's thread comes to it later."""
    assert ranks2.run(changed_lists) == [[True] * 7] * 2


def destroy_open(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank != 0:
            meet(rank, range(world_size), directory, "destroyed")
            group.destroy()
            return []
        # No other rank joins these calls. Each has the default deadline of ten minutes.
        handles: list[Any] = [group.all_reduce(torch.ones(1 << 18), async_op=True) for _ in range(3)]
        handles.append(group.barrier(async_op=True))
        future = handles[2].get_future()
        threading.Timer(0.2, group.destroy).start()
        kinds = [outcome_of(handle.wait)["kind"] for handle in handles]
        group.destroy()
        kinds.append(outcome_of(lambda: group.all_reduce(torch.ones(1), async_op=True))["kind"])
        kinds.append(outcome_of(future.wait)["kind"])
        wait_until(lambda: threading.active_count() == 1, "the end of the group's threads")
        meet(rank, range(world_size), directory, "destroyed")
        return kinds


@pytest.mark.guarantee("D42")
def test_destroy_ends_open_calls(ranks2: RankPool) -> None:
    """Handles and futures raise a `ClosedError`, and the thread ends."""
    start = time.monotonic()
    assert ranks2.run(destroy_open) == [["ClosedError"] * 6, []]
    assert time.monotonic() - start < 20


def deadline_passes(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        found: list[Any] = []
        if rank == 0:
            handle = group.all_reduce(torch.ones(4), timeout_s=0.3, async_op=True)
            behind = group.all_reduce(torch.ones(4), async_op=True)
            outcome = outcome_of(handle.wait)
            found = [outcome["kind"], outcome["missing"], outcome_of(behind.wait)["kind"]]
            found.append(outcome_of(group.barrier)["kind"])
        meet(rank, range(world_size), directory, "told")
        return found


def test_a_deadline_breaks_the_group_as_in_the_blocking_form(ranks2: RankPool) -> None:
    """Calls behind it are refused at once."""
    found = ranks2.run(deadline_passes)
    assert found[0] == ["CommTimeoutError", [1], "GroupBrokenError", "GroupBrokenError"]
