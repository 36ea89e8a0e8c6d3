"""Compile and run drivers that use threads instead of processes to test a protocol under the sanitizers."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["ASAN", "ROOT", "TSAN", "built", "run", "weakened"]

ROOT = Path(__file__).parents[2]
TSAN = ("-fsanitize=thread", "-Wno-tsan")  # it does not know fences, but no fence guards data
ASAN = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS")
FLAGS = (
    "-std=c++20",
    "-O1",
    "-g1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-missing-field-initializers",
    "-pthread",
)


def built(folder: Path, sources: tuple[Path, ...], options: tuple[str, ...], compiler: str = "g++") -> Path:
    """Compile the first of `sources`, which is the driver, into `folder`."""
    program = folder / sources[0].stem
    subprocess.run(
        [shutil.which(compiler) or compiler, *FLAGS, *options, *map(str, sources), "-o", str(program)],
        check=True,
        timeout=120,
    )
    return program


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the driver. Disable address randomisation if the sanitizer fails with it."""
    command = [str(program), *map(str, words)]
    environment = {"TSAN_OPTIONS": "halt_on_error=1", "ASAN_OPTIONS": "detect_leaks=0"}
    for prefix in ([], ["setarch", platform.machine(), "-R"]):
        outcome = subprocess.run(
            [*prefix, *command], env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        if "unexpected memory mapping" not in outcome.stderr:
            break
    return outcome


def weakened(source: str, edge: str, pattern: str) -> str:
    """Return a header in which the memory order behind `pattern`, which belongs to `edge`, is relaxed."""
    weak, count = re.subn(pattern, r"\g<1>relaxed", source)
    assert count == 1, "the header has changed: say where the edge is now"
    assert f"SYNC {edge}" in source
    return weak
