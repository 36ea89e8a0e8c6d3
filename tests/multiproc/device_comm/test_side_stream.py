"""Asynchronous calls beside the caller's stream, over real processes and a driver that knows the order of all work.

The fake driver completes every call at once, so results cannot show a missing wait. It notes instead, for each piece of
work, what streams and events put in front of it.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from coordinator.calls import Calls
from coordinator.errors import CapabilityError, ClosedError, UsageError
from coordinator.torch_interop.collectives import TorchCollectives
from device_comm.async_calls import CallHandle, CallLine
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda.side_stream import SideStream
from device_comm.cuda_settings import CudaSettings
from device_comm.nccl.library import NcclLibrary
from tests.fake_cuda import FakeDriver, fake_cubin, violations
from tests.harness import RankPool
from tests.multiproc.device_comm.test_expert_exchange import ARENA, Tokens, it_combine, sent_by
from tests.nccl_ranks import DeviceStreams, context_of
from tests.worlds import world

CALLER = 7
DEVICE = torch.device("cuda", 0)
LARGE = 60_000
"""Elements of a sum that NCCL carries; our kernels carry one of 100."""

_NCCL_CALLS = ("ncclAllReduce", "ncclAllGather", "ncclBroadcast", "ncclReduceScatter", "ncclSend", "ncclRecv")


class Rank:
    """One rank: its communicator, its asynchronous calls, and what its device has been given."""

    def __init__(self, group: Any, it: CudaCommunicator, driver: FakeDriver, streams: DeviceStreams) -> None:
        self.group, self.it, self.driver, self.streams = group, it, driver, streams
        self.line = CallLine(group._health, DEVICE, aside=it.aside)

    def later(self, call: Callable[..., Any], *args: Any) -> CallHandle[Any]:
        """Make an asynchronous call."""
        return self.line.submit("call", partial(call, *args), at_once=True)

    def eagerly_later(self, tensor: torch.Tensor) -> Any:
        """Make an asynchronous call on the caller's stream while another one is current, and wait for it."""
        with self.streams.use(CALLER):
            return self.later(self.it.all_reduce, tensor).wait()

    def dispatch(self) -> Any:
        """Send tokens to the ranks of their experts, by the kernels."""
        rank = self.it.rank_in_group
        routed = sent_by(self.it, Tokens(rank, 1, 4), rank, (4, 4), capacity=4)
        assert "by kernels" in routed.choice.reason
        return routed

    def queue(self, name: str, stream: int = CALLER) -> int:
        """Queue work of the application; return its number."""
        return self.driver.queue(stream, name)

    def last(self) -> int:
        """Return the number of the last work."""
        return len(self.driver.works) - 1

    def follows(self, later: int, earlier: int) -> bool:
        """Return whether one piece of work waits for another."""
        return self.driver.works[later].follows(earlier)


@contextmanager
def device_world(
    rank: int, world_size: int, directory: Path, native: str, *, meets: bool = True
) -> Iterator[Rank]:
    """Join a world; yield this rank, connected. Without `meets` the group may be broken at the end."""
    shared = directory / "device"
    shared.mkdir(exist_ok=True)
    settings = CudaSettings(
        arena_bytes=1 << 16, staging_bytes=0, expert_arena_bytes=ARENA, kernel_cache=str(directory / "cache")
    )
    with world(rank, world_size, directory) as group:
        driver = FakeDriver(shared, rank)
        streams = DeviceStreams(driver)
        library = NcclLibrary(f"{native}/libnccl-stub.so")
        for name in _NCCL_CALLS:
            function: Any = noted(driver, name, library.functions[name])
            library.functions[name] = function
        communicator = CudaCommunicator(
            context_of(group, cuda=settings),
            open_driver=lambda: driver,
            library=library,
            streams=streams,
            cubin=lambda _family, dtype: fake_cubin(f"{native}/kernels_{world_size}_{dtype}.so"),
        )
        me = Rank(group, communicator, driver, streams)
        communicator.prepare_buffers(0)
        assert communicator.all_reduce(torch.ones(100))[0] == world_size
        assert communicator.all_reduce(torch.ones(LARGE))[0] == world_size
        assert communicator.path("all_reduce", 400, torch.float32).algorithm == "push_one_shot"
        assert communicator.path("all_reduce", 4 * LARGE, torch.float32).algorithm == "nccl"
        try:
            yield me
        finally:
            communicator.destroy()
            if meets:
                group.barrier()
            assert driver.leaks() == []
            driver.release()
            assert violations(shared) == []


