"""What the facts of the ranks and the links between their hosts mean: pure functions, from records to a verdict."""

from __future__ import annotations

import ipaddress
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from coordinator.addresses.names import is_loopback
from coordinator.diagnosis.hosts_check.records import Finding, HostRow, Link, RankFacts, Verdict

__all__ = ["Gathered", "hosts_of", "judge", "listed"]

SLOWER: Final = 5.0
"""How much slower than the median a pair must be to be named."""
CLOCK_MS: Final = 1000.0
"""How far clocks may be apart."""


class Gathered(msgspec.Struct, frozen=True, kw_only=True):
    """What rank 0 has found.

    Attributes:
        world_size: Number of ranks.
        store: Where the store is, and who serves it.
        facts: Of the ranks that have told them, by rank.
        arrived: The ranks that came to the store, those without facts too.
        links: Between the first ranks of the hosts, both ways.
    """

    world_size: int
    store: str
    facts: dict[int, RankFacts]
    arrived: tuple[int, ...]
    links: tuple[Link, ...] = ()


def hosts_of(facts: Mapping[int, RankFacts]) -> list[list[RankFacts]]:
    """Return the ranks of each host, both in order: those with one kernel, one network and one name."""
    hosts: dict[tuple[object, ...], list[RankFacts]] = {}
    for _, each in sorted(facts.items()):
        hosts.setdefault((each.boot_id, each.network_namespace, each.hostname), []).append(each)
    return list(hosts.values())


def judge(gathered: Gathered) -> Verdict:
    """Return what it all means."""
    hosts = hosts_of(gathered.facts)
    names = _names(hosts)
    findings = [
        *_absences(gathered, hosts),
        *_hidden(hosts),
        *_disagreements(gathered.facts),
        *_broken_links(gathered, names),
        *_clones(hosts),
        *_networks(hosts, names),
        *_packet_sizes(hosts, names),
        *_slow_links(gathered.links, names),
        *_clocks(gathered.links, names),
    ]
    missing = tuple(rank for rank in range(gathered.world_size) if rank not in gathered.arrived)
    return Verdict(
        rank=0,
        world_size=gathered.world_size,
        missing=missing,
        hosts=tuple(_row(host, names, gathered.links, hosts[0][0].rank) for host in hosts),
        links=gathered.links,
        used=tuple(_used(gathered, hosts)),
        findings=tuple(sorted(findings, key=lambda finding: finding.level != "error")),
    )


def listed(ranks: Iterable[int]) -> str:
    """Return `0-3, 7` for such ranks."""
    runs = list[list[int]]()
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _names(hosts: Sequence[Sequence[RankFacts]]) -> dict[int, str]:
    """Return the name of the host of each measuring rank, with its address where two hosts have one name."""
    plain = [host[0].hostname for host in hosts]
    return {
        host[0].rank: name if plain.count(name) == 1 else f"{name} ({host[0].address})"
        for host, name in zip(hosts, plain, strict=True)
    }


def _row(host: Sequence[RankFacts], names: Mapping[int, str], links: Iterable[Link], first: int) -> HostRow:
    leader = host[0]
    clock = next(
        (link.clock for link in links if link.clock and (link.source, link.target) == (first, leader.rank)),
        None,
    )
    return HostRow(
        name=names[leader.rank],
        ranks=tuple(each.rank for each in host),
        leader=leader.rank,
        address=leader.address,
        interface=leader.interface,
        mtu=next((each.mtu for each in leader.interfaces if each.name == leader.interface), None),
        why=leader.why,
        connect_ms=leader.connect_ms,
        clock_ms=0.0 if leader.rank == first else None if clock is None else -clock.offset_ns / 1e6,
        clock_error_ms=None if clock is None or clock.error_ns is None else clock.error_ns / 1e6,
    )


# --- what keeps ranks from starting ---------------------------------------------------------------------------


