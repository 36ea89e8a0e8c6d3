"""Reductions made of other calls, coalesced calls, tags, receives from any rank, splits, a group as one of torch."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as torch_functional

from coordinator import (
    BitwiseOperation,
    DisagreementError,
    P2POperation,
    ReduceOperation,
    UsageError,
    functional,
    premul_sum,
)
from coordinator.agreement import View, agree
from coordinator.group import GroupCoordinator
from shm_broadcast.liveness import this_process
from tests.harness import RankPool, run_ranks
from tests.worlds import ApartPool, HostsPool, meet, new_group, outcome_of, world


def refused(call: Any) -> bool:
    try:
        call()
    except UsageError:
        return True
    return False


# --- reductions -------------------------------------------------------------------------------------------------


def fold(parts: list[torch.Tensor], op: BitwiseOperation) -> torch.Tensor:
    combine = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}[op.value]
    total = parts[0]
    for part in parts[1:]:
        total = combine(total, part)
    return total


def bits(rank: int, world_size: int, directory: Path) -> list[Any]:
    wrong: list[Any] = []
    with world(rank, world_size, directory) as group:
        for op in BitwiseOperation:
            for dtype, shape in (
                (torch.int64, (4, 3)),
                (torch.uint8, (4, 50001)),
                (torch.bool, (8,)),
                (torch.int32, (0, 4)),
            ):
                seeds = [torch.Generator().manual_seed(each) for each in range(world_size)]
                parts = [
                    torch.randint(0, 2 if dtype is torch.bool else 200, shape, generator=it).to(dtype)
                    for it in seeds
                ]
                own, expected = parts[rank], fold(parts, op)
                results: dict[str, tuple[Any, Any]] = {
                    "all_reduce": (group.all_reduce(own, op), expected),
                    "all_reduce_": (group.all_reduce_(own.clone(), op), expected),
                    "async": (group.all_reduce(own, op, async_op=True).wait(), expected),
                    "reduce": (group.reduce(own, 1, op), expected if rank == 1 else None),
                    "reduce_scatter": (
                        group.reduce_scatter(own.flatten(), 0, op),
                        expected.flatten().chunk(world_size)[rank],
                    ),
                }
                for name, (got, wanted) in results.items():
                    if (got is None) != (wanted is None) or (
                        got is not None and not torch.equal(got, wanted)
                    ):
                        wrong.append([name, op.name, str(dtype)])
        x = torch.arange(4)
        sizes = [1, 3, *([0] * (world_size - 2))]
        output = x.new_empty(sizes[rank])
        group.reduce_scatterv_into_output(x, output, 0, sizes, BitwiseOperation.BOR)
        made = [output.tolist() == x.split(sizes)[rank].tolist()]
        made.append(group.all_reduce(x + rank, dist.ReduceOp.BXOR).shape == (4,))  # type: ignore[call-overload]
        made.append(group.all_reduce(x, "band").tolist() == [0, 1, 2, 3])  # type: ignore[call-overload]
        made.append(refused(lambda: group.all_reduce(torch.ones(2), BitwiseOperation.BAND)))
        for dtype in (torch.float32, torch.bfloat16, torch.complex64):
            parts = [(torch.arange(6) * (each + 1) / 3).to(dtype) for each in range(world_size)]
            wide = torch.float32 if dtype is torch.bfloat16 else dtype
            expected = parts[0].to(wide) * 0.5
            for each in range(1, world_size):
                expected = expected + parts[each].to(wide) * (0.5 + each)
            times = premul_sum(0.5 + rank)
            made.append(torch.equal(group.all_reduce(parts[rank], times), expected.to(dtype)))
            made.append(
                torch.equal(
                    group.all_reduce_(parts[rank].clone(), premul_sum(torch.tensor(0.5 + rank))),
                    expected.to(dtype),
                )
            )
            made.append((group.reduce(parts[rank], 0, times) is None) == (rank != 0))
        even = torch.ones(world_size)
        made.append(group.reduce_scatter(even, 0, premul_sum(2.0)).tolist() == [2.0 * world_size])
        factor: Any = dist._make_nccl_premul_sum(3.0)
        made.append(group.all_reduce(even, factor).tolist() == [3.0 * world_size] * world_size)
        made.append(refused(lambda: group.all_reduce(torch.ones(2, dtype=torch.int8), premul_sum(2.0))))
        made.append(refused(lambda: premul_sum("2")))  # type: ignore[arg-type]
        made.append(group.all_reduce(even).tolist() == [float(world_size)] * world_size)
        return wrong + [at for at, each in enumerate(made) if not each]


def test_reductions_of_bits_and_premultiplied_sums(ranks2: RankPool, ranks4: RankPool) -> None:
    """Equal to folding the ranks' tensors in rank order, in every form, over shared memory and in two levels."""
    assert ranks2.run(bits) == [[], []]
    assert HostsPool(ranks4, ["a", "a", "b", "b"]).run(bits) == [[]] * 4


