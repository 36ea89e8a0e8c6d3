"""Objects, queues, tensor dicts and point-to-point messages of fake groups, which run in one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, ExternalWriter, GroupBrokenError, UsageError
from coordinator.host.tensor_dict_format import INLINE_BYTES
from coordinator.testing import FakeGroupCoordinator
from shm_broadcast.codec import register_type, unregister_type
from shm_broadcast.errors import DecodeError
from tests.fake_groups import tensor_dict


class Unknown:
    """A class that the codec does not support."""


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


# --- queues ---------------------------------------------------------------------------------------------------


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


# --- tensor dicts ---------------------------------------------------------------------------------------------


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
