"""The one error that the demo shows without a traceback."""

__all__ = ["DemoError"]


class DemoError(Exception):
    """What the person at the keyboard can mend: an option, a file, a model that does not fit the layout."""