# --- coalesced --------------------------------------------------------------------------------------------------


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
        parts = [torch.arange(8.0).view(2, 4) * (rank + 1), torch.arange(2 * world_size)]
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
        return found


def test_many_tensors_take_one_meeting(ranks2: RankPool) -> None:
    """Lists and blocks, each result as of the call for one tensor."""
    for found in ranks2.run(coalesced):
        assert all(found), found


# --- point to point, objects, barriers ----------------------------------------------------------------------------


def messages(rank: int, world_size: int, directory: Path) -> list[bool]:
    with world(rank, world_size, directory) as group:
        found = []
        peer = 1 - rank
        for tag in (1, 2, 0):
            group.isend(torch.full((3,), 10.0 * tag + rank), peer, tag=tag)
        # In another order than they were sent.
        received = {tag: group.recv((3,), torch.float32, peer, tag=tag).tolist() for tag in (2, 0, 1)}
        found.append(received == {tag: [10.0 * tag + peer] * 3 for tag in range(3)})
        into = torch.zeros(4, 2, dtype=torch.bfloat16).t()
        large = torch.zeros(1 << 20)
        handles = group.batch_isend_irecv(
            [
                P2POperation(
                    verb="isend",
                    tensor=torch.full((2, 4), float(rank), dtype=torch.bfloat16),
                    peer=peer,
                    tag=5,
                ),
                P2POperation(verb="irecv", tensor=into, peer=peer, tag=5),
                P2POperation(verb="isend", tensor=torch.full((1 << 20,), 1.0 + rank), peer=peer),
                P2POperation(verb="irecv", tensor=large, peer=peer),
            ]
        )
        for handle in handles:
            handle.wait()
            handle.wait()
        found += [
            all(handle.is_completed() for handle in handles),
            bool((into == peer).all()),
            bool((large == 1 + peer).all()),
        ]
        found += [
            refused(lambda wrong=wrong: group.send(torch.ones(1), peer, tag=wrong))
            for wrong in (-1, True, 1 << 30, "x")
        ]
        found.append(refused(lambda: group.batch_isend_irecv([("isend", 1)])))  # type: ignore[list-item]
        found.append(refused(lambda: group.isend(torch.ones(1), rank, tag=3)))
        box: list[Any] = [None]
        group.scatter_object_list(
            box, [{"for": each} for each in range(world_size)] if rank == 1 else None, 1
        )
        found.append(box == [{"for": rank}])
        if rank == 0:
            found.append(refused(lambda: group.scatter_object_list(box, [1], 0)))
            found.append(refused(lambda: group.scatter_object_list([], [1, 2], 0)))
        group.monitored_barrier(5.0)
        return found


def test_tags_batches_and_scattered_objects(ranks2: RankPool) -> None:
    """Messages of different tags do not disturb each other, on one host and over Gloo."""
    for found in [*ranks2.run(messages), *ApartPool(ranks2).run(messages)]:
        assert all(found), found


