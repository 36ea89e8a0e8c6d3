"""`python -m coordinator check --hosts` on hosts made of namespaces: what each kind of fault looks like to a user."""

import dataclasses
import json
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.host_namespaces import Host
from tests.hosts import ROOT
from tests.hosts_checks import TWO, check_on_hosts
from tests.probes import requires

pytestmark = requires("network_namespaces")

# Deadline of each step: enough on a busy host, and every fault here lasts as long.
STEP = ["--timeout", "4"]
# A firewall that drops connections from outside to ports that the kernel has chosen. Rules of routing can do so, once
# they come before the table of local addresses. Answers of the store come from its port, and pass.
FIREWALL = [
    "ip rule add pref 10 lookup local && ip rule del pref 0",
    "ip rule add pref 5 iif eth0 ipproto tcp sport 30000-65000 dport 30000-65000 blackhole",
]
# The namespace in which the cable of the second host ends at a switch.
SWITCH = "nsenter --net=/proc/$(cut -d ' ' -f 4 /proc/$PPID/stat)/ns/net"


def words_of(found: dict[str, Any]) -> str:
    """Return what a rank printed in one line, without the beginnings of lines; check that the lines fit."""
    lines = found["out"].splitlines()
    assert [line for line in lines if len(line) > 120] == []
    return " ".join(" ".join(line.split("] ", 1)[-1].split()) for line in lines)


def with_setup(number: int, *commands: str) -> list[Host]:
    """Return the two hosts, of which one runs further commands."""
    hosts = list(TWO)
    hosts[number] = dataclasses.replace(hosts[number], setup=commands)
    return hosts


def checked(
    hosts: Sequence[Host], words: dict[str, Sequence[str]] | None = None, ranks: int = 1, **more: Any
) -> list[dict[str, Any]]:
    """Run the check with a short deadline."""
    words = words or {}
    return check_on_hosts(hosts, ranks, {**words, "": [*STEP, *words.get("", ())]}, **more)


@pytest.mark.guarantee("H1")
@pytest.mark.guarantee("H6")
def test_two_healthy_hosts_are_measured_and_ready() -> None:
    """Rank 0 prints the verdict, one rank of the other host its steps, and the others nothing."""
    ranks = checked(TWO, ranks=2)
    assert [each["status"] for each in ranks] == [0, 0, 0, 0], ranks
    first, second, third, fourth = (words_of(each) for each in ranks)
    assert "READY: 4 of 4 ranks on 2 hosts" in first
    assert "alpha 0-1 eth0 10.77.0.1 1500 serves it reference" in first
    assert "beta 2-3 eth0 10.77.0.2 1500" in first
    assert "Leaders, the first rank of each host, which talk to the other hosts: ranks 0, 2;" in first
    assert (
        "Gloo at 10.77.0.2 (eth0 of beta), because the route to the store (10.77.0.1) begins there." in first
    )
    assert "FAILED" not in first
    assert (second, fourth) == ("", "")
    assert "interface eth0: 10.77.0.2/24; MTU 1500" in third
    assert "5. verdict: no errors, see the output of rank 0" in third


@pytest.mark.thorough
@pytest.mark.guarantee("H4")
def test_three_hosts_are_measured_pair_by_pair_as_json() -> None:
    """The third one has a slow line in one direction, and only that is named."""
    hosts = [
        Host(name, {"eth0": [f"10.77.0.{number}/24"]}) for number, name in ((1, "a"), (2, "b"), (3, "c"))
    ]
    slow = "tc qdisc add dev eth0 root tbf rate 200mbit burst 100kb latency 20ms"
    hosts[2] = dataclasses.replace(hosts[2], setup=[slow])
    ranks = checked(hosts, {"": ["--json"]})
    assert [each["status"] for each in ranks] == [0, 0, 0], ranks
    assert (ranks[1]["out"], ranks[2]["out"]) == ("", "")
    assert "4. each pair of hosts" in ranks[0]["errors"]
    verdict = json.loads(ranks[0]["out"])
    assert [host["ranks"] for host in verdict["hosts"]] == [[0], [1], [2]]
    links = {(link["source"], link["target"]): link for link in verdict["links"]}
    assert len(links) == 6
    for (source, target), link in links.items():
        assert link["failure"] is None
        assert (link["round_trip_us"] is not None) == (source < target)
    # On a busy host a message may take long once, which is a warning too.
    named = [text for finding in verdict["findings"] for text in [finding["text"]] if "Gbit/s" in text]
    assert len(named) == 1, named
    assert re.match(r"c sends at most 0\.[12]\d* Gbit/s to any other host, and ", named[0])


