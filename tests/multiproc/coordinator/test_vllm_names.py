"""What vLLM's own modules call and import from `parallel_state`, beside the groups and their sizes."""

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator import (
    CapabilityError,
    CoordinatorSettings,
    DisagreementError,
    GroupCoordinator,
    UsageError,
    parallel_state,
)
from coordinator.testing import FakeGroupCoordinator
from device_comm.handles import PointToPointHandle
from tests.engines import refusal, works
from tests.harness import RankPool
from tests.worlds import ApartPool, HostsPool, new_group, world

CALLED = (
    *("init_distributed_environment", "ensure_model_parallel_initialized", "initialize_model_parallel"),
    *("destroy_model_parallel", "destroy_distributed_environment", "cleanup_dist_env_and_memory"),
    *("model_parallel_is_initialized", "graph_capture", "set_custom_all_reduce", "in_the_same_node_as"),
    *("get_world_group", "get_tp_group", "get_pp_group", "get_dp_group", "get_ep_group", "get_pcp_group"),
    *("get_dcp_group", "get_eplb_group", "get_etp_group", "get_engram_dp_group", "get_inner_dp_world_group"),
    *("get_tensor_model_parallel_world_size", "get_tensor_model_parallel_rank", "get_node_count"),
    *("get_pipeline_model_parallel_rank", "get_dcp_world_size_and_rank", "get_engram_dp_size"),
    *("is_global_first_rank", "is_local_first_rank", "_node_count", "_get_unique_name", "_register_group"),
    *("_split_tensor_dict", "suspend_device_comms", "resume_device_comms", "init_model_parallel_group"),
    *("checkpoint_prepare_distributed_state", "checkpoint_restore_distributed_state"),
    *("_init_stateless_group", "_replace_active_groups", "GroupCoordinator", "TensorMetadata", "Handle"),
)


@pytest.mark.guarantee("G24")
@pytest.mark.parametrize("name", CALLED)
def test_a_name_that_vllm_uses_is_there(name: str) -> None:
    """Its modules import it or call it."""
    assert callable(getattr(parallel_state, name))
    assert inspect.getdoc(getattr(parallel_state, name))


# --- one process --------------------------------------------------------------------------------------------------


def test_without_a_world_this_process_is_first() -> None:
    """Engines ask before they join a world. What needs a world says how to get one."""
    assert parallel_state.is_local_first_rank()
    assert parallel_state.is_global_first_rank()
    assert parallel_state.get_dcp_world_size_and_rank() == (1, 0)
    assert "init_distributed_environment" in refusal(parallel_state.get_node_count)
    assert "initialize_model_parallel" in refusal(parallel_state.get_inner_dp_world_group)


def test_a_tensor_dict_is_split_in_order() -> None:
    """Tensors are replaced by their metadata; everything else stays."""
    first, second = torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(())
    items, tensors = parallel_state._split_tensor_dict({"a": first, "n": [1], "b": second})
    assert items == [
        ("a", parallel_state.TensorMetadata("cpu", torch.bfloat16, torch.Size([2, 3]))),
        ("n", [1]),
        ("b", parallel_state.TensorMetadata("cpu", torch.float32, torch.Size([]))),
    ]
    assert tensors[0] is first
    assert tensors[1] is second
    assert tuple(items[0][1]) == ("cpu", torch.bfloat16, torch.Size([2, 3]))


def test_unique_names_avoid_those_of_groups() -> None:
    """Each call returns another name, and none that a group of this process has."""
    base = "test-unique-names"
    first = parallel_state._get_unique_name(base)
    assert first == f"{base}:0"
    fake = FakeGroupCoordinator(0, 2, group_name=base)
    taken = {fake.unique_name}
    found = {parallel_state._get_unique_name(base) for _ in range(20)}
    assert len(found) == 20
    assert not found & taken
    parallel_state._register_group(fake)
    fake.destroy()
    assert "destroyed" in refusal(lambda: parallel_state._register_group(fake))
    assert "object" in refusal(lambda: parallel_state._register_group(object()))


