"""The backend `group_coordinator` of torch.distributed does what Gloo's does, over shared memory."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from coordinator.errors import UsageError
from coordinator.torch_backend.process_group import BackendProcessGroup
from tests.harness import RankPool
from tests.ports import listening_addresses
from tests.torch_groups import BACKENDS, OURS, torch_world
from tests.worlds import ApartPool, meet

Answer = Any


def answer(value: object) -> Answer:
    """Return a result in a form that msgpack carries and that compares by value."""
    if isinstance(value, torch.Tensor):
        dense = value.to_dense() if value.is_sparse else value
        return [str(dense.dtype), list(dense.shape), repr(dense.tolist())]
    if isinstance(value, (list, tuple)):
        return [answer(each) for each in value]
    return repr(value)


def reductions(rank: int, world_size: int) -> list[Answer]:
    found: list[Answer] = []
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int32,
        torch.int64,
        torch.uint8,
    ):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            x = (torch.arange(6) + rank + 1).to(dtype)
            dist.all_reduce(x, op)
            found.append(x)
    for op in (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR):
        x = torch.arange(6) + rank
        dist.all_reduce(x, op)
        found.append(x)
    x = torch.complex(torch.ones(3) * rank, torch.ones(3))
    dist.all_reduce(x)
    y = torch.arange(12.0).view(3, 4)
    dist.reduce(y, 1)
    parts = [torch.full((2,), 1.0 + rank + at) for at in range(world_size)]
    own, base = torch.empty(2), torch.empty(2)
    dist.reduce_scatter(own, parts)
    dist.reduce_scatter_tensor(base, torch.cat(parts))
    both = [torch.ones(2) + rank, torch.ones(3, 3)]
    with dist._coalescing_manager():
        for each in both:
            dist.all_reduce(each)
    thin = torch.sparse_coo_tensor(
        torch.tensor([[0, rank]]), torch.tensor([1.0, 2.0]), (4,), check_invariants=True
    )
    dist.all_reduce(thin)
    return [*found, x, y if rank == 1 else None, own, base, both, thin]


def moves(rank: int, world_size: int) -> list[Answer]:
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    sent = x.clone()
    dist.broadcast(sent, 1)
    bits = torch.tensor([rank == 0, True])
    dist.broadcast(bits, 0)
    rows = [torch.empty(2, 3) for _ in range(world_size)]
    dist.all_gather(rows, x)
    whole = torch.empty(2 * world_size, 3)
    dist.all_gather_into_tensor(whole, x)
    gathered = [torch.empty(2, 3) for _ in range(world_size)] if rank == 0 else None
    dist.gather(x, gathered, 0)
    part = torch.empty(2)
    dist.scatter(part, [torch.full((2,), float(at)) for at in range(world_size)] if rank == 1 else None, 1)
    out = torch.empty(world_size)
    dist.all_to_all_single(out, torch.arange(float(world_size)) + 10 * rank)
    sizes = [[1, 2], [2, 1]]
    uneven = torch.empty(3)
    dist.all_to_all_single(uneven, torch.arange(3.0) + 10 * rank, sizes[rank], sizes[rank])
    columns = x.t()
    strided = [torch.empty(3, 2) for _ in range(world_size)]
    dist.all_gather(strided, columns.contiguous())
    lists = [[torch.empty(2), torch.empty(1)] for _ in range(world_size)]
    dist.all_gather_coalesced(lists, [torch.full((2,), float(rank)), torch.full((1,), 5.0)])
    pair = [torch.empty(2 * world_size), torch.empty(3 * world_size)]
    with dist._coalescing_manager():
        for output, width in zip(pair, (2, 3), strict=True):
            dist.all_gather_into_tensor(output, torch.full((width,), float(rank)))
    return [sent, bits, rows, whole, gathered, part, out, uneven, strided, lists, pair]


def messages(rank: int, world_size: int) -> list[Answer]:
    peer, x = 1 - rank, torch.arange(4.0) + rank
    a, b, c = torch.empty(4), torch.empty(4), torch.empty(2, 2)
    if rank == 0:
        sent = [dist.isend(x, 1, tag=1), dist.isend(x * 2, 1, tag=2), dist.isend(x * 3, 1)]
        for each in sent:
            assert each is not None
            each.wait()
        sources = []
    else:
        sources = [dist.recv(b, 0, tag=2), dist.recv(a, tag=1), dist.recv(c, None)]
    big = torch.full((1 << 20,), float(rank))
    landing = torch.empty_like(big)
    operations = [dist.P2POp(dist.isend, big, peer), dist.P2POp(dist.irecv, landing, peer)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    objects: list[Any] = [None] * world_size
    dist.all_gather_object(objects, {"rank": rank, "of": (1, "x")})
    box = [f"from {rank}", None]
    dist.broadcast_object_list(box, 1)
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, ["a", "b"] if rank == 0 else None, 0)
    return [a if rank else 0, b if rank else 0, c if rank else 0, sources, landing.sum(), objects, box, mine]


def works(rank: int, world_size: int) -> list[Answer]:
    x = torch.ones(3) * (rank + 1)
    work = dist.all_reduce(x, async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    work.wait()
    seen = [work.is_completed(), future.wait()[0], doubled.wait(), work.result()]
    late = [dist.all_reduce(torch.ones(1000) * at, async_op=True) for at in range(20)]
    dist.barrier()
    seen += [each.result()[0][0] for each in late if each.wait(timedelta(seconds=30))]
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    done = dist.barrier(async_op=True)
    done.wait()
    return [*seen, done.is_completed()]


def changed_lists(rank: int, world_size: int) -> list[Answer]:
    """Empty the lists of asynchronous calls before rank 1 has come to the first of them."""
    x, late = torch.arange(4.0) + 10 * rank, torch.zeros(1)
    own = [x, x * 2]
    rows, taken = ([torch.zeros(4) for _ in range(world_size)] for _ in range(2))
    grid = [[torch.zeros(4), torch.zeros(4)] for _ in range(world_size)]
    part, sent = torch.zeros(4), [x + at for at in range(world_size)]
    filled = [*rows, *taken, part, *(each for row in grid for each in row)]
    if rank:
        dist.recv(late, 0)
    works = [
        dist.barrier(async_op=True),
        dist.all_gather(rows, x, async_op=True),
        dist.gather(x, taken if rank == 0 else None, 0, async_op=True),
        dist.scatter(part, sent if rank == 1 else None, 1, async_op=True),
        dist.all_gather_coalesced(grid, own, async_op=True),
    ]
    lists: list[list[Any]] = [*grid, grid, rows, taken, sent, own]
    for each in lists:
        each.clear()
    if not rank:
        dist.send(late, 1)
    for work in works:
        work.wait()
    return filled


def of_inference_mode(rank: int, world_size: int) -> list[Answer]:
    """Fill tensors outside of inference mode that were made in it."""
    x = torch.arange(4.0) + 10 * rank
    with torch.inference_mode():
        summed, reduced, shared = x.clone(), x.clone(), x.clone()
        part, swapped = torch.zeros(4), torch.zeros(4)
    # Gloo does not fill these.
    with torch.inference_mode(dist.get_backend() == OURS):
        rows, taken = ([torch.zeros(4) for _ in range(world_size)] for _ in range(2))
        share, whole, pair = torch.zeros(2), torch.zeros(8), [x.clone(), x * 2]
    dist.all_reduce(summed)
    dist.reduce(reduced, 0)
    dist.broadcast(shared, 1)
    dist.scatter(part, [x, x + 1] if rank == 1 else None, 1)
    dist.all_to_all_single(swapped, x)
    dist.all_gather(rows, x)
    dist.gather(x, taken if rank == 0 else None, 0)
    dist.reduce_scatter(share, list(x.split(2)))
    dist.all_gather_into_tensor(whole, x)
    dist.all_reduce_coalesced(pair)
    return [summed, reduced if rank == 0 else None, shared, part, swapped, rows, taken, share, whole, pair]


PARTS: dict[str, Callable[[int, int], list[Answer]]] = {
    "reductions": reductions,
    "moves": moves,
    "messages": messages,
    "works": works,
    "changed lists": changed_lists,
    "inference mode": of_inference_mode,
}


def both_backends(rank: int, world_size: int, directory: Path, part: str) -> list[Answer]:
    found = []
    for backend in BACKENDS:
        with torch_world(rank, world_size, directory, backend) as world:
            assert dist.get_backend() == backend
            assert isinstance(world, BackendProcessGroup) == (backend == OURS)
            with warnings.catch_warnings():
                # torch has new names for some functions, whose old ones programs use.
                warnings.simplefilter("ignore")
                found.append(answer(PARTS[part](rank, world_size)))
    return found


@pytest.mark.guarantee("G41")
@pytest.mark.parametrize("part", PARTS)
def test_every_operation_has_the_result_of_gloo(part: str, ranks2: RankPool) -> None:
    """Values, shapes, dtypes and source ranks are equal."""
    for theirs, ours in ranks2.run(both_backends, part, check_leaks=False):
        assert ours == theirs


def average(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory):
        x = torch.ones(3) * rank
        dist.all_reduce(x, dist.ReduceOp.AVG)
        y = torch.ones(3)
        dist.all_reduce(y, dist._make_nccl_premul_sum(float(rank + 1)))
        sizes = [[1, 2], [2, 1]][rank]
        outs = [torch.empty(size) for size in sizes]
        dist.all_to_all(outs, [torch.full((size,), 1.0 + rank) for size in sizes])
        strided = torch.zeros(4, 2)[:, 0]
        strided += rank
        dist.all_reduce(strided)
        bits = torch.tensor([rank == 0, False])
        dist.all_reduce(bits)
        return [x.tolist(), y.tolist(), strided.tolist(), bits.tolist(), torch.cat(outs).tolist()]


@pytest.mark.guarantee("G41")
def test_what_gloo_lacks_works_too(ranks2: RankPool) -> None:
    """Averages, premultiplied sums, tensors with gaps and bool can be reduced, and lists be exchanged."""
    common = [[0.5] * 3, [3.0] * 3, [1.0] * 4, [True, False]]
    assert ranks2.run(average) == [[*common, [1.0, 2.0, 2.0]], [*common, [1.0, 1.0, 2.0]]]


def subgroups(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory):
        found = []
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        odd = dist.new_group([3, 1], timeout=timedelta(seconds=30))
        for group in [*pairs, odd]:
            if dist.get_rank(group) >= 0:
                x = torch.ones(1) * rank
                dist.all_reduce(x, group=group)
                found += [x.item(), dist.get_process_group_ranks(group), dist.get_backend(group)]
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        for name in ("dp", "tp"):
            x = torch.ones(1) * rank
            dist.all_reduce(x, group=mesh.get_group(name))
            found.append(x.item())
        if rank in (1, 3):
            dist.destroy_process_group(odd)
        dist.barrier()
        return found


@pytest.mark.guarantee("G40")
def test_torch_makes_groups_of_the_backend(ranks4: RankPool) -> None:
    """`new_group` and a device mesh use the default group's backend; only members create a group."""
    found = ranks4.run(subgroups, check_leaks=False)
    assert found[0] == [1.0, [0, 1], OURS, 2.0, 1.0]
    assert found[1] == [1.0, [0, 1], OURS, 4.0, [1, 3], OURS, 4.0, 1.0]
    assert found[3] == [5.0, [2, 3], OURS, 4.0, [1, 3], OURS, 4.0, 5.0]


