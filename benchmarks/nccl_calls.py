"""Measure what an all-reduce through our NCCL communicator costs the calling thread, without a device.

One rank calls a library that stands in for NCCL on the CPU (by default the one of the tests, as version 2.28.9), so the
figures hold our Python, torch's allocation of a result, and ctypes. The call of the library itself is measured beside
them. The forms take turns; each figure is the processor time of the calling thread, median over the rounds, in
microseconds.

    python -m benchmarks nccl-calls [--rounds 41] [--calls 2000] [--library FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from coordinator.bootstrap.status_store import WorldStatusStore
from device_comm.base import CommunicatorContext
from device_comm.cuda.event_progress import EventProgress
from device_comm.health import GroupHealth
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.nccl.library import NcclLibrary
from shm_broadcast.liveness import PeerWatch, this_process

STREAM = 7


class OneStream:
    """Streams of a device that has only one."""

    def current(self) -> int:
        return STREAM

    def on_device(self) -> Any:
        return nullcontext()

    def wait(self, waiter: int, on: int) -> None:
        raise NotImplementedError

    def is_idle(self, stream: int) -> bool:
        return True


class NoDriver:
    """What `EventProgress` calls, at no cost."""

    def stream_is_capturing(self, stream: int) -> bool:
        return False

    def event_create(self) -> int:
        return 1

    def event_record(self, event: int, stream: int) -> None:
        pass

    def event_query(self, event: int) -> bool:
        return True

    def event_destroy(self, event: int) -> None:
        pass


@contextmanager
def one_rank(library: NcclLibrary) -> Iterator[NcclCommunicator]:
    """Yield a connected communicator of a group of one, which has deadlines as on a device."""
    board = WorldStatusStore(dist.HashStore(), 0, (0,))
    health = GroupHealth("one:0", 0, (0,), PeerWatch(this_process(), {}), board)
    context = CommunicatorContext(
        name="one:0",
        rank_in_group=0,
        ranks=(0,),
        device=torch.device("cpu"),
        process_group=None,
        health=health,
        timeout_s=30.0,
        exchange=lambda data: [data],
    )
    driver: Any = NoDriver()
    streams: Any = OneStream()
    communicator = NcclCommunicator(
        context, library=library, streams=streams, progress=EventProgress(lambda: driver)
    )
    try:
        communicator.connect()
        yield communicator
    finally:
        communicator.destroy()
        health.close()
        health.release()


def forms_of(communicator: NcclCommunicator) -> dict[str, Callable[[], object]]:
    """Return the calls to measure by name; the first one is the library's own."""
    tensor, output = torch.ones(4), torch.empty(4)
    function = communicator.library.functions["ncclAllReduce"]
    handle = communicator._connection.handle()  # noqa: SLF001 - the library is called as the communicator calls it
    arguments = (
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_void_p(output.data_ptr()),
        ctypes.c_size_t(4),
        *(ctypes.c_int(7), ctypes.c_int(0)),
        *(handle, ctypes.c_void_p(STREAM)),
    )
    return {
        "ncclAllReduce by ctypes, nothing converted": lambda: function(*arguments),
        "torch.empty_like": lambda: torch.empty_like(tensor),
        "all_reduce_": lambda: communicator.all_reduce_(tensor),
        "all_reduce_into_output": lambda: communicator.all_reduce_into_output(tensor, output),
        "all_reduce": lambda: communicator.all_reduce(tensor),
    }


def measured(forms: dict[str, Callable[[], object]], rounds: int, calls: int) -> dict[str, dict[str, float]]:
    """Return the median and the least processor time of a call of each form, in us."""
    samples: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(rounds):
        for name, call in forms.items():
            start = time.thread_time()
            for _ in range(calls):
                call()
            samples[name].append((time.thread_time() - start) / calls * 1e6)
    return {name: {"median_us": statistics.median(of), "least_us": min(of)} for name, of in samples.items()}


def library_of(path: Path | None, folder: Path) -> NcclLibrary:
    if path is not None:
        return NcclLibrary(path)
    from tests.native.nccl_stub.build import build_stub

    return NcclLibrary(build_stub(folder, "-DVERSION=22809"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks nccl-calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=2000, help="calls of one form in a row")
    parser.add_argument("--library", type=Path, help="a library that works without a device")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        library = library_of(options.library, Path(folder))
        with one_rank(library) as communicator:
            found = measured(forms_of(communicator), options.rounds, options.calls)
        print(f"a call with one rank, {library}, in us")
    for name, figures in found.items():
        print(f"{name:45} median {figures['median_us']:6.2f}   least {figures['least_us']:6.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"library": str(library), "calls": found}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
