"""The errors of this project as torch's callers expect them: each is a `DistBackendError`, too, a `RuntimeError`."""

from __future__ import annotations

from typing import Final

import torch.distributed as dist

from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    DisagreementError,
    GroupBrokenError,
    NativeError,
    PeerLostError,
    UsageError,
)


class BackendError(CommError, dist.DistBackendError):
    """Any other error."""


class BackendTimeoutError(CommTimeoutError, dist.DistBackendError):
    """The deadline passed; `.missing` names the ranks that did not arrive."""


class BackendPeerLostError(PeerLostError, dist.DistBackendError):
    """A rank is gone; `.peers` names it."""


class BackendBrokenError(GroupBrokenError, dist.DistBackendError):
    """An earlier failure made the group unusable."""


class BackendClosedError(ClosedError, dist.DistBackendError):
    """The process group was destroyed."""


class BackendUsageError(UsageError, dist.DistBackendError):
    """The caller made a mistake; nothing was sent."""


class BackendDisagreementError(DisagreementError, dist.DistBackendError):
    """The ranks made different calls, or hold different tensors."""


class BackendCapabilityError(CapabilityError, dist.DistBackendError):
    """The machine cannot do what was asked."""


class BackendNativeError(NativeError, dist.DistBackendError):
    """torch or another library failed."""


# A subclass stands before its base.
_CLASSES: Final[tuple[tuple[type[CommError], type[CommError]], ...]] = (
    (ClosedError, BackendClosedError),
    (UsageError, BackendUsageError),
    (CommTimeoutError, BackendTimeoutError),
    (PeerLostError, BackendPeerLostError),
    (GroupBrokenError, BackendBrokenError),
    (DisagreementError, BackendDisagreementError),
    (CapabilityError, BackendCapabilityError),
    (NativeError, BackendNativeError),
    (CommError, BackendError),
)


def for_torch(error: CommError, within_s: float | None = None) -> CommError:
    """Return `error` with the same text and fields as an error that is torch's, too.

    Args:
        error: An error of this project.
        within_s: The deadline of the call in seconds. The text of an error for a deadline that has passed begins as
            Gloo's does.
    """
    if isinstance(error, dist.DistBackendError):
        return error
    made = next(there for here, there in _CLASSES if isinstance(error, here))
    # Not by the constructor: the fields of the classes differ.
    result = made.__new__(made)
    text = str(error)
    if isinstance(error, CommTimeoutError) and within_s is not None:
        text = f"group_coordinator: Timed out waiting {round(within_s * 1000)}ms: {text}"
    result.args = (text,)
    result.__dict__.update(error.__dict__)
    return result


__all__ = ["for_torch"]
