"""Measure which lines of the decoders the inputs reach: `python -m tests.fuzz.coverage` writes `coverage.md`."""

import argparse
import dis
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from device_comm.cpu.status_board import StatusBoard
from shm_broadcast import codec, endpoint, handle, segment
from shm_broadcast.codec import (
    adapters,
    enum_adapter,
    loaded,
    numpy_adapter,
    packages,
    records,
    registry,
    torch_adapter,
    zoneinfo_adapter,
)
from shm_broadcast.remote import ledger, reader, wire, writer
from tests.fuzz.builds import CORES, COUNTING, LOAD, ROOT, built_cores
from tests.fuzz.driver import fuzz
from tests.fuzz.entries import code_of
from tests.fuzz.targets import TARGETS

__all__ = ["LEAST", "MEASURED", "NATIVE", "PAGE", "PYTHON", "measure", "source_of"]

PAGE = Path(__file__).with_name("coverage.md")
LEAST = 0.95
"""Which part of each decoder's lines must be reached."""

PYTHON: dict[str, list[Any]] = {
    "codec": [
        codec.decode,
        codec.frame_length,
        codec.convert,
        codec.build_owned,
        *codec._builders.values(),
        adapters.expect,
        adapters.integers,
        adapters.checked_shape,
        enum_adapter._members,
        enum_adapter._is_composite,
        enum_adapter._loaded,
        loaded.find_class,
        loaded.is_loaded,
        registry._entry_named,
        packages.class_named,
        records._with_fields,
        records._with_data,
        records._refill,
        *zoneinfo_adapter.BUILDERS.values(),
        numpy_adapter._dtype_of,
        numpy_adapter._struct_of,
        *numpy_adapter.BUILDERS.values(),
        *numpy_adapter.DATA_BUILDERS.values(),
        *torch_adapter.BUILDERS.values(),
        *torch_adapter.DATA_BUILDERS.values(),
    ],
    "handle": [handle.QueueHandle.from_bytes, endpoint.RemoteEndpoint.__post_init__, endpoint.bind_host],
    "handover": [segment.Handover._answer, segment.Handover._give, segment.take_descriptor],
    "remote": [
        wire.unpack,
        wire.identity_of,
        ledger.Inbox.take,
        ledger.Ledger.acknowledge,
        reader.RemoteReader._hear,
        writer.RemoteWriter._hear,
        writer.RemoteWriter._greet,
    ],
    "board": [StatusBoard.arrivals, StatusBoard.failure_record, StatusBoard._decoded, StatusBoard.left],
}
"""By target: the functions that decode in Python."""

NATIVE: dict[str, dict[str, list[str]]] = {
    "codec": {
        "codec/decode.cpp": [""],
        "codec/decoder.hpp": [""],
        "codec/arrays.hpp": [""],
        "codec/numpy_arrays.cpp": ["numpy_build"],
        "codec/torch_tensors.cpp": ["torch_build"],
    },
    "ring": {
        "ring/ring.hpp": [
            "Ring::Ring",
            "::valid",
            "::next",
            "::record",
            "::payload",
            "::outstanding",
            "::position",
        ],
        "ring/receiving.cpp": ["take", "give_back", "decoded", "corrupt"],
        "ring/assembly.cpp": ["Assembly"],
    },
    "region": {
        "cpu/shared_region.hpp": ["SharedRegion::SharedRegion", "::valid", "::fits", "::slot", "::posted"]
    },
    "board": {"cpu/status_board.hpp": ["Board::"]},
    "channels": {"cpu/channels.hpp": ["Table::"]},
}
"""By target and file: parts of the names of the functions that decode; an empty one stands for all."""

MEASURED = [
    (name, language)
    for name in TARGETS
    for language, table in (("Python", PYTHON), ("C++", NATIVE))
    if name in table
]
"""Targets, and the languages in which each decodes."""


