"""What one GPU can tell about speed, without a word about other libraries.

*Launch floor*: an empty kernel in a graph. *Loopback*: a kernel whose peers' data is already there (`loopback.py`):
its own work without waiting, on memory that is all local. *Handshake*: two ranks on two streams, so with the waiting
for one another, but without a link. What a link adds is in none of them.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from device_comm.custom_launches import CubinSource
from device_comm.driver import PreparedLaunch
from device_comm.kernels import KernelCache, KernelVariant, kernel_source
from tests.gpu.device import Clock, Gpu, GpuDriver, Memory, arch_of, compile_text, program_source, u32, u64
from tests.gpu.loopback import Loopback, Timer, copies, two_shot_bytes
from tests.gpu.notes import Notes, SkipCheckError
from tests.gpu.step import open_gpu, run_module
from tests.gpu.step_streams import StreamWorld, sources

KIB, MIB = 1 << 10, 1 << 20
LANES = 20
LARGE_LANES = 4
NORM_SHAPE = (8, 4096)
WORLDS = (2, 4, 8)
# Of the comparisons for which one size of a group is enough.
ONE_WORLD = 4
HANDSHAKES = (16, 8 * KIB, 64 * KIB)
_FENCE = 'asm volatile("fence.acq_rel.sys;" ::: "memory");'

Cubin = Callable[[int, str, str], bytes]


def launch_floor(notes: Notes, timer: Timer, cubin: Cubin) -> float:
    """Return what one empty kernel takes in a graph of many."""
    driver, stream = timer.driver, timer.stream
    module = driver.module_load(cubin(2, "float32", "probes"))
    function = driver.module_function(module, "empty")
    nothing = PreparedLaunch([])

    def record() -> None:
        for _ in range(LANES):
            driver.launch(function, 1, 32, stream, nothing)

    floor = timer.per_launch_us(LANES, record)
    driver.module_unload(module)
    return notes.figure("launch floor: an empty kernel in a graph of 20", floor, "us")


def timed(timer: Timer, lanes: int, loopback: Loopback) -> float:
    """Return what one launch takes, once its result was found right."""
    loopback.refill()
    loopback.launch_all()
    loopback.check()
    spent = timer.per_launch_us(lanes, loopback.launch_all, loopback.refill)
    loopback.check()
    loopback.close()
    return spent


def small_loopbacks(notes: Notes, timer: Timer, cubin: Cubin, floor: float) -> None:
    """Time one-shot pushes of 8 to 64 KiB above the floor."""
    if not floor:
        raise SkipCheckError("the launch floor was not measured")
    driver, stream = timer.driver, timer.stream
    above: dict[str, float] = {}
    for world, size in itertools.product(WORLDS, (8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB)):
        source = partial(cubin, world, "bfloat16")
        loopback = Loopback(
            driver, "push_one_shot", world, "bfloat16", size, source, lanes=LANES, stream=stream
        )
        name = f"{world} ranks, {size // KIB} KiB"
        spent = timed(timer, LANES, loopback)
        notes.figure(f"loopback one-shot, {name}", spent, "us")
        above[name] = spent - floor
        notes.figure(f"loopback one-shot above the floor, {name}", above[name], "us")
    worst = max(above, key=lambda name: above[name])
    notes.goal(
        "loopback kernel, 8 to 64 KiB",
        "at most 3 us above an empty kernel in the same graph",
        f"at most {above[worst]:.2f} us ({worst})",
        above[worst] <= 3.0,
    )


def large_loopbacks(notes: Notes, timer: Timer, cubin: Cubin) -> None:
    """Time two-shot pushes of 8 MiB against plain copies that move as many bytes."""
    driver, stream = timer.driver, timer.stream
    shares: dict[int, float] = {}
    size = 8 * MIB
    for world in WORLDS:
        source = partial(cubin, world, "bfloat16")
        loopback = Loopback(
            driver, "push_two_shot", world, "bfloat16", size, source, lanes=LARGE_LANES, stream=stream
        )
        spent = timed(timer, LARGE_LANES, loopback)
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
    """Return what the driver's copy of `nbytes` takes in a graph, on as many different buffers as the kernel had."""
    driver, stream = timer.driver, timer.stream
    nbytes = nbytes // 256 * 256
    memory = Memory(driver, 2 * LARGE_LANES * (nbytes + 256))
    pairs = [(memory.room(nbytes), memory.room(nbytes)) for _ in range(LARGE_LANES)]
    spent = timer.per_launch_us(LARGE_LANES, copies(driver, stream, nbytes, pairs))
    memory.free()
    return spent


