"""What the fuzzer knows of one decoder."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

__all__ = ["Target"]


def _unchanged(data: bytes, number: int) -> bytes:
    return data


def _nothing() -> None:
    pass


@dataclass
class Target:
    """One decoder.

    Attributes:
        name: Its name on the command line.
        seeds: Valid messages.
        run: Decodes one input.
        errors: With these it may refuse one.
        repair: Mends what would be refused at once, as a checksum; it gets the input and its number.
        is_fixed: Whether inputs keep the size of their seed.
        close: Gives back what the target holds.
        stand_ins: Python functions that the decoder calls in place of its own; each must be entered.
        results: What must come out of some thousand inputs: the names of errors, "accepted", and those in `met`.
        met: How often the native code gave which result, by a name that `run` chooses.
    """

    name: str
    seeds: Sequence[bytes]
    run: Callable[[bytes], object]
    errors: tuple[type[Exception], ...]
    repair: Callable[[bytes, int], bytes] = _unchanged
    is_fixed: bool = False
    close: Callable[[], object] = _nothing
    stand_ins: Sequence[Callable[..., object]] = ()
    results: Sequence[str] = ("accepted",)
    met: Counter[str] = field(default_factory=Counter)