def alone(rank: int, world_size: int, directory: Path) -> list[Answer]:
    found = []
    for backend in BACKENDS:
        with torch_world(0, 1, directory / str(rank), backend), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x, whole, rows = torch.arange(4.0), torch.empty(4), [torch.empty(4)]
            dist.all_reduce(x)
            dist.broadcast(x, 0)
            dist.reduce(x, 0)
            dist.all_gather(rows, x)
            dist.all_gather_into_tensor(whole, x)
            part, out = torch.empty(4), torch.empty(4)
            dist.reduce_scatter_tensor(part, x)
            dist.all_to_all_single(out, x)
            dist.barrier()
            dist.monitored_barrier()
            objects: list[Any] = [None]
            dist.all_gather_object(objects, "x")
            found.append(answer([x, rows, whole, part, out, objects]))
    return found


@pytest.mark.guarantee("G41")
def test_a_group_of_one_rank_works(ranks2: RankPool) -> None:
    """Both processes have a world of their own."""
    for theirs, ours in ranks2.run(alone, check_leaks=False):
        assert ours == theirs


def of_one_name(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory, timeout_s=20.0):
        # torch counts the groups on each rank, so both pairs get the same name.
        group = dist.new_group([0, 1] if rank < 2 else [2, 3])
        x = torch.ones(1) * rank
        dist.all_reduce(x, group=group)
        dist.monitored_barrier(group)
        names = [None] * world_size
        dist.all_gather_object(names, group.group_name)
        return [x.item(), len(set(names))]


