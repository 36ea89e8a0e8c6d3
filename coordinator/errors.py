"""The errors of this project, on one page: see `shm_broadcast.errors` for what each means."""

from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    CudaError,
    DecodeError,
    DisagreementError,
    GroupBrokenError,
    InternalError,
    NativeError,
    NcclError,
    PeerLostError,
    SettingsError,
    UsageError,
)

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
