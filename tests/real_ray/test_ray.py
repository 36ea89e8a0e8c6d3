"""Ranks as actors of a real Ray, on two hosts: kernels, processes and memory of one are not visible on the other.

Each test runs one driver on the first host. A host's boot id and process namespace are its own, so no rank sees the end
of a process on the other host: what is known of it there, Ray's agents have told.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.settings import CoordinatorSettings
from tests.probes import requires
from tests.real_ray.cluster import ADDRESSES, ROOT, Cluster, two_hosts
from tests.tokens import demo_arguments, tokens_of_one_host

pytestmark = [pytest.mark.engine, requires("ray"), requires("network_namespaces")]

DRIVER = "tests.real_ray.driver"
NEAR, FAR = ADDRESSES
LOST_AFTER_S = CoordinatorSettings().remote.lost_after_s


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Return a cluster of two hosts for all tests."""
    with two_hosts() as made:
        yield made


@pytest.fixture(scope="module")
def world(cluster: Cluster) -> dict[str, Any]:
    """Return what four actors have found in two worlds, one after the other."""
    found: dict[str, Any] = cluster.run(DRIVER, "world")
    return found


@pytest.mark.guarantee("M6")
def test_rank_0_is_on_the_drivers_host(world: dict[str, Any]) -> None:
    """Ray's first bundle is on the other host; ranks of a host follow each other, and so do the actors' processes."""
    assert world["seats"] == [[0, 1, NEAR, 0], [1, 3, NEAR, 1], [2, 0, FAR, 0], [3, 2, FAR, 1]]
    assert [each["host"] for each in world["who"]] == ["ray-a", "ray-a", "ray-b", "ray-b"]
    assert len({each["boot_id"] for each in world["who"]}) == 2


@pytest.mark.guarantee("M7")
@pytest.mark.parametrize("name", ["first", "second"])
def test_actors_on_two_hosts_form_a_world(world: dict[str, Any], name: str) -> None:
    """Collectives of tensors and objects have the results that they have anywhere, in a second meeting too."""
    for rank, found in enumerate(world[name]):
        assert found["rank"] == rank
        assert found["local_rank"] == rank % 2
        assert found["ranks"] == [0, 1, 2, 3]
        assert found["sum"] == 10
        assert found["large"] == [15, 15]
        assert found["object"] == {"from": 2}
        assert found["tensor"] == [1, 1, 1]
    assert len({found["token_of_world"] for found in world[name]}) == 1


def test_the_cluster_refuses_whoever_has_no_token(cluster: Cluster) -> None:
    """So what the other tests show holds in the mode in which Ray authenticates its clients."""
    done = cluster.ran("ray", "status", environ={"RAY_AUTH_MODE": "disabled"})
    assert done.returncode != 0
    assert "token" in (done.stdout + done.stderr).lower()
    assert cluster.ran("ray", "status", environ={}).returncode == 0


@pytest.mark.guarantee("M7")
def test_nothing_is_in_the_environment(world: dict[str, Any]) -> None:
    """No process of the world has a launcher's variable, or a name of its offer in any variable."""
    assert [each["launcher"] for each in world["who"]] == [[]] * 4
    assert [each["secret"] for each in world["who"]] == [[]] * 4


@pytest.mark.guarantee("M2")
def test_rank_0_takes_a_port_of_the_range(world: dict[str, Any]) -> None:
    """All tickets have the port on which it listens."""
    assert world["second_ports"] == [world["second_ports"][0]] * 4
    assert 23450 <= world["second_ports"][0] <= 23470
    assert world["first_ports"] == [world["first_ports"][0]] * 4


@pytest.mark.guarantee("M1")
def test_a_used_ticket_is_refused(world: dict[str, Any]) -> None:
    """In the world, and after it was left; and actors in a world do not meet once more."""
    assert "in a world already" in world["again"]["text"]
    assert "has used the ticket before" in world["used"]["text"]
    assert world["twice"]["kind"] == "UsageError"
    assert "in a world already" in world["twice"]["text"]


