"""Choose the algorithm of a call: a pure function of facts that all ranks share, with a reason in words.

Ranks that decide differently wait for each other for ever. Facts that only one rank knows, such as a tensor's address
or how long this rank has waited, must not enter. Equal `GroupFacts`, equal `CallFacts` and tables of equal digests
give equal `Plan`s in every process.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from typing import Final

import msgspec

from device_comm.cuda.kernel_layout import VECTOR_BYTES
from device_comm.cuda.policy.shapes import all_reduce_shape
from device_comm.cuda.policy.table import BUILT_IN, Operation, PolicyTable, Threshold, family_of
from device_comm.cuda_settings import MIN_MULTIMEM_ONE_SHOT_BYTES

__all__ = [
    "Algorithm",
    "CallFacts",
    "Capacity",
    "GroupFacts",
    "Plan",
    "choose",
    "policy_digest",
    "uses_multimem",
]

KERNEL_DTYPES: Final = frozenset({"float32", "float16", "bfloat16"})
"""The dtypes that our kernels can sum."""

_INEXACT: Final = frozenset({"sum", "mean", "product"})


class Algorithm(enum.StrEnum):
    """The algorithm that carries a call. Our own algorithms have the names of their kernels.

    Attributes:
        PUSH_ONE_SHOT: Every rank stores its input at every peer; each rank sums all inputs.
        PUSH_TWO_SHOT: Every rank sums its share of the inputs and stores the result at every peer.
        PULL_ONE_SHOT: Every rank reads and sums all inputs.
        PULL_TWO_SHOT: Every rank sums its share of the inputs, then reads the other ranks' results.
        MULTIMEM_TWO_SHOT: The NVSwitch sums each rank's share of the inputs, in no defined order, and stores the result
            at every rank.
        MULTIMEM_ONE_SHOT: The NVSwitch sums all inputs for each rank, in no defined order: ranks need not get equal
            bits. Only a setting asks for it.
        PUSH_REDUCE_SCATTER: The first half of the two-shot push.
        PUSH_ALL_GATHER: Every rank stores its bytes at every peer, each word with a flag.
        STAGED_ALL_GATHER: Every rank reads the other ranks' bytes from their staging areas.
        NCCL: NCCL, which guarantees no order of summation.
        RANK_ORDER: NCCL moves the inputs, and ranks sum them in rank order. Gives the same bits as our kernels for
            any dtype and size, but moves all inputs.
    """

    PUSH_ONE_SHOT = "push_one_shot"
    PUSH_TWO_SHOT = "push_two_shot"
    PULL_ONE_SHOT = "pull_one_shot"
    PULL_TWO_SHOT = "pull_two_shot"
    MULTIMEM_TWO_SHOT = "multimem_two_shot"
    MULTIMEM_ONE_SHOT = "multimem_one_shot"
    PUSH_REDUCE_SCATTER = "push_reduce_scatter"
    PUSH_ALL_GATHER = "push_all_gather"
    STAGED_ALL_GATHER = "staged_all_gather"
    NCCL = "nccl"
    RANK_ORDER = "rank_order"

    @property
    def is_custom(self) -> bool:
        """Return whether one of our kernels runs."""
        return self not in (Algorithm.NCCL, Algorithm.RANK_ORDER)

    @property
    def is_pull(self) -> bool:
        """Return whether peers read the inputs directly from this rank's memory."""
        return self in (Algorithm.PULL_ONE_SHOT, Algorithm.PULL_TWO_SHOT)


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest `CallFacts.nbytes` that fit into the group's memory, for each algorithm; 0 if none fit.

    For the two-shot multimem it is the largest piece; a larger call is cut into several.
    """

    push_one_shot: int = 0
    push_two_shot: int = 0
    pull_one_shot: int = 0
    pull_two_shot: int = 0
    multimem_two_shot: int = 0
    multimem_one_shot: int = 0
    push_reduce_scatter: int = 0
    push_all_gather: int = 0
    staged_all_gather: int = 0

    def of(self, algorithm: Algorithm) -> int:
        """Return the limit of one of our algorithms."""
        limit: int = getattr(self, algorithm.value)
        return limit


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about a group, equal on all its ranks.

    Attributes:
        world_size: Number of ranks in the group.
        device_name: The driver's name of the devices; empty if they differ.
        arch: "sm_90"; empty if the architectures differ.
        multiprocessors: The smallest number of multiprocessors of any device.
        has_nvlink: Whether NVLink connects every pair of devices.
        is_exportable: Whether the tensor allocator returns memory that peers can map, on every rank.
        has_multicast: Whether the devices can be the team of a multicast object, and the setting `multimem` is on.
        multimem_one_shot_bytes: The setting of this name.
        is_deterministic: The setting `deterministic`.
        is_enabled: The setting `custom_all_reduce`.
        capacity: The largest calls that fit into the group's memory.
    """

    world_size: int
    device_name: str
    arch: str
    multiprocessors: int
    has_nvlink: bool
    is_exportable: bool
    has_multicast: bool = False
    multimem_one_shot_bytes: int = 0
    is_deterministic: bool = False
    is_enabled: bool = True
    capacity: Capacity = Capacity()

    def why_not(self) -> str:
        """Return why our kernels are never used in this group, or an empty text."""
        if not self.is_enabled:
            return "cuda.custom_all_reduce is off"
        if not 2 <= self.world_size <= 8:
            return f"the kernels serve 2 to 8 ranks, not {self.world_size}"
        if not self.arch:
            return "the ranks' devices are of different architectures"
        return ""


class CallFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts about one call, equal on all ranks.

    Attributes:
        operation: The collective.
        dtype: The elements' dtype by torch's name: "bfloat16".
        nbytes: Bytes of one rank's input: the message of an all-reduce, the whole input of a reduce-scatter, one
            rank's part of an all-gather.
        reduction: "sum", "mean", "product", "min" or "max"; ignored for an all-gather.
        in_graph: Whether the call is captured into a CUDA graph, then on all ranks.
    """

    operation: Operation
    dtype: str
    nbytes: int
    reduction: str = "sum"
    in_graph: bool = False

    @property
    def depends_on_order(self) -> bool:
        """Return whether the result depends on the order in which the ranks' inputs are combined."""
        is_float = "float" in self.dtype or self.dtype.startswith("complex")
        return self.operation != "all_gather" and is_float and self.reduction in _INEXACT


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is carried.

    Attributes:
        algorithm: See `Algorithm`.
        grid: Blocks of a launch; 0 if none of our kernels runs.
        threads: Threads of a block; 0 if none of our kernels runs.
        piece_bytes: Largest piece in bytes; a larger call is split into pieces that run one after the other.
        reason: Why, in words: the number that decided and its source.
    """

    algorithm: Algorithm
    grid: int
    threads: int
    piece_bytes: int
    reason: str


def choose(facts: GroupFacts, call: CallFacts, table: PolicyTable = BUILT_IN) -> Plan:
    """Return how to carry `call` in a group of `facts`. Equal arguments give equal plans. Never raises."""
    obstacle = facts.why_not() or _why_not_call(call)
    if obstacle:
        return _without_kernels(facts, call, obstacle)
    if facts.is_deterministic and call.depends_on_order:
        return _deterministic(facts, call)
    return _requested(facts, call) or _fastest(facts, call, table)


def _why_not_call(call: CallFacts) -> str:
    """Return why our kernels cannot carry this call in any group, or an empty text."""
    if call.nbytes <= 0:
        return "there is nothing to move"
    if call.operation != "all_gather":
        if call.reduction != "sum":
            return f"the kernels sum, they do not implement {call.reduction}"
        if call.dtype not in KERNEL_DTYPES:
            return f"the kernels sum float32, float16 and bfloat16, not {call.dtype}"
    return ""


def _without_kernels(facts: GroupFacts, call: CallFacts, reason: str) -> Plan:
    algorithm = Algorithm.NCCL
    if facts.is_deterministic and call.depends_on_order:
        algorithm = Algorithm.RANK_ORDER
        reason += "; NCCL guarantees no order, so the ranks' inputs are moved and summed in rank order"
    return Plan(algorithm=algorithm, grid=0, threads=0, piece_bytes=call.nbytes, reason=reason)


def _deterministic(facts: GroupFacts, call: CallFacts) -> Plan:
    """Return a plan that uses one algorithm for every size: a row's result must not depend on the batch size.

    All our algorithms give the same bits; using a single one also removes the dependence on that claim. The two-shot
    push serves every size: it moves 2 (n - 1) / n times the message, the one-shot push n - 1 times, and unlike the
    pulls it needs no registration.
    """
    if call.operation == "all_reduce":
        piece = _pieces(facts.capacity.push_two_shot, call.nbytes)
        if piece:
            return _plan(facts, Algorithm.PUSH_TWO_SHOT, piece, "deterministic: one algorithm for every size")
    elif 0 < call.nbytes <= facts.capacity.push_reduce_scatter:
        # A call that does not fit cannot be split: the shards of a piece would not be contiguous in the input.
        return _plan(
            facts, Algorithm.PUSH_REDUCE_SCATTER, call.nbytes, "deterministic: it fits into the arena"
        )
    return _without_kernels(facts, call, "deterministic, and the arena is too small")


def _requested(facts: GroupFacts, call: CallFacts) -> Plan | None:
    """Return the plan that the settings request instead of the table's, or None. No table can name this algorithm."""
    algorithm, most = Algorithm.MULTIMEM_ONE_SHOT, facts.multimem_one_shot_bytes
    if call.operation != "all_reduce" or not _has_multimem(facts):
        return None
    if not MIN_MULTIMEM_ONE_SHOT_BYTES <= call.nbytes <= min(most, facts.capacity.of(algorithm)):
        return None
    reason = f"{call.nbytes} bytes are at most the {most} of cuda.multimem_one_shot_bytes"
    return _plan(facts, algorithm, call.nbytes, reason)


