"""What the machine is, and whether two processes can share device memory in both ways."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from device_comm.cuda.custom.peer_access import PROBE_BYTES, verify_peer_access
from device_comm.cuda.custom.peer_memory import PeerMemory
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.kernels import compiler_version
from device_comm.nccl.library import NcclLibrary, version_text
from tests.custom_ranks import store_exchange
from tests.gpu.device import GpuDriver, arch_of
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.running import GpuRun, on_gpu

ROOT = Path(__file__).parents[2]
COMPILERS = (
    ("nvcc", ("nvcc", "/usr/local/cuda/bin/nvcc"), -1),
    ("g++", ("g++",), 0),
    ("cc", ("cc",), 0),
)
"""Name, where to look, and the line of its answer to --version that has the version."""
MODES = {0: "default", 2: "prohibited", 3: "one process only"}
"""CUcomputemode of cuda.h. Only in the first one several processes can share a GPU."""


@gpu_body
def versions(me: GpuRank) -> None:
    me.fact("torch", torch.__version__)
    me.fact("CUDA of torch", torch.version.cuda or "none (CPU build)")
    me.fact("NVRTC", compiler_version())
    me.fact("cuda-bindings", importlib.metadata.version("cuda-bindings"))
    for name, places, line in COMPILERS:
        found = next(filter(None, map(shutil.which, places)), None)
        me.fact(name, "none" if found is None else said_by([found, "--version"], line))


def said_by(command: Sequence[str], line: int) -> str:
    """Return one line of what a program says; -1 is the last one."""
    asked = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    return (asked.stdout.strip().splitlines() or ["says nothing"])[line]


@gpu_body
def first_use(me: GpuRank) -> None:
    start = time.monotonic()
    torch.zeros(1).cuda()
    me.figure("first use of the GPU by torch in a process", time.monotonic() - start, "s")


@gpu_body
def device(me: GpuRank) -> None:
    driver = GpuDriver(0)
    number = driver.driver_version()
    me.fact("GPU", driver.device_name())
    me.fact("GPUs that this process sees", driver.device_count())
    me.fact("GPU architecture", f"sm_{arch_of(driver)}, {driver.multiprocessors()} multiprocessors")
    me.fact("GPU memory", f"{driver.total_memory() / 2**30:.1f} GiB")
    module = Path("/proc/driver/nvidia/version")
    text = (
        module.read_text().splitlines()[0].removeprefix("NVRM version:").strip() if module.exists() else "?"
    )
    me.fact("driver", f"for CUDA {number // 1000}.{number % 1000 // 10}, {text}")
    mode = driver.attribute("COMPUTE_MODE")
    me.fact("compute mode", MODES.get(mode, str(mode)))
    me.fact("multicast supported", bool(driver.attribute("MULTICAST_SUPPORTED")))
    kinds = f"IPC {driver.ipc_supported()}, descriptors {driver.vmm_supported()}"
    me.fact("memory for other processes", kinds)
    driver.close()


@gpu_body
def nccl(me: GpuRank) -> None:
    library = NcclLibrary(None)
    me.fact("NCCL", f"{version_text(library.version)} ({Path(str(library.path)).name})")


@gpu_body
def peer_memory(me: GpuRank, kind: str) -> dict[str, Any]:
    driver = GpuDriver(0)
    store = dist.FileStore(str(me.directory / "store"), me.world_size)
    exchange = store_exchange(store, me.rank, me.world_size)
    peers = PeerExchange(exchange, me.rank, range(me.world_size))
    nbytes = PROBE_BYTES * me.world_size
    memory = PeerMemory.create(driver, peers, nbytes, lambda: (), kinds=(kind,))  # type: ignore[arg-type]
    failure = verify_peer_access(driver, peers, memory.addresses, None)
    memory.close(peers.meet)
    driver.close()
    return {"failure": failure, "kind": memory.kind}


@pytest.mark.parametrize("body", [versions, device, nccl, first_use], ids=lambda body: body.__name__)
@on_gpu(5, 15)
def test_the_machine_says_what_it_is(gpu: GpuRun, body: Callable[..., None]) -> None:
    """Versions, the device and its driver, an NCCL that can be loaded, and a torch that can use the GPU."""
    gpu.run(body)


@on_gpu(15, 60)
def test_info_sees_the_device(gpu: GpuRun) -> None:
    """The product's own report of this machine lists device 0."""
    command = [sys.executable, "-m", "coordinator", "info", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=gpu.left())
    assert done.returncode == 0, done.stderr
    devices = json.loads(done.stdout)["CUDA devices"]
    assert isinstance(devices, dict), devices
    assert "0" in devices


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
@on_gpu(8, 40)
def test_two_processes_share_memory(gpu: GpuRun, kind: str) -> None:
    """Each process writes to the other one's memory, shared by a CUDA IPC handle or by a descriptor."""
    found = gpu.run(peer_memory, kind, ranks=2)
    assert all(each == {"failure": "", "kind": kind} for each in found), found
    gpu.fact(f"two processes by {kind}", "writes between all ranks arrived")
