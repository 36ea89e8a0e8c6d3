"""A job with a secret on two hosts: what is encrypted, what `security="required"` refuses, what stays out of sight."""

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import coordinator.torch_backend  # noqa: F401 - registers the backend
from coordinator.bootstrap.membership import world_store
from coordinator.group import GroupCoordinator
from coordinator.host.gloo import GlooHostPlane
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.security.store import secured
from coordinator.settings import CoordinatorSettings
from tests.hosts import report, run_on_two_hosts
from tests.ports import listening_addresses
from tests.probes import requires
from tests.security.test_secured_worlds import variables
from tests.worlds import meet, outcome_of

pytestmark = requires("network_namespaces")

SECRET = bytes(range(60, 124))
OTHER = bytes(range(120, 184))

# The init method, settings of all ranks, and whether the second host holds another secret.
SCENARIOS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "required": ("tcp://10.77.0.1:29601", {"security": "required", "bulk": "plaintext"}, False),
    "optional": ("tcp://10.77.0.1:29602", {}, False),
    "by directory": ("file://{directory}/by-interface", {}, False),
    "not acknowledged": ("tcp://10.77.0.1:29603", {"security": "required"}, False),
    "another secret": ("tcp://10.77.0.1:29604", {}, True),
    "without a secret": ("tcp://10.77.0.1:29605", {"secret_file": None}, False),
}

QUICK = ["required", "not acknowledged"]
OTHERS = [name for name in SCENARIOS if name not in QUICK]

Found = dict[str, list[dict[str, Any]]]


def run(names: list[str]) -> Found:
    """Run scenarios on ranks 0 and 1 of one host and ranks 2 and 3 of the other; return each rank's findings."""
    ranks = run_on_two_hosts(__name__, ",".join(names))
    return {name: [found[name] for found in ranks] for name in names}


@pytest.fixture(scope="module")
def two_hosts() -> Found:
    """Run the scenarios that every run of the tests looks at."""
    return run(QUICK)


@pytest.fixture(scope="module")
def others() -> Found:
    """Run the other ones."""
    return run(OTHERS)


def over_gloo(group: GroupCoordinator) -> list[str]:
    """Return the collectives of objects that a group makes over Gloo from now on."""
    made: list[str] = []
    host: Any = group._parts.host
    assert isinstance(host, GlooHostPlane)
    for name in ("all_gather_object", "broadcast_object", "exchange"):
        real = getattr(host, name)

        def recorded(*args: Any, real: Any = real, name: str = name, **options: Any) -> Any:
            made.append(name)
            return real(*args, **options)

        setattr(host, name, recorded)
    return made


def use(rank: int) -> dict[str, Any]:
    """Use the world's group and its queues."""
    group = get_world_group()
    found: dict[str, Any] = {"store": repr(secured(world_store())), "ranks": group.all_gather_object(rank)}
    found["total"] = group.all_reduce(torch.ones(8)).tolist()
    made = over_gloo(group)
    group.enable_broadcaster()
    found["queue over gloo"] = made.copy()
    found["steps"] = [group.broadcast_object(["step", step] if rank == 0 else None) for step in range(3)]
    found["to one"] = len(group.create_single_reader_mq_broadcasters(2)[1])
    found["over gloo"] = made
    found["addresses"] = listening_addresses()
    if secured(world_store()) is None:
        required = CoordinatorSettings.resolve(
            {}, secret_file="/nowhere", security="required", bulk="plaintext", create_timeout_s=10.0
        )
        found["group"] = outcome_of(
            lambda: GroupCoordinator([[0, 1, 2, 3]], 0, "gloo", False, group_name="tp", settings=required)
        )
        with variables(
            GROUP_COORDINATOR_SECURITY="required",
            GROUP_COORDINATOR_BULK="plaintext",
            GROUP_COORDINATOR_SECRET_FILE="/nowhere",
        ):
            found["of torch"] = outcome_of(lambda: dist.new_group(backend="group_coordinator"))
    group.barrier()
    return found


