"""Which algorithm carries a call: a pure function of facts that all ranks share, with a reason for people.

Ranks that decide differently wait for each other for ever, so nothing that only one rank knows goes in here:
not where a tensor lies, not how long this rank has waited. The same `GroupFacts`, the same `CallFacts` and a table
of the same digest give the same `Plan`, in every process.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from typing import Final, Literal

import msgspec

from device_comm.kernel_layout import MAX_BLOCKS, VECTOR_BYTES, blocks_for, work_items
from device_comm.policy_table import BUILT_IN, PolicyTable, family_of

__all__ = [
    "Algorithm",
    "CallFacts",
    "Capacity",
    "GroupFacts",
    "Plan",
    "choose",
    "policy_digest",
]

_PULL_BLOCKS: Final = {"ampere": 36, "hopper": 64, "blackwell": 64}
_PULL_THREADS: Final = 512
_THREADS: Final = (128, 256, 512)

KERNEL_DTYPES: Final = frozenset({"float32", "float16", "bfloat16"})
"""What our kernels sum."""

_INEXACT: Final = frozenset({"sum", "mean", "product"})

OperationName = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Algorithm(enum.StrEnum):
    """How a call is carried; the names of our own are those of the kernels.

    Attributes:
        PUSH_ONE_SHOT: Every rank stores its vectors at every peer and sums what it was sent.
        PUSH_TWO_SHOT: Every rank sums its share, and stores the result at every peer.
        PULL_ONE_SHOT: Every rank reads the inputs of all.
        PULL_TWO_SHOT: Every rank sums its share of the inputs, then reads the others' results.
        PUSH_REDUCE_SCATTER: The first half of the two-shot push.
        PUSH_ALL_GATHER: Every rank stores its bytes, each word with a flag, at every peer.
        NCCL: NCCL, which promises no order of a sum.
        RANK_ORDER: NCCL moves the inputs, every rank sums them in rank order: the bits of our kernels, for
            any dtype and size, at the price of moving all inputs to where they are summed.
    """

    PUSH_ONE_SHOT = "push_one_shot"
    PUSH_TWO_SHOT = "push_two_shot"
    PULL_ONE_SHOT = "pull_one_shot"
    PULL_TWO_SHOT = "pull_two_shot"
    PUSH_REDUCE_SCATTER = "push_reduce_scatter"
    PUSH_ALL_GATHER = "push_all_gather"
    NCCL = "nccl"
    RANK_ORDER = "rank_order"

    @property
    def is_custom(self) -> bool:
        """Return whether one of our kernels runs."""
        return self not in (Algorithm.NCCL, Algorithm.RANK_ORDER)

    @property
    def is_pull(self) -> bool:
        """Return whether peers read the inputs where they lie."""
        return self in (Algorithm.PULL_ONE_SHOT, Algorithm.PULL_TWO_SHOT)


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest `CallFacts.nbytes` for which the memory of a group suffices, by algorithm; 0 for never."""

    push_one_shot: int = 0
    push_two_shot: int = 0
    pull_one_shot: int = 0
    pull_two_shot: int = 0
    push_reduce_scatter: int = 0
    push_all_gather: int = 0

    def of(self, algorithm: Algorithm) -> int:
        """Return the limit of one of our algorithms."""
        limit: int = getattr(self, algorithm.value)
        return limit


class GroupFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all ranks of a group know of it, equal on all of them.

    Attributes:
        world_size: Ranks in the group.
        device_name: The driver's name of the devices; empty if they are not all the same.
        arch: "sm_90"; empty if the devices are not all of one architecture.
        multiprocessors: The fewest of any device.
        has_nvlink: Whether NVLink joins every pair of devices.
        is_verified: Whether every rank has read back what every other one wrote.
        is_exportable: Whether on every rank the allocator of tensors gives memory that peers can map.
        is_deterministic: The setting.
        is_enabled: The setting `custom_all_reduce`.
        capacity: What fits into the group's memory.
        obstacle: Why our kernels cannot run in this group, found while it was built; empty if they can.
    """

    world_size: int
    device_name: str
    arch: str
    multiprocessors: int
    has_nvlink: bool
    is_verified: bool
    is_exportable: bool
    is_deterministic: bool = False
    is_enabled: bool = True
    capacity: Capacity = Capacity()
    obstacle: str = ""

    def why_not(self) -> str:
        """Return why our kernels are not used in this group at all, or an empty text."""
        if not self.is_enabled:
            return "cuda.custom_all_reduce is off"
        if not 2 <= self.world_size <= 8:
            return f"the kernels serve 2 to 8 ranks, not {self.world_size}"
        if not self.arch:
            return "the ranks' devices are of different architectures"
        if self.obstacle:
            return self.obstacle
        if not self.is_verified:
            return "not every rank could read what every other one wrote into its memory"
        return ""


class CallFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all ranks know of one call, equal on all of them.

    Attributes:
        operation: The collective.
        dtype: The elements, by torch's name: "bfloat16".
        nbytes: Bytes of a rank's input: the message of an all-reduce, the whole input of a reduce-scatter, what
            one rank brings to an all-gather.
        reduction: "sum", "mean", "product", "min" or "max"; not looked at for an all-gather.
        is_aligned: Whether input and output begin at multiples of 16 bytes on *all* ranks. Whoever calls makes
            it true by copying on the rank where it is not, which no other rank needs to know. An all-gather
            does not need it.
        in_graph: Whether the call is captured into a CUDA graph, as it then is on all ranks.
    """

    operation: OperationName
    dtype: str
    nbytes: int
    reduction: str = "sum"
    is_aligned: bool = True
    in_graph: bool = False

    @property
    def depends_on_order(self) -> bool:
        """Return whether the order in which the ranks are combined can be seen in the result."""
        is_float = "float" in self.dtype or self.dtype.startswith("complex")
        return self.operation != "all_gather" and is_float and self.reduction in _INEXACT


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a call is carried.

    Attributes:
        algorithm: See `Algorithm`.
        grid: Blocks of a launch; 0 where no kernel of ours runs.
        threads: Threads of a block; 0 where no kernel of ours runs.
        piece_bytes: The call is carried in pieces of at most so many bytes, one after the other.
        reason: Why, for people: the number that decided and where it comes from.
    """

    algorithm: Algorithm
    grid: int
    threads: int
    piece_bytes: int
    reason: str


def choose(facts: GroupFacts, call: CallFacts, table: PolicyTable = BUILT_IN) -> Plan:
    """Return how `call` is carried in a group of `facts`; the same for equal arguments, and never an error."""
    obstacle = facts.why_not() or _why_not_call(call)
    if obstacle:
        return _without_kernels(facts, call, obstacle)
    if facts.is_deterministic and call.depends_on_order:
        return _deterministic(facts, call)
    return _fastest(facts, call, table)


def _why_not_call(call: CallFacts) -> str:
    """Return why our kernels cannot carry this call in any group, or an empty text."""
    if call.nbytes <= 0:
        return "there is nothing to move"
    if call.operation != "all_gather":
        if call.reduction != "sum":
            return f"the kernels sum, they know no {call.reduction}"
        if call.dtype not in KERNEL_DTYPES:
            return f"the kernels sum float32, float16 and bfloat16, not {call.dtype}"
        if not call.is_aligned:
            return "the tensors do not begin at multiples of 16 bytes"
    return ""


def _without_kernels(facts: GroupFacts, call: CallFacts, reason: str) -> Plan:
    algorithm = Algorithm.NCCL
    if facts.is_deterministic and call.depends_on_order:
        algorithm = Algorithm.RANK_ORDER
        reason += "; NCCL promises no order, so the ranks' inputs are moved and summed in rank order"
    return Plan(algorithm=algorithm, grid=0, threads=0, piece_bytes=call.nbytes, reason=reason)


def _deterministic(facts: GroupFacts, call: CallFacts) -> Plan:
    """One algorithm for every size: what a row of a batch becomes must not depend on how large the batch is.

    All of ours give the same bits, so one would not be needed for those; it is one thing less to believe. The
    two-shot push is the one that serves every size: it moves 2 (n - 1) / n of the message where the one-shot push
    moves n - 1 times the message, and needs no registration, unlike the pulls.
    """
    if call.operation == "all_reduce":
        piece = _pieces(facts.capacity.push_two_shot, call.nbytes)
        if piece:
            return _plan(facts, Algorithm.PUSH_TWO_SHOT, piece, "deterministic: every size goes this way")
    elif 0 < call.nbytes <= facts.capacity.push_reduce_scatter:
        # In pieces the shards of the input would not lie one after the other.
        return _plan(
            facts, Algorithm.PUSH_REDUCE_SCATTER, call.nbytes, "deterministic: it fits into the arena"
        )
    return _without_kernels(facts, call, "deterministic, and the arena is too small")


def _pieces(capacity: int, nbytes: int) -> int:
    """Return the size of equal pieces that fit, whole vectors; 0 if not even one vector fits."""
    if nbytes <= capacity:
        return nbytes
    return capacity - capacity % VECTOR_BYTES


def _fastest(facts: GroupFacts, call: CallFacts, table: PolicyTable) -> Plan:
    family = family_of(facts.arch)
    if not family:
        return _without_kernels(
            facts, call, f"nobody has measured our algorithms on {facts.arch}; `tune` does"
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
        if call.nbytes > row.max_bytes:
            why = f"{call.nbytes} bytes are more than the {row.max_bytes} of {algorithm} ({row.source})"
        elif algorithm.is_pull and not (facts.is_exportable and call.in_graph):
            why = (
                f"{algorithm} reads the inputs of captured calls, and the allocator's memory cannot be exported"
                if call.in_graph
                else f"{algorithm} reads the inputs of captured calls only"
            )
        elif call.nbytes > facts.capacity.of(algorithm):
            why = f"{call.nbytes} bytes of {algorithm} do not fit into the memory of the group"
        else:
            reason = f"{call.nbytes} bytes are at most the {row.max_bytes} of {algorithm} ({row.source})"
            return _plan(facts, algorithm, call.nbytes, reason)
    return _without_kernels(facts, call, why)


def _plan(facts: GroupFacts, algorithm: Algorithm, piece_bytes: int, reason: str) -> Plan:
    grid, threads = _launch_shape(facts, algorithm, piece_bytes)
    return Plan(algorithm=algorithm, grid=grid, threads=threads, piece_bytes=piece_bytes, reason=reason)


def _launch_shape(facts: GroupFacts, algorithm: Algorithm, nbytes: int) -> tuple[int, int]:
    """Return blocks and threads: a thread for each vector, as small blocks on as many multiprocessors as there are.

    Blocks wait for blocks of the same number on other devices, so all must run at once: one on each
    multiprocessor at most.
    """
    if algorithm is Algorithm.PUSH_REDUCE_SCATTER:
        nbytes = -(-nbytes // facts.world_size)
    items = work_items(algorithm.value, nbytes, facts.world_size)
    most = max(min(facts.multiprocessors, MAX_BLOCKS), 1)
    if algorithm.is_pull:
        most = min(most, _PULL_BLOCKS.get(family_of(facts.arch), 36))
        return blocks_for(items, _PULL_THREADS, most), _PULL_THREADS
    threads = next((each for each in _THREADS if items <= each * most), _THREADS[-1])
    return blocks_for(items, threads, most), threads


@functools.lru_cache(maxsize=64)
def policy_digest(table: PolicyTable) -> str:
    """Return 16 hexadecimal digits that are equal for two tables if and only if they decide alike.

    Where the numbers come from does not count.
    """
    numbers = [msgspec.structs.replace(row, source="") for row in table.thresholds]
    return hashlib.sha256(msgspec.json.encode(numbers, order="deterministic")).hexdigest()[:16]
