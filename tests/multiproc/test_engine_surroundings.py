"""What engines do around the collectives: torch's own functions, graphs, models, subclasses, groups of one."""

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator import (
    GraphCaptureContext,
    GroupCoordinator,
    get_dp_group,
    get_pp_group,
    get_tp_group,
    graph_capture,
)
from tests.engines import engine, refusal
from tests.harness import RankPool, run_ranks
from tests.worlds import new_group, world

# --- torch's own functions --------------------------------------------------------------------------------------


def torch_functions(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2, pp=2):
        pp = get_pp_group()
        for group in (pp.cpu_group, pp.device_group, pp.make_sibling_device_group("pp_broadcast")):
            assert dist.get_rank(group) == group.rank() == pp.rank_in_group
            assert dist.get_world_size(group) == group.size() == 2
            assert dist.get_process_group_ranks(group) == pp.ranks
            assert dist.get_global_rank(group, 1) == pp.last_rank
            tensor = torch.full((2,), rank)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [sum(pp.ranks)] * 2
            tensor = torch.full((2,), rank)
            dist.broadcast(tensor, src=pp.last_rank, group=group)
            assert tensor.tolist() == [pp.last_rank] * 2
            gathered = torch.empty(4, dtype=torch.int64)
            with warnings.catch_warnings():
                # Newer torch has another name for it; engines call this one.
                warnings.simplefilter("ignore", FutureWarning)
                dist.all_gather_into_tensor(gathered, torch.full((2,), rank), group=group)
            assert gathered.tolist() == [pp.first_rank] * 2 + [pp.last_rank] * 2
            work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait()
            if pp.is_first_rank:
                dist.send(tensor, dst=pp.next_rank, group=group)
            else:
                dist.recv(tensor, src=pp.prev_rank, group=group)
            dist.barrier(group=group)
        assert pp.make_sibling_device_group() is not pp.make_sibling_device_group()
        # Groups that an engine makes for itself, with the world's backend and with another.
        for backend in (None, "gloo"):
            mine = dist.new_group(list(range(world_size)), backend=backend)
            tensor = torch.ones(1)
            dist.all_reduce(tensor, group=mine)
            assert tensor.item() == world_size
            dist.destroy_process_group(mine)
        dp = get_dp_group()
        assert dp.world_size == 1
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=dp.cpu_group)
        dist.all_reduce(tensor, group=dp.device_group)
        assert tensor.item() == 1
        assert pp.all_reduce(torch.ones(1)).item() == 2


def test_torch_functions_take_the_groups_process_groups(ranks4: RankPool) -> None:
    """`cpu_group`, `device_group` and siblings are process groups like any, beside our own calls."""
    ranks4.run(torch_functions)


def asked_by_one_rank(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as first:
        for _ in range(3):
            with new_group(first) as group:
                if rank == 0:
                    assert group.cpu_group.size() == group.device_group.size() == 2
                    assert group.cpu_group is group.cpu_group
                    assert group.cpu_group is not group.device_group
                group.barrier()
        group = new_group(first)
        if rank == 0:
            dist.send(torch.ones(2), 1, group=group.cpu_group)
            group.barrier()
        else:
            into = torch.zeros(2)
            dist.recv(into, 0, group=group.cpu_group)
            assert into.tolist() == [1.0, 1.0]
            group.barrier()
        group.destroy()


def test_one_rank_alone_may_ask_for_its_process_group(ranks2: RankPool) -> None:
    """Nothing waits for the others before ranks talk to each other; what was made goes with the group."""
    ranks2.run(asked_by_one_rank)


# --- graphs, models, subclasses ---------------------------------------------------------------------------------


class Layer(torch.nn.Module):
    """A layer that wants to know which group it communicates over."""

    prepared_for: GroupCoordinator | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 64))

    def prepare_communication_buffer(self, group: GroupCoordinator) -> None:
        self.prepared_for = group


