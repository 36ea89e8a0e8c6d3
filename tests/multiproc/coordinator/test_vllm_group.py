"""The groups that vLLM makes through our plugin: sums in place, and the queues that vLLM asks for."""

from __future__ import annotations

import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from coordinator import GroupCoordinator
from coordinator.integrations.vllm.group import STATE, VllmGroupCoordinator
from coordinator.integrations.vllm.message_queue import MessageQueue, MessageQueueHandle
from shm_broadcast.errors import CapabilityError, DisagreementError, PeerLostError, UsageError
from tests.harness import RankPool
from tests.worlds import meet, world

DEADLINE_S = 20.0


@contextmanager
def vllm_group(
    first: GroupCoordinator, current: object = None, *, use_all2all: bool = False
) -> Iterator[VllmGroupCoordinator]:
    """Make a group of the ranks of `first`, where `current` is the configuration of vLLM at the moment."""
    config: Any = types.ModuleType("vllm.config")
    config.get_current_vllm_config_or_none = lambda: current
    sys.modules["vllm.config"] = config
    try:
        with VllmGroupCoordinator(
            [first.ranks], first.local_rank, "gloo", True, group_name="tp", use_all2all=use_all2all
        ) as group:
            yield group
    finally:
        del sys.modules["vllm.config"]


def configuration(**changes: Any) -> object:
    """Return a configuration of vLLM with what the groups read of it."""
    found = {
        "enable_elastic_ep": False,
        "enable_expert_parallel": False,
        "nnodes_within_dp": 1,
        "local_world_size": 1,
        **changes,
    }
    return types.SimpleNamespace(parallel_config=types.SimpleNamespace(**found))


def sums(rank: int, world_size: int, directory: Path) -> None:
    # Import this before there is a world, because torch keeps the present world as a default argument.
    import torch._dynamo

    with world(rank, world_size, directory) as first, vllm_group(first) as group:
        expected = [[3.0, 3.0]]
        with torch.inference_mode():
            tensor = torch.full((1, 2), rank + 1.0)
            assert group.all_reduce(tensor) is tensor
            assert tensor.tolist() == expected
        # Every other form, and a call that may need gradients, leaves its input as it is.
        tensor = torch.full((1, 2), rank + 1.0)
        assert group.all_reduce(tensor).tolist() == expected
        assert group.all_reduce(tensor, timeout_s=DEADLINE_S).tolist() == expected
        assert group.all_reduce(tensor, out=torch.empty(1, 2)).tolist() == expected
        assert group.all_reduce(tensor, async_op=True).wait().tolist() == expected
        compiled = torch.compile(group.all_reduce, fullgraph=True, backend="eager")
        assert compiled(tensor).tolist() == expected
        assert tensor.tolist() == [[rank + 1.0] * 2]
        loss = torch.full((1, 2), rank + 1.0, requires_grad=True)
        weighted = group.all_reduce(loss * 1.0)
        assert weighted.requires_grad
        weighted.sum().backward()
        assert loss.grad is not None
        torch._dynamo.reset()


def test_a_plain_sum_is_done_in_place(compilers2: RankPool) -> None:
    """As with vLLM's communicator for CPUs; other forms of the call create a tensor, and keep gradients."""
    compilers2.run(sums)