def noted(driver: FakeDriver, name: str, call: Callable[..., int]) -> Callable[..., int]:
    """Return `call`, a function of NCCL, which notes its work on the stream that is its last argument."""

    def noting(*arguments: Any) -> int:
        driver.queue(int(arguments[-1]), name)
        return call(*arguments)

    return noting


# --- one call -------------------------------------------------------------------------------------------------


def one_call(rank: int, world_size: int, directory: Path, native: str, count: int) -> tuple[str, int]:
    with device_world(rank, world_size, directory, native) as me:
        tensor = torch.full((count,), float(rank + 1))
        written = me.queue("input")
        handle = me.later(me.it.all_reduce, tensor)
        call = me.last()
        side = me.driver.works[call].stream
        assert side != CALLER
        assert me.streams.number == CALLER
        assert me.follows(call, written)
        # The memory of the input is not reused before the side stream is done with it.
        assert me.streams.kept == [(tensor.data_ptr(), side)]
        beside = me.queue("beside")
        assert not me.follows(beside, call)
        me.driver.unfinished = 1 << call
        assert handle.join()
        assert not handle.is_completed()
        result = handle.wait()
        assert not handle.is_completed()
        me.driver.unfinished = 0
        assert handle.is_completed()
        assert result[0] == 3.0
        # Nor is that of the result, which was allocated on the side stream, before the caller's is.
        assert me.streams.kept[1:] == [(result.data_ptr(), CALLER)]
        assert me.follows(me.queue("use"), call)
        # Any stream may wait, also again.
        me.streams.number = 8
        assert not me.follows(me.queue("other", 8), call)
        handle.wait()
        assert me.follows(me.queue("other use", 8), call)
        assert me.streams.kept[-1] == (result.data_ptr(), 8)
        me.streams.number = CALLER
        # The next call is on the same stream, behind the new work of the caller's.
        me.later(me.it.all_reduce, tensor)
        assert me.driver.works[me.last()].stream == side
        assert me.follows(me.last(), beside)
        return me.driver.works[call].name, side


@pytest.mark.guarantee("D76")
@pytest.mark.parametrize(("count", "name"), [(100, "push_one_shot"), (LARGE, "ncclAllReduce")])
def test_a_call_runs_beside_the_callers_stream(ranks2: RankPool, native: str, count: int, name: str) -> None:
    """Behind what that stream had, and before what comes behind `wait`; what lies between waits for neither."""
    for found, side in ranks2.run(one_call, native, count):
        assert found == name
        assert side >= 900


# --- several calls --------------------------------------------------------------------------------------------


def in_order(rank: int, world_size: int, directory: Path, native: str, seed: int) -> int:
    chance = random.Random(seed)
    with device_world(rank, world_size, directory, native) as me:
        small, large = torch.ones(100), torch.ones(LARGE)
        # Builds the kernels, too.
        routed = me.dispatch()
        calls: list[Callable[[], Any]] = [
            lambda: me.it.all_reduce(small),
            lambda: me.it.all_reduce(large),
            lambda: me.it.all_gather(small),
            lambda: me.it.broadcast(large, 0),
            me.dispatch,
            lambda: it_combine(me.it, routed.hidden_states, routed),
            lambda: me.it.send(small, 1) if rank == 0 else me.it.recv(small.shape, small.dtype, 0),
        ]
        before = me.last()
        switches = 0
        for _ in range(60):
            call, is_later, stream = chance.choice(calls), chance.random() < 0.5, chance.choice((CALLER, 8))
            me.streams.number = stream
            begin = len(me.driver.works)
            if is_later:
                me.later(call)
            else:
                call()
            mine = range(begin, len(me.driver.works))
            assert mine
            for number in mine:
                assert me.follows(number, before), (me.driver.works[before], me.driver.works[number])
                switches += me.driver.works[number].stream != me.driver.works[before].stream
                before = number
        me.streams.number = CALLER
        return switches


