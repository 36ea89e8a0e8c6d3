"""`dispatch` and `combine` as engines of several years call them: every order of arguments gives the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, GroupCoordinator, UsageError
from coordinator.testing import FakeGroupCoordinator
from tests.engines import refusal
from tests.harness import RankPool
from tests.worlds import new_group, world

SIZES = [3, 1]


def tokens(rank: int) -> tuple[torch.Tensor, ...]:
    """Return (hidden states, weights, ids, logits, an extra tensor) of a rank."""
    generator, size = torch.Generator().manual_seed(rank), SIZES[rank]
    return (
        torch.randint(-9, 9, (size, 4), generator=generator).to(torch.bfloat16),
        torch.rand(size, 2, generator=generator),
        torch.randint(0, 8, (size, 2), generator=generator, dtype=torch.int32),
        torch.rand(size, 8, generator=generator),
        torch.arange(size).view(-1, 1) + 10 * rank,
    )


def same(made: Any, expected: tuple[torch.Tensor, ...], extra: list[torch.Tensor] | None = None) -> None:
    """Check what a dispatch returned against what the ranks' tensors are, one after the other."""
    assert type(made) is tuple
    parts = list(made)
    if extra is not None:
        last = parts.pop()
        assert type(last) is list
        parts += last
    wanted = [*expected, *(extra or [])]
    assert len(parts) == len(wanted)
    for got, each in zip(parts, wanted, strict=True):
        assert got.dtype is each.dtype
        assert torch.equal(got, each)


