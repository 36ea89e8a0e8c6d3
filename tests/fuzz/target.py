"""What the fuzzer knows of one decoder."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Target"]


def _nothing() -> None:
    pass


@dataclass
class Target:
    """One decoder.

    Attributes:
        name: Its name on the command line.
        seeds: Valid messages.
        run: Decodes one input; it gets the number of the input as well.
        errors: With these it may refuse one.
        repair: Mends what would be refused at once, as a checksum; it gets the input and its number.
        is_view: Whether `run` gets a view of a block of exactly the size of the input: the sanitizer then sees who
            reads one byte beyond it, which `bytes` hide, as a zero follows them.
        series: How many inputs, from a multiple of this number on, meet what the earlier of them have changed.
        is_fixed: Whether inputs keep the size of their seed.
        close: Gives back what the target holds.
        stand_ins: Python functions that the decoder calls in place of its own; each must be entered.
        results: What must come out of some thousand inputs: the names of errors, "accepted", and those in `met`.
        met: How often the native code gave which result, by a name that `run` chooses.
    """

    name: str
    seeds: Sequence[bytes]
    run: Callable[[Any, int], object]
    errors: tuple[type[Exception], ...]
    repair: Callable[[bytes, int], bytes] | None = None
    is_view: bool = False
    series: int = 1
    is_fixed: bool = False
    close: Callable[[], object] = _nothing
    stand_ins: Sequence[Callable[..., object]] = ()
    results: Sequence[str] = ("accepted",)
    met: Counter[str] = field(default_factory=Counter)
