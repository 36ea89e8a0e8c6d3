"""Results of collectives on CPU tensors among ranks on several hosts, where some ranks may share a host."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator.group import GroupCoordinator
from coordinator.parallel_state import get_world_group
from coordinator.testing import check_device_communicator
from device_comm.cpu.several_hosts.communicator import group_by_host
from device_comm.cpu.several_hosts.levels import partial_dtype
from device_comm.cpu.several_hosts.wires import Wire
from device_comm.reduction import ReduceOperation, accumulation_dtype, check_reducible, reduce_in_rank_order
from shm_broadcast.errors import UsageError
from tests.harness import RankPool
from tests.worlds import HostsPool, hierarchical, new_group, world

MAPS = [
    *("AABB", "ABAB", "ABCA"),
    *(pytest.param(each, marks=pytest.mark.thorough) for each in ("ABBB", "AAAB", "ABCD")),
]
"""The hosts of ranks 0 to 3, one letter for each rank."""

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.bool),
    *(torch.complex64, torch.complex128),
]
SLOT = 256 << 10


@pytest.fixture(params=MAPS)
def hosts(request: pytest.FixtureRequest, ranks4: RankPool) -> HostsPool:
    """Return a pool of four ranks on two or three hosts."""
    return HostsPool(ranks4, request.param)


def host_map() -> tuple[tuple[int, ...], ...]:
    """Return which ranks are together, as this rank's group sees it."""
    return hierarchical(get_world_group())._levels._hosts


