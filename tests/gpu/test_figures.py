"""What one GPU can tell about speed, without a word about other libraries.

*Launch floor*: an empty kernel in a graph. *Loopback*: a kernel whose peers' data is already there (`loopback.py`):
its own work without waiting, on memory that is all local. *Handshake*: two ranks on two streams, with the waiting for
each other but without a link. None of them contains what a link adds.
"""

from __future__ import annotations

import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from device_comm.cuda.driver import PreparedLaunch
from device_comm.cuda.kernels import KernelCache, KernelVariant
from device_comm.cuda.policy.shapes import norm_shape
from device_comm.nccl.streams import TorchStreams
from tests.gpu.device import (
    Gpu,
    GpuDriver,
    Memory,
    arch_of,
    compile_mutant,
    compile_text,
    measured_us,
    program_source,
    u32,
    u64,
)
from tests.gpu.emulation import Cubin
from tests.gpu.loopback import Loopback, Timer, two_shot_bytes
from tests.gpu.notes import GpuRank, Notes, gpu_body
from tests.gpu.overlap import GOAL, Overlap, Product, overlap
from tests.gpu.patches import patched_source
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.streams import ENVIRON, StreamWorld, world_on_gpu

KIB, MIB = 1 << 10, 1 << 20
LANES = 20
LARGE_LANES = 4
NORM_SHAPE = (8, 4096)
WORLDS = (8, 2, 4)
ONE_WORLD = 4
"""For comparisons that need one size of a group only."""
HANDSHAKES = (16, 8 * KIB, 64 * KIB)


def launch_floor(notes: Notes, timer: Timer) -> float:
    """Measure an empty kernel in a graph of many."""
    driver, stream = timer.driver, timer.stream
    nothing = PreparedLaunch([])

    def record() -> None:
        for _ in range(LANES):
            driver.launch(timer.empty, 1, 32, stream, nothing)

    floor = timer.per_launch_us(LANES, record)
    return notes.figure("launch floor: an empty kernel in a graph of 20", floor, "us")


def timed(
    timer: Timer, cubin: Cubin, kernel: str, world: int, nbytes: int, lanes: int = 0, **options: Any
) -> float:
    """Return the time of one launch of a loopback, whose result must be right before and after."""
    lanes = lanes or LANES
    source = partial(cubin, world, "bfloat16")
    loopback = Loopback(
        timer.driver, kernel, world, "bfloat16", nbytes, source, lanes=lanes, stream=timer.stream, **options
    )
    loopback.refill()
    loopback.launch_all()
    loopback.check()
    spent = timer.per_launch_us(lanes, loopback.launch_all, loopback.refill)
    loopback.check()
    loopback.close()
    return spent


def small_loopbacks(notes: Notes, timer: Timer, cubin: Cubin) -> None:
    """Measure one-shot pushes of 8 to 64 KiB above the floor."""
    floor = launch_floor(notes, timer)
    above: dict[str, float] = {}
    for world, size in itertools.product(WORLDS, (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)):
        name = f"{world} ranks, {size // KIB} KiB"
        spent = timed(timer, cubin, "push_one_shot", world, size)
        notes.figure(f"loopback one-shot, {name}", spent, "us")
        above[name] = spent - floor
        notes.figure(f"loopback one-shot above the floor, {name}", above[name], "us")
    worst = max(above, key=lambda name: above[name])
    small = max((name for name in above if name.endswith(" 8 KiB")), key=lambda name: above[name])
    notes.goal(
        "loopback kernel, 8 KiB",
        "at most 2 us above an empty kernel in the same graph",
        f"at most {above[small]:.2f} us ({small})",
        above[small] <= 2.0,
    )
    notes.goal(
        "loopback kernel, 8 to 64 KiB",
        "at most 3 us above an empty kernel in the same graph",
        f"at most {above[worst]:.2f} us ({worst})",
        above[worst] <= 3.0,
    )


