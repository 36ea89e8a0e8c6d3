"""What a signal handler may leave behind that strikes between a tensor dict's message and its tensors, over Gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import CommTimeoutError, GroupBrokenError, PeerLostError
from device_comm.handles import CompletedHandle
from tests.handlers import Interrupt
from tests.harness import RankPool
from tests.worlds import ApartPool, meet, new_group, world

# Larger than what travels in the message, so that it follows.
FOLLOWING = {"x": torch.arange(16384.0)}


def strike(*_: Any) -> Any:
    """Be a handler that strikes where this is called."""
    raise Interrupt


def while_beginning(group: Any) -> None:
    """Strike when the message has come, and none of its tensors was asked for."""
    group._receive_beside = strike
    group.recv_tensor_dict(0)


def while_waiting(group: Any) -> None:
    """Strike in the wait for a tensor."""
    begin = group._receive_beside

    def begun(*arguments: Any) -> Any:
        tensor_dict, _, _ = begin(*arguments)
        return tensor_dict, [], [strike]

    group._receive_beside = begun
    group.recv_tensor_dict(0)


def while_landing(group: Any) -> None:
    """Strike when the message of a broadcast has come."""
    group._land = strike
    group.broadcast_tensor_dict(None, 0)


def send(group: Any, name: str) -> None:
    """Send what the other rank's call takes, and meet it; either may find that the group is broken."""
    if name == "while_landing":
        group.broadcast_tensor_dict(FOLLOWING, 0)
    else:
        group.send_tensor_dict(FOLLOWING, 1)
    group.barrier()


CALLS = {each.__name__: each for each in (while_beginning, while_waiting, while_landing)}


def struck_twice(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let a handler of rank 1 strike in a call, and once more where the group is being broken."""
    with world(rank, world_size, directory) as everyone:
        group: Any = new_group(everyone, "g")
        if rank == 1:
            answer = group._health.left_halfway
            group._health.left_halfway = strike
            with pytest.raises(Interrupt):
                CALLS[name](group)
            group._health.left_halfway = answer
            with pytest.raises(GroupBrokenError) as caught:
                group.barrier()
            assert isinstance(caught.value.__cause__, Interrupt)
        else:
            with pytest.raises((GroupBrokenError, PeerLostError), match="interrupted: rank 1"):
                send(group, name)
        everyone.barrier()
        group.destroy()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", CALLS)
def test_a_second_strike_between_a_dict_and_its_tensors_is_told(ranks2: RankPool, name: str) -> None:
    """The next call breaks the group on both ranks, with what the handler raised as the reason."""
    ApartPool(ranks2).run(struck_twice, name)


def move(group: Any, name: str) -> None:
    """Send the dict from rank 0 to rank 1, or broadcast it."""
    if name == "broadcast":
        group.broadcast_tensor_dict(FOLLOWING if group.rank == 0 else None, 0)
    elif group.rank == 0:
        group.send_tensor_dict(FOLLOWING, 1)
    else:
        group.recv_tensor_dict(0)


def struck_sender(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let a handler of rank 0 strike when it has sent a message whose tensors are to follow."""
    with world(rank, world_size, directory) as everyone:
        group: Any = new_group(everyone, "g")
        if rank == 0:
            group._host.isend_tensor = group._host.broadcast_tensors = strike
            with pytest.raises(Interrupt):
                move(group, name)
            with pytest.raises(GroupBrokenError) as caught:
                group.barrier()
            assert isinstance(caught.value.__cause__, Interrupt)
        else:
            with pytest.raises((GroupBrokenError, PeerLostError), match="interrupted: rank 0"):
                move(group, name)
        everyone.barrier()
        group.destroy()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", ["send", "broadcast"])
def test_a_strike_between_a_dict_and_its_tensors_is_told_to_the_receivers(
    ranks2: RankPool, name: str
) -> None:
    """They would wait for tensors that never come, or take those of the next dict."""
    ApartPool(ranks2).run(struck_sender, name)


def unsent(rank: int, world_size: int, directory: Path, name: str) -> None:
    """Let rank 0 send a message without its tensors, and stay."""
    with world(rank, world_size, directory) as everyone:
        group: Any = new_group(everyone, "g", timeout_s=1.0)
        if rank == 0:
            group._host.isend_tensor = lambda *_: CompletedHandle()
            group._host.broadcast_tensors = lambda *_: None
            move(group, name)
        else:
            with pytest.raises(CommTimeoutError) as caught:
                move(group, name)
            assert caught.value.missing == (0,)
        meet(rank, range(world_size), directory, "seen")
        group.destroy()


@pytest.mark.guarantee("D6")
@pytest.mark.parametrize("name", ["send", "broadcast"])
def test_tensors_that_do_not_follow_their_dict_are_missed(ranks2: RankPool, name: str) -> None:
    """The receiver waits without limit for the start of a dict, but not for the rest: its sender is in the middle."""
    ApartPool(ranks2).run(unsent, name, timeout_s=60.0)
