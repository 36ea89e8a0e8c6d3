"""Measure what an all-reduce by our CUDA kernels costs the calling thread, without a device.

The calls go through NVIDIA's bindings to a libcuda of the tests that does nothing, with every launch prepared. The
figures hold our Python, the bindings, and torch's allocation of a result on the CPU. The forms take turns; each figure
is the processor time of the calling thread, median over the rounds, in microseconds.

    python -m benchmarks kernel-calls [--rounds 41] [--calls 2000] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.nccl_calls import measured
from benchmarks.results import write_figures
from coordinator.bootstrap.status_store import WorldStatusStore
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.custom.resources import CustomContext
from device_comm.cuda.driver_bindings import CudaDriver
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda_settings import CudaSettings
from device_comm.health import GroupHealth
from shm_broadcast.liveness import PeerWatch, this_process

STREAM: Final = 7
COUNT: Final = 4096
"""Elements of a call: 8 KiB of bfloat16, a row of a hidden state."""
ROOT: Final = Path(__file__).parents[1]


@contextmanager
def two_ranks(driver: CudaDriver) -> Iterator[CustomAllReduce]:
    """Yield the kernels of one rank of two; the other one is a mirror, since nothing runs."""
    board = WorldStatusStore(dist.HashStore(), 0, (0, 1))
    health = GroupHealth("tp:0", 0, (0, 1), PeerWatch(this_process(), {}), board)
    facts = GroupFacts(
        world_size=2,
        device_name="none",
        arch="sm_90",
        multiprocessors=132,
        has_nvlink=True,
        is_exportable=True,
    )
    context = CustomContext(
        driver=driver,
        health=health,
        peers=PeerExchange(lambda data: [data, data], 0, (0, 1)),
        facts=facts,
        settings=CudaSettings(arena_bytes=1 << 20, staging_bytes=0),
        timeout_s=30.0,
        cubin=lambda _family, _dtype: b"nothing",
    )
    custom = CustomAllReduce.create(context)
    try:
        yield custom
    finally:
        custom.destroy(lambda: None)
        health.close()
        health.release()


def served_by(custom: CustomAllReduce) -> CudaCommunicator:
    """Return a communicator that has decided for `custom`, of which only `all_reduce` may be called."""
    made: CudaCommunicator = object.__new__(CudaCommunicator)
    # The CPU's tensors have index -1; torch has no current stream without a device.
    vars(made).update(
        _index=-1,
        _custom=custom,
        _collected=None,
        _elsewhere={},
        _is_capturing=False,
        _current=lambda: STREAM,
    )
    return made


def forms_of(driver: CudaDriver, custom: CustomAllReduce) -> dict[str, Callable[[], object]]:
    """Return the calls to measure, by name; the first ones are parts of the later ones."""
    tensor, output = torch.ones(COUNT, dtype=torch.bfloat16), torch.empty(COUNT, dtype=torch.bfloat16)
    addresses = tensor.data_ptr(), output.data_ptr()
    norm = [*addresses, *addresses, tensor.data_ptr()]
    communicator = served_by(custom)
    launch = custom._launches.of("push_one_shot", "bfloat16")  # noqa: SLF001 - launched as `custom` launches it
    configuration = driver.configure(launch.function, 4, 128, is_dependent=True)
    return {
        "a prepared launch by the bindings": lambda: driver.launch_configured(
            configuration, STREAM, launch.arguments
        ),
        "torch.empty_like": lambda: torch.empty_like(tensor),
        "our kernels: all_reduce": lambda: custom.all_reduce(*addresses, COUNT, torch.bfloat16, STREAM),
        "our kernels: fused norm": lambda: custom.all_reduce_add_rms_norm(
            norm, 1, COUNT, 1e-5, torch.bfloat16, STREAM
        ),
        "communicator: all_reduce, with its result": lambda: communicator.all_reduce(tensor),
    }


def measure(options: argparse.Namespace) -> None:
    """Measure in this process, whose libcuda is the one of the tests."""
    # The only one of that libcuda that has a context.
    driver = CudaDriver(1)
    with two_ranks(driver) as custom:
        found = measured(forms_of(driver, custom), options.rounds, options.calls)
    driver.close()
    print("a call of one rank, over a libcuda that does nothing, in us")
    for name, figures in found.items():
        print(f"{name:45} median {figures['median_us']:6.2f}   least {figures['least_us']:6.2f}")
    if options.json is not None:
        write_figures(options.json, {"library": "a libcuda that does nothing", "calls": found})


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks kernel-calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--calls", type=int, default=2000, help="calls of one form in a row")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.library is not None:
        ctypes.CDLL(str(options.library), mode=ctypes.RTLD_GLOBAL)
        measure(options)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libcuda.so.1"
        command = ["cc", "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
        source = ROOT / "tests" / "native" / "libcuda_stub.c"
        subprocess.run([*command, str(source), "-ldl"], check=True)  # noqa: S603 - the compiler, on our own file
        # The bindings load one libcuda per process, by its name.
        again = [sys.executable, "-m", "benchmarks", "kernel-calls", *sys.argv[1:], "--library", str(library)]
        return subprocess.run(  # noqa: S603 - our own module
            again, env={**os.environ, "LD_LIBRARY_PATH": folder}, cwd=ROOT, check=False
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
