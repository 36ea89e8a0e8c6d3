"""End a rank, or a child that it forked, as a program ends."""

__all__ = ["RankExit"]


class RankExit(SystemExit):
    """Raised to end a rank's process as `sys.exit` does; any other exception is reported as a failure."""
