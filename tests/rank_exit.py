"""How the body of a rank, or of a child it forked, ends its process as a program does."""

__all__ = ["RankExit"]


class RankExit(SystemExit):
    """Raised to end the process of a rank as `sys.exit` does; any other exception is only reported as a failure."""
