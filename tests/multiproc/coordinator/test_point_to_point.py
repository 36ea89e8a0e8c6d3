"""Messages between two ranks by tag, in batches and from any rank, and scattered objects."""

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, P2POperation, UsageError
from tests.harness import RankPool
from tests.worlds import ApartPool, meet, outcome_of, refused, world


def messages(rank: int, world_size: int, directory: Path) -> list[bool]:
    with world(rank, world_size, directory) as group:
        found = []
        peer = 1 - rank
        for tag in (1, 2, 0):
            group.isend(torch.full((3,), 10.0 * tag + rank), peer, tag=tag)
        # They are received in another order than they were sent in.
        received = {tag: group.recv((3,), torch.float32, peer, tag=tag).tolist() for tag in (2, 0, 1)}
        found.append(received == {tag: [10.0 * tag + peer] * 3 for tag in range(3)})
        into = torch.zeros(4, 2, dtype=torch.bfloat16).t()
        large = torch.zeros(1 << 20)
        handles = group.batch_isend_irecv(
            [
                P2POperation(
                    verb="isend",
                    tensor=torch.full((2, 4), float(rank), dtype=torch.bfloat16),
                    peer=peer,
                    tag=5,
                ),
                P2POperation(verb="irecv", tensor=into, peer=peer, tag=5),
                P2POperation(verb="isend", tensor=torch.full((1 << 20,), 1.0 + rank), peer=peer),
                P2POperation(verb="irecv", tensor=large, peer=peer),
            ]
        )
        for handle in handles:
            handle.wait()
            handle.wait()
        found += [
            all(handle.is_completed() for handle in handles),
            bool((into == peer).all()),
            bool((large == 1 + peer).all()),
        ]
        found += [
            refused(lambda wrong=wrong: group.send(torch.ones(1), peer, tag=wrong))
            for wrong in (-1, True, 1 << 30, "x")
        ]
        found.append(refused(lambda: group.batch_isend_irecv([("isend", 1)])))  # type: ignore[list-item]
        found.append(refused(lambda: group.isend(torch.ones(1), rank, tag=3)))
        box: list[Any] = [None]
        group.scatter_object_list(
            box, [{"for": each} for each in range(world_size)] if rank == 1 else None, 1
        )
        found.append(box == [{"for": rank}])
        if rank == 0:
            found.append(refused(lambda: group.scatter_object_list(box, [1], 0)))
            found.append(refused(lambda: group.scatter_object_list([], [1, 2], 0)))
        group.monitored_barrier(5.0)
        return found


def test_tags_batches_and_scattered_objects(ranks2: RankPool) -> None:
    """Messages of different tags do not disturb each other, on one host and over Gloo."""
    for found in [*ranks2.run(messages), *ApartPool(ranks2).run(messages)]:
        assert all(found), found


