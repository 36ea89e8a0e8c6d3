"""The offers of this process that wait for their tickets, and the descriptors on which it listens meanwhile."""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import threading
from typing import Final

import torch.distributed as dist

from coordinator.bootstrap.serving import listen
from coordinator.meeting.losses import forget_losses
from coordinator.meeting.tickets import Offer, Ticket
from shm_broadcast.errors import UsageError
from shm_broadcast.liveness import fork_count

__all__ = ["offer", "take", "withdraw"]


@dataclasses.dataclass(frozen=True)
class _Waiting:
    """An offer without a ticket: where it listens, if it does, and in which process it was made."""

    listener: socket.socket | None
    forks: int


_waiting: Final[dict[str, _Waiting]] = {}
# A signal handler may withdraw an offer while this thread makes or takes one.
_lock: Final = threading.RLock()


def offer(host: str | None = None, ports: tuple[int, int] | None = None) -> Offer:
    """Offer to start once, as a rank of a world. Not collective; sends nothing.

    With `host` this process listens there at once, for the store that it serves as rank 0, and keeps the descriptor:
    nobody can take the port before the ticket comes. Whoever does not use the offer calls `withdraw`. What was reported
    of an earlier world is forgotten, unless this process is still in one.

    Args:
        host: Name or address of this host at which the other ranks reach it, for rank 0; None for the other ranks.
        ports: First and last TCP port, of which the first free one is taken; None takes any free port.

    Raises:
        UsageError: The address is a wildcard or not of this host, or no port is free.
    """
    if host is None and ports is not None:
        raise UsageError("ports are for the process that listens: pass host too")
    listener = None if host is None else _listen(host, ports)
    if not dist.is_initialized():
        forget_losses()
    token = secrets.token_hex(16)
    with _lock:
        _waiting[token] = _Waiting(listener, fork_count())
    if host is None or listener is None:
        return Offer(token=token, pid=os.getpid())
    return Offer(token=token, pid=os.getpid(), host=host, port=int(listener.getsockname()[1]))


def _listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    first, last = ports or (0, 0)
    if ports is not None and not 1 <= first <= last <= 65535:
        raise UsageError(f"ports must be the first and the last one, from 1 to 65535, not {ports!r}")
    for port in range(first, last):
        try:
            return listen(host, port)
        except UsageError:
            continue  # taken; the last one of the range shows the reason if none is free
    return listen(host, last)


def withdraw(token: str) -> None:
    """Take back an offer whose ticket has not been used, and close its descriptor. Idempotent."""
    with _lock:
        waiting = _waiting.pop(token, None)
    if waiting is not None and waiting.listener is not None:
        waiting.listener.close()


def take(ticket: Ticket) -> socket.socket | None:
    """Use the ticket: return the socket that listens for rank 0's store, which the caller owns; None for other ranks.

    Raises:
        UsageError: This process has made no such offer, or its ticket was used before; nothing has changed.
    """
    with _lock:
        waiting = _waiting.get(ticket.offer)
        if waiting is None or waiting.forks != fork_count():
            raise UsageError(
                f"the {ticket} is good for one start of the process whose offer it answers, and this process (pid "
                f"{os.getpid()}) has no such offer open: it was started anew, has used the ticket before, or has "
                "withdrawn the offer; let it offer itself again, and make new tickets for all ranks"
            )
        listens = waiting.listener is not None
        if listens != (ticket.rank == 0):
            raise UsageError(
                f"the {ticket} answers an offer that {'listens' if listens else 'does not listen'}: rank 0 serves the "
                "store, and nobody else"
            )
        del _waiting[ticket.offer]
    return waiting.listener
