"""What the check of hosts concludes from facts and links, and how it reads."""

import itertools
from typing import Any

import msgspec
import pytest

from coordinator.diagnosis.clock_offsets import Offset
from coordinator.diagnosis.hosts_check.judging import Gathered, hosts_of, judge, listed
from coordinator.diagnosis.hosts_check.records import (
    Failure,
    Interface,
    Link,
    LinkFailure,
    RankFacts,
    Verdict,
)
from coordinator.diagnosis.hosts_check.report import report
from coordinator.diagnosis.hosts_check.rounds import rounds_of


def facts_of(rank: int, host: int, **changed: Any) -> RankFacts:
    """Return the facts of a healthy rank on one of the hosts n0, n1, ..."""
    address = f"10.0.0.{host + 1}"
    healthy = RankFacts(
        rank=rank,
        hostname=f"n{host}",
        pid=100 + rank,
        boot_id=f"boot-{host}",
        network_namespace=4026531840,
        host_id="",
        address=address,
        interface="eth0",
        why="because the route to the store (10.0.0.1) begins there",
        interfaces=(Interface("eth0", (f"{address}/24", "fe80::1/64"), 1500),),
        master_addresses=("10.0.0.1",),
        connect_ms=None if rank == 0 else 0.1,
        open_files=1024,
        shm_bytes=1 << 26,
        remote_ports="",
        versions={"group-coordinator": "1.0", "torch": "2.13", "python": "3.11"},
        settings="0123456789abcdef",
    )
    return msgspec.structs.replace(healthy, **changed)


def link_of(source: int, target: int, **changed: Any) -> Link:
    """Return a healthy link between two ranks, as the lower one measures it and the other one sees it."""
    address = f"10.0.0.{target + 1} port 40000"
    link = Link(source=source, target=target, address=address, connect_ms=0.1)
    if source < target:
        link = msgspec.structs.replace(
            link, round_trip_us=100.0, sent_gbit=9.0, received_gbit=9.5, clock=Offset(20_000, 50_000, 0, 50)
        )
    return msgspec.structs.replace(link, **changed)


def gathered_of(hosts: int, changed: dict[int, dict[str, Any]] | None = None, **fields: Any) -> Gathered:
    """Return what rank 0 has found of hosts with one rank each; `changed` says in which facts ranks differ."""
    facts = {host: facts_of(host, host, **(changed or {}).get(host, {})) for host in range(hosts)}
    links = tuple(link_of(a, b) for a, b in itertools.permutations(range(hosts), 2))
    told = Gathered(
        world_size=hosts,
        store="10.0.0.1 port 29500, which rank 0 on n0 serves",
        facts=facts,
        arrived=tuple(facts),
        links=links,
    )
    return msgspec.structs.replace(told, **fields)


def with_link(gathered: Gathered, link: Link) -> Gathered:
    """Return the same with another link between two ranks."""
    links = tuple(
        link if (each.source, each.target) == (link.source, link.target) else each for each in gathered.links
    )
    return msgspec.structs.replace(gathered, links=links)


def only(verdict: Verdict) -> tuple[str, str, str]:
    """Return the only finding, and check that the page shows it."""
    assert len(verdict.findings) == 1, verdict.findings
    finding = verdict.findings[0]
    page = shown(verdict)
    assert f"{finding.level.upper()}: {finding.text}" in page
    assert f"look at: {finding.look_at}" in page
    return finding.level, finding.text, finding.look_at


def shown(verdict: Verdict) -> str:
    """Return the report in one line, and check that it fits the page."""
    page = report(verdict)
    assert [line for line in page.splitlines() if len(line) > 120 or line != line.rstrip()] == []
    return " ".join(page.split())


