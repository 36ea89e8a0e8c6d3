"""Measure the agreement of many ranks over one store: threads stand for ranks, and the last one comes late.

The store is torch's, in a process of its own, over TCP. What is measured is the time from the coming of the last rank
until each knows it. Eight ranks are on each host. All threads of this process share one interpreter, so this time
includes the Python of all ranks, one after the other, which ranks in processes of their own run at the same time.

    python -m benchmarks agreement [--ranks 1000] [--late-s 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple
from uuid import UUID

import msgspec
import torch.distributed as dist

from benchmarks.results import BenchmarkError, write_figures
from coordinator.bootstrap.agreement.agreeing import agree
from coordinator.bootstrap.agreement.views import View
from shm_broadcast.liveness import this_process

HOST: Final = "127.0.0.1"
RANKS_PER_HOST: Final = 8
LIMIT_S: Final = 120.0
# Each thread that waits for the interpreter asks for it again at this interval. At the usual 5 ms a thousand of them
# keep the processors busy with nothing else. Ranks let go of the interpreter whenever they ask the store.
SWITCH_S: Final = 0.5

SERVER: Final = """
import socket, sys
import torch.distributed as dist
from coordinator.bootstrap.serving import options_of_server
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
options = options_of_server("127.0.0.1", port, int(sys.argv[1]))
store = dist.TCPStore("127.0.0.1", port, 1, is_master=True, wait_for_workers=False, **options)
print(port, flush=True)
sys.stdin.read()
"""


class Server(NamedTuple):
    """A process that serves a store: its port, and the process's number."""

    port: int
    pid: int


@contextmanager
def server(ranks: int) -> Iterator[Server]:
    """Let another process serve a store for so many ranks to the block."""
    command = [sys.executable, "-c", SERVER, str(ranks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603 - ours
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Server(int(process.stdout.readline()), process.pid)
        finally:
            process.stdin.close()


def connect(port: int) -> dist.Store:
    """Return a connection to the store."""
    timeout = timedelta(seconds=LIMIT_S)
    return dist.TCPStore(HOST, port, is_master=False, timeout=timeout, wait_for_workers=False)


@contextmanager
def lent(connection: dist.Store) -> Iterator[dist.Store]:
    """Give the block a connection that was opened before."""
    yield connection


def view_of(rank: int, facts: dict[str, str], note: str = "") -> View:
    """Return the view of a rank, eight of which are on each of many hosts."""
    host = rank // RANKS_PER_HOST
    process = msgspec.structs.replace(
        this_process(), boot_id=str(UUID(int=host)), hostname=f"node-{host:05d}"
    )
    address = f"10.{host // 62500}.{host // 250 % 250}.{host % 250 + 1}"
    return View(facts, process, address, f"{host:032x}", note)


def measure(ranks: int, late_s: float) -> list[float]:
    """Return for each rank the seconds from the coming of the last one until it knows that all agree."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * ranks + 256
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise BenchmarkError(f"{ranks} ranks take {needed} open descriptors, and the limit is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    with server(ranks) as (port, _):
        # torch looks up a name for each connection, which may take a fraction of a second.
        with ThreadPoolExecutor(32) as pool:
            connections = list(pool.map(connect, [port] * (2 * ranks)))
        pairs = list(zip(connections[::2], connections[1::2], strict=True))
        known: list[float] = [0.0] * ranks
        early, last = threading.Event(), threading.Event()

        def be_a_rank(rank: int) -> None:
            usual, waiting = pairs[rank]
            view = view_of(rank, {"groups": "world"})
            (last if rank == ranks - 1 else early).wait()
            connected = partial(lent, waiting)
            agree(usual, "the world", rank, range(ranks), view, LIMIT_S, connect=connected)
            known[rank] = time.monotonic()

        threads = [threading.Thread(target=be_a_rank, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        early.set()
        time.sleep(late_s)
        came = time.monotonic()
        last.set()
        for thread in threads:
            thread.join()
        if not all(known):
            raise BenchmarkError("ranks did not agree; their errors are above")
        return [each - came for each in known]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks agreement", description=__doc__)
    parser.add_argument("--ranks", type=int, default=1000, help="how many ranks agree (default %(default)s)")
    parser.add_argument("--late-s", type=float, default=5.0, help="how late the last one comes (default 5)")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    times = measure(options.ranks, options.late_s)
    figures = {"median": statistics.median(times), "most": max(times)}
    print(
        f"{options.ranks} ranks, the last one {options.late_s:g} s late: from its coming until a rank knows that all "
        f"agree, median {figures['median']:.3f} s, most {figures['most']:.3f} s"
    )
    if options.json is not None:
        write_figures(options.json, {"ranks": options.ranks, "late_s": options.late_s, **figures})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
