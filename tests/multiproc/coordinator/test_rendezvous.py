"""Ranks find each other at an address or through a launcher's variables, and listen nowhere else."""

import gc
import os
import socket
import subprocess
import sys
import textwrap
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
from tests.harness import RankPool, run_ranks
from tests.ports import free_port, listening_addresses
from tests.worlds import meet, new_group, outcome_of, small

ROOT = Path(__file__).parents[3]


def launched(rank: int, world_size: int, port: int, **more: str) -> dict[str, str]:
    """Return the environment that torchrun gives a rank."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **more,
    }


def try_to_join(
    method: str,
    rank: int = -1,
    world_size: int = -1,
    environ: Mapping[str, str] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    before = dict(os.environ)
    os.environ.update(environ or {})
    try:
        chosen = CoordinatorSettings.resolve({}, **{"create_timeout_s": 60.0, **settings})
        return outcome_of(
            lambda: init_distributed_environment(world_size, rank, method, backend="gloo", settings=chosen)
        )
    finally:
        os.environ.clear()
        os.environ.update(before)


def use_and_leave() -> list[Any]:
    """Use the world and a group of it; return the gathered ranks and the addresses on which this process listened."""
    group = get_world_group()
    with new_group(group) as other:
        other.all_reduce(small())
        found = [group.all_gather_object(group.rank), listening_addresses()]
        group.barrier()
    destroy_distributed_environment()
    return found


# --- the three forms ----------------------------------------------------------------------------------------


def join_and_use(rank: int, world_size: int, directory: Path, way: str, port: int) -> list[Any]:
    if way == "env":
        found = try_to_join("env://", environ=launched(rank, world_size, port))
    else:
        method = {
            "file": f"file://{directory}/rendezvous",
            "tcp": f"tcp://127.0.0.1:{port}",
            "name": f"tcp://localhost:{port}",
        }[way]
        found = try_to_join(method, rank, world_size)
    return [found["kind"], *use_and_leave()]


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("way", ["file", "tcp", "name", "env"])
def test_a_world_comes_up_and_listens_on_loopback_only(ranks4: RankPool, way: str) -> None:
    """On one host all listening sockets of every rank (store, host and device plane) have loopback addresses."""
    for kind, ranks, addresses in ranks4.run(join_and_use, way, free_port()):
        assert kind == "NoneType"
        assert ranks == [0, 1, 2, 3]
        # The rank does listen. Otherwise this test would show nothing.
        assert addresses
        assert all(address in {"127.0.0.1", "::1", "::ffff:127.0.0.1"} for address in addresses), addresses


def again_at_one_port(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    found = []
    for _ in range(3):
        found.append(try_to_join(f"tcp://127.0.0.1:{port}", rank, world_size)["kind"])
        found.append(use_and_leave()[0])
        meet(rank, range(world_size), directory, f"left-{len(found)}")
    return found


def test_an_address_can_be_used_again_at_once(ranks2: RankPool) -> None:
    """Connections that still linger from an earlier run do not block the port."""
    assert ranks2.run(again_at_one_port, free_port()) == [["NoneType", [0, 1]] * 3] * 2


def user_world(rank: int, world_size: int, directory: Path) -> list[Any]:
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=world_size)
    init_distributed_environment(settings=CoordinatorSettings.resolve({}))
    found = use_and_leave()[0]
    still_up = dist.is_initialized()
    dist.barrier()
    dist.destroy_process_group()
    return [found, still_up]


@pytest.mark.guarantee("G11")
def test_a_world_of_the_user_is_used_and_left_up(ranks2: RankPool) -> None:
    """torch.distributed stays initialised for its owner, because we destroy only what we created."""
    assert ranks2.run(user_world) == [[[0, 1], True]] * 2


# --- a launcher -----------------------------------------------------------------------------------------------


def restarted(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    # The agent's store outlives a restart of the workers and keeps the keys of earlier attempts. It does not use libuv,
    # torch's other implementation, which leaves a pipe open.
    agent = (
        dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, use_libuv=False)
        if rank == 0
        else None
    )
    meet(rank, range(world_size), directory, "agent")
    found = []
    for attempt in range(3):
        environ = launched(
            rank,
            world_size,
            port,
            TORCHELASTIC_USE_AGENT_STORE="True",
            TORCHELASTIC_RESTART_COUNT=str(attempt),
            TORCHELASTIC_RUN_ID="run",
        )
        found.append([try_to_join("env://", environ=environ)["kind"], use_and_leave()[0]])
    meet(rank, range(world_size), directory, "end")
    del agent
    return found


def missed(rank: int, world_size: int, directory: Path, port: int) -> list[Any]:
    environ, found = launched(rank, world_size, port), []
    for alone in (1, 0):
        if rank == alone:
            found.append(try_to_join("env://", environ=environ, create_timeout_s=0.3)["kind"])
            # The traceback keeps the store, which would go on listening.
            gc.collect()
        meet(rank, range(world_size), directory, f"{alone} gave up")
    for attempt in range(2):
        joined = try_to_join("env://", environ=environ, create_timeout_s=10.0)
        assert joined["kind"] == "NoneType", joined["text"]
        found.append(use_and_leave()[0])
        meet(rank, range(world_size), directory, f"left {attempt}")
    return found


def test_ranks_that_missed_each_other_can_try_again(ranks2: RankPool) -> None:
    """One found no store, and the other no rank in its own store. Without an agent one world can follow another."""
    worlds = ["CommTimeoutError", [0, 1], [0, 1]]
    assert ranks2.run(missed, free_port()) == [worlds, worlds]


def test_each_restart_by_the_agent_is_a_rendezvous_of_its_own(ranks2: RankPool) -> None:
    """The agent's store keeps the keys of earlier attempts. The restart count distinguishes the attempts."""
    assert ranks2.run(restarted, free_port()) == [[["NoneType", [0, 1]]] * 3] * 2


