"""A host that vanishes without a word: the store's connections tell the ranks of a job with a secret."""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from tests.hosts import report, run_on_two_hosts
from tests.probes import requires
from tests.worlds import meet, outcome_of

pytestmark = requires("network_namespaces")

LOST_AFTER_S = 0.8
# What the specification of the loss of a host allows beside it.
SLACK_S = 1.0
BUSY_S = 3.0


def main(directory: Path, how: str, rank: int) -> None:
    """Join, let the second host vanish or its rank 3 die, and wait in a barrier that cannot end."""
    path = directory / "secret"
    if rank == 0:
        path.touch(0o600)
        path.write_bytes(bytes(range(60, 124)))
    meet(rank, range(4), directory, "secret")
    settings = CoordinatorSettings.resolve(
        {}, secret_file=str(path), create_timeout_s=30.0, remote={"lost_after_s": LOST_AFTER_S}
    )
    init_distributed_environment(4, rank, "tcp://10.77.0.1:29611", backend="gloo", settings=settings)
    group = get_world_group()
    group.barrier()
    meet(rank, range(4), directory, "joined")
    if rank == 3:
        time.sleep(0.3)
        (directory / "at.new").write_text(str(time.monotonic()))
        (directory / "at.new").rename(directory / "at")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        subprocess.run(["ip", "link", "set", "far", "down"], check=True)
    found: dict[str, Any] = outcome_of(group.barrier)
    found["after"] = time.monotonic() - float((directory / "at").read_text())
    destroy_distributed_environment()
    report(directory, rank, found)


@pytest.mark.guarantee("K10")
@pytest.mark.thorough
def test_the_loss_of_a_host_is_told_on_both_sides() -> None:
    """No socket is closed when the cable is cut. Each side names all ranks of the other in `lost_after_s` and 1 s."""
    for rank, found in enumerate(run_on_two_hosts(__name__, "cut")):
        assert found["kind"] == "PeerLostError", found
        assert found["peers"] == ([2, 3] if rank < 2 else [0, 1]), found
        assert found["after"] <= LOST_AFTER_S + SLACK_S + BUSY_S


@pytest.mark.guarantee("K10")
@pytest.mark.thorough
def test_the_death_of_a_rank_is_told_to_the_other_host() -> None:
    """Its kernel closes its connection to the store."""
    found = run_on_two_hosts(__name__, "kill", dead=(3,))
    for each in found[:3]:
        assert (each["kind"], each["peers"]) == ("PeerLostError", [3]), each
        assert each["after"] <= LOST_AFTER_S + SLACK_S + BUSY_S
