"""What the store costs, measured here: the processor time of the process that serves it, and of one that asks."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

from benchmarks.agreement import LIMIT_S, connect, server
from coordinator.bootstrap.blocking_calls import run_interruptibly

__all__ = ["Costs", "measure"]

# From this many ranks on the store is served by libuv; see coordinator/bootstrap/serving.py.
RANKS: Final = 1000
CALLS: Final = 5000
CONNECTIONS: Final = 100
LARGE: Final = 1 << 20
LARGE_CALLS: Final = 50
KEYS: Final = 1000


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of processor time.

    Attributes:
        request_s: Of the server for a small request.
        key_s: Of the server for each further key that a request names.
        byte_in_s: Of the server for each byte that it gets.
        byte_out_s: Of the server for each byte that it sends.
        wake_s: Of the server for each rank that waits for a key that is set.
        connection_s: Of the server for a new connection.
        asking_s: Of a rank for a request.
        thread_s: Of a rank for an agreement's thread.
    """

    request_s: float
    key_s: float
    byte_in_s: float
    byte_out_s: float
    wake_s: float
    connection_s: float
    asking_s: float
    thread_s: float


def measure() -> Costs:
    """Measure them against a store of torch in another process."""
    with server(RANKS) as (port, pid):
        first: Any = connect(port)

        def served_s(action: Callable[[], object]) -> float:
            before = _processor_s(pid)
            action()
            return _processor_s(pid) - before

        kept: list[dist.Store] = []
        connection_s = served_s(lambda: kept.extend(connect(port) for _ in range(CONNECTIONS))) / CONNECTIONS
        started = time.thread_time()
        request_s = served_s(lambda: [first.add("number", 1) for _ in range(CALLS)]) / CALLS
        asking_s = (time.thread_time() - started) / CALLS
        text = "x" * LARGE
        byte_in_s = (
            served_s(lambda: [first.set("large", text) for _ in range(LARGE_CALLS)]) / LARGE_CALLS / LARGE
        )
        byte_out_s = served_s(lambda: [first.get("large") for _ in range(LARGE_CALLS)]) / LARGE_CALLS / LARGE
        keys = [f"key/{number}" for number in range(KEYS)]
        for key in keys:
            first.set(key, "")
        key_s = served_s(lambda: [first.multi_get(keys) for _ in range(LARGE_CALLS)]) / LARGE_CALLS / KEYS
        wake_s = _wake_s(first, kept, pid)
    started = time.process_time()
    for _ in range(CONNECTIONS):
        run_interruptibly(_nothing, "nothing", _nothing)
    thread_s = (time.process_time() - started) / CONNECTIONS
    return Costs(request_s, key_s, byte_in_s, byte_out_s, wake_s, connection_s, asking_s, thread_s)


def _wake_s(first: Any, waiting: list[dist.Store], pid: int) -> float:
    """Return what it costs the server to wake one of many that wait for a key, their requests to wait included."""
    before = _processor_s(pid)
    threads = [
        threading.Thread(target=each.wait, args=(["awaited"], timedelta(seconds=LIMIT_S))) for each in waiting
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    first.set("awaited", "")
    for thread in threads:
        thread.join()
    return (_processor_s(pid) - before) / len(waiting)


def _processor_s(pid: int) -> float:
    """Return the processor time of a process, by the scheduler's nanoseconds of its threads."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) * 1e-9


def _nothing() -> None:
    """Do nothing, on a thread."""
