"""Negative controls: kernels with a planted mistake, and an input that is wrong. Their results must be noticed.

A mistake in a protocol is noticed only where one rank is late at the wrong moment, which may never happen by itself. So
`variants/late_rank.patch` makes rank 1 late wherever the protocol lets a rank be late: before it pushes, between two
words of a vector, which need not arrive together, before it takes what others pushed, and before it reads their inputs.
Right kernels must bear that; each mistake then gives a wrong result or a rank that waits in vain.
"""

from __future__ import annotations

import dataclasses

from tests.gpu.patches import patched_source

__all__ = ["CONTROLS", "DELAYS_ALONE", "Control"]

DELAYS_ALONE = "delays alone"


@dataclasses.dataclass(frozen=True)
class Control:
    """A group of two ranks with a mistake.

    Attributes:
        limits: The largest call of every algorithm, in bytes: a policy.
        calls: Bytes of the all-reduces of a graph.
        mistake: A patch of `tests/native/cuda/mutations`, or none.
        lie: Added to rank 1's number when it makes its input.
        is_late: Whether rank 1 is late.
    """

    limits: dict[str, int]
    calls: tuple[int, ...]
    mistake: str = ""
    lie: int = 0
    is_late: bool = True

    def source(self) -> str:
        """Return the source of the kernels."""
        # The delays come last: they must fit whatever the mistakes leave of the kernels.
        return patched_source(
            *([self.mistake] if self.mistake else []), *(["late_rank"] if self.is_late else [])
        )


_LIMITS = {"push_one_shot": 1024, "push_two_shot": 4096, "pull_one_shot": 16384, "pull_two_shot": 65536}
# With several calls of one size, each reads the arena that the last but one has cleared.
_PUSHES = (512,) * 6
_ALL = (512, 512, 512, 2048, 2048, 2048, 8192, 8192, 32768)
# Rank 0 must overwrite its input while rank 1 reads it. Any other call of the replay would make rank 0 wait for rank 1.
_ONE_PULL = (8192,)

CONTROLS = {
    DELAYS_ALONE: Control(_LIMITS, _ALL),
    "clear_dropped": Control(_LIMITS, _PUSHES, "clear_dropped"),
    "phase_forced_to_0": Control(_LIMITS, _PUSHES, "phase_forced_to_0"),
    "one_word_unchecked": Control(_LIMITS, _PUSHES, "one_word_unchecked"),
    "end_barrier_dropped": Control(_LIMITS, _ONE_PULL, "end_barrier_dropped"),
    "wrong_input": Control(_LIMITS, _ALL, lie=7, is_late=False),
}
"""By name. The first one has no mistake: nothing may be reported of it."""
