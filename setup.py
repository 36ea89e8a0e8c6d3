"""Build the native cores; everything else is in pyproject.toml."""

import os
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).parent
# Warnings are errors only in CI: a newer compiler on a user's machine must not break an installation.
STRICT = ["-Werror"] if os.environ.get("CI") == "true" else []
# A compiler takes up to 0.3 GB, so the number of processors alone is no limit.
MOST_COMPILERS = 8
# Every native core is linked with this file, by the option that the file explains.
FORCED_UNWIND = "shm_broadcast/csrc/forced_unwind.cpp"

if not sys.platform.startswith("linux"):
    raise SystemExit("group-coordinator needs Linux: it uses memfd, futex and pidfd")
if sysconfig.get_config_var("Py_GIL_DISABLED"):
    raise SystemExit(
        "group-coordinator needs a Python with the GIL, which guards the state of its native cores, and "
        f"{sys.executable} is a free-threaded build. Use the ordinary build of the same version"
    )


def native(name: str, folder: str) -> Extension:
    """Return the abi3 extension `name`, built from all C++ files in `folder`."""
    sources = sorted(
        {FORCED_UNWIND, *(str(path.relative_to(HERE)) for path in (HERE / folder).rglob("*.cpp"))}
    )
    headers = sorted(str(path.relative_to(HERE)) for path in (HERE / folder).rglob("*.hpp"))
    return Extension(
        name,
        sources=sources,
        depends=headers,
        language="c++",
        py_limited_api=True,
        define_macros=[("Py_LIMITED_API", "0x030B0000")],
        extra_compile_args=[
            "-std=c++20",
            "-O3",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Wno-missing-field-initializers",
            "-fvisibility=hidden",
            "-fno-plt",  # saves a cold cache line per call into Python: up to 2 us for a message after 2 ms idle
            "-fno-strict-aliasing",
            *STRICT,
        ],
        extra_link_args=["-Wl,--wrap=__gxx_personality_v0"],
    )


class ParallelBuild(build_ext):  # type: ignore[misc]  # setuptools gives it no type
    """Compiles the files of a core beside each other, one on each processor; setuptools compiles them in turn."""

    def build_extensions(self) -> None:
        """Build all extensions, as setuptools does."""
        compile_all = self.compiler.compile
        processors = min(len(os.sched_getaffinity(0)), MOST_COMPILERS)

        def compile_beside(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(processors) as pool:
                objects = pool.map(lambda source: compile_all([source], **options), sources)
                return [each for made in objects for each in made]

        self.compiler.compile = compile_beside
        super().build_extensions()


setup(
    cmdclass={"build_ext": ParallelBuild},
    ext_modules=[
        native("shm_broadcast._core", "shm_broadcast/csrc"),
        native("device_comm._core", "device_comm/csrc"),
    ],
    options={
        "bdist_wheel": {"py_limited_api": "cp311"},
        # Tests link the object files of the reductions, which take most of the time of a build.
        "build_ext": {"build_temp": "build/objects"},
    },
)
