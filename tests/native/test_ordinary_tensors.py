"""Sums of tensors that the native core reads and creates itself. The ranks are threads of one process."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from device_comm import _core
from device_comm.cpu.native_codes import OPERATION_CODES, TYPE_CODES
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from tests.native.test_shared_region import SLOT, everybody, filled, finish, regions, same_bits

ROOT = Path(__file__).parents[2]
MOST = 1 << 40
ORDINARY = [dtype for dtype in TYPE_CODES if not dtype.is_complex and dtype is not torch.bool]

# This process has no room for the result in its address space.
SCARCE = """
import resource, torch
from tests.native.test_shared_region import regions
end = regions(1)[0]
tensor = torch.empty(1 << 29, dtype=torch.uint8)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
try:
    end.all_reduce(tensor, 1 << 40, 1 << 40)
except MemoryError:
    print("no memory, calls:", end.number)
"""


def summed(end: _core.SharedRegion, tensor: torch.Tensor, one_shot_bytes: int = MOST) -> torch.Tensor:
    """Return the sum of the ranks' tensors; wait until it is complete."""
    answer = end.all_reduce(tensor, MOST, one_shot_bytes)
    assert answer is not None
    result, status = (answer, _core.DONE) if isinstance(answer, torch.Tensor) else answer
    assert finish(end, status) == _core.DONE
    return result


