"""SGLang's functions and methods over our groups, as an engine calls them."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coordinator.integrations.sglang import parallel_state as state
from coordinator.integrations.sglang.group import SglangGroupCoordinator
from coordinator.integrations.sglang.widths import Widths
from shm_broadcast.errors import DisagreementError, PeerLostError, UsageError
from tests.harness import RankPool


def start(rank: int, size: int, directory: Path, **widths: Any) -> SglangGroupCoordinator:
    state.init_distributed_environment(size, rank, f"file://{directory}/world", rank, "gloo")
    state.initialize_model_parallel(**{"tensor_model_parallel_size": size, **widths})
    return state.get_tp_group()


def call_with_outputs(rank: int, size: int, directory: Path) -> None:
    group = start(rank, size, directory)
    mine = torch.arange(4.0).reshape(4, 1) + rank
    total = 2 * torch.arange(4.0).reshape(4, 1) + 1

    assert group.all_reduce(mine) is mine
    assert torch.equal(mine, total)
    mine = torch.arange(4.0).reshape(4, 1) + rank
    part = torch.zeros(2, 1)
    assert group.reduce_scatter(part, list(mine.chunk(2))) is part
    assert torch.equal(part, total.chunk(2)[rank])
    row = torch.zeros(1 + 2 * rank, 1)
    assert group.reduce_scatterv(mine, output=row, sizes=[1, 3]) is row
    assert torch.equal(row, total.split([1, 3])[rank])
    assert torch.equal(group.reduce_scatterv(mine), total.chunk(2)[rank])
    assert torch.equal(group.reduce_scatter_along_dim(mine, dim=0), total.chunk(2)[rank])
    whole = torch.zeros(4, 1)
    (gathered,) = group.all_gatherv(row, sizes=[1, 3], output=whole)
    assert gathered is whole
    assert torch.equal(whole, total)
    leaf = row.clone().requires_grad_()
    pair = group.all_gatherv([leaf, row], sizes=[1, 3])
    pair[0].sum().backward()
    assert torch.equal(pair[1], total)
    assert leaf.grad is not None
    assert leaf.grad.flatten().tolist() == [size] * len(leaf)
    with pytest.raises(UsageError, match="single tensor"):
        group.all_gatherv([row, row], sizes=[1, 3], output=whole)
    # What one rank refuses is refused on the other one.
    with pytest.raises(DisagreementError if rank else UsageError):
        group.all_gatherv(row if rank else [row], sizes=[1, 3], output=whole)
    assert torch.equal(group.all_gatherv(row, sizes=[1, 3])[0], total)
    state.destroy_distributed_environment()


def send_both_ways(rank: int, size: int, directory: Path) -> None:
    group = start(rank, size, directory)
    peer = 1 - rank
    assert group.send_object({rank}, dst=peer, tag=2) == []
    (later,) = group.send_object("later", dst=peer, async_send=True, tag=5)
    assert group.recv_object(src=peer, tag=5) == "later"
    assert group.recv_object(src=peer, tag=2) == {peer}
    later.work.wait()
    received = group.send_recv_tensor_dict({"x": torch.full((3,), rank), "n": rank})
    assert received is not None
    assert received["n"] == peer
    assert received["x"].tolist() == [peer] * 3
    assert group.send_tensor_dict({"x": torch.ones(2)}, peer, None, False) == []
    found = group.recv_tensor_dict(all_gather_group=None)
    assert found is not None
    assert found["x"].tolist() == [1, 1]
    state.destroy_distributed_environment()


def replace_groups(rank: int, size: int, directory: Path) -> None:
    group = start(rank, size, directory, duplicate_tp_group=True, attention_data_parallel_size=2)
    assert state.get_attn_tp_group().ranks == [rank]
    assert state.get_moe_tp_group() is group
    assert state.get_dcp_group_no_assert() is None
    draft = state.get_attn_tp_group()
    with state.patch_tensor_parallel_group(draft, owns_attention=True):
        assert state.get_tp_group() is state.get_moe_tp_group() is draft
        with pytest.raises(UsageError, match="moe_ep"):
            state.get_moe_ep_group()
        with pytest.raises(UsageError, match="replaced already"):
            state.patch_tensor_parallel_group(group, owns_attention=False).__enter__()
    assert state.get_tp_group() is group
    with state.pdmux_prefill_tp_group():
        assert state.get_tp_group() is not group
        assert state.get_tp_group().all_gather_object(rank) == [0, 1]
    custom = state.create_custom_parallel_group([1, 0])
    value = torch.ones(1)
    dist.all_reduce(value, group=custom)
    assert value.item() == size
    with pytest.raises(UsageError, match=r"not so for rank 1 with \[0\]"):
        state.create_custom_parallel_group([0])
    with pytest.raises(UsageError, match="ranks change"):
        state.init_model_parallel_group([[0, 1]], rank, "gloo", rank_offset=2)
    with state.graph_capture() as context:
        assert context.stream is None
    state.destroy_model_parallel()
    assert not state.model_parallel_is_initialized()
    state.destroy_distributed_environment()


def create_and_wait(rank: int) -> None:
    with state.init_model_parallel_group([[0, 1]], rank, "gloo") as group:
        group.barrier(timeout_s=60.0)


def interrupt_creation(rank: int, size: int, directory: Path) -> None:
    state.init_distributed_environment(size, rank, f"file://{directory}/world", rank, "gloo")
    if rank == 0:
        struck = mock.patch.object(SglangGroupCoordinator, "_describe", side_effect=KeyboardInterrupt)
        with struck, pytest.raises(KeyboardInterrupt):
            state.init_model_parallel_group([[0, 1]], rank, "gloo")
    else:
        # In the creation already, if it still waits until both have mapped the memory.
        with pytest.raises(PeerLostError) as caught:
            create_and_wait(rank)
        assert caught.value.peers == (0,)
    state.get_world_group().barrier()
    state.destroy_distributed_environment()


@pytest.mark.guarantee("G37")
def test_an_interrupted_constructor_leaves_no_group(ranks2: RankPool) -> None:
    """The other rank, which has its group, learns that this one has none."""
    ranks2.run(interrupt_creation)


@pytest.mark.parametrize("body", [call_with_outputs, send_both_ways, replace_groups])
def test_calls_have_the_forms_of_sglang(ranks2: RankPool, body: Any) -> None:
    """Outputs, lists and open sends go where SGLang expects them; scopes replace groups and put them back."""
    ranks2.run(body)


def test_widths_divide_a_stage_as_sglang_does() -> None:
    """Eight ranks: attention as 2 contexts of 4, experts as 2 copies of 4, as SGLang's documentation lays them out."""
    widths = Widths(world=8, tp=8, pp=1, attn_dp=1, attn_cp=2, moe_ep=4, moe_dp=2, dcp=2, shared_experts_tp=2)
    tables = widths.tables()
    assert tables["tp"] == [list(range(8))]
    assert tables["attn_cp"] == tables["moe_dp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert tables["attn_tp"] == tables["moe_ep"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert tables["dcp"] == tables["shared_experts_tp"] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert tables["moe_tp"] == tables["pp"] == [[rank] for rank in range(8)]


def test_equal_widths_share_a_group() -> None:
    """Dimensions as wide as a stage use its group; copies of the experts may use the one of the contexts."""
    widths = Widths(world=8, tp=4, pp=2, attn_dp=1, attn_cp=4, moe_ep=4, moe_dp=1, dcp=1, shared_experts_tp=1)
    assert widths.aliases() == {"attn_cp": "tp", "moe_ep": "tp", "moe_dp": "tp"}
    assert widths.tables()["pp"] == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tp": 3}, "world's 4"),
        ({"dcp": 3}, "dcp = 3"),
        ({"moe_ep": 0}, "positive"),
        ({"shared_experts_tp": 3}, "attn_tp"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, int], text: str) -> None:
    """An error names the size."""
    fitting = {"world": 4, "tp": 4, "pp": 1, "attn_dp": 1, "attn_cp": 1, "moe_ep": 1, "moe_dp": 1}
    with pytest.raises(UsageError, match=text):
        Widths(**{**fitting, "dcp": 1, "shared_experts_tp": 1, **change})
