"""A world on two hosts, which are two network namespaces with a cable between; loopback does not join them."""

import gc
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator import create_stateless_group
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from tests.hosts import report, run_on_two_hosts
from tests.ports import listening_addresses
from tests.probes import requires
from tests.worlds import meet, new_group, outcome_of, small

pytestmark = requires("network_namespaces")

SCENARIOS: dict[str, tuple[str, list[str | None]]] = {
    "address of the master": ("tcp://10.77.0.1:29501", [None, None]),
    "interfaces": ("file://{directory}/by-interface", ["near", "far"]),
    "directory alone": ("file://{directory}/alone", [None, None]),
    "loopback on both": ("tcp://10.77.0.1:29502", ["lo", "lo"]),
    "loopback on one": ("tcp://10.77.0.1:29503", ["near", "lo"]),
    "master at loopback": ("tcp://127.0.0.1:29504", [None, None]),
}
"""By name the init method, and the interface that each host names."""


@pytest.fixture(scope="module")
def two_hosts() -> dict[str, list[dict[str, Any]]]:
    """Run all scenarios on ranks 0 and 1 of one host and ranks 2 and 3 of the other; return each rank's findings."""
    ranks = run_on_two_hosts(__name__)
    return {name: [found[name] for found in ranks] for name in (*SCENARIOS, "stateless")}


def be_a_rank(method: str, interface: str | None, rank: int) -> dict[str, Any]:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=5.0, interface=interface)
    found = outcome_of(
        lambda: init_distributed_environment(4, rank, method, backend="gloo", settings=settings)
    )
    if found["kind"] == "NoneType":
        group = get_world_group()
        with new_group(group, interface=interface) as other:
            found["total"] = other.all_reduce(small()).tolist()
            found["ranks"] = group.all_gather_object(rank)
            of_torch, total = dist.new_group(), torch.ones(1)
            dist.all_reduce(total, group=of_torch)
            dist.monitored_barrier(of_torch, timedelta(seconds=30))
            found["by torch"] = total.item()
            found["addresses"] = listening_addresses()
            group.barrier()
            dist.destroy_process_group(of_torch)
        pairs = [[0, 1], [2, 3]]
        with GroupCoordinator(pairs, rank % 2, "gloo", True, settings=settings) as pair:
            found["pair"] = pair.all_gather_object(rank)
            found["loopback"] = listening_addresses()
            group.barrier()
    destroy_distributed_environment()
    return found


def be_stateless(rank: int) -> dict[str, Any]:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=20.0)
    with create_stateless_group("10.77.0.1", 29505, rank, 4, backend="gloo", settings=settings) as group:
        total = group.all_reduce(small())
        found = {"total": total.tolist(), "ranks": group.all_gather_object(rank)}
        found["addresses"] = listening_addresses()
        group.barrier()
    return found


def assert_world_works(found: list[dict[str, Any]], own: list[str]) -> None:
    for rank, each in enumerate(found):
        assert each["kind"] == "NoneType", each
        assert each["total"] == [4.0 * value for value in range(8)]
        assert each["ranks"] == [0, 1, 2, 3]
        assert each["by torch"] == 4.0
        assert each["addresses"] == [own[rank // 2]]


Found = dict[str, list[dict[str, Any]]]


def test_a_world_at_the_masters_address_spans_both_hosts(two_hosts: Found) -> None:
    """Each rank listens only on the interface that routes to the master. A group on one host listens nowhere."""
    found = two_hosts["address of the master"]
    assert_world_works(found, ["10.77.0.1", "10.77.0.2"])
    for rank, each in enumerate(found):
        assert each["pair"] == [[0, 1], [2, 3]][rank // 2]
        assert each["loopback"] == [["10.77.0.1"], ["10.77.0.2"]][rank // 2]


@pytest.mark.guarantee("G35")
def test_a_stateless_group_spans_both_hosts(two_hosts: Found) -> None:
    """It needs no world, and listens only on the interface that routes to its rank 0."""
    for rank, each in enumerate(two_hosts["stateless"]):
        assert each["total"] == [4.0 * value for value in range(8)]
        assert each["ranks"] == [0, 1, 2, 3]
        assert each["addresses"] == [["10.77.0.1", "10.77.0.2"][rank // 2]]


def test_an_interface_says_where_to_listen(two_hosts: Found) -> None:
    """Hosts that share a directory have no master to route to. Each host therefore names its interface."""
    assert_world_works(two_hosts["interfaces"], ["10.77.0.1", "10.77.0.2"])


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("scenario", ["directory alone", "loopback on both", "loopback on one"])
def test_loopback_between_hosts_is_refused_with_both_addresses(two_hosts: Found, scenario: str) -> None:
    """The error on every rank names a rank that announces loopback to another host, and shows both addresses."""
    for each in two_hosts[scenario]:
        assert each["kind"] == "CapabilityError", each
        assert "announced a loopback address (127.0.0.1)" in each["text"]
        assert ("(10.77.0.1)" if scenario == "loopback on one" else "(127.0.0.1)") in each["text"]
        assert "GROUP_COORDINATOR_INTERFACE" in each["text"]


def test_a_master_at_loopback_is_not_found_by_the_other_host(two_hosts: Found) -> None:
    """The other host looks for the master on itself and times out. The error names rank 0 and the address."""
    found = two_hosts["master at loopback"]
    for each in found[:2]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [2, 3]), each
    for each in found[2:]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [0]), each
        assert "127.0.0.1:29504" in each["text"]


def main(directory: Path, rank: int) -> None:
    """Run one rank in all scenarios, one after the other."""
    found = {}
    for name, (method, interfaces) in SCENARIOS.items():
        found[name] = be_a_rank(method.format(directory=directory), interfaces[rank // 2], rank)
        meet(rank, range(4), directory, name.replace(" ", "-"))
    # The tracebacks of the scenarios that failed keep their stores, which would go on listening.
    gc.collect()
    found["stateless"] = be_stateless(rank)
    report(directory, rank, found)
