"""Ranks that dispatch and combine with the kernels as threads, and the same calls by `all2all.py` as the reference."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import threading
from collections.abc import Sequence
from typing import Any, cast

import torch

from device_comm import all2all
from device_comm.all2all import Choice, DispatchForm, ExpertPlacement, RoutedTokens, contiguous_ranks
from device_comm.base import DeviceCommunicator
from device_comm.cuda.expert_layout import CombineCall, DispatchCall, DispatchSlots, combine_slot_bytes
from device_comm.cuda.kernel_layout import FLAGS_BYTES
from tests.native.cuda.test_kernel_results import Group, random_words

__all__ = [
    "Case",
    "Dispatched",
    "ThreadMeeting",
    "a_case",
    "call_of",
    "cases",
    "clear_epochs",
    "combine",
    "dispatch",
    "reference",
    "rows_of",
    "structure",
    "tensors_of",
]


class ThreadMeeting:
    """A place where the ranks of one process, a thread each, put what they send."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size, timeout=60)
        self.parcels: dict[int, Any] = {}

    def exchange(self, rank: int, parcel: Any) -> list[Any]:
        """Return what every rank has put."""
        self.parcels[rank] = parcel
        self.barrier.wait()
        found = [self.parcels[each] for each in range(self.world_size)]
        self.barrier.wait()
        return found

    def communicator(self, rank: int) -> DeviceCommunicator:
        """Return the part of a communicator that the all-to-all form uses."""
        return cast("DeviceCommunicator", _ThreadCommunicator(self, rank))


