"""Whether `torch.compile` has run in this process, which changes where Python runs signal handlers.

With its first function it installs a frame evaluator for the rest of the process's life. Python then runs a handler
also between the return of a function and the assignment of its result. If the handler raises there, the caller loses
the result, such as a message (`shm_broadcast/DESIGN.md`, R14), and a later test in the same process fails for that.
"""

import sys

__all__ = ["COMPILED", "frames_compiled"]

COMPILED = (
    "torch.compile has run in a process that other tests use; do this with `run_ranks` or the fixture `compilers2`; "
    "tests/frame_evaluator.py says why"
)
"""What a test is told that leaves more of `frames_compiled` than it found."""


def frames_compiled() -> int:
    """Return how many functions torch has compiled in this process. `torch._dynamo.reset` does not change this."""
    module = sys.modules.get("torch._dynamo.utils")
    return 0 if module is None else int(module.counters["frames"]["total"])
