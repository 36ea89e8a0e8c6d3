"""Compile the CUDA kernels with NVRTC at first use, and cache the machine code on disk.

Installing needs no CUDA toolkit, and compiling needs neither a GPU nor a driver. The source includes no headers. A
module holds one family of kernels for one architecture, world size and element type.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import stat
from pathlib import Path
from typing import Any, Final

from device_comm.cuda.driver_bindings import bindings
from device_comm.cuda.whole_file import write_whole
from shm_broadcast.errors import CapabilityError, CudaError, UsageError
from shm_broadcast.interruption import raised_by_handler, tolerating

__all__ = [
    "DTYPES",
    "FAMILIES",
    "Compiled",
    "KernelCache",
    "KernelVariant",
    "compile_kernels",
    "compiler_version",
    "family_of",
    "kernel_source",
]

logger: logging.Logger = logging.getLogger(__name__)

FRAGMENTS: Final = (
    "kernel_base.cu",
    "clusters.cu",
    "all_reduce.cu",
    "add_rms_norm.cu",
    "add_rms_norm_fp8.cu",
    "add_rms_norm_nvfp4.cu",
    "moe_finalize.cu",
    "multimem.cu",
    "staged_all_gather.cu",
    "expert_parallel.cu",
)
"""The source files, concatenated in this order into one translation unit."""
DTYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 2}
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "one_shot": ("push_one_shot",),
    "two_shot": ("push_two_shot",),
    "shards": ("push_reduce_scatter", "push_all_gather", "staged_all_gather"),
    "pull": ("pull_one_shot", "pull_two_shot"),
    "norm": ("push_add_rms_norm", "push_two_shot_add_rms_norm", "add_rms_norm"),
    "norm_fp8": ("push_add_rms_norm_fp8", "push_two_shot_add_rms_norm_fp8", "add_rms_norm_fp8"),
    "finalize": ("push_moe_finalize", "moe_finalize"),
    "multimem": ("multimem_two_shot", "multimem_one_shot"),
    "norm_nvfp4": ("push_add_rms_norm_nvfp4", "push_two_shot_add_rms_norm_nvfp4", "add_rms_norm_nvfp4"),
    "expert": ("expert_dispatch", "expert_combine"),
}
"""Kernels that are compiled together. The index of a family, from 1, is its FAMILY_ number in the source."""
OLDEST_ARCH: Final = 75
"""Oldest architecture: `ld.relaxed.sys` and the other instructions need sm_70, but NVRTC 13 compiles from sm_75 on."""
MULTIMEM_ARCH: Final = 90
"""Oldest architecture with multimem instructions (PTX ISA, "multimem.ld_reduce, multimem.st, multimem.red")."""
MOST_FILES: Final = 512
"""Most files in the cache, about 20 MB. A group needs one file per family and dtype; upgrades and other world sizes
leave more."""

# Systems on a chip: 7.2 Xavier, 8.7 Orin, 10.1 and 11.0 Thor.
_JETSON: Final = frozenset({72, 87, 101, 110})

_MAGIC: Final = b"GCCUBIN1"
_CHECKSUM_BYTES: Final = 32
_OPTIONS: Final = ("--std=c++17", "-fmad=false", "--ptxas-options=-v")


def family_of(kernel: str) -> str:
    """Return the family whose module holds `kernel`."""
    for family, kernels in FAMILIES.items():
        if kernel in kernels:
            return family
    known = ", ".join(name for kernels in FAMILIES.values() for name in kernels)
    raise UsageError(f"there is no kernel {kernel!r}, only {known}")


@dataclasses.dataclass(frozen=True)
class KernelVariant:
    """Everything that a module's machine code depends on, apart from source and compiler.

    Attributes:
        arch: Compute capability times ten, as in sm_90.
        world_size: Number of ranks in the group, 2 to 8.
        dtype: "float32", "float16" or "bfloat16".
        family: A key of `FAMILIES`.
        emulate: Run all ranks in one launch on one GPU (blockIdx.y is the rank); for tests.
    """

    arch: int
    world_size: int
    dtype: str
    family: str
    emulate: bool = False

    def __post_init__(self) -> None:
        """Refuse dtypes and devices that the source does not support."""
        if self.dtype not in DTYPES:
            raise UsageError(f"there are no kernels for {self.dtype!r}, only for {', '.join(DTYPES)}")
        if self.arch < OLDEST_ARCH:
            raise CapabilityError(
                f"the custom kernels need compute capability 7.5, this GPU has {self.arch / 10}",
                requirement="compute capability 7.5",
            )
        if self.family == "multimem" and self.arch < MULTIMEM_ARCH:
            raise CapabilityError(
                f"multimem instructions need compute capability 9.0, this GPU has {self.arch / 10}",
                requirement="compute capability 9.0",
            )

    @property
    def options(self) -> tuple[str, ...]:
        """Return the compiler's options."""
        return (
            f"--gpu-architecture=sm_{self.arch}",
            f"-DWORLD_SIZE={self.world_size}",
            f"-DDTYPE={DTYPES[self.dtype]}",
            f"-DFAMILY={1 + list(FAMILIES).index(self.family)}",
            *(("-DEMULATE=1",) if self.emulate else ()),
            *_OPTIONS,
        )


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A module and the compiler's log (registers, stack and spills of each kernel)."""

    cubin: bytes
    log: str


