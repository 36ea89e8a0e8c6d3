"""Compile the CUDA kernels with g++: as a library for tests and the fake driver, and as a stress program."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from device_comm.cuda.kernels import DTYPES, kernel_source

HERE = Path(__file__).parent
# With -ffp-contract=off a multiplication and an addition are rounded separately, as on the GPU.
OPTIONS = (
    "-std=c++20",
    "-O1",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-pthread",
    "-Wno-unknown-pragmas",
    "-Wno-attributes",
    f"-I{HERE}",
)
# A library runs for a moment: to optimise it more takes longer than it saves.
LIBRARY = ("-Og", "-shared", "-fPIC")
# The variable that names the folder in which another test run has its libraries, which a run inside of it shares.
FOLDER = "HOST_LIBRARIES"


def compiler() -> str:
    """Return the C++ compiler's name."""
    return os.environ.get("CXX", "g++")


def shared_folder(factory: pytest.TempPathFactory) -> Path:
    """Return a folder for libraries of this source that all processes of this test run share."""
    base = factory.getbasetemp()
    if FOLDER in os.environ:
        base = Path(os.environ[FOLDER])
    elif "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # the directory of a worker is in that of the whole run
    digest = hashlib.sha256(kernel_source().encode()).hexdigest()
    folder = base / f"host-libraries-{digest[:8]}"
    folder.mkdir(exist_ok=True)
    return folder


def build_host_library(world_size: int, dtype: str, directory: Path, *, emulate: bool = False) -> Path:
    """Compile the kernels into a shared library, unless it is there already, and return its path.

    Processes that want the same library at the same time compile it once: it takes two seconds of processor time.

    The library has `launch(kernel, grid_x, block_x, args)`, which runs one rank's grid as threads and returns 0 when
    it is done, or 1 if it does not know the kernel. `set_limits(grid, block)` limits both sizes (2 and 2 at first).
    `set_stalls(seed, per_million)` makes memory operations stall at random.

    Args:
        world_size: A number from 2 to 8.
        dtype: "float32", "float16" or "bfloat16".
        directory: The directory of the library.
        emulate: Whether one launch runs all ranks, which is a build with -DEMULATE=1.
    """
    library = directory / f"kernels_{world_size}_{dtype}{'_emulate' if emulate else ''}.so"
    if library.exists():
        return library
    with open(library.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            source = library.with_suffix(".cu")
            source.write_text(kernel_source())
            unfinished = library.with_suffix(".unfinished")
            flags = ("-DEMULATE=1",) if emulate else ()
            compile_host(source, "host_library.cpp", unfinished, world_size, dtype, (*flags, *LIBRARY))
            unfinished.replace(library)
    return library


def compile_host(
    source: Path, main: str, output: Path, world_size: int, dtype: str, options: Sequence[str] = ()
) -> None:
    """Compile `main`, a file of this folder, together with the kernels in `source`."""
    defines = (f'-DKERNELS="{source}"', f"-DWORLD_SIZE={world_size}", f"-DDTYPE={DTYPES[dtype]}")
    command = [compiler(), *OPTIONS, *defines, *options, "-o", str(output), str(HERE / main)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


class HostKernels:
    """A loaded library whose launches have the form that a CUDA driver takes."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def launch(
        self, kernel: str, grid: int, block: int, arguments: Sequence[object], cluster: int = 1
    ) -> None:
        """Run a kernel. An argument is a ctypes value, or a packed structure as bytes."""
        kept = [
            ctypes.create_string_buffer(each, len(each)) if isinstance(each, bytes) else each
            for each in arguments
        ]
        pointers = (ctypes.c_void_p * max(1, len(kept)))(*(ctypes.addressof(each) for each in kept))  # type: ignore[arg-type]
        if self.library.launch_clusters(kernel.encode(), grid, block, cluster, pointers) != 0:
            raise KeyError(kernel)
