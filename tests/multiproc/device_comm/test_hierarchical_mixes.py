"""Random collectives over random hosts: every rank, whether it leads or not, has the bits of the reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from coordinator.group import GroupCoordinator
from device_comm.cpu.several_hosts.levels import PIECE_BYTES, SEVERAL_LEADERS_BYTES
from tests.harness import RankPool
from tests.multiproc.device_comm.test_hierarchical_results import (
    assert_same_bits,
    host_map,
    reductions,
    reference,
    values,
)
from tests.worlds import HostsPool, hierarchical, world

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool)
# Each place where a call begins to go another way, from which a size is some elements away.
TURNS = (0, 8 << 10, 64 << 10, 256 << 10, SEVERAL_LEADERS_BYTES, PIECE_BYTES * 2, PIECE_BYTES * 3)
CALLS = 24

Draw = random.Random


def some_count(draw: Draw, itemsize: int, parts: int = 1) -> int:
    """Return a number of elements near a turn, of which each of `parts` ranks brings some."""
    return max(draw.choice(TURNS) // itemsize // parts + draw.randint(-3, 3), 0)


def some_sizes(draw: Draw, world_size: int, itemsize: int) -> list[int]:
    """Return an uneven part of a tensor for each rank; some bring nothing."""
    total = some_count(draw, itemsize)
    cuts = sorted(draw.randint(0, total) for _ in range(world_size - 1))
    sizes = [last - first for first, last in zip([0, *cuts], [*cuts, total], strict=True)]
    if draw.random() < 0.5:
        sizes[draw.randrange(world_size)] = 0
    return sizes


def all_reduce(group: GroupCoordinator, draw: Draw, dtype: torch.dtype) -> None:
    count, op = some_count(draw, dtype.itemsize), draw.choice(reductions(dtype))
    is_in_place = draw.random() < 0.5
    inputs = [values(each, count, dtype) for each in range(group.world_size)]
    own = inputs[group.rank_in_group].clone()
    result = hierarchical(group).all_reduce_(own, op) if is_in_place else group.all_reduce(own, op)
    assert_same_bits(result, reference(inputs, op, host_map()), (count, dtype, op))


def reduce_scatter(group: GroupCoordinator, draw: Draw, dtype: torch.dtype) -> None:
    sizes, op = some_sizes(draw, group.world_size, dtype.itemsize), draw.choice(reductions(dtype))
    inputs = [values(each, sum(sizes), dtype) for each in range(group.world_size)]
    result = hierarchical(group).reduce_scatterv(inputs[group.rank_in_group], 0, sizes, op)
    expected = reference(inputs, op, host_map()).split(sizes)[group.rank_in_group]
    assert_same_bits(result, expected, (sizes, dtype, op))


def all_gather(group: GroupCoordinator, draw: Draw, dtype: torch.dtype) -> None:
    sizes, columns = some_sizes(draw, group.world_size, 3 * dtype.itemsize), draw.random() < 0.3
    inputs = [values(each, 3 * size, dtype) for each, size in enumerate(sizes)]
    shaped = [
        each.view((3, size) if columns else (size, 3)) for each, size in zip(inputs, sizes, strict=True)
    ]
    result = hierarchical(group).all_gatherv(shaped[group.rank_in_group], int(columns), sizes)
    assert_same_bits(result, torch.cat(shaped, int(columns)), (sizes, columns, dtype))


def even_all_gather(group: GroupCoordinator, draw: Draw, dtype: torch.dtype) -> None:
    count = some_count(draw, dtype.itemsize, group.world_size)
    inputs = [values(each, count, dtype) for each in range(group.world_size)]
    assert_same_bits(group.all_gather(inputs[group.rank_in_group]), torch.cat(inputs), (count, dtype))


def broadcast(group: GroupCoordinator, draw: Draw, dtype: torch.dtype) -> None:
    count, src = some_count(draw, dtype.itemsize), draw.randrange(group.world_size)
    tensor = values(group.rank_in_group, count, dtype)
    group.broadcast(tensor, src)
    assert_same_bits(tensor, values(src, count, dtype), (count, src, dtype))


def all_to_all(group: GroupCoordinator, draw: Draw, dtype: torch.dtype) -> None:
    part, rank = some_count(draw, dtype.itemsize, 4 * group.world_size), group.rank_in_group
    inputs = [values(each, part * group.world_size, dtype) for each in range(group.world_size)]
    expected = torch.cat([each[rank * part : (rank + 1) * part] for each in inputs])
    assert_same_bits(group.all_to_all(inputs[rank]), expected, (part, dtype))


KINDS: list[Callable[[GroupCoordinator, Draw, torch.dtype], None]] = [
    *(all_reduce, all_reduce, reduce_scatter),
    *(all_gather, all_gather, even_all_gather, broadcast, all_to_all),
]


def mix(rank: int, world_size: int, directory: Path, seed: int) -> None:
    """Make the calls that `seed` draws, which are the same on every rank."""
    draw = Draw(seed)
    with world(rank, world_size, directory) as group:
        for _ in range(CALLS):
            # As if the line between the hosts had been measured again.
            hierarchical(group)._levels.worth_bytes = draw.choice([0, 64 << 10, 1 << 20, 1 << 30])
            draw.choice(KINDS)(group, draw, draw.choice(DTYPES))


@pytest.mark.guarantee("D2")
@pytest.mark.guarantee("D16")
@pytest.mark.parametrize(
    ("places", "seed"),
    [
        ("ABBAB", 1),
        *(
            pytest.param(places, seed, marks=pytest.mark.thorough)
            for places in ("AABBB", "ABBBB", "AAABB", "AABBCC", "ABCBCC", "ABCDA", "AABBAABB")
            for seed in (2, 3)
        ),
    ],
)
def test_mixed_calls_have_the_bits_of_the_reference(places: str, seed: int) -> None:
    """Hosts of equal and of unequal sizes; sizes on both sides of each place where a call goes another way."""
    with RankPool(len(places), brief=True) as pool:
        HostsPool(pool, places).run(mix, seed, timeout_s=200.0)


def into_inference_tensors(rank: int, world_size: int, directory: Path) -> list[float]:
    """Fill outputs that were made in inference mode, outside of it."""
    with world(rank, world_size, directory) as group:
        with torch.inference_mode():
            part, whole, total = torch.empty(3), torch.empty(3 * world_size), torch.empty(4)
        own = torch.full((3 * world_size,), float(rank + 1))
        communicator = hierarchical(group)
        communicator.reduce_scatterv_into_output(own, part)
        communicator.all_gatherv_into_output(own[:3], whole)
        communicator.all_reduce_into_output(own[:4], total)
        return [part.sum().item(), whole.sum().item(), total.sum().item()]


@pytest.mark.guarantee("D60")
def test_outputs_of_inference_mode_are_filled(ranks3: RankPool) -> None:
    """On hosts with several ranks and on those with one."""
    assert HostsPool(ranks3, "AAB").run(into_inference_tensors) == [[18.0, 18.0, 24.0]] * 3
