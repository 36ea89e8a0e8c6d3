"""torchrun and mpiexec start the demo on two hosts: the tokens are those of a run on one host.

The hosts are namespaces with names, interfaces, /tmp, /dev/shm and kernel ids of their own. Two of the four ranks are
on each. `tests/real_ray` compares Ray's tokens with the same.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.host_namespaces import Host, run_on_hosts
from tests.hosts import ROOT, report
from tests.multiproc.project.test_tiny_llm_demo import DEMO, report_of
from tests.probes import mpiexec_of, requires
from tests.tokens import demo_arguments, tokens_of_one_host
from tests.waiting import wait_until

pytestmark = [pytest.mark.thorough, requires("network_namespaces"), requires("other_user")]

# Another boot id is what tells the ranks that they are on two hosts: shared memory of the other one is not tried.
OWN_KERNEL = (
    "cat /proc/sys/kernel/random/uuid > /tmp/boot-id && "
    "mount --bind /tmp/boot-id /proc/sys/kernel/random/boot_id"
)
NAMES = ["10.77.0.1 alpha", "10.77.0.2 beta"]
HOSTS = [
    Host("alpha", {"eth0": ["10.77.0.1/24"]}, NAMES, [OWN_KERNEL]),
    Host("beta", {"eth0": ["10.77.0.2/24"]}, NAMES, [OWN_KERNEL]),
]
# Below the range from which the kernel takes ports for connections.
PORT = 29740
DEADLINE_S = 90.0
# Tensor- and pipeline-parallel sizes: layers that are split over the hosts, and a pipeline from host to host.
CASES = [
    pytest.param("torchrun", (4, 1)),
    pytest.param("mpiexec", (2, 2), marks=requires("mpich")),
]

# What hydra starts in place of ssh: it runs a command on the host that is named behind the options.
REMOTE_SHELL = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host=$1
shift
exec nsenter -t "$(cat '{directory}'/process-of-"$host")" -n -m -u sh -c "$*"
"""


@pytest.fixture(scope="module")
def model() -> Iterator[list[str]]:
    """Return the arguments that let the demo serve a model of random weights, which both hosts see."""
    # Not in /tmp, of which each host has its own.
    parent = Path(tempfile.mkdtemp(prefix="two-hosts-tokens-", dir="/var/tmp"))
    yield demo_arguments(parent)
    shutil.rmtree(parent)


@pytest.fixture(scope="module")
def expected(model: list[str]) -> list[dict[str, Any]]:
    """Return what ranks on one host generate."""
    return tokens_of_one_host(model)


def run_on_both(launcher: str, model: Sequence[str], layout: tuple[int, int]) -> dict[str, Any]:
    """Run the demo under a launcher on both hosts; return the report of rank 0, and check that its ranks were there."""
    sizes = ["--tp", str(layout[0]), "--pp", str(layout[1])]
    told = json.dumps([*model, *sizes])
    alpha, beta = run_on_hosts(__name__, HOSTS, 1, launcher, told, deadline_s=DEADLINE_S)
    for host in (alpha, beta):
        assert host["status"] == 0, host["errors"]
    # Rank 0 names the processes of its own host only, so that a user can watch them there.
    printed = alpha["out"] + beta["out"]
    errors = alpha["errors"] + beta["errors"]
    assert errors.count("--pid") == 2, errors
    return report_of(subprocess.CompletedProcess([], 0, printed, errors))


@pytest.mark.parametrize(("launcher", "layout"), CASES)
def test_two_hosts_give_the_tokens_of_one(
    launcher: str, layout: tuple[int, int], model: list[str], expected: list[dict[str, Any]]
) -> None:
    """Two agents of torchrun meet over the network; mpiexec starts its ranks on the other host as ssh would."""
    found = run_on_both(launcher, model, layout)
    assert (found["tensor"], found["pipeline"]) == layout
    assert found["continuations"] == expected


def main(directory: Path, launcher: str, told: str, rank: int) -> None:
    """Be a host: run an agent of torchrun, or mpiexec on the first one while the other is at its disposal."""
    arguments = json.loads(told)
    if launcher == "torchrun":
        report(directory, rank, _run_agent(arguments))
        return
    written = directory / f"written-{rank}"
    written.write_text(str(os.getpid()))
    written.replace(directory / f"process-of-{os.uname().nodename}")
    ended = directory / "ended"
    if rank == 1:
        wait_until(ended.exists, "the end of mpiexec", DEADLINE_S, 0.05)
        report(directory, rank, {"status": 0, "out": "", "errors": ""})
        return
    wait_until((directory / "process-of-beta").exists, "the other host", DEADLINE_S, 0.05)
    try:
        report(directory, rank, _run_mpiexec(directory, arguments))
    finally:
        ended.touch()


def _run_agent(arguments: Sequence[str]) -> dict[str, Any]:
    """Run the agent of this host. Either may become the first; rank 0 is then on its host."""
    return _run(
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"10.77.0.1:{PORT}", "--rdzv-id", "tokens"),
        *("-m", DEMO[2], *arguments),
    )


def _run_mpiexec(directory: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Start two ranks on each host, on this one too as on a remote one."""
    shell = directory / "remote-shell"
    shell.write_text(REMOTE_SHELL.format(directory=directory))
    shell.chmod(0o755)
    return _run(
        *(mpiexec_of("MPICH") or "", "-launcher", "ssh", "-launcher-exec", str(shell)),
        *("-hosts", "alpha,beta", "-ppn", "2", "-n", "4"),
        *(*DEMO, *arguments, "--init-method", f"mpi://10.77.0.1:{PORT}"),
    )


def _run(*command: str) -> dict[str, Any]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return {"status": done.returncode, "out": done.stdout, "errors": done.stderr}