@pytest.mark.guarantee("G40")
def test_groups_of_different_ranks_may_have_the_same_name(ranks4: RankPool) -> None:
    """Torch names a group by the number of groups that a rank has made."""
    assert ranks4.run(of_one_name, check_leaks=False) == [[1.0, 1], [1.0, 1], [5.0, 1], [5.0, 1]]


def one_after_the_other(rank: int, world_size: int, directory: Path) -> None:
    store = dist.FileStore(str(directory / "one"), world_size)
    for _ in range(3):
        dist.init_process_group(OURS, store=store, rank=rank, world_size=world_size)
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2
        first, second = dist.new_group(), dist.new_group()
        if rank == 0:
            dist.send(torch.ones(1 << 20), 1, group=first)
        else:
            dist.recv(torch.empty(1 << 20), 0, group=first)
        work = dist.all_reduce(torch.ones(4), group=second, async_op=True)
        work.get_future().wait()
        dist.destroy_process_group(first)
        dist.destroy_process_group()


@pytest.mark.guarantee("G48")
def test_groups_follow_each_other_in_one_store(ranks2: RankPool) -> None:
    """A destroyed group leaves nothing, and the next one of its name does not find the old one's keys."""
    ranks2.run(one_after_the_other)


def nested(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory, timeout_s=20.0):
        x, y = torch.ones(2), torch.ones(2)

        def more(_: object) -> Any:
            return dist.all_reduce(y.add_(x), async_op=True).get_future().wait()

        result = dist.all_reduce(x, async_op=True).get_future().then(more).wait()
        return [x.tolist(), result[0].tolist()]


