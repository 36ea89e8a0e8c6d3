"""The error classes that the demo shows without a traceback."""

__all__ = ["DemoError", "RunError"]


class DemoError(Exception):
    """A mistake that the user can correct: an option, a file, or a model that does not fit the layout."""


class RunError(Exception):
    """A run that has failed though nothing was wrong with what the user asked for."""
