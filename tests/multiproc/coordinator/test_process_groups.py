"""torch's own functions work on the process groups of a group, and on a group as a process group."""

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional

from coordinator import GroupCoordinator, ReduceOperation, get_dp_group, get_pp_group
from coordinator.bootstrap.group_parts import GroupProcessGroups
from tests.engines import engine
from tests.harness import RankPool, run_ranks
from tests.worlds import new_group, outcome_of, world


def named(new: str, old: str) -> Any:
    """Return the torch function `new`, or `old` if this torch is older."""
    return getattr(dist, new, None) or getattr(dist, old)


def torch_calls(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        pg, x = group.as_process_group(), torch.arange(4.0) + rank
        found: list[Any] = [group.as_process_group() is pg, pg.rank() == rank, dist.get_rank(pg) == rank]
        found += [
            dist.get_process_group_ranks(pg) == group.ranks,
            dist.get_backend(pg) == "group_coordinator",
        ]
        total = x.clone()
        dist.all_reduce(total, group=pg)
        found.append(torch.equal(total, group.all_reduce(x)))
        total = x.clone()
        work = dist.all_reduce(total, dist.ReduceOp.MAX, group=pg, async_op=True)
        work.wait()
        found += [torch.equal(total, group.all_reduce(x, ReduceOperation.MAX)), work.is_completed()]
        whole = torch.empty(8)
        named("all_gather_single", "all_gather_into_tensor")(whole, x, group=pg)
        found.append(torch.equal(whole, group.all_gather(x, 0)))
        parts = [torch.empty(4), torch.empty(4)]
        dist.all_gather(parts, x, group=pg)
        found.append(torch.equal(torch.cat(parts), whole))
        own = torch.empty(2)
        named("reduce_scatter_single", "reduce_scatter_tensor")(own, x, group=pg)
        found.append(torch.equal(own, group.reduce_scatter(x, 0)))
        dist.reduce_scatter(own, list(x.chunk(2)), group=pg)
        found.append(torch.equal(own, group.reduce_scatter(x, 0)))
        sent = x.clone()
        dist.broadcast(sent, 1, group=pg)
        found.append(torch.equal(sent, torch.arange(4.0) + 1))
        dist.reduce(sent.copy_(x), 0, group=pg)
        found.append(rank == 1 or torch.equal(sent, 2 * torch.arange(4.0) + 1))
        boxes = [torch.empty(4), torch.empty(4)] if rank == 0 else None
        dist.gather(x, boxes, 0, group=pg)
        found.append(boxes is None or torch.equal(torch.cat(boxes), whole))
        dist.scatter(own, list(torch.arange(4.0).chunk(2)) if rank == 0 else None, 0, group=pg)
        found.append(torch.equal(own, torch.arange(4.0).chunk(2)[rank]))
        out = torch.empty(4)
        dist.all_to_all_single(out, x, group=pg)
        found.append(torch.equal(out, group.all_to_all(x)))
        outs = [torch.empty(1), torch.empty(1)]
        dist.all_to_all(outs, [x[:1].clone(), x[1:2].clone()], group=pg)
        found.append(torch.equal(torch.cat(outs), group.all_to_all(x[:2])))
        dist.barrier(group=pg)
        if rank == 0:
            dist.send(x, 1, group=pg, tag=4)
            dist.send(x, 1, group=pg)
        else:
            found.append(dist.recv(out, 0, group=pg, tag=4) == 0 and torch.equal(out, x - 1))
            found.append(dist.recv(out, group=pg) == 0 and torch.equal(out, x - 1))
        ops = [dist.P2POp(dist.isend, x, 1 - rank, pg), dist.P2POp(dist.irecv, out, 1 - rank, pg)]
        for each in dist.batch_isend_irecv(ops):
            each.wait()
        found.append(torch.equal(out, torch.arange(4.0) + 1 - rank))
        named_functional = (
            getattr(torch_functional, "all_gather_single", None) or torch_functional.all_gather_tensor
        )
        found.append(torch.equal(torch_functional.all_reduce(x, "sum", pg) + 0, group.all_reduce(x)))
        found.append(torch.equal(named_functional(x, 0, pg) + 0, whole))
        outcome = outcome_of(
            lambda: dist.all_reduce(torch.ones(2, dtype=torch.int8), dist.ReduceOp.AVG, group=pg)
        )
        found.append(outcome["kind"] == "UsageError")
    found.append(outcome_of(lambda: pg.allreduce([x]))["kind"] == "ClosedError")
    return found


def test_torch_functions_run_on_a_group() -> None:
    """They work as on any process group, with our results and errors. The process group ends with the group."""
    # The modules that torch imports for its functional collectives keep descriptors, also with torch's own groups, and
    # a child that is forked later crashes or hangs at its end, without this package too. So no later test gets these
    # processes.
    for found in run_ranks(torch_calls, 2, check_leaks=False):
        assert all(found), found


def torch_functions(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2, pp=2):
        pp = get_pp_group()
        for group in (pp.cpu_group, pp.device_group, pp.make_sibling_device_group("pp_broadcast")):
            assert dist.get_rank(group) == group.rank() == pp.rank_in_group
            assert dist.get_world_size(group) == group.size() == 2
            assert dist.get_process_group_ranks(group) == pp.ranks
            assert dist.get_global_rank(group, 1) == pp.last_rank
            tensor = torch.full((2,), rank)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [sum(pp.ranks)] * 2
            tensor = torch.full((2,), rank)
            dist.broadcast(tensor, src=pp.last_rank, group=group)
            assert tensor.tolist() == [pp.last_rank] * 2
            gathered = torch.empty(4, dtype=torch.int64)
            with warnings.catch_warnings():
                # Newer torch has another name for it, but engines use this name.
                warnings.simplefilter("ignore", FutureWarning)
                dist.all_gather_into_tensor(gathered, torch.full((2,), rank), group=group)
            assert gathered.tolist() == [pp.first_rank] * 2 + [pp.last_rank] * 2
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait()
            if pp.is_first_rank:
                dist.send(tensor, dst=pp.next_rank, group=group)
            else:
                dist.recv(tensor, src=pp.prev_rank, group=group)
            dist.barrier(group=group)
        assert pp.make_sibling_device_group() is not pp.make_sibling_device_group()
        # An engine creates such groups itself, with the world's backend and with another one.
        for backend in (None, "gloo"):
            mine = dist.new_group(list(range(world_size)), backend=backend)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=mine)
            assert tensor.item() == world_size
            dist.destroy_process_group(mine)
        dp = get_dp_group()
        assert dp.world_size == 1
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=dp.cpu_group)
        dist.all_reduce(tensor, group=dp.device_group)
        assert tensor.item() == 1
        assert pp.all_reduce(torch.ones(1)).item() == 2