class Counting(GroupCoordinator):
    """An engine's own subclass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reductions = 0

    def all_reduce(self, input_: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        self.reductions += 1
        return super().all_reduce(input_, *args, **kwargs)


def around_models(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory, tp=2):
        tp = get_tp_group()
        first, last = Layer(), Layer()
        tp.prepare_communication_buffer_for_model(torch.nn.Sequential(first, torch.nn.Linear(2, 2), last))
        assert first.prepared_for is last.prepared_for is tp
        assert "torch.nn.Module" in refusal(lambda: tp.prepare_communication_buffer_for_model(1))  # type: ignore[arg-type]
        given = GraphCaptureContext()
        with tp.graph_capture() as context, tp.graph_capture(given) as same:
            assert isinstance(context, GraphCaptureContext)
            assert same is given
            assert tp.all_reduce(torch.ones(1)).item() == 2
        with graph_capture(device=torch.device("cpu")) as context:
            assert hasattr(context, "stream")
            assert get_tp_group().all_reduce(torch.ones(1)).item() == 2
        with Counting([[0, 1]], rank, "gloo", True, group_name="mine") as group:
            assert group.all_reduce(torch.ones(1)).item() == 2
            assert group._all_reduce_out_place(torch.ones(1)).item() == 2
            assert group._all_gather_out_place(torch.tensor([[rank]]), 0).flatten().tolist() == [0, 1]
            assert group._reduce_scatter_out_place(torch.ones(2), 0).tolist() == [2]
            assert group.reductions == 2


def test_models_captures_and_subclasses_work(ranks2: RankPool) -> None:
    """Hooks of a model's layers, the capture contexts of a group and of the module, and an overridden method."""
    ranks2.run(around_models)


# --- a group of one ---------------------------------------------------------------------------------------------


def alone(group: GroupCoordinator) -> None:
    """Call every method on a group of one, where results are the inputs themselves."""
    x, y = torch.arange(6.0).view(2, 3), torch.empty(2, 3)
    tensors = {"x": x, "n": 1}
    for call in (
        group.all_reduce,
        group.all_gather,
        group.all_gatherv,
        group.reduce_scatter,
        group.reduce_scatterv,
        group.reduce,
        group.gather,
        group.all_to_all,
        group.broadcast,
        group.all_reduce_,
    ):
        assert call(x) is x
    assert group.all_gatherv([x, y], 0, [2])[1] is y
    assert torch.equal(group.reduce_scatterv_into_output(x, y), x)
    assert group.scatter(y.zero_(), x) is y
    assert torch.equal(y, x)
    assert all(got is sent for got, sent in zip(group.dispatch(x, y), (x, y), strict=True))
    assert group.dispatch(x, y, extra_tensors=[x])[2][0] is x  # type: ignore[misc]
    assert group.combine(x) is x
    assert group.broadcast_object(tensors) is tensors
    objects = [1, 2]
    assert group.broadcast_object_list(objects) is objects
    assert group.all_gather_object(x)[0] is x
    assert group.gather_object("x") == ["x"]
    assert group.broadcast_tensor_dict(tensors) is tensors
    assert group.send_tensor_dict(tensors) is tensors
    assert group.isend_tensor_dict(tensors) == []
    assert group.recv_tensor_dict() is None
    assert group.irecv_tensor_dict() == (None, [], [])
    for refused in (
        lambda: group.send(x),
        lambda: group.recv(x.shape, x.dtype),
        lambda: group.send_object(1, 0),
        lambda: group.recv_object(0),
        lambda: group.send(x, 1),
    ):
        refusal(refused)
    group.barrier()
    writer: Any = group.create_mq_broadcaster()
    writer.enqueue("nobody reads it")
    answer, answers = group.create_single_reader_mq_broadcasters()
    answer.enqueue("to itself")
    assert [each.dequeue() for each in answers] == ["to itself"]
    assert group.mq_broadcaster is None
    with group.graph_capture():
        pass
    group.prepare_communication_buffer_for_model(Layer())
    assert group.cpu_group.size() == group.device_group.size() == 1
    assert group.make_sibling_device_group().size() == 1
    assert group.is_first_rank
    assert group.is_last_rank
    assert group.next_rank == group.prev_rank == group.rank


def groups_of_one(rank: int, world_size: int, directory: Path) -> None:
    with engine(rank, world_size, directory):
        with GroupCoordinator([[each] for each in range(world_size)], rank, "gloo", True, True) as group:
            alone(group)
        alone(get_pp_group())
        alone(get_tp_group())


def test_every_method_works_in_a_group_of_one(ranks2: RankPool) -> None:
    """Results are the inputs, nothing is copied, and what needs a peer is a UsageError."""
    ranks2.run(groups_of_one)


def test_a_world_of_one_works() -> None:
    """One process with all dimensions of size one."""
    run_ranks(groups_of_one, 1)
