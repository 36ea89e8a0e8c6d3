"""A Ray cluster of two hosts, each with a raylet: namespaces with a boot id, a hostname and memory of their own.

Every process of the cluster is in the process namespace of the first host, and ends with the first process there.
"""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

__all__ = ["ADDRESSES", "Cluster", "two_hosts"]

ADDRESSES = ["10.78.0.1", "10.78.0.2"]
"""The addresses of the first host, on which drivers run, and of the second."""

ROOT = Path(__file__).parent.parent.parent
PORT = 6391
# Ray's smallest object store.
STORE_BYTES = 80 * 1024 * 1024
# Sockets below Ray's temporary directory need a short path.
PARENT = "/tmp"

# $0 is the directory. The inner shell is the second host.
HOSTS = """
set -e
become() {
    mount --bind "$2" /proc/sys/kernel/random/boot_id
    mount -t tmpfs none /dev/shm
    hostname "$1"
    ip link set lo up
}
become ray-a "$0/boot-a"
export -f become
unshare --net --mount --uts --pid --fork --kill-child --mount-proc bash -c '
    set -e
    become ray-b "$0/boot-b"
    : > "$0/far"
    while [ ! -e "$0/near" ]; do sleep 0.02; done
    ip address add 10.78.0.2/24 dev far && ip link set far up
    : > "$0/connected"
    exec sleep 100000
' "$0" &
other=$!
while [ ! -e "$0/far" ]; do sleep 0.02; done
ip link add near type veth peer name far netns $other
ip address add 10.78.0.1/24 dev near && ip link set near up
: > "$0/near"
while [ ! -e "$0/connected" ]; do sleep 0.02; done
cat /proc/$other/task/$other/children > "$0/second"
: > "$0/ready"
exec sleep 100000
"""


class Cluster:
    """Two hosts with a raylet each. Made by `two_hosts`."""

    def __init__(self, directory: Path, cpus: int, environ: Mapping[str, str]) -> None:
        """Start the hosts and Ray on them; `close` ends them.

        Args:
            directory: For Ray's files; its path is short.
            cpus: How many processors Ray counts on each host: so many idle workers it starts.
            environ: Further variables of all processes.
        """
        self.directory = directory
        self._further = dict(environ)
        for name in ("boot-a", "boot-b"):
            (directory / name).write_text(f"{uuid.uuid4()}\n")
        token = directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        flags = ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (directory / "hosts.log").open("wb") as log:
            self._hosts = subprocess.Popen(
                ["unshare", *flags, "bash", "-c", HOSTS, str(directory)],
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(self._is_up, f"two hosts ({directory / 'hosts.log'})")
            self._first = _only_child(self._hosts.pid)
            head = ["--head", f"--port={PORT}", "--include-dashboard=false"]
            self._start(self._enter(), ADDRESSES[0], cpus, "near", *head)
            second = ["nsenter", "-t", self.second, "-n", "-m", "-u", "-p"]
            join = f"--address={ADDRESSES[0]}:{PORT}"
            self._start([*self._enter(), *second], ADDRESSES[1], cpus, "far", join)
        except BaseException:
            self.close()
            raise

    def _is_up(self) -> bool:
        if self._hosts.poll() is not None:
            raise AssertionError((self.directory / "hosts.log").read_text())
        return (self.directory / "ready").exists()

    def _enter(self) -> list[str]:
        return ["nsenter", "-t", str(self._first), "-n", "-m", "-u", "-p"]

    def _start(self, enter: list[str], address: str, cpus: int, place: str, *options: str) -> None:
        command = [
            *enter,
            str(Path(sys.executable).parent / "ray"),
            "start",
            f"--node-ip-address={address}",
            f"--num-cpus={cpus}",
            # So that a bundle can ask for its host.
            f'--resources={{"{place}": 1}}',
            f"--object-store-memory={STORE_BYTES}",
            f"--temp-dir={self.directory / address.rpartition('.')[2]}",
            "--disable-usage-stats",
            *options,
        ]
        done = subprocess.run(
            command, env=self._environ(), capture_output=True, text=True, check=False, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def _environ(self) -> dict[str, str]:
        """Return the environment of raylets and drivers, which have the cluster's token."""
        return {
            **os.environ,
            "HOME": str(self.directory),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.directory / "token"),
            "RAY_TMPDIR": str(self.directory),
            "PYTHONWARNINGS": "ignore",
            **self._further,
        }

    def run(self, module: str, *words: str, timeout_s: float = 240.0) -> Any:
        """Run `python -m MODULE WORDS` on the first host, as a driver of the cluster; return what it prints.

        If it prints an object as a line of JSON, that is returned.
        """
        done = subprocess.run(
            [*self._enter(), sys.executable, "-m", module, *words],
            cwd=ROOT,
            env={**self._environ(), "RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-12000:]
        # Ray may write to the same stream behind it.
        found = [line for line in done.stdout.splitlines() if line.startswith("{")]
        return json.loads(found[-1]) if found else done.stdout

    def ran(self, program: str, *words: str, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment on the first host with further variables; return how it ended."""
        return subprocess.run(
            [*self._enter(), str(Path(sys.executable).parent / program), *words],
            cwd=ROOT,
            env={**self._environ(), "RAY_ADDRESS": f"{ADDRESSES[0]}:{PORT}", **environ},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    @property
    def second(self) -> str:
        """Return the first process of the second host, as the first host numbers it."""
        return (self.directory / "second").read_text().strip()

    def close(self) -> None:
        """End every process of the cluster and remove its files."""
        if self._hosts.poll() is None:
            # Its child is the first process of the hosts, with which the kernel ends all others there.
            with contextlib.suppress(AssertionError):
                os.kill(_only_child(self._hosts.pid), signal.SIGKILL)
            self._hosts.kill()
        self._hosts.wait()


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 1, children
    return int(children[0])


@contextlib.contextmanager
def two_hosts(cpus: int = 1, environ: Mapping[str, str] | None = None) -> Iterator[Cluster]:
    """Give the block a cluster, whose processes have the further variables `environ`."""
    directory = Path(tempfile.mkdtemp(prefix="ray-", dir=PARENT))
    try:
        cluster = Cluster(directory, cpus, environ or {})
        try:
            yield cluster
        finally:
            cluster.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