def queues(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as first, vllm_group(first) as group:
        between = group.create_mq_broadcaster(1)
        assert isinstance(between, MessageQueue)
        assert between.broadcast_object("weights" if rank == 1 else None) == "weights"
        with pytest.raises(UsageError, match="have their ends"):
            between.export_handle()

        # The executor's queue, whose handle rank 0 alone holds.
        requests = MessageQueue(2, 2) if rank == 0 else None
        handle = None if requests is None else requests.export_handle()
        reader = group.create_mq_broadcaster(0, handle)
        if requests is not None:
            requests.enqueue(("execute", 1))
        assert reader.dequeue(DEADLINE_S) == ("execute", 1)

        # A queue from every rank to the executor, which is rank 1's process here.
        answers, handles = group.create_single_reader_mq_broadcasters(1)
        assert len(handles) == (2 if rank == 1 else 0)
        ends = [MessageQueue.create_from_handle(each, 0) for each in handles]
        answers.enqueue(("done", rank))
        assert [end.dequeue(DEADLINE_S) for end in ends] == [("done", each) for each in range(len(ends))]
        group.barrier()

        found = []
        for error, give in (
            (UsageError, object()),
            (CapabilityError, MessageQueueHandle(b"no handle", bytes(32))),
        ):
            with pytest.raises(error) as caught:
                group.create_mq_broadcaster(0, give if rank == 0 else None)  # type: ignore[arg-type]
            found.append(type(caught.value).__name__)
        with pytest.raises(UsageError, match="blocking=False"):
            group.create_single_reader_mq_broadcasters(0, blocking=True)
        # Whatever was refused, the group works on.
        assert group.all_gather_object(rank) == [0, 1]
        for end in (between, reader, answers, *ends, *([] if requests is None else [requests])):
            end.shutdown()
        return found


def test_the_queues_that_vllm_asks_for(ranks2: RankPool) -> None:
    """Between ranks, from the executor and to it; a bad handle of one rank is refused on all."""
    assert ranks2.run(queues) == [["UsageError", "CapabilityError"]] * 2


REFUSED: dict[str, tuple[Callable[[VllmGroupCoordinator, int], Any], tuple[int, int], tuple[int, int]]] = {
    # The call, and its argument on both ranks where the first or the second one refuses it.
    "create_mq_broadcaster": (lambda group, writer: group.create_mq_broadcaster(writer), (9, 0), (0, 9)),
    "create_single_reader_mq_broadcasters": (
        lambda group, reader: group.create_single_reader_mq_broadcasters(reader),
        (9, 0),
        (0, 9),
    ),
    "with blocking: create_single_reader_mq_broadcasters": (
        lambda group, flag: group.create_single_reader_mq_broadcasters(0, blocking=bool(flag)),
        (1, 0),
        (0, 1),
    ),
}


def refused_queues(rank: int, world_size: int, directory: Path, name: str) -> None:
    make, *rounds = REFUSED[name]
    with world(rank, world_size, directory) as first, vllm_group(first) as group:
        for culprit, arguments in enumerate(rounds):
            with pytest.raises(UsageError if rank == culprit else DisagreementError) as caught:
                make(group, arguments[rank])
            assert rank == culprit or f"rank {culprit} refused {name.rsplit(maxsplit=1)[-1]}: " in str(
                caught.value
            )
            assert group.broadcast_object(rank, 0) == 0
        with pytest.raises(DisagreementError, match="different writers"):
            group.create_mq_broadcaster(rank)
        make_and_meet(group, lambda group: make(group, 0))


@pytest.mark.guarantee("D69")
@pytest.mark.parametrize("name", REFUSED)
def test_a_queue_that_one_rank_refuses_is_refused_on_all(ranks2: RankPool, name: str) -> None:
    """The others would wait for half an hour for its handle, or take its next call for this one."""
    ranks2.run(refused_queues, name)


class StruckError(Exception):
    """What a signal handler raises."""


def struck(*_arguments: Any, **_options: Any) -> None:
    """Take the place of a constructor in which a handler raises."""

    def handler(_number: int, _frame: object) -> None:
        raise StruckError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


MADE_BY: dict[str, tuple[str, Callable[[VllmGroupCoordinator], Any]]] = {
    "to the executor": ("__init__", lambda group: group.create_single_reader_mq_broadcasters(1)),
    "while it is told of": ("export_handle", lambda group: group.create_single_reader_mq_broadcasters(1)),
    "between the ranks": ("of", lambda group: group.create_mq_broadcaster(1)),
}


def make_and_meet(group: VllmGroupCoordinator, make: Callable[[VllmGroupCoordinator], Any]) -> None:
    """Make a queue of which this rank may get its end before the other one is interrupted, and call that one."""
    made = make(group)
    if isinstance(made, tuple):
        made[0].shutdown()
    group.barrier(timeout_s=60.0)


def interrupted_queue(rank: int, world_size: int, directory: Path, way: str) -> None:
    name, make = MADE_BY[way]
    with world(rank, world_size, directory) as first, vllm_group(first) as group:
        meet(rank, range(world_size), directory, "created")
        if rank == 0:
            with mock.patch.object(MessageQueue, name, struck), pytest.raises(StruckError):
                make(group)
        else:
            with pytest.raises(PeerLostError) as caught:
                make_and_meet(group, make)
            assert caught.value.peers == (0,)
            assert "StruckError" in str(caught.value)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("way", MADE_BY)
def test_a_handler_that_raises_while_a_queue_is_made_is_told_to_the_others(
    ranks2: RankPool, way: str
) -> None:
    """They would wait for half an hour. What it raises arrives as it is, though a queue that fails is told of."""
    ranks2.run(interrupted_queue, way)


def on_two_nodes(rank: int, world_size: int, directory: Path) -> Any:
    current = configuration(nnodes_within_dp=2)
    with world(rank, world_size, directory) as first, vllm_group(first, current) as group:
        answers, handles = group.create_single_reader_mq_broadcasters(0)
        found = [(each.local_reader_ranks, each.remote_subscribe_addr is not None) for each in handles]
        # The executor of node 0, which is rank 0's process here, opens them as vLLM does.
        ends = [
            MessageQueue.create_from_handle(each, -1 if is_remote else 0)
            for each, (_, is_remote) in zip(handles, found, strict=True)
        ]
        answers.wait_until_ready()
        answers.enqueue(("done", rank))
        assert [end.dequeue(DEADLINE_S) for end in ends] == [("done", each) for each in range(len(ends))]
        group.barrier()
        for end in (answers, *ends):
            end.shutdown()
        return found


def test_two_nodes_of_vllm_on_one_host_are_two_nodes(ranks2: RankPool) -> None:
    """Each node has an executor of its own, so the first one reads the other's worker over a socket."""
    assert ranks2.run(on_two_nodes)[0] == [[[0], False], [[], True]]


def elastic(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as first:
        with (
            pytest.raises(CapabilityError, match="enable_elastic_ep.*unset VLLM_PLUGINS"),
            vllm_group(first, configuration(enable_elastic_ep=True)),
        ):
            pass
        # No rank has begun to create it, so the next group has the next name and number.
        with vllm_group(first, configuration()) as group:
            assert group.unique_name == "tp:0"
            assert group.all_gather_object(rank) == [0, 1]


def test_an_elastic_engine_is_refused_with_the_remedy(ranks2: RankPool) -> None:
    """Its groups for experts are of a class of vLLM's own, beside which ours cannot work; each rank says so."""
    ranks2.run(elastic)


def experts(rank: int, world_size: int, directory: Path) -> list[Any]:
    state: Any = types.ModuleType(STATE)
    state.get_dp_group = lambda: types.SimpleNamespace(world_size=2)
    sys.modules[STATE] = state
    try:
        with world(rank, world_size, directory) as first:
            with vllm_group(first) as group:
                assert not hasattr(group.device_communicator, "all2all_manager")
            with vllm_group(first, use_all2all=True) as group:
                found: Any = group.device_communicator.all2all_manager  # type: ignore[attr-defined]
                return [found.rank, found.world_size, found.dp_world_size, found.support_fault_tolerance]
    finally:
        del sys.modules[STATE]


def test_a_group_of_experts_has_what_vllm_reads_before_it_dispatches(ranks2: RankPool) -> None:
    """With several replicas of a mixture of experts vLLM asks the communicator for these."""
    assert ranks2.run(experts) == [[0, 2, 2, False], [1, 2, 2, False]]


def refused_experts(rank: int, world_size: int, directory: Path) -> None:
    def get_dp_group() -> None:
        # A rank that leaves at once could keep the other one from having its group.
        meet(rank, range(world_size), directory, "created")
        raise AssertionError("data parallel group is not initialized")

    state: Any = types.ModuleType(STATE)
    state.get_dp_group = get_dp_group
    sys.modules[STATE] = state
    try:
        with world(rank, world_size, directory) as first:
            with (
                pytest.raises(AssertionError, match="data parallel group"),
                vllm_group(first, use_all2all=True),
            ):
                pass
            with vllm_group(first) as group:
                assert group.all_gather_object(rank) == [0, 1]
    finally:
        del sys.modules[STATE]


def test_a_group_whose_constructor_fails_behind_the_creation_is_released(ranks2: RankPool) -> None:
    """What vLLM asserts where it has no data-parallel group yet arrives as it is, and nothing of the group stays."""
    ranks2.run(refused_experts)
