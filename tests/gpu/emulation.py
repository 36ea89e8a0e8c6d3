"""All ranks of a group in one cooperative launch: a row of blocks for each rank, with its own workspace and state.

The kernels are compiled with EMULATE: every argument that differs between ranks is a table in device memory. A
cooperative launch runs all blocks at once or fails, so no rank can wait for one that has no multiprocessor.

    python -m tests.gpu.emulation CACHE     compares a small subset: for compute-sanitizer, which is slow
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

from device_comm.cuda import kernel_layout
from device_comm.cuda.driver import PreparedLaunch
from device_comm.cuda.kernel_layout import (
    KernelFailure,
    WorkspaceLayout,
    blocks_for,
    work_items,
)
from device_comm.cuda.kernels import KernelCache, KernelVariant, family_of
from device_comm.fused.rms_norm import add_rms_norm
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from tests.gpu.device import Gpu, GpuDriver, Memory, arch_of, u32, u64
from tests.gpu.values import DTYPES, SIZES, WrongResultError, expect_equal, expected_sum, random_words
from tests.kernel_memory import required_arena, required_staging

__all__ = ["EMULATED", "Cubin", "Emulation", "check_variant", "compiled", "largest_call", "one_variant"]

SUMS = ("push_one_shot", "push_two_shot", "pull_one_shot", "pull_two_shot")
GATHERS = ("push_all_gather", "staged_all_gather")
FUSED = ("push_add_rms_norm", "push_two_shot_add_rms_norm")
EMULATED = (*SUMS, "push_reduce_scatter", *GATHERS, *FUSED)
"""The kernels that this module runs; `expert_emulation` runs those of the expert-parallel exchange."""
GATHERED = (1, 2, 5, 8, 13, 16, 100, 1000, 4096, 65536)
SCATTERED = (1, 3, 4, 7, 8, 9, 33, 64, 1000, 8192)
NORMS = ((1, 64), (2, 1024), (3, 128), (16, 4096), (200, 2560))
SMALL = (1, 7, 8, 100, 1025)
_EPS = 1e-5

Cubin = Callable[[int, str, str], bytes]
"""(world size, dtype, family) -> the compiled module."""


class Emulation:
    """The ranks of one group for one dtype, on one device."""

    def __init__(
        self,
        driver: Gpu,
        world_size: int,
        dtype: str,
        cubin: Callable[[str], bytes],
        *,
        largest: int,
        deadline_s: float = 2.0,
    ) -> None:
        """Make workspaces, states and parameters.

        Args:
            driver: The device.
            world_size: Number of ranks.
            dtype: A name of `DTYPES`.
            cubin: Returns the compiled family, with EMULATE.
            largest: Elements of the largest call.
            deadline_s: How long a rank waits for another one.
        """
        self.driver, self.world_size, self.dtype = driver, world_size, DTYPES[dtype]
        self._cubin = cubin
        self._modules: dict[str, int] = {}
        nbytes = largest * self.dtype.itemsize
        arena = max(required_arena(name, nbytes, world_size) for name in ("push_one_shot", "push_all_gather"))
        self._arena_bytes = arena
        staging = required_staging(nbytes)
        layout = WorkspaceLayout(world_size, arena, staging)
        own = layout.total_bytes + kernel_layout.STATE_BYTES + kernel_layout.ERROR_RECORD_BYTES + 4096
        # Inputs and outputs of all ranks; an all-gather gives each of them everything.
        data = (3 + world_size) * (nbytes + 4096) + (1 << 16)
        memory = self.memory = Memory(driver, world_size * (own + data) + (1 << 20))
        self.stream = driver.stream_create()
        workspaces = [memory.room(layout.total_bytes) for _ in range(world_size)]
        for workspace in workspaces:
            for offset, value, words in layout.initial_words:
                driver.memset_d32(workspace + offset, value, words, self.stream)
        states = [memory.put(bytes(kernel_layout.STATE_BYTES)) for _ in workspaces]
        self.errors = [memory.put(bytes(kernel_layout.ERROR_RECORD_BYTES)) for _ in workspaces]
        packed = [
            kernel_layout.pack_params(
                layout,
                workspaces=workspaces,
                state=states[rank],
                error=self.errors[rank],
                deadline_ns=int(deadline_s * 1e9),
                rank=rank,
            )
            for rank in range(world_size)
        ]
        self._params = memory.put(b"".join(packed))
        driver.stream_synchronize(self.stream)
        self._mark = memory.mark()

    def begin(self) -> None:
        """Forget the tensors of the previous call."""
        self.memory.back_to(self._mark)

    def launch(self, kernel: str, items: int, arguments: Sequence[bytes], fewest: int = 128) -> None:
        """Run a kernel on all ranks with at least `fewest` threads per block; wait until it has ended."""
        family = family_of(kernel)
        if family not in self._modules:
            self._modules[family] = self.driver.module_load(self._cubin(family))
        function = self.driver.module_function(self._modules[family], kernel)
        most = max(1, self.driver.multiprocessors() // self.world_size)
        threads = next((each for each in (128, 256, 512) if each >= fewest and items <= each * most), 512)
        grid = (blocks_for(items, threads, most), self.world_size)
        # A kernel that waits for nobody has no `Params`.
        params = [u64(self._params)] if kernel.startswith(("push", "pull", "staged")) else []
        prepared = PreparedLaunch([*params, *arguments])
        self.driver.launch_cooperative(function, grid, threads, self.stream, prepared)
        self.driver.stream_synchronize(self.stream)

    def call(
        self, kernel: str, inputs: Sequence[torch.Tensor], count: int, produced: int
    ) -> list[torch.Tensor]:
        """Launch a kernel on the ranks' inputs; return the result of each rank.

        Args:
            kernel: Any but the fused norm.
            inputs: One for each rank.
            count: The kernel's argument: elements, or bytes of an all-gather.
            produced: Elements of a result.
        """
        memory, dtype = self.memory, inputs[0].dtype
        self.begin()
        first = [memory.put(each) for each in inputs]
        if kernel.startswith("pull"):
            # Every rank has a table of all inputs; here the ranks can share one.
            first = [memory.table(first)] * self.world_size
        outputs = [memory.room(produced * dtype.itemsize) for _ in inputs]
        arguments = [u64(memory.table(first)), u64(memory.table(outputs)), u64(count)]
        self.launch(kernel, work_items(kernel, count * dtype.itemsize, self.world_size), arguments)
        return [memory.get(output, produced, dtype) for output in outputs]

    def norm(
        self, kernel: str, inputs: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each rank's (normed, sum with the residual) of a kernel of `FUSED`."""
        memory = self.memory
        self.begin()
        rows, hidden = inputs[0].shape
        count = rows * hidden
        tables = [
            [memory.put(each) for each in inputs],
            *([memory.put(each)] * self.world_size for each in (residual, weight)),
            *([memory.room(inputs[0].nbytes) for _ in inputs] for _ in range(2)),
        ]
        arguments = [u64(memory.table(each)) for each in tables]
        arguments += [u32(rows), u32(hidden), struct.pack("<f", _EPS)]
        lanes = kernel_layout.GROUP_LANES
        self.launch(kernel, rows * lanes, arguments, fewest=lanes)
        normed, total = ([memory.get(each, count, self.dtype) for each in table] for table in tables[3:])
        return list(zip(normed, total, strict=True))

    def serves(self, kernel: str, rows: int, hidden: int) -> bool:
        """Return whether a kernel of `FUSED` can carry a call: with two shots every rank owns a part of each row."""
        row_vectors = hidden * self.dtype.itemsize // kernel_layout.VECTOR_BYTES
        needed = kernel_layout.norm_arena(rows, row_vectors, self.world_size)
        return kernel == FUSED[0] or (
            row_vectors >= kernel_layout.WARP * self.world_size and needed <= self._arena_bytes
        )

    def failures(self) -> list[KernelFailure | None]:
        """Return what each rank's error record says."""
        size = kernel_layout.ERROR_RECORD_BYTES
        return [kernel_layout.read_failure(self.driver.memcpy_dtoh(error, size)) for error in self.errors]

    def close(self) -> None:
        """Give everything back."""
        for module in self._modules.values():
            self.driver.module_unload(module)
        self.driver.stream_destroy(self.stream)
        self.memory.free()