@pytest.mark.guarantee("D55")
@pytest.mark.guarantee("D76")
@pytest.mark.parametrize("seed", [1, 2])
def test_calls_of_a_group_never_run_at_once(ranks2: RankPool, native: str, seed: int) -> None:
    """Whatever carries them, on whatever stream, asynchronous or not: each waits for the one before."""
    for switches in ranks2.run(in_order, native, seed):
        assert switches > 5


def beside_experts(rank: int, world_size: int, directory: Path, native: str) -> None:
    with device_world(rank, world_size, directory, native) as me:
        last_eager = me.last()
        for is_captured in (False, True):
            with me.it.capture(9):
                if is_captured:
                    me.streams.number = 9
                    me.driver.begin_capture(9)
                me.later(me.it.all_reduce, torch.ones(100))
                reduced = me.last()
                me.dispatch()
                dispatched = me.last()
                assert me.follows(dispatched, reduced)
                me.later(me.it.all_reduce, torch.ones(100))
                assert me.follows(me.last(), dispatched)
                me.dispatch()
                if is_captured:
                    me.driver.end_capture(9)
                else:
                    last_eager = me.last()
                me.streams.number = CALLER
            # The kernels for experts, which the first pass has built within `capture`, leave it as those for sums do.
            me.streams.number = 8
            me.dispatch()
            assert me.follows(me.last(), last_eager)
            me.streams.number = CALLER
            me.dispatch()
            expert = me.it.expert_exchange()
            assert expert is not None
            assert expert.stream == CALLER


@pytest.mark.guarantee("D55")
@pytest.mark.guarantee("D76")
def test_kernels_for_experts_follow_asynchronous_sums(ranks2: RankPool, native: str) -> None:
    """They are calls of the same group, which has at most half of a device; so are their branches of a capture."""
    ranks2.run(beside_experts, native)


# --- captures -------------------------------------------------------------------------------------------------


def captured(rank: int, world_size: int, directory: Path, native: str) -> list[float]:
    with device_world(rank, world_size, directory, native) as me:
        driver, streams, own = me.driver, me.streams, torch.full((100,), float(rank + 1))
        early = me.later(me.it.all_reduce, own)
        with me.it.capture(9):
            streams.number = 9
            driver.begin_capture(9)
            written = me.queue("input", 9)
            handle = me.later(me.it.all_reduce, own)
            call = me.last()
            assert driver.works[call].stream >= 900
            assert me.follows(call, written)
            assert not me.follows(me.queue("beside", 9), call)
            for ask in (early.wait, early.is_completed, handle.is_completed):
                with pytest.raises(UsageError):
                    ask()
            result = handle.wait()
            assert me.follows(me.queue("use", 9), call)
            # A later call without `async_op` joins as well. The graph writes to the results, which must live.
            results: list[Any] = [me.later(me.it.all_reduce, own)]
            call = me.last()
            results.append(me.it.all_reduce(own))
            assert me.follows(me.last(), call)
            graph = driver.end_capture(9)
            streams.number = CALLER
        assert graph.launches == ["push_one_shot"] * 3
        for ask in (handle.wait, handle.is_completed):
            with pytest.raises(UsageError):
                ask()
        assert early.wait()[0] == 3.0
        seen = []
        for step in range(3):
            own.fill_(float(rank + step))
            driver.replay(graph)
            seen.append(float(result[0]))
        # Eager calls go on, also asynchronous ones.
        assert me.later(me.it.all_reduce, own).wait()[0] == seen[-1]
        assert len(results) == 2
        return seen


@pytest.mark.guarantee("D76")
def test_a_captured_call_is_a_branch_of_the_graph(ranks2: RankPool, native: str) -> None:
    """It begins behind the captured stream and is joined by `wait` or a later call. Handles do not cross its bounds."""
    assert ranks2.run(captured, native) == [[1.0, 3.0, 5.0]] * 2


# --- torch's functions ----------------------------------------------------------------------------------------