@pytest.mark.thorough
@pytest.mark.guarantee("H3")
def test_a_missing_rank_is_named_and_the_others_are_measured() -> None:
    """As where one process of a host has not started."""
    ranks = checked(TWO, ranks=2, absent=[3])
    assert [each.get("status") for each in ranks] == [1, 1, 1, None], ranks
    page = words_of(ranks[0])
    assert "NOT READY: 3 of 4 ranks on 2 hosts, 1 error" in page
    assert "rank 3 did not come to the store. Those that did: alpha: 0-1; beta: 2" in page
    assert "bandwidth of one connection" in page
    assert "errors, see the output of rank 0" in words_of(ranks[2])


@pytest.mark.thorough
@pytest.mark.guarantee("H1")
@pytest.mark.guarantee("H2")
@pytest.mark.parametrize(
    ("word", "blocked", "error", "look_at"),
    [
        pytest.param(
            "MASTER_PORT=29501",
            [],
            "10.77.0.1 port 29501 refuses connections: its host answers, and nobody listens there",
            "whether rank 0 is running",
            id="another port",
        ),
        pytest.param(
            "MASTER_ADDR=10.99.0.1",
            [],
            "has no route to 10.99.0.1",
            "`ip route get 10.99.0.1`",
            id="no route",
        ),
        pytest.param(
            "MASTER_ADDR=10.77.0.9",
            [],
            "there is no way to 10.77.0.9 port 29500: No route to host",
            "nobody there has that address",
            id="no such host",
        ),
        pytest.param(
            "MASTER_ADDR=10.77.0.1",
            [FIREWALL[0], "ip rule add pref 5 iif eth0 ipproto tcp dport 29500 blackhole"],
            "10.77.0.1 port 29500 did not answer within 4 s, nor did its host refuse",
            "a firewall between 10.77.0.2 and 10.77.0.1 that drops packets to port 29500",
            id="a firewall",
        ),
        pytest.param(
            "MASTER_ADDR=gamma", [], "gamma, has no address here", "`getent ahosts gamma`", id="no name"
        ),
    ],
)
def test_a_host_that_cannot_reach_the_store_says_why(
    word: str, blocked: list[str], error: str, look_at: str
) -> None:
    """It stops at step 2. Rank 0 names its rank as missing, and says where to look."""
    hosts = with_setup(0, *blocked)
    ranks = checked(hosts, {"beta": [word]})
    assert [each["status"] for each in ranks] == [1, 1], ranks
    stopped = words_of(ranks[1])
    assert "STOPPED at step 2. this host, and the way to the store" in stopped
    assert error in stopped
    assert look_at in stopped
    assert ranks[1]["took_s"] >= 4.0  # rank 0 had its time
    page = words_of(ranks[0])
    assert "rank 1 did not come to the store. Those that did: alpha: 0" in page
    assert "look at the store's port too" in page


@pytest.mark.thorough
def test_a_name_that_is_loopback_on_the_first_host_names_its_hosts_file() -> None:
    """Debian's installer writes 127.0.1.1 beside the name of the host: the most frequent cause."""
    hosts = [dataclasses.replace(TWO[0], names=["127.0.1.1 alpha"]), TWO[1]]
    ranks = checked(hosts, {"": ["MASTER_ADDR=alpha"]})
    page = words_of(ranks[0])
    assert "2 errors" in page
    assert "alpha serves the store at 127.0.1.1, for which the master's name stands there" in page
    assert page.index("/etc/hosts on alpha") < page.index("rank 1 did not come")
    stopped = words_of(ranks[1])
    assert "refuses connections" in stopped
    assert "`getent ahosts alpha`" in stopped


@pytest.mark.thorough
@pytest.mark.guarantee("H2")
def test_a_firewall_that_lets_only_the_stores_port_through_is_seen_on_the_pair() -> None:
    """All ranks meet, and a group would hang while Gloo connects."""
    ranks = checked(with_setup(1, *FIREWALL))
    assert [each["status"] for each in ranks] == [1, 1], ranks
    page = words_of(ranks[0])
    assert "2 of 2 ranks on 2 hosts" in page
    assert "alpha does not reach beta: 10.77.0.2 port" in page
    assert "did not answer within 4 s" in page
    assert "a firewall on the way to 10.77.0.2 that lets the store's port through and drops others" in page


@pytest.mark.thorough
@pytest.mark.guarantee("H2")
def test_a_switch_that_drops_large_packets_is_told_from_a_firewall() -> None:
    """The interfaces of both ends have the same MTU, so the hosts alone show nothing."""
    lone = "ip link set eth0 gso_max_segs 1"  # veth hands over packets of 64 KB as they are, which no switch does
    hosts = [
        dataclasses.replace(TWO[0], setup=[lone]),
        dataclasses.replace(TWO[1], setup=[lone, f"{SWITCH} ip link set h1-eth0 mtu 900"]),
    ]
    ranks = checked(hosts)
    assert [each["status"] for each in ranks] == [1, 1], ranks
    page = words_of(ranks[0])
    assert "alpha loses large packets on the way to beta: messages of 64 bytes pass to 10.77.0.2" in page
    assert "The ends have alpha 1500, beta 1500" in page


