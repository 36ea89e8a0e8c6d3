"""The interface of the CUDA kernels and the host: parameters, memory layout, error record, sizes. Pure arithmetic.

`csrc/cuda/kernel_base.cu` defines the same numbers, and a test compares the two. The protocol is in `DESIGN.md`, under
"Custom all-reduce on CUDA".
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from typing import Final

from shm_broadcast.errors import InternalError, UsageError

__all__ = [
    "ABORT_OFFSET",
    "ERROR_RECORD_BYTES",
    "FLAGS_BYTES",
    "GROUP_LANES",
    "KERNEL_NAMES",
    "MAX_BLOCKS",
    "MAX_WORLD_SIZE",
    "MIN_WORLD_SIZE",
    "NORM_GROUPS",
    "SENTINEL",
    "STATE_BYTES",
    "VECTOR_BYTES",
    "WARP",
    "KernelFailure",
    "WorkspaceLayout",
    "blocks_for",
    "largest_input",
    "norm_arena",
    "pack_area",
    "pack_params",
    "read_failure",
    "work_items",
]

MAX_WORLD_SIZE: Final = 8
MIN_WORLD_SIZE: Final = 2
MAX_BLOCKS: Final = 256
"""Most blocks of a grid: above the multiprocessors of any current GPU (B200: 148, H200: 132)."""
VECTOR_BYTES: Final = 16
LINE_BYTES: Final = 128
"""The flags of each block take a line of their own, so that a peer's write for one block does not disturb the line
that another block polls."""
FLAGS_BYTES: Final = MAX_BLOCKS * LINE_BYTES
SENTINEL: Final = 0xFFFFFFFF
GROUP_LANES: Final = 256
"""Lanes of one of the norm's groups. A block of its kernels has as many threads, or twice as many: `norm_shape`."""
NORM_GROUPS: Final = 4
"""Groups of lanes of the norm's sum for any number of threads: see "The order of the norm's sum" in DESIGN.md."""
WARP: Final = 32
"""Threads of a warp. In the two-shot norm the ranks own this many vectors of a row in turn."""

STATE_BYTES: Final = 4096
"""Bytes of a rank's own state: each block's epoch and barrier number, and whether the communicator has failed."""

ERROR_RECORD_BYTES: Final = 64
ABORT_OFFSET: Final = 32
"""Offset of a u32 in the error record; the host writes 1 to make spinning kernels leave."""
FAILURE_REASONS: Final = {1: "deadline", 2: "aborted", 3: "unregistered", 4: "overflow"}

KERNEL_NAMES: Final = (
    "none",
    "push_one_shot",
    "push_two_shot",
    "push_reduce_scatter",
    "push_all_gather",
    "pull_one_shot",
    "pull_two_shot",
    "push_add_rms_norm",
    "push_two_shot_add_rms_norm",
    "push_add_rms_norm_fp8",
    "push_two_shot_add_rms_norm_fp8",
    "push_moe_finalize",
    "multimem_two_shot",
    "push_add_rms_norm_nvfp4",
    "push_two_shot_add_rms_norm_nvfp4",
    "staged_all_gather",
    "multimem_one_shot",
    "add_rms_norm",
    "add_rms_norm_fp8",
    "add_rms_norm_nvfp4",
    "moe_finalize",
    "expert_dispatch",
    "expert_combine",
)
"""Every kernel. Its index is the number that it writes into an error record."""

# struct Params: workspace[8], state, error, deadline_ns, arena_bytes, results_offset, rank, pad.
_PARAMS: Final = struct.Struct("<8Q5QII")
# struct MulticastArea: own, all.
_AREA: Final = struct.Struct("<2Q")
# One 64-bit word, written atomically: code, kernel, lowest missing rank, mask of missing ranks, epoch.
_FAILURE: Final = struct.Struct("<BBBBI")