def test_torch_functions_take_the_groups_process_groups(ranks4: RankPool) -> None:
    """`cpu_group`, `device_group` and others are ordinary process groups, which can be used beside our own calls."""
    ranks4.run(torch_functions)


def asked_by_one_rank(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as first:
        for _ in range(3):
            with new_group(first) as group:
                if rank == 0:
                    assert group.cpu_group.size() == group.device_group.size() == 2
                    assert group.cpu_group is group.cpu_group
                    assert group.cpu_group is not group.device_group
                group.barrier()
        group = new_group(first)
        if rank == 0:
            dist.send(torch.ones(2), 1, group=group.cpu_group)
            group.barrier()
        else:
            into = torch.zeros(2)
            dist.recv(into, 0, group=group.cpu_group)
            assert into.tolist() == [1.0, 1.0]
            group.barrier()
        group.destroy()


def test_one_rank_alone_may_ask_for_its_process_group(ranks2: RankPool) -> None:
    """It does not wait for the others until ranks communicate. The process group is destroyed with the group."""
    ranks2.run(asked_by_one_rank)


ACCESSES: dict[str, Callable[[GroupCoordinator], object]] = {
    "cpu_group": lambda group: group.cpu_group,
    "device_group": lambda group: group.device_group,
    "as_process_group": lambda group: group.as_process_group(),
}


def asked_by_two_threads(rank: int, world_size: int, directory: Path, name: str) -> list[Any]:
    access, both, entered = ACCESSES[name], threading.Barrier(2), list[str]()
    with world(rank, world_size, directory) as group:

        def inside(adopt: Callable[..., Any], *args: Any) -> Any:
            entered.append(outcome_of(lambda: access(group))["kind"])
            with suppress(threading.BrokenBarrierError):
                both.wait(0.5)  # of the other thread, if it creates one, too
            return adopt(*args)

        adopt = GroupProcessGroups.adopt
        patched = mock.patch.object(GroupProcessGroups, "adopt", lambda *args: inside(adopt, *args))
        with patched, ThreadPoolExecutor(2) as threads:
            found = list(threads.map(access, [group] * 2))
        return [found[0] is found[1] is access(group), entered]


@pytest.mark.parametrize("name", ACCESSES)
def test_two_first_accesses_at_once_get_one_process_group(name: str) -> None:
    """Each thread made one, and so did a signal handler inside of the creation, which is refused."""
    assert run_ranks(asked_by_two_threads, 1, name) == [[True, ["UsageError"]]]


def unfit_outputs(rank: int, world_size: int, directory: Path) -> list[float]:
    """Let rank 0 give two calls an output into which nothing can be copied."""
    with world(rank, world_size, directory) as group:
        pg: Any = group.as_process_group()
        x = torch.full((2,), rank + 1.0)

        def outputs() -> list[torch.Tensor]:
            return [torch.zeros(1).expand(2) if rank == 0 else torch.zeros(2), torch.zeros(2)]

        calls: list[Callable[[], Any]] = [
            lambda: pg.alltoall(outputs(), [x, x]).wait(),
            lambda: pg.allgather_coalesced([outputs(), outputs()], [x, x]).wait(),
        ]
        found = []
        for call in calls:
            if rank == 0:
                with pytest.raises(RuntimeError, match="single memory location"):
                    call()
            else:
                call()
            found.append(group.all_reduce(torch.ones(1)).item())
        return found


@pytest.mark.guarantee("D10")
def test_an_error_behind_the_only_collective_of_a_call_leaves_the_group_whole(ranks2: RankPool) -> None:
    """The call has several outputs and is one collective, which is over on all ranks."""
    assert ranks2.run(unfit_outputs) == [[2.0, 2.0]] * 2
