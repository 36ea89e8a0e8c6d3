"""Ranks of one host with a secret: worlds, stateless groups, launchers, settings that are refused."""

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator import create_stateless_group
from coordinator.bootstrap.membership import world_store
from coordinator.bootstrap.secured import place_of
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.security.secret import Secret
from coordinator.security.store import secured
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import SettingsError, UsageError
from tests.harness import RankPool
from tests.hosts import ROOT
from tests.log_records import records_of
from tests.multiproc.coordinator.test_meeting import exchange
from tests.ports import free_port, listening_addresses
from tests.secured import HERE
from tests.worlds import meet, outcome_of

VALUE = bytes(range(60, 124))


def write(path: Path, content: bytes = VALUE, mode: int = 0o600) -> str:
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


def settings_of(directory: Path, rank: int, **settings: Any) -> CoordinatorSettings:
    path = write(directory / f"secret-{rank}")
    return CoordinatorSettings.resolve({}, **{"secret_file": path, "create_timeout_s": 30.0, **settings})


@contextmanager
def variables(**given: str) -> Iterator[None]:
    """Set variables of the environment in the block, as a launcher does."""
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def use_and_leave() -> list[Any]:
    group = get_world_group()
    base = secured(world_store())
    assert base is not None
    found = [group.all_gather_object(group.rank), listening_addresses() == [HERE]]
    group.barrier()
    destroy_distributed_environment()
    with pytest.raises(dist.DistNetworkError):
        base.check(["a"])
    return found


# --- worlds ---------------------------------------------------------------------------------------------------


def through(rank: int, world_size: int, directory: Path, way: str, port: int) -> list[Any]:
    settings, found = settings_of(directory, rank, security="required"), []
    method = {"file": f"file://{directory}/rendezvous", "tcp": f"tcp://{HERE}:{port}", "env": "env://"}[way]
    for _ in range(2):
        with variables(MASTER_ADDR=HERE, MASTER_PORT=str(port)):
            init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
        gc.collect()  # torch keeps no Python object of a store
        if way == "tcp":
            base = secured(world_store())
            assert base is not None
            digest = json.loads(base.get("group_coordinator/world/proposal"))["digest"]
            facts = json.loads(base.get(f"group_coordinator/world/facts/{digest}"))
            assert facts["store generation"] == base.generation
        found.append(use_and_leave())
    return found


@pytest.mark.guarantee("K8")
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("file", marks=pytest.mark.thorough),
        "tcp",
        pytest.param("env", marks=pytest.mark.thorough),
    ],
)
def test_a_world_with_a_secret_can_follow_another_at_one_place(ranks2: RankPool, way: str) -> None:
    """On one host "required" asks for no acknowledgement; the store listens on loopback, and ends with the world."""
    assert ranks2.run(through, way, free_port()) == [[[[0, 1], True]] * 2] * 2


def behind_an_agent(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    agent = (
        dist.TCPStore(HERE, port, is_master=True, wait_for_workers=False, use_libuv=False)
        if rank == 0
        else None
    )
    meet(rank, range(world_size), directory, "agent")
    given = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "run",
        "GROUP_COORDINATOR_SECRET_FILE": write(directory / f"secret-{rank}"),
    }
    found = []
    for _ in range(2):
        with variables(**given):
            init_distributed_environment(backend="gloo")
        keys: Any = dist.TCPStore(HERE, port, is_master=False, wait_for_workers=False, use_libuv=False)
        get_world_group().barrier()
        found.append([keys.num_keys(), *use_and_leave()])
        meet(rank, range(world_size), directory, f"left {len(found)}")
    del keys, agent
    return found


@pytest.mark.guarantee("K7")
def test_the_launchers_store_holds_rank_0s_endpoint_and_nothing_else(ranks2: RankPool) -> None:
    """One key for each world, beside the one that torch's store has from the beginning."""
    found = ranks2.run(behind_an_agent, free_port())
    for rank, worlds in enumerate(found):
        numbers = [number for number, _, _ in worlds]
        assert numbers[1] - numbers[0] == 1
        assert numbers[0] <= 2
        assert [ranks for _, ranks, _ in worlds] == [[0, 1]] * 2, rank


def early_again(rank: int, world_size: int, directory: Path, port: int) -> list[list[int]]:
    given = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": HERE,
        "MASTER_PORT": str(port),
        "GROUP_COORDINATOR_SECRET_FILE": write(directory / f"secret-{rank}"),
    }
    found = []
    for attempt in range(2):
        with variables(**given):
            init_distributed_environment(backend="gloo")
        found.append(get_world_group().all_gather_object(rank))
        get_world_group().barrier()
        if (rank, attempt) == (0, 0):
            time.sleep(
                0.3
            )  # the other rank comes to the next world meanwhile, and finds the store of this one
        destroy_distributed_environment()
    return found


