"""Give decoders changed messages: `python -m tests.fuzz.driver codec --inputs 10000000`.

Input `number` of a target is the same in every run. The file behind `--input-file` always holds the number, the size
and the bytes of the input that is being decoded: if the process dies, it is there.
"""

import argparse
import functools
import gc
import importlib.machinery
import importlib.util
import mmap
import os
import random
import struct
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fuzz.builds import build_inputs
from tests.fuzz.target import Target
from tests.fuzz.targets import TARGETS

__all__ = ["CURRENT", "FuzzError", "Mutator", "again", "fuzz"]

CURRENT = struct.Struct("=QQ")
"""What stands before the bytes of the current input: its number and its size."""
ROOM = 1 << 16
"""The longest input; the seeds are far shorter, as most of a long message is data."""


class FuzzError(AssertionError):
    """A decoder ended otherwise than with an object or its own error."""


class Mutator:
    """Makes the inputs of one target, and gives them to its decoder."""

    def __init__(
        self, seeds: Sequence[bytes], folder: Path, input_file: Path | None = None, *, is_fixed: bool = False
    ) -> None:
        """Compile the native part into `folder`, unless it is there."""
        if max(map(len, seeds)) > ROOM:
            raise ValueError("a seed is longer than the longest input")
        self._native = _loaded(build_inputs(folder))
        if input_file is None:
            self._memory = mmap.mmap(-1, CURRENT.size + ROOM)
        else:
            with input_file.open("w+b") as file:
                file.truncate(CURRENT.size + ROOM)
                self._memory = mmap.mmap(file.fileno(), CURRENT.size + ROOM)
        self._how = tuple(seeds), self._memory, is_fixed

    def input(self, number: int) -> bytes:
        """Return input `number`; the first ones are the seeds as they are."""
        data: bytes = self._native.make(*self._how, number)
        return data

    def decode(self, target: Target, first: int, inputs: int) -> dict[str, int]:
        """Do what `fuzz` does."""
        try:
            accepted, refusals = self._native.decode(
                *self._how, first, inputs, target.repair, target.run, target.errors, target.is_view
            )
        except Exception as error:
            number, size = CURRENT.unpack_from(self._memory)
            data = self._memory[CURRENT.size : CURRENT.size + min(size, 300)]
            raise FuzzError(
                f"{target.name}, input {number}: {type(error).__name__}: {error}; it began with {data.hex()}. "
                f"Again: {again(target, number)}"
            ) from error
        counts = {cls.__name__: count for cls, count in refusals}
        return counts | ({"accepted": accepted} if accepted else {})


@functools.cache
def _loaded(library: Path) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("inputs", str(library))
    spec = importlib.util.spec_from_file_location("inputs", library, loader=loader)
    if spec is None:
        raise ImportError(f"{library} is no module")
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def again(target: Target, number: int) -> str:
    """Return the command that decodes input `number` after those that have changed what it meets."""
    earlier = number % target.series
    return f"python -m tests.fuzz.driver {target.name} --first {number - earlier} --inputs {earlier + 1}"


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
        mutator = Mutator(target.seeds, folder, input_file, is_fixed=target.is_fixed)
        return mutator.decode(target, first, inputs)
    finally:
        target.close()


def main() -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.driver", description=__doc__)
    parser.add_argument("targets", nargs="+", choices=sorted(TARGETS))
    parser.add_argument(
        "--inputs", type=int, default=100_000, help="how many inputs for each target (100000)"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first input (0)")
    parser.add_argument("--input-file", type=Path, default=None, help="where the current input is kept")
    parser.add_argument(
        "--built", type=Path, default=None, help="a folder in which the inputs' maker is kept"
    )
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    random.seed(0)
    gc.freeze()  # what was imported is not looked through again for each collection
    gc.set_threshold(10_000)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for name in chosen.targets:
            start, used = time.monotonic(), time.process_time()
            built = chosen.built or Path(folder)
            counts = fuzz(TARGETS[name](), built, chosen.inputs, chosen.first, chosen.input_file)
            seconds, used = time.monotonic() - start, time.process_time() - used
            print(
                f"{name}: {chosen.inputs} inputs in {seconds:.0f} s, {used:.0f} s of processor time: {counts} passed",
                flush=True,
            )
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
