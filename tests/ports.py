"""Find free ports for tests, the addresses on which a process listens, and its connections."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["connections", "free_port", "listening_addresses", "listening_ports"]

# States of include/net/tcp_states.h, as /proc/net/tcp prints them.
ESTABLISHED = "01"
LISTEN = "0A"


def free_port(host: str = "127.0.0.1") -> int:
    """Return an unused port of `host`, one that the kernel gives to no connection of another test meanwhile."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.SystemRandom().randrange(10_000, lowest)
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port


def listening_addresses() -> list[str]:
    """Return the addresses on which this process listens by TCP, without ports, unique and sorted."""
    return sorted({address for address, _ in _own_sockets(LISTEN)})


def listening_ports() -> list[int]:
    """Return the ports on which this process listens by TCP, sorted."""
    return sorted(port for _, port in _own_sockets(LISTEN))


def connections() -> int:
    """Return how many TCP connections this process holds."""
    return len(_own_sockets(ESTABLISHED))


def _own_sockets(state: str) -> list[tuple[str, int]]:
    """Return the own address and port of each TCP socket of this process that is in a state."""
    inodes = _own_socket_inodes()
    found = list[tuple[str, int]]()
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        path = Path(f"/proc/self/net/{table}")
        if not path.exists():
            continue
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == state and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.append((_decoded(address, family), int(port, 16)))
    return found


def _own_socket_inodes() -> set[str]:
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[len("socket:[") : -1])
    return inodes


def _decoded(text: str, family: socket.AddressFamily) -> str:
    """Decode an address of /proc/net: 32-bit words in the host's byte order."""
    raw = bytes.fromhex(text)
    words = [raw[start : start + 4][::-1] for start in range(0, len(raw), 4)]
    return socket.inet_ntop(family, b"".join(words))