@pytest.mark.guarantee("K8")
def test_a_rank_waits_at_the_address_until_rank_0_has_left_the_last_world(ranks2: RankPool) -> None:
    """Without an agent rank 0 serves each world there. The early rank once found itself in the last one."""
    assert ranks2.run(early_again, free_port()) == [[[0, 1]] * 2] * 2


SCRIPT = """
import os
import torch
from coordinator.bootstrap.membership import world_store
from coordinator.parallel_state import (
    destroy_distributed_environment, get_world_group, init_distributed_environment
)
from coordinator.security.store import secured

init_distributed_environment(backend="gloo")
group = get_world_group()
count = os.environ["TORCHELASTIC_RESTART_COUNT"]
with open(os.path.join(os.environ["RESULTS"], f"{count}-{group.rank}"), "w") as file:
    file.write(f"{group.all_gather_object(group.rank)} {secured(world_store()) is not None}")
group.barrier()
if count == "0":
    os._exit(1)
destroy_distributed_environment()
"""


@pytest.mark.guarantee("K7")
@pytest.mark.thorough
def test_torchrun_starts_and_restarts_a_job_with_a_secret(tmp_path: Path) -> None:
    """Without an argument: each start of the workers meets in a store of its own."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    options = ["--standalone", "--max-restarts", "1", "--nproc-per-node", "2"]
    told = {
        "PYTHONPATH": str(ROOT),
        "RESULTS": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "GROUP_COORDINATOR_SECRET_FILE": write(tmp_path / "secret"),
        "GROUP_COORDINATOR_SECURITY": "required",
    }
    outcome = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert outcome.returncode == 0, outcome.stderr
    found = {path.name: path.read_text() for path in tmp_path.glob("?-?")}
    assert found == dict.fromkeys(["0-0", "0-1", "1-0", "1-1"], "[0, 1] True")


def stateless(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    group = create_stateless_group(
        HERE, port, rank, world_size, backend="gloo", settings=settings_of(directory, rank)
    )
    world = group._parts.world
    assert world is not None
    found = [group.all_gather_object(rank), secured(world.store) is not None]
    group.destroy()
    return found


@pytest.mark.guarantee("K8")
def test_a_stateless_group_with_a_secret_meets_in_its_own_store(ranks2: RankPool) -> None:
    """As a world does, at the address that was passed."""
    assert ranks2.run(stateless, free_port()) == [[[0, 1], True]] * 2


def of_torch(rank: int, world_size: int, directory: Path) -> list[str]:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    with records_of("coordinator.security", logging.WARNING) as records:
        init_distributed_environment(settings=settings_of(directory, rank))
    destroy_distributed_environment()
    dist.destroy_process_group()
    return [record.getMessage() for record in records]


def test_a_world_of_torch_with_a_secret_says_that_it_protects_nothing(ranks2: RankPool) -> None:
    """Such a world stays as its owner made it, and the log of each rank says what that means."""
    for said in ranks2.run(of_torch):
        assert len(said) == 1
        assert "the secret protects nothing here" in said[0]


def by_ticket(rank: int, world_size: int, directory: Path) -> list[Any]:
    ticket = exchange(directory, rank, world_size)
    init_distributed_environment(meeting=ticket, backend="gloo", settings=settings_of(directory, rank))
    base = secured(world_store())
    assert base is not None
    return [base.port == ticket.port, *use_and_leave()]


@pytest.mark.guarantee("K8")
def test_a_meeting_with_a_secret_uses_the_descriptor_of_its_offer(ranks2: RankPool) -> None:
    """Rank 0 serves the secured store where its ticket says; nobody could take the port in between."""
    assert ranks2.run(by_ticket) == [[True, [0, 1], True]] * 2


def one_without(rank: int, world_size: int, directory: Path, port: int) -> dict[str, Any]:
    chosen = settings_of(directory, rank, create_timeout_s=1.5)
    if rank == 1:
        chosen = CoordinatorSettings.resolve({}, create_timeout_s=1.5)
    return outcome_of(
        lambda: init_distributed_environment(
            world_size, rank, f"tcp://{HERE}:{port}", backend="gloo", settings=chosen
        )
    )


@pytest.mark.guarantee("K4")
@pytest.mark.thorough
def test_a_rank_without_the_secret_does_not_join(ranks2: RankPool) -> None:
    """It speaks as torch's stores do, to which the store of the others says nothing."""
    first, second = ranks2.run(one_without, free_port())
    assert (first["kind"], first["missing"]) == ("CommTimeoutError", [1]), first
    assert second["kind"] in ("CommTimeoutError", "NativeError"), second