def _vectors(nbytes: int) -> int:
    """Return the 16-byte vectors that a kernel moves for `nbytes`: at least one, so every launch synchronizes."""
    return max(1, -(-nbytes // VECTOR_BYTES))


@dataclasses.dataclass(frozen=True)
class WorkspaceLayout:
    """Offsets and sizes of the areas in a rank's workspace; equal on all ranks of a group.

    Attributes:
        world_size: Number of ranks in the group.
        arena_bytes: Bytes of the arena of one phase, a multiple of 128.
        staging_bytes: Bytes for inputs that are copied in; also the largest input of a pull. A multiple of 128.
    """

    world_size: int
    arena_bytes: int
    staging_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes with which a vector would lie in two areas."""
        for name, nbytes in (("arena_bytes", self.arena_bytes), ("staging_bytes", self.staging_bytes)):
            if nbytes < 0 or nbytes % LINE_BYTES:
                raise UsageError(f"{name} must be a multiple of {LINE_BYTES}, not {nbytes}")

    @property
    def staging_offset(self) -> int:
        """Return the offset of the staging area, which follows the flags and the two arenas."""
        return FLAGS_BYTES + 2 * self.arena_bytes

    @property
    def results_offset(self) -> int:
        """Return the offset at which a two-shot pull stores the shard that this rank reduced."""
        return self.staging_offset + self.staging_bytes

    @property
    def results_bytes(self) -> int:
        """Return the bytes of the largest shard of a pull."""
        if not self.staging_bytes:
            return 0
        shard = -(-_vectors(self.staging_bytes) // self.world_size) * VECTOR_BYTES
        return -(-shard // LINE_BYTES) * LINE_BYTES

    @property
    def total_bytes(self) -> int:
        """Return the bytes of the whole workspace."""
        return self.results_offset + self.results_bytes

    @property
    def initial_words(self) -> tuple[tuple[int, int, int], ...]:
        """Return (offset, 32-bit value, number of words) of each area to fill before the first launch."""
        return (
            (0, 0, FLAGS_BYTES // 4),
            (FLAGS_BYTES, SENTINEL, 2 * self.arena_bytes // 4),
        )


def pack_params(
    layout: WorkspaceLayout,
    *,
    workspaces: Sequence[int],
    state: int,
    error: int,
    deadline_ns: int,
    rank: int,
) -> bytes:
    """Return the `Params` of one rank.

    Args:
        layout: The layout of the workspaces.
        workspaces: The address of every rank's workspace in this process, in group order.
        state: The address of `STATE_BYTES` of this rank's own device memory, initially zero.
        error: The device address of the mapped error record: `ERROR_RECORD_BYTES`, initially zero.
        deadline_ns: How long a kernel waits for one datum, in nanoseconds.
        rank: This rank in the group.

    Raises:
        UsageError: `deadline_ns` does not fit.
    """
    if not 0 < deadline_ns < 2**63:
        raise UsageError(f"deadline_ns must be positive, not {deadline_ns}")
    padded = [*workspaces, *(0,) * (MAX_WORLD_SIZE - len(workspaces))]
    return _PARAMS.pack(
        *padded, state, error, deadline_ns, layout.arena_bytes, layout.results_offset, rank, 0
    )


def pack_area(own: int, everywhere: int) -> bytes:
    """Return the `MulticastArea` of one rank.

    Args:
        own: The address of this rank's memory.
        everywhere: The multimem address of the memory of all ranks.
    """
    return _AREA.pack(own, everywhere)


@dataclasses.dataclass(frozen=True)
class KernelFailure:
    """The failure that a kernel wrote into the error record before it gave up.

    Attributes:
        reason: "deadline", "aborted", "unregistered": a captured pull ran before its inputs were exchanged, or
            "overflow": more rows came to a dispatch than its output holds.
        kernel: The kernel's name.
        missing: Ranks in the group for which the thread that gave up was waiting, ascending; after an overflow those
            whose rows did not fit.
        epoch: The number of the launch, modulo 2^32.
    """

    reason: str
    kernel: str
    missing: tuple[int, ...]
    epoch: int


def read_failure(record: bytes | bytearray | memoryview) -> KernelFailure | None:
    """Return the failure in the error record; None while nothing has failed."""
    code, kernel, _, mask, epoch = _FAILURE.unpack_from(record)
    if code == 0:
        return None
    if code not in FAILURE_REASONS or kernel >= len(KERNEL_NAMES):
        raise InternalError(f"the error record of the CUDA kernels holds {bytes(record[:8]).hex()}")
    missing = tuple(rank for rank in range(MAX_WORLD_SIZE) if mask >> rank & 1)
    return KernelFailure(FAILURE_REASONS[code], KERNEL_NAMES[kernel], missing, epoch)


def largest_input(algorithm: str, layout: WorkspaceLayout) -> int:
    """Return the largest input of a call that fits the workspace, in bytes; 0 if none fit.

    For push_reduce_scatter the bytes are those of the output, for the all-gathers those of one rank's part. A rank's
    slot in the arena holds the whole input, or with the two-shot push its shard of the input and of the result;
    push_all_gather stores 8 bytes in each vector. A multimem address has `staging_bytes` behind it, which the two-shot
    form divides into equal shards.
    """
    world_size = layout.world_size
    if algorithm in ("pull_one_shot", "pull_two_shot", "staged_all_gather", "multimem_one_shot"):
        return layout.staging_bytes
    if algorithm == "multimem_two_shot":
        return layout.staging_bytes // (world_size * VECTOR_BYTES) * world_size * VECTOR_BYTES
    if algorithm == "push_two_shot":
        return layout.arena_bytes // (2 * world_size * VECTOR_BYTES) * world_size * VECTOR_BYTES
    vectors = layout.arena_bytes // (world_size * VECTOR_BYTES)
    return vectors * (8 if algorithm == "push_all_gather" else VECTOR_BYTES)


def norm_arena(rows: int, row_vectors: int, world_size: int) -> int:
    """Return the bytes of an arena that a two-shot norm takes: every rank's share of each row, and the sums of all."""
    share = -(-row_vectors // (WARP * world_size)) * WARP
    return rows * (world_size * share + row_vectors) * VECTOR_BYTES


def work_items(algorithm: str, nbytes: int, world_size: int) -> int:
    """Return how many threads have work to do. For the fused norm pass the rows to `blocks_for` instead."""
    vectors = _vectors(nbytes)
    if algorithm in ("push_two_shot", "pull_two_shot", "multimem_two_shot"):
        return -(-vectors // world_size)
    if algorithm == "push_all_gather":
        return max(1, -(-nbytes // 8))
    return vectors


def blocks_for(items: int, threads: int, most: int) -> int:
    """Return the blocks of the grid: one thread per item, at least one block, at most `most` and `MAX_BLOCKS`.

    The grid must be equal on all ranks for the same call, so `threads` and `most` must be agreed values.
    """
    return max(1, min(-(-items // threads), most, MAX_BLOCKS))