def orders(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        x, weights, ids, logits, extra = tokens(rank)
        wholes = [group.all_gatherv(each, 0, SIZES) for each in (x, weights, ids, logits, extra)]
        all_x, all_weights, all_ids, all_logits, all_extra = wholes
        routed, by_logits = (all_x, all_weights, all_ids), (all_x, all_logits)
        # The present order, by position and by name.
        same(group.dispatch(x, weights, ids), routed)
        same(group.dispatch(x, weights, ids, True), routed)
        same(group.dispatch(x, topk_weights=weights, topk_ids=ids, is_sequence_parallel=False), routed)
        same(group.dispatch(x, weights, ids, False, [extra]), routed, [all_extra])
        same(group.dispatch(x, weights, ids, extra_tensors=[extra, x]), routed, [all_extra, all_x])
        same(group.dispatch(x, weights, ids, extra_tensors=[]), routed, [])
        # The older order.
        same(group.dispatch(x, logits), by_logits)
        same(group.dispatch(x, logits, False), by_logits)
        same(group.dispatch(x, router_logits=logits), by_logits)
        same(group.dispatch(x, logits, False, None), by_logits)
        same(group.dispatch(x, logits, True, [extra]), by_logits, [all_extra])
        same(group.dispatch(x, logits, False, extra_tensors=[extra]), by_logits, [all_extra])
        same(group.dispatch(x, logits, is_sequence_parallel=True), by_logits)
        same(group.dispatch_router_logits(x, logits), by_logits)
        same(group.dispatch_router_logits(x, logits, True, [extra]), by_logits, [all_extra])
        same(group.dispatch_router_logits(x, logits, extra_tensors=[]), by_logits, [])
        combines(group, all_x)


def combines(group: GroupCoordinator, all_x: torch.Tensor) -> None:
    rank = group.rank_in_group
    parts = all_x * (rank + 2)
    expected = group.reduce_scatterv(parts, 0, SIZES)
    assert torch.equal(group.combine(parts), expected)
    assert torch.equal(group.combine(parts, True), expected)
    given = group.allocate_combine_input(parts.shape, parts.dtype, parts.device)
    assert (given.shape, given.dtype, given.device) == (parts.shape, parts.dtype, parts.device)
    output = torch.zeros(SIZES[rank], 4, dtype=torch.bfloat16)
    assert group.combine_into_output(given.copy_(parts), output) is output
    assert torch.equal(output, expected)
    assert "output has shape" in refusal(
        lambda: group.combine_into_output(parts, torch.zeros(9, 4).bfloat16())
    )
    with group.token_counts(SIZES):
        assert torch.equal(group.combine_into_output(parts, torch.zeros_like(output), True), expected)


@pytest.mark.guarantee("D62")
def test_every_order_of_arguments_brings_every_tensor(ranks2: RankPool) -> None:
    """Results equal those of `all_gatherv` and `reduce_scatterv`, whatever the number of tokens of each rank."""
    ranks2.run(orders)


def in_part(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone, new_group(everyone, "ep") as ep:
        # The ranks 0 and 1 hold the same tokens, as do 2 and 3; the data-parallel groups are 0 and 2, 1 and 3.
        dp = everyone.split_group([[0, 2], [1, 3]])
        assert dp is not None
        with dp:
            x = torch.full((1, 2), float(rank // 2 + 1))
            logits = torch.ones(1, 2)
            assert ep.dispatch(x, logits)[0].shape == (4, 2)
            ep.token_group = dp
            hidden, _ = ep.dispatch(x, logits, False)  # type: ignore[misc]
            assert hidden[:, 0].tolist() == [1.0, 2.0]
            assert ep.combine(hidden).tolist() == (x * 2).tolist()
            output = torch.zeros(1, 2)
            assert torch.equal(ep.combine_into_output(hidden, output), x * 2)
            hidden, _, _ = ep.dispatch(x, logits, logits.int(), True)  # type: ignore[misc]
            assert hidden[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
            assert ep.combine(hidden, True).tolist() == (x * 4).tolist()
            # A flag that is none is refused where the others make the call: by default in `token_group`.
            if rank == 2:
                with pytest.raises(UsageError, match="must be a bool"):
                    ep.dispatch(x, logits, None, "no")  # type: ignore[arg-type]
            elif rank == 0:
                with pytest.raises(DisagreementError, match="rank 2 refused dispatch"):
                    ep.dispatch(x, logits)
            assert ep.dispatch(x, logits)[0][:, 0].tolist() == [1.0, 2.0]
            ep.token_group = None
        everyone.barrier()


@pytest.mark.guarantee("D62")
def test_tokens_that_are_not_sharded_go_to_the_group_that_holds_others(ranks4: RankPool) -> None:
    """Without sequence parallelism `token_group` makes the calls; with it, the group itself."""
    ranks4.run(in_part)


@pytest.mark.guarantee("D62")
@pytest.mark.parametrize("size", [1, 2])
def test_arguments_that_fit_no_order_are_refused(size: int) -> None:
    """No tensor is dropped in silence, and the text says what is expected."""
    x, weights, ids = torch.ones(3, 4), torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.int64)
    with FakeGroupCoordinator(0, size) as fake:
        group: Any = fake
        attempts: dict[str, Callable[[], Any]] = {
            "extra_tensors must be a list of tensors or None, not bool": lambda: group.dispatch(
                x, weights, ids, False, True
            ),
            "or None, not Tensor": lambda: group.dispatch(x, weights, ids, extra_tensors=x),
            "is_sequence_parallel must be a bool, not Tensor": lambda: group.dispatch(x, weights, ids, ids),
            "must be a bool, not list": lambda: group.dispatch(x, weights, ids, [x]),
            "given twice": lambda: group.dispatch(x, weights, False, [x], [x]),
            "or router_logits alone": lambda: group.dispatch(x, weights, ids, router_logits=weights),
            "topk_ids without topk_weights": lambda: group.dispatch(x, topk_ids=ids),
            "expected a tensor, not str": lambda: group.dispatch(x, weights, "ids"),
            "one row for each of the 3": lambda: group.dispatch(x, weights, ids[:2]),
            "expected a tensor, not NoneType": lambda: group.dispatch_router_logits(
                x, x, extra_tensors=[None]
            ),
            "this group's device is cpu": lambda: group.allocate_combine_input((2, 2), torch.float32, "cuda"),
            "shape of a tensor": lambda: group.allocate_combine_input((-2,), torch.float32, "cpu"),
        }
        for text, call in attempts.items():
            with pytest.raises(UsageError) as raised:
                call()
            assert text in str(raised.value), (text, str(raised.value))


def test_a_group_of_one_combines_without_a_dispatch() -> None:
    """`combine` returns its input; with an output it is copied there."""
    x, output = torch.ones(3, 4), torch.zeros(3, 4)
    with FakeGroupCoordinator(0, 1) as group:
        assert group.combine(x) is x
        assert group.combine(x, True) is x
        assert group.combine_into_output(x, output) is output
        assert torch.equal(output, x)
        assert all(a is b for a, b in zip(group.dispatch(x, x, x.int()), (x, x), strict=False))
