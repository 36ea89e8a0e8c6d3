"""Worlds on hosts with several interfaces, of IPv6, and with names that are wrong or late."""

import gc
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from shm_broadcast import liveness
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.host_namespaces import Host, hosts_file, run_on_hosts
from tests.hosts import report
from tests.ports import listening_addresses, listening_ports
from tests.probes import requires
from tests.worlds import meet, outcome_of, small

pytestmark = requires("network_namespaces")

RANDOM_PORTS = (40000, 40200)
"""The ports that the kernel gives those who ask for any, on both hosts."""

Found = dict[str, list[dict[str, Any]]]


def a_host(number: int) -> Host:
    """Return one of two hosts with a wrong interface, over which the default route leads, and two right ones.

    Debian's installer writes the name of the host beside 127.0.1.1. `n01` and `n02` are what they should be.
    """
    other = {1: "alpha", 2: "beta"}[3 - number]
    own = {1: "alpha", 2: "beta"}[number]
    return Host(
        own,
        {
            "wrong": [f"10.66.0.{number}/24"],
            "right": [f"10.77.0.{number}/24"],
            "six": [f"fd77::{number}/64"],
        },
        [
            f"127.0.1.1 {own}",
            f"10.77.0.{3 - number} {other}",
            "10.77.0.1 n01",
            "10.77.0.2 n02",
            "fd77::1 six",
        ],
        [
            "ip route add default via 10.66.0.254 dev wrong",
            f"echo {RANDOM_PORTS[0]} {RANDOM_PORTS[1]} > /proc/sys/net/ipv4/ip_local_port_range",
        ],
    )


TWO = [a_host(1), a_host(2)]
ONLY_SIX = [
    Host(name, {"six": [f"fd77::{number}/64"]}, ["fd77::1 six"])
    for number, name in ((1, "alpha"), (2, "beta"))
]


def slurm(rank: int, nodes: str, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "4",
        "SLURM_LOCALID": str(rank % 2),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_RESV_PORTS": f"{port}-{port + 1}",
    }


def mpich(rank: int) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank),
        "PMI_SIZE": "4",
        "MPI_LOCALRANKID": str(rank % 2),
        "MPI_LOCALNRANKS": "2",
    }


def lws(rank: int, leader: str) -> dict[str, str]:
    return {"LWS_LEADER_ADDRESS": leader, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": str(rank // 2)}


def join(
    method: str,
    environ: Mapping[str, str] | None = None,
    interface: str | None = None,
    create_timeout_s: float = 20.0,
    remote_ports: str | None = None,
    host_id: str | None = None,
    *,
    rank: int = -1,
    world_size: int = -1,
    local_rank: int = -1,
    local_world_size: int = -1,
) -> dict[str, Any]:
    """Join a world and use it; return what happened, what was computed, and where this process listened."""
    settings = CoordinatorSettings.resolve(
        {},
        create_timeout_s=create_timeout_s,
        interface=interface,
        remote_ports=remote_ports,
        host_id=host_id,
    )
    os.environ.update(environ or {})
    try:
        found = outcome_of(
            lambda: init_distributed_environment(
                world_size,
                rank,
                method,
                local_rank,
                "gloo",
                settings=settings,
                local_world_size=local_world_size,
            )
        )
    finally:
        for name in environ or {}:
            del os.environ[name]
    if found["kind"] == "NoneType":
        world = get_world_group()
        found["place"] = [world.rank, world.local_rank, world.world_size]
        found["total"] = world.all_reduce(small()).tolist()
        end = world.create_mq_broadcaster()
        if isinstance(end, QueueReader):
            found["told"] = end.dequeue(20.0)
        else:
            assert isinstance(end, QueueWriter)
            end.enqueue("word")
            found["told"] = "word"
        found["addresses"] = listening_addresses()
        found["ports"] = listening_ports()
        world.barrier()
    destroy_distributed_environment()
    return found


def serve_as_agent(rank: int, directory: Path, port: int) -> dist.Store | None:
    """Serve a store on all interfaces, as torchrun's agent on the first host does."""
    agent = None
    if rank == 0:
        agent = dist.TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False, use_libuv=False)
    meet(rank, range(4), directory, f"agent-{port}")
    return agent


