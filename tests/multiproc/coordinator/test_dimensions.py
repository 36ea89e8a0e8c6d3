"""Each dimension of a layout has a group of its own, whatever ranks other dimensions have; which groups there are."""

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from coordinator import (
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    GroupCoordinator,
    ParallelGroups,
    ParallelLayout,
    UsageError,
    current_groups,
    destroy_model_parallel,
    get_tp_group,
    get_world_group,
    initialize_model_parallel,
)
from coordinator.groups import DIMENSIONS
from coordinator.parallel_state import (
    ensure_model_parallel_initialized,
    get_dcp_group,
    get_dcp_world_size_and_rank,
    get_dp_group,
    get_ep_group,
    get_eplb_group,
    get_inner_dp_world_group,
    get_pcp_group,
)
from tests.engines import refusal, works
from tests.harness import RankPool
from tests.worlds import world

# --- groups of equal ranks ----------------------------------------------------------------------------------------


def use_often(group: GroupCoordinator, errors: list[BaseException]) -> None:
    try:
        for number in range(100):
            total = group.all_reduce(torch.full((300,), float(group.rank + number)))
            assert total[0].item() == sum(group.ranks) + number * group.world_size
            assert group.all_gather_object((number, group.rank)) == [(number, rank) for rank in group.ranks]
            group.barrier()
    except BaseException as error:
        errors.append(error)
        raise


