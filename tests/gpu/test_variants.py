"""Pairs of variants, measured in turns within one session: what each choice of the kernels and launches is worth.

A pair is what the product does, and the same with one thing undone: a patch of `tests/gpu/variants`, another way of
launching, or another grid. Both run as loopbacks (`loopback.py`), whose results must be right before and after. The
pairs run in their order, and a session that is late leaves out the last ones.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest

from device_comm.cuda.kernel_layout import MAX_BLOCKS, blocks_for, work_items
from device_comm.cuda.policy.shapes import most_blocks, norm_shape
from tests.gpu.comparison import Comparison, compare, take_turns
from tests.gpu.device import Gpu, arch_of, compile_mutant
from tests.gpu.loopback import Loopback, Timer, shape_of
from tests.gpu.notes import GpuRank, Notes, gpu_body
from tests.gpu.patches import patched_source
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.streams import ENVIRON
from tests.gpu.test_figures import timer_of

KIB, MIB = 1 << 10, 1 << 20
TURNS = 41


@dataclasses.dataclass(frozen=True)
class Variant:
    """One side of a pair.

    Attributes:
        name: As the report says it.
        patches: Patches of the kernels.
        is_dependent: Whether to use programmatic dependent launch.
        fills_device: Whether to launch a block for every multiprocessor, if there is work.
        has_clusters: Whether several blocks may share a row of a norm.
    """

    name: str
    patches: tuple[str, ...] = ()
    is_dependent: bool = True
    fills_device: bool = False
    has_clusters: bool = True


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two variants and where they are compared: a kernel, numbers of ranks, bytes, launches of a graph.

    `norm` is (rows, hidden) of the fused norm.
    """

    shipped: Variant
    changed: Variant
    kernel: str
    worlds: tuple[int, ...]
    nbytes: int
    lanes: int = 20
    norm: tuple[int, int] | None = None


PAIRS = {
    "entry fence": Pair(
        Variant("with it"),
        Variant("without it", patches=("fence_dropped",)),
        "push_one_shot",
        (2, 4, 8),
        16 * KIB,
    ),
    "fence behind the polls": Pair(
        Variant("with it"),
        Variant("without it", patches=("no_fence_behind_polls",)),
        "push_one_shot",
        (2, 8),
        16 * KIB,
    ),
    "loads of the input": Pair(
        Variant("behind the fence"),
        Variant("before it", patches=("loads_before_the_fence",)),
        "push_one_shot",
        (2, 8),
        16 * KIB,
    ),
    "threads that fence": Pair(
        Variant("all"),
        Variant("a thread of each warp of block 0", patches=("fence_of_few",)),
        "push_one_shot",
        (2, 8),
        16 * KIB,
    ),
    "programmatic dependent launch": Pair(
        Variant("with it"),
        Variant("without it", is_dependent=False),
        "push_one_shot",
        (2, 8),
        16 * KIB,
    ),
    "blocks of a large sum": Pair(
        Variant("at most 64"),
        Variant("one for each multiprocessor", fills_device=True),
        "push_two_shot",
        (2, 8),
        8 * MIB,
        lanes=4,
    ),
    "loads of the norm": Pair(
        Variant("plain"),
        Variant("volatile", patches=("volatile_loads",)),
        "push_add_rms_norm",
        (4,),
        8 * 8192 * 2,
        norm=(8, 8192),
    ),
    "rows of the norm": Pair(
        Variant("by a cluster"),
        Variant("by one block", has_clusters=False),
        "push_add_rms_norm",
        (4,),
        8 * 8192 * 2,
        norm=(8, 8192),
    ),
}
"""By name, in the order in which they run."""


def measure(notes: Notes, timer: Timer, name: str, turns: int = TURNS) -> None:
    """Compare the pair for every number of ranks."""
    pair = PAIRS[name]
    size = f"{pair.nbytes // KIB} KiB" if pair.norm is None else " x ".join(map(str, pair.norm))
    for world in pair.worlds:
        found = in_turns(timer, pair, world, turns)
        notes.comparison(f"{name}, {pair.kernel}, {world} ranks, {size}", found)


def in_turns(timer: Timer, pair: Pair, world: int, turns: int) -> Comparison:
    """Return the times of one launch in a graph, whose results are right before and after."""
    both = [loopback_of(timer, pair, variant, world) for variant in (pair.shipped, pair.changed)]
    for each in both:
        each.refill()
        each.launch_all()
        each.check()
    graphs = [timer.captured(each.launch_all) for each in both]
    first, second = (
        partial(timer.replayed_us, graph, each.refill) for graph, each in zip(graphs, both, strict=True)
    )
    # The first replays load the graphs onto the device.
    take_turns(first, second, 2)
    pairs = take_turns(first, second, turns)
    for graph, each in zip(graphs, both, strict=True):
        each.check()
        timer.driver.forget(graph)
        each.close()
    per_launch = [(early / pair.lanes, late / pair.lanes) for early, late in pairs]
    return compare(pair.shipped.name, pair.changed.name, per_launch)


def loopback_of(timer: Timer, pair: Pair, variant: Variant, world: int) -> Loopback:
    """Return the lanes of one variant."""
    # Both sides are compiled here, so that nothing but the patches can differ.
    text, arch = patched_source(*variant.patches), arch_of(timer.driver)
    source = partial(compile_mutant, text, arch, world, "bfloat16")
    return Loopback(
        timer.driver,
        pair.kernel,
        world,
        "bfloat16",
        pair.nbytes,
        source,
        lanes=pair.lanes,
        stream=timer.stream,
        norm=pair.norm,
        shape=shape_for(timer.driver, pair, variant, world),
        is_dependent=variant.is_dependent,
    )


def shape_for(driver: Gpu, pair: Pair, variant: Variant, world: int) -> tuple[int, int, int]:
    """Return blocks, threads and blocks of a cluster: the product's, but for what the variant changes."""
    if variant.fills_device:
        most = min(driver.multiprocessors(), MAX_BLOCKS)
        items = work_items(pair.kernel, pair.nbytes, world)
        threads = next((each for each in (128, 256, 512) if items <= each * most), 512)
        return blocks_for(items, threads, most), threads, 1
    if pair.norm is not None and not variant.has_clusters:
        rows, _ = pair.norm
        # Devices before sm_90 have no clusters.
        return norm_shape("sm_80", most_blocks(driver.multiprocessors()), rows, pair.nbytes // rows // 16)
    return shape_of(driver, pair.kernel, world, pair.nbytes, pair.norm)


@gpu_body
def one_pair(me: GpuRank, name: str) -> None:
    with timer_of(me) as (timer, _):
        measure(me, timer, name)


@pytest.mark.parametrize("name", PAIRS)
@on_gpu(10, 45)
def test_variants_take_turns(gpu: GpuRun, name: str) -> None:
    """Every result is right; the report says which one is faster, and by how much."""
    gpu.run(one_pair, name, environ=ENVIRON)