def fusion(notes: Notes, timer: Timer, cubin: Cubin) -> None:
    """Time the fused norm against the all-reduce and the norm behind it."""
    driver, stream = timer.driver, timer.stream
    rows, hidden = NORM_SHAPE
    size = rows * hidden * 2
    source = partial(cubin, ONE_WORLD, "bfloat16")
    fused = Loopback(
        driver,
        *("push_add_rms_norm", ONE_WORLD, "bfloat16", size, source),
        lanes=LANES,
        stream=stream,
        norm=NORM_SHAPE,
    )
    together = timed(timer, LANES, fused)
    parts = Loopback(driver, "push_one_shot", ONE_WORLD, "bfloat16", size, source, lanes=LANES, stream=stream)
    module = driver.module_load(source("norm"))
    function = driver.module_function(module, "add_rms_norm")
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
            driver.launch(function, rows, 256, stream, norm)

    apart = timer.per_launch_us(LANES, record, parts.refill)
    driver.module_unload(module)
    memory.free()
    parts.close()
    notes.figure("fused all-reduce, add and norm, loopback of 4 ranks, 8 x 4096 bfloat16", together, "us")
    notes.figure("the same in two kernels", apart, "us")
    notes.goal(
        "fused norm against its parts",
        "no slower",
        f"{together:.2f} us against {apart:.2f} us",
        together <= apart,
    )


def fence_cost(notes: Notes, timer: Timer, cubin: Cubin, arch: int) -> None:
    """Time a kernel whose entry fence was taken out: wrong between processors, but with nobody to race with here."""
    source = kernel_source()
    if _FENCE not in source:
        raise AssertionError("the source has no entry fence of this form: the figure needs a new one")
    bare = compile_text(
        source.replace(_FENCE, ""), arch, "bfloat16", f"-DWORLD_SIZE={ONE_WORLD}", "-DFAMILY=1", "-fmad=false"
    )

    def one(image: Callable[[str], bytes]) -> float:
        chosen = ("push_one_shot", ONE_WORLD, "bfloat16", 16 * KIB, image)
        return timed(timer, LANES, Loopback(timer.driver, *chosen, lanes=LANES, stream=timer.stream))

    with_fence, without = one(partial(cubin, ONE_WORLD, "bfloat16")), one(lambda _family: bare)
    notes.figure(
        "entry fence: loopback one-shot, 4 ranks, 16 KiB, with less without", with_fence - without, "us"
    )


def handshake(
    notes: Notes, drivers: Sequence[Gpu], cubin: CubinSource, program: bytes, directory: Path, **options: Any
) -> None:
    """Time chains of tiny all-reduces of two streams, and the Python of a call."""
    limits = {"push_one_shot": 256 * KIB}
    world = StreamWorld(
        drivers, "bfloat16", cubin, lambda _dtype: program, directory, limits=limits, **options
    )
    for nbytes in HANDSHAKES:
        notes.figure(f"handshake: all-reduce of two streams, {nbytes} bytes", chained(world, nbytes), "us")
    python = python_overhead(world)
    notes.figure("Python and launch of CustomAllReduce.all_reduce", python, "us")
    # The goal is set for a driver that does nothing; with a real one its launch is in it, and it may still hold.
    notes.goal(
        "Python per custom all-reduce",
        "under 6 us on the host (set for a fake driver)",
        f"{python:.2f} us with the launch",
        python < 6.0,
    )
    world.close()


