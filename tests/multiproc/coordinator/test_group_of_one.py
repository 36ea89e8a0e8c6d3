"""In a group of one rank every method works and returns its input."""

from pathlib import Path
from typing import Any

import torch

from coordinator import GroupCoordinator, get_pp_group, get_tp_group
from tests.engines import Layer, engine, refusal
from tests.harness import RankPool, run_ranks


def alone(group: GroupCoordinator) -> None:
    """Call every method on a group of one, where each result is the input object."""
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
    assert group.broadcast_tensor_dict(None) is None
    assert group.send_tensor_dict(tensors, async_send=True) is tensors
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
    with group.graph_capture(stream=None) as context:
        assert context.stream is None
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
    """Results are the inputs, nothing is copied, and a call that needs a peer raises a UsageError."""
    ranks2.run(groups_of_one)


def test_a_world_of_one_works() -> None:
    """One process can create all dimensions with size one."""
    run_ranks(groups_of_one, 1)
