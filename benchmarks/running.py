"""One rank's part of a run: joins the world, then measures case by case, as all other ranks do."""

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
"""Needs more ranks than the others are measured with."""


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the ranks of a world measure.

    Attributes:
        world_size: How many they are.
        cases: Names of `CASES`.
        is_quick: Whether only to try them.
        peers: Folder of the peers, if there is one.
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
    """What the ranks of a world found."""

    measurements: list[Measurement] = []
    regions: list[Region] = []
    skipped: list[Skipped] = []

    def add(self, other: Findings) -> None:
        """Take over what other worlds found."""
        self.measurements += other.measurements
        self.regions += [each for each in other.regions if each not in self.regions]
        self.skipped += [each for each in other.skipped if each not in self.skipped]


def chosen_cases(text: str) -> list[str]:
    """Return the cases of "queue,barrier"; all of them for an empty text.

    Raises:
        BenchmarkError: There is no such case.
    """
    names = [name.strip() for name in text.split(",") if name.strip()] or list(CASES)
    unknown = [name for name in names if name not in CASES]
    if unknown:
        raise BenchmarkError(f"there is no case {unknown[0]!r}; there are {', '.join(CASES)}")
    return [name for name in CASES if name in names]


def join(world_size: int, rank: int, method: str) -> GroupCoordinator:
    """Join the world; return the group of all ranks, on devices of their own where there are enough."""
    torch.set_num_threads(1)
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # A launcher says nothing of other hosts' devices: one for each rank is taken for granted.
    backend = "nccl" if devices >= max(world_size, 1) else "gloo"
    # Settings of the environment would make figures of different runs differ.
    settings = CoordinatorSettings.resolve({})
    init_distributed_environment(world_size, rank, method, backend=backend, settings=settings)
    group = get_world_group()
    # So that every call's way is known before it is made.
    group.device_communicator.prepare_buffers(0)
    return group


def measure_all(
    plan: Plan, group: GroupCoordinator, tell: Callable[[str], None], step: Callable[[], None]
) -> Findings:
    """Measure every case of a plan. Collective; rank 0's findings count."""
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
    """Return what is written to a file."""
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
    """Measure in the world that torchrun or the like has started; return this rank, and on rank 0 the results."""
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
    """Be one of the ranks that `launching` started; rank 0 says on stdout how far it is."""
    plan = msgspec.json.decode(plan_file.read_bytes(), type=Plan)
    group = join(plan.world_size, rank, f"file://{plan_file.parent}/world")

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    findings = measure_all(plan, group, lambda text: say(f"now {text}"), lambda: say("done"))
    if rank == 0:
        (plan_file.parent / "findings.json").write_bytes(msgspec.json.encode(findings))
    destroy_distributed_environment()
