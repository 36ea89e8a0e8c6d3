"""Run `python -m coordinator check --hosts` on hosts made of namespaces; return what each rank printed."""

import contextlib
import io
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coordinator.cli import main as command
from coordinator.diagnosis.hosts_check import checking
from tests.host_namespaces import Host, run_on_hosts
from tests.hosts import ROOT, report

__all__ = ["TWO", "check_on_hosts"]

BULK_S = 0.1
"""Seconds for which each direction of a pair sends, which is less than for users."""

TWO = [
    Host(name, {"eth0": [f"10.77.0.{number}/24"]}, ["10.77.0.1 alpha", "10.77.0.2 beta"])
    for number, name in ((1, "alpha"), (2, "beta"))
]
"""Two hosts on one network that know each other's names."""


def check_on_hosts(
    hosts: Sequence[Host],
    ranks_per_host: int,
    words: Mapping[str, Sequence[str]],
    absent: Sequence[int] = (),
    world_size: int | None = None,
) -> list[dict[str, Any]]:
    """Run the check on all ranks but the absent ones, as a launcher that sets the variables of `env://` does.

    Args:
        hosts: The hosts.
        ranks_per_host: Ranks on each.
        words: By name of a host, or "" for all: further variables, `NAME=VALUE`, and arguments of the command, in which
            `{rank}` stands for the rank; `torchrun=` and arguments runs two ranks per host under it.
        absent: Ranks that do not come.
        world_size: What the launcher says; by default as many as there are.
    """
    size = world_size or len(hosts) * ranks_per_host
    told = [f"{host}/{word}" for host, each in words.items() for word in each]
    gone = ",".join(map(str, absent))
    return run_on_hosts(__name__, hosts, ranks_per_host, str(ranks_per_host), str(size), gone, *told)


def main(directory: Path, ranks: str, size: str, absent: str, *rest: Any) -> None:
    """Run one rank of `check_on_hosts`."""
    *told, rank = rest
    for word in [each.partition("/")[2] for each in told if "/torchrun=" in each]:
        report(directory, rank, _run_torchrun(rank, word.partition("=")[2].split()))
        return
    if str(rank) in absent.split(","):
        report(directory, rank, {})
        return
    mine = [
        word.replace("{rank}", str(rank))
        for each in told
        for host, _, word in [each.partition("/")]
        if host in ("", os.uname().nodename)
    ]
    variables = dict(word.split("=", 1) for word in mine if "=" in word and not word.startswith("-"))
    arguments = [word for word in mine if word.startswith("-") or "=" not in word]
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_RANK": str(rank % int(ranks)),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29500",
            "GROUP_COORDINATOR_HOST_ID": os.uname().nodename,
            **variables,
        }
    )
    if not os.environ["GROUP_COORDINATOR_HOST_ID"]:
        del os.environ["GROUP_COORDINATOR_HOST_ID"]
    vars(checking)["_BULK_S"] = BULK_S
    out, errors = io.StringIO(), io.StringIO()
    begin = time.monotonic()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        status = command(["check", "--hosts", *arguments])
    took_s = time.monotonic() - begin
    found = {"status": status, "out": out.getvalue(), "errors": errors.getvalue(), "took_s": took_s}
    report(directory, rank, found)


def _run_torchrun(node: int, arguments: Sequence[str]) -> dict[str, Any]:
    """Run the check on two ranks of a host under torchrun, whose agents meet first."""
    words = [
        *("--nnodes", "2", "--node-rank", str(node), "--master-addr", "10.77.0.1", "--master-port", "29500"),
        *("--nproc-per-node", "2", "-m", "coordinator", "check", "--hosts", *arguments),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words],
        cwd=ROOT,
        env={**os.environ, "GROUP_COORDINATOR_HOST_ID": os.uname().nodename},
        capture_output=True,
        text=True,
        check=False,
    )
    return {"status": done.returncode, "out": done.stdout, "errors": done.stderr}
