"""Calls into a tensor of the caller: their results, where they are written, what they refuse, and how they compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import GroupCoordinator, ReduceOperation, UsageError
from coordinator.testing import FakeGroupCoordinator
from device_comm.base import DeviceCommunicator
from tests.engines import refusal
from tests.harness import RankPool, run_ranks
from tests.worlds import ApartPool, HostsPool, world

ROWS = 6


def own(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of small integers, which differs between ranks."""
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full(shape, 77).to(dtype)


def calls(group: GroupCoordinator, x: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor, Any]]:
    """Make every call with an output; return for each (the output, what it must hold, what the call returned)."""
    size, rank = group.world_size, group.rank_in_group
    n = len(x)
    rows = x.repeat(size, 1) * (torch.arange(size * n).view(-1, 1) % 5).to(x.dtype)
    uneven = [2 * n, *[1] * (size - 1)] if size > 1 else [n]
    part = x[:1].repeat(uneven[rank], 1)
    wide = x[:1].repeat(sum(uneven), 1)
    swap = [uneven[0] if 0 in (rank, peer) and rank != peer else 1 for peer in range(size)]
    swapped = x[:1].repeat(sum(swap), 1)
    made: list[tuple[torch.Tensor, torch.Tensor, Any]] = []

    def into(output: torch.Tensor, expected: torch.Tensor, call: Callable[[torch.Tensor], Any]) -> None:
        made.append((output, expected.clone(), call(output)))

    def like(other: torch.Tensor) -> torch.Tensor:
        return empty(*other.shape, dtype=other.dtype)

    whole = group.all_gather(x, 0)
    into(like(x), group.all_reduce(x), lambda o: group.all_reduce(x, out=o))
    into(
        like(x),
        group.all_reduce(x, ReduceOperation.MAX),
        lambda o: group.all_reduce(x, ReduceOperation.MAX, out=o),
    )
    into(like(group.all_gather(x, 1)), group.all_gather(x, 1), lambda o: group.all_gather(x, 1, out=o))
    into(like(whole), whole, lambda o: group.all_gather_into_tensor(o, x))
    into(
        empty(size, *x.shape, dtype=x.dtype),
        whole.view(size, *x.shape),
        lambda o: group.all_gather_into_tensor(o, x),
    )
    into(like(whole.flatten()), whole.flatten(), lambda o: group.all_gather_into_tensor(o, x))
    gathered = group.all_gatherv(part, 0, uneven)
    into(like(gathered), gathered, lambda o: group.all_gatherv(part, 0, uneven, output=o))
    sums = group.reduce_scatter(rows, 0)
    into(like(sums), sums, lambda o: group.reduce_scatter_tensor(o, rows))
    stacked = rows.view(size, n, *x.shape[1:])
    into(like(sums), sums, lambda o: group.reduce_scatter_tensor(output=o, input=stacked))
    top = group.reduce_scatter(rows, 0, ReduceOperation.MAX)
    into(like(top), top, lambda o: group.reduce_scatter_tensor(o, rows, ReduceOperation.MAX))
    scattered = group.reduce_scatterv(wide, 0, uneven)
    into(like(scattered), scattered, lambda o: group.reduce_scatterv(wide, sizes=uneven, output=o))
    into(like(scattered), scattered, lambda o: group.reduce_scatterv_into_output(wide, o, 0, uneven))
    exchanged = group.all_to_all(rows)
    into(like(exchanged), exchanged, lambda o: group.all_to_all_single(o, rows))
    crossed = group.all_to_all(swapped, 0, swap, swap)
    into(like(crossed), crossed, lambda o: group.all_to_all_single(o, swapped, swap, swap))
    # In place, as engines do: the smaller tensor is this rank's part of the larger one.
    buffer = like(whole)
    mine = buffer.chunk(size)[rank].copy_(x)
    into(buffer, whole, lambda o: group.all_gather_into_tensor(o, mine))
    again = rows.clone()
    into(again.chunk(size)[rank], sums, lambda o: group.reduce_scatter_tensor(o, again))
    return made


