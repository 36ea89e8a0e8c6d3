"""What others say: torch's symmetric memory, NCCL with one rank; and that NCCL with two on one GPU fails cleanly."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from coordinator.board import StoreBoard
from device_comm.base import CommunicatorContext
from device_comm.health import GroupHealth
from device_comm.nccl import NcclCommunicator
from shm_broadcast.liveness import PeerWatch, this_process
from tests.gpu.notes import Notes, SkipCheckError
from tests.gpu.processes import run_ranks, values_of
from tests.gpu.step import open_gpu, run_module

MULTI_RANK = "NCCL_MULTI_RANK_GPU_ENABLE"
OVERLAPPING = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}


@contextmanager
def alone() -> Iterator[NcclCommunicator]:
    """Yield a connected communicator of NCCL with one rank."""
    torch.cuda.set_device(0)
    health = GroupHealth(
        "one:0", 0, (0,), PeerWatch(this_process(), {}), StoreBoard(dist.HashStore(), 0, (0,))
    )
    context = CommunicatorContext(
        name="one:0",
        rank_in_group=0,
        ranks=(0,),
        device=torch.device("cuda", 0),
        process_group=None,
        health=health,
        timeout_s=30.0,
        exchange=lambda data: [data],
    )
    communicator = NcclCommunicator(context)
    try:
        communicator.connect()
        yield communicator
    finally:
        communicator.destroy()
        health.close()
        health.release()


def one_rank_eager(notes: Notes) -> None:
    """Sum with oneself, eager, and time the Python of a call."""
    with alone() as communicator:
        own = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
        result = communicator.all_reduce(own)
        torch.cuda.synchronize()
        if not torch.equal(result, own):
            raise AssertionError("a sum of one is not what it was")
        best = float("inf")
        for _ in range(9):
            start = time.perf_counter()
            for _ in range(200):
                communicator.all_reduce(own)
            best = min(best, (time.perf_counter() - start) / 200 * 1e6)
            torch.cuda.synchronize()
        notes.figure("Python, tensor and call of NcclCommunicator.all_reduce, one rank", best, "us")


def one_rank_captured() -> None:
    """Sum with oneself in a graph, and replay it with new data."""
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
            if not torch.equal(result, own):
                raise AssertionError(f"replay {step}")
        # NCCL waits for graphs that hold its communicator.
        del graph, result


def two_ranks(notes: Notes, directory: Path) -> None:
    """Let NCCL refuse."""
    if os.environ.get(MULTI_RANK):
        raise SkipCheckError(f"{MULTI_RANK} is set: two ranks may be allowed")
    outcomes = run_ranks("tests.gpu.bodies:two_ranks_of_nccl", 2, directory / "two", 45.0)
    found = values_of(outcomes)
    notes.figure("two ranks of NCCL on one GPU: until the error", max(each["seconds"] for each in found), "s")
    notes.fact("two ranks of NCCL on one GPU", f"{found[0]['kind']}: {found[0]['text'][:200]}")
    kinds = {each["kind"] for each in found}
    # One of them is told by NCCL, the other may hear of it from the first.
    if "NcclError" not in kinds or not kinds <= {"NcclError", "PeerLostError", "GroupBrokenError"}:
        raise AssertionError(f"not a clean error of NCCL: {found}")


def symmetric(directory: Path) -> None:
    """Compare our definition of the sum with torch's symmetric memory."""
    outcomes = run_ranks(
        "tests.gpu.bodies:symmetric_memory", 2, directory / "symmetric", 30.0, environment=OVERLAPPING
    )
    problems = [each.problem for each in outcomes if each.problem]
    if problems:
        raise SkipCheckError(
            f"torch's symmetric memory does not work with one GPU here: {problems[0][-300:]}"
        )
    if not all(each.value["close"] for each in outcomes):
        raise AssertionError(f"{outcomes}")


def run(notes: Notes) -> None:
    """Run the step."""
    open_gpu().close()
    with notes.check("NCCL, one rank, eager"):
        one_rank_eager(notes)
    with notes.check("NCCL, one rank, captured"):
        one_rank_captured()
    with tempfile.TemporaryDirectory(prefix="gp-") as name:
        with notes.check("NCCL, two ranks on one GPU, fails cleanly"):
            two_ranks(notes, Path(name))
        with notes.check("torch's symmetric memory has the sum that we define, within rounding"):
            symmetric(Path(name))


if __name__ == "__main__":
    sys.exit(run_module(run, sys.argv[1:]))
