"""All ranks of a group in one cooperative launch: a block row for each rank, its own workspace, state and error record.

The kernels are compiled with EMULATE: every argument that differs between ranks is a table in device memory. A
cooperative launch runs all blocks at once or fails, so ranks cannot wait for one that has no multiprocessor.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch

from device_comm import kernel_layout
from device_comm.driver import PreparedLaunch
from device_comm.kernel_layout import KernelFailure, WorkspaceLayout, blocks_for, required_arena, work_items
from device_comm.kernels import family_of
from tests.gpu.device import Gpu, Memory, u32, u64
from tests.gpu.values import DTYPES

__all__ = ["SUMS", "Emulation"]

SUMS = ("push_one_shot", "push_two_shot", "pull_one_shot", "pull_two_shot")
_THREADS = 256


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
            world_size: Ranks.
            dtype: A name of `DTYPES`.
            cubin: Gives the compiled family with EMULATE.
            largest: Elements of the largest call.
            deadline_s: How long a rank waits for another.
        """
        self.driver, self.world_size, self.dtype = driver, world_size, DTYPES[dtype]
        self._cubin = cubin
        self._modules: dict[str, int] = {}
        self._functions: dict[str, int] = {}
        nbytes = largest * self.dtype.itemsize
        arena = max(required_arena(name, nbytes, world_size) for name in ("push_one_shot", "push_all_gather"))
        staging = kernel_layout.required_staging("pull_two_shot", nbytes)
        self.layout = WorkspaceLayout(world_size, arena, staging)
        own = self.layout.total_bytes + kernel_layout.STATE_BYTES + kernel_layout.ERROR_RECORD_BYTES + 4096
        # Inputs and outputs of all ranks, of all-gathers too, which give everybody everything.
        data = (3 + world_size) * (nbytes + 4096) + (1 << 16)
        self.memory = Memory(driver, world_size * (own + data) + (1 << 20))
        self.stream = driver.stream_create()
        self._set_up(deadline_s)

    def _set_up(self, deadline_s: float) -> None:
        driver, memory = self.driver, self.memory
        workspaces = [memory.room(self.layout.total_bytes) for _ in range(self.world_size)]
        for workspace in workspaces:
            for offset, value, words in self.layout.initial_words:
                driver.memset_d32(workspace + offset, value, words, self.stream)
        states = [memory.put(bytes(kernel_layout.STATE_BYTES)) for _ in workspaces]
        self.errors = [memory.put(bytes(kernel_layout.ERROR_RECORD_BYTES)) for _ in workspaces]
        packed = [
            kernel_layout.pack_params(
                self.layout,
                workspaces=workspaces,
                state=states[rank],
                error=self.errors[rank],
                deadline_ns=int(deadline_s * 1e9),
                rank=rank,
            )
            for rank in range(self.world_size)
        ]
        self._params = memory.put(b"".join(packed))
        driver.stream_synchronize(self.stream)
        self._mark = memory.mark()

    def function(self, kernel: str) -> int:
        """Return a kernel, loaded now if need be."""
        if kernel not in self._functions:
            family = family_of(kernel)
            if family not in self._modules:
                self._modules[family] = self.driver.module_load(self._cubin(family))
            self._functions[kernel] = self.driver.module_function(self._modules[family], kernel)
        return self._functions[kernel]

    def _launch(self, kernel: str, items: int, arguments: Sequence[bytes]) -> None:
        most = max(1, self.driver.multiprocessors() // self.world_size)
        threads = next((each for each in (128, _THREADS, 512) if items <= each * most), 512)
        grid = blocks_for(items, threads, most)
        prepared = PreparedLaunch([u64(self._params), *arguments])
        function = self.function(kernel)
        self.driver.launch_cooperative(function, (grid, self.world_size), threads, self.stream, prepared)
        self.driver.stream_synchronize(self.stream)

    def _results(self, addresses: Sequence[int], count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [self.memory.get(address, count, dtype) for address in addresses]

    def sum(self, kernel: str, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """All-reduce the ranks' inputs; return each rank's result."""
        memory, count = self.memory, inputs[0].numel()
        memory.back_to(self._mark)
        first = [memory.put(each) for each in inputs]
        if kernel.startswith("pull"):
            # Every rank has a table of all ranks' inputs; here they can share one.
            first = [memory.table(first)] * self.world_size
        nbytes = count * self.dtype.itemsize
        outputs = [memory.room(nbytes) for _ in inputs]
        arguments = [u64(memory.table(first)), u64(memory.table(outputs)), u64(count)]
        self._launch(kernel, work_items(kernel, nbytes, self.world_size), arguments)
        return self._results(outputs, count, self.dtype)

    def reduce_scatter(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return each rank's part of the sum."""
        memory, count = self.memory, inputs[0].numel() // self.world_size
        memory.back_to(self._mark)
        first = [memory.put(each) for each in inputs]
        nbytes = count * self.dtype.itemsize
        outputs = [memory.room(nbytes) for _ in inputs]
        arguments = [u64(memory.table(first)), u64(memory.table(outputs)), u64(count)]
        self._launch(
            "push_reduce_scatter", work_items("push_reduce_scatter", nbytes, self.world_size), arguments
        )
        return self._results(outputs, count, self.dtype)

    def all_gather(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return what each rank has gathered of the ranks' bytes."""
        memory, nbytes = self.memory, inputs[0].nbytes
        memory.back_to(self._mark)
        first = [memory.put(each) for each in inputs]
        outputs = [memory.room(nbytes * self.world_size) for _ in inputs]
        arguments = [u64(memory.table(first)), u64(memory.table(outputs)), u64(nbytes)]
        self._launch("push_all_gather", work_items("push_all_gather", nbytes, self.world_size), arguments)
        return self._results(outputs, nbytes * self.world_size, torch.uint8)

    def norm(
        self, inputs: Sequence[torch.Tensor], residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return each rank's (normed, sum with the residual) of the fused kernel."""
        memory = self.memory
        memory.back_to(self._mark)
        rows, hidden = inputs[0].shape
        first = [memory.put(each) for each in inputs]
        shared = [[memory.put(each)] * self.world_size for each in (residual, weight)]
        outputs = [memory.room(inputs[0].nbytes) for _ in inputs]
        totals = [memory.room(inputs[0].nbytes) for _ in inputs]
        tables = [u64(memory.table(each)) for each in (first, *shared, outputs, totals)]
        arguments = [*tables, u32(rows), u32(hidden), struct.pack("<f", eps)]
        self._launch("push_add_rms_norm", rows * kernel_layout.NORM_LANES, arguments)
        count = rows * hidden
        normed, total = (self._results(each, count, self.dtype) for each in (outputs, totals))
        return list(zip(normed, total, strict=True))

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