def every_form(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            for output, expected, returned in calls(group, own(rank, ROWS, 4, dtype=dtype)):
                assert returned is output
                assert torch.equal(output, expected), (output, expected)
        x = own(rank, ROWS, 4)
        whole = group.all_gather(x, 0)
        for many in (
            [empty(ROWS, 4) for _ in range(world_size)],
            list(empty(world_size * ROWS, 4).chunk(world_size)),
            list(empty(4, world_size * ROWS).t().chunk(world_size)),
        ):
            assert group.all_gather(x, output_tensor_list=many) is many
            assert torch.equal(torch.cat(many), whole)
        # Asynchronous calls fill the same memory.
        output = empty(world_size * ROWS, 4)
        handle: Any = group.all_gather_into_tensor(output, x, async_op=True)
        assert handle.wait() is output
        assert torch.equal(output, whole)
        total = empty(ROWS, 4)
        assert group.all_reduce(x, out=total, async_op=True).wait() is total
        assert torch.equal(total, group.all_reduce(x))
        group.barrier()


@pytest.mark.guarantee("D60")
def test_every_call_with_an_output_fills_it(ranks2: RankPool) -> None:
    """It holds what the call without an output returns, and is what the call returns."""
    ranks2.run(every_form)


@pytest.mark.guarantee("D60")
def test_outputs_on_four_ranks_and_on_several_hosts(ranks4: RankPool, ranks2: RankPool) -> None:
    """The same over shared memory with four ranks, and over Gloo."""
    ranks4.run(every_form)
    ApartPool(ranks2).run(every_form)


def test_outputs_in_a_group_of_one() -> None:
    """The output is written, also where the call without one would return its input."""
    with FakeGroupCoordinator(0, 1) as group:
        for output, expected, returned in calls(group, own(0, ROWS, 4)):
            assert returned is output
            assert torch.equal(output, expected)
        x, many = own(0, 3), [empty(3)]
        assert group.all_gather(x, output_tensor_list=many) is many
        assert torch.equal(many[0], x)


def writes_directly(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        there: Any = group.device_communicator
        fresh = []

        def allocate(shape: Any, dtype: torch.dtype, nbytes: int) -> torch.Tensor:
            fresh.append(nbytes)
            made: torch.Tensor = type(there)._fresh(there, shape, dtype, nbytes)
            return made

        x, many = own(rank, 1 << 17), (1 << 17) * world_size
        large, small = empty(many), empty((1 << 17) // world_size)
        pages = torch.empty(many)
        there._fresh = allocate
        group.all_gather_into_tensor(large, x)
        group.reduce_scatter_tensor(small, x)
        group.all_to_all_single(x.clone(), x)
        group.all_reduce(x, out=x.clone())
        group.all_gather(x, output_tensor_list=list(pages.chunk(world_size)))
        # So do torch's functions with the group's process group, by these methods. Their names differ between versions.
        torchs: Any = group.as_process_group()
        again, exchanged = empty(many), empty(len(x))
        torchs.all_gather_single(again, x).wait()
        torchs.reduce_scatter_single(small, x).wait()
        torchs.all_to_all_single(exchanged, x).wait()
        assert fresh == []
        assert torch.equal(pages, large)
        assert torch.equal(again, large)
        group.all_gather(x)
        assert fresh == [large.nbytes], "a call without an output is seen"
        del there._fresh


@pytest.mark.guarantee("D60")
def test_nothing_is_allocated_for_an_output_in_shared_memory(ranks2: RankPool) -> None:
    """The communicator writes to the caller's memory: it makes no tensor of its own."""
    ranks2.run(writes_directly)


def mistakes(group: GroupCoordinator) -> dict[str, Callable[[], Any]]:
    x, size = torch.ones(4, 3), group.world_size
    whole = torch.ones(4 * size, 3)
    return {
        "the larger tensor has shape": lambda: group.all_gather_into_tensor(whole.view(3, -1), x),
        "output has shape": lambda: group.all_gather_into_tensor(whole.double(), x),
        "must be contiguous": lambda: group.all_gather_into_tensor(torch.ones(3, 4 * size).t(), x),
        "expected a tensor": lambda: group.reduce_scatter_tensor(None, whole),  # type: ignore[arg-type]
        "not meta": lambda: group.all_gather_into_tensor(whole.to("meta"), x),
        "own part": lambda: group.all_gather_into_tensor(whole, whole.view(-1)[1:13].view(4, 3)),
        "shares memory": lambda: group.all_to_all_single(whole, whole),
        "of one tensor": lambda: group.all_gatherv([x], output=whole),  # type: ignore[call-overload]
        "not both": lambda: group.all_gather(x, output_tensor_list=[x] * size, out=whole),  # type: ignore[call-overload]
        "one for each rank": lambda: group.all_gather(x, output_tensor_list=[x] * (size + 1)),
        "overlaps itself": lambda: group.all_reduce(x, out=torch.ones(3).expand(4, 3)),
    }


def refuses(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for text, call in mistakes(group).items():
            found = refusal(call)
            assert text.replace("not meta", "on meta") in found, (text, found)
        assert group.all_reduce(torch.ones(1)).item() == world_size


def test_outputs_that_do_not_fit_are_refused(ranks2: RankPool) -> None:
    """Shape, dtype, device, overlap and contiguity are checked before anything is sent."""
    ranks2.run(refuses)


# --- compiled ---------------------------------------------------------------------------------------------------


def step(group: GroupCoordinator, x: torch.Tensor, weight: torch.Tensor) -> list[Any]:
    """Use the calls that write to a tensor, and those whose result depends on the rank."""
    size = group.world_size
    whole, part, total = x.new_zeros(size * 4, 2), x.new_zeros(2, 2), x.new_zeros(4, 2)
    group.all_gather_into_tensor(whole, x + 1)
    group.reduce_scatter_tensor(part, whole[:4] * 2)
    group.all_reduce(x * 3, out=total)
    exchanged = x.new_zeros(4, 2)
    group.all_to_all_single(exchanged, x.sin())
    shared = group.broadcast(x.clone(), 1) * 2
    summed = group.all_reduce_(x * 5) + 1
    sizes = [1, 3]
    rows = group.all_gatherv(x[: sizes[group.rank_in_group]] * weight, 0, sizes)
    several = group.all_gatherv([x, x * 2], 0)
    gathered = group.gather(x, 1, 0)
    parts = group.reduce_scatterv(x, 0, sizes)
    into = group.reduce_scatterv(x, sizes=sizes, output=x.new_zeros(sizes[group.rank_in_group], 2))
    return [whole, part, total, exchanged, shared, summed, rows, *several, gathered, parts, into]


def compiled(rank: int, world_size: int, directory: Path) -> None:
    # Import this before there is a world, because torch keeps the present world as a default argument.
    import torch._dynamo
    from torch._dynamo.testing import CompileCounterWithBackend

    with world(rank, world_size, directory) as group:
        x, weight = own(rank, 4, 2), torch.full((2,), 0.5)
        expected = step(group, x.clone(), weight)
        # A compiler costs seconds. The graph of one rank meets the plain calls of the other.
        counter = CompileCounterWithBackend("aot_eager")
        run = torch.compile(step, fullgraph=True, backend=counter) if rank == 1 else step
        given = x.clone()
        for got, wanted in zip(run(group, given, weight), expected, strict=True):
            assert (got is None) == (wanted is None)
            assert got is None or torch.equal(got, wanted)
        assert torch.equal(given, x)
        assert counter.frame_count == rank
        torch._dynamo.reset()


@pytest.mark.guarantee("D63")
def test_calls_that_write_and_calls_with_a_root_are_one_graph(compilers2: RankPool) -> None:
    """Broadcast, gather, all_gatherv and the calls into outputs compile without a break, with equal results."""
    # The compiler leaves pipes and sockets itself.
    compilers2.run(compiled, timeout_s=120, check_leaks=False)


# --- what subclasses replace ------------------------------------------------------------------------------------


class Counted(FakeGroupCoordinator):
    """A subclass in the style of engines, which replaces the functions behind three calls."""

    counts: dict[str, int]

    def _count(self, name: str) -> None:
        self.counts = getattr(self, "counts", {})
        self.counts[name] = self.counts.get(name, 0) + 1

    def _all_reduce_out_place(self, input_: torch.Tensor) -> torch.Tensor:
        self._count("all_reduce")
        return super()._all_reduce_out_place(input_)

    def _all_gather_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        self._count(f"all_gather {dim}")
        return super()._all_gather_out_place(input_, dim)


class CountedTwice(Counted):
    """A subclass of a subclass."""

    def _reduce_scatter_out_place(self, input_: torch.Tensor, dim: int) -> torch.Tensor:
        self._count(f"reduce_scatter {dim}")
        return super()._reduce_scatter_out_place(input_, dim)


@pytest.mark.guarantee("D64")
def test_a_subclass_replaces_what_is_behind_a_call() -> None:
    """Ordinary calls go through the override; calls with more arguments do not."""
    x = torch.ones(4, 2)
    with CountedTwice(0, 2) as group:
        assert torch.equal(group.all_reduce(x), x * 2)
        assert group.all_gather(x).shape == (4, 4)
        assert group.all_gather(x, 0).shape == (8, 2)
        assert group.all_gather(x, dim=0).shape == (8, 2)
        assert group.reduce_scatter(x, 0).shape == (2, 2)
        wanted = {"all_reduce": 1, "all_gather -1": 1, "all_gather 0": 2, "reduce_scatter 0": 1}
        assert group.counts == wanted
        group.all_reduce(x, ReduceOperation.MAX)
        group.all_reduce(x, async_op=True).wait()
        group.all_gather(x, timeout_s=3.0)
        assert group.counts == wanted
    for other in (Counted(0, 2), CountedTwice(0, 1)):
        assert other.reduce_scatter(x, 0).shape[1] == 2
        assert not hasattr(other, "counts")
        other.destroy()
    assert FakeGroupCoordinator.all_reduce is GroupCoordinator.all_reduce
    assert isinstance(FakeGroupCoordinator(0, 2).device_communicator, DeviceCommunicator)
    with FakeGroupCoordinator(0, 2) as plain, pytest.raises(UsageError):
        plain.all_reduce(None)  # type: ignore[call-overload]


def compiled_override(rank: int, world_size: int, directory: Path) -> None:
    """Compile a call that a subclass replaces."""
    x = torch.ones(4, 2)
    with CountedTwice(0, 2) as group:
        run = torch.compile(lambda x: group.all_reduce(x) + 1, fullgraph=True, backend="eager")
        assert torch.equal(run(x), x * 2 + 1)
        assert group.counts == {"all_reduce": 1}


@pytest.mark.guarantee("D64")
def test_a_compiled_call_goes_through_an_override() -> None:
    """As the plain call does."""
    run_ranks(compiled_override, 1)


@pytest.fixture(scope="module")
def ranks3() -> Iterator[RankPool]:
    """Three processes, for hosts of two ranks and of one."""
    with RankPool(3, brief=True) as pool:
        yield pool


def filled_in(rank: int, world_size: int, directory: Path) -> list[str]:
    """Return the calls that do not fill tensors that were made in inference mode; make them outside of it."""
    wrong = []

    def made(*shape: int, strided: bool) -> torch.Tensor:
        with torch.inference_mode():
            return torch.zeros(*shape, 2)[..., 0] if strided else torch.zeros(*shape)

    with world(rank, world_size, directory) as everyone:
        alone = new_group_of_one(everyone)
        for group in (everyone, alone):
            size, own = group.world_size, torch.full((4,), rank + 1.0)
            total = sum(each + 1.0 for each in group.ranks)
            for strided in (False, True):
                rows = [made(4, strided=strided) for _ in range(size)]
                more = [made(4, strided=strided) for _ in range(size)]
                whole, part, sums = (made(n, strided=strided) for n in (4 * size, 4, 4))
                swapped, shared = (made(n, strided=strided) for n in (4 * size, 4))
                with torch.inference_mode():
                    sums += own
                    shared += own
                group.all_reduce_(sums)
                group.broadcast(shared, size - 1)
                group.scatter(part, own.repeat(size) if group.rank_in_group == 0 else None)
                group.all_gather(own, output_tensor_list=rows)
                group.all_gather_to_list(own, more)
                group.all_gatherv(own, 0, output=whole)
                group.all_to_all_single(swapped, own.repeat(size))
                joined = torch.cat([torch.full((4,), each + 1.0) for each in group.ranks])
                found = {
                    "all_reduce_": (sums, torch.full((4,), total)),
                    "broadcast": (shared, joined[-4:]),
                    "scatter": (part, joined[:4]),
                    "all_gather": (torch.cat(rows), joined),
                    "all_gather_to_list": (torch.cat(more), joined),
                    "all_gatherv": (whole, joined),
                    "all_to_all": (swapped, joined),
                }
                wrong += [name for name, (got, wanted) in found.items() if not torch.equal(got, wanted)]
        alone.destroy()
    return wrong


def new_group_of_one(group: GroupCoordinator) -> GroupCoordinator:
    return GroupCoordinator(
        [[rank] for rank in group.ranks], group.local_rank, "gloo", True, group_name="alone"
    )


@pytest.mark.guarantee("D60")
@pytest.mark.parametrize("places", ["one host", "two hosts", "a host each"])
def test_what_was_made_in_inference_mode_is_filled_outside_of_it(ranks3: RankPool, places: str) -> None:
    """By every call that writes, contiguous or not: torch would refuse a copy after the data have moved."""
    pools: dict[str, Any] = {
        "one host": ranks3,
        "two hosts": HostsPool(ranks3, "AAB"),
        "a host each": ApartPool(ranks3),
    }
    assert pools[places].run(filled_in) == [[]] * 3


@pytest.mark.guarantee("D3")
def test_outputs_that_overlap_themselves_are_refused_before_the_gather() -> None:
    """The copy into them would be refused, when the other ranks have their result already."""
    with FakeGroupCoordinator(0, 2) as group, pytest.raises(UsageError, match="overlap"):
        group.all_gather_to_list(torch.ones(4), [torch.zeros(4), torch.zeros(1).expand(4)])


@pytest.mark.guarantee("D60")
@pytest.mark.parametrize("ranks", [1, 2])
def test_filling_parameters_without_a_gradient_leaves_their_history_alone(ranks: int) -> None:
    """Without grad mode torch lets every copy into one pass; the call must not bring that mode back for its own."""
    parameters = [torch.zeros(4, requires_grad=True) for _ in range(ranks)]
    made = [each * 2 for each in parameters]
    with FakeGroupCoordinator(0, ranks) as group, torch.no_grad():
        group.all_gather_to_list(torch.ones(4), parameters)
        group.all_gather_to_list(torch.ones(4), made)
    assert [each.tolist() for each in (*parameters, *made)] == [[1.0] * 4] * 2 * ranks
    assert all(each.is_leaf for each in parameters)
    for each, parameter in zip(made, parameters, strict=True):
        (gradient,) = torch.autograd.grad(each.sum(), parameter)
        assert gradient.tolist() == [2.0] * 4
