"""Run four ranks on two hosts, which are two network namespaces with a loopback each and a virtual cable between.

This module is also the program that forks the ranks.
"""

import contextlib
import ctypes
import gc
import importlib
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

from tests.rank_main import end_briefly, import_foreign

__all__ = ["ADDRESSES", "report", "run_on_two_hosts"]

ADDRESSES = ["10.77.0.1", "10.77.0.2"]
"""The addresses of the first host, which runs ranks 0 and 1, and of the second, which runs ranks 2 and 3."""

ROOT = Path(__file__).parent.parent
DEADLINE_S = 120.0

# The inner shell creates the second namespace, and keeps it until the ranks have ended.
CABLE = """
set -e
unshare --net sh -c '
    ip link set lo up
    : > "$0/ready"
    while [ ! -e "$0/go" ]; do sleep 0.02; done
    ip address add 10.77.0.2/24 dev far && ip link set far up
    : > "$0/connected"
    exec sleep 1000
' "$1" &
other=$!
trap 'kill $other' EXIT
ip link set lo up
while [ ! -e "$1/ready" ]; do sleep 0.02; done
ip link add near type veth peer name far netns $other
ip address add 10.77.0.1/24 dev near && ip link set near up
: > "$1/go"
while [ ! -e "$1/connected" ]; do sleep 0.02; done
"$0" -m tests.hosts /proc/$other/ns/net "$@"
"""


def run_on_two_hosts(module: str, *words: str, dead: Collection[int] = ()) -> list[dict[str, Any]]:
    """Run `main(directory, *words, rank)` of a module in four processes; return what each reported.

    Ranks in `dead` may die before they report.
    """
    directory = Path(tempfile.mkdtemp(prefix="two-hosts-"))
    unshare = ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    process = subprocess.Popen(
        [*unshare, "sh", "-c", CABLE, sys.executable, str(directory), module, *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    has_ended = True
    try:
        output, _ = process.communicate(timeout=DEADLINE_S)
    except subprocess.TimeoutExpired:
        has_ended = False
        # The first shell may have ended because its rank failed. The other ranks are in its process group.
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    reports = [directory / f"report-{number}" for number in range(4)]
    assert all(each.exists() or rank in dead for rank, each in enumerate(reports)), output
    assert has_ended, f"a process was still there after {DEADLINE_S:.0f} s: {output}"
    found = [json.loads(each.read_text()) if each.exists() else {} for each in reports]
    shutil.rmtree(directory)
    return found


def report(directory: Path, rank: int, found: dict[str, Any]) -> None:
    """Write a rank's result for `run_on_two_hosts`."""
    (directory / f"report-{rank}").write_text(json.dumps(found))


def main(other_host: str, directory: str, module: str, *words: str) -> None:
    """Import a test module once, fork the ranks and wait for them. Ranks 2 and 3 enter the namespace `other_host`."""
    foreign = import_foreign()
    body = importlib.import_module(module).main
    gc.freeze()
    for rank in range(4):
        if os.fork() == 0:
            if rank >= 2:
                _enter(other_host)
            body(Path(directory), *words, rank)
            end_briefly(foreign)
            return
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    end_briefly(foreign)


def _enter(namespace: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(namespace) as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns", namespace)


if __name__ == "__main__":
    main(*sys.argv[1:])
