"""The kernels as NVRTC compiles them and as cuobjdump lists them, made once for all processes of a test run."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

from device_comm.cuda.kernels import Compiled, KernelVariant, compile_kernels

PROGRAMS = Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13" / "bin"


class CompiledKernels:
    """Compiled modules and their machine code, kept as files: each takes half a second to two of processor time."""

    def __init__(self, folder: Path) -> None:
        """Keep the files in `folder`, which all processes of the run share."""
        self._folder = folder
        self.compiled = cache(self._compiled)
        self.machine_code = cache(self._machine_code)

    def _compiled(self, variant: KernelVariant) -> Compiled:
        """Return what `compile_kernels` returns."""
        path = self._path(variant, "cubin")

        def compile_to(unfinished: Path) -> None:
            done = compile_kernels(variant)
            path.with_suffix(".log").write_text(done.log)
            unfinished.write_bytes(done.cubin)

        _make_once(path, compile_to)
        return Compiled(path.read_bytes(), path.with_suffix(".log").read_text())

    def _machine_code(self, family: str, world_size: int, dtype: str, arch: int = 90) -> dict[str, list[str]]:
        """Return the instructions of each kernel of a family; nobody may change them."""
        variant = KernelVariant(arch, world_size, dtype, family)
        path = self._path(variant, "sass")

        def list_to(unfinished: Path) -> None:
            self.compiled(variant)
            command = [str(PROGRAMS / "cuobjdump"), "-sass", str(self._path(variant, "cubin"))]
            environ = {"PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
            done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            unfinished.write_text(done.stdout)

        _make_once(path, list_to)
        found: dict[str, list[str]] = {}
        for line in path.read_text().splitlines():
            if head := re.search(r"Function : (\w+)", line):
                current = found.setdefault(head[1], [])
            elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", line):
                current.append(code[1])
        return found

    def _path(self, variant: KernelVariant, suffix: str) -> Path:
        name = f"{variant.family}_{variant.world_size}_{variant.dtype}_{variant.arch}"
        return self._folder / f"{name}{'_emulate' if variant.emulate else ''}.{suffix}"


def _make_once(path: Path, make: Callable[[Path], None]) -> None:
    """Let one process make the file, under another name until it is complete; others that want it wait."""
    if path.exists():
        return
    with open(path.with_name(f"{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            unfinished = path.with_name(f"{path.name}.unfinished")
            make(unfinished)
            unfinished.replace(path)