@pytest.mark.thorough
@pytest.mark.guarantee("H1")
def test_a_switch_that_drops_what_a_rank_tells_the_store_is_seen_in_the_meeting() -> None:
    """The rank comes by a few bytes, and its facts do not: both ends say so, and neither hangs."""
    lone = "ip link set eth0 gso_max_segs 1"
    hosts = [
        dataclasses.replace(TWO[0], setup=[lone]),
        dataclasses.replace(TWO[1], setup=[lone, f"{SWITCH} ip link set h0-eth0 mtu 400"]),
    ]
    ranks = checked(hosts)
    assert [each["status"] for each in ranks] == [1, 1], ranks
    page = words_of(ranks[0])
    assert "rank 1 came, and then one or two KB from there did not" in page
    assert "did not come to the store" not in page
    stopped = words_of(ranks[1])
    assert "STOPPED at step 3. all ranks meet in the store" in stopped
    assert "the store took a few bytes from this rank, and did not take one or two KB" in stopped
    assert "the MTU on the way to 10.77.0.1" in stopped


@pytest.mark.thorough
def test_hosts_that_report_one_boot_id_are_a_warning() -> None:
    """These two have one kernel, as containers of one machine have."""
    ranks = checked(TWO, {"": ["GROUP_COORDINATOR_HOST_ID="]})
    assert [each["status"] for each in ranks] == [0, 0], ranks
    page = words_of(ranks[0])
    assert "READY: 2 of 2 ranks on 2 hosts" in page
    assert "alpha, beta report one boot id" in page


@pytest.mark.thorough
def test_hosts_of_ipv6_alone_are_measured() -> None:
    """The listeners and the store have addresses of IPv6."""
    hosts = [Host(name, {"eth0": [f"fd77::{number}/64"]}) for number, name in ((1, "alpha"), (2, "beta"))]
    ranks = checked(hosts, {"": ["MASTER_ADDR=fd77::1"]})
    assert [each["status"] for each in ranks] == [0, 0], ranks
    page = words_of(ranks[0])
    assert "beta 1 eth0 fd77::2 1500" in page
    assert "FAILED" not in page


@pytest.mark.thorough
def test_settings_and_networks_that_differ_are_named() -> None:
    """The second host would use another network, and has another deadline."""
    hosts = [
        Host("alpha", {"eth0": ["10.77.0.1/24"], "wrong": ["10.66.0.1/24"]}),
        Host("beta", {"eth0": ["10.77.0.2/24"], "wrong": ["10.66.0.2/24"]}),
    ]
    words = ["GROUP_COORDINATOR_INTERFACE=wrong", "GROUP_COORDINATOR_TIMEOUT_S=5"]
    ranks = checked(hosts, {"beta": words})
    assert [each["status"] for each in ranks] == [1, 1], ranks
    page = words_of(ranks[0])
    assert "NOT READY: 2 of 2 ranks on 2 hosts, 1 error" in page
    assert "different settings: " in page
    assert "beta would use 10.66.0.2 on wrong, in the network 10.66.0.0/24" in page
    assert "Gloo at 10.66.0.2 (wrong of beta), because GROUP_COORDINATOR_INTERFACE=wrong says so." in page
    assert "the kernel itself would go to the store from 10.77.0.2" in words_of(ranks[1])


@pytest.mark.thorough
def test_under_torchrun_the_ranks_meet_in_the_store_of_its_agent() -> None:
    """The agents have met before, so the step that may hang is theirs; the ranks find all that they need."""
    ranks = check_on_hosts(TWO, 1, {"": ["torchrun=--timeout 10"]})
    assert [each["status"] for each in ranks] == [0, 0], ranks
    page = words_of(ranks[0])
    assert (
        "torchrun: rank 0 of 4, local rank 0; torchrun's agent serves the store at 10.77.0.1 port 29500"
        in page
    )
    assert "READY: 4 of 4 ranks on 2 hosts" in page
    assert "rank 2 beta] 5. verdict: no errors" in ranks[1]["out"]
    assert "[rank 3" not in ranks[1]["out"]


