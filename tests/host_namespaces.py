"""Run ranks on hosts: network, mount and UTS namespaces, each with its own name, /tmp, /dev/shm and /etc/hosts.

`tests/hosts.py` has two hosts with one cable and nothing else of their own, which is enough for most tests. This module
is also the program that forks the hosts and the ranks.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.hosts import ROOT
from tests.rank_main import end_briefly, import_foreign

__all__ = ["Host", "hosts_file", "run_on_hosts"]

# include/uapi/linux/sched.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET, CLONE_NEWPID = 0x00020000, 0x04000000, 0x40000000, 0x20000000


@dataclass(frozen=True)
class Host:
    """One host.

    Attributes:
        name: Its name.
        interfaces: The addresses of each interface, with their prefixes. Interfaces of one name are connected.
        names: Lines of its /etc/hosts, beside `localhost`.
        setup: Further commands that are run on it, such as routes.
        counts_processes: Whether it has process ids of its own.
    """

    name: str
    interfaces: Mapping[str, Sequence[str]]
    names: Sequence[str] = ()
    setup: Sequence[str] = field(default_factory=tuple)
    counts_processes: bool = False


def run_on_hosts(
    module: str,
    hosts: Sequence[Host],
    ranks_per_host: int,
    *words: str,
    dead: Collection[int] = (),
    deadline_s: float = 120.0,
) -> list[dict[str, Any]]:
    """Run `main(directory, *words, rank)` of a module on all hosts; return what each rank gave to `tests.hosts.report`.

    The first ranks are on the first host. Ranks in `dead` may die before they report. The hosts share `directory`.
    """
    # Not in /tmp, of which each host has its own.
    directory = Path(tempfile.mkdtemp(prefix="hosts-", dir="/var/tmp"))
    told = {
        "hosts": [asdict(host) for host in hosts],
        "ranks": ranks_per_host,
        "words": words,
        "module": module,
    }
    (directory / "told").write_text(json.dumps(told))
    unshare = ["unshare", "--net", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
    process = subprocess.Popen(
        [*unshare, sys.executable, "-m", __name__, str(directory)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        try:
            output, _ = process.communicate(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        reports = [directory / f"report-{number}" for number in range(len(hosts) * ranks_per_host)]
        assert all(each.exists() or rank in dead for rank, each in enumerate(reports)), output
        return [json.loads(each.read_text()) if each.exists() else {} for each in reports]
    finally:
        shutil.rmtree(directory)


def hosts_file(directory: Path, host: str) -> Path:
    """Return the file that is /etc/hosts on a host; it may be changed at any time."""
    return directory / f"names-of-{host}"


def main(directory: Path) -> None:
    """Import the test module once, then fork the hosts, which fork their ranks."""
    told = json.loads((directory / "told").read_text())
    hosts = [Host(**host) for host in told["hosts"]]
    foreign = import_foreign()
    body = importlib.import_module(told["module"]).main
    gc.freeze()
    bridges = {name for host in hosts for name in host.interfaces}
    for name in bridges:
        _run(f"ip link add br-{name} type bridge && ip link set br-{name} up")
    for number, host in enumerate(hosts):
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for rank in _as_host(directory, host, number, told["ranks"], theirs):
                body(directory, *told["words"], rank)
                end_briefly(foreign)
            return
        theirs.close()
        _expect(ours)
        for name in host.interfaces:
            outer = f"h{number}-{name}"
            _run(f"ip link add {outer} type veth peer name {name} netns {pid}")
            _run(f"ip link set {outer} master br-{name} && ip link set {outer} up")
        ours.sendall(b".")
        # Every host is complete before any rank runs.
        _expect(ours)
        _waiting.append(ours)
    for each in _waiting:
        each.sendall(b".")
    _await_children()
    end_briefly(foreign)


_waiting: list[socket.socket] = []


def _expect(channel: socket.socket) -> None:
    if channel.recv(1) != b".":
        raise RuntimeError("a host has failed")


def _as_host(directory: Path, host: Host, number: int, ranks: int, outer: socket.socket) -> Iterator[int]:
    """Make this process a host, fork its ranks, and yield the rank in each of them."""
    _unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWNET)
    outer.sendall(b".")
    _expect(outer)
    socket.sethostname(host.name)
    _mount_own_folders(directory, host)
    _run("ip link set lo up")
    for name, addresses in host.interfaces.items():
        _run(f"ip link set {name} up")
        for address in addresses:
            # No search for another host with the address, which takes a second or two in IPv6.
            _run(f"ip address add {address} dev {name} {'nodad' if ':' in address else ''}")
    for command in host.setup:
        _run(command)
    outer.sendall(b".")
    _expect(outer)
    if host.counts_processes:
        # The next child has number 1, and when it ends all others do.
        _unshare(CLONE_NEWPID)
        if os.fork() != 0:
            _await_children()
            return
        _run("mount -t proc proc /proc")
    for rank in range(number * ranks, (number + 1) * ranks):
        if os.fork() == 0:
            yield rank
            return
    _await_children()


def _unshare(namespaces: int) -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(namespaces) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


def _mount_own_folders(directory: Path, host: Host) -> None:
    """Give this namespace its own /tmp, /dev/shm and names; the repository stays where it is, also below /tmp."""
    aside = directory / f"aside-{host.name}"
    aside.mkdir()
    _run(f"mount --bind {ROOT} {aside}")
    _run("mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /dev/shm")
    if ROOT.is_relative_to("/tmp"):
        ROOT.mkdir(parents=True)
        _run(f"mount --bind {aside} {ROOT}")
    names = hosts_file(directory, host.name)
    names.write_text("".join(f"{line}\n" for line in ("127.0.0.1 localhost", "::1 localhost", *host.names)))
    servers = directory / f"name-servers-{host.name}"
    servers.touch()  # none: the kernel refuses questions to the default one at once
    _run(f"mount --bind {names} /etc/hosts && mount --bind {servers} /etc/resolv.conf")


def _run(command: str) -> None:
    subprocess.run(["sh", "-ec", command], check=True)


def _await_children() -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
