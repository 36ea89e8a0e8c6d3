"""Tokens go to the ranks of their experts and come back; results equal a mixture of experts in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator import GroupCoordinator, UsageError
from coordinator.testing import FakeGroupCoordinator
from device_comm.all2all import (
    FEW_TOKENS,
    DispatchForm,
    ExpertPlacement,
    RoutedTokens,
    choose_form,
    contiguous_ranks,
)
from device_comm.base import SUM
from device_comm.reduction import reduce_in_rank_order
from tests.harness import RankPool
from tests.worlds import ApartPool, outcome_of, world

HIDDEN = 6
GATHER, EXCHANGE = DispatchForm.ALL_GATHER, DispatchForm.ALL_TO_ALL


class Model:
    """The tokens of every rank, the ranks of their experts, and the results. Every rank computes the same ones."""

    def __init__(
        self,
        sizes: list[int],
        topk: int,
        owners: list[int],
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.owners, self.topk, self.sizes = torch.tensor([*owners, -1]), topk, sizes
        self.hidden = [torch.randn(size, HIDDEN, generator=generator).to(dtype) for size in sizes]
        self.weights = [torch.rand(size, topk, generator=generator) for size in sizes]
        # Some slots hold no expert.
        self.ids = [torch.randint(-1, len(owners), (size, topk), generator=generator) for size in sizes]
        self.scales = torch.randn(len(owners), HIDDEN, generator=generator)

    def results(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the result of each expert, [rows, k, hidden]. A slot without an expert has an arbitrary result."""
        results = torch.tanh(hidden.float()[:, None] * self.scales[ids.clamp(min=0).long()]).to(hidden.dtype)
        return torch.where(ids[..., None] >= 0, results, torch.nan)

    def expected(self, rank: int, world_size: int) -> torch.Tensor:
        """Return the results that come back to `rank`, combined in rank order."""
        hidden, ids, weights = self.hidden[rank], self.ids[rank], self.weights[rank]
        results, owners = self.results(hidden, ids), self.owners[ids]
        parts = []
        for owner in range(world_size):
            part = torch.zeros(hidden.shape)
            for slot in range(self.topk):
                term = results[:, slot].float() * weights[:, slot, None]
                part += torch.where(owners[:, slot, None] == owner, term, 0.0)
            parts.append(part.to(hidden.dtype))
        return reduce_in_rank_order(parts, SUM)


def weighted(model: Model, routed: RoutedTokens) -> torch.Tensor:
    """Return the results of an engine's experts: the weighted sum of this rank's experts, or NaN without any."""
    local = torch.where(routed.local_ids >= 0, routed.topk_ids.long(), -1)
    results = model.results(routed.hidden_states, local)
    total = torch.zeros(routed.hidden_states.shape)
    assert routed.topk_weights is not None
    for slot in range(model.topk):
        term = results[:, slot].float() * routed.topk_weights[:, slot, None]
        total += torch.where(local[:, slot, None] >= 0, term, 0.0)
    return torch.where((local >= 0).any(1, keepdim=True), total, torch.nan).to(routed.hidden_states.dtype)


