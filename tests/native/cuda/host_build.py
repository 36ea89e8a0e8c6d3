"""The CUDA kernels, compiled by g++: a library for tests and for the fake driver, and a program that stresses them."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from device_comm.cuda.kernels import DTYPES, kernel_source

HERE = Path(__file__).parent
# -ffp-contract=off: no multiply-add where the source multiplies and adds; both are rounded, as on the GPU.
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


def compiler() -> str:
    """Return the C++ compiler's name."""
    return os.environ.get("CXX", "g++")


def build_host_library(world_size: int, dtype: str, directory: Path, *, emulate: bool = False) -> Path:
    """Compile the kernels into a shared library and return its path; not again if it is there.

    The library has `launch(kernel, grid_x, block_x, args)`, which runs one rank's grid as threads and returns
    when it is done, 0 or 1 for an unknown kernel; `set_limits(grid, block)`, which caps both (at first 2 and 2);
    and `set_stalls(seed, per_million)`.

    Args:
        world_size: 2 to 8.
        dtype: "float32", "float16" or "bfloat16".
        directory: Where the library goes.
        emulate: All ranks in one launch: build with -DEMULATE=1.
    """
    library = directory / f"kernels_{world_size}_{dtype}{'_emulate' if emulate else ''}.so"
    if library.exists():
        return library
    source = directory / "kernels.cu"
    if not source.exists():
        temporary = source.with_suffix(f".{os.getpid()}")
        temporary.write_text(kernel_source())
        temporary.replace(source)
    unfinished = library.with_suffix(f".{os.getpid()}")
    flags = ("-DEMULATE=1",) if emulate else ()
    compile_host(source, "host_library.cpp", unfinished, world_size, dtype, (*flags, "-shared", "-fPIC"))
    unfinished.replace(library)
    return library


def compile_host(
    source: Path, main: str, output: Path, world_size: int, dtype: str, options: Sequence[str] = ()
) -> None:
    """Compile `main` of this folder around the kernels in `source`."""
    defines = (f'-DKERNELS="{source}"', f"-DWORLD_SIZE={world_size}", f"-DDTYPE={DTYPES[dtype]}")
    command = [compiler(), *OPTIONS, *defines, *options, "-o", str(output), str(HERE / main)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}\n{done.stderr}")


class HostKernels:
    """A loaded library, with launches as a CUDA driver takes them."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def launch(self, kernel: str, grid: int, block: int, arguments: Sequence[object]) -> None:
        """Run a kernel; `arguments` are ctypes values or bytes (a packed structure)."""
        kept = [
            ctypes.create_string_buffer(each, len(each)) if isinstance(each, bytes) else each
            for each in arguments
        ]
        pointers = (ctypes.c_void_p * max(1, len(kept)))(*(ctypes.addressof(each) for each in kept))  # type: ignore[arg-type]
        if self.library.launch(kernel.encode(), grid, block, pointers) != 0:
            raise KeyError(kernel)
