"""Settings of the CUDA device plane. The creator of a group passes them in; nothing here reads the environment."""

from __future__ import annotations

import math
from typing import Final

import msgspec

from shm_broadcast.errors import SettingsError

__all__ = [
    "MAX_CUSTOM_BYTES",
    "MIN_ARENA_BYTES",
    "MIN_MULTIMEM_ONE_SHOT_BYTES",
    "PER_RANK_CUDA_FIELDS",
    "CudaSettings",
    "cuda_settings",
]

PER_RANK_CUDA_FIELDS: Final = frozenset({"policy_file", "nccl_library", "kernel_cache"})
"""Fields that may differ between ranks, because hosts keep files in different places. The content of the policy files
must be equal: the ranks compare its digest when a group is created."""

MIN_ARENA_BYTES: Final = 64 * 1024
"""Smallest arena: with less, not even the activations of a small batch fit into one push."""

MIN_MULTIMEM_ONE_SHOT_BYTES: Final = 256 * 1024
"""Smallest sum in the one-shot form of multimem: no published table has multimem sums of fewer bytes on 8 GPUs."""

MAX_CUSTOM_BYTES: Final = 1 << 30
"""Largest arena and staging area, so that a mistyped size does not take the memory that a model needs."""

_GRANULE: Final = 4096


class CudaSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the ranks of a group on CUDA devices must agree on, and the paths that are local to a rank.

    Attributes:
        custom_all_reduce: Whether our own kernels may be used. Without them NCCL carries everything; with
            `deterministic` it only moves data, and floats are summed in rank order afterwards.
        deterministic: Sum floats of any size in rank order with one rounding, so that the result for one row of a
            batch does not depend on the other rows. NCCL then never sums floats.
        dependent_launch: Whether our kernels may begin while the kernel before them on the stream ends (programmatic
            dependent launch, from sm_90 on). It changes no result.
        multimem: Whether sums of large messages may be made by the NVSwitch (multimem instructions, from sm_90 on). All
            ranks get the same bits, but the order of such a sum is not defined; never with `deterministic`.
        multimem_one_shot_bytes: Up to how many bytes sums of 256 KiB and more take the one-shot form of multimem, where
            `multimem` is used. Every rank then asks the switch for the whole sum, and **nothing promises that all ranks
            get the same bits**: use it only where a difference between ranks in the last bits does no harm. 0, the
            default, disables it. A multiple of 4096.
        arena_bytes: Bytes for one phase of a push; every group holds two arenas on each device. A larger message
            is split or goes through NCCL. A multiple of 4096.
        staging_bytes: Bytes, per group and device, for inputs that peers cannot map and for the results of pulls, and
            as many again where multimem is used. 0 disables both. A multiple of 4096.
        expert_arena_bytes: Bytes for one phase of an expert-parallel exchange; a group that dispatches with a stated
            capacity holds two on each device. A dispatch whose rows do not fit goes through NCCL. 0 disables these
            kernels. A multiple of 4096.
        nccl_window_bytes: Bytes, per group and device, of a symmetric window of NCCL 2.27 or newer. Sums of 16 and 32
            bit floats that go to NCCL and fit are copied through it, so that NCCL can take its symmetric kernels. 0,
            the default, disables it: no GPU has measured whether they are worth two copies, and while such a kernel
            waits for a rank that has died, NCCL cannot end it. A multiple of 4096.
        deadline_s: How long a kernel waits for the other ranks, in seconds; None takes the group's timeout.
        policy_file: File of thresholds that the `tune` command wrote; None takes the built-in table. The path may
            differ between ranks, the content must not.
        nccl_library: File of the NCCL library; None takes the one that this process has loaded, which is
            torch's as a rule; else that of the wheel nvidia-nccl-cu*, else the system's. May differ between ranks.
        kernel_cache: Directory for compiled kernels; None takes the user's cache directory. May differ between
            ranks.

    Raises:
        SettingsError: A value is out of range; the text names the field and the value.
    """

    custom_all_reduce: bool = True
    deterministic: bool = False
    dependent_launch: bool = True
    multimem: bool = True
    multimem_one_shot_bytes: int = 0
    arena_bytes: int = 16 << 20
    staging_bytes: int = 32 << 20
    expert_arena_bytes: int = 32 << 20
    nccl_window_bytes: int = 0
    deadline_s: float | None = None
    policy_file: str | None = None
    nccl_library: str | None = None
    kernel_cache: str | None = None

    def __post_init__(self) -> None:
        """Check every field."""
        for field in ("custom_all_reduce", "deterministic", "dependent_launch", "multimem"):
            if type(getattr(self, field)) is not bool:
                raise SettingsError(f"cuda.{field} is {getattr(self, field)!r}, but must be True or False")
        if self.multimem_one_shot_bytes or type(self.multimem_one_shot_bytes) is not int:
            _check_bytes(
                *("multimem_one_shot_bytes", self.multimem_one_shot_bytes, MIN_MULTIMEM_ONE_SHOT_BYTES)
            )
        _check_bytes("arena_bytes", self.arena_bytes, MIN_ARENA_BYTES)
        _check_bytes("staging_bytes", self.staging_bytes, 0)
        _check_bytes("expert_arena_bytes", self.expert_arena_bytes, 0)
        _check_bytes("nccl_window_bytes", self.nccl_window_bytes, 0)
        if self.deadline_s is not None:
            msgspec.structs.force_setattr(self, "deadline_s", _seconds("deadline_s", self.deadline_s))
        for field in sorted(PER_RANK_CUDA_FIELDS):
            path = getattr(self, field)
            if path is not None and (not isinstance(path, str) or not path or "\0" in path):
                raise SettingsError(f"cuda.{field} is {path!r}, but must be the path of a file or directory")


def cuda_settings(given: object) -> CudaSettings:
    """Return the `cuda` of a communicator's context; None stands for the defaults.

    Raises:
        SettingsError: It is something else.
    """
    if given is None:
        return CudaSettings()
    if not isinstance(given, CudaSettings):
        raise SettingsError(f"cuda is {given!r}, but must be CudaSettings")
    return given


def _check_bytes(field: str, value: object, lowest: int) -> None:
    if type(value) is not int or not lowest <= value <= MAX_CUSTOM_BYTES or value % _GRANULE:
        raise SettingsError(
            f"cuda.{field} is {value!r}, but must be an int from {lowest} to {MAX_CUSTOM_BYTES}, "
            f"a multiple of {_GRANULE}"
        )


def _seconds(field: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 and math.isfinite(value):
        return float(value)
    raise SettingsError(f"cuda.{field} is {value!r}, but must be a positive, finite number of seconds")
