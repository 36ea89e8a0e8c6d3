"""Ranks as streams of one process, through the product's `CustomAllReduce`: eager, and graphs replayed with skew.

All blocks of all ranks have to run at once, so each rank's grids are cut to its part of the multiprocessors. Nothing
is allocated, loaded or freed while kernels wait: any of that may wait for the kernels.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from device_comm.cuda_settings import CudaSettings
from device_comm.custom_launches import CubinSource
from device_comm.driver import PreparedLaunch
from device_comm.kernels import KernelCache, KernelVariant
from shm_broadcast.errors import CommTimeoutError
from tests.gpu.device import Gpu, GpuDriver, Memory, arch_of, compile_text, program_source, u32, u64
from tests.gpu.local_ranks import LocalRanks, facts_for, policy_file
from tests.gpu.notes import Notes
from tests.gpu.step import open_gpu, run_module
from tests.gpu.values import DTYPES, expected_sum, random_words, raw

KIB = 1 << 10
LIMITS = {
    "push_one_shot": 4 * KIB,
    "push_two_shot": 32 * KIB,
    "pull_one_shot": 64 * KIB,
    "pull_two_shot": 256 * KIB,
}
"""So that a graph of a few small calls has every algorithm; the pulls are for graphs alone."""
GRAPH_BYTES = (512, 4 * KIB, 16 * KIB, 48 * KIB, 200 * KIB)
# So much is queued at most: where a queue is full, the launch waits, and others behind it.
_REPLAYS_AHEAD = 50
_MOST_SPIN_NS = 20_000

Programs = Callable[[str], bytes]


class StreamWorld:
    """A group of streams, with the memory and the programs of each rank."""

    def __init__(
        self,
        drivers: Sequence[Gpu],
        dtype: str,
        cubin: CubinSource,
        programs: Programs,
        directory: Path,
        *,
        blocks: int | None = None,
        limits: dict[str, int] | None = None,
        memory_bytes: int = 64 << 20,
        deadline_s: float = 10.0,
    ) -> None:
        self.drivers, self.dtype = list(drivers), DTYPES[dtype]
        self.world_size = len(self.drivers)
        facts = facts_for(self.drivers[0], self.world_size, blocks=blocks)
        path = policy_file(directory / f"policy-{self.world_size}-{dtype}.json", facts, limits or LIMITS)
        settings = CudaSettings(
            arena_bytes=2 << 20, staging_bytes=1 << 20, policy_file=path, deadline_s=deadline_s
        )
        self.memories = [Memory(driver, memory_bytes) for driver in self.drivers]
        self.modules = [driver.module_load(programs(dtype)) for driver in self.drivers]
        self.programs = [
            {name: driver.module_function(module, name) for name in ("fill", "check", "tick", "spin")}
            for driver, module in zip(self.drivers, self.modules, strict=True)
        ]
        # All ranks would compile the same at once, one after the other within the compiler.
        for family in ("one_shot", "two_shot", "shards", "pull", "norm"):
            cubin(family, dtype)
        self.local = LocalRanks(self.drivers, facts, settings, cubin)
        # Loads every kernel before any is launched.
        self.local.each(self._load_all)

    def _load_all(self, rank: int) -> None:
        custom = self.local.customs[rank]
        custom.begin_capture(self.local.streams[rank], (self.dtype,))
        custom.finish_capture()

    def close(self) -> None:
        """Give everything back."""
        self.local.close()
        for driver, module, memory in zip(self.drivers, self.modules, self.memories, strict=True):
            driver.module_unload(module)
            memory.free()

    def launch(self, rank: int, program: str, arguments: Sequence[bytes], threads: int = 256) -> None:
        """Launch one of the tests' programs: one block, which fits beside every rank's."""
        function = self.programs[rank][program]
        stream = self.local.streams[rank]
        self.drivers[rank].launch(function, 1, threads, stream, PreparedLaunch(arguments))

    # --- eager ------------------------------------------------------------------------------------------------

    def eager(self, sizes: Sequence[int], rounds: int) -> int:
        """Reduce every size so often, with skew; compare every result. Return how many calls there were."""
        inputs = {
            size: [random_words(size, self.dtype, size + r) for r in range(self.world_size)] for size in sizes
        }
        expected = {size: expected_sum(each) for size, each in inputs.items()}

        def work(rank: int) -> None:
            custom, memory = self.local.customs[rank], self.memories[rank]
            stream, chance = self.local.streams[rank], random.Random(rank)
            memory.back_to(0)
            addresses = {size: memory.put(inputs[size][rank]) for size in sizes}
            outputs = [
                (size, memory.room(size * self.dtype.itemsize)) for _ in range(rounds) for size in sizes
            ]
            self.local.meet(rank)
            for size, output in outputs:
                if chance.random() < 0.2:
                    time.sleep(chance.random() * 1e-3)
                if not custom.all_reduce(addresses[size], output, size, self.dtype, stream):
                    raise AssertionError(f"the policy sends {size} elements elsewhere")
            self.drivers[rank].stream_synchronize(stream)
            custom.check()
            for size, output in outputs:
                if not torch.equal(raw(memory.get(output, size, self.dtype)), expected[size]):
                    raise AssertionError(f"rank {rank}, {size} elements: wrong bits")

        self.local.each(work)
        return rounds * len(sizes)

    # --- graphs -----------------------------------------------------------------------------------------------

    def replays(self, nbytes: Sequence[int], count: int, seconds: float, *, spins: bool = True) -> int:
        """Capture all-reduces of these sizes on every stream and replay them with skew; return how often.

        Each replay makes its own input, from a step number in device memory, and looks at each result on the device:
        what a replay finds of an earlier one is counted as wrong.
        """
        end = time.monotonic() + seconds
        # Every rank must make as many: they are agreed in turns, so that none stops alone.
        per_turn = min(count, 500)
        prepared = self.local.each(lambda rank: self._captured(rank, nbytes))
        made = 0
        while made < count and time.monotonic() < end:
            turn = min(per_turn, count - made)
            self.local.each(lambda rank, n=turn: self._turn(rank, prepared[rank][0], n, spins))  # type: ignore[misc]
            made += turn
        self.local.each(lambda rank: self._judge(rank, prepared[rank], made))
        return made

    def _captured(self, rank: int, nbytes: Sequence[int]) -> tuple[Any, int, int]:
        """Return (graph, address of the step, address of the count of wrong elements)."""
        custom, memory, driver = self.local.customs[rank], self.memories[rank], self.drivers[rank]
        stream = self.local.streams[rank]
        memory.back_to(0)
        step, wrong = memory.put(bytes(4)), memory.put(bytes(4))
        places = [(memory.room(size), memory.room(size), size // self.dtype.itemsize) for size in nbytes]
        custom.begin_capture(stream, (self.dtype,))
        driver.begin_capture(stream)
        for place, output, count in places:
            self.launch(rank, "fill", [u64(place), u64(count), u32(rank), u64(step)])
            if not custom.all_reduce(place, output, count, self.dtype, stream):
                raise AssertionError(f"the policy sends {count} elements elsewhere")
            world = u32(self.world_size)
            self.launch(rank, "check", [u64(output), u64(count), world, u64(step), u64(wrong)])
        self.launch(rank, "tick", [u64(step)], threads=1)
        graph = driver.end_capture(stream)
        custom.finish_capture()
        return graph, step, wrong

    def _turn(self, rank: int, graph: Any, count: int, spins: bool) -> None:
        driver, stream, chance = self.drivers[rank], self.local.streams[rank], random.Random()
        for number in range(count):
            if spins and chance.random() < 0.5:
                self.launch(rank, "spin", [u64(chance.randrange(_MOST_SPIN_NS))], threads=1)
            driver.replay(graph, stream)
            if number % _REPLAYS_AHEAD == _REPLAYS_AHEAD - 1:
                driver.stream_synchronize(stream)
            if chance.random() < 0.002:
                time.sleep(chance.random() * 2e-3)
        driver.stream_synchronize(stream)
        self.local.customs[rank].check()

    def _judge(self, rank: int, prepared: tuple[Any, int, int], made: int) -> None:
        graph, step, wrong = prepared
        self.drivers[rank].forget(graph)
        steps = int(self.memories[rank].get(step, 1, torch.int32)[0])
        missed = int(self.memories[rank].get(wrong, 1, torch.int32)[0])
        if (steps, missed) != (made, 0):
            raise AssertionError(f"rank {rank}: {steps} of {made} replays ran, {missed} elements were wrong")


def absent_rank(world: StreamWorld, deadline_s: float) -> float:
    """Let all ranks but rank 1 call; return how long rank 0 waited for its error. The group is broken then."""
    waited: dict[int, float] = {}

    def work(rank: int) -> None:
        custom, memory = world.local.customs[rank], world.memories[rank]
        memory.back_to(0)
        place, output = memory.put(bytes(1024)), memory.room(1024)
        world.local.meet(rank)
        if rank == 1:
            return
        start = time.monotonic()
        custom.all_reduce(place, output, 64, world.dtype, world.local.streams[rank])
        world.drivers[rank].stream_synchronize(world.local.streams[rank])
        try:
            custom.check()
        except CommTimeoutError as error:
            waited[rank] = time.monotonic() - start
            if tuple(error.missing) != (1,):
                raise AssertionError(f"rank {rank} names {error.missing}") from error
            return
        raise AssertionError(f"rank {rank} was told of no error")

    world.local.each(work)
    if waited[0] < deadline_s * 0.9:
        raise AssertionError(f"rank 0 waited {waited[0]:.2f} s only, not {deadline_s}")
    return waited[0]


def sources(arch: int, directory: Path) -> Callable[[int], CubinSource]:
    """Return what gives the kernels for a world size."""
    cache = KernelCache(directory / "cubins")

    def of(world_size: int) -> CubinSource:
        return lambda family, dtype: cache.cubin(KernelVariant(arch, world_size, dtype, family))

    return of


def run(notes: Notes) -> None:
    """Run the step."""
    first = open_gpu()
    arch = arch_of(first)
    built: dict[str, bytes] = {}

    def programs(dtype: str) -> bytes:
        if dtype not in built:
            built[dtype] = compile_text(program_source(), arch, dtype)
        return built[dtype]

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cubins = sources(arch, directory)
        for world_size, dtype, count in (
            (4, "bfloat16", 10_000),
            (2, "float32", 2_000),
            (8, "float16", 2_000),
        ):
            with notes.check(f"{world_size} streams, {dtype}"):
                notes.need(10.0, f"{world_size} streams")
                drivers = [GpuDriver(0) for _ in range(world_size)]
                world = StreamWorld(drivers, dtype, cubins(world_size), programs, directory)
                eager_and_graphs(notes, world, count)
                world.close()
        with notes.check("a rank that does not launch is named when the deadline has passed"):
            notes.need(8.0, "a deadline")
            drivers = [GpuDriver(0) for _ in range(2)]
            world = StreamWorld(drivers, "bfloat16", cubins(2), programs, directory, deadline_s=1.0)
            notes.figure(
                "error of a kernel whose peer does not come, deadline 1 s", absent_rank(world, 1.0), "s"
            )
            world.close()
    first.close()


def eager_and_graphs(notes: Notes, world: StreamWorld, count: int) -> None:
    """Run eager calls, then replays, and write down what came of them."""
    name = f"{world.world_size} streams"
    calls = world.eager((1, 100, 1024, 1500, 5000, 8000), 30)
    notes.figure(f"{name}: eager calls compared", calls, "calls")
    start = time.monotonic()
    budget = max(5.0, min(35.0, notes.left() - 20.0))
    made = world.replays(GRAPH_BYTES, count, budget)
    spent = time.monotonic() - start
    notes.figure(f"{name}: replays of {len(GRAPH_BYTES)} all-reduces with skew", made, "replays")
    notes.figure(f"{name}: a replay with its checks and skew", spent / made * 1e6, "us")
    if count >= 10_000:
        found = f"{made} on {name}, every result checked on the device"
        notes.goal("10,000 graph replays with random skew", "10,000, no wrong element", found, made >= count)


if __name__ == "__main__":
    sys.exit(run_module(run, sys.argv[1:]))
