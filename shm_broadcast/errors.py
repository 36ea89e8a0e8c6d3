"""Define every error that the three packages raise on purpose.

The class says who is at fault: the caller, a peer, the clock, the hardware, or this project. Programs read the
fields, people read the text. This module imports nothing from the project.
"""

from collections.abc import Mapping, Sequence
from functools import partial

__all__ = [
    "CapabilityError",
    "ClosedError",
    "CommError",
    "CommTimeoutError",
    "CudaError",
    "DecodeError",
    "DisagreementError",
    "ExcludedError",
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
    """The caller made a mistake: a bad rank, shape, dtype or order.

    Nothing was sent; the group stays usable. A refused collective still counts in the order of calls: if the
    ranks share memory, the other ranks' calls raise `DisagreementError` with the reason, and the next calls
    match again.

    Attributes:
        is_told: Whether a group has told its other ranks, or has nothing to tell them.
    """

    is_told: bool = False


class SettingsError(CommError, ValueError):
    """A setting is unknown, malformed, or contradicts another setting. The group was not created."""


class ClosedError(UsageError):
    """The object was closed or destroyed by this process, or its queue was closed by the writer."""


class CommTimeoutError(CommError, TimeoutError):
    """The deadline passed. The group is unusable afterwards unless the method says otherwise.

    Attributes:
        missing: Global ranks that had not arrived at the deadline, ascending. Empty if every rank arrived
            but the transfer did not finish.
        stacks: Python stacks of the ranks' processes, or why there are none, by global rank; -1 is a queue's writer
            that has no rank. Only the rank that was the first to judge has asked for them: empty on all others, and
            if the setting `stack_signal` is 0.
    """

    def __init__(self, message: str, *, missing: Sequence[int] = ()) -> None:
        """Store the text and the ranks that did not arrive."""
        super().__init__(message)
        self.missing: tuple[int, ...] = tuple(missing)
        self.stacks: dict[int, str] = {}


class ExcludedError(CommError):
    """The other ranks go on without this one: it came too late, or their new layout has no place for it.

    This rank's groups stay as they were: broken, or usable by no other rank. It can only exit, or join anew.
    """


class StaleGraphError(UsageError):
    """The graph was captured with groups that newer groups have replaced since: capture it again, with those.

    Attributes:
        captured_epoch: The epoch of the groups with which the graph was captured.
        current_epoch: The epoch of the groups that have replaced them.
    """

    def __init__(self, captured_epoch: int, current_epoch: int, *, group: str = "") -> None:
        """Store the epochs; `group` is the name of a group of the capture."""
        where = f"a replay on {group!r}" if group else "a replay"
        super().__init__(
            f"{where}: the graph was captured in epoch {captured_epoch}, and the groups of epoch {current_epoch} have "
            "taken the place of those since; capture it again"
        )
        self.captured_epoch: int = captured_epoch
        self.current_epoch: int = current_epoch

    def __reduce__(self) -> tuple[object, ...]:
        """Return how a copy is made: it gets this error's text, as the constructor would name no group."""
        return type(self), (self.captured_epoch, self.current_epoch), {**self.__dict__, "args": self.args}


class PeerLostError(CommError, ConnectionError):
    """A peer's process ended, or the peer left the group. The group is unusable afterwards.

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
        views: What each rank holds, by global rank. Ranks that have not reported are absent.
    """

    def __init__(self, message: str, *, views: Mapping[int, str] | None = None) -> None:
        """Store the text and each rank's view."""
        super().__init__(message)
        self.views: dict[int, str] = dict(views or {})


class CapabilityError(CommError):
    """The hardware, driver, a library or the available memory cannot do what was asked.

    Attributes:
        requirement: What is missing, in a few words.
    """

    def __init__(self, message: str, *, requirement: str = "") -> None:
        """Store the text and the unmet requirement."""
        super().__init__(message)
        self.requirement = requirement


class DecodeError(CommError):
    """The bytes are not a valid message, or need a type that this process does not know. The group stays usable."""


class NativeError(CommError):
    """A native library failed.

    Attributes:
        library: Name of the library, with its version if known.
        function: The function that failed.
        code: The error code, or None if the library gives only a text.
    """

    def __init__(self, message: str, *, library: str, function: str, code: int | None = None) -> None:
        """Store the text and its source."""
        super().__init__(message)
        self.library = library
        self.function = function
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        """Return how a copy is made, in this process or by an engine that carries errors between processes."""
        made = partial(type(self), library=self.library, function=self.function, code=self.code)
        return made, (str(self),), self.__dict__


class NcclError(NativeError):
    """NCCL returned an error."""


class CudaError(NativeError):
    """The CUDA driver or run-time returned an error."""


class InternalError(CommError):
    """An internal invariant broke: this is a bug in this project, please report it."""