def _absences(gathered: Gathered, hosts: Sequence[Sequence[RankFacts]]) -> Iterator[Finding]:
    missing = [rank for rank in range(gathered.world_size) if rank not in gathered.arrived]
    if missing:
        yield from _hidden_store(hosts)
        there = "; ".join(f"{host[0].hostname}: {listed(each.rank for each in host)}" for host in hosts)
        port = "" if len(hosts) > 1 else "; nobody of another host has come, so look at the store's port too"
        yield Finding(
            "error",
            f"{_ranks(missing)} did not come to the store. Those that did: {there}",
            "the output of the missing ranks, which says at which step they have stopped; without output the launcher "
            f"has not started them, or not within --timeout{port}",
        )
    silent = sorted(set(gathered.arrived) - set(gathered.facts))
    if silent:
        yield Finding(
            "error",
            f"{_ranks(silent)} came, and then one or two KB from there did not: small messages pass and large ones "
            "do not, or the process has ended",
            _MTU_ADVICE,
        )


def _hidden_store(hosts: Sequence[Sequence[RankFacts]]) -> Iterator[Finding]:
    """Name the host that serves the store at a loopback address, if there is one."""
    for facts in (each for host in hosts for each in host if each.connect_ms is None):
        hidden = [each for each in facts.master_addresses if is_loopback(each)]
        if hidden:
            yield Finding(
                "error",
                f"{facts.hostname} serves the store at {hidden[0]}, for which the master's name stands there: no "
                "other host can come",
                f"/etc/hosts on {facts.hostname}, where some distributions write 127.0.1.1; or use the address in "
                "the network as the master's",
            )


_MTU_ADVICE: Final = (
    "the MTU of the interfaces, bridges, tunnels and switches on the way: `ip link`, `ping -M do -s 1472 ADDRESS` "
    "(8972 "
    "for jumbo frames); a firewall that drops ICMP hides it"
)


def _hidden(hosts: Sequence[Sequence[RankFacts]]) -> Iterator[Finding]:
    if len(hosts) < 2:
        return
    for host in hosts:
        hidden = [each for each in host if is_loopback(each.address)]
        if hidden:
            yield Finding(
                "error",
                f"{_ranks(each.rank for each in hidden)} on {host[0].hostname} would announce the loopback address "
                f"{hidden[0].address}, which no other host reaches",
                f"the master's address, which stands for {hidden[0].master_addresses[0]} there (/etc/hosts), and "
                "GROUP_COORDINATOR_INTERFACE",
            )


def _disagreements(facts: Mapping[int, RankFacts]) -> Iterator[Finding]:
    for package in ("group-coordinator", "torch", "python"):
        holders = _holders({rank: each.versions.get(package, "none") for rank, each in facts.items()})
        if len(holders) > 1:
            yield Finding(
                "warning",
                f"different versions of {package}: {_spread(holders, facts)}",
                "what is installed on each host, or the image of its container: a group whose ranks differ may be "
                "refused",
            )
    holders = _holders({rank: each.settings for rank, each in facts.items()})
    if len(holders) > 1:
        yield Finding(
            "error",
            f"different settings: {_spread(holders, facts)} (fingerprints)",
            "the variables GROUP_COORDINATOR_* on each host: `python -m coordinator info --no-start` shows which "
            "differ from "
            "the defaults",
        )


def _holders(values: Mapping[int, str]) -> dict[str, list[int]]:
    holders: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        holders.setdefault(value, []).append(rank)
    return holders


def _spread(holders: Mapping[str, Sequence[int]], facts: Mapping[int, RankFacts]) -> str:
    """Return who has which value; the value of most comes first."""
    texts = []
    for value, ranks in sorted(holders.items(), key=lambda item: -len(item[1])):
        hostnames = [facts[rank].hostname for rank in ranks]
        texts.append(f"{value} on {_some(hostnames, 4)} ({_ranks(ranks)})")
    return "; ".join(texts)


def _broken_links(gathered: Gathered, names: Mapping[int, str]) -> Iterator[Finding]:
    works = {(link.source, link.target): link.failure is None for link in gathered.links}
    for link in gathered.links:
        if link.failure is None:
            continue
        kind = link.failure.kind
        source, target = (_name(rank, names, gathered.facts) for rank in (link.source, link.target))
        other_way = works.get((link.target, link.source))
        back = f"; {target} reaches {source}" if other_way and kind != "large messages" else ""
        fails = "loses large packets on the way to" if kind == "large messages" else "does not reach"
        yield Finding(
            "error", f"{source} {fails} {target}: {link.failure.text}{back}", _advice(link, gathered)
        )