@pytest.mark.guarantee("M8")
@pytest.mark.parametrize("victim", [1, 3, 0])
def test_a_killed_actor_is_named_on_both_hosts(cluster: Cluster, victim: int) -> None:
    """Ranks on its host that wait for it name it within 2 s, those on the other one within `lost_after_s` + 1 s.

    It may have served the store.
    """
    found = cluster.run(DRIVER, "kill", str(victim))
    assert found["watch"]["kind"] == "PeerLostError"
    assert found["watch"]["peers"] == [victim]
    assert f"lost rank {victim} on node {NEAR if victim < 2 else FAR}" in found["watch"]["text"]
    for rank in {0, 1, 2, 3} - {victim}:
        told = found["ranks"][rank]
        assert told["kind"] == "PeerLostError", told
        assert told["peers"] == [victim]
        is_far = (rank < 2) != (victim < 2)
        assert told["after_s"] < (LOST_AFTER_S + 1.0 if is_far else 2.0), told


@pytest.mark.guarantee("M1")
def test_a_restarted_actor_needs_a_new_ticket(cluster: Cluster) -> None:
    """The ticket of its last start is refused with what to do; a new meeting of all makes a world."""
    found = cluster.run(DRIVER, "restart")
    assert found["watch"]["peers"] == [1]
    assert not found["same_process"]
    assert "was started anew" in found["old"]["text"]
    assert "make new tickets" in found["old"]["text"]
    assert [each["sum"] for each in found["new"]] == [10] * 4


@pytest.mark.guarantee("M7")
def test_what_keeps_a_world_from_forming_is_named(cluster: Cluster) -> None:
    """Actors of another class, on another seat, a port that is none; an actor that dies on its way; an own error."""
    found = cluster.run(DRIVER, "mistakes")
    assert found["plain"]["text"].startswith("the actors of ranks [0] were not made by rank_actor")
    assert found["moved"]["kind"] == "UsageError"
    assert re.match(r"the actor of rank [02] is on node \w+, and its seat is bundle", found["moved"]["text"])
    assert "ports must be the first and the last one" in found["strange port"]["text"]
    assert "no such weight" in found["own"]["text"]
    assert found["one stays"]["kind"] == "UsageError"
    assert "is in a world already" in found["one stays"]["text"]
    assert "no such weight" in found["one raises"]["text"]
    for name in ("one stays", "one raises"):
        assert found[name]["took_s"] < 30, "the others do not wait for the deadline of 100 s"
    assert [each["sum"] for each in found["all join"]] == [10] * 4
    assert found["death"]["kind"] == "PeerLostError"
    assert found["death"]["peers"] == [3]
    assert found["death"]["took_s"] < 30, "the others do not wait for the deadline of 100 s"
    assert [each["sum"] for each in found["after"]] == [6] * 3


def test_the_tiny_llm_serves_on_two_hosts(cluster: Cluster) -> None:
    """Every token equals that of one process, and the answers are those of the demo on one host."""
    told = cluster.run("examples.tiny_llm_on_ray", "--cpus-per-rank", "0.5")
    assert "4 ranks on 2 node(s) met in" in told
    assert f"rank 2: {FAR}, local rank 0 of 2" in told
    assert "tokens of TP 2 x PP 2 on Ray are identical to those of one process" in told
    demo = subprocess.run(
        [sys.executable, "-m", "examples.tiny_llm", "--json"], cwd=ROOT, capture_output=True, check=True
    )
    for one in json.loads(demo.stdout)["continuations"]:
        assert f"{one['prompt']} |{one['text']}" in told


def test_the_tokens_are_those_of_the_other_launchers(cluster: Cluster, tmp_path: Path) -> None:
    """Ray on two hosts gives the tokens of one host, with which torchrun and mpiexec on two hosts are compared too."""
    arguments = demo_arguments(tmp_path)
    found = cluster.run("examples.tiny_llm_on_ray", "--cpus-per-rank", "0.5", *arguments)
    assert (found["tensor"], found["pipeline"]) == (2, 2)
    assert found["continuations"] == tokens_of_one_host(arguments)


@pytest.mark.guarantee("M7")
def test_twenty_worlds_meet_at_once(cluster: Cluster) -> None:
    """Each gets its own port, and its ranks find each other and nobody else."""
    found = cluster.run(DRIVER, "many", "20", timeout_s=550)
    assert len(found["worlds"]) == 20
    for pair in found["worlds"]:
        assert [each["sum"] for each in pair] == [3, 3]
        assert [each["ranks"] for each in pair] == [[0, 1], [0, 1]]
    assert len({pair[0]["token_of_world"] for pair in found["worlds"]}) == 20
