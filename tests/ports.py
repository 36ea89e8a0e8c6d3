"""Find free ports for tests, the addresses on which a process listens, and its connections."""

import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["connections", "free_port", "listening_addresses", "listening_ports"]

# States of include/net/tcp_states.h.
ESTABLISHED = 1
LISTEN = 10


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


def _own_sockets(state: int) -> list[tuple[str, int]]:
    """Return the own address and port of each TCP socket of this process that is in a state.

    Each descriptor is asked: /proc/net/tcp may leave a socket out while those of other processes come and go.
    """
    found = list[tuple[str, int]]()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError), _duplicate(int(descriptor)) as own:  # it is closed meanwhile, or no socket
            is_tcp = own.family in (socket.AF_INET, socket.AF_INET6) and own.type == socket.SOCK_STREAM
            # The first byte of `struct tcp_info` is the state.
            if is_tcp and own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == state:
                address, port, *_ = own.getsockname()
                found.append((address, port))
    return found


def _duplicate(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