# --- rounds ---------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("H4")
@pytest.mark.parametrize("hosts", [*range(10), 31, 64])
def test_each_pair_is_measured_once_and_no_host_twice_in_a_round(hosts: int) -> None:
    """There are no more rounds than needed: one less than hosts, or as many as hosts if their number is odd."""
    rounds = rounds_of(hosts)
    assert sorted(itertools.chain(*rounds)) == list(itertools.combinations(range(hosts), 2))
    for pairs in rounds:
        busy = list(itertools.chain(*pairs))
        assert len(busy) == len(set(busy)) >= hosts - 1
    assert len(rounds) == (0 if hosts < 2 else hosts - 1 + hosts % 2)


# --- verdicts -------------------------------------------------------------------------------------------------


def test_healthy_hosts_are_ready() -> None:
    """The page says so first, then shows each host, both tables, and what groups would use."""
    verdict = judge(gathered_of(3))
    assert verdict.findings == ()
    assert not verdict.has_failed
    page = shown(verdict)
    assert "READY: 3 of 3 ranks on 3 hosts, nothing wrong was found" in page
    assert "n1 1 eth0 10.0.0.2 1500 0.10 ms -0.020 ms +- 0.050" in page
    assert "n0 - 100 100" in page
    assert "n0 - 9 9" in page  # the row sends 9 to each column, and gets 9.5 back
    assert "n1 9.5 - 9" in page
    assert "Leaders, the first rank of each host, which talk to the other hosts: ranks 0-2;" in page
    assert "Gloo at 10.0.0.1 (eth0 of n0), 10.0.0.2 (eth0 of n1), 10.0.0.3 (eth0 of n2), because" in page
    assert "encrypted TCP at the same addresses, on any free port" in page


