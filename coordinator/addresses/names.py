"""From the name of a host to its addresses, also while the name service is not ready."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from typing import Any, Final, NamedTuple

from shm_broadcast.errors import ClosedError, UsageError
from shm_broadcast.interruption import raised_by_handler
from shm_broadcast.reports.log_fields import log_fields

__all__ = ["Address", "addresses_of", "await_addresses", "is_loopback", "is_numeric", "refuse_loopback"]

logger: logging.Logger = logging.getLogger(__name__)

# Pauses between two questions to the name service, growing by half: a pod's name appears within seconds of the pod.
_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class Address(NamedTuple):
    """One address of a host.

    Attributes:
        family: `socket.AF_INET` or `AF_INET6`.
        target: What `connect` and `bind` take: the numeric address, the port and, in IPv6, flow and scope.
    """

    family: int
    target: tuple[Any, ...]

    @property
    def text(self) -> str:
        """Return the numeric address."""
        return str(self.target[0])


def addresses_of(host: str, port: int) -> list[Address]:
    """Return the addresses of a name or of a numeric address, IPv4 and IPv6, those first that this host reaches.

    Blocks for as long as the name service does, which may be many seconds.

    Raises:
        OSError: The name has no address now; it may have one later.
        UsageError: It can never have one.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise UsageError(f"{host!r} is no name of a host: {error}") from error
    return [Address(family, target) for family, _, _, _, target in found]


def await_addresses(
    host: str, port: int, timeout_s: float, rank: int, over: threading.Event
) -> list[Address]:
    """Return the addresses of `host` as soon as it has any; the log says if it has none at first.

    Args:
        host: A name or a numeric address.
        port: The port that the addresses get.
        timeout_s: How long to try, in seconds.
        rank: This process's global rank, for the log.
        over: Set by another thread when nobody waits for the result any more.

    Raises:
        OSError: It has none after `timeout_s`.
        UsageError: It can never have one.
        ClosedError: `over` was set.
    """
    end = time.monotonic() + timeout_s
    pause_s, has_told = _FIRST_PAUSE_S, False
    while True:
        try:
            return addresses_of(host, port)
        except OSError as error:
            if raised_by_handler(error):
                raise
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise
            if not has_told:
                has_told = True
                logger.warning(
                    "the name %s has no address yet (%s); trying for %.0f s",
                    host,
                    error.strerror,
                    left_s,
                    extra=log_fields(rank=rank, call="init_distributed_environment"),
                )
            if over.wait(min(pause_s, left_s)):
                raise ClosedError(f"looking for {host}: nobody waits any more") from error
            pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)


def is_numeric(host: str) -> bool:
    """Return whether `host` is an address and no name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Return whether a numeric address reaches this host only; one of IPv6 may name its interface (`fe80::1%eth0`)."""
    number = ipaddress.ip_address(address.partition("%")[0])
    mapped = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return (mapped or number).is_loopback


def refuse_loopback(host: str, address: str) -> UsageError:
    """Return the error for a world on several hosts whose master is at a loopback address of this one."""
    here = socket.gethostname()
    if is_numeric(host):
        return UsageError(
            f"the ranks are on several hosts, and the master's address {host} reaches host {here} only: use an address "
            "at which the other hosts reach the master"
        )
    return UsageError(
        f"the ranks are on several hosts, and on host {here} the master's name {host} stands for the loopback address "
        f"{address}, which other hosts cannot reach: give the name its address in the network in /etc/hosts, where "
        "some distributions write 127.0.1.1, or use an address instead of the name"
    )