def test_our_handles_are_handles() -> None:
    """The type that coordinators of engines annotate has the methods of ours."""
    for name in ("is_completed", "wait"):
        assert callable(getattr(parallel_state.Handle, name))
        assert callable(getattr(PointToPointHandle, name))


def test_what_is_not_supported_says_so() -> None:
    """Elastic expert parallelism needs groups without a world."""
    with pytest.raises(CapabilityError, match="group 'dp' without a world"):
        parallel_state._init_stateless_group([[0]], "dp", "127.0.0.1", "gloo", coord_store=None)  # type: ignore[arg-type]
    with pytest.raises(CapabilityError, match="replace groups"):
        parallel_state._replace_active_groups(world=None, dp=None, ep=None, eplb=None, node_count=None)
    for call in (parallel_state.suspend_device_comms, parallel_state.checkpoint_prepare_distributed_state):
        call()
    with pytest.raises(UsageError, match="takes a bool"):
        parallel_state.set_custom_all_reduce(1)  # type: ignore[arg-type]


# --- several ranks ------------------------------------------------------------------------------------------------


class Stateless:
    """A group of another package, which can gather objects."""

    def __init__(self, group: GroupCoordinator) -> None:
        self.all_gather_obj = group.all_gather_object


def on_hosts(rank: int, world_size: int, directory: Path, expected: list[list[bool]]) -> None:
    with world(rank, world_size, directory) as group:
        foreign = dist.new_group(backend="gloo")
        reverse = dist.new_group(list(range(world_size)), backend=dist.get_backend(group.device_group))
        sibling = group.make_sibling_device_group()
        known: list[Any] = [group, group.cpu_group, group.device_group, group.as_process_group(), sibling]
        for each in (*known, foreign, reverse, Stateless(group)):
            for source in range(world_size):
                assert parallel_state.in_the_same_node_as(each, source) == expected[source]
        count = len(set(map(tuple, expected)))
        assert parallel_state.get_node_count() == count
        assert parallel_state._node_count(foreign) == parallel_state._node_count(group.cpu_group) == count
        part = group.create_subgroup([3, 0])
        if part is not None:
            assert parallel_state.in_the_same_node_as(part) == [expected[3][3], expected[3][0]]
            part.destroy()
        wrong: Any
        for wrong in (world_size, -1, True, "0"):
            assert "source_rank" in refusal(partial(parallel_state.in_the_same_node_as, group, wrong))
        assert "not list" in refusal(lambda: parallel_state.in_the_same_node_as([0, 1]))
        assert parallel_state.is_local_first_rank() == (group.local_rank == 0)
        works(group)
        for made in (foreign, reverse):
            dist.destroy_process_group(made)


@pytest.mark.parametrize("places", ["aaaa", "aabb", "abab", "abcd"])
def test_ranks_of_one_host_are_found(ranks4: RankPool, places: str) -> None:
    """The answer is the same for every kind of group, and needs no message where the group is ours."""
    expected = [[mine == other for other in places] for mine in places]
    HostsPool(ranks4, places).run(on_hosts, expected)


