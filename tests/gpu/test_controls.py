"""Kernels with a planted mistake, on the device: each must be noticed. Kernels without one bear the same delays."""

from __future__ import annotations

import functools

import pytest

from tests.gpu.controls import CONTROLS, DELAYS_ALONE
from tests.gpu.device import compile_mutant
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.streams import ENVIRON, noticed, world_on_gpu

REPLAYS = 300


@gpu_body
def report_of(me: GpuRank, name: str) -> str | None:
    control = CONTROLS[name]
    source = control.source()
    compiled = functools.cache(lambda arch, family: compile_mutant(source, arch, 2, "bfloat16", family))
    world = world_on_gpu(me, 2, "bfloat16", limits=control.limits, deadline_s=1.0, cubin=compiled)
    found = noticed(world, control.calls, REPLAYS, max(3.0, me.left() - 8.0), lie=control.lie)
    world.close()
    return found


@on_gpu(8, 30)
def test_right_kernels_bear_the_delays(gpu: GpuRun) -> None:
    """Without a mistake nothing is reported, however late rank 1 is: the other controls notice their mistakes alone."""
    assert gpu.run(report_of, DELAYS_ALONE, environ=ENVIRON) == [None]


@pytest.mark.parametrize("mistake", [name for name in CONTROLS if name != DELAYS_ALONE])
@on_gpu(8, 25)
def test_a_mistake_is_noticed(gpu: GpuRun, mistake: str) -> None:
    """By a wrong element or by a rank that waits until the deadline."""
    (found,) = gpu.run(report_of, mistake, environ=ENVIRON)
    gpu.goal(f"noticed: {mistake}", "a wrong result, or a deadline", found or "nothing", found is not None)
    assert found is not None, "the results must be wrong, and nothing was reported"
