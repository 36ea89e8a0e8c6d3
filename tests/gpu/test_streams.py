"""Ranks as streams of one process: eager calls, graphs replayed with skew, a rank that does not come."""

from __future__ import annotations

import functools
import time

import pytest

from tests.gpu.device import compile_mutant, mutated_source
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.streams import ENVIRON, GRAPH_BYTES, KIB, absent_rank, noticed, world_on_gpu

EAGER = (1, 100, 1024, 1500, 5000, 8000)
WRONG_INPUT = "wrong_input"
RACE = "phase_forced_to_0"


@gpu_body
def eager_and_graphs(me: GpuRank, world_size: int, dtype: str, count: int) -> None:
    name = f"{world_size} streams"
    world = world_on_gpu(me, world_size, dtype)
    me.figure(f"{name}: eager calls compared", world.eager(EAGER, 30), "calls")
    start = time.monotonic()
    made = world.replays(GRAPH_BYTES, count, max(5.0, min(35.0, me.left() - 15.0)))
    spent = time.monotonic() - start
    me.figure(f"{name}: replays of {len(GRAPH_BYTES)} all-reduces with skew", made, "replays")
    me.figure(f"{name}: a replay with its checks and skew", spent / made * 1e6, "us")
    if count >= 10_000:
        found = f"{made} on {name}, every result checked on the device"
        me.goal("10,000 graph replays with random skew", "10,000, no wrong element", found, made >= count)
    world.close()


@gpu_body
def one_is_absent(me: GpuRank) -> None:
    world = world_on_gpu(me, 2, "bfloat16", deadline_s=1.0)
    me.figure("error of a kernel whose peer does not come, deadline 1 s", absent_rank(world, 1.0), "s")
    world.close()


@gpu_body
def notices(me: GpuRank, mistake: str) -> None:
    compiled = None
    if mistake != WRONG_INPUT:
        source = mutated_source(mistake)
        compiled = functools.cache(lambda arch, family: compile_mutant(source, arch, 2, "bfloat16", family))
    world = world_on_gpu(me, 2, "bfloat16", deadline_s=1.0, cubin=compiled)
    # Many one-shot pushes in a row are the best chance of a rank to overtake another one.
    sizes = (4 * KIB,) * 20 if mistake == RACE else GRAPH_BYTES
    lie = 7 if mistake == WRONG_INPUT else 0
    found = noticed(world, sizes, 2000, max(3.0, me.left() - 8.0), lie=lie)
    if mistake == RACE:
        target = "a wrong result or a deadline; a race that need not be lost"
        me.goal(f"noticed: {RACE}", target, found or "nothing", found is not None)
    else:
        me.fact(f"noticed: {mistake}", found)
        assert found is not None, "the results must be wrong, and nothing was reported"
    world.close()


@pytest.mark.parametrize(
    ("world_size", "dtype", "count"), [(4, "bfloat16", 10_000), (2, "float32", 2_000), (8, "float16", 2_000)]
)
@on_gpu(10, 60)
def test_streams_reduce_eagerly_and_in_graphs(gpu: GpuRun, world_size: int, dtype: str, count: int) -> None:
    """Every result is right, of eager calls and of graphs that are replayed with random skew."""
    gpu.run(eager_and_graphs, world_size, dtype, count, environ=ENVIRON)


@on_gpu(8, 20)
def test_a_rank_that_does_not_launch_is_named(gpu: GpuRun) -> None:
    """The others hear of it once the deadline has passed, not before."""
    gpu.run(one_is_absent, environ=ENVIRON)


@pytest.mark.parametrize("mistake", [WRONG_INPUT, "clear_dropped", RACE])
@on_gpu(5, 25)
def test_a_wrong_result_is_noticed(gpu: GpuRun, mistake: str) -> None:
    """A negative control: one rank brings a wrong input, or the kernels have a mistake.

    With one phase only, a rank can overwrite what a peer has not read yet. That is a race: it is reported as a goal.
    """
    gpu.run(notices, mistake, environ=ENVIRON)