# --- settings -------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("K9")
def test_required_without_a_secret_fails_before_anything_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """As settings, as an argument, and from the environment; the text says where to name a secret."""
    opened: list[object] = []
    monkeypatch.setattr(socket.socket, "bind", lambda *args: opened.append(args))
    monkeypatch.setattr(dist, "TCPStore", lambda *args, **options: opened.append(args))
    monkeypatch.setenv("GROUP_COORDINATOR_SECURITY", "required")
    with pytest.raises(SettingsError, match="GROUP_COORDINATOR_SECRET_FILE"):
        init_distributed_environment(2, 0, f"tcp://{HERE}:{free_port_later()}", backend="gloo")
    with pytest.raises(SettingsError, match="there is no secret"):
        CoordinatorSettings(security="required")
    assert opened == []


def free_port_later() -> int:
    """Return a port without binding it."""
    return 29999


def refused(settings: CoordinatorSettings) -> str:
    with pytest.raises(UsageError) as caught:
        init_distributed_environment(2, 0, f"tcp://{HERE}:{free_port()}", backend="gloo", settings=settings)
    assert listening_addresses() == []
    return str(caught.value)


@pytest.mark.guarantee("K1")
def test_a_bad_secret_fails_before_anything_listens(tmp_path: Path) -> None:
    """A file that others can read, one that is too short, one that is missing, and a descriptor that is not open."""
    names: dict[str, Callable[[], dict[str, Any]]] = {
        "mode 0640": lambda: {"secret_file": write(tmp_path / "a", mode=0o640)},
        "has fewer": lambda: {"secret_file": write(tmp_path / "b", VALUE[:31])},
        "No such file": lambda: {"secret_file": str(tmp_path / "c")},
        "is not open": lambda: {"secret_descriptor": 1 << 19},
    }
    for reason, given in names.items():
        text = refused(CoordinatorSettings.resolve({}, **given()))
        assert reason in text
        assert VALUE[:8].hex() not in text
        assert VALUE[:8].decode() not in text


WRONG_SETTINGS: dict[str, dict[str, Any]] = {
    "must be the absolute path": {"secret_file": "correct horse battery staple"},
    "number of a descriptor": {"secret_descriptor": -1},
    "both set": {"secret_file": "/s", "secret_descriptor": 5},
    "'optional' or 'required'": {"security": "on"},
    "'plaintext' or None": {"bulk": "encrypted"},
}


@pytest.mark.guarantee("K1")
@pytest.mark.parametrize("reason", WRONG_SETTINGS)
def test_settings_that_make_no_sense_are_refused(reason: str) -> None:
    """Who takes the variable for the place of the secret itself does not find that in the error."""
    with pytest.raises(SettingsError, match=reason) as caught:
        CoordinatorSettings(**WRONG_SETTINGS[reason])
    assert "horse" not in str(caught.value)
    environ = {
        f"GROUP_COORDINATOR_{name.upper()}": str(value) for name, value in WRONG_SETTINGS[reason].items()
    }
    with pytest.raises(SettingsError) as caught:
        CoordinatorSettings.from_env(environ)
    assert "horse" not in str(caught.value)


def test_a_secret_that_changes_its_members_is_refused(tmp_path: Path) -> None:
    """Rank 0 serves the store, which would have to outlive it."""
    settings = CoordinatorSettings.resolve({}, secret_file=write(tmp_path / "secret"))
    with pytest.raises(UsageError, match="with a secret rank 0 serves the store"):
        init_distributed_environment(
            2, 0, f"file://{tmp_path}/meet", backend="gloo", settings=settings, elastic=True
        )


def test_a_descriptor_is_a_place_for_a_secret_too() -> None:
    """It is read once, also by several threads and for several worlds."""
    reading, writing = os.pipe()
    os.write(writing, VALUE)
    os.close(writing)
    settings = CoordinatorSettings.resolve({}, secret_descriptor=reading)
    found: list[bytes] = []

    def read() -> None:
        own = place_of(settings, "run", 0, 2)
        assert own is not None
        found.append(own.secret.derive("rank", "run", 0))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [Secret(VALUE).derive("rank", "run", 0)] * 3
    assert place_of(CoordinatorSettings.resolve({}), "run", 0, 2) is None