def from_any(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        found: list[Any] = []
        if rank != 0:
            for each in range(3):
                group.send(torch.tensor([rank * 10 + each]), 0)
                group.send(torch.tensor([float(rank)]), 0, tag=7)
            meet(rank, range(world_size), directory, "taken")
            if rank == 1:
                group.send(torch.ones(2), 0, tag=9)
            return []
        by_rank: dict[int, list[int]] = {}
        for _ in range(3 * (world_size - 1)):
            tensor, src = group.recv_any((1,), torch.int64)
            by_rank.setdefault(src, []).append(int(tensor))
        found.append(by_rank == {src: [src * 10 + each for each in range(3)] for src in range(1, world_size)})
        found.append(group.recv((1,), torch.float32, 2, tag=7).item() == 2.0)
        tagged = [group.recv_any((1,), torch.float32, tag=7) for _ in range(3 * (world_size - 1) - 1)]
        found.append(all(int(tensor) == src for tensor, src in tagged))
        meet(rank, range(world_size), directory, "taken")
        try:
            group.recv_any((3,), torch.float32, tag=9)
        except DisagreementError as error:
            found.append("rank 1 sent" in str(error))
        outcome = outcome_of(lambda: group.recv_any((3,), torch.float32, tag=9, timeout_s=0.1))
        found.append(outcome["kind"] in ("CommTimeoutError", "PeerLostError"))
        return found


def no_shared_memory(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as group:
        return str(outcome_of(lambda: group.recv_any((1,), torch.int64))["kind"])


def test_a_tensor_from_any_rank(ranks4: RankPool, ranks2: RankPool) -> None:
    """The receiver gets the sender's rank too. Tensors of each rank and tag arrive in order."""
    assert all(ranks4.run(from_any)[0])
    assert ApartPool(ranks2).run(no_shared_memory) == ["CapabilityError"] * 2


def other_shapes(rank: int, world_size: int, directory: Path) -> list[dict[str, Any]]:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for tag in (0, 0, 4, 4):
                group.send(torch.arange(6).view(2, 3), 1, tag=tag)
            group.send(torch.tensor(5), 1)
            group.barrier()
            return []
        into = torch.zeros(3, 2, dtype=torch.int64)
        found = [
            outcome_of(lambda: group.recv([6], torch.int64, 0)),
            outcome_of(lambda: group.irecv(into, 0).wait()),
            outcome_of(lambda: group.recv([3, 2], torch.int64, 0, tag=4)),
            outcome_of(lambda: group.recv_any([1, 6], torch.int64, tag=4)),
            outcome_of(lambda: group.recv([1], torch.int64, 0)),
        ]
        assert not into.any()
        group.barrier()
        return found


@pytest.mark.guarantee("D65")
def test_a_tensor_of_another_shape_is_not_reshaped_in_silence(ranks2: RankPool) -> None:
    """On one host the receiver raises, with both shapes, also if the numbers of elements are equal."""
    found = ranks2.run(other_shapes)[1]
    expected = ([6], [3, 2], [3, 2], [1, 6], [1])
    for outcome, shape, sent in zip(found, expected, [[2, 3]] * 4 + [[]], strict=True):
        assert outcome["kind"] == "DisagreementError", outcome
        assert f"shape {sent}" in outcome["text"]
        assert f"shape {shape}" in outcome["text"]


def other_shapes_between_hosts(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        found: list[Any] = []
        for tag in (0, 4):
            if rank == 0:
                group.send(torch.arange(6).view(2, 3), 1, tag=tag)
                group.send(torch.ones(2, 2), 1, tag=tag)
                group.send(torch.tensor([7, 8]), 1, tag=tag)
            else:
                found.append(group.recv([6], torch.int64, 0, tag=tag).tolist())
                found.append(group.recv([4], torch.int32, 0, tag=tag).tolist())
                into = torch.full((3,), -1)
                group.irecv(into, 0, tag=tag).wait()
                found.append(into.tolist())
        group.barrier()
        return found


def test_between_hosts_a_message_is_its_bytes(ranks2: RankPool) -> None:
    """Nothing is compared over Gloo: equal lengths pass, and a shorter message fills the beginning."""
    one = torch.ones(1).view(torch.int32).item()
    expected = [[0, 1, 2, 3, 4, 5], [one] * 4, [7, 8, -1]]
    assert ApartPool(ranks2).run(other_shapes_between_hosts)[1] == expected * 2


def into_inference_tensors(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            for value in (1.0, 2.0):
                group.send(torch.full((3,), value), 1)
            return []
        with torch.inference_mode():
            # The second one is not contiguous: what arrives is copied into it.
            tensors = [torch.zeros(3), torch.zeros(3, 2)[:, 0]]
            handles = [group.irecv(tensor, 0) for tensor in tensors]
        for handle in handles:
            handle.wait()
        return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("apart", [False, True])
def test_tensors_of_inference_mode_are_filled_outside_of_it(ranks2: RankPool, apart: bool) -> None:
    """The handle of a receive may be waited for where that mode is off; on one host and on several."""
    found = (ApartPool(ranks2) if apart else ranks2).run(into_inference_tensors)[1]
    assert found == [[1.0] * 3, [2.0] * 3]


def wrong_batches(rank: int, world_size: int, directory: Path) -> list[Any]:
    """Let rank 0 make batches of which the last item is wrong; then receive what its first item would have taken."""
    with world(rank, world_size, directory) as group:
        into, peer = torch.zeros(3), 1 - rank
        wrong: list[P2POperation] = [
            P2POperation(verb="irecv", tensor=torch.zeros(3), peer=peer, tag=-1),
            P2POperation(verb="irecv", tensor=torch.zeros(1).expand(3), peer=peer),
            P2POperation(verb="isend", tensor=torch.zeros(3), peer=peer, tag=1 << 30),
        ]
        for each in wrong if rank == 0 else ():
            good = P2POperation(verb="irecv", tensor=into, peer=peer)
            with pytest.raises(UsageError):
                group.batch_isend_irecv([good, each])
        group.barrier()
        if rank == 1:
            group.send(torch.arange(3.0), 0)
            return []
        return [group.recv((3,), torch.float32, 1, timeout_s=20.0).tolist(), into.tolist()]


@pytest.mark.guarantee("D3")
@pytest.mark.parametrize("apart", [False, True])
def test_a_batch_with_a_wrong_item_begins_nothing(ranks2: RankPool, apart: bool) -> None:
    """A receive of the batch would take a message whose handle nobody has."""
    found = (ApartPool(ranks2) if apart else ranks2).run(wrong_batches)[0]
    assert found == [[0.0, 1.0, 2.0], [0.0] * 3]


def tagged_objects(rank: int, world_size: int, directory: Path) -> list[Any]:
    with world(rank, world_size, directory) as group:
        peer = 1 - rank
        works = [
            group.send_object({"tag": tag, "from": rank}, peer, async_send=True, tag=tag) for tag in (0, 3, 5)
        ]
        assert group.send_object("blocking", peer, False, 3) is None
        group.isend_object("last", peer, tag=5)
        received = [group.recv_object(peer, tag) for tag in (5, 0, 3)]
        assert received == [{"tag": tag, "from": peer} for tag in (5, 0, 3)]
        assert group.recv_object(peer, tag=3) == "blocking"
        assert group.recv_object(peer, 5) == "last"
        sent = group.send_tensor_dict({"x": torch.full((3,), float(rank)), "n": 1}, peer, async_send=True)
        assert isinstance(sent, list)
        for each in [*(work for some in works for work in some or ()), *sent]:
            # As engines wait for their sends.
            each.work.wait()
            each.wait()
            assert each.is_completed()
        got = group.recv_tensor_dict(peer)
        assert got is not None
        assert got["x"].tolist() == [peer] * 3
        return [
            refused(lambda wrong=wrong: group.send_object(1, peer, tag=wrong))
            for wrong in (-1, True, 1 << 29, "x")
        ] + [
            refused(lambda: group.recv_object(peer, 1.0)),  # type: ignore[arg-type]
            refused(lambda: group.send_tensor_dict({}, peer, None, True)),  # type: ignore[arg-type]
        ]


def test_objects_by_tag_and_sends_that_do_not_wait(ranks2: RankPool) -> None:
    """Tags keep objects apart, and `async_send` returns what engines wait for, on one host and over Gloo."""
    for found in [*ranks2.run(tagged_objects), *ApartPool(ranks2).run(tagged_objects)]:
        assert all(found), found
