"""What others compute: torch's symmetric memory, NCCL with one rank; NCCL with two on one GPU must fail cleanly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from coordinator.bootstrap.status_store import WorldStatusStore
from device_comm.base import CommunicatorContext
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda_settings import CudaSettings
from device_comm.health import GroupHealth
from device_comm.nccl.communicator import NcclCommunicator
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast.errors import CommError
from shm_broadcast.liveness import PeerWatch, this_process
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.page import short_reason
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.test_processes import communicator_of
from tests.harness import RankFailureError

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
OVERLAPPING = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@contextmanager
def alone(window_bytes: int = 0) -> Iterator[NcclCommunicator]:
    """Yield a connected communicator of NCCL with one rank; with `window_bytes` it stages sums through a window."""
    torch.cuda.set_device(0)
    board = WorldStatusStore(dist.HashStore(), 0, (0,))
    health = GroupHealth("one:0", 0, (0,), PeerWatch(this_process(), {}), board)
    context = CommunicatorContext(
        name="one:0",
        rank_in_group=0,
        ranks=(0,),
        device=torch.device("cuda", 0),
        process_group=None,
        health=health,
        timeout_s=30.0,
        exchange=lambda data: [data],
        cuda=CudaSettings(custom_all_reduce=False, nccl_window_bytes=window_bytes),
    )
    communicator = CudaCommunicator(context) if window_bytes else NcclCommunicator(context)
    try:
        communicator.connect()
        yield communicator
    finally:
        communicator.destroy()
        health.close()
        health.release()


@gpu_body
def one_rank_eager(me: GpuRank) -> None:
    with alone() as communicator:
        own = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        result = communicator.all_reduce(own)
        torch.cuda.synchronize()
        assert torch.equal(result, own)
        best = float("inf")
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(200):
                communicator.all_reduce(own)
            best = min(best, (time.perf_counter() - start) / 200 * 1e6)
            torch.cuda.synchronize()
        me.figure("Python, tensor and call of NcclCommunicator.all_reduce, one rank", best, "us")


@gpu_body
def one_rank_captured(me: GpuRank) -> None:
    with alone() as communicator:
        own = torch.zeros(4096, device="cuda", dtype=torch.float32)
        communicator.all_reduce(own)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = communicator.all_reduce(own)
        for step in range(20):
            own.fill_(float(step))
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(result, own), f"replay {step}"
        # NCCL waits for graphs that hold its communicator.
        del graph, result


@gpu_body
def one_rank_staged(me: GpuRank) -> str:
    with alone(window_bytes=1 << 20) as communicator:
        own = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        for _ in range(3):
            assert torch.equal(communicator.all_reduce(own), own)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with communicator.capture(stream), torch.cuda.graph(graph, stream=stream):
            result = communicator.all_reduce(own)
        for step in range(20):
            own.fill_(float(step))
            torch.cuda.synchronize()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(result, own), f"replay {step}"
        reason = communicator.path("all_reduce", own.nbytes, own.dtype).reason
        del graph, result
    connection = communicator._connection
    assert connection._memory is None, "the window was freed"
    return reason


@gpu_body
def two_ranks(me: GpuRank) -> dict[str, Any]:
    with communicator_of(me, None) as (_, communicator):
        start = time.monotonic()
        kind, text = "connected", ""
        try:
            communicator.connect()
        except CommError as error:
            kind, text = type(error).__name__, str(error)[:500]
        return {"kind": kind, "seconds": time.monotonic() - start, "text": text}


@gpu_body
def symmetric_memory(me: GpuRank) -> dict[str, bool]:
    import torch.distributed._symmetric_memory as symm_mem

    torch.cuda.set_device(0)
    store = dist.FileStore(str(me.directory / "store"), me.world_size)
    dist.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    made = torch.Generator().manual_seed(9)
    inputs = [torch.randn(4096, generator=made).bfloat16() for _ in range(me.world_size)]
    tensor = symm_mem.empty(4096, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    symm_mem.rendezvous(tensor, name)
    tensor.copy_(inputs[me.rank])
    torch.cuda.synchronize()
    dist.barrier()
    theirs = torch.ops.symm_mem.one_shot_all_reduce(tensor, "sum", name).cpu()
    torch.cuda.synchronize()
    dist.barrier()
    expected = reduce_in_rank_order(inputs, ReduceOperation.SUM)
    dist.destroy_process_group()
    return {
        "close": torch.allclose(theirs.float(), expected.float(), rtol=2**-7, atol=1e-2),
        "equal": torch.equal(theirs, expected),
    }


@on_gpu(6, 30)
def test_nccl_with_one_rank_runs_eagerly(gpu: GpuRun) -> None:
    """A sum of one rank is its input; the Python of a call is timed."""
    gpu.run(one_rank_eager)


@on_gpu(6, 30)
def test_nccl_with_one_rank_can_be_captured(gpu: GpuRun) -> None:
    """A captured sum is replayed with new data."""
    gpu.run(one_rank_captured)


@on_gpu(6, 30)
def test_nccl_with_one_rank_has_a_window(gpu: GpuRun) -> None:
    """A window is made, sums are staged through it, eagerly and in a replayed graph, and its end leaves nothing."""
    reason = gpu.run(one_rank_staged)[0]
    gpu.fact("symmetric window of NCCL with one rank", reason)
    if "no symmetric window" in reason:
        gpu.skip(reason)
    assert "staged through the symmetric window" in reason


@on_gpu(6, 45)
def test_nccl_with_two_ranks_on_one_gpu_fails_cleanly(gpu: GpuRun) -> None:
    """NCCL refuses two ranks on one GPU: each of them gets a typed error, and both end."""
    if os.environ.get(MULTI_RANK):
        gpu.skip(f"{MULTI_RANK} is set: NCCL 2.30.3 and later may allow two ranks")
    found = gpu.run(two_ranks, ranks=2)
    gpu.figure("two ranks of NCCL on one GPU: until the error", max(each["seconds"] for each in found), "s")
    gpu.fact("two ranks of NCCL on one GPU", f"{found[0]['kind']}: {found[0]['text'][:200]}")
    kinds = {each["kind"] for each in found}
    # NCCL tells one rank; the other one may hear of it from the first.
    assert "NcclError" in kinds, found
    assert kinds <= {"NcclError", "PeerLostError", "GroupBrokenError"}, found


@on_gpu(6, 40)
def test_symmetric_memory_has_our_sum_within_rounding(gpu: GpuRun) -> None:
    """Torch's symmetric memory computes the sum that we define."""
    try:
        found = gpu.run(symmetric_memory, ranks=2, environ=OVERLAPPING, fresh=True)
    except RankFailureError as error:
        gpu.skip(f"torch's symmetric memory does not work with one GPU here: {short_reason(str(error))}")
    gpu.fact("symmetric memory of torch", found)
    assert all(each["close"] for each in found), found
