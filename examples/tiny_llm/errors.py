"""The error class that the demo shows without a traceback."""

__all__ = ["DemoError"]


class DemoError(Exception):
    """A mistake that the user can correct: an option, a file, or a model that does not fit the layout."""