@pytest.mark.guarantee("G44")
def test_a_callback_may_wait_for_another_collective(ranks2: RankPool) -> None:
    """A communication hook does that: the group's thread makes the second call while the callback waits."""
    assert ranks2.run(nested) == [[[2.0, 2.0], [6.0, 6.0]]] * 2


def short_wait(rank: int, world_size: int, directory: Path) -> str:
    """Wait for a short time for a tensor that is never sent, and that is not contiguous here."""
    with torch_world(rank, world_size, directory) as group:
        text = ""
        if rank == 0:
            with torch.inference_mode():
                into = torch.zeros(4, 2)[:, 0]
            group.recv([into], 1, 1).wait(timedelta(seconds=30))
            assert into.tolist() == [1.0] * 4
            with pytest.raises(dist.DistBackendError) as late:
                group.recv([into], 1, 2).wait(timedelta(seconds=0.2))
            text = str(late.value)
        else:
            group.send([torch.ones(4)], 0, 1).wait()
        meet(rank, range(world_size), directory, "waited")
        return text


@pytest.mark.guarantee("G41")
def test_a_wait_for_a_receive_keeps_its_own_deadline(ranks2: RankPool) -> None:
    """Also where what arrives is copied into the tensor, whose receive has the group's deadline of a minute."""
    assert "within 0.2 s" in ranks2.run(short_wait, check_leaks=False)[0]


