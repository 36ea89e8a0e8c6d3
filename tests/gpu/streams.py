"""Ranks as streams of one process, through the product's `CustomAllReduce`: eager, and in graphs replayed with skew.

All blocks of all ranks have to run at once, so the grids of each rank are limited to its share of the multiprocessors.
Nothing is allocated, loaded or freed while kernels wait: any of that may wait for the kernels.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from coordinator.bootstrap.status_store import WorldStatusStore
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.launches import CubinSource
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.custom.resources import CustomContext
from device_comm.cuda.driver import PreparedLaunch
from device_comm.cuda.kernels import KernelCache, KernelVariant
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda_settings import CudaSettings
from device_comm.fused.rms_norm import add_rms_norm
from device_comm.health import GroupHealth
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast.errors import CommTimeoutError
from shm_broadcast.liveness import PeerWatch, this_process
from tests.custom_ranks import policy_file
from tests.gpu.device import Gpu, GpuDriver, Memory, arch_of, compile_text, program_source, u32, u64
from tests.gpu.notes import GpuRank
from tests.gpu.values import DTYPES, WrongResultError, expect_equal, expected_sum, random_words

__all__ = ["ENVIRON", "GRAPH_BYTES", "KIB", "StreamWorld", "absent_rank", "norms", "noticed", "world_on_gpu"]

ENVIRON = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "CUDA_MODULE_LOADING": "EAGER"}
"""For the processes of these ranks: with fewer hardware queues than ranks, the kernel of one rank can be queued behind
a kernel of another rank that waits for it."""
Value = TypeVar("Value")
KIB = 1 << 10
LIMITS = {
    "push_one_shot": 4 * KIB,
    "push_two_shot": 32 * KIB,
    "pull_one_shot": 64 * KIB,
    "pull_two_shot": 256 * KIB,
}
"""With these a graph of a few small calls has every algorithm; the pulls run in graphs only."""
GRAPH_BYTES = (512, 4 * KIB, 16 * KIB, 48 * KIB, 200 * KIB)
# The most that is queued: a launch waits where a queue is full, and holds up others behind it.
_REPLAYS_AHEAD = 50
_MOST_SPIN_NS = 20_000
_EPS = 1e-5


class _Exchange:
    """Gives the bytes of every thread to all threads; a thread that fails makes the waiting ones fail too."""

    def __init__(self, world_size: int) -> None:
        self._said: list[bytes] = [b""] * world_size
        self.barrier = threading.Barrier(world_size, timeout=30.0)

    def speak(self, rank: int, data: bytes) -> list[bytes]:
        self._said[rank] = data
        self.barrier.wait()
        heard = list(self._said)
        # Nobody says the next thing before all have heard this one.
        self.barrier.wait()
        return heard


class StreamWorld:
    """A group whose ranks are threads and streams of one process, over memory of kind "local".

    Attributes:
        customs, drivers, streams, memories: The collectives, driver, stream and memory of each rank.
    """

    def __init__(
        self,
        drivers: Sequence[Gpu],
        dtype: str,
        cubin: CubinSource,
        program: bytes,
        directory: Path,
        *,
        blocks: int | None = None,
        limits: dict[str, int] | None = None,
        memory_bytes: int = 64 << 20,
        deadline_s: float = 10.0,
    ) -> None:
        """Make the group; `blocks` replaces the share of the multiprocessors that each rank gets."""
        first = drivers[0]
        self.drivers, self.dtype, self.world_size = list(drivers), DTYPES[dtype], len(drivers)
        self.ranks = tuple(range(self.world_size))
        major, minor = first.compute_capability()
        self._facts = GroupFacts(
            world_size=self.world_size,
            device_name=first.device_name(),
            arch=f"sm_{major}{minor}",
            # One multiprocessor for each rank stays free, for what else a test launches.
            multiprocessors=blocks or max(1, first.multiprocessors() // self.world_size - 1),
            has_nvlink=True,
            is_exportable=True,
        )
        of = (directory / "policy.json", self.world_size, self._facts.device_name, self._facts.arch)
        path = policy_file(*of, **(limits or LIMITS))
        self._settings = CudaSettings(
            arena_bytes=2 << 20, staging_bytes=1 << 20, policy_file=path, deadline_s=deadline_s
        )
        self._cubin = cubin
        self._exchange = _Exchange(self.world_size)
        self._store = dist.HashStore()
        self.memories = [Memory(driver, memory_bytes) for driver in self.drivers]
        self._modules = [driver.module_load(program) for driver in self.drivers]
        self._programs = [
            {name: driver.module_function(module, name) for name in ("fill", "check", "tick", "spin")}
            for driver, module in zip(self.drivers, self._modules, strict=True)
        ]
        # Otherwise all ranks would compile the same families at once, one after the other within the compiler.
        for family in ("one_shot", "two_shot", "shards", "pull", "norm"):
            cubin(family, dtype)
        self.streams = [driver.stream_create() for driver in self.drivers]
        self._healths = [self._health(rank) for rank in self.ranks]
        self.customs = self.each(self._create)
        # Loads every kernel before any is launched.
        self.each(self._load_all)

    def _health(self, rank: int) -> GroupHealth:
        process = this_process()
        watch = PeerWatch(process, {other: process for other in self.ranks if other != rank})
        status_store = WorldStatusStore(dist.PrefixStore("status_store", self._store), rank, self.ranks)
        return GroupHealth("local:0", rank, self.ranks, watch, status_store)

    def _create(self, rank: int) -> CustomAllReduce:
        return CustomAllReduce.create(
            CustomContext(
                driver=self.drivers[rank],
                health=self._healths[rank],
                peers=PeerExchange(lambda data: self._exchange.speak(rank, data), rank, self.ranks),
                facts=self._facts,
                settings=self._settings,
                timeout_s=30.0,
                cubin=self._cubin,
            )
        )

    def _load_all(self, rank: int) -> None:
        self.customs[rank].begin_capture(self.streams[rank], (self.dtype,))
        self.customs[rank].finish_capture()

    def each(self, work: Callable[[int], Value]) -> list[Value]:
        """Run `work` as every rank at once; return what each returned, or raise what the first raised."""
        # A thread that failed last time may have broken the barrier. Nobody waits now.
        self._exchange.barrier.reset()
        results: dict[int, Value] = {}
        problems: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                problems.append(error)
                self._exchange.barrier.abort()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return [results[rank] for rank in self.ranks]

    def meet(self, rank: int) -> None:
        """Wait until the threads of all ranks are here."""
        self._exchange.speak(rank, b"")

    def close(self) -> None:
        """Give everything back. The ranks of a broken group do not meet, and keep its workspaces."""
        is_broken = any(health.is_broken for health in self._healths)

        def end(rank: int) -> None:
            self.customs[rank].destroy(None if is_broken else lambda: self.meet(rank))
            self.drivers[rank].stream_destroy(self.streams[rank])
            self._healths[rank].close()
            self._healths[rank].release()

        self.each(end)
        for driver, module, memory in zip(self.drivers, self._modules, self.memories, strict=True):
            driver.module_unload(module)
            memory.free()

    def launch(self, rank: int, program: str, arguments: Sequence[bytes], threads: int = 256) -> None:
        """Launch one of the tests' programs: one block, which fits beside every rank's."""
        function = self._programs[rank][program]
        stream = self.streams[rank]
        self.drivers[rank].launch(function, 1, threads, stream, PreparedLaunch(arguments))

    def eager(self, sizes: Sequence[int], rounds: int) -> int:
        """Reduce every size in every round, with skew; compare every result. Return the number of calls."""
        inputs = {
            size: [random_words(size, self.dtype, size + r) for r in range(self.world_size)] for size in sizes
        }
        expected = {size: expected_sum(each) for size, each in inputs.items()}

        def work(rank: int) -> None:
            custom, memory = self.customs[rank], self.memories[rank]
            stream, chance = self.streams[rank], random.Random(rank)
            memory.back_to(0)
            addresses = {size: memory.put(inputs[size][rank]) for size in sizes}
            outputs = [
                (size, memory.room(size * self.dtype.itemsize)) for _ in range(rounds) for size in sizes
            ]
            self.meet(rank)
            for size, output in outputs:
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 1e-3)
                if not custom.all_reduce(addresses[size], output, size, self.dtype, stream):
                    raise AssertionError(f"the policy sends {size} elements elsewhere")
            self.drivers[rank].stream_synchronize(stream)
            custom.check()
            for size, output in outputs:
                expect_equal(memory.get(output, size, self.dtype), expected[size], f"rank {rank}")

        self.each(work)
        return rounds * len(sizes)

    def replays(
        self, nbytes: Sequence[int], count: int, seconds: float, *, spins: bool = True, lie: int = 0
    ) -> int:
        """Capture all-reduces of these sizes on every stream and replay them with skew; return the number of replays.

        Each replay makes its own input, from a step number in device memory, and checks each result on the device: a
        word that an earlier replay left there counts as wrong. With a `lie`, rank 1 brings the input of another rank.
        """
        end = time.monotonic() + seconds
        # Every rank must make the same number: they go in turns, so that none stops alone.
        per_turn = min(count, 500)
        prepared = self.each(lambda rank: self._captured(rank, nbytes, lie if rank == 1 else 0))
        made = 0
        while made < count and time.monotonic() < end:
            turn = min(per_turn, count - made)
            self.each(lambda rank, n=turn: self._turn(rank, prepared[rank][0], n, spins))  # type: ignore[misc]
            made += turn
        self.each(lambda rank: self._record(rank, prepared[rank], made))
        return made

    def _captured(self, rank: int, nbytes: Sequence[int], lie: int) -> tuple[Any, int, int]:
        """Return (graph, address of the step, address of the count of wrong elements)."""
        custom, memory, driver = self.customs[rank], self.memories[rank], self.drivers[rank]
        stream = self.streams[rank]
        memory.back_to(0)
        step, wrong = memory.put(bytes(4)), memory.put(bytes(4))
        places = [(memory.room(size), memory.room(size), size // self.dtype.itemsize) for size in nbytes]
        custom.begin_capture(stream, (self.dtype,))
        driver.begin_capture(stream)
        for place, output, count in places:
            self.launch(rank, "fill", [u64(place), u64(count), u32(rank + lie), u64(step)])
            if not custom.all_reduce(place, output, count, self.dtype, stream):
                raise AssertionError(f"the policy sends {count} elements elsewhere")
            world = u32(self.world_size)
            self.launch(rank, "check", [u64(output), u64(count), world, u64(step), u64(wrong)])
        self.launch(rank, "tick", [u64(step)], threads=1)
        graph = driver.end_capture(stream)
        custom.finish_capture()
        return graph, step, wrong

    def _turn(self, rank: int, graph: Any, count: int, spins: bool) -> None:
        driver, stream, chance = self.drivers[rank], self.streams[rank], random.Random()
        for number in range(count):
            if spins and chance.random() < 0.5:
                self.launch(rank, "spin", [u64(chance.randrange(_MOST_SPIN_NS))], threads=1)
            driver.replay(graph, stream)
            if number % _REPLAYS_AHEAD == _REPLAYS_AHEAD - 1:
                driver.stream_synchronize(stream)
            if chance.random() < 0.002:
                time.sleep(chance.random() * 2e-3)
        driver.stream_synchronize(stream)
        self.customs[rank].check()

    def _record(self, rank: int, prepared: tuple[Any, int, int], made: int) -> None:
        graph, step, wrong = prepared
        self.drivers[rank].forget(graph)
        steps = int(self.memories[rank].get(step, 1, torch.int32)[0])
        missed = int(self.memories[rank].get(wrong, 1, torch.int32)[0])
        if (steps, missed) != (made, 0):
            raise WrongResultError(
                f"rank {rank}: {steps} of {made} replays ran, {missed} elements were wrong"
            )


def norms(world: StreamWorld, rows: int, hidden: int, rounds: int) -> int:
    """Compare the norm fused into an all-reduce, and the norm alone, in every round; return the number of calls.

    From sm_90 on, blocks of a cluster share a row of more vectors than a group has lanes, and exchange their squares.
    """
    made, dtype = torch.Generator().manual_seed(hidden), world.dtype
    *inputs, residual = (
        torch.randn(rows, hidden, generator=made).to(dtype) for _ in range(world.world_size + 1)
    )
    weight = torch.randn(hidden, generator=made).to(dtype)
    reduced = reduce_in_rank_order(inputs, ReduceOperation.SUM)
    expected = add_rms_norm(reduced, residual, weight, _EPS)

    def work(rank: int) -> None:
        custom, memory, stream = world.customs[rank], world.memories[rank], world.streams[rank]
        memory.back_to(0)
        own, whole, added, factor = (memory.put(each) for each in (inputs[rank], reduced, residual, weight))
        outputs = [memory.room(residual.nbytes) for _ in range(4)]
        world.meet(rank)
        for _ in range(rounds):
            fused, alone = [own, added, factor, *outputs[:2]], [whole, added, factor, *outputs[2:]]
            if not custom.all_reduce_add_rms_norm(fused, rows, hidden, _EPS, dtype, stream):
                raise AssertionError(f"the policy does not fuse the norm of {rows} x {hidden}")
            custom.add_rms_norm(alone, rows, hidden, _EPS, dtype, stream)
        world.drivers[rank].stream_synchronize(stream)
        custom.check()
        for output, right in zip(outputs, (*expected, *expected), strict=True):
            expect_equal(memory.get(output, right.numel(), dtype), right.flatten(), f"norm of rank {rank}")

    world.each(work)
    return 2 * rounds


def absent_rank(world: StreamWorld, deadline_s: float) -> float:
    """Let all ranks but rank 1 call; return how long rank 0 waited for its error. Breaks the group."""
    waited: dict[int, float] = {}

    def work(rank: int) -> None:
        custom, memory = world.customs[rank], world.memories[rank]
        memory.back_to(0)
        place, output = memory.put(bytes(1024)), memory.room(1024)
        world.meet(rank)
        if rank == 1:
            return
        start = time.monotonic()
        custom.all_reduce(place, output, 64, world.dtype, world.streams[rank])
        world.drivers[rank].stream_synchronize(world.streams[rank])
        try:
            custom.check()
        except CommTimeoutError as error:
            waited[rank] = time.monotonic() - start
            if tuple(error.missing) != (1,):
                raise AssertionError(f"rank {rank} names {error.missing}") from error
            return
        raise AssertionError(f"rank {rank} was told of no error")

    world.each(work)
    if waited[0] < deadline_s * 0.9:
        raise AssertionError(f"rank 0 waited {waited[0]:.2f} s only, not {deadline_s}")
    return waited[0]


def noticed(
    world: StreamWorld, nbytes: Sequence[int], count: int, seconds: float, *, lie: int = 0
) -> str | None:
    """Replay a group with a mistake; return how that was reported, None if it was not. May break the group."""
    try:
        world.replays(nbytes, count, seconds, lie=lie)
    except (WrongResultError, CommTimeoutError) as error:
        return str(error)
    return None


def world_on_gpu(
    me: GpuRank,
    world_size: int,
    dtype: str,
    *,
    limits: dict[str, int] | None = None,
    deadline_s: float = 10.0,
    blocks: int | None = None,
    cubin: Callable[[int, str], bytes] | None = None,
) -> StreamWorld:
    """Return a world of streams on the GPU, with kernels of `cubin(arch, family)` if given."""
    drivers = [GpuDriver(0) for _ in range(world_size)]
    arch, kernels = arch_of(drivers[0]), KernelCache(me.cache)

    def source(family: str, dtype: str) -> bytes:
        if cubin is not None:
            return cubin(arch, family)
        return kernels.cubin(KernelVariant(arch, world_size, dtype, family))

    program = compile_text(program_source(), arch, dtype)
    return StreamWorld(
        drivers,
        dtype,
        source,
        program,
        me.directory,
        blocks=blocks,
        limits=limits,
        deadline_s=deadline_s,
    )