@settings(max_examples=80, deadline=None)
@given(
    ranks=st.integers(1, 4),
    shape=st.one_of(
        st.lists(st.integers(0, 5), max_size=4), st.lists(st.integers(0, 3 * SLOT), min_size=1, max_size=1)
    ),
    dtype=st.sampled_from(sorted(ORDINARY, key=str)),
    offset=st.integers(0, 3),
    one_shot=st.sampled_from([0, 100, MOST]),
    seed=st.integers(0, 9),
)
def test_a_sum_has_the_bits_of_the_rank_order_reference(
    ranks: int, shape: list[int], dtype: torch.dtype, offset: int, one_shot: int, seed: int
) -> None:
    """A sum in new memory, into an output or in place, of any shape, by either algorithm equals the reference."""
    elements = torch.Size(shape).numel()
    inputs = [filled(rank, elements + offset, dtype, seed)[offset:].view(shape) for rank in range(ranks)]
    expected = reduce_in_rank_order(inputs, ReduceOperation.SUM)

    def call(rank: int, end: _core.SharedRegion) -> tuple[torch.Tensor, ...]:
        source = inputs[rank].clone()
        apart = summed(end, source, one_shot)
        assert same_bits(source.reshape(-1), inputs[rank].reshape(-1))
        assert apart.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()
        output = torch.empty(offset + elements, dtype=dtype)[offset:].view(shape)
        for target in (output, source):
            status = end.all_reduce_into(source, target, MOST, one_shot)
            assert status is not None
            assert finish(end, status) == _core.DONE
        return apart, output, source

    for pair in everybody(regions(ranks), call):
        for result in pair:
            assert (type(result), result.shape, result.dtype) == (torch.Tensor, torch.Size(shape), dtype)
            assert result.is_contiguous()
            assert same_bits(result.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@given(
    ranks=st.integers(1, 3),
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    place=st.integers(0, 7),
    seed=st.integers(0, 9),
)
def test_a_gather_concatenates_in_rank_order(
    ranks: int, shape: list[int], dtype: torch.dtype, place: int, seed: int
) -> None:
    """Along every dimension, counted from the front or from the back, the result equals torch's concatenation."""
    dim = place % (2 * len(shape)) - len(shape)
    inputs = [filled(rank, torch.Size(shape).numel(), dtype, seed).view(shape) for rank in range(ranks)]
    expected = torch.cat(inputs, dim)

    def call(rank: int, end: _core.SharedRegion) -> torch.Tensor:
        answer = end.all_gather(inputs[rank], dim, MOST)
        assert answer is not None
        result, status = answer if isinstance(answer, tuple) else (answer, _core.DONE)
        assert finish(end, status) == _core.DONE
        assert result is not None
        return result

    for result in everybody(regions(ranks), call):
        assert (type(result), result.shape, result.dtype) == (torch.Tensor, expected.shape, dtype)
        assert same_bits(result.reshape(-1), expected.reshape(-1))


@pytest.mark.parametrize("dim", [2, -3, 2**70, True, 1.0, None, "0"])
def test_a_gather_along_no_dimension_begins_no_call(dim: object) -> None:
    """The core returns None for it; Python then refuses the call."""
    end = regions(2)[0]
    assert end.all_gather(torch.ones(3, 4), dim, MOST) is None
    assert end.all_gather(torch.tensor(1.0), 0, MOST) is None
    assert end.number == 0


def test_ranks_that_gather_different_tensors_all_learn_of_it() -> None:
    """Ranks with other shapes or another dimension get DISAGREE, and a call by the other method fits this one."""

    def call(rank: int, end: _core.SharedRegion) -> list[int]:
        found = []
        for shape, dim in (((2, 5), 0), ((3, 4), 1)):
            answer = end.all_gather(torch.ones(shape if rank else (3, 4)), dim if rank else 0, MOST)
            assert answer is not None
            found.append(finish(end, answer[1]) if isinstance(answer, tuple) else _core.DONE)
        own, result = torch.full((3, 4), float(rank)), torch.empty(3, 8)
        if rank == 0:
            addresses = own.data_ptr(), result.data_ptr()
            codes = TYPE_CODES[torch.float32], 0, 0
            found.append(finish(end, end.move(_core.ALL_GATHER, *addresses, 3, (16, 16), *codes)))
        else:
            answer = end.all_gather(own, -1, MOST)
            assert answer is not None
            done, status = answer if isinstance(answer, tuple) else (answer, _core.DONE)
            assert done is not None
            found.append(finish(end, status))
            result = done
        assert torch.equal(result, torch.cat([torch.zeros(3, 4), torch.ones(3, 4)], 1))
        return found

    assert everybody(regions(2), call) == [[_core.DISAGREE, _core.DISAGREE, _core.DONE]] * 2


def test_a_result_is_an_ordinary_tensor() -> None:
    """A result needs no gradient, can be written and computed with, and outlives its region and its input."""
    end = regions(1)[0]
    tensor = torch.ones(3, 4, requires_grad=True)
    result = summed(end, tensor)
    end.close(False)
    del tensor, end
    assert not result.requires_grad
    assert result.data_ptr() % 64 == 0
    result[1] = 5
    assert (result.requires_grad_() * 2).sum().item() == 2 * (8 + 20)
    assert torch.equal(result.detach().clone()[2], torch.ones(4))


def negated() -> torch.Tensor:
    """Return a contiguous tensor that has torch's negative bit."""
    value = torch.ones(1, dtype=torch.complex64).conj().imag
    assert value.is_neg()
    assert value.is_contiguous()
    return value


def without_memory() -> torch.Tensor:
    """Return a tensor whose storage was taken away."""
    value = torch.ones(100)
    value.untyped_storage().resize_(0)
    return value


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "make",
    [
        lambda: "text",
        lambda: None,
        lambda: torch.nn.Parameter(torch.ones(4)),
        lambda: torch.ones(4, 4).t(),
        lambda: torch.ones(4, 4)[:, 1],
        lambda: torch.ones(3, dtype=torch.complex64),
        lambda: torch.ones(3, dtype=torch.bool),
        lambda: torch.ones(3, 3).to_sparse(),
        lambda: torch.ones(3, 3).to_sparse_csr(),
        lambda: torch.ones(4, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
        lambda: torch.ones(1025),
        negated,
        without_memory,
    ],
)
def test_an_argument_that_is_no_ordinary_tensor_begins_no_call(make: Callable[[], Any]) -> None:
    """The core returns None for it, and also for a tensor that is too long; Python then handles the call."""
    end = regions(2)[0]
    value = make()
    assert end.all_reduce(value, 4096, 4096) is None
    assert end.all_reduce_into(value, value, 4096, 4096) is None
    assert end.all_gather(value, 0, 4096) is None
    assert end.number == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: tensor[:8],
        lambda tensor: torch.ones(3, 3),
        lambda tensor: torch.ones(9, dtype=torch.int32),
        lambda tensor: torch.ones(18)[::2],
        lambda tensor: tensor.as_strided((9,), (1,), tensor.storage_offset() + 1),
        lambda tensor: tensor.as_strided((9,), (1,), tensor.storage_offset() - 1),
        lambda tensor: None,
    ],
)
def test_an_output_that_is_no_place_for_the_sum_begins_no_call(make: Callable[[torch.Tensor], Any]) -> None:
    """The core leaves it to Python: another shape or dtype, no ordinary tensor, or a part of the input's memory."""
    end = regions(2)[0]
    tensor = torch.ones(16)[4:13]
    assert end.all_reduce_into(tensor, make(tensor), MOST, MOST) is None
    assert end.number == 0


def test_a_pending_sum_is_complete_when_the_last_rank_has_come() -> None:
    """The core returns the tensor at once with the status, and `resume` fills it. No other call can begin."""
    ends = regions(2)
    tensor = torch.full((9,), 1.0)
    first = ends[0].all_reduce(tensor, MOST, MOST)
    assert isinstance(first, tuple)
    result, status = first
    assert status == _core.PENDING
    refused = ends[0].all_reduce(torch.ones(9), MOST, MOST)
    assert isinstance(refused, tuple)
    assert refused[1] == ends[0].all_reduce_into(torch.ones(9), torch.ones(9), MOST, MOST) == _core.NESTED
    assert ends[0].all_gather(torch.ones(9), 0, MOST) == (None, _core.NESTED)
    other = ends[1].all_reduce(torch.full((9,), 2.0), MOST, MOST)
    assert finish(ends[0], status) == _core.DONE
    assert isinstance(other, torch.Tensor)
    assert torch.equal(result, torch.full((9,), 3.0))
    assert torch.equal(other, result)