def _has_multimem(facts: GroupFacts) -> bool:
    """Return whether the switches may sum for this group: NVLink, multicast, sm_90 or newer, order of no concern."""
    may_sum = facts.has_multicast and facts.has_nvlink and not facts.is_deterministic
    return may_sum and family_of(facts.arch) in ("hopper", "blackwell")


def _pieces(capacity: int, nbytes: int) -> int:
    """Return the largest piece that fits, in whole vectors; 0 if not even one vector fits."""
    if nbytes <= capacity:
        return nbytes
    return capacity - capacity % VECTOR_BYTES


def _fastest(facts: GroupFacts, call: CallFacts, table: PolicyTable) -> Plan:
    family = family_of(facts.arch)
    if not family:
        return _without_kernels(
            facts, call, f"no thresholds are known for {facts.arch}; run `tune` to measure them"
        )
    link = "nvlink" if facts.has_nvlink else "pcie"
    rows = table.rows(call.operation, family, link, facts.world_size, call.in_graph)
    if not rows:
        return _without_kernels(
            facts,
            call,
            f"no threshold for {call.operation} of {facts.world_size} ranks over {link} on {family}",
        )
    why = ""
    for row in rows:
        algorithm = Algorithm(row.algorithm)
        why = _why_not_row(facts, call, row, algorithm)
        if not why:
            reason = f"{call.nbytes} bytes are at most the {row.max_bytes} of {algorithm} ({row.source})"
            piece = _pieces(facts.capacity.of(algorithm), call.nbytes)
            return _plan(facts, algorithm, piece, reason)
    return _without_kernels(facts, call, why)


def _why_not_row(facts: GroupFacts, call: CallFacts, row: Threshold, algorithm: Algorithm) -> str:
    """Return why the algorithm of a row cannot carry a call, or should not; or an empty text."""
    if call.nbytes > row.max_bytes:
        return f"{call.nbytes} bytes are more than the {row.max_bytes} of {algorithm} ({row.source})"
    if call.nbytes < row.min_bytes:
        return f"{call.nbytes} bytes are fewer than the {row.min_bytes} of {algorithm} ({row.source})"
    if algorithm is Algorithm.MULTIMEM_TWO_SHOT:
        # It sums pieces of any size.
        fits = facts.capacity.of(algorithm) > 0
        if not facts.has_multicast or facts.is_deterministic:
            return f"{algorithm} needs multicast between all devices, and a group that is not deterministic"
    else:
        fits = call.nbytes <= facts.capacity.of(algorithm)
    if algorithm.is_pull and not (facts.is_exportable and call.in_graph):
        if call.in_graph:
            return f"{algorithm} reads the inputs of captured calls, and the allocator's memory cannot be exported"
        return f"{algorithm} reads the inputs of captured calls only"
    return "" if fits else f"{call.nbytes} bytes of {algorithm} do not fit into the memory of the group"


def uses_multimem(facts: GroupFacts, table: PolicyTable) -> bool:
    """Return whether some call of the group may be summed by multimem, if there is memory for it."""
    if facts.why_not() or facts.is_deterministic or not (facts.has_multicast and facts.has_nvlink):
        return False
    if facts.multimem_one_shot_bytes and _has_multimem(facts):
        return True
    return any(
        row.algorithm == Algorithm.MULTIMEM_TWO_SHOT.value
        for in_graph in (False, True)
        for row in table.rows("all_reduce", family_of(facts.arch), "nvlink", facts.world_size, in_graph)
    )


def _plan(facts: GroupFacts, algorithm: Algorithm, piece_bytes: int, reason: str) -> Plan:
    # A reduce-scatter has a thread for each vector of its result.
    parts = facts.world_size if algorithm is Algorithm.PUSH_REDUCE_SCATTER else 1
    grid, threads = all_reduce_shape(
        algorithm.value,
        family_of(facts.arch),
        facts.multiprocessors,
        -(-piece_bytes // parts),
        facts.world_size,
    )
    return Plan(algorithm=algorithm, grid=grid, threads=threads, piece_bytes=piece_bytes, reason=reason)


@functools.lru_cache(maxsize=64)
def policy_digest(table: PolicyTable) -> str:
    """Return 16 hexadecimal digits of a hash over the table's rows without their sources.

    Tables with equal digests decide alike.
    """
    numbers = [msgspec.structs.replace(row, source="") for row in table.thresholds]
    return hashlib.sha256(msgspec.json.encode(numbers, order="deterministic")).hexdigest()[:16]
