"""The CUDA kernels as machine code: compiled by NVRTC at first use, then read from a cache on disk.

Installing needs no CUDA toolkit, and compiling needs neither a GPU nor a driver. The source is header-free; a
module holds one family of kernels for one architecture, world size and element type.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import logging
import os
import secrets
import stat
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from device_comm.kernel_layout import ALGORITHMS, MAX_WORLD_SIZE, MIN_WORLD_SIZE
from shm_broadcast.errors import CapabilityError, CudaError, UsageError

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

FRAGMENTS: Final = ("kernel_base.cu", "all_reduce.cu", "add_rms_norm.cu", "probes.cu")
"""The source, in this order, is one translation unit."""
DTYPES: Final = {"float32": 0, "float16": 1, "bfloat16": 2}
FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "one_shot": ("push_one_shot",),
    "two_shot": ("push_two_shot",),
    "shards": ("push_reduce_scatter", "push_all_gather"),
    "pull": ("pull_one_shot", "pull_two_shot"),
    "norm": ("push_add_rms_norm", "add_rms_norm"),
    "probes": ("probe_write", "probe_read", "empty"),
}
"""What is compiled together; the place of a family, from 1, is its FAMILY_ number in the source."""
OLDEST_ARCH: Final = 75
"""ld.relaxed.sys and what else the kernels use begins at sm_70, which NVRTC 13 no longer knows."""
MOST_FILES: Final = 512
"""About 20 MB. A group needs one file for each family it uses and dtype; more are left by upgrades and other sizes."""

_MAGIC: Final = b"GCCUBIN1"
_CHECKSUM_BYTES: Final = 32
_OPTIONS: Final = ("--std=c++17", "-fmad=false", "--ptxas-options=-v")


def family_of(kernel: str) -> str:
    """Return the family whose module holds `kernel`."""
    for family, kernels in FAMILIES.items():
        if kernel in kernels:
            return family
    raise UsageError(f"unknown kernel {kernel!r}: one of {', '.join(ALGORITHMS)}, add_rms_norm or a probe")


@dataclasses.dataclass(frozen=True)
class KernelVariant:
    """Which module: everything its machine code depends on, apart from source and compiler.

    Attributes:
        arch: Compute capability times ten, as in sm_90.
        world_size: Ranks of the group, 2 to 8.
        dtype: "float32", "float16" or "bfloat16".
        family: A name of `FAMILIES`.
        emulate: All ranks in one launch on one GPU (blockIdx.y is the rank); for tests.
    """

    arch: int
    world_size: int
    dtype: str
    family: str
    emulate: bool = False

    def __post_init__(self) -> None:
        """Refuse what the source cannot be compiled for."""
        if not MIN_WORLD_SIZE <= self.world_size <= MAX_WORLD_SIZE:
            raise UsageError(f"the kernels serve 2 to {MAX_WORLD_SIZE} ranks, not {self.world_size}")
        if self.dtype not in DTYPES:
            raise UsageError(f"no kernels for {self.dtype!r}: one of {', '.join(DTYPES)}")
        if self.family not in FAMILIES:
            raise UsageError(f"no family {self.family!r}: one of {', '.join(FAMILIES)}")
        if self.arch < OLDEST_ARCH:
            raise CapabilityError(
                f"the custom kernels need compute capability 7.5, this GPU has {self.arch / 10}",
                requirement="compute capability 7.5",
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
    """A module, and what the compiler said (registers, stack and spills of each kernel)."""

    cubin: bytes
    log: str


@functools.cache
def kernel_source() -> str:
    """Return the source of all kernels, one translation unit without any include."""
    folder = Path(__file__).parent / "csrc"
    return "".join(f'#line 1 "{name}"\n{(folder / name).read_text()}' for name in FRAGMENTS)


def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CapabilityError(
            f"the custom CUDA kernels are compiled through the package cuda-python, which cannot be imported: {error}",
            requirement="cuda-python",
        ) from error
    found: ModuleType = nvrtc
    return found


def _call(function: str, *arguments: Any) -> Any:
    """Call NVRTC; return its result, a tuple where there are several."""
    try:
        code, *results = getattr(_nvrtc(), function)(*arguments)
    except (RuntimeError, OSError) as error:
        raise CapabilityError(
            f"NVRTC, the CUDA run-time compiler, cannot be loaded (package nvidia-cuda-nvrtc): {error}",
            requirement="NVRTC",
        ) from error
    if int(code) != 0:
        raise CudaError(f"{function} failed: {code.name}", library="NVRTC", function=function, code=int(code))
    return results[0] if len(results) == 1 else tuple(results)


@functools.cache
def compiler_version() -> str:
    """Return the version of the NVRTC at hand."""
    major, minor = _call("nvrtcVersion")
    return f"{major}.{minor}"


@functools.cache
def _compiler_identity() -> str:
    """Return what tells one compiler from another, without loading it: that alone takes 0.1 s.

    cuda-python takes NVRTC from its wheel where there is one; only elsewhere must the library be asked.
    """
    for wheel in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{wheel} {importlib.metadata.version(wheel)}"
    return compiler_version()


def _text(program: Any, size: str, get: str) -> bytes:
    buffer = bytes(_call(size, program))
    if buffer:
        _call(get, program, buffer)
    return buffer


def compile_kernels(variant: KernelVariant) -> Compiled:
    """Compile a module, in 0.2 to 0.4 s of processor time.

    Raises:
        CapabilityError: cuda-python or NVRTC is missing, or knows nothing of this architecture.
        CudaError: The compiler refused the source; the text holds its log.
    """
    known = _call("nvrtcGetSupportedArchs")
    if variant.arch not in known:
        raise CapabilityError(
            f"NVRTC {compiler_version()} compiles nothing for sm_{variant.arch}, only for {list(known)}",
            requirement=f"an NVRTC that knows sm_{variant.arch}",
        )
    program = _call("nvrtcCreateProgram", kernel_source().encode(), b"all_reduce.cu", 0, None, None)
    try:
        options = [option.encode() for option in variant.options]
        nvrtc = _nvrtc()
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
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
    """Modules on disk, shared by the processes of one user.

    Machine code is executed, so the directory must belong to this user and be closed to all others; a file that
    was damaged is compiled again. Ranks that miss at the same time all compile and all write the same bytes.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        """Use `directory`, which is created (0700) if it is not there.

        Raises:
            CapabilityError: It cannot be made, belongs to somebody else, or is open to others.
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
        """Return where the module of `variant` is kept, whether it is there or not."""
        parts = (kernel_source(), _compiler_identity(), *variant.options)
        # Each part with its length: no two lists of parts read the same.
        text = "".join(f"{len(part)}:{part}" for part in parts)
        return self.directory / f"{hashlib.sha256(text.encode()).hexdigest()}.cubin"

    def cubin(self, variant: KernelVariant) -> bytes:
        """Return the module of `variant`, from disk where it is there whole, else compiled and kept.

        Raises:
            CapabilityError: As `compile_kernels`.
            CudaError: As `compile_kernels`.
        """
        path = self.path_of(variant)
        cubin = _read(path)
        if cubin is None:
            cubin = compile_kernels(variant).cubin
            try:
                self._write(path, cubin)
            except OSError as error:
                # The module itself is fine: only the next start is slower.
                logger.warning("the kernel cache at %s was not written: %s", path, error)
        return cubin

    def _write(self, path: Path, cubin: bytes) -> None:
        """Put the file there at once: a reader sees all of it or none."""
        temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(cubin).digest() + cubin)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        self._forget_the_oldest()

    def _forget_the_oldest(self) -> None:
        """Keep at most `MOST_FILES` files; other processes may do the same at the same time."""
        found = []
        for path in self.directory.glob("*.cubin*"):
            with contextlib.suppress(FileNotFoundError):
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
