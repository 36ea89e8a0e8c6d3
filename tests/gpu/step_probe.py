"""What the machine is, and whether two processes can share memory on it in both ways."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from device_comm.kernels import compiler_version
from device_comm.nccl_library import NcclLibrary, version_text
from tests.gpu.device import GpuDriver, arch_of
from tests.gpu.notes import Notes, SkipCheckError
from tests.gpu.processes import run_ranks, values_of
from tests.gpu.step import run_module


def versions(notes: Notes) -> None:
    """Write down what is installed."""
    notes.fact("torch", torch.__version__)
    notes.fact("CUDA of torch", torch.version.cuda or "none (CPU build)")
    notes.fact("NVRTC", compiler_version())
    compiler = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if compiler is not None:
        asked = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False, timeout=20
        )
        notes.fact("nvcc", asked.stdout.strip().splitlines()[-1] if asked.stdout.strip() else "says nothing")


def device(notes: Notes) -> None:
    """Write down what the device and its driver are."""
    driver = GpuDriver(0)
    number = driver.driver_version()
    notes.fact("GPU", driver.device_name())
    notes.fact("GPUs that this process sees", driver.device_count())
    notes.fact("GPU architecture", f"sm_{arch_of(driver)}, {driver.multiprocessors()} multiprocessors")
    notes.fact("GPU memory", f"{driver.total_memory() / 2**30:.1f} GiB")
    notes.fact("driver", f"for CUDA {number // 1000}.{number % 1000 // 10}{_module_version()}")
    notes.fact(
        "memory for other processes", f"IPC {driver.ipc_supported()}, descriptors {driver.vmm_supported()}"
    )
    driver.close()


def _module_version() -> str:
    path = Path("/proc/driver/nvidia/version")
    if not path.exists():
        return ""
    first = path.read_text().splitlines()[0]
    return f", {first.removeprefix('NVRM version:').strip()}"


def info() -> None:
    """Run the product's own report."""
    command = [sys.executable, "-m", "coordinator", "info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if done.returncode != 0:
        raise AssertionError(f"ended with {done.returncode}: {done.stderr[-1500:]}")
    devices = json.loads(done.stdout)["CUDA devices"]
    if not isinstance(devices, dict) or "0" not in devices:
        raise AssertionError(f"it sees no device: {devices}")


def shared(notes: Notes, kind: str, directory: Path) -> None:
    """Let two processes map each other's memory in one way, write and read."""
    outcomes = run_ranks("tests.gpu.bodies:peer_memory", 2, directory / kind, 40.0, {"kind": kind})
    found = values_of(outcomes)
    if not all(each["works"] and each["kind"] == kind for each in found):
        raise AssertionError(f"{found}")
    notes.fact(f"two processes by {kind}", found[0]["reason"])


def run(notes: Notes) -> None:
    """Run the step."""
    with notes.check("versions"):
        versions(notes)
    with notes.check("a CUDA device"):
        device(notes)
    with notes.check("NCCL can be loaded"):
        library = NcclLibrary(None)
        notes.fact("NCCL", f"{version_text(library.version)} ({Path(str(library.path)).name})")
    if "GPU" not in notes.facts:
        for name in ("coordinator info", "memory of two processes"):
            with notes.check(name):
                raise SkipCheckError("there is no CUDA device")
        return
    with notes.check("python -m coordinator info --json"):
        info()
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        for kind in ("ipc", "vmm"):
            with notes.check(f"memory of two processes by {kind}"):
                shared(notes, kind, Path(name))


if __name__ == "__main__":
    sys.exit(run_module(run, sys.argv[1:]))