def late_rank(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory) as world:
        found: list[Any] = []
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        if rank == 0:
            hanging = dist.all_reduce(torch.ones(1), async_op=True)
            try:
                dist.monitored_barrier(timeout=timedelta(seconds=0.1), wait_all_ranks=True)
            except RuntimeError as error:
                found += [
                    type(error).__name__,
                    list(getattr(error, "missing", ())),
                    "Ranks 1, 2, 3" in str(error),
                ]
        store: Any = world.get_group_store()
        store.set(f"come/{rank}", "1")
        store.wait([f"come/{other}" for other in range(world_size)])
        if rank == 0:
            hanging.wait()
        else:
            dist.all_reduce(torch.ones(1))
        dist.barrier()
        return found


@pytest.mark.guarantee("G45")
def test_a_monitored_barrier_names_the_missing_ranks(ranks4: RankPool) -> None:
    """Another call hangs meanwhile; afterwards the group works."""
    assert ranks4.run(late_rank)[0] == ["BackendTimeoutError", [1, 2, 3], True]


def other_device(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory, f"cpu:{OURS},meta:gloo") as world:
        backend = dist.get_backend()
        x = torch.ones(1)
        dist.all_reduce(x)
        # The tensors of this device have no memory, so Gloo's group has nothing to do but to take the call.
        dist.all_reduce(torch.ones(1, device="meta"))
        # Gloo takes it for a failure if a rank that is connected leaves while another one still connects.
        dist.barrier()
        beside: Any = world
        # torch asks for the backend of an accelerator that is bound to the group before it knows the group.
        table: Any = dist.distributed_c10d
        config = table._world.pg_backend_config.pop(world)
        assert beside._get_backend(torch.device("meta")) is world
        table._world.pg_backend_config[world] = config
        there = beside._get_backend(torch.device("meta"))
        return [backend, x.item(), there.name(), [each.type for each in beside._device_types]]


@pytest.mark.guarantee("G46")
def test_tensors_on_another_device_go_to_its_backend(ranks2: RankPool) -> None:
    """The configuration of the group names it; without one the call is refused."""
    for found in ranks2.run(other_device, check_leaks=False):
        assert found[1:] == [2.0, "gloo", ["cpu", "meta"]]
    assert ranks2.run(refuses_devices) == [True, True]


def refuses_devices(rank: int, world_size: int, directory: Path) -> bool:
    with torch_world(rank, world_size, directory):
        try:
            dist.all_reduce(torch.ones(1, device="meta"))
        except UsageError as error:
            return isinstance(error, dist.DistBackendError) and "meta" in str(error)
    return False


def on_gloo(rank: int, world_size: int, directory: Path) -> list[Any]:
    with torch_world(rank, world_size, directory) as world:
        x = torch.ones(2) * rank
        dist.all_reduce(x)
        group = dist.new_group()
        dist.all_reduce(x, group=group)
        dist.monitored_barrier(timeout=timedelta(seconds=20))
        return [x.tolist(), dist.get_backend(), type(world) is dist.ProcessGroup, listening_addresses()]


@pytest.mark.guarantee("G47")
def test_ranks_on_several_hosts_use_gloo(ranks2: RankPool) -> None:
    """The group is an ordinary process group with Gloo inside, which does not listen on a wildcard address."""
    for found in ApartPool(ranks2).run(on_gloo, check_leaks=False):
        assert found[:3] == [[2.0, 2.0], OURS, True]
        assert found[3] == ["127.0.0.1"]
