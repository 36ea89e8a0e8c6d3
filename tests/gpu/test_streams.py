"""Ranks as streams of one process: eager calls, graphs replayed with skew, a rank that does not come."""

from __future__ import annotations

import time

import pytest

from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.streams import ENVIRON, GRAPH_BYTES, KIB, absent_rank, norms, world_on_gpu

EAGER = (1, 100, 1024, 1500, 5000, 8000)


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
def wide_norms(me: GpuRank, world_size: int, one_shot: int) -> None:
    limits = {"push_one_shot": one_shot, "push_two_shot": 64 * KIB}
    world = world_on_gpu(me, world_size, "bfloat16", limits=limits)
    name = f"{world_size} streams: norms of 1 x 8192 compared"
    me.figure(name, norms(world, 1, 8192, 50), "calls")
    world.close()


@gpu_body
def one_is_absent(me: GpuRank) -> None:
    world = world_on_gpu(me, 2, "bfloat16", deadline_s=1.0)
    me.figure("error of a kernel whose peer does not come, deadline 1 s", absent_rank(world, 1.0), "s")
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


# The first is fused with one shot, the second with two.
@pytest.mark.parametrize(("world_size", "one_shot"), [(2, 64 * KIB), (4, 4 * KIB)])
@on_gpu(5, 15)
def test_norms_whose_rows_need_a_cluster_are_right(gpu: GpuRun, world_size: int, one_shot: int) -> None:
    """A row of 8192 is divided among the blocks of a cluster where the device has them, fused and alone."""
    gpu.run(wide_norms, world_size, one_shot, environ=ENVIRON)
