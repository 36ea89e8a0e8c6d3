"""The network interfaces of this host with all their addresses, as the kernel lists them."""

from __future__ import annotations

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from coordinator.diagnosis.hosts_check.records import Interface

__all__ = ["carrier_of", "list_interfaces"]

# netdevice(7). The loopback interface is left out: it connects no hosts.
_SIOCGIFCONF: Final = 0x8912
_SIOCGIFFLAGS: Final = 0x8913
_SIOCGIFNETMASK: Final = 0x891B
_SIOCGIFMTU: Final = 0x8921
_UP: Final = 0x1
_LOOPBACK: Final = 0x8

# struct ifreq: a name and a union, of which an address takes the first 16 bytes.
_REQUEST: Final = struct.Struct("16s24s")
_MOST_ADDRESSES: Final = 1024
_IPV6_ADDRESSES: Final = Path("/proc/net/if_inet6")


def list_interfaces() -> tuple[Interface, ...]:
    """Return the interfaces that are up, loopback left out, with their addresses; those without any too."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        addresses: dict[str, list[str]] = {}
        for name, address in (*_ipv4_addresses(probe), *_ipv6_addresses()):
            addresses.setdefault(name, []).append(address)
        found = []
        for _, name in socket.if_nameindex():
            flags = _asked(probe, _SIOCGIFFLAGS, name, "H")
            if flags is None or not flags & _UP or flags & _LOOPBACK:
                continue
            mtu = _asked(probe, _SIOCGIFMTU, name, "i") or 0
            found.append(Interface(name, tuple(addresses.get(name, ())), mtu))
        return tuple(found)


def carrier_of(address: str, interfaces: tuple[Interface, ...]) -> Interface | None:
    """Return the interface that has a numeric address; None if none of them has."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    for interface in interfaces:
        if any(ipaddress.ip_interface(each).ip == wanted for each in interface.addresses):
            return interface
    return None


def _asked(probe: socket.socket, question: int, name: str, form: str) -> int | None:
    try:
        answer = fcntl.ioctl(probe.fileno(), question, _REQUEST.pack(name.encode(), b""))
    except OSError:  # it has just been removed
        return None
    return int(struct.unpack_from(form, answer, 16)[0])


def _ipv4_addresses(probe: socket.socket) -> Iterator[tuple[str, str]]:
    room = array.array("B", bytes(_REQUEST.size * _MOST_ADDRESSES))
    request = struct.pack("iP", len(room), room.buffer_info()[0])
    used, _ = struct.unpack("iP", fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, request))
    for label, address in _REQUEST.iter_unpack(room.tobytes()[:used]):
        name = label.partition(b"\0")[0].decode()
        try:
            # With the address the kernel tells those of one interface apart.
            mask = fcntl.ioctl(probe.fileno(), _SIOCGIFNETMASK, _REQUEST.pack(label, address))
        except OSError:  # it has just been removed
            continue
        text, mask_text = socket.inet_ntoa(address[4:8]), socket.inet_ntoa(mask[20:24])
        # Further addresses may have labels of their own: eth0:1.
        yield name.partition(":")[0], str(ipaddress.IPv4Interface(f"{text}/{mask_text}"))


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    if not _IPV6_ADDRESSES.exists():  # a kernel without IPv6
        return
    for row in _IPV6_ADDRESSES.read_text().splitlines():
        digits, _, prefix, _, _, name = row.split()
        yield name, f"{ipaddress.IPv6Address(bytes.fromhex(digits))}/{int(prefix, 16)}"
