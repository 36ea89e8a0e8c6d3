"""Choose the grid of a launch: pure functions of facts that all ranks share."""

from __future__ import annotations

from typing import Final

from device_comm.cuda.kernel_layout import GROUP_LANES, MAX_BLOCKS, NORM_GROUPS, blocks_for, work_items

__all__ = ["all_reduce_shape", "most_blocks", "norm_shape"]

_PULL_BLOCKS: Final = {"ampere": 36, "hopper": 64, "blackwell": 64}
_PULL_THREADS: Final = 512
_THREADS: Final = (128, 256, 512)
# Enough to fill NVLink; more blocks only take room from other kernels.
_MOST_BLOCKS: Final = 64
_CLUSTER_ARCH: Final = 90


def most_blocks(multiprocessors: int) -> int:
    """Return the most blocks of a kernel that waits for peers: half of the multiprocessors, at most 64.

    A block waits for the blocks of the same index on other devices, so all of them must run at once. A kernel of
    another group on another stream may come first here and last on a peer. Half of the device is left to it, because
    each would otherwise wait for the other until the deadline.
    """
    return max(1, min(multiprocessors // 2, _MOST_BLOCKS, MAX_BLOCKS))


def all_reduce_shape(
    algorithm: str, family: str, multiprocessors: int, nbytes: int, world_size: int
) -> tuple[int, int]:
    """Return blocks and threads for any kernel but a norm: one thread per vector, in small blocks on many processors.

    Args:
        algorithm: The name of the kernel.
        family: The family of architectures, or an empty text.
        multiprocessors: The fewest of any device.
        nbytes: The bytes of `kernel_layout.work_items`.
        world_size: Number of ranks.
    """
    items = work_items(algorithm, nbytes, world_size)
    most = most_blocks(multiprocessors)
    if algorithm.startswith(("pull", "multimem", "staged")):
        most = min(most, _PULL_BLOCKS.get(family, min(_PULL_BLOCKS.values())))
        return blocks_for(items, _PULL_THREADS, most), _PULL_THREADS
    threads = next((each for each in _THREADS if items <= each * most), _THREADS[-1])
    return blocks_for(items, threads, most), threads


def norm_shape(arch: str, most: int, rows: int, row_vectors: int) -> tuple[int, int, int]:
    """Return blocks, threads of a block and blocks of a cluster for a norm: one lane per thread where possible.

    Args:
        arch: The architecture of all devices, "sm_90".
        most: The most blocks of the grid.
        rows: Number of rows; at least one.
        row_vectors: Vectors of 16 bytes in a row.
    """
    groups = min(NORM_GROUPS, -(-row_vectors // GROUP_LANES))
    cluster = 1
    if int(arch.removeprefix("sm_")) >= _CLUSTER_ARCH:
        # The blocks of a cluster take groups in turn, so the number of blocks must divide NORM_GROUPS.
        while cluster < groups and 2 * cluster <= most:
            cluster *= 2
    threads = GROUP_LANES if cluster > 1 or groups == 1 else 2 * GROUP_LANES
    return cluster * max(1, min(rows, most // cluster)), threads, cluster