def torchrun(rank: int, master: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % 2),
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": master,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run",
    }


class Recorded(logging.Handler):
    """Keeps the texts of records."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def join_by_late_name(directory: Path, rank: int, name: str, port: int, late_s: float) -> dict[str, Any]:
    """Join at a name that the name service learns only after `late_s`."""
    kept = Recorded()
    logger = logging.getLogger("coordinator.addresses.names")
    logger.addHandler(kept)
    began = time.monotonic()
    try:
        if rank % 2 == 1:
            # The first rank of each host is waiting already. `appear` runs on the second, whose own start is later.
            time.sleep(late_s)
            with hosts_file(directory, ["alpha", "beta"][rank // 2]).open("a") as names:
                names.write(f"10.77.0.1 {name}\n")
        found = join(f"lws://:{port}", lws(rank, name), local_rank=rank % 2, local_world_size=2)
    finally:
        logger.removeHandler(kept)
    return {**found, "told": kept.texts, "waited": time.monotonic() - began}


SAMPLE = ("srun", "mpiexec, IPv6", "srun, 127.0.1.1", "late name")
"""What the normal suite runs; the thorough tests run the rest."""


def run_scenarios(directory: Path, rank: int, is_sample: bool) -> dict[str, Any]:
    """Run the sample, or the rest, on the hosts `TWO`, one scenario after the other."""
    place: dict[str, Any] = {"rank": rank, "world_size": 4}
    scenarios: dict[str, Any] = {
        "address": lambda: join("tcp://10.77.0.1:29501", **place),
        "srun": lambda: join("slurm://", slurm(rank, "n[01-02]", 29502), remote_ports="29600-29601"),
        "mpiexec, IPv6": lambda: join("mpi://[fd77::1]:29503", mpich(rank)),
        "interface, IPv6": lambda: join("tcp://six:29504", interface="six", **place),
        "interface of both": lambda: join("tcp://10.77.0.1:29505", interface="right", **place),
        "srun, 127.0.1.1": lambda: join("slurm://", slurm(rank, "alpha,beta", 29506), create_timeout_s=3.0),
        "address, 127.0.1.1": lambda: join("tcp://alpha:29511", create_timeout_s=2.0, **place),
        "mpiexec, loopback": lambda: join("mpi://127.0.0.1:29507", mpich(rank)),
        "late name": lambda: join_by_late_name(directory, rank, "late", 29508, 1.0),
    }
    found = {}
    for name in SAMPLE if is_sample else [name for name in scenarios if name not in SAMPLE]:
        found[name] = scenarios[name]()
        # The traceback of a failed start keeps its store, which would go on listening.
        gc.collect()
        meet(rank, range(4), directory, name.replace(" ", "-"))
    if not is_sample:
        agent = serve_as_agent(rank, directory, 29509)
        found["torchrun, 127.0.1.1"] = join("env://", torchrun(rank, "alpha", 29509))
        meet(rank, range(4), directory, "agent-over")
        del agent
    return found


def run_sample(directory: Path, rank: int) -> dict[str, Any]:
    return run_scenarios(directory, rank, is_sample=True)


def run_rest(directory: Path, rank: int) -> dict[str, Any]:
    return run_scenarios(directory, rank, is_sample=False)


def main(directory: Path, what: str, rank: int) -> None:
    """Run one rank."""
    report(directory, rank, globals()[what](directory, rank))


@pytest.fixture(scope="module")
def found() -> Found:
    """Run the sample on ranks 0 and 1 of one host and ranks 2 and 3 of the other; return each rank's findings."""
    ranks = run_on_hosts(__name__, TWO, 2, "run_sample")
    return {name: [each[name] for each in ranks] for name in SAMPLE}


@pytest.fixture(scope="module")
def more() -> Found:
    """Run the rest in the same way."""
    ranks = run_on_hosts(__name__, TWO, 2, "run_rest")
    return {name: [each[name] for each in ranks] for name in ranks[0]}


