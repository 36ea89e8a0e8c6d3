"""A rank whose peers have already pushed: the time of a kernel that waits for nobody, and the bytes it moves.

How a kernel can run alone. A push kernel of rank 0 writes into the workspaces of its peers and polls its own. So the
workspaces of the peers are memory that nobody reads, and its own arena is filled beforehand with words that are not the
sentinel: every poll finds all of its data at once. The kernel clears what it has read, so each launch needs a filled
arena. Filling must not be timed, hence every launch of a graph has a lane of its own: a workspace, and a state with
epoch 0, which makes it read the arena of phase 0. Between two replays all arenas and epochs are reset.

The epochs must be reset too: a kernel increments them, and with epoch 1 it would poll the arena of phase 1, which was
never filled, until its deadline. A kernel also reads at its entry whether the communicator has failed: all states are
zeros.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable
from typing import Any

import torch

from device_comm.cuda import kernel_layout
from device_comm.cuda.driver import PreparedLaunch
from device_comm.cuda.kernel_layout import (
    FLAGS_BYTES,
    STATE_BYTES,
    WorkspaceLayout,
)
from device_comm.cuda.kernels import family_of
from device_comm.cuda.policy.shapes import all_reduce_shape, most_blocks, norm_shape
from device_comm.cuda.policy.table import family_of as family_of_arch
from device_comm.fused.rms_norm import add_rms_norm
from tests.gpu.device import Gpu, GpuDriver, Memory, measured_us, u32, u64
from tests.gpu.values import DTYPES, expect_equal, expected_sum, raw
from tests.kernel_memory import required_arena

__all__ = ["Loopback", "Timer", "shape_of", "two_shot_bytes"]

PEER_VALUE = 1.0
"""Every element that a peer "has pushed", so that the result can be checked."""
_PEER_WORDS = {torch.float32: 0x3F800000, torch.float16: 0x3C003C00, torch.bfloat16: 0x3F803F80}
_EPS = 1e-5
# Longer than the host takes to queue a graph.
_HOLD_NS = 200_000


class Loopback:
    """`lanes` launches of one kernel by rank 0 of `world_size`, each with an arena of its own."""

    def __init__(
        self,
        driver: Gpu,
        kernel: str,
        world_size: int,
        dtype: str,
        nbytes: int,
        cubin: Callable[[str], bytes],
        *,
        lanes: int,
        stream: int,
        norm: tuple[int, int] | None = None,
        deadline_s: float = 2.0,
        shape: tuple[int, int, int] | None = None,
        is_dependent: bool = True,
    ) -> None:
        """Allocate the lanes.

        Args:
            driver: The device.
            kernel: A push kernel of an all-reduce, or push_add_rms_norm.
            world_size: Number of ranks; this is the first.
            dtype: A name of `DTYPES`.
            nbytes: Size of the input.
            cubin: Returns a compiled family.
            lanes: Launches of one replay.
            stream: The stream of all launches.
            norm: (rows, hidden), for push_add_rms_norm.
            deadline_s: When a kernel that waits by mistake gives up.
            shape: Blocks, threads of a block, blocks of a cluster; None for the product's choice.
            is_dependent: Whether to use programmatic dependent launch, as the product does.
        """
        self.driver, self.kernel, self.world_size = driver, kernel, world_size
        self.dtype, self.stream, self.norm = DTYPES[dtype], stream, norm
        self.count = nbytes // self.dtype.itemsize
        layout = self.layout = WorkspaceLayout(world_size, required_arena(kernel, nbytes, world_size))
        lane = layout.total_bytes + STATE_BYTES + 3 * (nbytes + 512) + 4096
        sinks = (world_size - 1) * (layout.total_bytes + 256)
        memory = self.memory = Memory(driver, lanes * lane + sinks + (1 << 20))
        self._module = driver.module_load(cubin(family_of(kernel)))
        self._function = driver.module_function(self._module, kernel)
        # One rank has the whole device, as in a real group.
        shape = shape or shape_of(driver, kernel, world_size, nbytes, norm)
        self._configured = driver.configure(
            self._function, *shape[:2], cluster=shape[2], is_dependent=is_dependent
        )
        self._sinks = [memory.room(layout.total_bytes) for _ in range(world_size - 1)]
        self._error = memory.put(bytes(kernel_layout.ERROR_RECORD_BYTES))
        # All states lie together: one memset resets them.
        self._states = memory.room(lanes * STATE_BYTES)
        made = torch.Generator().manual_seed(nbytes)
        self.source = torch.randn(self.count, generator=made).to(self.dtype)
        self._inputs = [memory.put(self.source)]
        if norm is not None:
            residual, weight = torch.zeros(self.count), torch.ones(norm[1])
            self._inputs += [memory.put(each.to(self.dtype)) for each in (residual, weight)]
        self.workspaces = [memory.room(layout.total_bytes) for _ in range(lanes)]
        self.outputs = [memory.room(nbytes) for _ in range(lanes)]
        deadline_ns = int(deadline_s * 1e9)
        self._arguments = [self._packed(lane, deadline_ns, nbytes) for lane in range(lanes)]
        # A second launch without a refill polls the arena of phase 1. It must wait there and report that, not read
        # whatever the memory holds.
        for workspace in self.workspaces:
            for offset, value, words in layout.initial_words:
                driver.memset_d32(workspace + offset, value, words, stream)
        driver.stream_synchronize(stream)

    def _packed(self, lane: int, deadline_ns: int, nbytes: int) -> PreparedLaunch:
        params = kernel_layout.pack_params(
            self.layout,
            workspaces=[self.workspaces[lane], *self._sinks],
            state=self._states + lane * STATE_BYTES,
            error=self._error,
            deadline_ns=deadline_ns,
            rank=0,
        )
        addresses = [u64(each) for each in (*self._inputs, self.outputs[lane])]
        if self.norm is None:
            return PreparedLaunch([params, *addresses, u64(self.count)])
        rows, hidden = self.norm
        total = self.memory.room(nbytes)
        sizes = [u32(rows), u32(hidden), struct.pack("<f", _EPS)]
        return PreparedLaunch([params, *addresses, u64(total), *sizes])

    def refill(self) -> None:
        """Fill the arenas of all lanes as the peers would, and reset the epochs."""
        for workspace in self.workspaces:
            place = workspace + FLAGS_BYTES
            words = self.layout.arena_bytes // 4
            self.driver.memset_d32(place, _PEER_WORDS[self.dtype], words, self.stream)
        self.driver.memset_d32(self._states, 0, len(self.workspaces) * STATE_BYTES // 4, self.stream)

    def launch_all(self) -> None:
        """Launch every lane once."""
        for lane in range(len(self.workspaces)):
            self.launch_one(lane)

    def launch_one(self, lane: int) -> None:
        """Launch one lane; each must be launched once between two refills."""
        self.driver.launch_configured(self._configured, self.stream, self._arguments[lane])

    def expected(self) -> torch.Tensor:
        """Return the bits of an all-reduce with the peers' data."""
        other = torch.full((self.count,), PEER_VALUE, dtype=self.dtype)
        total = expected_sum([self.source, *[other] * (self.world_size - 1)])
        if self.kernel == "push_two_shot":
            # The second half of the arena holds what the owners have summed: the shards of the peers are taken as
            # they are, only the rank's own one is a sum.
            vectors = max(1, -(-other.nbytes // 16))
            shard = -(-vectors // self.world_size) * 16 // self.dtype.itemsize
            total[shard:] = raw(other)[shard:]
        return total

    def check(self) -> None:
        """Raise unless every lane has the right result and no kernel gave up."""
        self.driver.stream_synchronize(self.stream)
        record = self.driver.memcpy_dtoh(self._error, kernel_layout.ERROR_RECORD_BYTES)
        failure = kernel_layout.read_failure(record)
        if failure is not None:
            raise AssertionError(f"{self.kernel}: {failure}")
        expected = self.expected() if self.norm is None else self._expected_norm(*self.norm)
        for output in self.outputs:
            expect_equal(self.memory.get(output, self.count, self.dtype), expected, self.kernel)

    def _expected_norm(self, rows: int, hidden: int) -> torch.Tensor:
        reduced = self.expected().view(self.dtype).view(rows, hidden)
        residual, weight = torch.zeros_like(reduced), torch.ones(hidden, dtype=self.dtype)
        return add_rms_norm(reduced, residual, weight, _EPS)[0]

    def close(self) -> None:
        """Give everything back."""
        self.driver.module_unload(self._module)
        self.memory.free()


def shape_of(
    driver: Gpu, kernel: str, world_size: int, nbytes: int, norm: tuple[int, int] | None = None
) -> tuple[int, int, int]:
    """Return blocks, threads of a block and blocks of a cluster, as the product chooses them for this device."""
    major, minor = driver.compute_capability()
    arch, processors = f"sm_{10 * major + minor}", driver.multiprocessors()
    if norm is None:
        return *all_reduce_shape(kernel, family_of_arch(arch), processors, nbytes, world_size), 1
    rows, _ = norm
    return norm_shape(arch, most_blocks(processors), rows, nbytes // rows // 16)


def two_shot_bytes(nbytes: int, world_size: int) -> int:
    """Return the bytes that a two-shot push reads and writes on one rank, counted from the kernel.

    In shards of nbytes / world_size, with p = world_size - 1 peers. Read: p of the input to scatter, 1 of its own,
    p of the arena, p of the results. Written: p to peers, p cleared, p results to peers, 1 of the output, p cleared,
    p of the output. Polls that find nothing yet are not counted.
    """
    peers = world_size - 1
    shard = -(-nbytes // (16 * world_size)) * 16
    return (8 * peers + 2) * shard


class Timer:
    """Measures launches in a graph, on the device."""

    def __init__(self, driver: GpuDriver, stream: int, program: bytes) -> None:
        """Load `program`, the machine code of `test_programs.cu`."""
        self.driver, self.stream = driver, stream
        self._module = driver.module_load(program)
        self._spin = driver.module_function(self._module, "spin")
        self.empty = driver.module_function(self._module, "empty")
        self._hold = PreparedLaunch([u64(_HOLD_NS)])

    def per_launch_us(
        self,
        launches: int,
        record: Callable[[], None],
        before: Callable[[], None] | None = None,
        repeats: int = 15,
    ) -> float:
        """Return the median time of one launch in a graph of `launches`, in microseconds.

        Args:
            launches: How many launches `record` makes.
            record: Makes the launches.
            before: Queues what each replay needs; it is not timed.
            repeats: Number of replays, after two that do not count.
        """
        graph = self.captured(record)
        seen = [self.replayed_us(graph, before) for _ in range(repeats + 2)]
        self.driver.forget(graph)
        return statistics.median(seen[2:]) / launches

    def captured(self, record: Callable[[], None]) -> Any:
        """Return a graph of what `record` launches."""
        self.driver.begin_capture(self.stream)
        record()
        return self.driver.end_capture(self.stream)

    def replayed_us(self, graph: Any, before: Callable[[], None] | None = None) -> float:
        """Return how long the device takes for a graph; `before` queues what it needs, and is not timed."""
        driver, stream = self.driver, self.stream
        if before is not None:
            before()
        # While the device spins, the host queues the start of the measurement and the graph: the device idles between
        # them no longer than between two kernels.
        driver.launch(self._spin, 1, 1, stream, self._hold)
        return measured_us(driver, stream, lambda: driver.replay(graph, stream))

    def close(self) -> None:
        """Give the program back."""
        self.driver.module_unload(self._module)
