"""Measure what an all-reduce through our NCCL communicator costs the calling thread, without a device.

One rank calls a library that stands in for NCCL on the CPU (by default the one of the tests, as version 2.28.9), so the
figures hold our Python, torch's allocation of a result, and ctypes. The call of the library itself is measured beside
them, and each form also with the `StreamOrder` of a group on CUDA. The forms take turns; each figure is the processor
time of the calling thread, median over the rounds, in microseconds.

    python -m benchmarks nccl-calls [--rounds 41] [--calls 2000] [--library FILE] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.results import write_figures
from coordinator.bootstrap.status_store import WorldStatusStore
from device_comm.base import CommunicatorContext
from device_comm.cuda.custom.streams import StreamOrder
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
    """What `EventProgress` and `StreamOrder` call, at no cost."""

    def stream_is_capturing(self, stream: int) -> bool:
        return False

    def capture_id(self, stream: int) -> int:
        return 0

    def event_create(self) -> int:
        return 1

    def event_record(self, event: int, stream: int) -> None:
        pass

    def event_query(self, event: int) -> bool:
        return True

    def event_destroy(self, event: int) -> None:
        pass


@contextmanager
def one_rank(library: NcclLibrary, *, is_ordered: bool = False) -> Iterator[NcclCommunicator]:
    """Yield a connected communicator of a group of one, which has deadlines, and an order, as on a device."""
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
        context, library=library, streams=streams, progress=EventProgress(lambda: driver, {})
    )
    if is_ordered:
        communicator._order = StreamOrder(driver, health.where)  # noqa: SLF001 - as `OrderedCommunicator` sets it
    try:
        communicator.connect()
        yield communicator
    finally:
        communicator.destroy()
        health.close()
        health.release()


def parts_of(communicator: NcclCommunicator) -> dict[str, Callable[[], object]]:
    """Return the parts of the calls of `forms_of`, by name."""
    # In place, because the second function keeps this tensor and nothing would keep an output.
    tensor = torch.ones(4)
    function = communicator.library.functions["ncclAllReduce"]
    handle = communicator._connection.handle()  # noqa: SLF001 - the library is called as the communicator calls it
    arguments = (
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_void_p(tensor.data_ptr()),
        ctypes.c_size_t(4),
        *(ctypes.c_int(7), ctypes.c_int(0)),
        *(handle, ctypes.c_void_p(STREAM)),
    )
    return {
        "ncclAllReduce by ctypes, nothing converted": lambda: function(*arguments),
        "torch.empty_like": lambda: torch.empty_like(tensor),
    }


def forms_of(communicator: NcclCommunicator, remark: str = "") -> dict[str, Callable[[], object]]:
    """Return the calls to measure, by name, which `remark` is added to."""
    tensor, output = torch.ones(4), torch.empty(4)
    return {
        f"all_reduce_{remark}": lambda: communicator.all_reduce_(tensor),
        f"all_reduce_into_output{remark}": lambda: communicator.all_reduce_into_output(tensor, output),
        f"all_reduce{remark}": lambda: communicator.all_reduce(tensor),
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
        with ExitStack() as stack:
            plain = stack.enter_context(one_rank(library))
            ordered = stack.enter_context(one_rank(library, is_ordered=True))
            forms = {**parts_of(plain), **forms_of(plain), **forms_of(ordered, ", with a StreamOrder")}
            found = measured(forms, options.rounds, options.calls)
        print(f"a call with one rank, {library}, in us")
    for name, figures in found.items():
        print(f"{name:45} median {figures['median_us']:6.2f}   least {figures['least_us']:6.2f}")
    if options.json is not None:
        write_figures(options.json, {"library": str(library).replace(f"{folder}/", ""), "calls": found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
