"""Give decoders changed messages: `python -m tests.fuzz.driver codec --inputs 10000000`.

Input `number` of a target is the same in every run. The file behind `--input-file` always holds the input that is being
decoded: if the process dies, it is there.
"""

import argparse
import ctypes
import mmap
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

__all__ = ["FuzzError", "Mutator", "fuzz"]

SOURCE = Path(__file__).with_name("mutate.cpp")
ROOM = 1 << 16
"""The longest input; the seeds are far shorter, as most of a long message is data."""


class FuzzError(AssertionError):
    """A decoder ended otherwise than with an object or its own error."""


class Mutator:
    """Makes the inputs of one target.

    Attributes:
        memory: Where the current input stands, behind its length.
    """

    def __init__(self, seeds: Sequence[bytes], folder: Path, input_file: Path | None = None) -> None:
        """Compile the mutations into `folder`, unless they are there."""
        library = folder / "mutate.so"
        if not library.exists():
            command = [
                "g++",
                "-std=c++20",
                "-O2",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-shared",
                "-fPIC",
                str(SOURCE),
            ]
            subprocess.run([*command, "-o", str(library)], check=True, timeout=120)
        self._mutate = ctypes.CDLL(str(library)).mutate
        self._mutate.restype = ctypes.c_size_t
        kinds: list[Any] = [ctypes.c_uint64, ctypes.c_char_p, ctypes.c_size_t]
        self._mutate.argtypes = [*kinds, *kinds[1:], ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        if input_file is None:
            self.memory = mmap.mmap(-1, ROOM)
        else:
            with input_file.open("w+b") as file:
                file.truncate(ROOM)
                self.memory = mmap.mmap(file.fileno(), ROOM)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._seeds = list(seeds)

    def input(self, number: int, *, is_fixed: bool) -> bytes:
        """Return input `number`; the first ones are the seeds as they are."""
        seeds = self._seeds
        seed = seeds[number % len(seeds)]
        if number < len(seeds):
            return seed
        other = seeds[number // 7 % len(seeds)]
        size = self._mutate(number, seed, len(seed), other, len(other), self._address, ROOM, is_fixed)
        return self.memory[:size]


def fuzz(
    target: Target, folder: Path, inputs: int, first: int = 0, input_file: Path | None = None
) -> dict[str, int]:
    """Decode `inputs` inputs from number `first` on.

    Returns:
        How often a decoder returned or raised what: the name of the error, or "accepted".

    Raises:
        FuzzError: A decoder raised another error; the text holds the number and the input.
    """
    try:
        return _fuzz(target, Mutator(target.seeds, folder, input_file), range(first, first + inputs))
    finally:
        target.close()


def _fuzz(target: Target, mutator: Mutator, numbers: range) -> dict[str, int]:
    counts: dict[str, int] = {}
    allowed, run, repair, is_fixed = target.errors, target.run, target.repair, target.is_fixed
    for number in numbers:
        data = repair(mutator.input(number, is_fixed=is_fixed), number)
        try:
            run(data)
            end = "accepted"
        except allowed as error:
            end = type(error).__name__
        except Exception as error:
            raise FuzzError(
                f"{target.name}, input {number}: {type(error).__name__}: {error}; it was {data[:300].hex()}. Again: "
                f"python -m tests.fuzz.driver {target.name} --first {number} --inputs 1"
            ) from error
        counts[end] = counts.get(end, 0) + 1
    return counts


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.driver", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="how many inputs for each target (100000)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first input (0)")
    parser.add_argument("--input-file", type=Path, default=None, help="where the current input is kept")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for name in chosen.targets:
            start = time.monotonic()
            counts = fuzz(TARGETS[name](), Path(folder), chosen.inputs, chosen.first, chosen.input_file)
            seconds = time.monotonic() - start
            print(f"{name}: {chosen.inputs} inputs in {seconds:.0f} s: {counts} passed", flush=True)
    sys.stdout.flush()
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
