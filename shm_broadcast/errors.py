"""Every error that this project raises on purpose; the root of the tree for all three packages.

An error names who is at fault: the caller, a peer, the clock, the hardware, or us. It carries what a
program needs as fields and what a person needs as text. This module imports nothing of the project.
"""

from collections.abc import Mapping, Sequence

__all__ = [
    "CapabilityError",
    "ClosedError",
    "CommError",
    "CommTimeoutError",
    "CudaError",
    "DecodeError",
    "DisagreementError",
    "GroupBrokenError",
    "InternalError",
    "NativeError",
    "NcclError",
    "PeerLostError",
    "SettingsError",
    "UsageError",
]


class CommError(Exception):
    """Base of every error of this project."""


class UsageError(CommError, ValueError):
    """The caller's mistake: a bad rank, shape, dtype or order.

    Nothing was sent, the group is intact.
    """


class SettingsError(CommError, ValueError):
    """A setting is unknown, malformed, or contradicts another one. The group was not created."""


class ClosedError(UsageError):
    """The object was closed or destroyed by this process; also a call on it afterwards."""


class CommTimeoutError(CommError, TimeoutError):
    """The deadline passed. The group is unusable afterwards, except where a method says otherwise.

    Attributes:
        missing: Global ranks that had not arrived when the deadline passed, ascending. Empty when
            every rank arrived but the transfer did not finish.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        """Store the text and the ranks that did not arrive."""
        super().__init__(message)
        self.missing: tuple[int, ...] = tuple(missing)


class PeerLostError(CommError, ConnectionError):
    """A peer's process ended, or it left the group. The group is unusable afterwards.

    Attributes:
        peers: Global ranks that are gone, ascending.
    """

    def __init__(self, message: str, *, peers: Sequence[int] = ()) -> None:
        """Store the text and the ranks that are gone."""
        super().__init__(message)
        self.peers: tuple[int, ...] = tuple(peers)


class GroupBrokenError(CommError):
    """An earlier failure made the group unusable; `__cause__` is that failure. Destroy the group."""


class DisagreementError(CommError):
    """Ranks hold different settings, rank lists, shapes or call orders.

    Attributes:
        views: What each rank holds, by global rank; ranks that said nothing yet are absent.
    """

    def __init__(self, message: str, *, views: Mapping[int, str] | None = None) -> None:
        """Store the text and each rank's view."""
        super().__init__(message)
        self.views: dict[int, str] = dict(views or {})


class CapabilityError(CommError):
    """The hardware, the driver, a library or the space at hand cannot do what was asked.

    Attributes:
        requirement: What is missing, in a few words.
    """

    def __init__(self, message: str, *, requirement: str = "") -> None:
        """Store the text and the unmet requirement."""
        super().__init__(message)
        self.requirement = requirement


class DecodeError(CommError):
    """Bytes that are no message of ours, or that need a type unknown here. The group is intact."""


class NativeError(CommError):
    """A library below us failed.

    Attributes:
        library: Name of the library, with its version where known.
        function: The function that failed.
        code: Its error code, or None where it gives only a text.
    """

    def __init__(self, message: str, *, library: str, function: str, code: int | None = None) -> None:
        """Store the text and where it comes from."""
        super().__init__(message)
        self.library = library
        self.function = function
        self.code = code


class NcclError(NativeError):
    """NCCL returned an error."""


class CudaError(NativeError):
    """The CUDA driver or run-time returned an error."""


class InternalError(CommError):
    """An invariant of ours broke: a bug of this project, please report it."""
