"""Fake groups run in one process and compute results as if every rank held the same."""

import pathlib
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from coordinator import (
    BitwiseOperation,
    ClosedError,
    DisagreementError,
    ExternalWriter,
    GroupBrokenError,
    GroupCoordinator,
    P2POperation,
    ParallelGroups,
    ParallelLayout,
    UsageError,
    current_groups,
    functional,
    get_tp_group,
    premul_sum,
)
from coordinator.host.tensor_dict_format import INLINE_BYTES
from coordinator.testing import FakeGroupCoordinator, fake_groups
from shm_broadcast.codec import register_type, unregister_type
from shm_broadcast.errors import DecodeError

ROOT = pathlib.Path(__file__).parents[3]
TABLE = torch.arange(24, dtype=torch.float32).view(4, 6)


class Unknown:
    """A class that the codec does not support."""


@pytest.fixture
def group() -> Any:
    """Return rank 5 of ranks 3, 5 and 9, the second of three."""
    with FakeGroupCoordinator(5, 3, ranks=(3, 5, 9)) as fake:
        yield fake


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
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=ROOT)


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


# --- objects --------------------------------------------------------------------------------------------------


def test_objects(group: FakeGroupCoordinator) -> None:
    """A call returns copies of this rank's objects, and on the source the object itself."""
    step = {"tokens": [1, 2], "mask": torch.ones(2)}
    assert group.broadcast_object(step, 1) is step
    received = group.broadcast_object(step, 0)
    assert received is not step
    assert received["tokens"] == [1, 2]
    assert received["tokens"] is not step["tokens"]
    assert group.broadcast_object(src=2) is None
    assert group.broadcast_object([1, 2], 0, type=tuple[int, ...]) == (1, 2)
    gathered = group.all_gather_object(step)
    assert len({id(each) for each in [step, *gathered]}) == 4
    assert group.gather_object(step, 0) is None
    own = group.gather_object(step, 1)
    assert own is not None
    assert [each is step for each in own] == [False, True, False]
    values = [1, {"x": 2}]
    assert group.broadcast_object_list(values, 0) is values
    assert values == [1, {"x": 2}]


def test_objects_that_cannot_be_carried_are_refused(group: FakeGroupCoordinator) -> None:
    """Every call refuses an unsupported object, so that the test fails where the engine would."""
    calls: list[Callable[[], object]] = [
        lambda: group.broadcast_object([Unknown()], 1),
        lambda: group.broadcast_object([Unknown()], 0),
        lambda: group.all_gather_object({"x": Unknown()}),
        lambda: group.gather_object(Unknown(), 1),
        lambda: group.gather_object(Unknown(), 0),
        lambda: group.send_object(Unknown(), 0),
        lambda: group.broadcast_object_list([Unknown()], 1),
        lambda: group.send_tensor_dict({"x": Unknown()}, 0),
        lambda: group.broadcast_tensor_dict({"x": Unknown()}, 1),
        lambda: group.broadcast_tensor_dict({"x": Unknown()}, 0),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="Unknown"):
            call()


def test_a_message_that_cannot_be_decoded_is_an_error_once(group: FakeGroupCoordinator) -> None:
    """One bad message raises once, and the next arrives."""
    register_type(Marker, encode=lambda marker: 1, decode=lambda value: Marker())
    try:
        group.send_object(Marker(), 0)
        group.send_tensor_dict({"x": Marker(), "y": torch.zeros(INLINE_BYTES)}, 0)
    finally:
        unregister_type(Marker)
    group.send_object("next", 0)
    group.send_tensor_dict({"y": torch.ones(INLINE_BYTES)}, 0)
    with pytest.raises(DecodeError):
        group.recv_object(0)
    with pytest.raises(DecodeError):
        group.recv_tensor_dict(0)
    assert group.recv_object(0) == "next"
    assert group.recv_tensor_dict(0)["y"].sum() == INLINE_BYTES  # type: ignore[index]


class Marker:
    """A class that is registered only for a while."""


# --- point to point -------------------------------------------------------------------------------------------


def test_what_was_sent_to_a_peer_is_received_from_it(group: FakeGroupCoordinator) -> None:
    """What was sent to a peer is received from it, in order, separately for each peer."""
    for number in range(3):
        group.send(torch.tensor([number]), 0)
        group.send_object(number, 0)
    group.send(torch.tensor([7]), 2)
    group.send_object("for 2", 2)
    assert group.recv((1,), torch.int64, 2).item() == 7
    assert [group.recv((1,), torch.int64, 0).item() for _ in range(3)] == [0, 1, 2]
    assert [group.recv_object(0) for _ in range(3)] == [0, 1, 2]
    assert group.recv_object(2) == "for 2"


