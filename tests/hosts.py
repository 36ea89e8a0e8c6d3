"""Run four ranks on two hosts, which are two network namespaces with a loopback each and a virtual cable between."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

__all__ = ["ADDRESSES", "report", "run_on_two_hosts"]

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
"""The addresses of the first host, which runs ranks 0 and 1, and of the second, which runs ranks 2 and 3."""

ROOT = Path(__file__).parent.parent
DEADLINE_S = 120.0

# Two ranks run in each namespace; the inner `unshare` creates the second.
CABLE = """
set -e
ip link set lo up
unshare --net sh -c '
    ip link set lo up
    : > "$0/ready"
    while [ ! -e "$0/go" ]; do sleep 0.02; done
    ip address add 10.77.0.2/24 dev far && ip link set far up
    "$@" 2 & "$@" 3; wait
' "$@" &
other=$!
while [ ! -e "$1/ready" ]; do sleep 0.02; done
ip link add near type veth peer name far netns $other
ip address add 10.77.0.1/24 dev near && ip link set near up
: > "$1/go"
directory=$1; shift
"$@" 0 & "$@" 1
wait
"""


def run_on_two_hosts(module: str, *words: str, dead: Collection[int] = ()) -> list[dict[str, Any]]:
    """Run `python -m module DIRECTORY WORDS... RANK` for each of four ranks; return what each reported.

    Ranks in `dead` may die before they report.
    """
    directory = Path(tempfile.mkdtemp(prefix="two-hosts-"))
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    rank = [sys.executable, "-m", module, str(directory), *words]
    process = subprocess.Popen(
        [*unshare, "sh", "-c", CABLE, "sh", str(directory), *rank],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = ""
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        # The first shell may have ended because its rank failed. The other ranks are in its process group.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    reports = [directory / f"report-{number}" for number in range(4)]
    assert all(each.exists() or rank in dead for rank, each in enumerate(reports)), output
    found = [json.loads(each.read_text()) if each.exists() else {} for each in reports]
    shutil.rmtree(directory)
    return found


def report(directory: Path, rank: int, found: dict[str, Any]) -> None:
    """Write a rank's result for `run_on_two_hosts`."""
    (directory / f"report-{rank}").write_text(json.dumps(found))