def _advice(link: Link, gathered: Gathered) -> str:
    kind = link.failure.kind if link.failure is not None else "error"
    address = link.address.partition(" ")[0]
    target = gathered.facts.get(link.target)
    if kind == "large messages":
        sizes = {
            facts.hostname: mtu
            for facts in (gathered.facts.get(link.source), target)
            if facts is not None
            for mtu in [next((each.mtu for each in facts.interfaces if each.name == facts.interface), None)]
        }
        own = ", ".join(f"{name} {mtu}" for name, mtu in sizes.items())
        return f"{_MTU_ADVICE}. The ends have {own}"
    if kind in ("refused", "timed out"):
        does = "rejects" if kind == "refused" else "drops"
        return (
            f"a firewall on the way to {address} that lets the store's port through and {does} others: Gloo and "
            "queues "
            "listen on any port of `net.ipv4.ip_local_port_range` (see Ports for a firewall, several-hosts.md)"
        )
    if kind == "no route":
        return (
            f"`ip route get {address}` on the host that connects: its interface "
            f"{_interface(gathered.facts.get(link.source))} is not in the network of {_interface(target)}; "
            "GROUP_COORDINATOR_INTERFACE chooses another one"
        )
    if kind in ("no listener", "nobody answered"):
        return f"the output of rank {link.target}, which has ended, hangs, or may not listen there"
    return f"the output of rank {link.target}; a middlebox that ends connections"


def _interface(facts: RankFacts | None) -> str:
    return "unknown" if facts is None else f"{facts.interface} ({facts.address} of {facts.hostname})"


# --- what may do harm -----------------------------------------------------------------------------------------


def _clones(hosts: Sequence[Sequence[RankFacts]]) -> Iterator[Finding]:
    kernels: dict[str, list[RankFacts]] = {}
    for host in hosts:
        kernels.setdefault(host[0].boot_id, []).append(host[0])
    for same in kernels.values():
        if len(same) > 1:
            yield Finding(
                "warning",
                f"{', '.join(each.hostname for each in same)} report one boot id: their ranks would share memory, "
                "which is "
                "right for containers of one machine and wrong for clones of one",
                "whether they are one machine; if they are clones, set GROUP_COORDINATOR_HOST_ID to another value "
                "on each",
            )


def _networks(hosts: Sequence[Sequence[RankFacts]], names: Mapping[int, str]) -> Iterator[Finding]:
    if not hosts:
        return
    master = hosts[0][0]
    network = _network_of(master)
    for host in hosts[1:]:
        own = _network_of(host[0])
        if network is None or own is None or own == network:
            continue
        yield Finding(
            "warning",
            f"{names[host[0].rank]} would use {host[0].address} on {host[0].interface}, in the network {own}, and "
            f"{names[master.rank]}, which has rank 0, {master.address} in {network}",
            "whether that is the fast network: a router must connect the two; GROUP_COORDINATOR_INTERFACE chooses "
            "another "
            "interface",
        )


def _network_of(facts: RankFacts) -> str | None:
    wanted = ipaddress.ip_address(facts.address.partition("%")[0])
    for interface in facts.interfaces:
        for each in interface.addresses:
            found = ipaddress.ip_interface(each)
            if found.ip == wanted:
                return str(found.network)
    return None


def _packet_sizes(hosts: Sequence[Sequence[RankFacts]], names: Mapping[int, str]) -> Iterator[Finding]:
    sizes = {
        names[host[0].rank]: each.mtu
        for host in hosts
        for each in host[0].interfaces
        if each.name == host[0].interface
    }
    if len(set(sizes.values())) > 1:
        yield Finding(
            "warning",
            "the interfaces have different MTUs: "
            + ", ".join(f"{name} {mtu}" for name, mtu in sizes.items()),
            "`ip link`: hosts of one network need the same, or large packets may get lost on the way to the "
            "smaller one",
        )