class _ThreadCommunicator:
    device = torch.device("cpu")

    def __init__(self, meeting: ThreadMeeting, rank: int) -> None:
        self.meeting, self.rank_in_group, self.world_size = meeting, rank, meeting.world_size

    def expert_exchange(self, *, may_build: bool = True) -> None:
        """Return no kernels: this is the reference."""
        del may_build

    def all_to_all(
        self, tensor: torch.Tensor, dim: int, sent: Sequence[int], received: Sequence[int]
    ) -> torch.Tensor:
        """Send part i to rank i and return the parts that come."""
        assert dim == 0
        parts = self.meeting.exchange(self.rank_in_group, torch.split(tensor, list(sent)))
        mine = [each[self.rank_in_group] for each in parts]
        assert [each.shape[0] for each in mine] == list(received)
        return torch.cat(mine)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One dispatch: what every rank sends.

    Attributes:
        owners: The rank of each expert.
        capacity: Most rows from one rank to another.
        hidden: The hidden states of each rank.
        ids: The ids of each rank.
        weights: The weights of each rank, float32, or None.
        extra: A further tensor of each rank.
    """

    owners: list[int]
    capacity: int
    hidden: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor] | None
    extra: list[torch.Tensor]

    def placement(self, rank: int) -> ExpertPlacement:
        """Return the placement as `rank` sees it."""
        return ExpertPlacement(self.owners, rank, len(self.hidden), torch.device("cpu"))


def a_case(
    world_size: int,
    dtype: torch.dtype,
    tokens: list[int],
    topk: int,
    owners: list[int],
    capacity: int,
    seed: int,
    *,
    vectors: int = 2,
    wrong: bool = False,
) -> Case:
    """Return random tokens of any bits. Some slots hold no expert, and some tokens have several on one rank."""
    assert len(tokens) == world_size
    made = torch.Generator().manual_seed(seed)
    experts = len(owners)
    highest = experts + 2 if wrong else experts
    ids = [torch.randint(-1, highest, (count, topk), generator=made) for count in tokens]
    hidden = vectors * 16 // dtype.itemsize
    return Case(
        owners=owners,
        capacity=capacity,
        hidden=[random_words((count, hidden), dtype, seed + r) for r, count in enumerate(tokens)],
        ids=[each.to(torch.int32) if seed % 2 else each for each in ids],
        weights=[torch.rand((count, topk), generator=made) for count in tokens] if seed % 3 else None,
        extra=[
            torch.randint(-(2**31), 2**31 - 1, (count, 3), generator=made, dtype=torch.int32)
            for count in tokens
        ],
    )


def cases(world_size: int, dtype: torch.dtype) -> list[Case]:
    """Return the cases: uneven and zero tokens, one rank with all experts, several per rank, lost and many tokens."""
    size = world_size
    uneven = [(7, 0, 3, 1, 9, 2, 0, 5)[r] for r in range(size)]
    shuffled = [each % size for each in (3, 1, 1, 0, 2, 3, 0, 1, 0, 6, 7, 5)]
    return [
        a_case(size, dtype, [4] * size, 2, contiguous_ranks(2 * size, size), 4, 11),
        a_case(size, dtype, uneven, 4, contiguous_ranks(size + 3, size), 9, 12),
        a_case(size, dtype, [5, *[0] * (size - 1)], 1, [size - 1] * 5, 5, 13),
        a_case(size, dtype, [6] * size, 5, [size - 1] * 5, 6, 14),
        a_case(size, dtype, [0] * size, 2, shuffled, 3, 15),
        a_case(size, dtype, uneven, 3, shuffled, 2, 16),  # some do not fit
        a_case(size, dtype, [8] * size, 3, shuffled, 8, 17, wrong=True),
        a_case(size, dtype, [9] * size, size, list(range(size)), 9, 18),  # some go everywhere
        a_case(
            size, dtype, [(300, 129, 1, 128)[r % 4] for r in range(size)], 2, shuffled, 130, 19, vectors=1
        ),
    ]


def reference(case: Case, rank: int, meeting: ThreadMeeting) -> RoutedTokens:
    """Return what `all2all.dispatch` returns to a rank. Collective among the threads of the ranks."""
    return all2all.dispatch(
        meeting.communicator(rank),
        case.hidden[rank],
        case.ids[rank],
        None if case.weights is None else case.weights[rank],
        [case.extra[rank]],
        case.placement(rank),
        tuple(each.shape[0] for each in case.hidden),
        Choice(DispatchForm.ALL_TO_ALL, "the reference"),
        case.capacity,
        is_static=True,
    )


@dataclasses.dataclass
class Dispatched:
    """What the dispatch kernel wrote for one rank."""

    tensors: list[torch.Tensor]
    ids: torch.Tensor
    local: torch.Tensor
    places: torch.Tensor
    lost: torch.Tensor
    received: torch.Tensor
    weights: torch.Tensor | None
    rows: int
    is_compact: bool


def _garbage(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that holds no value which a kernel would write by chance."""
    empty = torch.empty(tuple(shape), dtype=dtype)
    empty.view(-1).view(torch.uint8).fill_(0x5A)
    return empty


def structure(words: Sequence[int]) -> bytes:
    """Return a kernel's argument in memory."""
    return b"".join(each.to_bytes(8, "little") for each in words)


def tensors_of(case: Case, rank: int) -> list[torch.Tensor]:
    """Return what a rank sends beside the ids."""
    return [case.hidden[rank], *([] if case.weights is None else [case.weights[rank]]), case.extra[rank]]


def call_of(case: Case, rank: int, max_rows: int | None) -> DispatchCall:
    """Return the shape of a rank's dispatch."""
    ids = case.ids[rank]
    row_bytes = tuple(math.prod(each.shape[1:]) * each.itemsize for each in tensors_of(case, rank))
    return DispatchCall(
        slots=DispatchSlots.of(case.capacity, ids.shape[1], row_bytes),
        row_bytes=row_bytes,
        topk=ids.shape[1],
        experts=len(case.owners),
        capacity=case.capacity,
        rows=len(case.hidden) * case.capacity if max_rows is None else max_rows,
        id_bytes=ids.itemsize,
        is_compact=max_rows is not None,
    )


