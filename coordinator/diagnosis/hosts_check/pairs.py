"""What the links between hosts mean: who does not reach whom, who is slow, and whose clock is wrong."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from coordinator.diagnosis.hosts_check.records import Finding, Link, RankFacts

__all__ = ["MTU_ADVICE", "broken_links", "clocks_apart", "slow_links"]

SLOWER: Final = 5.0
"""How much slower than the median a pair must be to be named."""
CLOCK_MS: Final = 1000.0
"""How far clocks may be apart."""

MTU_ADVICE: Final = (
    "the MTU of the interfaces, bridges, tunnels and switches on the way: `ip link`, `ping -M do -s 1472 ADDRESS` "
    "(8972 "
    "for jumbo frames); a firewall that drops ICMP hides it"
)

_Way = tuple[int, int]


def broken_links(
    facts: Mapping[int, RankFacts], links: Iterable[Link], names: Mapping[int, str]
) -> Iterator[Finding]:
    """Name each way that does not work; a host that is cut off from all others once.

    Args:
        facts: Of the ranks, by rank.
        links: Between the first ranks of the hosts, both ways.
        names: Of the hosts, by their first rank.
    """
    every = {(link.source, link.target): link for link in links}
    broken = {way: link for way, link in every.items() if link.failure is not None}

    def tell(ways: Sequence[_Way], whole: str) -> Finding:
        link = broken[ways[0]]
        assert link.failure is not None
        is_large = link.failure.kind == "large messages"
        source, target = names[link.source], names[link.target]
        if whole == "source":
            target = "any other host"
        elif whole == "target":
            source = "no other host"
        fails = "loses large packets on the way to" if is_large else "does not reach"
        if whole == "target":
            fails = "gets its large packets through to" if is_large else "reaches"
        back = every.get((link.target, link.source))
        works = not whole and not is_large and back is not None and back.failure is None
        text = (
            f"{source} {fails} {target}: {link.failure.text}{f'; {target} reaches {source}' if works else ''}"
        )
        return Finding("error", text, _advice(link, facts))

    yield from _together(list(broken), names, tell)


def slow_links(links: Sequence[Link], names: Mapping[int, str]) -> Iterator[Finding]:
    """Name the ways that are five times slower than the median; a host that is slow to or from all others once."""
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

    def tell(ways: Sequence[_Way], whole: str) -> Finding:
        source, target = (names[rank] for rank in ways[0])
        rate = max(rates[way] for way in ways)
        what = {
            "": f"{source} sends {rate:.3g} Gbit/s to {target}",
            "source": f"{source} sends at most {rate:.3g} Gbit/s to any other host",
            "target": f"{target} gets at most {rate:.3g} Gbit/s from any other host",
        }[whole]
        return Finding(
            "warning",
            f"{what}, and {usual:.3g} Gbit/s is usual here",
            "the cable, the switch port and the negotiated speed (`ethtool INTERFACE`), and what else uses that line",
        )

    yield from _together([way for way, rate in rates.items() if rate * SLOWER < usual], names, tell)
    if len(trips) < 2:
        return
    median = statistics.median(trips.values())
    for (source, target), trip in trips.items():
        if trip > SLOWER * median:
            yield Finding(
                "warning",
                f"a message from {names[source]} to {names[target]} and back takes {trip:.0f} us, and {median:.0f} us "
                "is usual here",
                "whether that way goes over more switches or another network, and how busy both hosts are",
            )


def clocks_apart(links: Iterable[Link], names: Mapping[int, str]) -> Iterator[Finding]:
    """Name the hosts whose wall clock is more than a second from that of rank 0's host."""
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


def _together(
    ways: Sequence[_Way], names: Mapping[int, str], tell: Callable[[Sequence[_Way], str], Finding]
) -> Iterator[Finding]:
    """Yield a finding for each way, or one for all from a host (`source`) or to it (`target`) if it has others too.

    Args:
        ways: Pairs of ranks.
        names: Of the hosts, by their first rank.
        tell: Makes a finding of some ways and "", "source" or "target".
    """
    left = list(ways)
    for end, whole in ((0, "source"), (1, "target")):
        for rank in names:
            own = [way for way in left if way[end] == rank]
            if len(names) > 2 and len(own) == len(names) - 1:
                yield tell(own, whole)
                left = [way for way in left if way not in own]
    for way in left:
        yield tell([way], "")


def _advice(link: Link, facts: Mapping[int, RankFacts]) -> str:
    kind = link.failure.kind if link.failure is not None else "error"
    address = link.address.partition(" ")[0]
    target = facts.get(link.target)
    if kind == "large messages":
        sizes = {
            end.hostname: next((each.mtu for each in end.interfaces if each.name == end.interface), "unknown")
            for end in (facts.get(link.source), target)
            if end is not None
        }
        own = ", ".join(f"{name} {mtu}" for name, mtu in sizes.items())
        return f"{MTU_ADVICE}. The ends have {own}"
    if kind in ("refused", "timed out"):
        does = "rejects" if kind == "refused" else "drops"
        return (
            f"a firewall on the way to {address} that lets the store's port through and {does} others: Gloo, "
            "leaders, heartbeats and queues "
            "listen on any port of `net.ipv4.ip_local_port_range` (see Ports for a firewall, several-hosts.md)"
        )
    if kind == "no route":
        return (
            f"`ip route get {address}` on the host that connects: its interface "
            f"{_interface(facts.get(link.source))} is not in the network of {_interface(target)}; "
            "GROUP_COORDINATOR_INTERFACE chooses another one"
        )
    if kind in ("no listener", "nobody answered"):
        return f"the output of rank {link.target}, which has ended, hangs, or may not listen there"
    return f"the output of rank {link.target}; a middlebox that ends connections"


def _interface(facts: RankFacts | None) -> str:
    return "unknown" if facts is None else f"{facts.interface} ({facts.address} of {facts.hostname})"