def values(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Return numbers of many magnitudes, whose sum depends on the order of the additions."""
    generator = torch.Generator().manual_seed(1000 * rank + elements % 997)
    if dtype is torch.bool:
        return torch.rand(elements, generator=generator) > 0.5
    if dtype.is_complex:
        return (
            torch.randn(elements, 2, generator=generator).double().view(torch.complex128).view(-1).to(dtype)
        )
    if dtype.is_floating_point:
        scale = torch.tensor(10.0) ** torch.randint(-2, 2, (elements,), generator=generator)
        return (torch.randn(elements, generator=generator) * scale).to(dtype)
    return torch.randint(-100, 100, (elements,), generator=generator).to(dtype)


def reference(
    inputs: Sequence[torch.Tensor], op: ReduceOperation, hosts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Combine the ranks of each host in rank order, then the hosts in their order; divide and round once."""
    dtype = inputs[0].dtype
    wide = dtype if dtype is torch.bool else accumulation_dtype(dtype)
    inner = ReduceOperation.SUM if op is ReduceOperation.MEAN else op
    partials = [reduce_in_rank_order([inputs[rank].to(wide) for rank in ranks], inner) for ranks in hosts]
    total = reduce_in_rank_order(partials, inner)
    if op is ReduceOperation.MEAN:
        components = torch.view_as_real(total) if total.is_complex() else total
        components.div_(torch.tensor(float(len(inputs)), dtype=components.dtype))
    return total.to(dtype)


def assert_same_bits(result: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    assert (result.dtype, result.shape) == (expected.dtype, expected.shape), what
    one, other = (each.contiguous().view(-1).view(torch.uint8) for each in (result, expected))
    assert torch.equal(one, other), what


def reductions(dtype: torch.dtype) -> list[ReduceOperation]:
    """Return the reductions that are allowed for `dtype`."""
    found = []
    for op in ReduceOperation:
        try:
            check_reducible(dtype, op)
        except UsageError:
            continue
        found.append(op)
    return found


def test_hosts_are_ordered_by_their_lowest_rank() -> None:
    """The ranks of each host ascend."""
    assert group_by_host("BABA") == ((0, 2), (1, 3))
    assert group_by_host("ABBB") == ((0,), (1, 2, 3))


def test_partial_results_lose_nothing() -> None:
    """Sums of 16-bit floats travel as float32. Integers, and values that are only compared, keep their dtype."""
    assert partial_dtype(torch.bfloat16, ReduceOperation.SUM) is torch.float32
    assert partial_dtype(torch.float8_e5m2, ReduceOperation.MEAN) is torch.float32
    assert partial_dtype(torch.bfloat16, ReduceOperation.MAX) is torch.bfloat16
    assert partial_dtype(torch.uint16, ReduceOperation.SUM) is torch.uint16
    assert partial_dtype(torch.float64, ReduceOperation.SUM) is torch.float64


# --- reductions -----------------------------------------------------------------------------------------------


def reduce_many(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        hosts = host_map()
        for dtype, elements in itertools.product(DTYPES, (0, 1, 1001)):
            inputs = [values(each, elements, dtype) for each in range(world_size)]
            for op in reductions(dtype):
                what = (dtype, elements, op)
                expected = reference(inputs, op, hosts)
                own = inputs[rank].clone()
                assert_same_bits(group.all_reduce(own, op), expected, what)
                assert_same_bits(own, inputs[rank], what)
                root = elements % world_size
                reduced = hierarchical(group).reduce(own, root, op)
                assert (reduced is not None) == (rank == root)
                if reduced is not None:
                    assert_same_bits(reduced, expected, what)
                assert hierarchical(group).all_reduce_(own, op) is own
                assert_same_bits(own, expected, what)


@pytest.mark.guarantee("D2")
@pytest.mark.guarantee("D16")
def test_reductions_have_the_bits_of_the_order_by_host(hosts: HostsPool) -> None:
    """All ranks get the bits of the order by host, for every dtype and reduction, in place and not."""
    hosts.run(reduce_many)


def reduce_large(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        hosts = host_map()
        for elements, dtype in (
            (SLOT // 2 + 3, torch.bfloat16),
            (SLOT // 4 * 5 + 1, torch.float32),
            (2_500_001, torch.bfloat16),
            (2_500_001, torch.int32),
            (600_001, torch.complex128),
        ):
            inputs = [values(each, elements, dtype) for each in range(world_size)]
            for op in (ReduceOperation.SUM, ReduceOperation.MEAN):
                if op in reductions(dtype):
                    expected = reference(inputs, op, hosts)
                    assert_same_bits(group.all_reduce(inputs[rank], op), expected, (dtype, elements, op))
                    own = inputs[rank].clone()
                    hierarchical(group).all_reduce_(own, op)
                    assert_same_bits(own, expected, (dtype, elements, op))


@pytest.mark.guarantee("D16")
def test_large_reductions_in_pieces_have_the_same_bits(hosts: HostsPool) -> None:
    """They take several slots and several pieces. One piece is sent while the next one is combined."""
    hosts.run(reduce_large)


@contextmanager
def counting_what_is_sent() -> Iterator[list[int]]:
    """Yield a list of the bytes of each tensor that this rank sends to other hosts."""
    sent: list[int] = []
    send = Wire.send

    def counted(wire: Wire, data: memoryview, owner: object = None) -> None:
        if owner is not None:  # no header
            sent.append(len(data))
        send(wire, data, owner)

    with mock.patch.object(Wire, "send", counted):
        yield sent


def count_what_is_sent(rank: int, world_size: int, directory: Path) -> list[int]:
    with world(rank, world_size, directory) as group, counting_what_is_sent() as sent:
        found = []
        hierarchical(group)._levels.worth_bytes = 1 << 16
        for dtype, nbytes in (
            (torch.bfloat16, 128 << 10),
            (torch.bfloat16, 1 << 20),
            (torch.float32, 1 << 20),
        ):
            sent.clear()
            hierarchical(group).all_reduce(torch.ones(nbytes // dtype.itemsize, dtype=dtype))
            found.append(sum(sent))
    return found


@pytest.mark.guarantee("D16")
def test_two_hosts_send_what_is_wide_once_and_the_result_narrow(ranks3: RankPool) -> None:
    """Of 16 bits, a leader sends each element in 32 bits if they are few, else half of them, and half in 16 bits."""
    leader, other, lone = HostsPool(ranks3, "AAB").run(count_what_is_sent)
    assert leader == lone == [256 << 10, (1 << 20) + (1 << 19), 1 << 20]
    assert other == [0, 0, 0]


def count_what_leaders_send(rank: int, world_size: int, directory: Path) -> list[int]:
    with world(rank, world_size, directory) as group, counting_what_is_sent() as sent:
        found = []
        for call in (
            lambda: group.all_reduce(torch.ones((1 << 18) - 1)),
            lambda: group.all_reduce(torch.ones(1 << 18)),
            lambda: group.all_gather(torch.ones(1 << 16)),
            lambda: group.broadcast(torch.ones((1 << 18) + 1), 3),
        ):
            call()
            found.append(sum(sent))
            sent.clear()
    return found


@pytest.mark.guarantee("D16")
def test_large_tensors_are_sliced_among_the_leaders(ranks4: RankPool) -> None:
    """From 1 MiB on two ranks of each host send half of it each; below, the first rank sends all."""
    found = HostsPool(ranks4, "AABB").run(count_what_leaders_send)
    # Two all-reduces, an all-gather of 256 KiB of each rank, a broadcast from rank 3 of one element more than 1 MiB.
    half = 1 << 19
    assert found[0] == [(1 << 20) - 4, half, 1 << 18, 0]
    assert found[1] == [0, half, 1 << 18, 0]
    assert found[2] == [(1 << 20) - 4, half, 1 << 18, half + 2]
    assert found[3] == [0, half, 1 << 18, half + 2]


def move_large(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        sizes = [400_001, 0, 300_000, 1, 77_777][:world_size]
        inputs = [values(each, size, torch.float32) for each, size in enumerate(sizes)]
        communicator = hierarchical(group)
        assert_same_bits(communicator.all_gatherv(inputs[rank], 0, sizes), torch.cat(inputs), sizes)
        for src in range(world_size):
            tensor = values(rank, 400_001, torch.float32)
            group.broadcast(tensor, src)
            assert_same_bits(tensor, values(src, 400_001, torch.float32), src)


@pytest.mark.thorough
@pytest.mark.guarantee("D16")
@pytest.mark.parametrize("places", ["AABBB", "ABBAB"])
@pytest.mark.parametrize("body", [move_large, reduce_large])
def test_as_many_ranks_lead_as_the_smallest_host_has(body: Callable[..., None], places: str) -> None:
    """The last rank of the larger host leads nobody, and gets the same bits as all others."""
    with RankPool(5, brief=True) as pool:
        HostsPool(pool, places).run(body)


def reduce_views(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        hosts = host_map()
        inputs = [values(each, 6 * 35, torch.float32).view(6, 35) for each in range(world_size)]
        expected = reference([each.t() for each in inputs], ReduceOperation.SUM, hosts)
        assert_same_bits(group.all_reduce(inputs[rank].t()), expected, "transposed")
        into = inputs[rank].clone().t()
        assert hierarchical(group).all_reduce_(into) is into
        assert_same_bits(into, expected, "transposed in place")
        scalar = reference([each[0, 0] for each in inputs], ReduceOperation.SUM, hosts)
        assert_same_bits(group.all_reduce(inputs[rank][0, 0]), scalar, "0-dim")
        turned = values(rank, 9, torch.complex64).conj()
        expected = reference(
            [values(each, 9, torch.complex64).conj().resolve_conj() for each in range(world_size)],
            ReduceOperation.SUM,
            hosts,
        )
        assert_same_bits(group.all_reduce(turned), expected, "conjugated")


def test_views_of_any_layout_are_reduced(hosts: HostsPool) -> None:
    """Transposed, 0-dimensional and lazily conjugated tensors are reduced."""
    hosts.run(reduce_views)


def scatter_sums(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        hosts = host_map()
        communicator = hierarchical(group)
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.bool, torch.float8_e4m3fn):
            for shape, dim in (((8, 5), 0), ((3, 12), 1), ((3, 4, 7), -2), ((0, 4), 1)):
                elements = torch.Size(shape).numel()
                inputs = [values(each, elements, dtype).view(shape) for each in range(world_size)]
                for op in reductions(dtype):
                    whole = reference(inputs, op, hosts)
                    expected = whole.chunk(world_size, dim)[rank]
                    result = communicator.reduce_scatter(inputs[rank], dim, op)
                    assert_same_bits(result, expected, (dtype, shape, dim, op))
        for sizes in ([3, 0, 4, 1], [0, 0, 5, 3], [8, 0, 0, 0], [200_000, 1, 0, 3]):
            inputs = [values(each, sum(sizes) * 3, torch.bfloat16).view(-1, 3) for each in range(world_size)]
            whole = reference(inputs, ReduceOperation.MEAN, hosts)
            expected = whole.split(sizes, 0)[rank]
            result = communicator.reduce_scatterv(inputs[rank], 0, sizes, ReduceOperation.MEAN)
            assert_same_bits(result, expected, sizes)


@pytest.mark.guarantee("D16")
def test_a_reduce_scatter_gives_each_rank_its_part_of_the_all_reduce(hosts: HostsPool) -> None:
    """Even and uneven parts, along any dimension, have the bits of the all-reduce."""
    hosts.run(scatter_sums)


# --- moving data ----------------------------------------------------------------------------------------------


def move_many(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        communicator = hierarchical(group)
        for dtype in DTYPES:
            for shape, dim in (((3, 2), 0), ((3, 2), 1), ((2, 3, 4), -2), ((), 0), ((0, 4), 1), ((5,), 0)):
                elements = torch.Size(shape).numel()
                inputs = [values(each, elements, dtype).view(shape) for each in range(world_size)]
                parts = [each.reshape(1) if each.dim() == 0 else each for each in inputs]
                bits = [each.contiguous() for each in parts]
                expected = torch.cat([each.view(torch.uint8) for each in bits], dim) if dim == 0 else None
                result = communicator.all_gather(inputs[rank], dim)
                assert_same_bits(result, cat(parts, dim), (dtype, shape, dim))
                if expected is not None:
                    assert torch.equal(result.view(torch.uint8), expected)
                gathered = communicator.gather(inputs[rank], 2, dim)
                assert (gathered is not None) == (rank == 2)
                if gathered is not None:
                    assert_same_bits(gathered, cat(parts, dim), (dtype, shape, dim))
        for sizes in (
            [3, 0, 4, 1],
            [0, 0, 5, 3],
            [2, 6, 0, 0],
            [8, 0, 0, 0],
            [0, 0, 0, 0],
            [1, 0, 90_000, 2],
        ):
            inputs = [values(each, 5 * size, torch.bfloat16) for each, size in enumerate(sizes)]
            for dim in (0, 1):
                shaped = [
                    each.view((-1, 5) if dim == 0 else (5, sizes[index])) for index, each in enumerate(inputs)
                ]
                result = communicator.all_gatherv(shaped[rank], dim, sizes)
                assert_same_bits(result, torch.cat(shaped, dim), (sizes, dim))


def cat(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.cat(list(parts), dim)


@pytest.mark.guarantee("D16")
def test_gathers_put_the_ranks_in_rank_order(hosts: HostsPool) -> None:
    """This holds for any hosts, dtypes, shapes and dimensions, for uneven parts, and for hosts without data."""
    hosts.run(move_many)


def broadcast_many(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for dtype, elements, src in itertools.product(DTYPES, (0, 1, 1001), range(world_size)):
            tensor = values(rank, elements, dtype)
            assert group.broadcast(tensor, src) is tensor
            assert_same_bits(tensor, values(src, elements, dtype), (dtype, elements, src))
        for src in range(world_size):
            large = values(rank, SLOT + 5, torch.float32)
            group.broadcast(large, src)
            assert_same_bits(large, values(src, SLOT + 5, torch.float32), src)
            turned = values(rank, 12, torch.int32).view(3, 4).t()
            group.broadcast(turned, src)
            assert_same_bits(turned, values(src, 12, torch.int32).view(3, 4).t().contiguous(), src)


@pytest.mark.guarantee("D16")
def test_a_broadcast_from_every_rank_reaches_all(hosts: HostsPool) -> None:
    """The source may be a leader or not; tensors are small and large and have any layout."""
    hosts.run(broadcast_many)


def count_messages(rank: int, world_size: int, directory: Path) -> list[int]:
    with world(rank, world_size, directory) as group:
        levels = hierarchical(group)._levels
        sent = []
        swap = levels._links.swap

        def counted(call: Any, sends: dict[int, torch.Tensor], receives: dict[int, torch.Tensor]) -> Any:
            sent.append(sum(each.nbytes for each in sends.values()))
            return swap(call, sends, receives)

        levels._links.swap = counted  # type: ignore[method-assign,assignment]
        totals = []
        for call in (
            lambda: group.all_reduce(torch.ones(1000)),
            lambda: group.all_gather(torch.ones(1000)),
            lambda: group.broadcast(torch.ones(1000), 1),
            lambda: group.reduce_scatter(torch.ones(1000)),
        ):
            call()
            totals.append(sum(sent))
            sent.clear()
        return totals


def test_each_hosts_bytes_cross_once(ranks4: RankPool) -> None:
    """Only leaders send to other hosts: their host's sum, block or broadcast, or the other host's part."""
    assert HostsPool(ranks4, "AABB").run(count_messages) == [
        [4000, 8000, 4000, 2000],
        [0, 0, 0, 0],
        [4000, 8000, 0, 2000],
        [0, 0, 0, 0],
    ]


def conform(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        hierarchical(group)
        dtypes = [torch.float32, torch.bfloat16, torch.int32]
        check_device_communicator(
            group.device_communicator, dtypes=dtypes, host=group, exact_reductions=False
        )


@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(
    "places", ["ABAB", *(pytest.param(each, marks=pytest.mark.thorough) for each in ("AABB", "ABCD"))]
)
def test_the_contract_is_kept(ranks4: RankPool, places: str) -> None:
    """The conformance suite passes, except for its order of summation, which is by host here."""
    HostsPool(ranks4, places).run(conform)


def in_a_part_of_the_world(rank: int, world_size: int, directory: Path) -> list[Any] | None:
    with (
        world(rank, world_size, directory),
        GroupCoordinator([[0], [1, 2, 3]], rank, "gloo", True, group_name="part") as part,
    ):
        if rank == 0:
            return None
        levels = hierarchical(part)._levels
        total = part.all_reduce(torch.tensor([float(rank)]))
        part.broadcast(total, 2)
        return [list(map(list, levels._hosts)), part.all_gather(total * rank).tolist()]


def test_ranks_in_a_group_are_not_those_of_the_world(ranks4: RankPool) -> None:
    """A group of ranks 1 to 3, the last two of which share a host, uses its own rank numbers."""
    found = HostsPool(ranks4, "AABB").run(in_a_part_of_the_world)
    assert found == [None] + [[[[0], [1, 2]], [6.0, 12.0, 18.0]]] * 3


def mixed_with_point_to_point(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group, new_group(group) as other:
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        for turn in range(20):
            handle = group.device_communicator.isend(torch.full((3,), float(rank)), right)
            assert group.all_reduce(torch.ones(5)).tolist() == [world_size] * 5
            assert other.all_gather(torch.tensor([rank])).tolist() == list(range(world_size))
            assert group.recv((3,), torch.float32, left).tolist() == [left] * 3
            handle.wait()
            assert group.all_gather_object((rank, turn)) == [(each, turn) for each in range(world_size)]


def test_collectives_do_not_disturb_point_to_point_messages(hosts: HostsPool) -> None:
    """Two groups of the same ranks do not disturb each other either."""
    hosts.run(mixed_with_point_to_point)