SCRIPT = """
import os
import torch
from coordinator.parallel_state import (
    destroy_distributed_environment, get_tp_group, get_world_group, init_distributed_environment,
    initialize_model_parallel,
)
from tests.ports import listening_addresses

init_distributed_environment(backend="gloo")
initialize_model_parallel(tensor_model_parallel_size=2)
tp = get_tp_group()
total = tp.all_reduce(torch.ones(4))
assert total.tolist() == [2.0] * 4
assert tp.local_rank == int(os.environ["LOCAL_RANK"])
assert all(address.startswith(("127.", "::1")) for address in listening_addresses()), listening_addresses()
path = os.path.join(os.environ["RESULTS"], f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{tp.rank}")
open(path, "w").write(repr(tp.all_gather_object(tp.rank)))
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    tp.barrier()
    os._exit(1 if tp.rank == 1 else 0)
destroy_distributed_environment()
"""


@pytest.mark.thorough
def test_torchrun_starts_and_restarts_a_world(tmp_path: Path) -> None:
    """A script without arguments comes up, and again when the agent restarts its workers after a failure.

    The restarted workers find each other, and not the keys of earlier workers.
    """
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    options = ["--standalone", "--max-restarts", "1", "--nproc-per-node", "2"]
    outcome = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "RESULTS": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert outcome.returncode == 0, outcome.stderr
    found = {path.name: path.read_text() for path in tmp_path.glob("?-?")}
    assert found == dict.fromkeys(["0-0", "0-1", "1-0", "1-1"], "[0, 1]")


def odd_environment(rank: int, world_size: int, directory: Path, way: str, port: int) -> list[Any]:
    # As a worker of an engine sees it that computes on the CPU: the local world size is that of another dimension, and
    # the other variables belong to the launcher of the engine.
    odd = launched(0, 7, port, LOCAL_WORLD_SIZE="1", LOCAL_RANK="1", RANK="6", WORLD_SIZE="x")
    os.environ.update(odd)
    method = {"env": "env://", "tcp": f"tcp://127.0.0.1:{port}", "file": f"file://{directory}/rendezvous"}[
        way
    ]
    try:
        init_distributed_environment(world_size, rank, method, local_rank=rank, backend="gloo")
    finally:
        for name in odd:
            del os.environ[name]
    return [get_world_group().local_rank, *use_and_leave()[:1]]


@pytest.mark.guarantee("G30")
@pytest.mark.parametrize("way", ["env", "tcp", "file"])
def test_arguments_beat_the_variables_of_a_launcher(ranks2: RankPool, way: str) -> None:
    """A caller that passes its place is not stopped by variables that say something else."""
    assert ranks2.run(odd_environment, way, free_port()) == [[0, [0, 1]], [1, [0, 1]]]


def the_same_rank(rank: int, world_size: int, directory: Path, port: int) -> dict[str, Any]:
    found = try_to_join("env://", 0, environ=launched(rank, world_size, port), create_timeout_s=5.0)
    meet(rank, range(world_size), directory, "end")
    return found


def test_two_processes_that_pass_one_rank_are_told(ranks2: RankPool) -> None:
    """An argument beats the launcher's rank, so a wrong one must be found out by the ranks themselves."""
    found = ranks2.run(the_same_rank, free_port())
    assert any(each["kind"] in ("DisagreementError", "UsageError") for each in found), found
    assert all(each["kind"] != "NoneType" for each in found), found


# --- mistakes -------------------------------------------------------------------------------------------------


def one_mistake(
    rank: int, world_size: int, directory: Path, method: str, given: list[int], environ: dict[str, str]
) -> dict[str, Any]:
    return try_to_join(method, given[0], given[1], environ, create_timeout_s=1.5)


