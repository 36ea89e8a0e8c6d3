"""The program of a pod joins the pods of a LeaderWorkerSet, each of which is a host of its own here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.host_namespaces import Host, run_on_hosts
from tests.hosts import ROOT, report
from tests.probes import requires

PODS = [
    Host(f"engine-0{suffix}", {"eth0": [f"10.88.0.{number}/24"]}, ["10.88.0.1 engine-0.engine.default"])
    for number, suffix in ((1, ""), (2, "-1"))
]


@requires("network_namespaces")
@pytest.mark.thorough
def test_the_ranks_of_two_pods_make_a_world() -> None:
    """Both pods run the same command with the controller's variables. A rank that fails ends its pod."""
    leader, worker = run_on_hosts(__name__, PODS, 1, deadline_s=300.0)
    assert (leader["status"], worker["status"]) == (0, 0), (leader["printed"], worker["printed"])
    assert "pod of ranks [0, 1]: sum 2 in the pod, 4 in all pods" in leader["printed"]
    assert "pod of ranks [2, 3]: sum 2 in the pod, 4 in all pods" in worker["printed"]
    assert leader["status without variables"] == 1
    assert "LWS_LEADER_ADDRESS is missing, which the LeaderWorkerSet controller sets" in leader["complaint"]


def run_pod(environ: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "examples.pod_worker", "--processes", "2"],
        cwd=ROOT,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def main(directory: Path, pod: int) -> None:
    """Run the command of one pod."""
    lws = {
        "LWS_LEADER_ADDRESS": "engine-0.engine.default",
        "LWS_GROUP_SIZE": "2",
        "LWS_WORKER_INDEX": str(pod),
    }
    done = run_pod(lws)
    found = {"status": done.returncode, "printed": done.stdout}
    if pod == 0:
        refused = run_pod({})
        found |= {"status without variables": refused.returncode, "complaint": refused.stdout}
    report(directory, pod, found)
