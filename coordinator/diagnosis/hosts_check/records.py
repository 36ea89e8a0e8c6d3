"""What the ranks tell each other in the check, and what rank 0 concludes. `--json` prints `Verdict`."""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

import msgspec

from coordinator.diagnosis.clock_offsets import Offset

__all__ = [
    "Failure",
    "Finding",
    "HostRow",
    "Interface",
    "Link",
    "LinkFailure",
    "Plan",
    "RankFacts",
    "Verdict",
]

_Short = Annotated[str, msgspec.Meta(max_length=1024)]


class Interface(msgspec.Struct, frozen=True):
    """A network interface that is up.

    Attributes:
        name: Of the interface.
        addresses: With their prefixes: "10.0.0.1/24".
        mtu: Largest packet in bytes.
    """

    name: _Short
    addresses: tuple[_Short, ...]
    mtu: int


class RankFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of itself and its host.

    Attributes:
        rank: Global rank.
        hostname: Name of its host.
        pid: Of its process.
        boot_id: Of its kernel; it includes the setting `host_id`.
        network_namespace: Inode of its network namespace.
        host_id: The setting; empty if there is none.
        address: The address at which others would reach it.
        interface: The interface that has the address; empty if none has.
        why: Why that address is used.
        interfaces: Those that are up, loopback left out.
        master_addresses: What the master's name stands for on this host.
        connect_ms: Time to connect to the store's port; None where this rank serves it.
        open_files: Limit of open descriptors that a process may set itself.
        shm_bytes: Size of /dev/shm.
        remote_ports: The setting; empty if there is none.
        versions: Of the packages.
        settings: Fingerprint of the settings that all ranks need alike.
    """

    rank: int
    hostname: _Short
    pid: int
    boot_id: _Short
    network_namespace: int
    host_id: _Short
    address: _Short
    interface: _Short
    why: _Short
    interfaces: tuple[Interface, ...]
    master_addresses: tuple[_Short, ...]
    connect_ms: float | None
    open_files: int
    shm_bytes: int
    remote_ports: _Short
    versions: dict[_Short, _Short]
    settings: _Short

    def __post_init__(self) -> None:
        """Check the addresses, which may come from a store that anybody can write to."""
        for address in (self.address, *self.master_addresses):
            ipaddress.ip_address(address.partition("%")[0])
        for address in (each for interface in self.interfaces for each in interface.addresses):
            ipaddress.ip_interface(address)


class Plan(msgspec.Struct, frozen=True):
    """What rank 0 has decided once the ranks have come.

    Attributes:
        measuring: One rank of each host, by host.
        token: With it a rank shows another that it knows the store: 64 hexadecimal digits.
        bulk_s: How long each direction of a pair sends in bulk, in seconds.
        limit_s: How long all rounds take at most, in seconds.
    """

    measuring: tuple[int, ...]
    token: Annotated[str, msgspec.Meta(min_length=64, max_length=64)]
    bulk_s: float
    limit_s: float


Failure = Literal[
    "refused", "no route", "timed out", "cut off", "large messages", "no listener", "nobody answered", "error"
]
"""How a connection fails: the answers of TCP, then what goes wrong on a connection that stands."""


class LinkFailure(msgspec.Struct, frozen=True):
    """Why one host does not reach another.

    Attributes:
        kind: How it fails.
        text: What was tried, and what happened.
    """

    kind: Failure
    text: _Short


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank has found of its way to another host. The first rank of a pair measures, the second connects back.

    Attributes:
        source: Rank that connects.
        target: Rank that listens.
        address: Address and port at which it listens.
        failure: Why it does not work; None if it does.
        connect_ms: Time to connect.
        round_trip_us: Median of small messages there and back; None if it was not measured, and so the next.
        sent_gbit: Gigabits per second from source to target, over one connection.
        received_gbit: The other way.
        clock: How the wall clock of the target relates to that of the source.
    """

    source: int
    target: int
    address: _Short
    failure: LinkFailure | None = None
    connect_ms: float | None = None
    round_trip_us: float | None = None
    sent_gbit: float | None = None
    received_gbit: float | None = None
    clock: Offset | None = None


class Finding(msgspec.Struct, frozen=True):
    """Something that keeps ranks from starting, or may.

    Attributes:
        level: An "error" keeps them from starting, or the check from finishing; a "warning" need not.
        text: Who, and what is wrong.
        look_at: What to look at.
    """

    level: Literal["error", "warning"]
    text: str
    look_at: str


class HostRow(msgspec.Struct, frozen=True, kw_only=True):
    """One host: ranks that have one kernel, one network and one name. A container with a network of its own counts.

    Attributes:
        name: Of the host.
        ranks: Ascending.
        leader: The first of them, which talks to the other hosts.
        address: Of the leader.
        interface: That has the address.
        mtu: Of the interface; None if it is unknown.
        why: Why the address is used.
        connect_ms: Time for the leader to connect to the store; None where it is served.
        clock_ms: How far its wall clock is ahead of that of rank 0's host; None if it is unknown.
        clock_error_ms: By how much that may be wrong.
    """

    name: str
    ranks: tuple[int, ...]
    leader: int
    address: str
    interface: str
    mtu: int | None
    why: str
    connect_ms: float | None
    clock_ms: float | None = None
    clock_error_ms: float | None = None


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 concludes, or where a rank stopped before.

    Attributes:
        version: Of this form.
        rank: Who says it.
        world_size: Number of ranks.
        missing: Ranks that did not come.
        stopped_at: The step at which this rank stopped; None if it went through.
        hosts: By their first rank.
        links: From each host to each other one.
        used: Sentences: what groups would use.
        findings: Errors first.
    """

    version: int = 1
    rank: int
    world_size: int
    missing: tuple[int, ...] = ()
    stopped_at: str | None = None
    hosts: tuple[HostRow, ...] = ()
    links: tuple[Link, ...] = ()
    used: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Return whether there is an error."""
        return any(finding.level == "error" for finding in self.findings)
