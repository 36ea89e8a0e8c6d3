"""`python -m benchmarks tune`: measure every algorithm of ours, and NCCL, on this host's devices.

A policy file with one row forces each algorithm, so the measured code is the code of real calls.
"""

from __future__ import annotations

import datetime as dt
import functools
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import torch

from benchmarks.results import BenchmarkError
from benchmarks.tensor_cases import only_ranks
from benchmarks.tuning import NCCL, Mode, Operation, Timing, thresholds_of
from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.group import GroupCoordinator
from coordinator.settings import CoordinatorSettings
from device_comm.cuda.communicator import CudaCommunicator
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.policy.file import POLICY_VERSION, MeasuredThreshold, PolicyFile, write_policy_file

__all__ = ["tune"]

SIZES: Final = tuple(1 << power for power in range(12, 26))
"""4 KB to 32 MB: below, one-shot is always fastest; above, NCCL is."""
ALGORITHMS: Final[dict[Operation, tuple[str, ...]]] = {
    "all_reduce": ("push_one_shot", "push_two_shot", "pull_one_shot", "pull_two_shot", "multimem_two_shot"),
    "reduce_scatter": ("push_reduce_scatter",),
    "all_gather": ("push_all_gather", "staged_all_gather"),
}
WITHOUT_LIMIT: Final = 1 << 40
CALLS: Final = 32
ROUNDS: Final = 7