def at_the_same_time(rank: int, world_size: int, directory: Path) -> None:
    with (
        world(rank, world_size, directory) as everyone,
        ParallelGroups.create(ParallelLayout(tensor=world_size)) as groups,
    ):
        errors: list[BaseException] = []
        # The ranks start their threads in different orders, and no call of one group waits for the other's.
        used = [everyone, groups.tp, groups.ep]
        threads = [
            threading.Thread(target=use_often, args=(group, errors))
            for group in (used if rank == 0 else used[::-1])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


@pytest.mark.guarantee("G21")
def test_threads_use_groups_of_equal_ranks_at_the_same_time(ranks2: RankPool) -> None:
    """World, tp and ep have the same ranks. Each has its own order of calls, so three threads do not collide."""
    ranks2.run(at_the_same_time)


def lives_apart(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone:
        initialize_model_parallel(world_size)
        groups = current_groups()
        assert groups.world is everyone is get_world_group()
        assert get_tp_group().unique_name == "tp:0"
        assert get_ep_group().unique_name == "ep:0"
        assert get_tp_group().ranks == get_ep_group().ranks == everyone.ranks
        tp = get_tp_group()
        assert isinstance(tp.cpu_group, dist.ProcessGroup)
        assert tp.cpu_group is not groups.ep.cpu_group
        # A failure of one group is no failure of the other.
        if rank == 0:
            with pytest.raises(CommTimeoutError):
                tp.barrier(timeout_s=0.2)
        everyone.barrier()
        with pytest.raises((CommTimeoutError, GroupBrokenError)):
            tp.barrier()
        assert tp._health.is_broken
        works(groups.ep)
        works(everyone)
        destroy_model_parallel()
        assert "destroyed" in repr(tp)
        assert "destroyed" in repr(groups.ep)
        works(everyone)
        initialize_model_parallel(world_size)
        assert get_tp_group().unique_name == "tp:1"
        works(get_tp_group())
        destroy_model_parallel()
        works(everyone)


@pytest.mark.guarantee("G21")
def test_a_group_lives_and_fails_apart_from_others_of_equal_ranks(ranks2: RankPool) -> None:
    """Its name is that of its dimension. `destroy_model_parallel` destroys it, and leaves the world alone."""
    ranks2.run(lives_apart)


# --- decode context, external data, extra groups ------------------------------------------------------------------


def decode_context(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        assert get_dcp_world_size_and_rank() == (1, 0)
        initialize_model_parallel(4, 1, 1, 2)
        assert get_dcp_group().ranks == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert get_dcp_world_size_and_rank() == (2, rank % 2)
        assert get_dcp_world_size_and_rank(enabled=False) == (1, 0)
        works(get_dcp_group())
        ensure_model_parallel_initialized(4, 1, 1, 2)
        for size in (1, None, 4):
            assert "the decode context parallel group has 2 ranks" in refusal(
                lambda size=size: ensure_model_parallel_initialized(4, 1, 1, size)  # type: ignore[misc]
            )
        destroy_model_parallel()
        assert get_dcp_world_size_and_rank() == (1, 0)
        # Context first, then tensor: the group of rank 0 has both tensor ranks, each with both of its context ranks.
        initialize_model_parallel(2, 1, 2, 4)
        assert get_dcp_group().ranks == [0, 2, 1, 3]
        assert get_pcp_group().ranks == [rank % 2, rank % 2 + 2]
        works(get_dcp_group())
        destroy_model_parallel()
        assert "possible sizes: 1, 2, 4" in refusal(lambda: initialize_model_parallel(2, 1, 2, 3))


@pytest.mark.guarantee("G23")
def test_decode_context_groups_reuse_tensor_and_context_ranks(ranks4: RankPool) -> None:
    """They are runs of the ranks of a stage, context first. Another size is found by a later check."""
    ranks4.run(decode_context)


def token_groups(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        for sizes, expert, expected in (
            ((2, 1, 1), None, get_dp_group),
            ((2, 1, 2), None, get_pcp_group),
            ((4, 1, 1), None, get_pcp_group),
            ((1, 1, 2), None, None),
            ((2, 1, 1), 2, None),
        ):
            initialize_model_parallel(*sizes, expert_parallel_size=expert)
            assert get_ep_group().token_group is (expected() if expected else None), (sizes, expert)
            destroy_model_parallel()


@pytest.mark.guarantee("D62")
def test_replicas_or_context_ranks_exchange_tokens_that_are_not_sharded(ranks4: RankPool) -> None:
    """The group is the data-parallel or the context group; with both, or with small expert groups, it is unset."""
    ranks4.run(token_groups)


def external_data(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone:
        initialize_model_parallel(2, data_parallel_size=1)
        own = [rank // 2 * 2, rank // 2 * 2 + 1]
        assert get_tp_group().ranks == get_ep_group().ranks == own
        assert get_dp_group().ranks == [rank]
        assert get_world_group() is everyone
        works(get_tp_group())
        mesh = current_groups().device_mesh
        assert mesh.mesh_dim_names == ("tp",)
        assert mesh.mesh.tolist() == own
        assert mesh.get_group("tp") is get_tp_group().device_group
        # The replicas are independent: one of them works while the other does nothing.
        if rank < 2:
            works(get_tp_group())
        assert "replica" in refusal(get_inner_dp_world_group)
        destroy_model_parallel()
        assert "cannot be divided into replicas of 6 ranks" in refusal(
            lambda: initialize_model_parallel(2, data_parallel_size=3)
        )
        with ParallelGroups.from_sizes(data_parallel_size=2, expert_parallel_size=1) as groups:
            assert groups.layout == ParallelLayout(data=2, external_data=2, expert=1)
            assert groups.dp.ranks == own
            assert groups.ep.ranks == [rank]


@pytest.mark.guarantee("G23")
def test_external_replicas_share_no_group_but_the_world(ranks4: RankPool) -> None:
    """A world of four with tensor 2 and data 1 holds two independent replicas; their meshes are apart too."""
    ranks4.run(external_data)


def extra_groups(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone:
        initialize_model_parallel(4)
        assert get_inner_dp_world_group() is everyone
        assert "extra_groups" in refusal(get_eplb_group)
        destroy_model_parallel()
        initialize_model_parallel(2, extra_groups=("replica", "eplb"))
        groups = current_groups()
        assert list(groups.by_name()) == [*DIMENSIONS, "replica", "eplb"]
        assert get_inner_dp_world_group() is groups.replica
        assert get_inner_dp_world_group().ranks == groups.tp.ranks
        assert get_eplb_group().ranks == groups.ep.ranks == everyone.ranks
        assert get_eplb_group().unique_name == "eplb:0"
        works(get_eplb_group())
        works(get_inner_dp_world_group())
        destroy_model_parallel()
        assert "destroyed" in repr(groups.eplb)
        assert "destroyed" in repr(groups.replica)
        with pytest.raises(UsageError, match="extra_groups may hold"):
            ParallelGroups.create(ParallelLayout(tensor=4), extra_groups=["tp"])  # type: ignore[list-item]
        with pytest.raises(DisagreementError, match="groups"):
            ParallelGroups.create(ParallelLayout(tensor=4), extra_groups=["eplb"] if rank else [])
        works(everyone)


def test_groups_that_few_engines_need_are_created_on_request(ranks4: RankPool) -> None:
    """Without a request the getter says how to make one; ranks that request different groups all learn of it."""
    ranks4.run(extra_groups)


# --- compiled getters ---------------------------------------------------------------------------------------------


def summed(x: torch.Tensor) -> torch.Tensor:
    return get_tp_group().all_reduce(x) + get_dp_group().world_size


def compiled(rank: int, world_size: int, directory: Path) -> None:
    import torch._dynamo

    with world(rank, world_size, directory):
        torch._dynamo.reset()
        run = torch.compile(summed, fullgraph=True, backend="eager")
        x = torch.full((2,), float(rank + 1))
        tensor, data = (
            ParallelGroups.create(layout) for layout in (ParallelLayout(tensor=2), ParallelLayout(data=2))
        )
        for _ in range(2):
            with tensor.as_current():
                assert torch.equal(run(x), torch.full((2,), 4.0))
            with data.as_current():
                assert torch.equal(run(x), x + 2)
        for groups in (data, tensor):
            groups.destroy()
        for _ in range(2):
            # A graph for groups that were destroyed is not used for those that came after them.
            initialize_model_parallel(2)
            assert torch.equal(run(x), torch.full((2,), 4.0))
            destroy_model_parallel()
        torch._dynamo.reset()


@pytest.mark.guarantee("G22")
def test_a_compiled_function_uses_the_groups_of_its_caller(compilers2: RankPool) -> None:
    """The function is compiled again when the groups change, and never calls those for which it was compiled."""
    compilers2.run(compiled)