def from_any(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        found: list[Any] = []
        if rank != 0:
            for each in range(3):
                group.send(torch.tensor([rank * 10 + each]), 0)
                group.send(torch.tensor([float(rank)]), 0, tag=7)
            meet(rank, range(world_size), directory, "taken")
            if rank == 1:
                group.send(torch.ones(2), 0, tag=9)
            return []
        by_rank: dict[int, list[int]] = {}
        for _ in range(3 * (world_size - 1)):
            tensor, src = group.recv_any((1,), torch.int64)
            by_rank.setdefault(src, []).append(int(tensor))
        found.append(by_rank == {src: [src * 10 + each for each in range(3)] for src in range(1, world_size)})
        found.append(group.recv((1,), torch.float32, 2, tag=7).item() == 2.0)
        tagged = [group.recv_any((1,), torch.float32, tag=7) for _ in range(3 * (world_size - 1) - 1)]
        found.append(all(int(tensor) == src for tensor, src in tagged))
        meet(rank, range(world_size), directory, "taken")
        try:
            group.recv_any((3,), torch.float32, tag=9)
        except DisagreementError as error:
            found.append("rank 1 sent" in str(error))
        outcome = outcome_of(lambda: group.recv_any((3,), torch.float32, tag=9, timeout_s=0.1))
        found.append(outcome["kind"] in ("CommTimeoutError", "PeerLostError"))
        return found


def test_a_tensor_from_any_rank(ranks4: RankPool, ranks2: RankPool) -> None:
    """With the rank that sent it, in order from each, and by tag."""
    assert all(ranks4.run(from_any)[0])
    assert ApartPool(ranks2).run(no_shared_memory) == ["CapabilityError"] * 2


def no_shared_memory(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as group:
        return str(outcome_of(lambda: group.recv_any((1,), torch.int64))["kind"])


def late(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as first, new_group(first) as group:
        outcome = outcome_of(lambda: group.monitored_barrier(0.3)) if rank in (0, 1) else {}
        meet(rank, range(world_size), directory, "told")
        return [outcome.get("kind"), outcome.get("missing")]


def test_a_monitored_barrier_names_all_late_ranks(ranks4: RankPool) -> None:
    """On every rank that came."""
    assert ranks4.run(late)[:2] == [["CommTimeoutError", [2, 3]]] * 2


# --- groups -------------------------------------------------------------------------------------------------------


def split(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        found: list[Any] = []
        by_list = group.split_group([[3, 0], [1]])
        found.append(None if by_list is None else by_list.ranks)
        if by_list is not None:
            found.append(by_list.all_gather_object(rank))
            by_list.destroy()
        by_color = group.split_group(color=rank % 2, key=-rank if rank < 2 else 0, group_name="half")
        assert isinstance(by_color, GroupCoordinator)
        found += [by_color.ranks, by_color.unique_name, by_color.all_reduce(torch.tensor([rank])).item()]
        by_color.destroy()
        some = group.split_group(color=-1 if rank == 2 else 0, key=3 - rank)
        found.append(None if some is None else some.ranks)
        if some is not None:
            some.destroy()
        found.append(
            [
                refused(lambda: group.split_group([[0], [0]])),
                refused(lambda: group.split_group([[4]])),
                refused(group.split_group),
            ]
        )
        return found


def test_groups_are_split_by_lists_and_by_color(ranks4: RankPool) -> None:
    """Ranks in the order that lists and keys say; who is in none gets None."""
    found = ranks4.run(split)
    checks = [True, True, True]
    assert found[0] == [[3, 0], [3, 0], [0, 2], "world.0@0/half:0", 2, [3, 1, 0], checks]
    assert found[1] == [[1], [1], [1, 3], "world.0@0/half:0", 4, [3, 1, 0], checks]
    assert found[2] == [None, [0, 2], "world.0@0/half:0", 2, None, checks]
    assert found[3] == [[3, 0], [3, 0], [1, 3], "world.0@0/half:0", 4, [3, 1, 0], checks]


def named(new: str, old: str) -> Any:
    """Return the torch function of that name, or where torch is older of the other."""
    return getattr(dist, new, None) or getattr(dist, old)


def uncounted(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as group:
        first = group._health.begin("host", "barrier").number
        under_way = group.barrier(async_op=True)
        assert group.broadcast_object("x", 0) == "x"
        under_way.wait()
        return group._health.begin("host", "barrier").number - first


def test_an_object_that_is_broadcast_beside_a_barrier_is_not_counted(ranks2: RankPool) -> None:
    """Between hosts: which of the two comes first differs between ranks, and blame goes by the numbers."""
    assert ApartPool(ranks2).run(uncounted) == [2, 2]


def filled_in_the_call(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        pg: Any = group.as_process_group()
        tensors = [torch.ones(3), torch.ones(2, dtype=torch.int32)]
        work = pg.allreduce_coalesced(tensors)
        end = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < end:
            time.sleep(0.001)
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
    """Whoever waits, if anybody; the future gives the tensors themselves; the deadline is the one stated."""
    first, second = ranks2.run(filled_in_the_call)
    assert second == [[[2.0] * 3, [2, 2]], True]
    assert first == [*second, "CommTimeoutError"]


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


def test_torch_functions_run_on_a_group(ranks2: RankPool) -> None:
    """As on any process group, with our results and errors; it ends with the group."""
    # What torch imports for its functional collectives keeps descriptors, with groups of torch too.
    for found in ranks2.run(torch_calls, check_leaks=False):
        assert all(found), found


def part_of_parts(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        pair = GroupCoordinator([[0, 1], [2, 3]], rank, "gloo", True, group_name="tp")
        # Both pairs at once, whose groups have one name.
        one = pair.create_subgroup([1])
        halves = pair.split_group([[0], [1]])
        assert halves is not None
        found = [None if one is None else one.ranks, halves.ranks]
        # Other ranks are left out each time.
        for lists in ([[0, 1]], [[1, 2]], [[3, 2, 1]]):
            part = group.split_group(lists)
            found.append(None if part is None else part.all_gather_object(rank))
            if part is not None:
                part.destroy()
        if one is not None:
            one.destroy()
        halves.destroy()
        pair.destroy()
        return found


def test_groups_of_one_name_have_parts_of_their_own(ranks4: RankPool) -> None:
    """Pairs that split at the same time do not meet each other, and who is left out once can be in the next."""
    assert ranks4.run(part_of_parts) == [
        [None, [0], [0, 1], None, None],
        [[1], [1], [0, 1], [1, 2], [3, 2, 1]],
        [None, [2], None, [1, 2], [3, 2, 1]],
        [[3], [3], None, None, [3, 2, 1]],
    ]


def others_agreed(rank: int, world_size: int, directory: Path) -> str:
    store = dist.FileStore(str(directory / "store"), -1)
    view = View({"groups": "a"}, this_process(), "")
    if rank < 2:
        agree(store, "a", rank, [0, 1], view, 10.0)
        (directory / f"done-{rank}").touch()
        return ""
    while not all((directory / f"done-{other}").exists() for other in (0, 1)):
        time.sleep(0.002)
    with pytest.raises(DisagreementError) as caught:
        agree(store, "b", rank, [2, 3], View({"groups": "b"}, this_process(), ""), 10.0)
    return str(caught.value)


def test_who_comes_to_an_agreement_of_others_does_not_take_it_for_its_own() -> None:
    """They held other facts, so that what they told each other is not about this rank's groups."""
    assert "rank 2" in run_ranks(others_agreed, 3)[2]


def lazy_inputs(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        ones = torch.ones(1 << 19)
        lazy = functional.all_reduce(ones, "sum", group)
        assert type(lazy) is not torch.Tensor
        assert group.all_reduce(lazy)[0] == world_size**2
        lazy = functional.all_reduce(ones, "sum", group)
        assert group.all_reduce_(lazy)[0] == world_size**2
        lazy = functional.all_reduce(ones, "sum", group)
        total = group.reduce(lazy)
        assert rank or (total is not None and total[0] == world_size**2)


def test_a_result_that_waits_can_be_reduced_again(ranks2: RankPool) -> None:
    """It has no memory before it is used."""
    ranks2.run(lazy_inputs)