def of_python(name: str, inputs: int, built: Path) -> tuple[int, dict[str, list[int]]]:
    """Return how many lines target `name` has in Python, and by function those that `inputs` inputs do not reach.

    They are counted from the first line of the function, which is 1: what is changed above it does not move them.
    """
    lines: dict[CodeType, set[int]] = {}
    for function in PYTHON.get(name, []):
        for code in _codes(function):
            lines[code] = {
                line for _, line in dis.findlinestarts(code) if line and line != code.co_firstlineno
            }
    missed = {code: set(there) for code, there in lines.items()}

    def enter(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        return step if frame.f_code in missed else None

    def step(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        missed[frame.f_code].discard(frame.f_lineno)
        return step

    target = TARGETS[name]()
    before = sys.gettrace()
    sys.settrace(enter)
    try:
        fuzz(target, built, inputs)
    finally:
        sys.settrace(before)
    found = {
        f"{code.co_filename.rpartition('/')[2]} {code.co_name}": [
            line - code.co_firstlineno + 1 for line in sorted(left)
        ]
        for code, left in missed.items()
        if left
    }
    return sum(map(len, lines.values())), found


def _codes(function: Any) -> Iterator[CodeType]:
    code = code_of(function)
    pending = [] if code is None else [code]
    while pending:
        code = pending.pop()
        yield code
        pending += [each for each in code.co_consts if isinstance(each, CodeType)]


def of_native(name: str, inputs: int, folder: Path, built: Path) -> tuple[int, dict[str, list[int]]]:
    """Return the same for the native lines of target `name`.

    Args:
        name: The target.
        inputs: How many inputs it gets.
        folder: An empty folder, which takes what is counted.
        built: Where the cores that count are built, unless they are there; several processes may use it.
    """
    arguments = built_cores(built, COUNTING)
    command = [sys.executable, "-c", LOAD, *arguments, "--", "tests.fuzz.driver", name]
    command += ["--inputs", str(inputs), "--built", str(built)]
    # The counts go to a path below the folder that is as long as that of the object file.
    environ = {**os.environ, "GCOV_PREFIX": str(folder)}
    subprocess.run(command, check=True, cwd=ROOT, env=environ, stdout=subprocess.DEVNULL)
    counts: dict[tuple[str, int], int] = {}
    for data in folder.rglob("*.gcda"):
        notes = data.with_suffix(".gcno")
        notes.symlink_to("/" / notes.relative_to(folder))
        shown = subprocess.run(
            ["gcov", "--json-format", "--stdout", str(data)],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
        for report in filter(None, map(str.strip, shown.stdout.splitlines())):
            for file in json.loads(report)["files"]:
                _add(counts, file, NATIVE[name])
    missed: dict[str, list[int]] = {}
    for (path, line), count in sorted(counts.items()):
        if not count:
            missed.setdefault(path, []).append(line)
    return len(counts), missed


def source_of(name: str, language: str) -> str:
    """Return a digest of what a row counts, and of the function that makes the target and its seeds.

    A row is stale as soon as it differs. Of C++ the whole files count; where a function of Python stands does not.
    """
    if language == "Python":
        # What a process has loaded before may name a function once more.
        codes = {code for function in PYTHON[name] if (code := code_of(function))}
        texts = sorted(code.co_filename.rpartition("/")[2] + inspect.getsource(code) for code in codes)
    else:
        texts = [
            f"{file}{parts}{(folder / file).read_text()}"
            for file, parts in NATIVE[name].items()
            for folder in CORES.values()
            if (folder / file).exists()
        ]
    texts.append(inspect.getsource(TARGETS[name]))
    return blake2b("\0".join(texts).encode(), digest_size=4).hexdigest()


def measure(
    name: str, language: str, inputs: int, folder: Path, built: Path
) -> tuple[int, dict[str, list[int]]]:
    """Return what `of_python` or `of_native` returns."""
    folder.mkdir(exist_ok=True)
    if language == "Python":
        return of_python(name, inputs, built)
    return of_native(name, inputs, folder, built)


def _add(counts: dict[tuple[str, int], int], file: Any, wanted: dict[str, list[str]]) -> None:
    path = file["file"].rpartition("csrc/")[2]
    if path not in wanted:
        return
    spans = [
        range(function["start_line"], function["end_line"] + 1)
        for function in file["functions"]
        if any(part in function["demangled_name"] for part in wanted[path])
    ]
    for line in file["lines"]:
        if any(line["line_number"] in span for span in spans):
            key = path, line["line_number"]
            counts[key] = counts.get(key, 0) + line["count"]


def main() -> int:
    """Measure every target, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.coverage", description=__doc__)
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="how many inputs for each target (100000)"
    )
    inputs = parser.parse_args().inputs
    rows = []
    with tempfile.TemporaryDirectory(prefix="fuzz-") as place:
        built = Path(place) / "built"
        for name, language in MEASURED:
            counted = Path(place) / f"{name} {language}"
            total, missed = measure(name, language, inputs, counted, built)
            reached = total - sum(map(len, missed.values()))
            left = "; ".join(f"{where}: {', '.join(map(str, lines))}" for where, lines in missed.items())
            figures = f"{reached} of {total} | {reached / total:.1%}"
            rows.append(f"| {name} | {language} | {figures} | {left} | {source_of(name, language)} |")
            print(rows[-1], flush=True)
    PAGE.write_text(
        "# Lines of the decoders that the fuzzer reaches\n\n"
        f"`python -m tests.fuzz.coverage` measured this with {inputs:,} inputs for each target.\n"
        "`coverage.py` names the functions that count as a decoder. Lines of Python are counted from the first line\n"
        "of their function. The source is a digest of the decoder and its seeds: where it differs, measure again.\n\n"
        "| target | language | lines | reached | not reached | source |\n|---|---|---|---|---|---|\n"
        + "\n".join(rows)
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