def torch_functions(rank: int, world_size: int, directory: Path, native: str) -> None:
    with device_world(rank, world_size, directory, native) as me:
        calls = Calls(me.group._health, DEVICE, aside=me.it.aside)
        # Its tensors are on the CPU here, which is what `device_type` routes by.
        group = TorchCollectives(rank, world_size, calls, lambda: me.it, None)
        options: Any = dist.AllreduceOptions()
        for is_later in (True, False):
            options.asyncOp = is_later
            tensor = torch.full((100,), float(rank + 1))
            me.streams.kept.clear()
            work = group.allreduce([tensor], options)
            call = me.last()
            assert me.driver.works[call].name == "push_one_shot"
            assert (me.driver.works[call].stream == CALLER) is not is_later
            assert (tensor.data_ptr() in [address for address, _ in me.streams.kept]) is is_later
            assert me.follows(me.queue("beside"), call) is not is_later
            assert work.wait()
            assert work.is_completed()
            assert me.follows(me.queue("use"), call)
            assert tensor[0] == 3.0
        gather: Any = AllgatherOptions()
        gather.asyncOp = True
        part, whole = torch.full((100,), float(rank)), torch.empty(200)
        me.streams.kept.clear()
        group._allgather_base(whole, part, gather).wait()
        kept = {address for address, _ in me.streams.kept}
        assert {part.data_ptr(), whole.data_ptr()} <= kept
        assert whole[150] == 1.0


@pytest.mark.guarantee("D76")
def test_works_of_torchs_functions_order_streams(ranks2: RankPool, native: str) -> None:
    """`async_op=True` takes the side stream, which `Work.wait` lets the current one wait for; else none."""
    ranks2.run(torch_functions, native)


def futures(rank: int, world_size: int, directory: Path, native: str) -> float:
    with device_world(rank, world_size, directory, native) as me:
        line = CallLine(me.group._health, torch.device("cpu"), aside=me.it.aside)
        tensor = torch.full((100,), float(rank + 1))
        handle = line.submit("all_reduce", partial(me.it.all_reduce, tensor), at_once=True)
        call = me.last()
        future = handle.get_future()
        assert not me.follows(me.queue("beside"), call)
        assert me.streams.number == CALLER
        return float(future.wait()[0])


def test_a_future_does_not_make_the_caller_wait(ranks2: RankPool, native: str) -> None:
    """It records the side stream, so that only its callbacks are ordered behind the call."""
    assert ranks2.run(futures, native) == [3.0, 3.0]


# --- the rest -------------------------------------------------------------------------------------------------


def test_calls_that_cannot_be_ordered_stay_on_the_current_stream(tmp_path: Path) -> None:
    """A rank without the driver's bindings cannot order streams, and NCCL carries its calls."""
    driver = FakeDriver(tmp_path, 0)
    streams = DeviceStreams(driver)
    aside = SideStream(streams, lambda: False, lambda _: 0, lambda _: nullcontext())
    with aside.entered(partial(max, torch.ones(1))):
        call = driver.queue(streams.number, "call")
        mark = aside.mark(None)
    mark.wait()
    assert driver.works[call].stream == CALLER
    assert (driver.orders, streams.kept) == ([], [])
    with aside.entered(None), mark.behind():
        assert streams.number == CALLER


def without_driver(rank: int, world_size: int, directory: Path, native: str) -> bool:
    def missing() -> FakeDriver:
        raise CapabilityError("no bindings", requirement="cuda-bindings")

    with world(rank, world_size, directory) as group:
        it = CudaCommunicator(
            context_of(group),
            open_driver=missing,
            library=NcclLibrary(f"{native}/libnccl-stub.so"),
            streams=DeviceStreams(FakeDriver(directory, rank)),
        )
        assert it.all_reduce(torch.ones(100))[0] == 2.0
        is_ordered = it._orders()
        it.destroy()
        return is_ordered


def test_a_rank_without_a_driver_orders_nothing(ranks2: RankPool, native: str) -> None:
    """It says so, and its calls work."""
    assert ranks2.run(without_driver, native) == [False, False]


def ends_calls(rank: int, world_size: int, directory: Path, native: str) -> None:
    with device_world(rank, world_size, directory, native) as me:
        me.it.end_calls(1.0)
        with pytest.raises(ClosedError):
            me.it.all_reduce(torch.ones(100))
        with pytest.raises(ClosedError):
            me.later(me.it.all_reduce, torch.ones(100)).wait()
        me.it.end_calls(1.0)


@pytest.mark.guarantee("D75")
def test_calls_behind_end_calls_are_refused(ranks2: RankPool, native: str) -> None:
    """Their kernels would leave at once, without a result."""
    ranks2.run(ends_calls, native)