def tune(out: Path, ranks: int | None) -> int:
    """Measure on `ranks` devices, and write the policy file; return the exit status.

    Raises:
        BenchmarkError: There are too few devices, or our kernels cannot run on them.
    """
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    wanted = min(devices, 8) if ranks is None else ranks
    if wanted < 2 or devices < wanted:
        raise BenchmarkError(
            f"tune needs at least 2 CUDA devices on this host, and no more ranks than devices: {devices} here, "
            f"{wanted} wanted"
        )
    with tempfile.TemporaryDirectory(prefix="group-coordinator-tune-") as name:
        command = [sys.executable, "-m", "benchmarks.tune_devices", name, str(wanted)]
        processes = [subprocess.Popen([*command, str(rank)]) for rank in range(wanted)]  # noqa: S603 - our own module
        try:
            codes = [process.wait(timeout=1800) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise BenchmarkError("not finished after half an hour") from error
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if any(codes):
            raise BenchmarkError(f"a rank failed; exit statuses: {codes}")
        content = msgspec.json.decode((Path(name) / "policy.json").read_bytes(), type=PolicyFile)
    write_policy_file(out, content)
    for row in content.thresholds:
        print(
            f"{row.operation}, {row.world_size} ranks, {row.mode}: {row.algorithm} up to {row.max_bytes} bytes"
        )
    print(f"wrote {out}; use it with GROUP_COORDINATOR_CUDA__POLICY_FILE={out}")
    return 0


def run_rank(directory: Path, world_size: int, rank: int) -> None:
    """Measure as one of the ranks; rank 0 writes the policy file."""
    settings = CoordinatorSettings.resolve({})
    init_distributed_environment(
        world_size, rank, f"file://{directory}/world", local_rank=rank, backend="nccl", settings=settings
    )
    world = get_world_group()
    timings: list[Timing] = []
    facts = None
    for count in (each for each in (2, 4, 8) if each <= world_size):
        with only_ranks(world, count) as (group, _):
            if rank < count:
                facts = _facts(group)
                timings += _measure(group, facts, directory)
    if rank == 0 and facts is not None:
        content = _file(facts, thresholds_of(timings))
        (directory / "policy.json").write_bytes(msgspec.json.encode(content))
    destroy_distributed_environment()


def _facts(group: GroupCoordinator) -> GroupFacts:
    """Return the policy's facts about the group, which building our kernels determines. Collective."""
    communicator = group.device_communicator
    if not isinstance(communicator, CudaCommunicator):
        raise BenchmarkError(f"this group uses {communicator.algorithm}, which has nothing to tune")
    facts = communicator.prepare_kernels()
    if facts is None:
        reason = communicator.path("all_reduce", 4096, torch.bfloat16).reason
        raise BenchmarkError(f"our kernels cannot run here: {reason}")
    return facts


@functools.cache
def _driver_version() -> str:
    from device_comm.cuda.driver_bindings import CudaDriver
    from device_comm.cuda.topology import probe

    return str(probe(CudaDriver(0)).driver_version) or "unknown"


def _file(facts: GroupFacts, thresholds: tuple[MeasuredThreshold, ...]) -> PolicyFile:
    return PolicyFile(
        version=POLICY_VERSION,
        device_name=facts.device_name,
        arch=facts.arch,
        link="nvlink" if facts.has_nvlink else "pcie",
        host=platform.node() or "unknown",
        driver=_driver_version(),
        date=dt.datetime.now(dt.UTC).strftime("%Y-%m-%d"),
        thresholds=thresholds,
    )


def _measure(group: GroupCoordinator, facts: GroupFacts, directory: Path) -> Iterator[Timing]:
    """Yield the times of every algorithm, size and mode; each algorithm has its own group. Collective."""
    for operation, names in ALGORITHMS.items():
        for algorithm in (NCCL, *names):
            with _forced(group, facts, operation, algorithm, directory) as forced:
                for mode in get_args(Mode):
                    for nbytes in SIZES:
                        time_us = _time(forced, operation, algorithm, mode, nbytes)
                        if time_us is not None:
                            yield Timing(operation, algorithm, group.world_size, mode, nbytes, time_us)


@contextmanager
def _forced(
    group: GroupCoordinator, facts: GroupFacts, operation: Operation, algorithm: str, directory: Path
) -> Iterator[GroupCoordinator]:
    """Create a group whose calls of `operation` use `algorithm`. Collective."""
    cuda: dict[str, Any] = {"custom_all_reduce": False}
    if algorithm != NCCL:
        row = MeasuredThreshold(
            operation=operation,
            algorithm=algorithm,  # type: ignore[arg-type]
            world_size=group.world_size,
            mode="any",
            max_bytes=WITHOUT_LIMIT,
        )
        path = directory / f"{algorithm}-{group.world_size}-{group.rank}.json"
        write_policy_file(path, _file(facts, (row,)))
        cuda = {"policy_file": str(path)}
    # Only the ranks of this group create it. Each rank counts names for itself, so no other group may have this name.
    with GroupCoordinator(
        [group.ranks],
        group.local_rank,
        group.torch_distributed_backend,
        True,
        group_name=f"tune-{group.world_size}",
        settings=CoordinatorSettings.resolve({}, cuda=cuda),
    ) as forced:
        yield forced
        group.barrier()


def _time(
    group: GroupCoordinator, operation: Operation, algorithm: str, mode: Mode, nbytes: int
) -> float | None:
    """Return the slowest rank's median in µs; None if this algorithm does not support the call. Collective."""
    tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16, device=group.device)
    calls: dict[Operation, Callable[[], object]] = {
        "all_reduce": lambda: group.all_reduce(tensor),
        "reduce_scatter": lambda: group.reduce_scatter(tensor, 0),
        "all_gather": lambda: group.all_gather(tensor, 0),
    }
    call = calls[operation]
    path = group.device_communicator.path
    if mode == "eager":
        if path(operation, nbytes, tensor.dtype).algorithm != algorithm:
            return None
        run = call
    else:
        recorded = torch.cuda.CUDAGraph()
        with group.graph_capture() as context:
            is_carried = path(operation, nbytes, tensor.dtype).algorithm == algorithm
            call()
            with torch.cuda.graph(recorded, stream=context.stream):  # type: ignore[arg-type]
                for _ in range(CALLS):
                    call()
        if not is_carried:
            return None
        run = recorded.replay
    medians = []
    for _ in range(ROUNDS):
        group.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS if mode == "eager" else 1):
            run()
        torch.cuda.synchronize()
        medians.append((time.perf_counter() - start) / CALLS * 1e6)
    return float(max(group.all_gather_object(statistics.median(medians))))


if __name__ == "__main__":
    try:
        run_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except BenchmarkError as error:
        # All ranks raise the same error; only rank 0 prints it.
        raise SystemExit(f"benchmarks: error: {error}" if sys.argv[3] == "0" else 2) from error