def there_and_back(
    group: GroupCoordinator, model: Model, placement: ExpertPlacement, **options: Any
) -> RoutedTokens:
    """Dispatch, combine both weighted sums and single results, and compare every bit."""
    rank, size = group.rank_in_group, group.world_size
    routed = group.dispatch(
        model.hidden[rank],
        topk_ids=model.ids[rank],
        topk_weights=model.weights[rank],
        experts=placement,
        extra_tensors=[torch.arange(model.sizes[rank]) + 1000 * rank],
        **options,
    )
    expected = model.expected(rank, size)
    for results in (
        weighted(model, routed),
        model.results(routed.hidden_states, torch.where(routed.local_ids >= 0, routed.topk_ids.long(), -1)),
    ):
        for _ in range(2):
            assert same_bits(group.combine(results, routed=routed), expected), options
    return routed


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether shape, dtype and bits are equal."""
    wide = torch.int32 if one.itemsize == 4 else torch.int16
    return one.dtype == other.dtype and torch.equal(one.view(wide), other.view(wide))


def tokens_here(model: Model, rank: int) -> list[int]:
    """Return the numbers of the tokens that have an expert on `rank`, ordered by rank and token."""
    return [
        1000 * source + token
        for source, ids in enumerate(model.ids)
        for token in (model.owners[ids] == rank).any(1).nonzero().flatten().tolist()
    ]


def check_compact(group: GroupCoordinator, model: Model, placement: ExpertPlacement) -> None:
    """Dispatch with `max_rows`: the rows of the exact form come first, then idle ones; `received` counts them."""
    rank = group.rank_in_group
    here = [tokens_here(model, each) for each in range(group.world_size)]
    most = max(*(len(each) for each in here), 1) + 2
    routed = there_and_back(group, model, placement, max_rows=most)
    assert routed.choice.form is EXCHANGE
    assert routed.hidden_states.shape[0] == routed.topk_ids.shape[0] == most
    count = len(here[rank])
    assert routed.extra_tensors[0].tolist() == here[rank] + [0] * (most - count)
    assert bool((routed.local_ids[:count] >= 0).any(1).all())
    assert bool((routed.topk_ids[count:] == -1).all())
    assert routed.received is not None
    assert routed.received.dtype is torch.int32
    sources = [sum(each // 1000 == source for each in here[rank]) for source in range(group.world_size)]
    assert routed.received.tolist() == sources
    if max(len(each) for each in here) > 1:
        text = outcome_of(lambda: there_and_back(group, model, placement, max_rows=1))["text"]
        assert "but max_rows is 1" in text


# --- forms ------------------------------------------------------------------------------------------------------


def forms(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        everyone_on_one = [world_size - 1] * 5
        shuffled = [each % world_size for each in (3, 1, 1, 0, 2, 3, 0, 1, 0)]
        for number, (sizes, topk, owners) in enumerate(
            (
                ([5] * world_size, 2, contiguous_ranks(8, world_size)),
                ([(7, 0, 3, 1)[each] for each in range(world_size)], 4, contiguous_ranks(7, world_size)),
                ([4, *[0] * (world_size - 1)], 1, everyone_on_one),
                ([6] * world_size, 5, everyone_on_one),
                ([0] * world_size, 2, shuffled),
                ([9] * world_size, 3, shuffled),
            )
        ):
            placement = group.place_experts(owners)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                model = Model(sizes, topk, owners, dtype, seed=number)
                routed = there_and_back(group, model, placement, form=GATHER)
                assert routed.choice.form is GATHER
                assert routed.hidden_states.shape[0] == sum(sizes)
                routed = there_and_back(group, model, placement, form=EXCHANGE)
                assert routed.extra_tensors[0].tolist() == tokens_here(model, rank)
                assert bool((routed.local_ids >= 0).any(1).all())
                assert routed.lost is None
                with group.token_counts(sizes):
                    routed = there_and_back(
                        group, model, placement, form=EXCHANGE, capacity=max(*sizes, 1) + 1
                    )
                assert routed.lost is not None
                assert not routed.lost.any()
                is_row = (routed.local_ids >= 0).any(1)
                assert routed.extra_tensors[0][is_row].tolist() == tokens_here(model, rank)
                check_compact(group, model, placement)
                there_and_back(group, model, placement)
        # A zero keeps the sign that it has in a sum over all ranks.
        placement = group.place_experts(world_size)
        for ids in (torch.arange(world_size).view(1, -1), torch.tensor([[1]])):
            signs = set()
            for form in DispatchForm:
                routed = group.dispatch(torch.zeros(1, 2), topk_ids=ids, experts=placement, form=form)
                zeros = torch.full_like(routed.hidden_states, -0.0)
                signs.add(str(group.combine(zeros, routed=routed).signbit().tolist()))
            assert signs == {str([[ids.numel() == world_size] * 2])}


@pytest.mark.parametrize("size", [2, 4])
def test_both_forms_give_the_bits_of_a_single_process(ranks2: RankPool, ranks4: RankPool, size: int) -> None:
    """This holds for uneven and zero tokens, and for any map. A token with several experts on a rank is sent once."""
    (ranks2 if size == 2 else ranks4).run(forms)


def test_ranks_on_different_hosts_exchange_tokens_too(ranks2: RankPool) -> None:
    """The tokens travel over Gloo."""
    ApartPool(ranks2).run(forms)


# --- mistakes ---------------------------------------------------------------------------------------------------


def mistakes(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        x, ids, weights = torch.ones(3, HIDDEN), torch.tensor([[0, 3], [1, 1], [-1, 2]]), torch.ones(3, 2)
        attempts: dict[str, dict[str, Any]] = {
            "topk_ids[1, 0] is 4": {"topk_ids": torch.tensor([[0, 3], [4, 1], [9, 2]])},
            "is -2": {"topk_ids": ids - 1},
            "one row for each of the 3": {"topk_ids": ids[:2]},
            "signed integers": {"topk_ids": weights},
            "of the shape of topk_ids": {"topk_weights": weights[:, :1]},
            "at least 1 expert": {"experts": 0},
            "topk_ids without topk_weights needs experts": {"experts": None, "topk_weights": None},
            "belong to the form with topk_ids and experts": {"experts": None, "capacity": 3},
            "goes without router_logits": {"router_logits": weights},
            "capacity must be": {"capacity": 0},
            "form must be": {"form": "all_to_all"},
            "max_rows must be": {"max_rows": -1},
            "goes without capacity": {"max_rows": 3, "capacity": 3},
            "max_rows belongs to the all-to-all form": {"max_rows": 3, "form": GATHER},
            "belongs to another group": {"experts": FakeGroupCoordinator(0, 3).place_experts(4)},
        }
        for text, change in attempts.items():
            options = {"topk_ids": ids, "topk_weights": weights, "experts": 4, **change}
            outcome = outcome_of(partial(group.dispatch, x, **options))
            assert (outcome["kind"], text in outcome["text"]) == ("UsageError", True), outcome["text"]
        assert "alone" in outcome_of(lambda: group.dispatch(x, capacity=3))["text"]  # type: ignore[call-overload]
        assert "an expert's rank is 9" in outcome_of(lambda: group.place_experts([0, 9]))["text"]
        routed = group.dispatch(x, topk_ids=ids, experts=4, form=EXCHANGE)
        assert "expected the results of" in outcome_of(lambda: group.combine(x[:1, 0], routed=routed))["text"]
        assert (
            "topk_weights"
            in outcome_of(lambda: group.combine(torch.ones(*routed.topk_ids.shape, 3), routed=routed))["text"]
        )
        assert (
            "floating"
            in outcome_of(lambda: group.combine(routed.hidden_states.long(), routed=routed))["text"]
        )
        # Nothing was sent. The group goes on, and several dispatches may be open.
        second = group.dispatch(x * 2, topk_ids=ids, experts=4, form=EXCHANGE)
        hits = torch.tensor([[2.0], [1.0], [1.0]]) if world_size == 2 else None
        results = [group.combine(each.hidden_states, routed=each) for each in (second, routed)]
        assert torch.equal(results[0], results[1] * 2)
        if hits is not None:
            assert torch.equal(results[1], hits.expand(3, HIDDEN))


def test_wrong_arguments_are_refused_before_anything_is_sent(ranks2: RankPool) -> None:
    """Wrong experts, shapes, capacities, forms and placements are refused, and the group goes on."""
    ranks2.run(mistakes)


def overflows(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        x = torch.arange(5.0).view(5, 1) + 1
        ids = torch.zeros(5, 1, dtype=torch.int32)
        ids[4] = 1
        with group.token_counts([5] * world_size):
            routed = group.dispatch(x, topk_ids=ids, experts=world_size, capacity=3, form=EXCHANGE)
        assert routed.topk_ids.dtype is torch.int32
        assert routed.hidden_states.shape == (3 * world_size, 1)
        assert routed.lost is not None
        assert routed.lost.tolist() == [False, False, False, True, False]
        assert routed.received is not None
        assert routed.received.tolist() == [(3 if rank == 0 else 1 if rank == 1 else 0)] * world_size
        result = group.combine(routed.hidden_states, routed=routed).flatten()
        assert result[[0, 1, 2, 4]].tolist() == [1, 2, 3, 5]
        assert bool(result[3].isnan())


def test_a_token_without_room_is_lost_and_reported(ranks2: RankPool) -> None:
    """Its result is NaN, and `lost` reports it. The other results are right."""
    ranks2.run(overflows)


def many(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as group:
        model = Model([300] * world_size, 1, contiguous_ranks(16, world_size), seed=3)
        placement = group.place_experts(16)
        routed = there_and_back(group, model, placement)
        assert routed.choice.form is EXCHANGE
        assert group.all_reduce(torch.tensor(routed.hidden_states.shape[0])).item() == sum(
            len(tokens_here(model, each)) for each in range(world_size)
        )
        floats = model.hidden[rank].to(torch.float8_e4m3fn)
        moved = group.dispatch(floats, topk_ids=model.ids[rank], experts=placement).hidden_states
        assert moved.dtype is torch.float8_e4m3fn
        assert torch.equal(moved.float(), routed.hidden_states.to(torch.float8_e4m3fn).float())
        return [routed.choice.reason]


def test_many_tokens_are_exchanged_by_default(ranks4: RankPool) -> None:
    """All ranks choose the exchange. fp8 tokens are exchanged too."""
    assert len({reason for (reason,) in ranks4.run(many)}) == 1


# --- the policy, and one process --------------------------------------------------------------------------------


def test_the_choice_of_form_names_its_reason() -> None:
    """The choice is a pure function of facts that all ranks know."""
    few, lots = [1, FEW_TOKENS - 1], [4096] * 8
    for tokens, topk, capacity, is_static, form, reason in (
        ([9000], 1, None, False, GATHER, "a group of one"),
        (few, 1, None, False, GATHER, "are at most"),
        ([2, FEW_TOKENS - 1], 1, None, False, EXCHANGE, "only 50% of 257 tokens"),
        (lots, 2, None, False, EXCHANGE, "only 23%"),
        (lots, 16, None, False, GATHER, "88% of all tokens"),
        (lots, 2, None, True, GATHER, "room for every token"),
        (lots, 2, 1000, True, EXCHANGE, "8 times the capacity of 1000"),
        (lots, 2, 4000, True, GATHER, "saves little"),
    ):
        choice = choose_form(tokens, topk, capacity, is_static=is_static)
        assert (choice.form, reason in choice.reason) == (form, True), choice
    for capacity, form, reason in ((4, EXCHANGE, "kernels carry 8 times"), (5, GATHER, "are at most")):
        choice = choose_form([4] * 8, 8, capacity, is_static=True, is_carried=True)
        assert (choice.form, reason in choice.reason) == (form, True), choice
    assert choose_form([4] * 8, 8, None, is_static=True, is_carried=True).form is GATHER


@given(st.integers(1, 300), st.integers(1, 9))
def test_blocks_of_experts_are_contiguous_and_even(experts: int, ranks: int) -> None:
    """The numbers of experts differ by at most one, and the first ranks have the larger ones."""
    owners = contiguous_ranks(experts, ranks)
    sizes = [owners.count(rank) for rank in range(ranks)]
    assert owners == sorted(owners)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


def test_a_group_of_one_has_every_expert() -> None:
    """Its rows are its own tokens, and the sum is over its own experts."""
    with FakeGroupCoordinator(0, 1) as group:
        model = Model([5], 2, [0, 0, 0])
        routed = there_and_back(group, model, group.place_experts(3))
        assert routed.hidden_states is model.hidden[0]
        assert routed.placement.local_experts == (0, 1, 2)


@settings(max_examples=60)
@given(st.data())
def test_every_token_comes_once_to_each_rank_that_has_one_of_its_experts(data: st.DataObject) -> None:
    """For any experts, map and capacity, exactly these tokens are sent, or they are reported as lost."""
    ranks, topk = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 4))
    owners = data.draw(st.lists(st.integers(0, ranks - 1), min_size=1, max_size=6))
    ids = data.draw(
        st.lists(st.lists(st.integers(-1, len(owners) - 1), min_size=topk, max_size=topk), max_size=8)
    )
    capacity = data.draw(st.none() | st.integers(1, 9))
    with FakeGroupCoordinator(0, ranks) as group, group.token_counts([len(ids)] * ranks):
        placement = group.place_experts(owners)
        routed = group.dispatch(
            torch.arange(float(len(ids))).view(-1, 1),
            topk_ids=torch.tensor(ids, dtype=torch.int64).view(-1, topk),
            experts=placement,
            capacity=capacity,
            form=EXCHANGE,
        )
        route = routed._route
        assert route.source is not None
        wanted = {
            (rank, token) for token, row in enumerate(ids) for rank in {owners[e] for e in row if e >= 0}
        }
        found = []
        start = 0
        for rank, count in enumerate(route.sent):
            rows = route.source[start : start + count].tolist()
            found += [(rank, token) for token in rows if token < len(ids)]
            start += count
        assert len(found) == len(set(found))
        missing = wanted - set(found)
        assert set(found) <= wanted
        lost = set() if routed.lost is None else set(routed.lost.nonzero().flatten().tolist())
        assert {token for _, token in missing} == lost
        assert capacity is not None or not missing


def test_the_two_forms_of_dispatch_are_not_mixed() -> None:
    """A dispatch without a router's logits must have a routing."""
    with FakeGroupCoordinator(0, 2) as group, pytest.raises(UsageError, match="alone"):
        group.dispatch(torch.ones(2, 2))
