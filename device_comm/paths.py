"""Which way a call takes, in words: for benchmarks, logs and bug reports."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class CallPath:
    """The way of one call.

    Attributes:
        algorithm: What carries it, such as "one-shot" or "nccl".
        reason: Why, with the number that decided.
    """

    algorithm: str
    reason: str
