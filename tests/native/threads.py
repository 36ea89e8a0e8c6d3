"""How a protocol's driver, with threads in the place of processes, is compiled and run under the sanitizers."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

__all__ = ["ASAN", "ROOT", "TSAN", "built", "run", "weakened"]

ROOT = Path(__file__).parents[2]
TSAN = ("-fsanitize=thread", "-Wno-tsan")  # it knows no fences: none of them guards data
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


def built(folder: Path, sources: tuple[Path, ...], options: tuple[str, ...]) -> Path:
    """Compile a driver, the first of `sources`, into `folder`."""
    program = folder / sources[0].stem
    compiler = shutil.which("g++") or "g++"
    subprocess.run(
        [compiler, *FLAGS, *options, *map(str, sources), "-o", str(program)], check=True, timeout=120
    )
    return program


def run(program: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """Run the driver; where the sanitizer cannot bear randomised addresses, without them."""
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
    """Return a header with the memory order behind `pattern`, that of `edge`, relaxed."""
    weak, count = re.subn(pattern, r"\g<1>relaxed", source)
    assert count == 1, "the header has changed: say where the edge is now"
    assert f"SYNC {edge}" in source
    return weak