def large_loopbacks(notes: Notes, timer: Timer, cubin: Cubin) -> None:
    """Measure two-shot pushes of 8 MiB against plain copies that move as many bytes."""
    shares: dict[int, float] = {}
    size = 8 * MIB
    for world in WORLDS:
        spent = timed(timer, cubin, "push_two_shot", world, size, LARGE_LANES)
        moved = two_shot_bytes(size, world)
        plain = plain_copy(timer, moved // 2)
        rate, reference = moved / spent / 1e3, moved / plain / 1e3
        shares[world] = rate / reference
        notes.figure(f"loopback two-shot of 8 MiB, {world} ranks", spent, "us")
        notes.figure(f"its bytes read and written, {world} ranks", moved / MIB, "MiB")
        notes.figure(f"its rate, {world} ranks", rate, "GB/s")
        notes.figure(f"a plain copy of as many bytes read and written, {world} ranks", reference, "GB/s")
    worst = min(shares, key=lambda world: shares[world])
    notes.goal(
        "two-shot of 8 MiB against a plain copy",
        "at least 70 % of the copy's rate",
        f"{', '.join(f'{share:.0%} of {world} ranks' for world, share in shares.items())}",
        shares[worst] >= 0.7,
    )


def plain_copy(timer: Timer, nbytes: int) -> float:
    """Return the time of the driver's copy of `nbytes` in a graph, on as many buffers as the kernel had."""
    driver, stream = timer.driver, timer.stream
    nbytes = nbytes // 256 * 256
    memory = Memory(driver, 2 * LARGE_LANES * (nbytes + 256))
    pairs = [(memory.room(nbytes), memory.room(nbytes)) for _ in range(LARGE_LANES)]

    def record() -> None:
        for source, destination in pairs:
            driver.memcpy_dtod(destination, source, nbytes, stream)

    spent = timer.per_launch_us(LARGE_LANES, record)
    memory.free()
    return spent


def fusion(notes: Notes, timer: Timer, cubin: Cubin) -> None:
    """Measure the fused norm against an all-reduce followed by the norm."""
    driver, stream = timer.driver, timer.stream
    rows, hidden = NORM_SHAPE
    size = rows * hidden * 2
    source = partial(cubin, ONE_WORLD, "bfloat16")
    together = timed(timer, cubin, "push_add_rms_norm", ONE_WORLD, size, norm=NORM_SHAPE)
    parts = Loopback(driver, "push_one_shot", ONE_WORLD, "bfloat16", size, source, lanes=LANES, stream=stream)
    module = driver.module_load(source("norm"))
    shape = norm_shape("sm_90", driver.multiprocessors(), rows, hidden * 2 // 16)
    configured = driver.configure(
        driver.module_function(module, "add_rms_norm"), *shape[:2], cluster=shape[2], is_dependent=True
    )
    memory = Memory(driver, 8 * (size + 4096))
    residual, weight = memory.put(bytes(size)), memory.put(bytes(hidden * 2))
    out, total = memory.room(size), memory.room(size)
    norms = [
        PreparedLaunch(
            [
                *(u64(each) for each in (x, residual, weight, out, total)),
                u32(rows),
                u32(hidden),
                u32(0x3727C5AC),
            ]
        )
        for x in parts.outputs
    ]

    def record() -> None:
        for lane, norm in enumerate(norms):
            parts.launch_one(lane)
            driver.launch_configured(configured, stream, norm)

    apart = timer.per_launch_us(LANES, record, parts.refill)
    driver.module_unload(module)
    memory.free()
    parts.close()
    notes.figure("fused all-reduce, add and norm, loopback of 4 ranks, 8 x 4096 bfloat16", together, "us")
    notes.figure("the same in two kernels", apart, "us")
    notes.goal(
        "fused norm against its parts",
        "at most 0.8 of their time",
        f"{together:.2f} us against {apart:.2f} us",
        together <= 0.8 * apart,
    )


def fence_cost(notes: Notes, timer: Timer, cubin: Cubin) -> None:
    """Measure a kernel without its entry fence: wrong between processors, but here nobody races with it."""
    bare = patched_source("fence_dropped")

    def without(world: int, dtype: str, family: str) -> bytes:
        return compile_mutant(bare, arch_of(timer.driver), world, dtype, family)

    spent = [timed(timer, each, "push_one_shot", ONE_WORLD, 16 * KIB) for each in (cubin, without)]
    name = "entry fence: loopback one-shot, 4 ranks, 16 KiB, with less without"
    notes.figure(name, spent[0] - spent[1], "us")


def handshake(notes: Notes, world: StreamWorld) -> None:
    """Measure chains of tiny all-reduces of two streams, and the Python of a call."""
    for nbytes in HANDSHAKES:
        notes.figure(f"handshake: all-reduce of two streams, {nbytes} bytes", chained(world, nbytes), "us")
    python = python_overhead(world)
    notes.figure("Python and launch of CustomAllReduce.all_reduce", python, "us")
    # The goal is set for a driver that does nothing. With a real one the launch is included, and it may still hold.
    notes.goal(
        "Python per custom all-reduce",
        "at most 3 us on the host (set for a fake driver)",
        f"{python:.2f} us with the launch",
        python <= 3.0,
    )


def chained(world: StreamWorld, nbytes: int, calls: int = 50, repeats: int = 9) -> float:
    """Return the time of one all-reduce in a chain of many, by the clock of rank 0."""

    def prepare(rank: int) -> object:
        custom, memory, driver = world.customs[rank], world.memories[rank], world.drivers[rank]
        stream = world.streams[rank]
        memory.back_to(0)
        place, output = memory.put(bytes(nbytes)), memory.room(nbytes)
        custom.begin_capture(stream, (world.dtype,))
        driver.begin_capture(stream)
        for _ in range(calls):
            custom.all_reduce(place, output, nbytes // 2, world.dtype, stream)
        graph = driver.end_capture(stream)
        custom.finish_capture()
        return graph

    graphs = world.each(prepare)
    first: Any = world.drivers[0]
    seen = []
    for _ in range(repeats):
        # Rank 1 waits already: the time of rank 0 is that of the handshakes alone.
        world.drivers[1].replay(graphs[1], world.streams[1])
        # Meanwhile the host queues the rest.
        world.launch(0, "spin", [u64(200_000)], threads=1)
        seen.append(measured_us(first, world.streams[0], lambda: first.replay(graphs[0], world.streams[0])))
        world.drivers[1].stream_synchronize(world.streams[1])
    for driver, graph in zip(world.drivers, graphs, strict=True):
        driver.forget(graph)
    return statistics.median(seen) / calls


def python_overhead(world: StreamWorld, calls: int = 200, repeats: int = 9) -> float:
    """Return the least time of a call on the host. One thread makes the calls of both ranks in turn.

    The calls of rank 0 are queued and wait on the device for those of rank 1: 200 fit into the queue of a stream.
    """
    places = []
    for memory in world.memories:
        memory.back_to(0)
        places.append((memory.put(bytes(8 * KIB)), memory.room(8 * KIB)))
    best = float("inf")
    for _ in range(repeats):
        for rank in (0, 1):
            call, (place, output) = world.customs[rank].all_reduce, places[rank]
            stream, dtype = world.streams[rank], world.dtype
            start = time.perf_counter()
            for _ in range(calls):
                call(place, output, 2048, dtype, stream)
            best = min(best, (time.perf_counter() - start) / calls * 1e6)
        for driver, stream in zip(world.drivers, world.streams, strict=True):
            driver.stream_synchronize(stream)
    return best


def compile_times(me: GpuRank, timer: Timer, cubin: Cubin) -> None:
    """Measure compiling a module, and loading it from the cache."""
    driver = timer.driver
    # A new cache: nothing is in it.
    cache = KernelCache(me.directory / "timed")
    compiled, loaded = [], []
    for family in ("one_shot", "two_shot", "shards", "pull", "norm"):
        variant = KernelVariant(arch_of(driver), 8, "bfloat16", family)
        start = time.perf_counter()
        cache.cubin(variant)
        compiled.append(time.perf_counter() - start)
        start = time.perf_counter()
        module = driver.module_load(cache.cubin(variant))
        loaded.append((time.perf_counter() - start) * 1e3)
        driver.module_unload(module)
    me.figure("compile a module of 8 ranks, slowest family", max(compiled), "s")
    me.figure("read a module from the cache and load it, slowest family", max(loaded), "ms")
    me.goal("compile time of a module", "under 0.5 s", f"{max(compiled):.2f} s", max(compiled) < 0.5)
    me.goal("module from the cache", "under 20 ms", f"{max(loaded):.1f} ms, loaded", max(loaded) < 20.0)


FIGURES: dict[str, Callable[[GpuRank, Timer, Cubin], None]] = {
    "the entry fence": fence_cost,
    "small sums in loopback, above the launch floor": small_loopbacks,
    "large sums in loopback, against a plain copy": large_loopbacks,
    "the fused norm, against its parts": fusion,
    "compiling and loading": compile_times,
}
"""In the order in which they run: first what decides most about the kernels."""


@contextmanager
def timer_of(me: GpuRank) -> Iterator[tuple[Timer, Cubin]]:
    """Yield a timer on a stream of the GPU, and the compiled kernels."""
    driver = GpuDriver(0)
    arch, cache = arch_of(driver), KernelCache(me.cache)

    def cubin(world: int, dtype: str, family: str) -> bytes:
        return cache.cubin(KernelVariant(arch, world, dtype, family))

    stream = driver.stream_create()
    # The first compilation loads NVRTC itself: no figure contains that.
    timer = Timer(driver, stream, compile_text(program_source(), arch, "bfloat16"))
    yield timer, cubin
    timer.close()
    driver.stream_destroy(stream)
    driver.close()


@gpu_body
def one_figure(me: GpuRank, name: str) -> None:
    with timer_of(me) as (timer, cubin):
        FIGURES[name](me, timer, cubin)


@gpu_body
def time_handshakes(me: GpuRank) -> None:
    world = world_on_gpu(me, 2, "bfloat16", limits={"push_one_shot": 256 * KIB})
    handshake(me, world)
    world.close()


class FewStreams(TorchStreams):
    """Torch's streams, but for the side stream, which is not of torch's pool.

    The pool has 32 streams, and the device as many queues. So a stream of the pool can share its queue with one of the
    ranks' streams, and its kernels wait behind one that waits for them.
    """

    def __init__(self, device: torch.device, driver: Gpu) -> None:
        super().__init__(device)
        self.driver = driver

    def create(self) -> int:
        """Return a stream of the driver."""
        return self.driver.stream_create()


@gpu_body
def time_overlap(me: GpuRank) -> None:
    me.goal(GOAL, "at least half of the shorter one is hidden", "not finished", False)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    # The product is queued by a thread that has used no CUDA before; torch then makes the context current, and says so.
    warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
    # Together no more blocks than a group has on a GPU of its own. By default the ranks of this world take all
    # multiprocessors, and the product finds no room.
    world = world_on_gpu(me, 2, "bfloat16", limits={"push_two_shot": MIB}, blocks=32)
    product = Product(device)
    torch.cuda.synchronize()
    overlap(me, Overlap(world, FewStreams(device, world.drivers[0]), product, MIB // 2))
    torch.cuda.synchronize()
    product.check()
    world.close()


@pytest.mark.parametrize("name", FIGURES)
@on_gpu(5, 30)
def test_figures_of_one_rank(gpu: GpuRun, name: str) -> None:
    """Times and rates of kernels that wait for nobody; every result is right."""
    gpu.run(one_figure, name, environ=ENVIRON)


@on_gpu(5, 30)
def test_figures_of_two_streams(gpu: GpuRun) -> None:
    """The handshake of two streams, and the Python of a call."""
    gpu.run(time_handshakes, environ=ENVIRON)


@on_gpu(5, 30)
def test_an_asynchronous_all_reduce_runs_beside_a_product(gpu: GpuRun) -> None:
    """The time of both on two streams, against one after the other; the sums and the product are right."""
    gpu.run(time_overlap, environ=ENVIRON)
