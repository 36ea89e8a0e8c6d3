"""An exchange between all ranks over Gloo, made of sends and receives, whose waits this package can end.

Gloo's own all-gather and all-to-all cannot be ended. If their group breaks while a message is being copied, Gloo
forgets that message (`gloo.waits`), and a thread of torch waits for it until the deadline of the call. So does whoever
lets go of the group, because the destructor waits for that thread: a garbage collection stood still for 66 s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

import torch
import torch.distributed as dist

from device_comm.health import GroupHealth, Operation
from device_comm.works import ExchangeWorks, WaiterThreads
from shm_broadcast.interruption import Forks

__all__ = ["exchange"]

# The transfers of exchanges in which a handler has forked this child. It keeps them: to let go of one, Gloo waits for
# what its own thread does, which runs in the parent alone.
_kept: Final[list[list[tuple[int, dist.Work]]]] = []


class Sending(Protocol):
    """A process group, or a backend, over Gloo."""

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int, /) -> dist.Work:
        """Start to send to rank `dst`."""

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int, /) -> dist.Work:
        """Start to receive from rank `src`."""


def exchange(
    group: Sending,
    threads: WaiterThreads,
    health: GroupHealth,
    operation: Operation,
    parts: tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]],
    tag: int,
    timeout_s: float,
) -> None:
    """Send a part to each other rank and receive one from it; return when all have arrived. Collective.

    Args:
        group: Where to post.
        threads: Where to wait.
        health: The group's state.
        operation: The call.
        parts: What is sent, and where to receive, by rank in the group; contiguous, of type uint8. Empty ones are
            skipped, so both ranks must mean the same sizes: Gloo ends a process that receives another one.
        tag: The messages of one tag stay in order. Calls that may meet each other by mistake need different ones.
        timeout_s: Deadline in seconds; `GroupHealth.wait` tells which errors are raised.
    """
    sent, received = parts
    works: list[tuple[int, dist.Work]] = []
    try:
        with health.transport(operation) as post:
            # The receives first: the thread waits in this order, and what arrives is what the call is for.
            for peer, part in received.items():
                if part.numel():
                    works.append((health.ranks[peer], post(group.recv, [part], peer, tag)))
            for peer, part in sent.items():
                if part.numel():
                    works.append((health.ranks[peer], post(group.send, [part], peer, tag)))
            # Here too, since the system may have no thread to give: what is posted then ends with the group.
            transfers = ExchangeWorks(threads, works, parts, health.watch.watches)
        health.wait(operation, transfers, timeout_s)
    finally:
        # Without a call, so that no handler forks between this look and the end of the function, which drops `works`.
        if health.posts.forks != Forks.count:
            _kept.append(works)
