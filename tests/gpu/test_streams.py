"""Ranks as streams of one process: eager calls, graphs replayed with skew, a rank that does not come."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from device_comm.nccl.streams import TorchStreams
from tests.gpu.device import GpuDriver
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


@gpu_body
def default_stream(me: GpuRank) -> dict[str, bool]:
    """Let the default stream work for a second, and ask what is behind it."""
    driver = GpuDriver(0)
    streams = TorchStreams(torch.device("cuda", 0), driver.relaxed_capture)
    default, side = streams.current(), streams.create()
    torch.cuda._sleep(2_000_000_000)
    streams.wait(side, default)
    busy = {
        "the default stream": not streams.is_idle(default),
        "a stream behind it": not streams.is_idle(side),
        "an event behind it": not streams.record(side).is_done(),
    }
    torch.cuda.synchronize()
    found = dict(busy, **{"nothing at the end": streams.is_idle(default) and streams.is_idle(side)})
    # A question does not spoil a capture of another thread, in the mode in which torch captures.
    graph, place = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    event = streams.record(side)
    with torch.cuda.graph(graph):
        place += 1
        asked: list[bool] = []
        asking = threading.Thread(target=lambda: asked.append(event.is_done() and streams.is_idle(side)))
        asking.start()
        asking.join()
    graph.replay()
    torch.cuda.synchronize()
    found["a capture that another thread asks beside"] = asked == [True] and place.tolist() == [1.0] * 8
    driver.close()
    return found


@on_gpu(3, 15)
def test_work_on_the_default_stream_is_waited_for(gpu: GpuRun) -> None:
    """Events and questions for torch's default stream are about that stream, and spoil no capture."""
    (found,) = gpu.run(default_stream)
    assert all(found.values()), found


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