@functools.cache
def kernel_source() -> str:
    """Return the source of all kernels: one translation unit without includes."""
    folder = Path(__file__).parents[1] / "csrc" / "cuda"
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in FRAGMENTS)


def _call(function: str, *arguments: Any) -> Any:
    """Call NVRTC; return its result, or a tuple if there are several."""
    try:
        code, *results = getattr(bindings("nvrtc"), function)(*arguments)
    except (RuntimeError, OSError) as error:
        if raised_by_handler(error):
            raise
        raise CapabilityError(
            f"NVRTC, the CUDA run-time compiler, cannot be loaded (package nvidia-cuda-nvrtc): {error}",
            requirement="NVRTC",
        ) from error
    if int(code) != 0:
        raise CudaError(f"{function} failed: {code.name}", library="NVRTC", function=function, code=int(code))
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def compiler_version() -> str:
    """Return the version of the NVRTC library in use."""
    major, minor = _call("nvrtcVersion")
    return f"{major}.{minor}"


@functools.cache
def _compiler_identity() -> str:
    """Return a text that identifies the compiler, if possible without loading it, which takes 0.1 s.

    The bindings use NVRTC from its wheel if one is installed; otherwise only the library knows its version.
    """
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with tolerating(importlib.metadata.PackageNotFoundError):
            return f"{wheel} {importlib.metadata.version(wheel)}"
    return compiler_version()


def _text(program: Any, size: str, get: str) -> bytes:
    buffer = bytes(_call(size, program))
    if buffer:
        _call(get, program, buffer)
    return buffer


