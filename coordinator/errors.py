"""All error classes of this project; `shm_broadcast.errors` documents each."""

from shm_broadcast.errors import (
    CapabilityError,
    ClosedError,
    CommError,
    CommTimeoutError,
    CudaError,
    DecodeError,
    DisagreementError,
    ExcludedError,
    GroupBrokenError,
    InternalError,
    NativeError,
    NcclError,
    PeerLostError,
    SettingsError,
    StaleGraphError,
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
    "ExcludedError",
    "GroupBrokenError",
    "InternalError",
    "NativeError",
    "NcclError",
    "PeerLostError",
    "SettingsError",
    "StaleGraphError",
    "UsageError",
]
