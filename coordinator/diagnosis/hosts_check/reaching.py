"""Whether a listener answers at an address, and what it means if none does."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from typing import Final

from coordinator.addresses.names import Address
from coordinator.diagnosis.hosts_check.records import LinkFailure

__all__ = ["connect", "failure_of", "keep_connecting"]

_RETRY_S: Final = 0.1

_NO_ROUTE: Final = frozenset({errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EHOSTDOWN})


def connect(address: Address, timeout_s: float, source: str = "") -> tuple[socket.socket, float]:
    """Return a connection, and the time it took in ms.

    Args:
        address: Where to.
        timeout_s: Deadline in seconds.
        source: Numeric address to connect from; empty lets the kernel choose.

    Raises:
        OSError: See `failure_of`.
    """
    connection = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout_s)
        if source:
            connection.bind((source, 0))
        begin = time.perf_counter()
        connection.connect(address.target)
        took_ms = (time.perf_counter() - begin) * 1e3
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except BaseException:
        connection.close()
        raise
    return connection, took_ms


def keep_connecting(addresses: Sequence[Address], timeout_s: float) -> float | LinkFailure:
    """Return the time in ms to connect to the first address that answers, or how the last try failed.

    A refused connection is tried again until the deadline: the listener may be about to start.
    """
    end = time.monotonic() + timeout_s
    failure: LinkFailure | None = None
    while True:
        for address in addresses:
            try:
                connection, took_ms = connect(address, max(end - time.monotonic(), 0.1))
            except OSError as error:
                found = failure_of(error, f"{address.text} port {address.target[1]}", timeout_s)
                # The last try may have no time left for what an earlier one has been told.
                if failure is None or found.kind != "timed out":
                    failure = found
                continue
            connection.close()
            return took_ms
        if failure is None:
            return LinkFailure("error", "there is no address to connect to")
        if time.monotonic() + _RETRY_S >= end:
            return failure
        time.sleep(_RETRY_S)


def failure_of(error: OSError, where: str, timeout_s: float) -> LinkFailure:
    """Return what the failure of a connection to `where` means."""
    if isinstance(error, ConnectionRefusedError):
        return LinkFailure(
            "refused", f"{where} refuses connections: its host answers, and nobody listens there"
        )
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return LinkFailure(
            "timed out", f"{where} did not answer within {timeout_s:g} s, nor did its host refuse"
        )
    if error.errno in _NO_ROUTE:
        return LinkFailure("no route", f"there is no way to {where}: {error.strerror}")
    if isinstance(error, ConnectionError):
        return LinkFailure(
            "cut off", f"{where} ended the connection: {error.strerror or type(error).__name__}"
        )
    return LinkFailure("error", f"{where}: {error.strerror or error}")
