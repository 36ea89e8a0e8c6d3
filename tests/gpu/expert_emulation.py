"""Dispatch and combine of all ranks in one cooperative launch, against `all2all.py` on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from device_comm import all2all
from device_comm.all2all import RoutedTokens
from device_comm.cuda import kernel_layout
from device_comm.cuda.driver import PreparedLaunch
from device_comm.cuda.expert_layout import CombineCall, combine_slot_bytes
from device_comm.cuda.kernel_layout import WorkspaceLayout
from tests.expert_ranks import (
    Case,
    ThreadMeeting,
    a_case,
    call_of,
    cases,
    reference,
    rows_of,
    structure,
    tensors_of,
)
from tests.gpu.device import Gpu, Memory, to_bytes, u64
from tests.gpu.emulation import Cubin
from tests.gpu.values import DTYPES, expect_equal, random_words

__all__ = [
    "CapturedExchange",
    "ExpertEmulation",
    "check_experts",
    "experts_of_one_variant",
    "replayed_cases",
    "replays_of_one_variant",
]

ARENA_BYTES = 1 << 20
REPLAYS = 6
_THREADS = 256


class ExpertEmulation:
    """The ranks of one group for one dtype, on one device."""

    def __init__(
        self, driver: Gpu, world_size: int, dtype: str, cubin: Callable[[str], bytes], deadline_s: float = 2.0
    ) -> None:
        """Make workspaces, states and parameters, and load the kernels; as for `Emulation`."""
        self.driver, self.world_size, self.dtype = driver, world_size, DTYPES[dtype]
        layout = WorkspaceLayout(world_size, ARENA_BYTES)
        memory = self.memory = Memory(driver, world_size * (layout.total_bytes + (8 << 20)))
        self.stream = driver.stream_create()
        workspaces = [memory.room(layout.total_bytes) for _ in range(world_size)]
        for workspace in workspaces:
            for offset, value, words in layout.initial_words:
                driver.memset_d32(workspace + offset, value, words, self.stream)
        states = [memory.put(bytes(kernel_layout.STATE_BYTES)) for _ in workspaces]
        self.errors = [memory.put(bytes(kernel_layout.ERROR_RECORD_BYTES)) for _ in workspaces]
        packed = [
            kernel_layout.pack_params(
                layout,
                workspaces=workspaces,
                state=states[rank],
                error=self.errors[rank],
                deadline_ns=int(deadline_s * 1e9),
                rank=rank,
            )
            for rank in range(world_size)
        ]
        self._params = memory.put(b"".join(packed))
        self._module = driver.module_load(cubin("expert"))
        driver.stream_synchronize(self.stream)
        self._mark = memory.mark()

    def begin(self) -> None:
        """Forget the tensors of the previous case."""
        self.memory.back_to(self._mark)

    def prepare(self, structures: Sequence[bytes]) -> PreparedLaunch:
        """Copy the ranks' arguments of a kernel to the device."""
        return PreparedLaunch([u64(self._params), u64(self.memory.put(b"".join(structures)))])

    def queue(self, kernel: str, prepared: PreparedLaunch) -> None:
        """Queue a kernel for all ranks, or record it in a capture."""
        function = self.driver.module_function(self._module, kernel)
        # One grid for all launches, as the flags need.
        blocks = max(1, min(16, self.driver.multiprocessors() // self.world_size))
        self.driver.launch_cooperative(function, (blocks, self.world_size), _THREADS, self.stream, prepared)

    def launch(self, kernel: str, structures: Sequence[bytes]) -> None:
        """Run a kernel on all ranks, each with its arguments."""
        self.queue(kernel, self.prepare(structures))
        self.driver.stream_synchronize(self.stream)

    def expect_no_failure(self) -> None:
        """Raise if an error record holds a failure."""
        size = kernel_layout.ERROR_RECORD_BYTES
        found = [kernel_layout.read_failure(self.driver.memcpy_dtoh(each, size)) for each in self.errors]
        if any(found):
            raise AssertionError(f"error records: {found}")

    def close(self) -> None:
        """Give everything back."""
        self.driver.module_unload(self._module)
        self.driver.stream_destroy(self.stream)
        self.memory.free()


def _on_all(meeting: ThreadMeeting, work: Callable[[int], RoutedTokens]) -> list[RoutedTokens]:
    with ThreadPoolExecutor(meeting.world_size) as pool:
        return list(pool.map(work, range(meeting.world_size)))


def check_experts(emulation: ExpertEmulation, case: Case, *, is_compact: bool) -> None:
    """Compare one dispatch, padded or compact, and one combine of its rows on all ranks.

    Raises:
        WrongResultError: A row or a sum has other bits.
    """
    memory, size = emulation.memory, emulation.world_size
    meeting = ThreadMeeting(size)
    wanted = _on_all(meeting, partial(_reference, case, meeting))
    most = max(1, *(int((each.local_ids >= 0).any(1).sum()) for each in wanted)) + 1
    max_rows = most if is_compact else None
    emulation.begin()
    calls, structures, outputs, kept = [], [], [], []
    for rank in range(size):
        ids, placement = case.ids[rank], case.placement(rank)
        call, tensors = call_of(case, rank, max_rows), tensors_of(case, rank)
        outputs.append([memory.room(call.rows * nbytes) for nbytes in call.row_bytes])
        ids_out, local = memory.room(call.rows * call.topk * 8), memory.room(call.rows * call.topk * 8)
        tables = [memory.put(placement.owners), memory.put(placement.local)]
        places, lost = memory.room(ids.shape[0] * size * 4), memory.room(ids.shape[0])
        received = memory.room(4 * (size + 1))
        words = call.words()
        addresses = [memory.put(ids), ids_out, local, *tables, places, lost, received]
        call.fill(words, 0, [memory.put(each) for each in tensors], outputs[-1], addresses, ids.shape[0])
        calls.append(call)
        structures.append(structure(words))
        kept.append((local, received, places, lost))
    emulation.launch("expert_dispatch", structures)
    for rank in range(size):
        tensors, _, local_ids = rows_of(wanted[rank], max_rows)
        for address, right in zip(outputs[rank], tensors, strict=True):
            expect_equal(memory.get(address, right.numel(), right.dtype), right, f"rows of rank {rank}")
        found = memory.get(kept[rank][0], local_ids.numel(), torch.int64)
        if not torch.equal(found, local_ids.view(-1)):
            raise AssertionError(f"local ids of rank {rank}: {found.tolist()}, not {local_ids.tolist()}")
    _check_combine(emulation, case, meeting, wanted, max_rows, kept)
    emulation.expect_no_failure()


def _reference(case: Case, meeting: ThreadMeeting, rank: int) -> RoutedTokens:
    return reference(case, rank, meeting)


def _check_combine(
    emulation: ExpertEmulation,
    case: Case,
    meeting: ThreadMeeting,
    wanted: Sequence[RoutedTokens],
    max_rows: int | None,
    kept: Sequence[tuple[int, int, int, int]],
) -> None:
    memory, size, dtype = emulation.memory, emulation.world_size, emulation.dtype
    hidden = case.hidden[0].shape[1]
    results = [
        random_words(size * case.capacity * hidden, dtype, 50 + rank).view(-1, hidden) for rank in range(size)
    ]
    structures, outputs = [], []
    for rank, (local, received, places, lost) in enumerate(kept):
        came = (wanted[rank].local_ids >= 0).any(1)
        own = results[rank] if max_rows is None else torch.zeros(max_rows, hidden, dtype=dtype)
        if max_rows is not None:
            own[: int(came.sum())] = results[rank][came]
        call = CombineCall(
            slot_bytes=combine_slot_bytes(case.capacity, hidden * dtype.itemsize),
            row_bytes=hidden * dtype.itemsize,
            topk=case.ids[rank].shape[1],
            capacity=case.capacity,
            rows=own.shape[0],
            is_compact=max_rows is not None,
        )
        words, tokens = call.words(), case.ids[rank].shape[0]
        outputs.append(memory.room(tokens * call.row_bytes))
        call.fill(words, 0, [memory.put(own), 0, local, received, places, lost, outputs[-1]], tokens)
        structures.append(structure(words))
    emulation.launch("expert_combine", structures)

    def summed(rank: int) -> torch.Tensor:
        return all2all.combine(meeting.communicator(rank), results[rank], wanted[rank])

    with ThreadPoolExecutor(size) as pool:
        for rank, right in enumerate(pool.map(summed, range(size))):
            _expect_sums(memory.get(outputs[rank], right.numel(), dtype), right, rank)


def _expect_sums(found: torch.Tensor, right: torch.Tensor, rank: int) -> None:
    found = found.view(right.shape)
    # Which NaN a sum is is not promised.
    expect_equal(found.masked_fill(found.isnan(), 0.5), right.masked_fill(right.isnan(), 0.5), "sums")
    if not torch.equal(found.isnan(), right.isnan()):
        raise AssertionError(f"rank {rank}: other sums are NaN")


def experts_of_one_variant(driver: Gpu, world: int, dtype: str, cubin: Cubin, deadline_s: float = 2.0) -> int:
    """Compare every case, padded and compact; return the number of dispatches and combines."""
    emulation = ExpertEmulation(driver, world, dtype, partial(cubin, world, dtype), deadline_s)
    try:
        everything = cases(world, DTYPES[dtype])
        for case in everything:
            for is_compact in (False, True):
                check_experts(emulation, case, is_compact=is_compact)
    finally:
        emulation.close()
    return 4 * len(everything)


class CapturedExchange:
    """A graph of a dispatch and a combine of the rows that it brought, of all ranks, as if each expert did nothing."""

    def __init__(self, emulation: ExpertEmulation, case: Case, *, is_compact: bool) -> None:
        """Copy a case to the device and capture both kernels; nothing has run yet."""
        self.emulation, self.is_compact = emulation, is_compact
        memory, size = emulation.memory, emulation.world_size
        max_rows = size * case.capacity if is_compact else None
        emulation.begin()
        dispatches, combines = [], []
        self._inputs: list[list[int]] = []
        self._sums: list[int] = []
        for rank in range(size):
            call, tensors, ids = call_of(case, rank, max_rows), tensors_of(case, rank), case.ids[rank]
            placement = case.placement(rank)
            self._inputs.append([memory.put(each) for each in (ids, *tensors)])
            outputs = [memory.room(call.rows * nbytes) for nbytes in call.row_bytes]
            ids_out, local = memory.room(call.rows * call.topk * 8), memory.room(call.rows * call.topk * 8)
            tables = [memory.put(placement.owners), memory.put(placement.local)]
            places, lost = memory.room(ids.shape[0] * size * 4), memory.room(ids.shape[0])
            received = memory.room(4 * (size + 1))
            own_ids, *own = self._inputs[-1]
            words = call.words()
            addresses = [own_ids, ids_out, local, *tables, places, lost, received]
            call.fill(words, 0, own, outputs, addresses, ids.shape[0])
            dispatches.append(structure(words))
            combine = CombineCall(
                slot_bytes=combine_slot_bytes(case.capacity, call.row_bytes[0]),
                row_bytes=call.row_bytes[0],
                topk=call.topk,
                capacity=case.capacity,
                rows=call.rows,
                is_compact=is_compact,
            )
            self._sums.append(memory.room(ids.shape[0] * call.row_bytes[0]))
            words = combine.words()
            combine.fill(
                words, 0, [outputs[0], 0, local, received, places, lost, self._sums[-1]], ids.shape[0]
            )
            combines.append(structure(words))
        driver, stream = emulation.driver, emulation.stream
        prepared = [emulation.prepare(each) for each in (dispatches, combines)]
        driver.begin_capture(stream)
        emulation.queue("expert_dispatch", prepared[0])
        emulation.queue("expert_combine", prepared[1])
        self._graph = driver.end_capture(stream)

    def replay(self, case: Case) -> None:
        """Replace the inputs by those of a case of the same shape, replay, and compare the sums of all ranks.

        Raises:
            WrongResultError: A sum has other bits.
        """
        emulation, meeting = self.emulation, ThreadMeeting(self.emulation.world_size)
        driver, stream = emulation.driver, emulation.stream
        for rank, addresses in enumerate(self._inputs):
            for address, tensor in zip(addresses, (case.ids[rank], *tensors_of(case, rank)), strict=True):
                driver.memcpy_htod(address, to_bytes(tensor))
        driver.stream_synchronize(0)
        driver.replay(self._graph, stream)
        driver.stream_synchronize(stream)

        def summed(rank: int) -> torch.Tensor:
            routed = _reference(case, meeting, rank)
            return all2all.combine(meeting.communicator(rank), routed.hidden_states, routed)

        with ThreadPoolExecutor(emulation.world_size) as pool:
            for rank, right in enumerate(pool.map(summed, range(emulation.world_size))):
                found = emulation.memory.get(self._sums[rank], right.numel(), emulation.dtype)
                _expect_sums(found, right, rank)
        emulation.expect_no_failure()

    def close(self) -> None:
        """Give the graph back."""
        self.emulation.driver.forget(self._graph)


def replayed_cases(world: int, dtype: torch.dtype) -> list[Case]:
    """Return cases of one shape, of which each sends other rows to other ranks; some rows do not fit."""
    tokens = [(7, 0, 12, 1, 9, 2, 30, 5)[rank] for rank in range(world)]
    owners = [each % world for each in (3, 1, 1, 0, 2, 3, 0, 1, 0, 6, 7, 5)]
    # Steps of 6 keep the dtype of the ids and whether there are weights.
    return [a_case(world, dtype, tokens, 3, owners, 6, 12 + 6 * number) for number in range(REPLAYS)]


def replays_of_one_variant(driver: Gpu, world: int, dtype: str, cubin: Cubin, deadline_s: float = 2.0) -> int:
    """Replay a padded and then a compact graph, each with every case; return the number of replays."""
    emulation = ExpertEmulation(driver, world, dtype, partial(cubin, world, dtype), deadline_s)
    try:
        made = replayed_cases(world, DTYPES[dtype])
        for is_compact in (False, True):
            captured = CapturedExchange(emulation, made[0], is_compact=is_compact)
            for case in made:
                captured.replay(case)
            captured.close()
    finally:
        emulation.close()
    return 2 * len(made)