@pytest.mark.guarantee("D13")
@pytest.mark.parametrize("other", [torch.ones(8), torch.ones(9, dtype=torch.int32)])
def test_ranks_that_sum_different_tensors_all_learn_of_it(other: torch.Tensor) -> None:
    """Ranks with different lengths or dtypes get DISAGREE, as in every call, and the next call works."""

    def call(rank: int, end: _core.SharedRegion) -> int:
        tensor = other.clone() if rank else torch.ones(9)
        status = end.all_reduce_into(tensor, tensor, MOST, MOST)
        assert status is not None
        status = finish(end, status)
        assert bool((tensor == 1).all())
        assert torch.equal(summed(end, torch.ones(3)), torch.full((3,), 2.0))
        return status

    assert everybody(regions(2), call) == [_core.DISAGREE] * 2


class Intruder(TorchFunctionMode):
    """A mode that runs `action` while the core reads a tensor."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the action, then the function of torch."""
        self.action()
        return func(*args, **(kwargs or {}))


def fail(error: BaseException) -> Callable[[], object]:
    """Return a function that raises `error`."""

    def action() -> object:
        raise error

    return action


def test_code_of_the_application_that_runs_meanwhile_does_no_harm() -> None:
    """The code may begin another call, close the region, raise an error or be interrupted by Ctrl-C."""
    end, tensor = regions(2)[0], torch.ones(3)
    with Intruder(fail(ValueError("no"))):
        assert end.all_reduce(tensor, MOST, MOST) is None
    with Intruder(fail(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        end.all_reduce(tensor, MOST, MOST)
    assert end.number == 0
    with Intruder(end.barrier):
        answer = end.all_reduce(tensor, MOST, MOST)
    assert isinstance(answer, tuple)
    assert answer[1] == _core.NESTED
    assert end.number == 1
    with Intruder(lambda: end.close(False)):
        assert end.all_reduce_into(tensor, tensor, MOST, MOST) == _core.CLOSED
    end = regions(2)[0]
    with Intruder(end.barrier):
        gathered = end.all_gather(tensor, 0, MOST)
    assert isinstance(gathered, tuple)
    assert gathered[1] == _core.NESTED
    end = regions(2)[0]
    with Intruder(lambda: end.close(False)):
        gathered = end.all_gather(tensor, 0, MOST)
    assert isinstance(gathered, tuple)
    assert gathered[1] == _core.CLOSED
    assert end.all_gather(tensor, 0, MOST) == (None, _core.CLOSED)


def test_memory_of_dropped_results_is_used_again_and_bounded() -> None:
    """Neither results nor what was needed to read the inputs stay in memory."""
    end, tensor = regions(1)[0], torch.ones(50_000)
    summed(end, tensor)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2000):
        summed(end, tensor)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_a_result_there_is_no_room_for_under_a_memory_limit_begins_nothing() -> None:
    """This rank raises a `MemoryError` before it has posted anything to the others."""
    done = subprocess.run(
        [sys.executable, "-c", SCARCE], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "no memory, calls: 0", done.stderr[-2000:]


def test_results_can_be_dropped_by_another_thread() -> None:
    """A thread that did not make a result may use it and drop the last reference to it."""
    end, tensor = regions(1)[0], torch.ones(300)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(200):
            assert pool.submit(lambda result: result.sum().item(), summed(end, tensor)).result() == 300


@pytest.mark.parametrize(
    "arguments", [(), (torch.ones(2), 8), (torch.ones(2), 8, -1), (torch.ones(2), "8", 8)]
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...]) -> None:
    """A missing argument, a negative number or an argument of another type raises."""
    end = regions(1)[0]
    for method in (end.all_reduce, partial(end.all_reduce_into, torch.ones(2))):
        with pytest.raises((TypeError, OverflowError)):
            method(*arguments)
    with pytest.raises((TypeError, OverflowError)):
        end.all_gather(*arguments[::-1])


def test_the_limit_of_one_shot_decides_the_algorithm() -> None:
    """A rank whose tensor is not ordinary makes the same call by the other method, with the same algorithm."""

    def call(rank: int, end: _core.SharedRegion) -> int:
        tensor, result = torch.ones(100), torch.empty(100)
        codes = (TYPE_CODES[torch.float32], OPERATION_CODES[ReduceOperation.SUM], 0)
        addresses = (tensor.data_ptr(), result.data_ptr(), 100)
        for limit, kind in ((400, _core.ALL_REDUCE_ONE_SHOT), (399, _core.ALL_REDUCE_TWO_SHOT)):
            if rank == 0:
                status = end.all_reduce_into(tensor, tensor, MOST, limit)
                assert status is not None
            else:
                status = end.reduce(kind, *addresses, *codes)
            assert finish(end, status) == _core.DONE
        return finish(end, end.barrier())

    assert everybody(regions(2), call) == [_core.DONE] * 2