def assert_world(found: list[dict[str, Any]], own: list[str]) -> None:
    for rank, each in enumerate(found):
        assert each["kind"] == "NoneType", each
        assert each["place"][0] == rank
        assert each["total"] == [4.0 * value for value in range(8)]
        assert each["told"] == "word"
        assert each["addresses"] == [own[rank // 2]]


@pytest.mark.guarantee("G61")
def test_ranks_listen_on_the_route_to_the_master_and_not_on_the_default_route(found: Found) -> None:
    """The default route of both hosts leads over another interface, on which nothing listens."""
    assert_world(found["srun"], ["10.77.0.1", "10.77.0.2"])


@pytest.mark.thorough
@pytest.mark.guarantee("G61")
@pytest.mark.parametrize("scenario", ["address", "interface of both"])
def test_other_ways_to_start_listen_there_too(more: Found, scenario: str) -> None:
    """An address is passed, or an interface is named that has addresses of both families."""
    assert_world(more[scenario], ["10.77.0.1", "10.77.0.2"])


def test_random_ports_are_those_of_the_kernel(found: Found) -> None:
    """A firewall lets through the store's port and `ip_local_port_range`; queues can have a range of their own."""
    store, queues, random = {29502}, {29600, 29601}, set(range(RANDOM_PORTS[0], RANDOM_PORTS[1] + 1))
    writer, *others = [set(each["ports"]) for each in found["srun"]]
    assert writer & store
    assert writer & queues
    assert writer & random
    assert writer <= store | queues | random
    for ports in others:
        assert ports
        assert ports <= random


@pytest.mark.guarantee("G61")
def test_a_world_over_ipv6_works(found: Found) -> None:
    """Store, Gloo and queue listen on addresses of IPv6 only."""
    assert_world(found["mpiexec, IPv6"], ["fd77::1", "fd77::2"])


@pytest.mark.thorough
@pytest.mark.guarantee("G61")
def test_an_interface_may_have_no_address_of_ipv4(more: Found) -> None:
    """It is named, and the master has an address of IPv6."""
    assert_world(more["interface, IPv6"], ["fd77::1", "fd77::2"])


@pytest.mark.guarantee("G60")
@pytest.mark.parametrize("scenario", ["srun", "mpiexec, IPv6"])
def test_the_named_launcher_gives_each_process_its_place(found: Found, scenario: str) -> None:
    """Rank, local rank and world size come from its variables."""
    assert [each["place"] for each in found[scenario]] == [[rank, rank % 2, 4] for rank in range(4)]


@pytest.mark.guarantee("G62")
def test_a_masters_name_for_loopback_is_refused_on_its_host(found: Found) -> None:
    """On its host the name stands for 127.0.1.1. The error comes before anything listens, so the others find nobody."""
    ranks = found["srun, 127.0.1.1"]
    for each in ranks[:2]:
        assert each["kind"] == "UsageError", each
        for word in ("alpha", "127.0.1.1", "/etc/hosts"):
            assert word in each["text"]
        assert each["seconds"] < 1.0, each
    for each in ranks[2:]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [0]), each


@pytest.mark.thorough
def test_a_name_for_loopback_without_a_launcher_is_told_at_the_deadline(more: Found) -> None:
    """Nobody knows before that there is another host. Those who wait for its ranks in vain are told to look."""
    ranks = more["address, 127.0.1.1"]
    for each in ranks[:2]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [2, 3]), each
        assert "On this host, alpha, alpha stands for a loopback address" in each["text"]
        assert "/etc/hosts" in each["text"]
    for each in ranks[2:]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [0]), each


@pytest.mark.thorough
@pytest.mark.guarantee("G62")
def test_a_masters_address_at_loopback_is_refused_on_every_host(more: Found) -> None:
    """No name is wrong here, but the address that the user passes. A second is promised, and takes milliseconds."""
    for each in more["mpiexec, loopback"]:
        assert each["kind"] == "UsageError", each
        assert "127.0.0.1" in each["text"]
        assert "/etc/hosts" not in each["text"]
        assert each["seconds"] < 1.0, each


