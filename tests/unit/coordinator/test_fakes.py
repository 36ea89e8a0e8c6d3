"""Fake groups run in one process and compute results as if every rank held the same."""

import pathlib
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coordinator import (
    BitwiseOperation,
    ClosedError,
    GroupCoordinator,
    P2POperation,
    ParallelGroups,
    ParallelLayout,
    UsageError,
    current_groups,
    functional,
    get_tp_group,
    graph_capture,
    premul_sum,
)
from coordinator.groups import DIMENSIONS
from coordinator.testing import FakeGroupCoordinator, fake_groups
from device_comm.health import GroupHealth
from tests.fake_groups import TABLE, tensor_dict
from tests.strict import STRICT

ROOT = pathlib.Path(__file__).parents[3]


@pytest.mark.guarantee("G9")
def test_a_handler_that_destroys_a_group_as_it_begins_to_end_is_the_only_one_to_release_it(
    group: FakeGroupCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second release at the same time could skip what must be closed."""
    struck = iter([True])

    def strike(self: GroupHealth) -> bool:
        if next(struck, False):
            group.destroy()
        return False

    releases = list[float]()
    monkeypatch.setattr(GroupHealth, "is_inherited", property(strike))
    monkeypatch.setattr(group, "_release", releases.append)
    group.destroy()
    assert len(releases) == 1


# --- who it is ------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("G17")
def test_a_fake_is_a_group(group: FakeGroupCoordinator) -> None:
    """A fake is a `GroupCoordinator` with all of its attributes."""
    assert isinstance(group, GroupCoordinator)
    assert (group.rank, group.ranks, group.world_size, group.rank_in_group) == (5, [3, 5, 9], 3, 1)
    assert (group.first_rank, group.last_rank, group.next_rank, group.prev_rank) == (3, 9, 9, 3)
    assert (group.is_first_rank, group.is_last_rank) == (False, False)
    assert (group.device, group.local_rank, group.group_ranks) == (torch.device("cpu"), 0, [[3, 5, 9]])
    assert group.use_device_communicator is True
    assert group.mq_broadcaster is None
    assert "rank 5 (1 of 3) ranks [3, 5, 9] on cpu, usable" in repr(group)
    with pytest.raises(UsageError, match="cannot be copied"):
        group.__reduce__()


def test_fakes_have_names_of_their_own() -> None:
    """Every fake has its own name, so that code can keep several by name."""
    groups = [FakeGroupCoordinator(0, 2, group_name="tp") for _ in range(3)]
    assert len({group.unique_name for group in groups}) == 3
    assert all(group.unique_name.startswith("tp:") for group in groups)


@pytest.mark.parametrize(
    ("rank", "world_size", "ranks"),
    [
        (2, 2, None),
        (-1, 2, None),
        (True, 2, None),
        ("0", 2, None),
        (0, 0, None),
        (0, True, None),
        (0, 2.0, None),
        (0, 2, [0]),
        (0, 2, [0, 0]),
        (1, 2, [0, 2]),
        (0, 2, [0, -1]),
        (0, 2, [0, True]),
    ],
)
def test_a_rank_that_does_not_fit_is_refused(rank: Any, world_size: Any, ranks: Any) -> None:
    """A rank that does not fit is refused, as in a real group."""
    with pytest.raises(UsageError):
        FakeGroupCoordinator(rank, world_size, ranks=ranks)


@pytest.mark.slow
def test_a_fake_needs_nothing() -> None:
    """A fake uses neither torch.distributed nor threads nor the environment, and opens no descriptor."""
    code = (
        "import os, threading, torch\n"
        "from coordinator.testing import FakeGroupCoordinator\n"
        "os.environ['GROUP_COORDINATOR_NONSENSE'] = '1'\n"
        "group = FakeGroupCoordinator(0, 2)\n"
        "assert group.all_reduce(torch.ones(2)).tolist() == [2, 2]\n"
        "assert group.all_gather_object('x') == ['x', 'x']\n"
        "assert threading.active_count() == 1\n"
        "assert not torch.distributed.is_initialized()\n"
    )
    subprocess.run([*STRICT, "-c", code], check=True, cwd=ROOT)


def test_a_fake_has_no_process_groups(group: FakeGroupCoordinator) -> None:
    """Asking a fake for a process group raises an error that says so."""
    for ask in (lambda: group.cpu_group, lambda: group.device_group, group.make_sibling_device_group):
        with pytest.raises(UsageError, match="a fake group has no process group"):
            ask()
    with pytest.raises(UsageError, match="own process groups"):
        group.broadcast_object_list([1], 0, object())  # type: ignore[arg-type]


# --- tensors --------------------------------------------------------------------------------------------------


def test_reductions(group: FakeGroupCoordinator) -> None:
    """A reduction computes with the real arithmetic what equal inputs on every rank would give."""
    assert torch.equal(group.all_reduce(TABLE), TABLE * 3)
    assert torch.equal(group.all_reduce(TABLE, "product"), TABLE**3)  # type: ignore[call-overload]
    third = torch.tensor([1 / 3], dtype=torch.bfloat16)
    assert torch.equal(group.all_reduce(third), (third.float() * 3).bfloat16())
    own = TABLE.clone()
    assert group.all_reduce_(own) is own
    assert torch.equal(own, TABLE * 3)
    assert torch.equal(group.reduce_scatter(TABLE, 1), TABLE[:, 2:4] * 3)
    assert torch.equal(group.reduce_scatterv(TABLE, 0, [1, 3, 0]), TABLE[1:] * 3)
    output = torch.empty(2, 6)
    assert group.reduce_scatterv_into_output(TABLE, output, 0, (2, 2, 0)) is output
    assert torch.equal(output, TABLE[2:] * 3)


def test_gathers(group: FakeGroupCoordinator) -> None:
    """A gather repeats the input along any dimension."""
    assert torch.equal(group.all_gather(TABLE, 0), torch.cat([TABLE] * 3))
    assert torch.equal(group.all_gather(TABLE), torch.cat([TABLE] * 3, 1))
    assert group.all_gather(torch.tensor(2.0)).tolist() == [2, 2, 2]
    assert group.gather(TABLE, 0) is None
    assert torch.equal(group.gather(TABLE, 1, 0), torch.cat([TABLE] * 3))  # type: ignore[arg-type]
    assert group.broadcast(TABLE, 2) is TABLE


def test_uneven_gathers(group: FakeGroupCoordinator) -> None:
    """Ranks with other sizes contribute this rank's rows, repeated as needed."""
    rows = torch.tensor([[1.0], [2.0]])
    assert group.all_gatherv(rows, 0, (1, 2, 5)).view(-1).tolist() == [1, 1, 2, 1, 2, 1, 2, 1]
    assert group.all_gatherv(rows[:0], 0, (2, 0, 1)).view(-1).tolist() == [0, 0, 0]
    first, second = group.all_gatherv([rows, rows.long()], 0)
    assert first.shape == second.shape == (6, 1)


def test_calls_in_which_ranks_take_different_parts(group: FakeGroupCoordinator) -> None:
    """Such calls return this rank's real share of its own input; other ranks contribute nothing new."""
    assert group.reduce(TABLE, 0) is None
    assert torch.equal(group.reduce(TABLE, 1), TABLE * 3)  # type: ignore[arg-type]
    output = torch.zeros(4, 2)
    assert group.scatter(output, TABLE, 1, 1) is output
    assert torch.equal(output, TABLE[:, 2:4])
    assert torch.equal(group.scatter(output, None, 0, 1), TABLE[:, 2:4])
    assert torch.equal(group.all_to_all(TABLE, 1), torch.cat([TABLE[:, 2:4]] * 3, 1))
    uneven = group.all_to_all(TABLE, 0, (1, 2, 1), (3, 2, 0))
    assert torch.equal(uneven, torch.cat([TABLE[1:3], TABLE[1:2], TABLE[1:3]]))


def test_results_are_new_memory(group: FakeGroupCoordinator) -> None:
    """Results are new memory, so that changing one changes no input."""
    for result in (group.all_reduce(TABLE), group.all_gather(TABLE), group.reduce_scatter(TABLE)):
        result.zero_()
    assert TABLE.sum() == 276


def test_expert_parallel_calls(group: FakeGroupCoordinator) -> None:
    """Dispatch returns the tokens of every rank, combine the sum for this rank's tokens."""
    hidden, logits, extra = group.dispatch(TABLE, torch.ones(4, 2), extra_tensors=[torch.ones(4)])  # type: ignore[misc]
    assert (hidden.shape, logits.shape, extra[0].shape) == ((12, 6), (12, 2), (12,))
    assert torch.equal(group.combine(hidden), TABLE * 3)
    with group.token_counts([1, 4, 2]):
        hidden, logits = group.dispatch(TABLE, torch.ones(4, 2))  # type: ignore[misc]
        assert hidden.shape == (7, 6)
        assert group.combine(hidden).shape == (4, 6)


@pytest.mark.guarantee("G17")
def test_what_real_groups_refuse_is_refused(group: FakeGroupCoordinator) -> None:
    """Fakes and real groups share their checks and so refuse the same, with the same text."""
    calls: dict[str, Callable[[], object]] = {
        "cannot be split evenly": lambda: group.reduce_scatter(TABLE, 0),
        "dim 2 is out of range": lambda: group.all_gather(TABLE, 2),
        "dst is 3": lambda: group.gather(TABLE, 3),
        "must have shape": lambda: group.scatter(TABLE.clone(), TABLE, 1),
        "send_sizes add up to 3": lambda: group.all_to_all(TABLE, 0, (1, 1, 1), (1, 1, 1)),
        "src is -1": lambda: group.broadcast(TABLE, -1),
        "unknown reduction": lambda: group.all_reduce(TABLE, "xor"),  # type: ignore[call-overload]
        "expected a tensor": lambda: group.all_reduce([1]),  # type: ignore[call-overload]
        "is on meta": lambda: group.all_reduce(torch.empty(1, device="meta")),
        "timeout_s": lambda: group.barrier(0),
        "this rank itself": lambda: group.send_object(1, 1),
        "overlaps itself": lambda: group.all_reduce_(torch.ones(1).expand(3)),
        "one row for each": lambda: group.dispatch(TABLE, torch.ones(3)),
        "call dispatch first": lambda: group.combine(TABLE),
        "obj_list must be a list": lambda: group.broadcast_object_list((1,)),  # type: ignore[arg-type]
    }
    for text, call in calls.items():
        with pytest.raises(UsageError, match=text):
            call()
    group.barrier()


@pytest.mark.guarantee("G33")
@pytest.mark.parametrize("timeout_s", [-1, float("nan"), True])
def test_ends_of_queues_refuse_a_wrong_timeout(group: FakeGroupCoordinator, timeout_s: float) -> None:
    """As those of real groups do; nothing is sent, and what was sent stays."""
    writer, readers = group.create_single_reader_mq_broadcasters(group.rank_in_group)
    unread, _ = group.create_single_reader_mq_broadcasters((group.rank_in_group + 1) % group.world_size)
    reader = readers[group.rank_in_group]
    writer.enqueue("first", timeout_s=1.0)
    for call in (writer.enqueue, unread.enqueue):
        with pytest.raises(UsageError, match="timeout_s must be"):
            call("refused", timeout_s=timeout_s)
    with pytest.raises(UsageError, match="timeout_s must be"):
        reader.dequeue(timeout_s=timeout_s)
    assert reader.dequeue(timeout_s=0.0) == "first"


def test_asynchronous_coalesced_and_tagged_calls(group: FakeGroupCoordinator) -> None:
    """Such calls complete at once without a thread; tagged sends are received from that peer or any."""
    before = set(threading.enumerate())
    handle = group.all_reduce(TABLE, async_op=True)
    assert handle.is_completed()
    assert torch.equal(handle.wait(), TABLE * 3)
    assert torch.equal(handle.get_future().wait(), TABLE * 3)
    assert group.barrier(async_op=True).wait() is None
    with pytest.raises(UsageError, match="cannot be split"):
        group.reduce_scatter(TABLE, 0, async_op=True).wait()
    assert set(threading.enumerate()) <= before
    assert torch.equal(group.all_reduce_coalesced([TABLE, TABLE.long()])[1], TABLE.long() * 3)
    assert torch.equal(group.all_gather_coalesced([TABLE], 1)[0], torch.cat([TABLE] * 3, 1))
    assert torch.equal(group.all_reduce(TABLE.long(), BitwiseOperation.BOR), TABLE.long())
    assert torch.equal(group.all_reduce(TABLE, premul_sum(0.5)), TABLE * 1.5)
    group.send(TABLE, 2, tag=3)
    group.batch_isend_irecv([P2POperation(verb="isend", tensor=TABLE + 1, peer=0)])
    tensor, src = group.recv_any((4, 6), torch.float32, tag=3)
    assert src == 2
    assert torch.equal(tensor, TABLE)
    assert torch.equal(group.recv_any((4, 6), torch.float32)[0], TABLE + 1)
    with pytest.raises(UsageError, match="nothing is there"):
        group.recv_any((4, 6), torch.float32)
    box: list[Any] = [None]
    assert group.scatter_object_list(box, ["a", "b", "c"], 0) == "b" == box[0]
    group.monitored_barrier()
    part = group.split_group([[1, 2], [0]])
    assert isinstance(part, FakeGroupCoordinator)
    assert part.ranks == [5, 9]
    assert group.split_group(color=-1) is None
    with pytest.raises(UsageError, match="no process group"):
        group.as_process_group()
    assert functional.all_reduce(TABLE, "sum", group)[0, 1] == 3


# --- a group of one -------------------------------------------------------------------------------------------


def test_a_group_of_one_is_as_a_real_one() -> None:
    """In a fake of one rank results are the inputs, and there is no peer."""
    with FakeGroupCoordinator(4, 1, ranks=[4]) as alone:
        assert alone.all_reduce(TABLE) is TABLE
        assert alone.all_gather(TABLE) is TABLE
        assert alone.reduce(TABLE) is TABLE
        assert alone.all_to_all(TABLE) is TABLE
        assert torch.equal(alone.scatter(torch.zeros_like(TABLE), TABLE), TABLE)
        assert alone.broadcast_object(TABLE) is TABLE
        sent = tensor_dict()
        assert alone.broadcast_tensor_dict(sent) is sent
        assert alone.isend_tensor_dict(sent) == []
        assert alone.recv_tensor_dict() is None
        alone.barrier()
        with pytest.raises(UsageError, match="no other rank"):
            alone.send(TABLE)
        with pytest.raises(UsageError, match="no process group"):
            _ = alone.cpu_group


# --- life -----------------------------------------------------------------------------------------------------


def test_a_destroyed_fake_refuses_every_call() -> None:
    """A destroyed fake raises the error of a real group; destroying it again does nothing."""
    group = FakeGroupCoordinator(0, 3)
    group.send(torch.ones(1), 1)
    pending = group.device_communicator.irecv(torch.ones(2), 2)
    group.destroy()
    group.destroy()
    assert "destroyed" in repr(group)
    calls: list[Callable[[], object]] = [
        lambda: group.all_reduce(TABLE),
        lambda: group.all_gather_object(1),
        lambda: group.broadcast_tensor_dict({}, 0),
        lambda: group.send_tensor_dict({}),
        lambda: group.recv((1,), torch.float32),
        lambda: group.recv_object(1),
        lambda: group.cpu_group,
        group.make_sibling_device_group,
        lambda: group.device_communicator.all_reduce(TABLE),
        lambda: group.device_communicator.reduce(TABLE),
        lambda: group.device_communicator.scatter(TABLE.clone(), None, 1),
        lambda: group.device_communicator.all_to_all(TABLE, 1),
        group.barrier,
        pending.wait,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            call()


def test_a_fake_works_in_any_thread() -> None:
    """A fake works in any thread of the process."""
    results = []
    with FakeGroupCoordinator(0, 2) as group:
        thread = threading.Thread(target=lambda: results.append(group.all_reduce(torch.ones(1)).item()))
        thread.start()
        thread.join()
    assert results == [2]


def test_models_prepare_their_buffers(group: FakeGroupCoordinator) -> None:
    """Hooks are called, and a graph capture on the CPU can be entered."""
    seen = []

    class Layer(torch.nn.Linear):
        def prepare_communication_buffer(self, group: GroupCoordinator) -> None:
            seen.append(group)

    group.prepare_communication_buffer_for_model(torch.nn.Sequential(Layer(2, 2), Layer(2, 2)))
    assert seen == [group, group]
    with group.graph_capture() as context:
        assert context.stream is None
    stream: Any = object()
    with group.graph_capture(stream=stream) as context:
        assert context.stream is stream
        with group.graph_capture(context, stream) as same:
            assert same is context
    with pytest.raises(UsageError, match="another stream"), group.graph_capture(context, stream=object()):  # type: ignore[arg-type]
        pass


# --- the groups of a rank -------------------------------------------------------------------------------------


def test_the_groups_of_one_rank() -> None:
    """A rank of a layout sees its own rank lists."""
    layout = ParallelLayout(tensor=2, pipeline=2, data=2)
    with fake_groups(layout, 5) as groups:
        assert isinstance(groups, ParallelGroups)
        for name, each in groups.by_name().items():
            assert isinstance(each, FakeGroupCoordinator)
            assert tuple(each.ranks) == layout.group_of(name, 5)  # type: ignore[arg-type]
            assert each.rank == 5
        assert groups.cp.world_size == 1
        assert groups.tp is not groups.pp
        assert current_groups() is groups
        assert get_tp_group() is groups.tp
        assert torch.equal(groups.tp.all_reduce(TABLE), TABLE * 2)
        with groups.graph_capture() as context:
            assert context.stream is None
    with pytest.raises(ClosedError):
        groups.world.barrier()


def test_all_groups_capture_on_a_given_stream() -> None:
    """The context of all groups takes the caller's stream, as that of one group does; so does that of the module."""
    stream: Any = object()
    with fake_groups(ParallelLayout(tensor=2), 1) as groups:
        with groups.graph_capture(stream=stream) as context:
            assert context.stream is stream
            with groups.graph_capture(context, stream) as same:
                assert same is context
        other: Any = object()
        with pytest.raises(UsageError, match="another stream"), groups.graph_capture(context, stream=other):
            pass
        with graph_capture(torch.device("cpu"), stream=stream) as context:
            assert context.stream is stream
        with graph_capture(torch.device("cpu")) as context:
            assert context.stream is None


def test_each_dimension_has_a_fake_of_its_own() -> None:
    """Dimensions with equal rank lists have different fakes, as they have different real groups."""
    groups = fake_groups(ParallelLayout(tensor=2), 1)
    assert groups.world.ranks == groups.tp.ranks == groups.ep.ranks
    assert len(set(groups.by_name().values())) == len(DIMENSIONS)
    assert {name: each.unique_name.rpartition(":")[0] for name, each in groups.by_name().items()} == {
        name: name for name in DIMENSIONS
    }
    with pytest.raises(UsageError, match="there is no rank 2"):
        fake_groups(ParallelLayout(tensor=2), 2)


def test_ranks_do_not_mean_a_fake() -> None:
    """A fake is found by itself or its name, never by ranks: it would answer for the real group."""
    fake = FakeGroupCoordinator(0, 2)
    for meant in (fake, fake.unique_name):
        assert functional.all_reduce(TABLE, "sum", meant)[0, 1] == 2
    with pytest.raises(UsageError, match="no group with the ranks"):
        functional.all_reduce(TABLE, "sum", [0, 1])
    fake.destroy()