def check_variant(emulation: Emulation, sizes: Sequence[int], *, full: bool = True) -> int:
    """Compare every algorithm at every size; return the number of calls that were compared."""
    world, dtype = emulation.world_size, emulation.dtype
    scattered, gathered = (SCATTERED, GATHERED) if full else (SMALL, SMALL)
    for size in sizes:
        inputs = [random_words(size, dtype, 100 * size + r) for r in range(world)]
        expected = expected_sum(inputs)
        for kernel in SUMS:
            _compare(
                emulation, f"{kernel} {dtype}", emulation.call(kernel, inputs, size, size), [expected] * world
            )
    for size in scattered:
        inputs = [random_words(size * world, dtype, size + r) for r in range(world)]
        found = emulation.call("push_reduce_scatter", inputs, size, size)
        _compare(emulation, f"push_reduce_scatter {dtype}", found, expected_sum(inputs).split(size))
    for nbytes in gathered:
        made = torch.Generator().manual_seed(nbytes)
        inputs = list(torch.randint(0, 256, (world, nbytes), dtype=torch.uint8, generator=made))
        # All ones are the sentinel of the sums, and must be ordinary data here.
        inputs[1] = inputs[1] | 255
        for kernel in GATHERS:
            found = emulation.call(kernel, inputs, nbytes, nbytes * world)
            _compare(emulation, kernel, found, [torch.cat(inputs)] * world)
    normed = sum(_check_norms(emulation, *shape) for shape in (NORMS if full else NORMS[:2]))
    if any(emulation.failures()):
        raise AssertionError(f"error records: {emulation.failures()}")
    return len(SUMS) * len(sizes) + len(scattered) + len(GATHERS) * len(gathered) + normed


