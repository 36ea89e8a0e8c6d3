"""Native cores built for fuzzing: with the sanitizers, or counting the lines that run."""

import fcntl
import os
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = [
    "CORES",
    "COUNTING",
    "LOAD",
    "ROOT",
    "SANITIZED",
    "build_inputs",
    "built_cores",
    "compiled",
    "linked",
]

ROOT = Path(__file__).parents[2]
CORES = {"shm_broadcast._core": ROOT / "shm_broadcast/csrc", "device_comm._core": ROOT / "device_comm/csrc"}
"""By the name of the module: where its sources are."""

LIBRARY = "_core.abi3.so"
SANITIZED = [
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=undefined",
    "-fno-omit-frame-pointer",
]
COUNTING = ["-O0", "--coverage"]

LOAD = """
import importlib.util, runpy, sys
while sys.argv[1] != "--":
    name, path = sys.argv[1:3]
    del sys.argv[1:3]
    spec = importlib.util.spec_from_file_location(name, path)
    core = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(core)
    sys.modules[name] = core
del sys.argv[1]
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=False)
"""
"""A program: its arguments are names and paths of cores, "--", and a module to run with its arguments."""


INPUTS = Path(__file__).with_name("inputs.cpp")


def build_inputs(folder: Path) -> Path:
    """Compile what makes the inputs into `folder`, unless it is there; return its path."""
    library = folder / "inputs.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
        places = [f"-I{sysconfig.get_path('include')}"]
        unfinished = folder / f"inputs.{os.getpid()}"
        command = ["g++", *flags, *places, str(INPUTS), "-o", str(unfinished)]
        subprocess.run(command, check=True, timeout=120, env=_without_sanitizers())
        unfinished.replace(library)
    return library


def _without_sanitizers() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def built_cores(folder: Path, options: Sequence[str]) -> list[str]:
    """Return the names and the paths of the cores in `folder`, which the first of several processes builds."""
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "done"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            build_inputs(folder)
            for name in CORES:
                build_core(name, folder / name, options)
            done.touch()
    return [text for name in CORES for text in (name, str(folder / name / LIBRARY))]


def build_core(name: str, folder: Path, options: Sequence[str]) -> Path:
    """Compile core `name` into `folder`, several files at a time; return its path."""
    sources = sorted(
        CORES[name].rglob("*.cpp"), reverse=True
    )  # the files with the last names are the largest ones
    folder.mkdir(exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: compiled(source, name, folder, options), sources))
    return linked(objects, folder, options)


def compiled(source: Path, name: str, folder: Path, options: Sequence[str]) -> Path:
    """Compile one file of core `name` into `folder`; return the path of the object."""
    own = [source.parent, *sorted({each.parent for each in CORES[name].rglob("*.cpp")})]
    places = [f"-I{place}" for place in (sysconfig.get_path("include"), *own)]
    flags = [
        "-std=c++20",
        "-fPIC",
        "-fvisibility=hidden",
        "-fno-strict-aliasing",
        "-DPy_LIMITED_API=0x030B0000",
    ]
    made = folder / f"{source.stem}.o"
    command = ["g++", *flags, *options, *places, "-c", str(source), "-o", str(made)]
    subprocess.run(command, check=True, timeout=300)
    return made


def linked(objects: Sequence[Path], folder: Path, options: Sequence[str]) -> Path:
    """Link a core into `folder`; return its path."""
    library = folder / LIBRARY
    command = ["g++", "-shared", *options, *map(str, objects), "-o", str(library)]
    subprocess.run(command, check=True, timeout=120)
    return library
