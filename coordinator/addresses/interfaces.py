"""The address at which the other ranks reach this process: of the route to the master, or of a network interface."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path
from typing import Final

from coordinator.addresses.names import Address
from shm_broadcast.descriptors import read_text
from shm_broadcast.errors import CapabilityError, SettingsError
from shm_broadcast.interruption import raised_by_handler

__all__ = ["interface_address", "routed_address"]

_SIOCGIFADDR: Final = 0x8915  # netdevice(7)

# A row of it: the address without colons, number of the interface, length of the prefix, scope, flags, and its name.
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")
# Scopes of include/net/ipv6.h; 0 is global, which private networks (fd00::/8) are too.
_LINK_LOCAL: Final = 0x20
# Flags of include/uapi/linux/if_addr.h: deprecated, duplicate, tentative. Nobody can listen on the last two.
_UNUSABLE: Final = 0x20 | 0x08 | 0x40


def routed_address(host: str, addresses: list[Address]) -> str:
    """Return this host's address on the interface that routes to a host, without sending anything.

    Args:
        host: Name of the host, for errors.
        addresses: Its addresses; the first one counts to which there is a route.

    Raises:
        CapabilityError: There is no route to any of them.
    """
    refusals = list[str]()
    for address in addresses:
        try:
            with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
                # Connecting a datagram socket sends nothing; it only looks up the route.
                probe.connect(address.target)
                return str(probe.getsockname()[0])
        except OSError as error:
            if raised_by_handler(error):
                raise
            refusals.append(f"{address.text}: {error.strerror}")
    raise CapabilityError(
        f"this host, {socket.gethostname()}, has no route to {host} ({'; '.join(refusals)})",
        requirement="a route to the master",
    )


def interface_address(interface: str, prefers_ipv6: bool = False) -> str:
    """Return the address of a network interface.

    Args:
        interface: Its name.
        prefers_ipv6: Which one to return if it has addresses of IPv4 and of IPv6. All ranks need the same family, so it
            is that of the master's address.

    Raises:
        SettingsError: There is no such interface, or it has no address, but perhaps a link-local one.
    """
    found = [_ipv4_address(interface), _ipv6_address(interface)]
    for address in reversed(found) if prefers_ipv6 else found:
        if address is not None:
            return address
    names = ", ".join(name for _, name in socket.if_nameindex())
    raise SettingsError(
        f"setting interface = {interface!r}: there is no such interface, or it has no address of IPv4 or IPv6; "
        f"this host has {names}"
    )


def _ipv4_address(interface: str) -> str | None:
    try:
        request = struct.pack("256s", os.fsencode(interface)[:15])
    except UnicodeEncodeError:  # no interface has such a name
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            if raised_by_handler(error):
                raise
            return None
    return socket.inet_ntoa(answer[20:24])


def _ipv6_address(interface: str) -> str | None:
    if not _IPV6_ADDRESSES.exists():  # a kernel without IPv6
        return None
    for row in read_text(_IPV6_ADDRESSES).splitlines():
        digits, _, _, scope, flags, name = row.split()
        if name == interface and int(scope, 16) != _LINK_LOCAL and not int(flags, 16) & _UNUSABLE:
            return str(ipaddress.IPv6Address(bytes.fromhex(digits)))
    return None