LAUNCHERS = [
    pytest.param(
        [
            "--init-method=slurm://:29500",
            *("SLURM_PROCID={rank}", "SLURM_LOCALID=0", "SLURM_NTASKS=2", "SLURM_STEP_NODELIST=alpha,beta"),
        ],
        "srun: rank 0 of 2, local rank 0; rank 0 serves the store at alpha port 29500",
        id="srun",
    ),
    pytest.param(
        [
            "--init-method=mpi://10.77.0.1:29500",
            *("PMI_RANK={rank}", "PMI_SIZE=2", "MPI_LOCALRANKID=0", "MPI_LOCALNRANKS=1"),
        ],
        "mpiexec of MPICH: rank 0 of 2, local rank 0; rank 0 serves the store at 10.77.0.1 port 29500",
        id="mpiexec",
    ),
    pytest.param(
        [
            "--init-method=lws://:29500",
            *("--local-rank=0", "--local-world-size=1"),
            *("LWS_LEADER_ADDRESS=alpha", "LWS_GROUP_SIZE=2", "LWS_WORKER_INDEX={rank}"),
        ],
        "a LeaderWorkerSet: rank 0 of 2, local rank 0; rank 0 serves the store at alpha port 29500",
        id="LeaderWorkerSet",
    ),
    pytest.param(
        ["--init-method=tcp://10.77.0.1:29500", "--rank={rank}", "--world-size=2"],
        "the command line: rank 0 of 2; rank 0 serves the store at 10.77.0.1 port 29500",
        id="none",
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(("words", "told"), LAUNCHERS)
def test_each_init_method_leads_to_the_same_verdict(words: list[str], told: str) -> None:
    """The variables are those that the launchers set."""
    ranks = checked(TWO, {"": words})
    assert [each["status"] for each in ranks] == [0, 0], ranks
    page = words_of(ranks[0])
    assert told in page
    assert "READY: 2 of 2 ranks on 2 hosts" in page


@pytest.mark.thorough
def test_ranks_with_a_secret_meet_in_its_store_and_another_secret_stops() -> None:
    """The host with the other secret reaches the port, and is not admitted."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # each host has a /tmp of its own
        files = []
        for name in ("one", "other"):
            path = Path(folder) / name
            path.touch(mode=0o600)
            path.write_bytes(os.urandom(64))
            files.append(f"GROUP_COORDINATOR_SECRET_FILE={path}")
        alike = checked(TWO, {"": files[:1]})
        different = checked(TWO, {"": files[:1], "beta": files[1:]})
    assert [each["status"] for each in alike] == [0, 0], alike
    assert "READY: 2 of 2 ranks on 2 hosts" in words_of(alike[0])
    assert [each["status"] for each in different] == [1, 1], different
    assert "rank 1 did not come to the store" in words_of(different[0])
    stopped = words_of(different[1])
    assert "the store answers after" in stopped
    assert "STOPPED at step 3. all ranks meet in the store" in stopped
    assert "the secret of this rank is another one" in stopped


def without_numbers(text: str) -> list[str]:
    """Return the lines with blanks, boot ids and numbers made equal."""
    lines = re.sub(r"boot id [0-9a-f]{8}", "boot id #", text).splitlines()
    return [
        " ".join(re.sub(r"[0-9]+(\.[0-9]+)?(e[+-]?[0-9]+)?", "#", line).split()) for line in lines if line
    ]


@pytest.mark.thorough
def test_the_page_shows_what_the_command_prints() -> None:
    """Two healthy hosts, then a host that was given another port: line by line, but for the figures."""
    page = (ROOT / "docs" / "howto" / "several-hosts.md").read_text()
    healthy, stopped, verdict, *_ = re.findall(
        r"^```text\n(.*?)^```$", page.split("## When a start hangs")[1], re.MULTILINE | re.DOTALL
    )
    hosts = [
        Host(name, {"eth0": [f"10.0.0.{number}/24"]}, ["10.0.0.1 n1", "10.0.0.2 n2"])
        for number, name in ((1, "n1"), (2, "n2"))
    ]
    for _ in range(
        3
    ):  # on a busy host one direction may be five times slower than the other, which is a warning
        ranks = checked(hosts, {"": ["MASTER_ADDR=n1"]}, ranks=2)
        if "nothing wrong was found" in ranks[0]["out"]:
            break
    assert without_numbers(ranks[0]["out"]) == without_numbers(healthy)
    ranks = checked(hosts, {"": ["MASTER_ADDR=n1"], "n2": ["MASTER_PORT=29501"]}, ranks=2)
    lines = without_numbers(ranks[2]["out"])
    assert lines[-len(without_numbers(stopped)) :] == without_numbers(stopped)
    lines = without_numbers(ranks[0]["out"])
    begin = next(number for number, line in enumerate(lines) if line.startswith("NOT READY"))
    assert lines[begin:][: len(without_numbers(verdict))] == without_numbers(verdict)
