"""Options of an interpreter in which every warning is an error."""

import sys

__all__ = ["STRICT"]

STRICT = [
    sys.executable,
    "-W",
    "error",
    # torch says so of Python 3.13.0 whenever it compiles; nothing of ours could end it.
    "-W",
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
]
"""A command that runs Python so; a module or a code follows."""
