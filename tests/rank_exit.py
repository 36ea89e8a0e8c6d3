"""End a rank, or a child that it forked, in the way in which a program ends."""

__all__ = ["RankExit"]


class RankExit(SystemExit):
    """An exception that ends a rank's process as `sys.exit` does. Any other exception is reported as a failure."""