def foreign_world(rank: int, world_size: int, directory: Path) -> None:
    store = dist.FileStore(f"{directory}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        assert parallel_state.is_local_first_rank() == (rank == 0)
        assert parallel_state.in_the_same_node_as(dist.group.WORLD, 1) == [True, True]
    finally:
        dist.destroy_process_group()


def test_a_world_that_is_not_ours_has_hosts_too(ranks2: RankPool) -> None:
    """Without a group of ours, the ranks exchange where they are."""
    ranks2.run(foreign_world)


def silent(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            # The other rank does not take part.
            assert parallel_state.in_the_same_node_as(group.cpu_group) == [True, False]
            assert parallel_state.get_node_count() == 2
        group.barrier()


def test_a_group_of_ours_knows_its_hosts(ranks2: RankPool) -> None:
    """One rank may ask alone."""
    ApartPool(ranks2).run(silent)


def memory(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        parallel_state.suspend_device_comms()
        works(group)
        parallel_state.resume_device_comms()
        for call in (
            parallel_state.checkpoint_prepare_distributed_state,
            parallel_state.checkpoint_restore_distributed_state,
        ):
            with pytest.raises(CapabilityError, match="'world:0' holds memory"):
                call()
        works(group)


def test_groups_on_the_cpu_have_no_device_memory(ranks2: RankPool) -> None:
    """Suspending them is done at once. A checkpoint of one of several processes is refused, and nothing breaks."""
    ranks2.run(memory)


def forbidden(rank: int, world_size: int, directory: Path) -> list[bool]:
    found = []
    allowed = CoordinatorSettings.resolve({}, create_timeout_s=20.0, cuda={"custom_all_reduce": True})
    with world(rank, world_size, directory) as group:
        try:
            parallel_state.set_custom_all_reduce(False)
            assert group.settings.cuda.custom_all_reduce
            with (
                new_group(group) as later,
                parallel_state.init_model_parallel_group([[0, 1]], rank, "gloo") as other,
            ):
                found += [later.settings.cuda.custom_all_reduce, other.settings.cuda.custom_all_reduce]
            parallel_state.initialize_model_parallel(2)
            found.append(parallel_state.get_tp_group().settings.cuda.custom_all_reduce)
            parallel_state.destroy_model_parallel()
            if rank:
                parallel_state.set_custom_all_reduce(True)
            with pytest.raises(DisagreementError, match=r"cuda\.custom_all_reduce"):
                GroupCoordinator([[0, 1]], rank, "gloo", True, settings=allowed)
        finally:
            parallel_state.set_custom_all_reduce(True)
        with new_group(group) as last, new_group(group, cuda={"custom_all_reduce": False}) as off:
            found += [last.settings.cuda.custom_all_reduce, off.settings.cuda.custom_all_reduce]
    return found


def test_custom_all_reduce_can_be_forbidden_for_later_groups(ranks2: RankPool) -> None:
    """It changes the settings of groups that are created later, however; ranks that differ find out."""
    assert ranks2.run(forbidden) == [[False, False, False, True, False]] * 2


# --- the constructor ----------------------------------------------------------------------------------------------


def constructor(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        ranks = torch.arange(world_size).reshape(1, -1)
        wrong: list[tuple[Any, str]] = [
            (ranks, r"group_ranks must be a list, not torch.Tensor; pass group_ranks.tolist()"),
            (ranks.numpy(), r"group_ranks must be a list, not numpy.ndarray; pass group_ranks.tolist()"),
            (list(ranks), "group_ranks[0] must be a list, not torch.Tensor; pass [ranks.tolist() for"),
            ([list(ranks[0])], "group_ranks[0] holds tensor(0), which is not a rank; pass a list of int"),
            (None, "group_ranks must be a list, not builtins.NoneType"),
            ([0, 1], "group_ranks[0] must be a list, not builtins.int"),
            ("01", "group_ranks must be a list, not builtins.str"),
        ]
        for value, part in wrong:
            text = refusal(lambda value=value: GroupCoordinator(value, rank, "gloo", True))  # type: ignore[misc]
            assert part in text, text
        with GroupCoordinator(
            group_ranks=ranks.tolist(),
            local_rank=rank,
            torch_distributed_backend="gloo",
            use_device_communicator=True,
            use_message_queue_broadcaster=False,
            group_name="ep",
            use_all2all=True,
        ) as ep:
            assert ep.use_all2all
            assert not group.use_all2all
            assert ep.device_index == ep.local_rank == rank
            assert ep.backend == ep.torch_distributed_backend == "gloo"
            assert ep.use_custom_op_call
            assert ep.use_cpu_custom_send_recv
            works(ep)


def test_the_constructor_takes_what_engines_pass(ranks2: RankPool) -> None:
    """A keyword of engines changes nothing, and a tensor of ranks is refused with the call that makes it a list."""
    ranks2.run(constructor)


def apart(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        assert not group.use_cpu_custom_send_recv


def test_only_ranks_of_one_host_share_memory_for_tensor_dicts(ranks2: RankPool) -> None:
    """Between hosts the attribute that engines ask for is false."""
    ApartPool(ranks2).run(apart)
