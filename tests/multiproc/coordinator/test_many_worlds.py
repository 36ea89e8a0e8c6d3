"""Many worlds that start at once, on one host or on two."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest

from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from tests.harness import run_ranks
from tests.host_namespaces import Host, run_on_hosts
from tests.hosts import report
from tests.ports import listening_addresses, listening_ports
from tests.probes import requires
from tests.worlds import meet, small

RANKS_PER_WORLD = 2
# Below the range from which the kernel takes ports for connections and for listeners that want any port.
FIRST_PORT = 29700
WORLDS = 20
HOSTS = [Host(name, {"net": [f"10.79.0.{number}/24"]}) for number, name in enumerate("ab", 1)]


def be_in_one_of_many(rank: int, world_size: int, directory: Path, first_port: int) -> list[Any]:
    """Start with the others of a world as mpiexec does, by a port that is known to all before anybody listens there."""
    number, place = divmod(rank, RANKS_PER_WORLD)
    port = first_port + number
    environ = {"PMI_RANK": place, "PMI_SIZE": RANKS_PER_WORLD, "MPI_LOCALRANKID": place, "MPI_LOCALNRANKS": 2}
    os.environ.update({name: str(value) for name, value in environ.items()})
    bound: list[Any] = []
    real = socket.create_server

    def recording(address: tuple[Any, ...], **options: Any) -> socket.socket:
        bound.append(address[1])
        return real(address, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_server", recording)
        settings = CoordinatorSettings.resolve({}, create_timeout_s=100.0)
        init_distributed_environment(
            distributed_init_method=f"mpi://127.0.0.1:{port}", backend="gloo", settings=settings
        )
    for name in environ:
        del os.environ[name]
    world = get_world_group()
    found: list[Any] = [world.all_gather_object([number, place])]
    found.append(world.all_reduce(small() * (number + 1)).tolist())
    found += [port in listening_ports(), bound]
    world.barrier()
    destroy_distributed_environment()
    return found


def start_at_once(worlds: int, first_port: int) -> None:
    found = run_ranks(be_in_one_of_many, worlds * RANKS_PER_WORLD, first_port, timeout_s=200.0)
    for rank, (members, total, listens, bound) in enumerate(found):
        number, place = divmod(rank, RANKS_PER_WORLD)
        assert members == [[number, 0], [number, 1]]
        assert total == [2.0 * (number + 1) * value for value in range(8)]
        # Rank 0 has bound the port once, and its store listens on that descriptor.
        assert (listens, bound) == (place == 0, [first_port + number] if place == 0 else [])


@pytest.mark.guarantee("G65")
def test_worlds_that_start_at_once_do_not_meet() -> None:
    """Each has its own port, which its rank 0 binds once; the store gets the descriptor."""
    start_at_once(2, FIRST_PORT)


@pytest.mark.thorough
@pytest.mark.guarantee("G65")
def test_twenty_worlds_start_at_once() -> None:
    """Forty processes on one host are twenty worlds."""
    start_at_once(WORLDS, FIRST_PORT + 10)


def main(directory: Path, rank: int) -> None:
    """Be a rank of one of many worlds, of which each has rank 0 on the first host and rank 1 on the second."""
    place, number = divmod(rank, WORLDS)
    port = FIRST_PORT + number
    settings = CoordinatorSettings.resolve({}, create_timeout_s=100.0)
    # All processes of both hosts have been forked.
    meet(rank, range(RANKS_PER_WORLD * WORLDS), directory, "start")
    init_distributed_environment(
        RANKS_PER_WORLD, place, f"tcp://10.79.0.1:{port}", backend="gloo", settings=settings
    )
    world = get_world_group()
    found: dict[str, Any] = {"members": world.all_gather_object([number, place])}
    found["total"] = world.all_reduce(small() * (number + 1)).tolist()
    found |= {"listens": port in listening_ports(), "addresses": listening_addresses()}
    world.barrier()
    report(directory, rank, found)
    destroy_distributed_environment()


@pytest.mark.thorough
@pytest.mark.guarantee("G65")
@requires("network_namespaces")
def test_twenty_worlds_of_two_hosts_start_at_once() -> None:
    """The hosts have networks, names and folders of their own. No rank meets one of another world."""
    for rank, found in enumerate(run_on_hosts(__name__, HOSTS, WORLDS, deadline_s=300.0)):
        place, number = divmod(rank, WORLDS)
        assert found["members"] == [[number, 0], [number, 1]]
        assert found["total"] == [2.0 * (number + 1) * value for value in range(8)]
        assert found["listens"] == (place == 0)
        assert found["addresses"] == [f"10.79.0.{place + 1}"]
