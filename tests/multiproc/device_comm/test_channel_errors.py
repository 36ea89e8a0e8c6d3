"""Messages over shared memory that a receiver refuses or cannot store, and channels that cannot be made yet."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import CapabilityError, DecodeError, DisagreementError, NativeError, register_type
from coordinator.host.tags import OBJECT_TAG
from device_comm import _core
from device_comm.cpu.channels import Channels
from shm_broadcast import segment
from tests.harness import RankPool
from tests.worlds import meet, world


def mismatched(rank: int, world_size: int, directory: Path) -> list[str]:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            group.send(torch.ones(3, 2), 1)
            group.send(torch.ones(6, dtype=torch.int32), 1)
            group.send(torch.ones(2, 3), 1)
            group.send(torch.ones(2, 3), 1)
            return []
        texts = []
        for size in ((7,), (6,), (6,)):
            with pytest.raises(DisagreementError) as caught:
                group.recv(size, torch.float32, 0)
            texts.append(str(caught.value))
        assert group.recv((2, 3), torch.float32, 0).tolist() == [[1.0] * 3] * 2
        return texts


def test_a_tensor_of_another_size_or_dtype_is_refused(ranks2: RankPool) -> None:
    """The receiver raises a `DisagreementError` with both views, also for the shape alone. The next one arrives."""
    shape, dtype, same_size = ranks2.run(mismatched)[1]
    assert "sent a tensor of shape [2, 3]" in same_size
    for part in ("rank 0 sent a tensor of shape [3, 2]", "expects a tensor of shape [7]", "next one"):
        assert part in shape
    assert "torch.int32" in dtype


class Unknown:
    """A type that one rank registers and the other does not."""


def undecodable(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            register_type(Unknown, name="only.here", encode=lambda _: 1, decode=lambda _: Unknown())
            group.send_object(Unknown(), 1)
            group.send(torch.ones(3), 1)
            group.send_object("good", 1)
            return None
        # The object comes before the tensor. The receiver reads it and keeps its error for later.
        assert group.recv((3,), torch.float32, 0).tolist() == [1.0] * 3
        with pytest.raises(DecodeError, match="only.here"):
            group.recv_object(0)
        return group.recv_object(0)


def test_the_call_that_asks_for_an_undecodable_object_raises(ranks2: RankPool) -> None:
    """A call that waits for another kind of message does not raise."""
    assert ranks2.run(undecodable)[1] == "good"


def unplaceable(rank: int, world_size: int, directory: Path) -> Any:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            group.send_object("lost", 1)
            group.send(torch.ones(3), 1)
            group.send_object("good", 1)
            return None

        def land(received: object) -> None:
            raise RuntimeError(f"no place for {received}")

        channels: Channels = getattr(group._host, "_channels")  # noqa: B009 - of one host plane only
        handle = channels.irecv("host", "recv", 0, OBJECT_TAG, 30.0, land)
        assert group.recv((3,), torch.float32, 0).tolist() == [1.0] * 3
        with pytest.raises(NativeError, match="no place for lost"):
            handle.wait()
        return group.recv_object(0)


def test_the_handle_of_a_message_that_cannot_be_stored_raises(ranks2: RankPool) -> None:
    """Another call that reads the message meanwhile does not raise, and the group is intact."""
    assert ranks2.run(unplaceable)[1] == "good"


def without_memory(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as group:
        text = ""
        if rank == 0:
            with (
                mock.patch.object(segment, "free_memory_bytes", return_value=1_000_000),
                pytest.raises(CapabilityError) as caught,
            ):
                group.send_object("x", 1)
            text = str(caught.value)
            meet(rank, (0, 1), directory, "refused")
            group.send_object("y", 1)
        else:
            # A receive before this point would make the channel.
            meet(rank, (0, 1), directory, "refused")
            assert group.recv_object(0) == "y"
        group.barrier()
        return text


def test_too_little_memory_for_a_channel_is_told_and_can_be_tried_again(ranks2: RankPool) -> None:
    """The error gives the needed and the free bytes. Nothing was sent, and the group is intact."""
    text = ranks2.run(without_memory)[0]
    assert "1000000 are free" in text
    assert str((1 << 20) + 4096) in text


def tried_again(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as group:
        if rank == 0:
            answers = [(_core.CHANNEL_MAKING, None), (_core.CHANNEL_MAKING, None)]
            opened = _core.channel_open
            with mock.patch.object(
                _core, "channel_open", lambda *place: answers.pop() if answers else opened(*place)
            ):
                group.send_object("x", 1)
            assert not answers
            meet(rank, (0, 1), directory, "made")
        else:
            # A receive before this point would make the channel.
            meet(rank, (0, 1), directory, "made")
            assert group.recv_object(0) == "x"


def test_a_channel_is_used_only_after_it_was_made(ranks2: RankPool) -> None:
    """The other rank fails and tries again. Between its attempts the channel has no owner and no memory."""
    ranks2.run(tried_again)