def mistake(method: str, rank: int = 0, world_size: int = 2, **environ: str) -> dict[str, Any]:
    (found,) = run_ranks(one_mistake, 1, method, [rank, world_size], environ)
    return dict(found)


def test_a_port_in_use_is_named_with_its_address() -> None:
    """Rank 0 reports at once where it could not listen. It does not wait for ranks that cannot come."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        found = mistake(f"tcp://127.0.0.1:{port}")
    assert found["kind"] == "UsageError", found
    assert f"127.0.0.1:{port}" in found["text"]
    assert "in use" in found["text"]


def test_an_address_of_another_host_is_refused_by_rank_0() -> None:
    """No host has 192.0.2.1, and rank 0 cannot serve the store there."""
    found = mistake("tcp://192.0.2.1:29500")
    assert found["kind"] == "UsageError", found
    assert "192.0.2.1:29500" in found["text"]


@pytest.mark.guarantee("G12")
@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_a_wildcard_address_is_refused(host: str) -> None:
    """We do not listen on a wildcard address, even on request, because any host could connect to it."""
    found = mistake(f"tcp://{host}:{free_port()}")
    assert found["kind"] == "UsageError", found
    assert "wildcard address" in found["text"]


def test_a_wildcard_address_of_the_launcher_is_refused() -> None:
    """A wildcard address in the environment is refused too."""
    environ = launched(0, 2, free_port(), MASTER_ADDR="0.0.0.0")
    assert mistake("env://", -1, -1, **environ)["kind"] == "UsageError"


def test_nobody_at_the_address_is_a_timeout_that_names_rank_0() -> None:
    """Rank 1 tries until `create_timeout_s`, and then its error says where it looked."""
    port = free_port()
    found = mistake(f"tcp://127.0.0.1:{port}", rank=1)
    assert (found["kind"], found["missing"]) == ("CommTimeoutError", [0]), found
    assert f"127.0.0.1:{port}" in found["text"]
    assert found["seconds"] >= 1.0


def test_a_host_name_that_does_not_resolve_raises() -> None:
    """Rank 0 cannot listen there. The others go on trying, because a name may appear later, and time out."""
    assert mistake("tcp://no-such-host.invalid:29500")["kind"] == "UsageError"
    other = mistake("tcp://no-such-host.invalid:29500", rank=1)
    assert (other["kind"], other["missing"]) == ("CommTimeoutError", [0]), other


@pytest.mark.parametrize(
    "method", ["tcp://127.0.0.1", "tcp://:29500", "tcp://h:99999", "http://h:1", "", "/d"]
)
def test_an_unknown_init_method_is_refused_with_the_known_ones(method: str) -> None:
    """The error lists the three forms."""
    found = mistake(method)
    assert found["kind"] == "UsageError", found
    for form in ("env://", "tcp://HOST:PORT", "file:///DIRECTORY"):
        assert form in found["text"]


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (0, -1), (2, 2), (0, 0)])
def test_an_address_needs_rank_and_world_size(rank: int, world_size: int) -> None:
    """Without a launcher there is no other source for them."""
    assert mistake(f"tcp://127.0.0.1:{free_port()}", rank, world_size)["kind"] == "UsageError"


def test_env_without_a_launcher_says_what_to_do() -> None:
    """If no variable is set, the error names the variables and the form that needs none."""
    found = mistake("env://", -1, -1)
    assert found["kind"] == "SettingsError", found
    assert "MASTER_ADDR" in found["text"]
    assert "file:///DIRECTORY" in found["text"]


def different_settings(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    found = try_to_join(f"file://{directory}/rendezvous", rank, world_size, timeout_s=10.0 + rank)
    meet(rank, range(world_size), directory, "end")
    return found


def test_ranks_with_different_settings_do_not_come_up(ranks2: RankPool) -> None:
    """Both ranks raise at once, and the error shows the setting and both values."""
    for found in ranks2.run(different_settings):
        assert found["kind"] == "DisagreementError", found
        assert "timeout_s" in found["text"]
        assert "10.0" in found["text"]
        assert "11.0" in found["text"]


def second_call(rank: int, world_size: int, directory: Path) -> list[str]:
    method = f"file://{directory}/rendezvous"
    found = [
        try_to_join(method, rank, world_size)["kind"],
        try_to_join(method, rank, world_size)["kind"],
        try_to_join(method)["kind"],
        try_to_join(method, rank, world_size + 1)["kind"],
        try_to_join(method, rank + 1, world_size)["kind"],
    ]
    get_world_group().barrier()
    destroy_distributed_environment()
    return found


def test_joining_twice_only_checks_that_it_is_the_same_world(ranks2: RankPool) -> None:
    """Engines make this call at several points. A call for another world is refused."""
    assert ranks2.run(second_call) == [["NoneType"] * 3 + ["UsageError"] * 2] * 2