def test_what_arrives_is_a_copy(group: FakeGroupCoordinator) -> None:
    """The sender may reuse its memory, as with a real peer."""
    tensor, words = torch.ones(2), ["a"]
    group.send(tensor, 0)
    group.send_object(words, 0)
    tensor.zero_()
    words.append("b")
    assert group.recv((2,), torch.float32, 0).tolist() == [1, 1]
    assert group.recv_object(0) == ["a"]


def test_receiving_what_was_not_sent_is_refused(group: FakeGroupCoordinator) -> None:
    """A receive with nothing sent raises, where a real rank would wait; the text says why."""
    calls: list[Callable[[], object]] = [
        lambda: group.recv((1,), torch.float32, 0),
        lambda: group.recv((1,), torch.float32),
        lambda: group.recv_object(2),
        lambda: group.recv_tensor_dict(0),
        group.recv_tensor_dict,
        lambda: group.device_communicator.irecv(torch.ones(1), 0).wait(),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="nothing is there"):
            call()
    # A refused receive does not consume a later send.
    group.send(torch.tensor([3.0]), 0)
    assert group.recv((1,), torch.float32, 0).item() == 3


def test_a_receive_may_be_posted_before_the_send(group: FakeGroupCoordinator) -> None:
    """Receives posted early are filled in the order of posting."""
    communicator = group.device_communicator
    targets = [torch.zeros(2), torch.zeros(3)]
    handles = [communicator.irecv(target, 0) for target in targets]
    assert [handle.is_completed() for handle in handles] == [False, False]
    communicator.isend(torch.ones(2), 0).wait()
    assert [handle.is_completed() for handle in handles] == [True, False]
    communicator.isend(torch.ones(3), 0).wait()
    for handle in reversed(handles):
        handle.wait()
        handle.wait()
    assert [target.sum() for target in targets] == [2, 3]


def test_a_receive_of_another_shape_is_refused(group: FakeGroupCoordinator) -> None:
    """A receive of another shape raises; in a real group the transport may fail or stay silent."""
    group.send(torch.ones(2, 3), 0)
    with pytest.raises(UsageError, match=r"expects shape \(6,\) .* shape \(2, 3\)"):
        group.recv((6,), torch.float32, 0)
    group.send(torch.ones(6), 0)
    with pytest.raises(UsageError, match="torch.int32"):
        group.recv((6,), torch.int32, 0)


def test_default_peers() -> None:
    """Sends go to the next rank and receives come from the previous one; in a group of two both are the same."""
    with FakeGroupCoordinator(0, 2) as pair:
        pair.send(torch.ones(1))
        assert pair.recv((1,), torch.float32).item() == 1
        pair.send_tensor_dict({"x": 1})
        assert pair.recv_tensor_dict() == {"x": 1}


def test_queues_have_their_roles(group: FakeGroupCoordinator) -> None:
    """The writer encodes its objects and drops them; a reader refuses to wait, as nobody writes."""
    writer: Any = group.create_mq_broadcaster(1)
    writer.enqueue({"step": 1})
    with pytest.raises(UsageError, match="Unknown"):
        writer.enqueue(Unknown())
    assert not hasattr(writer, "dequeue")
    reader: Any = group.create_mq_broadcaster(0)
    with pytest.raises(UsageError, match="nothing is there"):
        reader.dequeue()
    own, readers = group.create_single_reader_mq_broadcasters(1)
    own.enqueue(("answer", 1))
    with pytest.raises(UsageError, match="Unknown"):
        own.enqueue(Unknown())
    assert readers[1].dequeue() == ("answer", 1)
    for each in readers:
        with pytest.raises(UsageError, match="nothing is there"):
            each.dequeue()
    other, none = group.create_single_reader_mq_broadcasters(0)
    other.enqueue("nobody reads it")
    assert (len(readers), none) == (3, [])
    outside = ExternalWriter(bytes(100), bytes(32))
    reader = group.create_mq_broadcaster(1, outside)
    assert not hasattr(reader, "enqueue")
    with pytest.raises(UsageError, match="must be an ExternalWriter"):
        group.create_mq_broadcaster(0, outside.key)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="writer_rank is 3"):
        group.create_mq_broadcaster(3)


def test_a_broadcaster_changes_no_result(group: FakeGroupCoordinator) -> None:
    """Broadcasts give the same results with a broadcaster, from every rank."""
    group.enable_broadcaster()
    end = group.mq_broadcaster
    group.enable_broadcaster()
    assert group.mq_broadcaster is end is not None
    for src in range(3):
        assert group.broadcast_object("x", src) == "x"
        assert group.broadcast_tensor_dict({"x": 1}, src) == {"x": 1}