def _target_of(arch: int) -> int:
    """Return the architecture to compile for: a device's own, or the next older one whose machine code it runs.

    Machine code runs on later minors of its major version, but not between the devices of Jetson boards and others
    (CUDA C++ Programming Guide, section Binary Compatibility).

    Raises:
        CapabilityError: The compiler knows none.
    """
    known: list[int] = list(_call("nvrtcGetSupportedArchs"))
    if arch in known:
        return arch
    older = [each for each in known if each // 10 == arch // 10 and each < arch and each not in _JETSON]
    if not older or arch in _JETSON:
        raise CapabilityError(
            f"NVRTC {compiler_version()} compiles nothing for sm_{arch}, only for {known}",
            requirement=f"an NVRTC that knows sm_{arch}",
        )
    logger.info("NVRTC %s does not know sm_%d: compiling for sm_%d", compiler_version(), arch, max(older))
    return max(older)


def compile_kernels(variant: KernelVariant) -> Compiled:
    """Compile a module; takes 0.2 to 0.4 s of CPU time, and up to 1.2 s for the slowest one.

    Raises:
        CapabilityError: cuda-bindings or NVRTC is missing, or does not support this architecture.
        CudaError: The compiler refused the source; the text contains its log.
    """
    target = _target_of(variant.arch)
    program = _call("nvrtcCreateProgram", kernel_source().encode(), b"all_reduce.cu", 0, None, None)
    try:
        options = [option.encode() for option in dataclasses.replace(variant, arch=target).options]
        (code,) = bindings("nvrtc").nvrtcCompileProgram(program, len(options), options)
        log = (
            _text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog")
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if int(code) != 0:
            raise CudaError(
                f"NVRTC {compiler_version()} did not compile {variant}: {code.name}\n{log}",
                library=f"NVRTC {compiler_version()}",
                function="nvrtcCompileProgram",
                code=int(code),
            )
        return Compiled(_text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log)
    finally:
        _call("nvrtcDestroyProgram", program)


class KernelCache:
    """A cache of compiled modules on disk, shared by the processes of one user.

    The machine code is executed, so the directory must belong to this user and be closed to all others. A damaged file
    is compiled again. Ranks that miss at the same time all compile and write the same bytes.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Use `directory`; create it with mode 0700 if it does not exist.

        Raises:
            CapabilityError: It cannot be created, belongs to another user, or is accessible to others.
        """
        self.directory: Path = Path(directory)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self.directory.lstat()
        except OSError as error:
            raise CapabilityError(
                f"no kernel cache at {self.directory}: {error}", requirement="a cache directory"
            ) from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise CapabilityError(
                f"{self.directory} holds machine code that this process would run: it must be a directory, not a link,"
                f" of user {os.geteuid()} with mode 0700, not of user {status.st_uid}"
                f" with mode {stat.S_IMODE(status.st_mode):04o}",
                requirement="a cache directory of our own",
            )

    def path_of(self, variant: KernelVariant) -> Path:
        """Return the path of the module of `variant`, which need not exist."""
        parts = (kernel_source(), _compiler_identity(), *variant.options)
        # Prefix each part with its length, so that different lists of parts never give the same text.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()}.cubin"

    def cubin(self, variant: KernelVariant) -> bytes:
        """Return the module of `variant` from disk; if it is missing or damaged, compile and store it.

        Raises:
            CapabilityError: As `compile_kernels`.
            CudaError: As `compile_kernels`.
        """
        path = self.path_of(variant)
        cubin = _read(path)
        if cubin is None:
            cubin = compile_kernels(variant).cubin
            try:
                write_whole(path, _MAGIC + hashlib.sha256(cubin).digest() + cubin)
                self._forget_the_oldest()
            except OSError as error:
                # The module can be used; only the next start is slower.
                logger.warning("the kernel cache at %s was not written: %s", path, error)
        return cubin

    def _forget_the_oldest(self) -> None:
        """Delete the oldest files beyond `MOST_FILES`; other processes may do so at the same time."""
        found = []
        for path in self.directory.glob("*.cubin*"):
            with tolerating(FileNotFoundError):
                found.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(found)[: max(0, len(found) - MOST_FILES)]:
            path.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    """Return the module in a file of the cache; None if the file is missing or damaged."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        logger.warning("the kernel cache at %s cannot be read and is replaced: %s", path, error)
        return None
    with os.fdopen(descriptor, "rb") as file:
        data = file.read()
    head = len(_MAGIC) + _CHECKSUM_BYTES
    cubin = data[head:]
    if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(cubin).digest() != data[len(_MAGIC) : head]:
        logger.warning("the kernel cache at %s is damaged and is replaced", path)
        return None
    return cubin