def dispatch(
    group: Group, case: Case, rank: int, *, max_rows: int | None = None, grid: int = 2, threads: int = 2
) -> Dispatched:
    """Run the dispatch kernel of one rank: padded, or compact with `max_rows` rows. Collective among the threads."""
    ids, size = case.ids[rank], group.world_size
    tensors, call = tensors_of(case, rank), call_of(case, rank, max_rows)
    rows = call.rows
    assert call.slots.slot_bytes * size <= group.layout.arena_bytes
    outputs = [_garbage((rows, *each.shape[1:]), each.dtype) for each in tensors]
    made = Dispatched(
        tensors=outputs,
        ids=_garbage((rows, ids.shape[1]), ids.dtype),
        local=_garbage((rows, ids.shape[1]), torch.int64),
        places=_garbage((ids.shape[0], size), torch.int32),
        lost=_garbage((ids.shape[0],), torch.bool),
        received=_garbage((size + 1,), torch.int32),
        weights=None if case.weights is None else outputs[1],
        rows=rows,
        is_compact=max_rows is not None,
    )
    placement = case.placement(rank)
    others = [made.ids, made.local, placement.owners, placement.local, made.places, made.lost, made.received]
    words = call.words()
    call.fill(
        words,
        0,
        [each.data_ptr() for each in tensors],
        [each.data_ptr() for each in outputs],
        [each.data_ptr() for each in (ids, *others)],
        ids.shape[0],
    )
    group.kernels.launch("expert_dispatch", grid, threads, [group.params[rank], structure(words)])
    return made


def combine(
    group: Group,
    made: Dispatched,
    case: Case,
    rank: int,
    results: torch.Tensor,
    *,
    grid: int = 2,
    threads: int = 2,
) -> torch.Tensor:
    """Run the combine kernel of one rank for results of [rows, hidden] or [rows, k, hidden]. Collective."""
    row_bytes = results.shape[-1] * results.itemsize
    call = CombineCall(
        slot_bytes=combine_slot_bytes(case.capacity, row_bytes),
        row_bytes=row_bytes,
        topk=made.ids.shape[1],
        capacity=case.capacity,
        rows=made.rows,
        is_compact=made.is_compact,
    )
    assert call.slot_bytes * group.world_size <= group.layout.arena_bytes
    tokens = made.places.shape[0]
    output = _garbage((tokens, results.shape[-1]), results.dtype)
    weights = made.weights.data_ptr() if results.dim() == 3 and made.weights is not None else 0
    others = [each.data_ptr() for each in (made.local, made.received, made.places, made.lost, output)]
    words = call.words()
    call.fill(words, 0, [results.data_ptr(), weights, *others], tokens)
    group.kernels.launch("expert_combine", grid, threads, [group.params[rank], structure(words)])
    return output


def rows_of(routed: RoutedTokens, rows: int | None) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Return tensors, ids and local ids of the reference: padded, or compact with `rows` rows."""
    weights = [] if routed.topk_weights is None else [routed.topk_weights]
    tensors = [routed.hidden_states, *weights, *routed.extra_tensors]
    if rows is None:
        return tensors, routed.topk_ids, routed.local_ids
    came = (routed.local_ids >= 0).any(1)

    def compact(tensor: torch.Tensor, filler: int) -> torch.Tensor:
        filled = tensor.new_full((rows, *tensor.shape[1:]), filler)
        filled[: int(came.sum())] = tensor[came]
        return filled

    return [compact(each, 0) for each in tensors], compact(routed.topk_ids, -1), compact(routed.local_ids, -1)


def clear_epochs(group: Group, epoch: int) -> None:
    """Let the next launch of all ranks be number `epoch`, as if the ones before had been made."""
    for rank in range(group.world_size):
        words = (ctypes.c_uint32 * 256).from_address(group.states[rank])
        for block in range(256):
            words[block] = epoch
        ctypes.memset(group.workspaces[rank], 0, FLAGS_BYTES)
        flags = (ctypes.c_uint32 * (FLAGS_BYTES // 4)).from_address(group.workspaces[rank])
        for place in range(FLAGS_BYTES // 4):
            flags[place] = (epoch - 1) % 2**32