def chained(world: StreamWorld, nbytes: int, calls: int = 50, repeats: int = 9) -> float:
    """Return what one of many all-reduces behind one another takes, by rank 0's clock."""

    def prepare(rank: int) -> object:
        custom, memory, driver = world.local.customs[rank], world.memories[rank], world.drivers[rank]
        stream = world.local.streams[rank]
        memory.back_to(0)
        place, output = memory.put(bytes(nbytes)), memory.room(nbytes)
        custom.begin_capture(stream, (world.dtype,))
        driver.begin_capture(stream)
        for _ in range(calls):
            custom.all_reduce(place, output, nbytes // 2, world.dtype, stream)
        graph = driver.end_capture(stream)
        custom.finish_capture()
        return graph

    graphs = world.local.each(prepare)
    first: Any = world.drivers[0]
    clock = Clock(first, world.local.streams[0])
    seen = []
    for _ in range(repeats):
        # Rank 1 is there already and waits: rank 0's time is that of the handshakes alone.
        world.drivers[1].replay(graphs[1], world.local.streams[1])
        # The host queues the rest meanwhile.
        world.launch(0, "spin", [u64(200_000)], threads=1)
        with clock:
            first.replay(graphs[0], world.local.streams[0])
        seen.append(clock.microseconds() / calls)
        world.drivers[1].stream_synchronize(world.local.streams[1])
    clock.close()
    for driver, graph in zip(world.drivers, graphs, strict=True):
        driver.forget(graph)
    return statistics.median(seen)


def python_overhead(world: StreamWorld, calls: int = 200, repeats: int = 9) -> float:
    """Return the least median of a call's time on the host. One thread makes the calls of both ranks in turn.

    The calls of rank 0 are queued and wait on the device for those of rank 1: 200 fit into a stream's queue.
    """
    places = []
    for memory in world.memories:
        memory.back_to(0)
        places.append((memory.put(bytes(8 * KIB)), memory.room(8 * KIB)))
    best = float("inf")
    for _ in range(repeats):
        for rank in (0, 1):
            call, (place, output) = world.local.customs[rank].all_reduce, places[rank]
            stream, dtype = world.local.streams[rank], world.dtype
            start = time.perf_counter()
            for _ in range(calls):
                call(place, output, 2048, dtype, stream)
            best = min(best, (time.perf_counter() - start) / calls * 1e6)
        for driver, stream in zip(world.drivers, world.local.streams, strict=True):
            driver.stream_synchronize(stream)
    return best


def compile_times(notes: Notes, driver: GpuDriver, arch: int, directory: Path) -> None:
    """Time compiling a module, and loading it from the cache."""
    cache = KernelCache(directory / "timed")
    compiled, loaded = [], []
    for family in ("one_shot", "two_shot", "shards", "pull", "norm"):
        variant = KernelVariant(arch, 8, "bfloat16", family)
        start = time.perf_counter()
        cache.cubin(variant)
        compiled.append(time.perf_counter() - start)
        start = time.perf_counter()
        module = driver.module_load(cache.cubin(variant))
        loaded.append((time.perf_counter() - start) * 1e3)
        driver.module_unload(module)
    notes.figure("compile a module of 8 ranks, slowest family", max(compiled), "s")
    notes.figure("read a module from the cache and load it, slowest family", max(loaded), "ms")
    notes.goal("compile time of a module", "under 0.5 s", f"{max(compiled):.2f} s", max(compiled) < 0.5)
    notes.goal("module from the cache", "under 20 ms", f"{max(loaded):.1f} ms, loaded", max(loaded) < 20.0)


def run(notes: Notes) -> None:
    """Run the step."""
    driver = open_gpu()
    arch = arch_of(driver)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        cache = KernelCache(directory / "cubins")

        def cubin(world: int, dtype: str, family: str) -> bytes:
            return cache.cubin(KernelVariant(arch, world, dtype, family))

        # NVRTC itself is loaded by the first compilation: that is no module's time.
        cubin(2, "float32", "probes")
        stream = driver.stream_create()
        timer = Timer(driver, stream, compile_text(program_source(), arch, "bfloat16"))
        floor = 0.0
        with notes.check("compiling and loading"):
            compile_times(notes, driver, arch, directory)
        with notes.check("launch floor"):
            floor = launch_floor(notes, timer, cubin)
        with notes.check("loopback of small sums"):
            small_loopbacks(notes, timer, cubin, floor)
        with notes.check("loopback of large sums against a plain copy"):
            large_loopbacks(notes, timer, cubin)
        with notes.check("fused against its parts"):
            fusion(notes, timer, cubin)
        with notes.check("cost of the entry fence"):
            fence_cost(notes, timer, cubin, arch)
        with notes.check("handshake of two streams, and Python per call"):
            program = compile_text(program_source(), arch, "bfloat16")
            handshake(notes, [GpuDriver(0), GpuDriver(0)], sources(arch, directory)(2), program, directory)
        timer.close()
        driver.stream_destroy(stream)
    driver.close()


if __name__ == "__main__":
    sys.exit(run_module(run, sys.argv[1:]))
