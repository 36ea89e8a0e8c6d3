"""Every algorithm, dtype and size with all ranks in one launch, against torch on the CPU; and under the sanitizer."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from device_comm.cuda.kernels import FAMILIES, KernelCache, KernelVariant, family_of
from tests.gpu.device import GpuDriver, arch_of, compile_mutant
from tests.gpu.emulation import EMULATED, Cubin, compiled, one_variant
from tests.gpu.expert_emulation import experts_of_one_variant, replays_of_one_variant
from tests.gpu.fused_emulation import FUSED_EMULATED, fused_of_one_variant
from tests.gpu.notes import GpuRank, gpu_body
from tests.gpu.patches import patched_source
from tests.gpu.running import GpuRun, on_gpu
from tests.gpu.values import DTYPES, SIZES, WrongResultError
from tests.probes import compute_sanitizer, requires

ROOT = Path(__file__).parents[2]
WORLDS = (2, 4, 8)
LAUNCHED = {family_of(kernel) for kernel in (*EMULATED, *FUSED_EMULATED)} | {"expert"}


@gpu_body
def compile_all(me: GpuRank) -> None:
    driver = GpuDriver(0)
    cubin = compiled(arch_of(driver), me.cache)
    # On several threads: a module takes 0.3 s.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: cubin(*each), itertools.product(WORLDS, DTYPES, LAUNCHED)))
    # The others are loaded at least.
    kernels = KernelCache(me.cache)
    for family in set(FAMILIES) - LAUNCHED:
        module = driver.module_load(kernels.cubin(KernelVariant(arch_of(driver), 4, "bfloat16", family)))
        for name in FAMILIES[family]:
            driver.module_function(module, name)
        driver.module_unload(module)
    driver.close()


def compare(me: GpuRank, world: int, one: Callable[[GpuDriver, int, str, Cubin], int], what: str) -> None:
    """Compare the calls of every dtype; the figure is their number."""
    driver = GpuDriver(0)
    cubin = compiled(arch_of(driver), me.cache)
    total = sum(one(driver, world, dtype, cubin) for dtype in DTYPES)
    me.figure(f"{what} compared bit by bit, {world} ranks", total, "calls")
    driver.close()


@gpu_body
def emulate(me: GpuRank, world: int) -> None:
    goal = f"all-reduce emulated for {world} ranks, bit-exact"
    target = "torch.equal for every dtype and 40 sizes"
    if world in WORLDS:
        me.goal(goal, target, "not finished", False)
    compare(me, world, one_variant, "emulated calls")
    if world in WORLDS:
        me.goal(goal, target, f"equal for {len(DTYPES)} dtypes, {len(SIZES)} sizes", len(SIZES) >= 40)


@gpu_body
def exchange(me: GpuRank, world: int) -> None:
    compare(me, world, experts_of_one_variant, "expert-parallel calls")


@gpu_body
def replay_exchanges(me: GpuRank, world: int) -> None:
    compare(me, world, replays_of_one_variant, "replayed expert-parallel exchanges")


@gpu_body
def fused(me: GpuRank, world: int) -> None:
    compare(me, world, fused_of_one_variant, "fused calls")


@gpu_body
def notices(me: GpuRank, mistake: str) -> None:
    driver = GpuDriver(0)
    source, arch = patched_source(mistake), arch_of(driver)

    def cubin(world: int, dtype: str, family: str) -> bytes:
        return compile_mutant(source, arch, world, dtype, family, "-DEMULATE=1")

    with pytest.raises(WrongResultError) as caught:
        one_variant(driver, 4, "float32", cubin, (1000,), full=False)
    me.fact(f"noticed: {mistake}", caught.value)
    driver.close()


def judge_sanitizer(command: Sequence[str], seconds: float) -> str | None:
    """Run a command under the sanitizer; fail for what it found, return why if it cannot work here."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    with process:
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return f"the subset took longer than {seconds:.0f} s under the tool"
        finally:
            # The tool starts the program as a child of its own, which must not keep the GPU.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    refused = ("Device not supported", "not supported on this", "Unable to initialize", "Invalid value")
    if process.returncode != 0 and any(text in output for text in refused):
        return f"the tool refuses this machine: {output.strip()[-300:]}"
    if process.returncode != 0 or "small subset compared" not in output:
        raise AssertionError(f"ended with {process.returncode}: {output.strip()[-2000:]}")
    return None


@on_gpu(20, 60)
def test_the_kernels_compile_for_the_emulation(gpu: GpuRun) -> None:
    """NVRTC compiles every family, world size and dtype that the tests below run; the device loads the others too."""
    gpu.run(compile_all)


@pytest.mark.parametrize("world", WORLDS)
@on_gpu(15, 40)
def test_emulated_ranks_get_the_right_bits(gpu: GpuRun, world: int) -> None:
    """Every algorithm, dtype and size has the bits that torch computes on the CPU."""
    gpu.run(emulate, world)


@pytest.mark.parametrize("world", WORLDS)
@on_gpu(8, 30)
def test_emulated_ranks_exchange_their_tokens(gpu: GpuRun, world: int) -> None:
    """Rows, local ids and sums of the expert-parallel kernels have the bits of `all2all.py` on the CPU."""
    gpu.run(exchange, world)


@pytest.mark.parametrize("world", WORLDS)
@on_gpu(3, 30)
def test_emulated_exchanges_can_be_replayed(gpu: GpuRun, world: int) -> None:
    """A graph of a dispatch and a combine gives the bits of the CPU for tokens that change between replays."""
    gpu.run(replay_exchanges, world)


@pytest.mark.parametrize("world", WORLDS)
@on_gpu(4, 30)
def test_emulated_ranks_fuse_norms_and_sums_of_experts(gpu: GpuRun, world: int) -> None:
    """Norms with an output of 8 bits (a scale per tensor or per token) or 4, and sums of experts, as torch has them."""
    gpu.run(fused, world)


@on_gpu(3, 15)
def test_a_wrong_sum_is_noticed(gpu: GpuRun) -> None:
    """A negative control: kernels that add in another order than that of the ranks."""
    gpu.run(notices, "order_swapped")


@requires("compute_sanitizer")
@pytest.mark.parametrize("checker", ["memcheck", "racecheck"])
@on_gpu(5, 28)
def test_the_sanitizer_finds_nothing(gpu: GpuRun, checker: str) -> None:
    """compute-sanitizer sees no bad access and no race in shared memory, on a small subset."""
    command = [str(compute_sanitizer()), "--tool", checker, "--error-exitcode", "9"]
    command += [sys.executable, "-m", "tests.gpu.emulation", str(gpu.cache)]
    obstacle = judge_sanitizer(command, gpu.left())
    if obstacle:
        gpu.skip(obstacle)


@pytest.mark.parametrize("world", [3, 5, 6, 7])
@on_gpu(3, 40)
def test_odd_numbers_of_emulated_ranks_get_the_right_bits(gpu: GpuRun, world: int) -> None:
    """The same for the other world sizes, whose shards do not divide evenly."""
    gpu.run(emulate, world)
