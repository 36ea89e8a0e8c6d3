"""`lws://[:PORT]`: the processes in the pods of a LeaderWorkerSet of Kubernetes.

Facts from kubernetes-sigs/lws: its webhook sets LWS_LEADER_ADDRESS (the DNS name of the leader's pod), LWS_GROUP_SIZE
(pods of the group) and LWS_WORKER_INDEX (0 in the leader) in every container. They number pods; which process of the
pod this is, and how many there are, only the caller knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coordinator.launchers.launch import MOST_RANKS, Caller, Launch, Variables

__all__ = ["DEFAULT_PORT", "LWS", "read_lws"]

LWS: Final = "lws://"

DEFAULT_PORT: Final = 29500
"""The port of the store in the leader's pod, which has ports of its own. It is the usual one of torch."""


def read_lws(environ: Mapping[str, str], caller: Caller) -> Launch:
    """Return the place of this process: the ranks of a pod follow each other, those of the leader's pod come first.

    Args:
        environ: The process's variables.
        caller: It names the local rank, and the local world size or the world size, which is that times the pods.

    Raises:
        UsageError: A variable is missing or malformed, or the caller has not said enough or contradicts itself.
    """
    variables = Variables(environ, LWS, "the LeaderWorkerSet controller")
    host = variables.text("LWS_LEADER_ADDRESS")
    pods = variables.number("LWS_GROUP_SIZE", 1, MOST_RANKS)
    pod = variables.number("LWS_WORKER_INDEX", 0, pods - 1)
    local_size = _local_world_size(variables, caller, pods)
    if not 0 <= caller.local_rank < local_size:
        variables.refuse(
            f"local_rank is {caller.local_rank}, but must be from 0 to {local_size - 1}",
            "the variables of a LeaderWorkerSet name the pod, so pass which process of the pod this is",
        )
    rank = pod * local_size + caller.local_rank
    if caller.rank not in (-1, rank):
        variables.refuse(
            f"rank={caller.rank} contradicts LWS_WORKER_INDEX={pod}, local_world_size={local_size} and "
            f"local_rank={caller.local_rank}, which make it {rank}"
        )
    return Launch(
        launcher="a LeaderWorkerSet",
        rank=rank,
        world_size=pods * local_size,
        local_rank=caller.local_rank,
        host=host,
        port=caller.port if caller.port > 0 else DEFAULT_PORT,
        spans_hosts=pods > 1,
    )


def _local_world_size(variables: Variables, caller: Caller, pods: int) -> int:
    given, world_size = caller.local_world_size, caller.world_size
    if given < 1 and world_size < 1:
        variables.refuse(
            "the variables of a LeaderWorkerSet do not say how many processes a pod has",
            "pass local_world_size, or world_size",
        )
    if world_size >= 1 and (world_size % pods or given not in (-1, world_size // pods)):
        each = "" if given == -1 else f" and local_world_size={given}"
        variables.refuse(f"world_size={world_size} contradicts LWS_GROUP_SIZE={pods}{each}")
    return given if given >= 1 else world_size // pods