@pytest.mark.guarantee("H3")
def test_missing_ranks_are_named_with_the_hosts_of_those_that_came() -> None:
    """Here the second host lacks two of its four ranks, and the third one has not come at all."""
    facts = {rank: facts_of(rank, rank // 4) for rank in (0, 1, 2, 3, 4, 7)}
    gathered = gathered_of(2, world_size=12, facts=facts, arrived=tuple(facts), links=())
    verdict = judge(gathered)
    level, text, look_at = only(verdict)
    assert (level, verdict.missing) == ("error", (5, 6, 8, 9, 10, 11))
    assert text == "ranks 5-6, 8-11 did not come to the store. Those that did: n0: 0-3; n1: 4, 7"
    assert "which says at which step they have stopped" in look_at
    assert "NOT READY: 6 of 12 ranks on 2 hosts, 1 error, 0 warnings" in shown(verdict)


def test_a_store_at_a_loopback_address_is_named_before_the_ranks_that_could_not_come() -> None:
    """The reader sees the cause first: /etc/hosts on the host of rank 0."""
    hidden = {"address": "127.0.0.1", "interface": "lo", "master_addresses": ("127.0.1.1",)}
    verdict = judge(gathered_of(1, {0: hidden}, world_size=2))
    assert [each.level for each in verdict.findings] == ["error", "error"]
    assert "n0 serves the store at 127.0.1.1" in verdict.findings[0].text
    assert "/etc/hosts on n0" in verdict.findings[0].look_at
    assert "rank 1 did not come" in verdict.findings[1].text
    assert "nobody of another host has come" in verdict.findings[1].look_at


def test_a_rank_that_came_and_could_not_tell_its_facts_points_to_the_packet_size() -> None:
    """It is not missing: a few bytes came from it."""
    verdict = judge(gathered_of(2, world_size=3, arrived=(0, 1, 2)))
    level, text, look_at = only(verdict)
    assert (level, verdict.missing) == ("error", ())
    assert text.startswith("rank 2 came, and then one or two KB from there did not")
    assert "MTU" in look_at


def test_a_rank_with_a_loopback_address_among_several_hosts_is_an_error() -> None:
    """Groups refuse it too."""
    hidden = {"address": "127.0.0.1", "interface": "lo", "master_addresses": ("127.0.0.1",)}
    level, text, look_at = only(judge(gathered_of(2, {1: hidden})))
    assert (level, text) == (
        "error",
        "rank 1 on n1 would announce the loopback address 127.0.0.1, which no other host reaches",
    )
    assert "/etc/hosts" in look_at


KINDS: list[tuple[Failure, str]] = [
    ("refused", "a firewall on the way to 10.0.0.2 that lets the store's port through and rejects others"),
    ("timed out", "a firewall on the way to 10.0.0.2 that lets the store's port through and drops others"),
    ("no route", "`ip route get 10.0.0.2`"),
    ("large messages", "The ends have n0 1500, n1 1500"),
    ("no listener", "the output of rank 1"),
    ("nobody answered", "the output of rank 1"),
    ("cut off", "a middlebox"),
    ("error", "the output of rank 1"),
]


@pytest.mark.guarantee("H2")
@pytest.mark.parametrize(("kind", "advice"), KINDS)
def test_each_failure_of_a_link_has_advice_of_its_own(kind: Failure, advice: str) -> None:
    """The table shows it beside the ways that work."""
    broken = link_of(
        0,
        1,
        failure=LinkFailure(kind, "what happened"),
        round_trip_us=None,
        sent_gbit=None,
        received_gbit=None,
    )
    verdict = judge(with_link(gathered_of(3), broken))
    level, text, look_at = only(verdict)
    assert level == "error"
    assert text.startswith(
        "n0 loses large packets" if kind == "large messages" else "n0 does not reach n1: what"
    )
    assert advice in look_at
    assert "n0 - FAILED 100" in shown(verdict)


def test_a_way_that_works_in_one_direction_only_says_so() -> None:
    """The second host connects back, so a firewall on one side shows."""
    broken = link_of(1, 0, failure=LinkFailure("timed out", "silence"))
    level, text, _ = only(judge(with_link(gathered_of(2), broken)))
    assert (level, text) == ("error", "n1 does not reach n0: silence; n0 reaches n1")


def test_different_settings_are_an_error_and_different_versions_a_warning() -> None:
    """Most come first, then who differs."""
    level, text, look_at = only(judge(gathered_of(3, {2: {"settings": "beef"}})))
    assert (level, text) == (
        "error",
        "different settings: 0123456789abcdef on n0, n1 (ranks 0-1); beef on n2 (rank 2) (fingerprints)",
    )
    assert "GROUP_COORDINATOR_*" in look_at
    versions = {"group-coordinator": "1.0", "torch": "2.12", "python": "3.11"}
    level, text, _ = only(judge(gathered_of(3, {1: {"versions": versions}})))
    assert (level, text) == (
        "warning",
        "different versions of torch: 2.13 on n0, n2 (ranks 0, 2); 2.12 on n1 (rank 1)",
    )


def test_hosts_with_one_boot_id_are_told_that_they_would_share_memory() -> None:
    """They may be containers of one machine, or clones of one."""
    verdict = judge(gathered_of(3, {2: {"boot_id": "boot-1"}}))
    level, text, look_at = only(verdict)
    assert (level, text[:32]) == ("warning", "n1, n2 report one boot id: their")
    assert "GROUP_COORDINATOR_HOST_ID" in look_at
    page = shown(verdict)
    assert "Shared memory between ranks of one kernel: ranks 1-2 (n1, n2)." in page
    assert "Leaders, the first rank of each host, which talk to the other hosts: ranks 0-1;" in page


def test_another_network_than_the_masters_is_a_warning() -> None:
    """The usual reason for a slow start: a host that uses its management network."""
    other = {"address": "10.9.0.2", "interfaces": (Interface("eth0", ("10.9.0.2/16",), 1500),)}
    level, text, look_at = only(judge(gathered_of(2, {1: other})))
    assert level == "warning"
    assert "n1 would use 10.9.0.2 on eth0, in the network 10.9.0.0/16" in text
    assert "10.0.0.1 in 10.0.0.0/24" in text
    assert "GROUP_COORDINATOR_INTERFACE" in look_at


def test_interfaces_with_different_packet_sizes_are_a_warning() -> None:
    """Jumbo frames on one host only lose packets as soon as a switch lets them through."""
    jumbo = {"interfaces": (Interface("eth0", ("10.0.0.2/24",), 9000),)}
    level, text, _ = only(judge(gathered_of(2, {1: jumbo})))
    assert (level, text) == ("warning", "the interfaces have different MTUs: n0 1500, n1 9000")


def test_a_pair_five_times_slower_than_the_median_is_named() -> None:
    """Direction by direction, with what is usual; a pair just under the limit is not named."""
    slow = link_of(1, 2, received_gbit=1.0)
    level, text, look_at = only(judge(with_link(gathered_of(4), slow)))
    assert (level, text) == ("warning", "n2 sends 1 Gbit/s to n1, and 9 Gbit/s is usual here")
    assert "switch port" in look_at
    assert judge(with_link(gathered_of(4), link_of(1, 2, received_gbit=2.0))).findings == ()
    far = link_of(1, 2, round_trip_us=501.0)
    _, text, _ = only(judge(with_link(gathered_of(4), far)))
    assert text == "a message from n1 to n2 and back takes 501 us, and 100 us is usual here"
    assert judge(with_link(gathered_of(4), link_of(1, 2, round_trip_us=499.0))).findings == ()


@pytest.mark.parametrize(
    ("end", "what"),
    [
        (0, "n2 sends at most 1.2 Gbit/s to any other host"),
        (1, "n2 gets at most 1.2 Gbit/s from any other host"),
    ],
)
def test_a_host_that_is_slow_in_one_direction_is_named_once(end: int, what: str) -> None:
    """Its cable is at fault, and not four pairs."""
    gathered = gathered_of(5)
    for number, other in enumerate((0, 1, 3, 4)):
        source, target = min(other, 2), max(other, 2)
        is_sending = (source == 2) == (end == 0)
        rate = 1.2 - number / 10
        changed = {"sent_gbit": rate} if is_sending else {"received_gbit": rate}
        gathered = with_link(gathered, link_of(source, target, **changed))
    level, text, _ = only(judge(gathered))
    assert (level, text) == ("warning", f"{what}, and 9 Gbit/s is usual here")


def test_a_host_that_is_cut_off_is_named_once_for_each_direction() -> None:
    """As one with a firewall of its own: the others need no line each."""
    gathered = gathered_of(4)
    for source, target in itertools.permutations(range(4), 2):
        if 1 in (source, target):
            failure = LinkFailure("timed out", f"10.0.0.{target + 1} port 40000 did not answer")
            changed: dict[str, Any] = {"failure": failure}
            if source < target:
                changed |= {"round_trip_us": None, "sent_gbit": None, "received_gbit": None}
            gathered = with_link(gathered, link_of(source, target, **changed))
    verdict = judge(gathered)
    assert [each.text for each in verdict.findings] == [
        "n1 does not reach any other host: 10.0.0.1 port 40000 did not answer",
        "no other host reaches n1: 10.0.0.2 port 40000 did not answer",
    ]


def test_between_two_hosts_the_directions_are_compared() -> None:
    """There is no median of pairs, but one direction may be ten times slower than the other."""
    level, text, _ = only(judge(with_link(gathered_of(2), link_of(0, 1, sent_gbit=0.9))))
    assert (level, text) == ("warning", "n0 sends 0.9 Gbit/s to n1, and 9.5 Gbit/s is usual here")


@pytest.mark.parametrize(("offset_ms", "what"), [(2500, "2.5 s behind"), (-2500, "2.5 s ahead of")])
def test_clocks_that_are_far_apart_are_a_warning(offset_ms: int, what: str) -> None:
    """The offset is what has to be added to the clock of the second host to get that of the first."""
    ahead = link_of(0, 1, clock=Offset(offset_ms * 1_000_000, 1_000, 0, 50))
    level, text, _ = only(judge(with_link(gathered_of(2), ahead)))
    assert (level, text) == ("warning", f"the clock of n1 is {what} that of n0")
    unsure = link_of(0, 1, clock=Offset(offset_ms * 1_000_000, 2_000_000_000, 0, 50))
    assert judge(with_link(gathered_of(2), unsure)).findings == ()


def test_ranks_of_one_host_need_no_network() -> None:
    """There is nothing to measure, and the page says what groups would use all the same."""
    facts = {rank: facts_of(rank, 0) for rank in range(4)}
    page = shown(judge(gathered_of(1, world_size=4, facts=facts, arrived=(0, 1, 2, 3), links=())))
    assert "READY: 4 of 4 ranks on 1 host" in page
    assert "ranks 0-3 (n0). All ranks that came are on one kernel: nothing goes over a network" in page
    assert "round trip" not in page


def test_hosts_of_one_name_are_told_apart_by_their_addresses() -> None:
    """Images are cloned with their names."""
    verdict = judge(gathered_of(2, {1: {"hostname": "n0"}}))
    assert [host.name for host in verdict.hosts] == ["n0 (10.0.0.1)", "n0 (10.0.0.2)"]


@pytest.mark.parametrize("hosts", [2, 12, 13, 40])
@pytest.mark.parametrize("length", [2, 60])
def test_the_page_has_no_line_longer_than_120_columns(hosts: int, length: int) -> None:
    """Neither with many hosts, of which it shows the worst ways only, nor with long names."""
    names = {host: {"hostname": f"n{host}".ljust(length, "x")} for host in range(hosts)}
    gathered = gathered_of(hosts, names)
    slow = link_of(0, 1, received_gbit=0.5)
    page = report(judge(with_link(gathered, slow)))
    assert all(len(line) <= 120 for line in page.splitlines())
    assert ("the 10 worst" in page) == (hosts > 12)


def test_ranks_are_listed_as_ranges() -> None:
    """A thousand missing ranks take one line."""
    assert listed([]) == ""
    assert listed([3]) == "3"
    assert listed([5, 0, 1, 2, 7, 8]) == "0-2, 5, 7-8"


def test_a_host_is_a_kernel_with_a_network_and_a_name() -> None:
    """Containers with networks of their own count, and so do clones with equal numbers of namespaces."""
    changed: list[dict[str, Any]] = [
        {},
        {},
        {"network_namespace": 7},
        {"hostname": "other"},
        {"boot_id": "b"},
    ]
    facts = {rank: facts_of(rank, 0, **each) for rank, each in enumerate(changed)}
    assert [[each.rank for each in host] for host in hosts_of(facts)] == [[0, 1], [2], [3], [4]]


def test_the_verdict_survives_json() -> None:
    """`--json` prints all that the page says."""
    verdict = judge(with_link(gathered_of(3), link_of(0, 1, failure=LinkFailure("refused", "x"))))
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=Verdict) == verdict


@pytest.mark.parametrize(
    "changed",
    [
        {"address": "a name"},
        {"master_addresses": ("10.0.0.1", "")},
        {"interfaces": (Interface("eth0", ("10.0.0.1/99",), 1500),)},
        {"hostname": "x" * 2000},
    ],
)
def test_facts_from_the_store_that_make_no_sense_are_refused(changed: dict[str, Any]) -> None:
    """Anybody who reaches a store without a secret can write there."""
    written = msgspec.to_builtins(facts_of(0, 0)) | msgspec.to_builtins(changed)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode(written), type=RankFacts)


def test_names_from_the_store_cannot_steer_the_terminal() -> None:
    """Control characters are shown as question marks."""
    page = report(judge(gathered_of(2, {1: {"hostname": "n1\x1b[2J\n"}})))
    assert "n1?[2J" in page
    assert "\x1b" not in page
