"""What the facts of the ranks and the links between their hosts mean: pure functions, from records to a verdict."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from coordinator.addresses.names import is_loopback
from coordinator.diagnosis.hosts_check.pairs import MTU_ADVICE, broken_links, clocks_apart, slow_links
from coordinator.diagnosis.hosts_check.records import Finding, HostRow, Link, RankFacts, Verdict

__all__ = ["Gathered", "hosts_of", "judge", "listed"]


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
        *broken_links(gathered.facts, gathered.links, names),
        *_clones(hosts),
        *_networks(hosts, names),
        *_packet_sizes(hosts, names),
        *slow_links(gathered.links, names),
        *clocks_apart(gathered.links, names),
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
            MTU_ADVICE,
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
        yield (
            f"Leaders, the first rank of each host, which talk to the other hosts: {_ranks(leaders)}; "
            "for 1 MiB and more also others."
        )
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
