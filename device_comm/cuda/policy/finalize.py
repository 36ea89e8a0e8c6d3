"""Choose whether the sums of experts are pushed as they are made: a pure function of facts that all ranks share."""

from __future__ import annotations

import msgspec

from device_comm.cuda.kernel_layout import VECTOR_BYTES
from device_comm.cuda.policy.decision import Algorithm, CallFacts, GroupFacts, choose
from device_comm.cuda.policy.norm import NormPlan
from device_comm.cuda.policy.table import BUILT_IN, PolicyTable

__all__ = ["choose_finalize"]


def choose_finalize(
    facts: GroupFacts,
    tokens: int,
    row_bytes: int,
    dtype: str,
    *,
    in_graph: bool = False,
    table: PolicyTable = BUILT_IN,
) -> NormPlan | None:
    """Return how to carry a fused call on `tokens` rows, or None for the sums and an all-reduce one after the other.

    It is fused where an equal all-reduce takes a one-shot push. The bits are the same, so a deterministic group fuses
    too. What differs between ranks, such as the rows that their experts returned, does not count.
    """
    if tokens <= 0 or row_bytes <= 0 or row_bytes % VECTOR_BYTES:
        return None
    call = CallFacts(operation="all_reduce", dtype=dtype, nbytes=tokens * row_bytes, in_graph=in_graph)
    plan = choose(msgspec.structs.replace(facts, is_deterministic=False), call, table)
    if plan.algorithm is not Algorithm.PUSH_ONE_SHOT:
        return None
    return NormPlan(kernel="push_moe_finalize", grid=plan.grid, threads=plan.threads, cluster=1)
