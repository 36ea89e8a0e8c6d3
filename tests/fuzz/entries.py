"""Which functions of a decoder the inputs enter: a decoder that is given nothing raises nothing, and looks sound."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.driver import fuzz
from tests.fuzz.target import Target

__all__ = ["check_entered", "code_of"]


def code_of(function: Any) -> CodeType | None:
    """Return the code of a Python function, a method or a partial; None for a native one."""
    function = getattr(function, "func", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code if isinstance(code, CodeType) else None


def check_entered(
    target: Target, decoder: Sequence[Callable[..., object]], folder: Path, inputs: int
) -> dict[str, int]:
    """Decode `inputs` inputs as `fuzz` does, and return the same.

    Raises:
        AssertionError: A function of `decoder` or a stand-in was never entered, or a result of the target never came.
    """
    codes = {code for function in (*decoder, *target.stand_ins) if (code := code_of(function))}
    missed = set(codes)

    def enter(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            missed.discard(frame.f_code)

    before = sys.getprofile()
    sys.setprofile(enter)
    try:
        counts = fuzz(target, folder, inputs)
    finally:
        sys.setprofile(before)
    lines = sorted(f"{Path(code.co_filename).name}:{code.co_firstlineno} {code.co_name}" for code in missed)
    assert not lines, f"{target.name}: no input entered {', '.join(lines)}"
    absent = sorted(set(target.results) - counts.keys() - (+target.met).keys())
    assert not absent, f"{target.name}: no input had the result {', '.join(absent)}"
    return counts
