"""Options of an interpreter in which every warning is an error."""

import sys

__all__ = ["STRICT", "WARNINGS"]

WARNINGS = (
    "error",
    # torch says so of Python 3.13.0 whenever it compiles; nothing of ours could end it.
    "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning",
)
"""What `python -W` gets."""

STRICT = [sys.executable, *(word for each in WARNINGS for word in ("-W", each))]
"""A command that runs Python so; a module or a code follows."""
