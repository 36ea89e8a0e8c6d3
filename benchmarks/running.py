"""One rank's part in a run: join the world, then measure case by case together with the other ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec
import torch
import torch.distributed as dist

from benchmarks import host_cases, tensor_cases
from benchmarks.implementations import Ours, Plain, Vllm, vllm_class
from benchmarks.measuring import Bench, Effort
from benchmarks.results import (
    SCHEMA_VERSION,
    BenchmarkError,
    Measurement,
    Region,
    Results,
    Skipped,
    describe_machine,
    now,
)
from benchmarks.tensor_cases import Parts
from coordinator import destroy_distributed_environment, get_world_group, init_distributed_environment
from coordinator.group import GroupCoordinator
from coordinator.settings import CoordinatorSettings

__all__ = ["CASES", "SCALING", "Findings", "Plan", "chosen_cases", "join", "measure_all", "results_of"]

CASES: Final[dict[str, Callable[[Parts], None]]] = {
    "memcpy": tensor_cases.memcpy,
    "all_reduce": tensor_cases.all_reduce,
    "compiled": tensor_cases.compiled,
    "graph": tensor_cases.graph,
    "fused": tensor_cases.fused,
    "all_gather": tensor_cases.all_gather,
    "reduce_scatter": tensor_cases.reduce_scatter,
    "barrier": tensor_cases.barrier,
    "objects": host_cases.objects,
    "queue": host_cases.queue,
    "waiting": host_cases.waiting,
    "dicts": host_cases.tensor_dicts,
    "overlap": tensor_cases.overlap,
    "creation": host_cases.creation,
    "first_use": host_cases.first_use,
    "scaling": tensor_cases.scaling,
}
SCALING: Final = "scaling"
"""The case that runs in a larger world than the others."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The measurements of one world.

    Attributes:
        world_size: Number of ranks.
        cases: Names of `CASES`.
        is_quick: Whether to check only that they run.
        peers: Folder of the peers, or None.
    """

    world_size: int
    cases: list[str]
    is_quick: bool = False
    peers: str | None = None

    @property
    def effort(self) -> Effort:
        """Return how long to measure."""
        return Effort(rounds=2, turn_s=0.005, is_quick=True) if self.is_quick else Effort()


class Findings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The findings of a world's ranks."""

    measurements: list[Measurement] = []
    regions: list[Region] = []
    skipped: list[Skipped] = []

    def add(self, other: Findings) -> None:
        """Add the findings of another world."""
        self.measurements += other.measurements
        self.regions += [each for each in other.regions if each not in self.regions]
        self.skipped += [each for each in other.skipped if each not in self.skipped]


def chosen_cases(text: str) -> list[str]:
    """Return the cases of a list such as "queue,barrier"; all cases for an empty text.

    Raises:
        BenchmarkError: A case is unknown.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise BenchmarkError(f"unknown case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    return [name for name in CASES if name in names]


def join(world_size: int, rank: int, method: str) -> GroupCoordinator:
    """Join the world; return the group of all ranks, on CUDA devices if there is one per rank."""
    torch.set_num_threads(1)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # Under a launcher the world size is -1 here; assume one device per rank on each host.
    backend = "nccl" if devices >= max(world_size, 1) else "gloo"
    # Ignore settings from the environment: they would make figures of different runs differ.
    settings = CoordinatorSettings.resolve({})
    init_distributed_environment(world_size, rank, method, backend=backend, settings=settings)
    group = get_world_group()
    # Prepared buffers let `path` name a call's algorithm before the call.
    group.device_communicator.prepare_buffers(0)
    return group


def measure_all(
    plan: Plan, group: GroupCoordinator, tell: Callable[[str], None], step: Callable[[], None]
) -> Findings:
    """Measure every case of a plan. Collective; only rank 0's findings are complete."""
    bench = Bench(group, plan.effort, tell)
    whole: Any = dist.group.WORLD
    host = None if group.device.type == "cpu" else group.cpu_group
    vllm = None
    if plan.cases != [SCALING]:
        try:
            vllm = Vllm(vllm_class(Path(plan.peers) if plan.peers else None), group.ranks, group.rank)
        except BenchmarkError as error:
            bench.skip("vllm", str(error))
    parts = Parts(bench, Ours(group), Plain(whole, group.device, host), vllm)
    for name in plan.cases:
        group.barrier()
        CASES[name](parts)
        step()
    group.barrier()
    return Findings(measurements=bench.measurements, regions=bench.regions, skipped=bench.skipped)


def results_of(findings: Findings, *, is_quick: bool, took_s: float) -> Results:
    """Return the results to write to a file."""
    return Results(
        schema=SCHEMA_VERSION,
        date=now(),
        took_s=round(took_s, 1),
        is_quick=is_quick,
        machine=describe_machine(),
        measurements=findings.measurements,
        regions=findings.regions,
        skipped=findings.skipped,
    )


def run_in_world(
    plan: Plan, tell: Callable[[str], None], step: Callable[[], None]
) -> tuple[int, Results | None]:
    """Measure in a world started by torchrun or another launcher; return this rank, and on rank 0 the results."""
    start = time.monotonic()
    group = join(-1, -1, "env://")
    rank = group.rank
    quiet: Callable[..., None] = lambda *_: None  # noqa: E731
    findings = measure_all(plan, group, tell if rank == 0 else quiet, step if rank == 0 else quiet)
    destroy_distributed_environment()
    if rank:
        return rank, None
    return rank, results_of(findings, is_quick=plan.is_quick, took_s=time.monotonic() - start)


def run_rank(plan_file: Path, rank: int) -> None:
    """Run one of the ranks that `launching` starts; rank 0 reports its progress on stdout."""
    plan = msgspec.json.decode(plan_file.read_bytes(), type=Plan)
    group = join(plan.world_size, rank, f"file://{plan_file.parent}/world")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    findings = measure_all(plan, group, lambda text: say(f"now {text}"), lambda: say("done"))
    if rank == 0:
        (plan_file.parent / "findings.json").write_bytes(msgspec.json.encode(findings))
    destroy_distributed_environment()
