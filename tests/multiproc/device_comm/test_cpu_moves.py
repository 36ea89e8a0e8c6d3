"""Reduce, scatter and all-to-all of CPU tensors, over shared memory and over Gloo."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, GroupCoordinator, UsageError
from device_comm.cpu.communicator import SharedMemoryCommunicator
from device_comm.cpu.shared_memory import SLOT_BYTES
from device_comm.reduction import ReduceOperation, check_reducible, reduce_in_rank_order
from tests.harness import RankPool
from tests.worlds import ApartPool, outcome_of, world

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


@pytest.fixture(params=[False, True], ids=["over shared memory", "over Gloo"])
def ranks(request: pytest.FixtureRequest, ranks4: RankPool) -> RankPool | ApartPool:
    """Return a pool of four ranks, on one host or as if on four."""
    return ApartPool(ranks4) if request.param else ranks4


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random elements that are equal for equal arguments."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 20
    return values > 0 if dtype is torch.bool else values.to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shape, dtype and bytes are equal."""
    bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)]
    return (one.shape, one.dtype) == (other.shape, other.dtype) and torch.equal(*bits)


def reduces(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for number, dtype in enumerate(DTYPES):
            for shape in ((), (3, 5), (0, 2), (17_001, 3)):
                parts = [filled(shape, dtype, each) for each in range(world_size)]
                before = parts[rank].clone()
                for op in ReduceOperation:
                    try:
                        check_reducible(dtype, op)
                    except UsageError:
                        continue
                    dst = number % world_size
                    result = group.reduce(parts[rank], dst, op)
                    assert (result is None) == (rank != dst)
                    expected = group.all_reduce(parts[rank], op)
                    if result is not None:
                        assert same_bits(result, expected), (dtype, shape, op)
                        assert same_bits(result, reduce_in_rank_order(parts, op))
                assert same_bits(parts[rank], before)


@pytest.mark.guarantee("D2")
def test_a_reduce_has_the_bits_of_an_all_reduce(ranks: Any) -> None:
    """One rank gets them, for every kind of dtype, small or larger than the slots. The inputs do not change."""
    ranks.run(reduces)


def scatters(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        for dtype in DTYPES:
            for sizes in (None, (1, 0, 3, 2), (0, 0, 0, 0), (0, 70_000, 1, 0)):
                counts = sizes or (2,) * world_size
                for dim in (0, 1, -1):
                    shape = [2, 3, 2]
                    shape[dim] = sum(counts)
                    whole = filled((*shape,), dtype, 1)
                    part = whole.split(counts, dim)[rank]
                    src = sum(counts) % world_size
                    spread = torch.zeros((*part.shape, 2), dtype=dtype)
                    for output in (torch.zeros_like(part), spread[..., 1]):
                        source = whole.transpose(0, 2).contiguous().transpose(0, 2) if rank == src else None
                        assert group.scatter(output, source, src, dim, sizes) is output
                        assert same_bits(output, part), (dtype, sizes, dim)
                    assert not spread[..., 0].any()
        single = torch.zeros(())
        group.scatter(single, torch.arange(4.0) if rank == 2 else None, 2)
        assert single.item() == rank


@pytest.mark.guarantee("D5")
def test_a_scatter_gives_each_rank_its_part(ranks: Any) -> None:
    """It works along any dimension, with any sizes and layouts, and writes only the output."""
    ranks.run(scatters)


def exchanges(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        choose = random.Random(5)
        tables = [
            [[2] * world_size for _ in range(world_size)],
            [[0] * world_size for _ in range(world_size)],
            [[choose.randrange(4) for _ in range(world_size)] for _ in range(world_size)],
            # Some ranks need one step here, and others need many.
            [[30_000 if (a, b) == (1, 2) else b for b in range(world_size)] for a in range(world_size)],
        ]
        for table in tables:
            sent = table[rank]
            expected = [row[rank] for row in table]
            for dtype in DTYPES:
                for dim in (0, 1, -1):
                    inputs = []
                    for seed, row in enumerate(table):
                        shape = [2, 3, 2]
                        shape[dim] = sum(row)
                        inputs.append(filled((*shape,), dtype, seed))
                    parts = [each.split(row, dim)[rank] for each, row in zip(inputs, table, strict=True)]
                    own = inputs[rank].transpose(0, 2).contiguous().transpose(0, 2)
                    result = group.all_to_all(own, dim, sent, expected)
                    assert result.is_contiguous()
                    assert same_bits(result, torch.cat(parts, dim)), (dtype, dim)
        even = group.all_to_all(torch.arange(8) + 10 * rank)
        assert even.tolist() == [10 * each + 2 * rank + place for each in range(4) for place in range(2)]
        # A tensor without dimensions counts as a tensor of shape [1].
        only = [int(each == 0) for each in range(world_size)]
        single = group.all_to_all(torch.tensor(rank), 0, only, [int(rank == 0)] * world_size)
        assert single.tolist() == (list(range(world_size)) if rank == 0 else [])


@pytest.mark.guarantee("D5")
def test_an_all_to_all_gives_each_rank_its_parts(ranks: Any) -> None:
    """It works along any dimension. Each pair has its own size, and ranks may need different numbers of steps."""
    ranks.run(exchanges)


def mismatched(group: GroupCoordinator, rows: int) -> dict[str, Any]:
    """Send one row from each rank to each, except that rank 1 sends `rows` to rank 2, which expects one."""
    rank, size = group.rank_in_group, group.world_size
    sent = [rows if (rank, to) == (1, 2) else 1 for to in range(size)]
    tensor = torch.ones(sum(sent), 4, dtype=torch.int32)
    return outcome_of(lambda: group.all_to_all(tensor, 0, sent, [1] * size))


def mismatches(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as group:
        found = [mismatched(group, rows) for rows in (0, 2)]
        assert [each["kind"] for each in found] == ["DisagreementError"] * 2
        assert group.all_to_all(torch.arange(4)).tolist() == [rank] * 4
        return [each["text"].partition("rank 0: ")[2] for each in found]


def test_sizes_that_do_not_match_are_found_over_gloo_too(ranks4: RankPool) -> None:
    """Without this check Gloo would end the process of a rank that gets more than it expects."""
    found = ApartPool(ranks4).run(mismatches)
    assert found == [found[0]] * 4
    assert "rank 1: sends (1, 1, 0, 1), expects (1, 1, 1, 1); rank 2" in found[0][0]
    assert "rank 1: sends (1, 1, 2, 1), expects (1, 1, 1, 1); rank 2" in found[0][1]


def disagree(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as group:
        assert isinstance(group.device_communicator, SharedMemoryCommunicator)
        texts = []
        for rows in (0, 2, SLOT_BYTES):
            found = mismatched(group, rows)
            assert found["kind"] == "DisagreementError", found
            texts.append(found["text"])
            assert group.all_to_all(torch.arange(4)).tolist() == [rank] * 4
        for call in (
            lambda: group.reduce(torch.ones(4), rank // 3),
            lambda: group.reduce(torch.ones(4 + rank // 3)),
            lambda: group.scatter(torch.ones(2 + rank // 3), torch.ones(8) if rank == 0 else None),
            lambda: group.all_to_all(torch.ones(4, dtype=torch.int64 if rank == 3 else torch.float32)),
            lambda: group.all_to_all(torch.ones(4, 1 + rank // 3)),
            lambda: group.all_to_all(torch.ones(4 + rank // 3, 4), 1),
            lambda: group.all_to_all(torch.ones(4)) if rank else group.all_gather(torch.ones(4)),
        ):
            with pytest.raises(DisagreementError) as caught:
                call()
            texts.append(str(caught.value))
        assert group.all_reduce(torch.ones(3)).tolist() == [world_size] * 3
        return texts


@pytest.mark.guarantee("D13")
def test_ranks_that_disagree_are_all_told_what_each_called(ranks4: RankPool) -> None:
    """They may also expect other sizes than are sent, smaller or larger. No data is moved, and the group goes on."""
    found = ranks4.run(disagree)
    for texts in found[1:]:
        assert [text.partition("rank 0: ")[2] for text in texts] == [
            text.partition("rank 0: ")[2] for text in found[0]
        ]
    fewer, more, many, root, elements, parts, *_, calls = found[0]
    expects = "expects 16 + 16 + 16 + 16 bytes, int32"
    assert f"rank 1: all_to_all #1, sends 16 + 16 + 0 + 16 bytes and {expects}" in fewer
    assert f"rank 2: all_to_all #1, sends 16 + 16 + 16 + 16 bytes and {expects}" in fewer
    assert "sends 16 + 16 + 32 + 16 bytes" in more
    assert f"sends 16 + 16 + {16 * SLOT_BYTES} + 16 bytes" in many
    assert "root 0" in root
    assert "root 1" in root
    assert "5 elements" in elements
    assert "layout" in parts
    assert "all_gather" in calls
    assert "all_to_all" in calls


def refused(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        x = torch.ones(4, 3)
        calls = {
            "dst is 4": lambda: group.reduce(x, 4),
            "unknown reduction": lambda: group.reduce(x, 0, "xor"),  # type: ignore[call-overload]
            "expected a tensor": lambda: group.scatter(x, None, rank),
            "must have shape": lambda: group.scatter(x, x, rank),
            "shares memory": lambda: group.scatter(x[:1], x, rank),
            "overlaps itself": lambda: group.scatter(torch.ones(1).expand(4), None, 0),
            "split evenly": lambda: group.all_to_all(x, 1),
            "given together": lambda: group.all_to_all(x, 0, [1] * 4),
            "send_sizes add up": lambda: group.all_to_all(x, 0, [2] * 4, [1] * 4),
            "to itself": lambda: group.all_to_all(x, 0, [1] * 4, [int(each != rank) for each in range(4)]),
        }
        for text, call in calls.items():
            with pytest.raises(UsageError, match=text):
                call()
        assert group.all_to_all(torch.arange(4)).tolist() == [rank] * 4


@pytest.mark.guarantee("D3")
def test_wrong_arguments_are_refused(ranks: Any) -> None:
    """Nothing is sent, and the group goes on."""
    ranks.run(refused)
