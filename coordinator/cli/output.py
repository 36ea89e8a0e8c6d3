"""Print what a command has found, also to somebody who stops reading before its end, as `head` does."""

from __future__ import annotations

import os
import sys

__all__ = ["write_out"]


def write_out(content: str | bytes) -> bool:
    """Write to standard output at once; return False once whoever read it has gone, which is no failure of a command.

    From then on all output is dropped, so that nothing fails again when the interpreter ends.
    """
    try:
        if isinstance(content, str):
            sys.stdout.write(content)
        else:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
        return False
    return True