def test_asynchronous_coalesced_and_tagged_calls(group: FakeGroupCoordinator) -> None:
    """Such calls complete at once without a thread; tagged sends are received from that peer or any."""
    handle = group.all_reduce(TABLE, async_op=True)
    assert handle.is_completed()
    assert torch.equal(handle.wait(), TABLE * 3)
    assert torch.equal(handle.get_future().wait(), TABLE * 3)
    assert group.barrier(async_op=True).wait() is None
    with pytest.raises(UsageError, match="cannot be split"):
        group.reduce_scatter(TABLE, 0, async_op=True).wait()
    assert threading.active_count() == 1
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


# --- tensor dicts ---------------------------------------------------------------------------------------------


def tensor_dict() -> dict[str, Any]:
    return {
        "hidden": torch.arange(INLINE_BYTES, dtype=torch.float32).view(2, -1),
        "small": torch.arange(6).view(2, 3),
        "odd": torch.arange(7),
        "nested": OrderedDict(residual=torch.arange(12.0).view(3, 4), n=1),
        "step": 5,
    }


def assert_same(received: Any, sent: dict[str, Any]) -> None:
    assert received.keys() == sent.keys()
    for key, value in sent.items():
        if isinstance(value, dict):
            assert_same(received[key], value)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(received[key], value)
            assert received[key].data_ptr() != value.data_ptr()
        else:
            assert received[key] == value


def test_tensor_dicts_loop_back(group: FakeGroupCoordinator) -> None:
    """What arrives equals what was sent and shares no memory with it."""
    for number in range(2):
        assert group.send_tensor_dict({**tensor_dict(), "step": number}, 2) is None
    for handle in group.isend_tensor_dict(tensor_dict(), 0):
        handle.wait()
    for number in range(2):
        assert_same(group.recv_tensor_dict(2), {**tensor_dict(), "step": number})
    received, handles, callbacks = group.irecv_tensor_dict(0)
    for handle in handles:
        handle.wait()
    assert callbacks == []
    assert_same(received, tensor_dict())


@pytest.mark.parametrize("overrides", [None, {"hidden": False, "nested.residual": False}])
@pytest.mark.parametrize("tp_rank", [0, 1])
def test_sliced_tensor_dicts_arrive_whole(
    group: FakeGroupCoordinator, tp_rank: int, overrides: dict[str, bool] | None
) -> None:
    """A sliced dict is kept whole, because the ranks that would send the other slices do not exist."""
    with FakeGroupCoordinator(tp_rank, 2) as tp:
        group.send_tensor_dict(tensor_dict(), 0, tp, overrides)
        group.send_tensor_dict({"last": torch.ones(2)}, 0, tp)
        assert_same(group.recv_tensor_dict(0, tp, overrides), tensor_dict())
        assert_same(group.recv_tensor_dict(0, tp), {"last": torch.ones(2)})
        group.send_tensor_dict(tensor_dict(), 2, tp)
        received, handles, callbacks = group.irecv_tensor_dict(2, tp)
        for handle in handles:
            handle.wait()
        assert received is not None
        assert received["small"].shape == (3,), "until the callbacks have run the dict holds slices"
        assert len(callbacks) == 3
        for callback in callbacks:
            callback()
        assert_same(received, tensor_dict())


def test_slicing_must_be_the_same_on_both_sides(group: FakeGroupCoordinator) -> None:
    """Different slicing breaks the group, as in a real one: tensors would be mixed up."""
    with FakeGroupCoordinator(0, 2) as tp:
        group.send_tensor_dict(tensor_dict(), 0, tp)
        with pytest.raises(DisagreementError):
            group.recv_tensor_dict(0)
        with pytest.raises(GroupBrokenError):
            group.barrier()


def test_broadcast_tensor_dicts(group: FakeGroupCoordinator) -> None:
    """The source gets the dict itself, other ranks a copy; without a dict there is nothing to return."""
    sent = tensor_dict()
    assert group.broadcast_tensor_dict(sent, 1) is sent
    assert_same(group.broadcast_tensor_dict(sent, 0), sent)
    with pytest.raises(UsageError, match="pass the one that shall arrive"):
        group.broadcast_tensor_dict(None, 0)
    with pytest.raises(UsageError, match="nothing is there"):
        group.recv_tensor_dict(0)


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


# --- the groups of a rank -------------------------------------------------------------------------------------


def test_the_groups_of_one_rank() -> None:
    """A rank of a layout sees its own rank lists; equal lists share a group."""
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
        with groups.graph_capture():
            pass
    with pytest.raises(ClosedError):
        groups.world.barrier()


def test_dimensions_of_one_table_share_a_fake() -> None:
    """Dimensions with equal rank lists share a fake, as real ones share a group."""
    groups = fake_groups(ParallelLayout(tensor=2), 1)
    assert groups.world is groups.tp is groups.ep
    assert groups.pp is groups.dp is groups.cp
    assert "world=tp=ep" in groups.tp.unique_name
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