def be_a_rank(directory: Path, name: str, rank: int) -> dict[str, Any]:
    method, chosen, has_others = SCENARIOS[name]
    secret = directory / ("other" if has_others and rank >= 2 else "secret")
    interface = ["near", "far"][rank // 2] if method.startswith("file") else None
    given = {
        "secret_file": str(secret),
        "create_timeout_s": 5.0 if has_others else 30.0,
        "interface": interface,
        "remote": {"lost_after_s": 20.0},  # the host of the tests may be busy
    }
    settings = CoordinatorSettings.resolve({}, **{**given, **chosen})
    found = outcome_of(
        lambda: init_distributed_environment(
            4, rank, method.format(directory=directory), backend="gloo", settings=settings
        )
    )
    if found["kind"] == "NoneType":
        found |= use(rank)
        destroy_distributed_environment()
    return found


def main(directory: Path, names: str, rank: int) -> None:
    """Run one rank in scenarios, one after the other."""
    for name, content in (("secret", SECRET), ("other", OTHER)):
        if rank == 0:
            path = directory / name
            path.touch(0o600)
            path.write_bytes(content)
    meet(rank, range(4), directory, "secrets")
    said: list[str] = []
    handler = logging.Handler(logging.DEBUG)
    handler.emit = lambda record: said.append(f"{record.getMessage()} {vars(record)}")  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG)
    found: dict[str, Any] = {}
    for name in names.split(","):
        found[name] = be_a_rank(directory, name, rank)
        meet(rank, range(4), directory, name.replace(" ", "-"))
    gc.collect()
    told = "".join(said) + repr(found) + repr(CoordinatorSettings.resolve({}, secret_file="/nowhere"))
    process = b"".join(Path(f"/proc/self/{each}").read_bytes() for each in ("environ", "cmdline"))
    shown = told.encode() + process
    parts = [SECRET[8:16], SECRET[8:16].hex().encode(), repr(SECRET[8:16])[2:-1].encode()]
    for each in found.values():
        each["shows the secret"] = any(part in shown for part in parts)
    report(directory, rank, found)


def assert_works(found: list[dict[str, Any]]) -> None:
    for rank, each in enumerate(found):
        assert each["kind"] == "NoneType", each["text"]
        assert each["ranks"] == [0, 1, 2, 3]
        assert each["total"] == [4.0] * 8
        assert each["steps"] == [["step", step] for step in range(3)]
        assert each["to one"] == (4 if rank == 2 else 0)
        assert each["addresses"] == [["10.77.0.1", "10.77.0.2"][rank // 2]]


@pytest.mark.guarantee("K8")
def test_a_job_with_a_secret_meets_in_its_own_store(two_hosts: Found) -> None:
    """Collectives and queues work, and what makes a queue crosses in the store: keys, handles, places of the ranks."""
    assert_meets_apart(two_hosts["required"])


@pytest.mark.guarantee("K8")
@pytest.mark.thorough
@pytest.mark.parametrize("scenario", ["optional", "by directory"])
def test_it_does_so_however_its_ranks_find_each_other(others: Found, scenario: str) -> None:
    """Without requiring security, and where a directory that both hosts see says where rank 0 is."""
    assert_meets_apart(others[scenario])


def assert_meets_apart(found: list[dict[str, Any]]) -> None:
    assert_works(found)
    for each in found:
        assert each["store"].startswith("<SecuredStore at 10.77.0.1:")
        assert each["queue over gloo"] == each["over gloo"] == []


@pytest.mark.guarantee("K9")
def test_plaintext_between_hosts_is_refused_unless_it_is_acknowledged(two_hosts: Found) -> None:
    """Every rank names the setting, before any of them connects Gloo."""
    for each in two_hosts["not acknowledged"]:
        assert each["kind"] == "UsageError", each
        assert "creating the world" in each["text"]
        assert 'bulk="plaintext"' in each["text"]


@pytest.mark.guarantee("K9")
@pytest.mark.thorough
def test_a_group_that_requires_security_is_refused_in_a_world_without(others: Found) -> None:
    """Without a secret everything works as before; a group whose settings require security is refused on all ranks."""
    assert_works(others["without a secret"])
    for each in others["without a secret"]:
        assert each["store"] == "None"
        assert "all_gather_object" in each["queue over gloo"]
        assert each["group"]["kind"] == "UsageError"
        assert "a store without encryption" in each["group"]["text"]
        assert "UsageError" in each["of torch"]["kind"]
        assert "a store without encryption" in each["of torch"]["text"]


@pytest.mark.guarantee("K4")
@pytest.mark.thorough
def test_a_host_with_another_secret_stays_outside(others: Found) -> None:
    """Its ranks are told what may be the reason, and the others who is missing."""
    found = others["another secret"]
    for each in found[:2]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [2, 3]), each
    for each in found[2:]:
        assert (each["kind"], each["missing"]) == ("CommTimeoutError", [0]), each
        assert "does not hold this job's secret" in each["text"]


@pytest.mark.guarantee("K3")
def test_the_secret_is_nowhere_to_be_read(two_hosts: Found) -> None:
    """Neither in the environment or the arguments of a rank, nor in a log at its lowest level, an error or a repr."""
    assert [each["shows the secret"] for each in two_hosts["required"]] == [False] * 4