@pytest.mark.thorough
@pytest.mark.guarantee("G62")
def test_a_name_for_loopback_beside_an_agents_store_is_told_to_all(more: Found) -> None:
    """The agent's store listens on every interface. All ranks reach it, so those on the other host read the reason."""
    ranks = more["torchrun, 127.0.1.1"]
    for each in ranks[:2]:
        assert each["kind"] == "UsageError", each
        assert "/etc/hosts" in each["text"]
        assert each["seconds"] < 1.0, each
    for each in ranks[2:]:
        assert each["kind"] == "CapabilityError", each
        assert "/etc/hosts" in each["text"]


@pytest.mark.guarantee("G63")
def test_a_name_may_appear_while_ranks_start(found: Found) -> None:
    """The first rank of each host waits for the name, as pods do, and the log says so."""
    ranks = found["late name"]
    for rank, each in enumerate(ranks):
        assert each["kind"] == "NoneType", each
        assert each["place"] == [rank, rank % 2, 4]
        assert each["waited"] >= 1.0
    for each in (ranks[0], ranks[2]):
        assert [text for text in each["told"] if "the name late has no address yet" in text]


def use_only_six(directory: Path, rank: int) -> dict[str, Any]:
    return join("slurm://:29501", slurm(rank, "six,beta", 1))


@pytest.mark.thorough
@pytest.mark.guarantee("G61")
def test_hosts_without_ipv4_make_a_world() -> None:
    """Only loopback has an address of IPv4 there, and nothing listens on it."""
    assert_world(run_on_hosts(__name__, ONLY_SIX, 2, "use_only_six"), ["fd77::1", "fd77::2"])


def be_late_by_five(directory: Path, rank: int) -> dict[str, Any]:
    return join_by_late_name(directory, rank, "late", 29501, 5.0)


@pytest.mark.thorough
@pytest.mark.guarantee("G63")
def test_a_name_may_be_five_seconds_late() -> None:
    """Ranks wait for it until `create_timeout_s`."""
    for each in run_on_hosts(__name__, TWO, 2, "be_late_by_five"):
        assert each["kind"] == "NoneType", each
        assert each["waited"] >= 5.0


CLONES = [
    Host(name, {"right": [f"10.77.0.{number}/24"]}, counts_processes=True)
    for number, name in ((1, "alpha"), (2, "beta"))
]


def be_clones(directory: Path, rank: int) -> dict[str, Any]:
    """Act as on two clones of a machine: their boot ids are equal, and so are the numbers of their namespaces."""
    alike = {"pid": 4026531836, "net": 4026531840}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(liveness, "_namespace", alike.__getitem__)
        settings = CoordinatorSettings.resolve({}, create_timeout_s=10.0)
        found = {
            "plain": outcome_of(
                lambda: init_distributed_environment(
                    4, rank, "tcp://10.77.0.1:29501", backend="gloo", settings=settings
                )
            )
        }
        destroy_distributed_environment()
        gc.collect()
        meet(rank, range(4), directory, "plain")
        found["named"] = join("tcp://10.77.0.1:29502", rank=rank, world_size=4, host_id="ab"[rank // 2])
        found["again"] = outcome_of(
            lambda: init_distributed_environment(
                1, 0, f"file://{directory}/own-{rank}", settings=CoordinatorSettings.resolve({}, host_id="c")
            )
        )
    return found


@pytest.mark.thorough
@pytest.mark.guarantee("G64")
def test_clones_of_one_machine_are_told_and_start_with_a_name_each() -> None:
    """Each takes the other's processes for its own that have ended. The error names both hosts and the setting.

    A process may have the number of one on the other host and have started in the same tick: it seems to live.
    """
    ranks = run_on_hosts(__name__, CLONES, 2, "be_clones")
    for each in ranks:
        found = each["plain"]
        assert found["kind"] in ("PeerLostError", "CapabilityError"), found["text"]
        for word in ("alpha", "beta", "one boot id", "GROUP_COORDINATOR_HOST_ID"):
            assert word in found["text"], found
    assert_world([each["named"] for each in ranks], ["10.77.0.1", "10.77.0.2"])
    for each in ranks:
        assert each["again"]["kind"] == "UsageError", each
        assert "host_id is 'c'" in each["again"]["text"]
