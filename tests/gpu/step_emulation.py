"""Every algorithm, dtype and size with all ranks in one launch, against torch on the CPU; and under the sanitizer."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from device_comm.kernels import FAMILIES, KernelCache, KernelVariant
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from device_comm.rms_norm import add_rms_norm
from tests.gpu.device import Gpu, GpuDriver, arch_of
from tests.gpu.emulation import SUMS, Emulation
from tests.gpu.notes import Notes, SkipCheckError
from tests.gpu.step import open_gpu, run_module
from tests.gpu.values import DTYPES, SIZES, expected_sum, random_words, raw

GATHERED = (1, 2, 5, 8, 13, 16, 100, 1000, 4096, 65536)
SCATTERED = (1, 3, 4, 7, 8, 9, 33, 64, 1000, 8192)
NORMS = ((1, 64), (3, 128), (16, 4096), (200, 2560))
SMALL = (1, 7, 8, 100, 1025)
# What the steps of this module take out of the time, for the sanitizer to have some.
_SANITIZER_S = 25.0

Cubin = Callable[[int, str, str], bytes]


def check_variant(emulation: Emulation, sizes: Sequence[int], *, full: bool = True) -> int:
    """Compare every algorithm at every size; return how many calls were compared."""
    name = str(emulation.dtype).removeprefix("torch.")
    compared = 0
    for size in sizes:
        inputs = [random_words(size, emulation.dtype, 100 * size + r) for r in range(emulation.world_size)]
        expected = expected_sum(inputs)
        for kernel in SUMS:
            for rank, result in enumerate(emulation.sum(kernel, inputs)):
                if not torch.equal(raw(result), expected):
                    told = _difference(f"{kernel} {name} rank {rank}", raw(result), expected)
                    raise AssertionError(f"{told}; error records: {emulation.failures()}")
            compared += 1
    compared += check_scatters(emulation, SCATTERED if full else SMALL)
    compared += check_gathers(emulation, GATHERED if full else SMALL)
    compared += check_norms(emulation, NORMS if full else NORMS[:2])
    if any(emulation.failures()):
        raise AssertionError(f"error records: {emulation.failures()}")
    return compared


def _difference(what: str, found: torch.Tensor, expected: torch.Tensor) -> str:
    places = (found != expected).nonzero().view(-1)
    first = int(places[0])
    size = len(expected)
    return (
        f"{what}, {size} elements: {len(places)} differ, the first at {first}: {found[first]:#x}, "
        f"not {expected[first]:#x}"
    )


def check_scatters(emulation: Emulation, sizes: Sequence[int]) -> int:
    """Compare reduce-scatters."""
    world = emulation.world_size
    for size in sizes:
        inputs = [random_words(size * world, emulation.dtype, size + r) for r in range(world)]
        expected = expected_sum(inputs)
        for rank, result in enumerate(emulation.reduce_scatter(inputs)):
            part = expected[rank * size : (rank + 1) * size]
            if not torch.equal(raw(result), part):
                raise AssertionError(_difference(f"reduce_scatter rank {rank}", raw(result), part))
    return len(sizes)


def check_gathers(emulation: Emulation, sizes: Sequence[int]) -> int:
    """Compare all-gathers of any bytes; those of rank 1 are all ones, which the sums use as their sentinel."""
    for nbytes in sizes:
        inputs = []
        for rank in range(emulation.world_size):
            made = torch.Generator().manual_seed(nbytes + rank)
            data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=made)
            inputs.append(data | 255 if rank == 1 else data)
        expected = torch.cat(inputs)
        for rank, result in enumerate(emulation.all_gather(inputs)):
            if not torch.equal(result, expected):
                raise AssertionError(f"all_gather of {nbytes} bytes, rank {rank}")
    return len(sizes)


def check_norms(emulation: Emulation, shapes: Sequence[tuple[int, int]]) -> int:
    """Compare the fused norm with the sum in rank order and the contract's norm, both on the CPU."""
    for rows, hidden in shapes:
        made = torch.Generator().manual_seed(hidden)
        tensors = [
            torch.randn(rows, hidden, generator=made).to(emulation.dtype)
            for _ in range(emulation.world_size + 1)
        ]
        weight = torch.randn(hidden, generator=made).to(emulation.dtype)
        *inputs, residual = tensors
        reduced = reduce_in_rank_order(inputs, ReduceOperation.SUM)
        normed, total = add_rms_norm(reduced, residual, weight, 1e-5)
        for rank, (found, kept) in enumerate(emulation.norm(inputs, residual, weight, 1e-5)):
            is_same = torch.equal(raw(kept), raw(total.view(-1))) and torch.equal(
                raw(found), raw(normed.view(-1))
            )
            if not is_same:
                raise AssertionError(f"push_add_rms_norm of {rows} x {hidden}, rank {rank}")
    return len(shapes)


def compiled(arch: int, directory: Path) -> Cubin:
    """Return what gives a compiled family; all threads may ask."""
    cache = KernelCache(directory)

    def source(world_size: int, dtype: str, family: str) -> bytes:
        return cache.cubin(KernelVariant(arch, world_size, dtype, family, emulate=True))

    return source


