"""Coalesced calls exchange many tensors at once, and each result equals that of a call of its own."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator import (
    ReduceOperation,
)
from tests.harness import RankPool
from tests.waiting import wait_until
from tests.worlds import new_group, outcome_of, refused, world


def coalesced(rank: int, world_size: int, directory: Path) -> list[bool]:
    with world(rank, world_size, directory) as group:
        tensors = [
            torch.ones(2, 3) * rank,
            torch.arange(4),
            torch.tensor(2.5),
            torch.ones(3, dtype=torch.bool),
            torch.empty(0, 2),
        ]
        before = group.device_communicator._core.number  # type: ignore[attr-defined]
        sums = group.all_reduce_coalesced([tensors[0], tensors[2], tensors[0]])
        gathered = group.all_gather_coalesced(tensors, -1)
        found = [group.device_communicator._core.number - before == 2]  # type: ignore[attr-defined]
        found += [
            torch.equal(made, group.all_reduce(each))
            for made, each in zip(sums, (tensors[0], tensors[2], tensors[0]), strict=True)
        ]
        found += [
            torch.equal(made, group.all_gather(each, -1))
            for made, each in zip(gathered, tensors, strict=True)
        ]
        parts = [
            torch.arange(8.0).view(2, 4) * (rank + 1),
            torch.arange(2 * world_size),
            torch.empty(0, 2 * world_size),
        ]
        scattered = group.reduce_scatter_coalesced(parts, -1, ReduceOperation.MAX)
        found += [
            torch.equal(made, group.reduce_scatter(each, -1, ReduceOperation.MAX))
            for made, each in zip(scattered, parts, strict=True)
        ]
        with group.coalescing() as calls:
            first = calls.all_reduce(tensors[0])
            second = calls.all_reduce(tensors[2])
            third = calls.all_gather(tensors[1], 0)
            found.append(refused(first.result))
        found.append(torch.equal(first.result(), group.all_reduce(tensors[0])))
        found.append(torch.equal(second.result(), group.all_reduce(tensors[2])))
        found.append(torch.equal(third.result(), group.all_gather(tensors[1], 0)))
        found.append(group.all_reduce_coalesced([]) == [])
        found.append(refused(lambda: group.reduce_scatter_coalesced([torch.ones(3)])))
        # Asynchronous calls are refused before there is a handle, which the caller may drop.
        found.append(refused(lambda: group.reduce_scatter_coalesced([torch.ones(3)], async_op=True)))
        found.append(refused(lambda: group.all_gather_coalesced([torch.ones(2)], 1, async_op=True)))
        found.append(refused(lambda: group.all_reduce_coalesced(torch.ones(2), async_op=True)))  # type: ignore[call-overload]
        found.append(
            torch.equal(
                group.all_gather_coalesced([torch.ones(2)], 0, async_op=True).wait()[0], torch.ones(4)
            )
        )
        return found


def test_many_tensors_take_one_round(ranks2: RankPool) -> None:
    """Lists and blocks of tensors take one round, and each result equals that of the call for one tensor."""
    for found in ranks2.run(coalesced):
        assert all(found), found


def without_elements(rank: int, world_size: int, directory: Path) -> list[list[int]]:
    with world(rank, world_size, directory) as group:
        empty = [torch.empty(0, dtype=torch.int64), torch.empty(0, 3)]
        return [list(each.shape) for each in group.all_gather_coalesced(empty)]


def test_a_list_of_tensors_without_elements_is_gathered(ranks2: RankPool) -> None:
    """Tensors of any dtype may all be empty."""
    assert ranks2.run(without_elements) == [[[0], [0, 3]]] * 2


def filled_in_the_call(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        pg: Any = group.as_process_group()
        tensors = [torch.ones(3), torch.ones(2, dtype=torch.int32)]
        work = pg.allreduce_coalesced(tensors)
        wait_until(work.is_completed, "the sums", 30.0, 0.001)
        found: list[Any] = [[each.tolist() for each in tensors]]
        found.append(all(a is b for a, b in zip(work.get_future().value(), tensors, strict=True)))
        work.wait()
        everyone.barrier()
        options = dist.AllreduceCoalescedOptions()
        options.timeout = timedelta(seconds=0.3)
        if rank == 0:
            found.append(outcome_of(lambda: pg.allreduce_coalesced(tensors, options).wait())["kind"])
        everyone.barrier()
        return found


def test_coalesced_outputs_are_filled_when_the_call_is_complete(ranks2: RankPool) -> None:
    """No rank has to wait for that. The future gives the same tensors, and the stated deadline applies."""
    first, second = ranks2.run(filled_in_the_call)
    assert second == [[[2.0] * 3, [2, 2]], True]
    assert first == [*second, "CommTimeoutError"]
