"""Choose the kernel of a fused all-reduce, add and RMSNorm: a pure function of facts that all ranks share."""

from __future__ import annotations

from typing import Final

import msgspec

from device_comm.cuda.kernel_layout import VECTOR_BYTES, WARP, norm_arena
from device_comm.cuda.policy.decision import Algorithm, CallFacts, GroupFacts, choose
from device_comm.cuda.policy.shapes import most_blocks, norm_shape
from device_comm.cuda.policy.table import BUILT_IN, PolicyTable

__all__ = ["NormPlan", "choose_norm"]

# vLLM's limits for FlashInfer's fused all-reduce and norm on Hopper: 2 MiB for 4 ranks, 1 MiB for 8
# (fi_allreduce_fusion_max_size_mb in vllm/config/compilation.py). Above them separate kernels use the device better.
_TWO_SHOT_LIMITS: Final = {3: 2 << 20, 4: 2 << 20, 5: 1 << 20, 6: 1 << 20, 7: 1 << 20, 8: 1 << 20}


class NormPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a fused call is carried.

    Attributes:
        kernel: "push_add_rms_norm" or "push_two_shot_add_rms_norm", either also with an output of 8 or 4 bits ("_fp8",
            "_nvfp4"), or "push_moe_finalize".
        grid: Blocks of the launch, a multiple of `cluster`.
        threads: Threads of a block.
        cluster: Blocks of a cluster.
    """

    kernel: str
    grid: int
    threads: int
    cluster: int


def choose_norm(
    facts: GroupFacts,
    rows: int,
    row_bytes: int,
    dtype: str,
    *,
    in_graph: bool = False,
    table: PolicyTable = BUILT_IN,
) -> NormPlan | None:
    """Return how to carry a fused call on `rows` rows, or None for an all-reduce and a norm one after the other.

    It is fused where an equal all-reduce takes a push: with a one-shot push always, with a two-shot push up to 1 or
    2 MiB. The bits are the same, so a deterministic group fuses too, whatever carries its all-reduces. Multimem, which
    has other bits, leaves calls of these sizes to the fused kernel.
    """
    call = CallFacts(operation="all_reduce", dtype=dtype, nbytes=rows * row_bytes, in_graph=in_graph)
    row_vectors, odd = divmod(row_bytes, VECTOR_BYTES)
    if rows <= 0 or not row_vectors or odd:
        return None
    plain = msgspec.structs.replace(facts, is_deterministic=False, has_multicast=False)
    algorithm = choose(plain, call, table).algorithm
    if algorithm is Algorithm.PUSH_ONE_SHOT:
        kernel = "push_add_rms_norm"
    elif algorithm is Algorithm.PUSH_TWO_SHOT and _two_shot_serves(facts, rows, row_vectors):
        kernel = "push_two_shot_add_rms_norm"
    else:
        return None
    grid, threads, cluster = norm_shape(facts.arch, most_blocks(facts.multiprocessors), rows, row_vectors)
    return NormPlan(kernel=kernel, grid=grid, threads=threads, cluster=cluster)


def _two_shot_serves(facts: GroupFacts, rows: int, row_vectors: int) -> bool:
    """Return whether the two-shot norm can carry a call: every rank owns a part of each row, and all fit."""
    world_size = facts.world_size
    # A slot of the one-shot push is the arena's share of one rank.
    arena = facts.capacity.push_one_shot * world_size
    return (
        rows * row_vectors * VECTOR_BYTES <= _TWO_SHOT_LIMITS.get(world_size, 0)
        and row_vectors >= WARP * world_size
        and norm_arena(rows, row_vectors, world_size) <= arena
    )