def emulate(notes: Notes, driver: Gpu, cubin: Cubin, worlds: Sequence[int], reserve_s: float) -> None:
    """Run the matrix; world sizes in the given order, as far as the time goes."""
    done: set[int] = set()
    total = 0
    for world in worlds:
        with notes.check(f"{world} ranks: {len(SIZES)} sizes, three dtypes, all algorithms"):
            notes.need(reserve_s + 5.0, f"{world} ranks")
            for dtype in DTYPES:
                total += one_variant(driver, world, dtype, cubin)
            done.add(world)
    notes.figure("emulated calls compared bit by bit", total, "calls")
    if {2, 4, 8} & set(worlds):
        notes.goal(
            "all-reduce emulated for 2, 4 and 8 ranks, bit-exact",
            "torch.equal for every dtype and 40 sizes",
            f"equal for {sorted(done)} ranks, {len(SIZES)} sizes",
            done >= {2, 4, 8} and len(SIZES) >= 40,
        )


def one_variant(driver: Gpu, world: int, dtype: str, cubin: Cubin) -> int:
    """Run all sizes for one world size and dtype."""
    emulation = Emulation(driver, world, dtype, partial(cubin, world, dtype), largest=largest_call())
    try:
        return check_variant(emulation, SIZES)
    finally:
        emulation.close()


def largest_call() -> int:
    """Return the elements that the largest call of any algorithm needs room for, with any world size."""
    return max(*SIZES, *GATHERED, 8 * max(SCATTERED), *(rows * hidden for rows, hidden in NORMS))


def small(driver: Gpu, cubin: Cubin) -> int:
    """Run the subset for the sanitizer, which is hundreds of times slower."""
    total = 0
    for world, dtype in ((2, "bfloat16"), (4, "float32")):
        source = partial(cubin, world, dtype)
        emulation = Emulation(driver, world, dtype, source, largest=16384, deadline_s=60.0)
        try:
            total += check_variant(emulation, SMALL, full=False)
        finally:
            emulation.close()
    return total


def sanitize(notes: Notes, cache: Path) -> None:
    """Run the subset under memcheck and racecheck."""
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    for checker in ("memcheck", "racecheck"):
        with notes.check(f"compute-sanitizer {checker} on a subset"):
            if tool is None:
                raise SkipCheckError("compute-sanitizer is not on this machine")
            notes.need(5.0, "the sanitizer")
            command = [
                tool,
                *("--tool", checker, "--error-exitcode", "9"),
                *(sys.executable, "-m", "tests.gpu.step_emulation", "--small", str(cache)),
            ]
            judge_sanitizer(command, max(5.0, min(_SANITIZER_S, notes.left() - 3.0)))


def judge_sanitizer(command: Sequence[str], seconds: float) -> None:
    """Run a command under the sanitizer; raise what it found, or skip where it cannot work."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        raise SkipCheckError(f"the subset took longer than {seconds:.0f} s under the tool") from None
    output = done.stdout + done.stderr
    refused = ("Device not supported", "not supported on this", "Unable to initialize", "Invalid value")
    if done.returncode != 0 and any(text in output for text in refused):
        raise SkipCheckError(f"the tool refuses this machine: {output.strip()[-300:]}")
    if done.returncode != 0 or "small subset compared" not in output:
        raise AssertionError(f"ended with {done.returncode}: {output.strip()[-2000:]}")


def precompile(cubin: Cubin, worlds: Sequence[int]) -> None:
    """Compile on several threads: one takes 0.3 s for each of dozens of modules."""
    families = [family for family in FAMILIES if family != "probes"]
    wanted = list(itertools.product(worlds, DTYPES, families))
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda each: cubin(*each), wanted))


def run(notes: Notes) -> None:
    """Run the step."""
    driver = open_gpu()
    with tempfile.TemporaryDirectory() as directory:
        cache = Path(directory) / "cubins"
        cubin = compiled(arch_of(driver), cache)
        with notes.check("the kernels compile with EMULATE"):
            precompile(cubin, (2, 4, 8))
        emulate(notes, driver, cubin, (2, 4, 8), 0.0)
        sanitize(notes, cache)
        emulate_more(notes, driver, cubin)
    driver.close()


def emulate_more(notes: Notes, driver: Gpu, cubin: Cubin) -> None:
    """Run the odd world sizes, if there is time for them."""
    for world in (3, 5, 6, 7):
        with notes.check(f"{world} ranks: {len(SIZES)} sizes, three dtypes, all algorithms"):
            notes.need(15.0, f"{world} ranks")
            for dtype in DTYPES:
                one_variant(driver, world, dtype, cubin)


def main(arguments: Sequence[str]) -> int:
    """Run the step, or with `--small CACHE` the subset for the sanitizer."""
    if arguments[:1] == ["--small"]:
        driver = GpuDriver(0)
        total = small(driver, compiled(arch_of(driver), Path(arguments[1])))
        driver.close()
        print(f"small subset compared: {total} calls")
        return 0
    return run_module(run, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