def _slow_links(links: Sequence[Link], names: Mapping[int, str]) -> Iterator[Finding]:
    rates = {
        way: rate
        for link in links
        for way, rate in (
            ((link.source, link.target), link.sent_gbit),
            ((link.target, link.source), link.received_gbit),
        )
        if rate is not None
    }
    trips = {
        (link.source, link.target): link.round_trip_us for link in links if link.round_trip_us is not None
    }
    # With one pair there are two directions, and the median lies between them: the faster one counts then.
    usual = (max if len(rates) <= 2 else statistics.median)(rates.values()) if rates else 0.0
    for (source, target), rate in rates.items():
        if rate * SLOWER < usual:
            yield Finding(
                "warning",
                f"{names[source]} sends {rate:.3g} Gbit/s to {names[target]}, and {usual:.3g} Gbit/s is usual here",
                "the cable, the switch port and the negotiated speed (`ethtool INTERFACE`), and what else uses "
                "that line",
            )
    if len(trips) < 2:
        return
    usual = statistics.median(trips.values())
    for (source, target), trip in trips.items():
        if trip > SLOWER * usual:
            yield Finding(
                "warning",
                f"a message from {names[source]} to {names[target]} and back takes {trip:.0f} us, and {usual:.0f} "
                "us is "
                "usual here",
                "whether that way goes over more switches or another network, and how busy both hosts are",
            )


def _clocks(links: Iterable[Link], names: Mapping[int, str]) -> Iterator[Finding]:
    first = min(names, default=0)
    for link in links:
        if link.source != first or link.clock is None or link.clock.error_ns is None:
            continue
        ahead_ms = -link.clock.offset_ns / 1e6
        if abs(ahead_ms) - link.clock.error_ns / 1e6 > CLOCK_MS:
            what = "ahead of" if ahead_ms > 0 else "behind"
            yield Finding(
                "warning",
                f"the clock of {names[link.target]} is {abs(ahead_ms) / 1e3:.1f} s {what} that of {names[first]}",
                "NTP or chrony on both (`timedatectl`): logs of the hosts do not line up; groups do not mind",
            )


# --- what would be used ---------------------------------------------------------------------------------------


def _used(gathered: Gathered, hosts: Sequence[Sequence[RankFacts]]) -> Iterator[str]:
    yield f"The ranks meet in the store at {gathered.store}."
    kernels: dict[str, list[RankFacts]] = {}
    for each in (each for host in hosts for each in host):
        kernels.setdefault(each.boot_id, []).append(each)
    together = "; ".join(
        f"{_ranks(each.rank for each in same)} ({_some(each.hostname for each in same)})"
        for same in kernels.values()
        if len(same) > 1
    )
    if together:
        yield f"Shared memory between ranks of one kernel: {together}."
    if len(kernels) < 2:
        yield "All ranks that came are on one kernel: nothing goes over a network between them."
    if len(hosts) < 2:
        return
    leaders = [min(each.rank for each in same) for same in kernels.values()]
    if len(kernels) > 1:
        yield f"Leaders, one for each host, which talk to the other hosts: {_ranks(leaders)}."
    ways: dict[str, list[str]] = {}
    for facts in (host[0] for host in hosts):
        ways.setdefault(facts.why, []).append(f"{facts.address} ({facts.interface} of {facts.hostname})")
    for why, places in ways.items():
        yield f"Gloo at {_some(places)}, {why}."
    ports = sorted({each.remote_ports or "on any free port" for each in gathered.facts.values()})
    yield f"Queues between hosts: encrypted TCP at the same addresses, {', '.join(ports)}."


def _some(names: Iterable[str], most: int = 8) -> str:
    """Return different names, and how many there are beyond the first `most`."""
    different = list(dict.fromkeys(names))
    rest = len(different) - most
    return ", ".join(different[:most]) + (f" and {rest} more" if rest > 0 else "")


def _ranks(ranks: Iterable[int]) -> str:
    text = listed(ranks)
    return f"rank {text}" if text.isdigit() else f"ranks {text}"


def _name(rank: int, names: Mapping[int, str], facts: Mapping[int, RankFacts]) -> str:
    return names.get(rank) or (facts[rank].hostname if rank in facts else f"the host of rank {rank}")
