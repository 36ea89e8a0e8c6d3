"""Reductions of bits, and sums of values that are multiplied first."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator import BitwiseOperation, premul_sum
from tests.harness import RankPool
from tests.worlds import HostsPool, refused, world


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
    """In every form, over shared memory and in two levels, they equal a fold of the tensors in rank order."""
    assert ranks2.run(bits) == [[], []]
    assert HostsPool(ranks4, ["a", "a", "b", "b"]).run(bits) == [[]] * 4