def _check_norms(emulation: Emulation, rows: int, hidden: int) -> int:
    world, dtype = emulation.world_size, emulation.dtype
    kernels = [kernel for kernel in FUSED if emulation.serves(kernel, rows, hidden)]
    for kernel in kernels:
        made = torch.Generator().manual_seed(hidden)
        tensors = [torch.randn(rows, hidden, generator=made).to(dtype) for _ in range(world + 1)]
        weight = torch.randn(hidden, generator=made).to(dtype)
        *inputs, residual = tensors
        reduced = reduce_in_rank_order(inputs, ReduceOperation.SUM)
        pairs = emulation.norm(kernel, inputs, residual, weight)
        for which, expected in enumerate(add_rms_norm(reduced, residual, weight, _EPS)):
            found = [pair[which] for pair in pairs]
            _compare(emulation, f"{kernel} of {rows} x {hidden}", found, [expected] * world)
    return len(kernels)


def _compare(
    emulation: Emulation, what: str, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> None:
    try:
        for rank, (result, right) in enumerate(zip(found, expected, strict=True)):
            expect_equal(result, right, f"{what} rank {rank}")
    except WrongResultError as error:
        error.add_note(f"error records: {emulation.failures()}")
        raise


def largest_call() -> int:
    """Return the elements that the largest call of any algorithm needs, with any world size."""
    return max(*SIZES, *GATHERED, 8 * max(SCATTERED), *(rows * hidden for rows, hidden in NORMS))


def compiled(arch: int, cache: Path) -> Cubin:
    """Return the source of compiled families; several threads may ask it."""
    kernels = KernelCache(cache)

    def source(world_size: int, dtype: str, family: str) -> bytes:
        return kernels.cubin(KernelVariant(arch, world_size, dtype, family, emulate=True))

    return source


def one_variant(
    driver: Gpu,
    world: int,
    dtype: str,
    cubin: Cubin,
    sizes: Sequence[int] = SIZES,
    *,
    full: bool = True,
    deadline_s: float = 2.0,
) -> int:
    """Compare all algorithms for one world size and dtype; return the number of calls."""
    largest = largest_call() if full else 16384
    emulation = Emulation(
        driver, world, dtype, partial(cubin, world, dtype), largest=largest, deadline_s=deadline_s
    )
    try:
        return check_variant(emulation, sizes, full=full)
    finally:
        emulation.close()


def main(cache: str) -> None:
    """Compare the subset for the sanitizer."""
    driver = GpuDriver(0)
    cubin = compiled(arch_of(driver), Path(cache))
    variants = ((2, "bfloat16"), (4, "float32"))
    total = sum(one_variant(driver, *each, cubin, SMALL, full=False, deadline_s=60.0) for each in variants)
    driver.close()
    print(f"small subset compared: {total} calls")


if __name__ == "__main__":
    main(sys.argv[1])
