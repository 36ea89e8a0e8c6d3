"""TCP connections between ranks of a group on several hosts, which carry the tensors of collectives."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from coordinator.bootstrap.blocking_calls import UNREADABLE
from coordinator.heartbeats.handshake import TOKEN_BYTES, Meeting, Target, listen_at
from shm_broadcast.errors import NativeError

_PURPOSE: Final = "tensors"


class _Endpoint(msgspec.Struct, frozen=True):
    """Where a rank listens for those with higher ranks, and the token that they need; port 0 if there are none."""

    address: str
    port: int
    token: bytes


_decoder: Final = msgspec.json.Decoder(_Endpoint)


def open_connections(
    rank: int,
    partners: Sequence[int],
    address: str,
    exchange: Callable[[bytes], list[bytes]],
    check: Callable[[], None],
    where: str,
    timeout_s: float,
) -> dict[int, socket.socket]:
    """Return a connection with each of `partners`; the caller owns them. Collective over the group.

    Addresses and tokens travel by `exchange`, so whoever can read what the group exchanges can take the place of a
    rank, as with the connections of Gloo.

    Args:
        rank: This rank in the group.
        partners: Ranks in the group; each of them names this one too.
        address: Numeric address of this host to listen on.
        exchange: As in `CommunicatorContext`.
        check: Raises if a rank of the group is lost or has failed; called ten times a second.
        where: The beginning of an error's text.
        timeout_s: Deadline in seconds.

    Raises:
        CommTimeoutError: Not in time; `.missing` names the partners, by their ranks in the group.
        NativeError: This host does not let a rank listen, a partner's refuses connections, or a partner told nonsense.
        CapabilityError: The kernel opens no more sockets.
        Others: As `exchange` and `check`.
    """
    end = time.monotonic() + timeout_s
    token = secrets.token_bytes(TOKEN_BYTES)
    higher = [partner for partner in partners if partner > rank]
    listener = listen_at(address, _PURPOSE) if higher else None
    try:
        port = 0 if listener is None else listener.getsockname()[1]
        told = exchange(msgspec.json.encode(_Endpoint(address, port, token)))
        targets = {partner: _target(told[partner], partner, where) for partner in partners if partner < rank}
        meeting = Meeting(rank, listener, token, higher, targets, _PURPOSE)
    except BaseException:
        if listener is not None:
            listener.close()
        raise
    opened = meeting.run(check, where, max(end - time.monotonic(), 0.0))
    return {partner: each.connection for partner, each in opened.items()}


def _target(told: bytes, partner: int, where: str) -> Target:
    try:
        endpoint = _decoder.decode(told)
    except UNREADABLE as error:
        raise NativeError(
            f"{where}: rank {partner} of the group told no address for its connections: {error}",
            library="torch.distributed",
            function="all_gather",
        ) from error
    return Target(endpoint.address, endpoint.port, endpoint.token)


__all__ = ["open_connections"]
