"""A rank whose peers have already pushed: what a kernel takes when it waits for nobody, and what is moved meanwhile.

How a kernel can run alone. A push kernel of rank 0 writes into its peers' workspaces and polls its own. So the peers'
workspaces are memory that nobody reads, and its own arena is filled beforehand with words that are not the sentinel:
every poll finds all of its data the first time. The kernel clears what it has read, so a launch needs its arena filled
again; filling is not to be timed, hence every launch in a graph has a lane of its own: a workspace, and a state whose
epoch is 0, so that it reads the arena of phase 0. Between two replays all arenas and epochs are set back.

The epochs must be set back too: a kernel adds one to them, and with epoch 1 it would poll the arena of phase 1, which
was never filled, until its deadline. The entry of a kernel also reads whether the communicator has failed: the states
are zeros.
"""

from __future__ import annotations

import statistics
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from device_comm import kernel_layout
from device_comm.driver import PreparedLaunch
from device_comm.kernel_layout import STATE_BYTES, WorkspaceLayout, blocks_for, required_arena, work_items
from device_comm.kernels import family_of
from tests.gpu.device import Clock, Gpu, GpuDriver, Memory, u32, u64
from tests.gpu.values import DTYPES, expected_sum

__all__ = ["PEER_VALUE", "Loopback", "Timer", "moved_bytes", "two_shot_bytes"]

PEER_VALUE = 1.0
"""What every element is that a peer "has pushed", so that the result can be checked."""
_PEER_WORDS = {torch.float32: 0x3F800000, torch.float16: 0x3C003C00, torch.bfloat16: 0x3F803F80}


# Longer than the host takes to queue a graph.
_HOLD_NS = 200_000


class Loopback:
    """`lanes` launches of one kernel by rank 0 of `world_size`, each with an arena of its own.

    Attributes:
        nbytes: Of the input.
        grid: Blocks.
        threads: Of a block.
    """

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
    ) -> None:
        """Allocate the lanes.

        Args:
            driver: The device.
            kernel: A push kernel of an all-reduce, or push_add_rms_norm.
            world_size: Ranks, of which this is the first.
            dtype: A name of `DTYPES`.
            nbytes: Of the input.
            cubin: Gives a compiled family.
            lanes: Launches of one replay.
            stream: Where they go.
            norm: (rows, hidden), for push_add_rms_norm.
            deadline_s: After which a kernel that waits in vain, by mistake, gives up.
        """
        self.driver, self.kernel, self.world_size = driver, kernel, world_size
        self.dtype, self.nbytes, self.stream, self.norm = DTYPES[dtype], nbytes, stream, norm
        self.count = nbytes // self.dtype.itemsize
        arena = required_arena(kernel, nbytes, world_size)
        self.layout = WorkspaceLayout(world_size, arena)
        lane = self.layout.total_bytes + STATE_BYTES + 3 * (nbytes + 512)
        sinks = (world_size - 1) * (self.layout.total_bytes + 256)
        self.memory = Memory(driver, lanes * (lane + 4096) + sinks + (1 << 20))
        self.module = driver.module_load(cubin(family_of(kernel)))
        self.function = driver.module_function(self.module, kernel)
        items = work_items(
            "push_two_shot" if kernel == "push_two_shot" else "push_one_shot", nbytes, world_size
        )
        self.grid, self.threads = self._shape(items)
        # One rank has the whole device, as in a real group.
        self._sinks = [self.memory.room(self.layout.total_bytes) for _ in range(world_size - 1)]
        self._error = self.memory.put(bytes(kernel_layout.ERROR_RECORD_BYTES))
        # All states lie together: one memset sets them back.
        self._states = self.memory.room(lanes * STATE_BYTES)
        self.source = self._input()
        self.input = self.memory.put(self.source)
        self._extra: list[int] = []
        if norm is not None:
            self._extra = [
                self.memory.put(torch.zeros(self.count, dtype=self.dtype)),
                self.memory.put(self._weight()),
            ]
        self._lanes = [self._lane(number, int(deadline_s * 1e9)) for number in range(lanes)]
        # A second launch without a refill polls the arena of phase 1: it must wait there, and say so, not read what
        # the memory happens to hold.
        for workspace, _, _ in self._lanes:
            for offset, value, words in self.layout.initial_words:
                driver.memset_d32(workspace + offset, value, words, stream)
        driver.stream_synchronize(stream)

    def _shape(self, items: int) -> tuple[int, int]:
        most = min(self.driver.multiprocessors(), kernel_layout.MAX_BLOCKS)
        if self.norm is not None:
            return max(1, min(self.norm[0], most)), kernel_layout.NORM_LANES
        threads = next((each for each in (128, 256, 512) if items <= each * most), 512)
        return blocks_for(items, threads, most), threads

    def _input(self) -> torch.Tensor:
        made = torch.Generator().manual_seed(self.nbytes)
        return torch.randn(self.count, generator=made).to(self.dtype)

    def _weight(self) -> torch.Tensor:
        return torch.ones(self.norm[1] if self.norm else 1, dtype=self.dtype)

    def _lane(self, number: int, deadline_ns: int) -> tuple[int, int, PreparedLaunch]:
        """Return (workspace, output, arguments)."""
        workspace = self.memory.room(self.layout.total_bytes)
        output = self.memory.room(self.nbytes)
        params = kernel_layout.pack_params(
            self.layout,
            workspaces=[workspace, *self._sinks],
            state=self._states + number * STATE_BYTES,
            error=self._error,
            deadline_ns=deadline_ns,
            rank=0,
        )
        if self.norm is None:
            return workspace, output, PreparedLaunch([params, u64(self.input), u64(output), u64(self.count)])
        rows, hidden = self.norm
        total = self.memory.room(self.nbytes)
        addresses = [u64(each) for each in (self.input, *self._extra, output, total)]
        sizes = [u32(rows), u32(hidden), struct.pack("<f", 1e-5)]
        return workspace, output, PreparedLaunch([params, *addresses, *sizes])

    @property
    def outputs(self) -> list[int]:
        """Return where each lane writes."""
        return [output for _, output, _ in self._lanes]

    def refill(self) -> None:
        """Let the peers have pushed, for all lanes, and begin again at epoch 0."""
        words = _PEER_WORDS[self.dtype]
        for workspace, _, _ in self._lanes:
            place = workspace + self.layout.arenas_offset
            self.driver.memset_d32(place, words, self.layout.arena_bytes // 4, self.stream)
        self.driver.memset_d32(self._states, 0, len(self._lanes) * STATE_BYTES // 4, self.stream)

    def launch_all(self) -> None:
        """Launch every lane once."""
        for lane in range(len(self._lanes)):
            self.launch_one(lane)

    def launch_one(self, lane: int) -> None:
        """Launch one lane; each must be launched once between two refills."""
        arguments = self._lanes[lane][2]
        self.driver.launch(self.function, self.grid, self.threads, self.stream, arguments)

    def expected(self) -> torch.Tensor:
        """Return the bits of an all-reduce with the peers' data."""
        other = torch.full((self.count,), PEER_VALUE, dtype=self.dtype)
        if self.kernel != "push_two_shot":
            return expected_sum([self.source, *[other] * (self.world_size - 1)])
        # The arena's second half is "what the owners have summed": the peers' shards of the result are taken as they
        # are, and only the own one is a sum.
        vectors = max(1, -(-self.nbytes // 16))
        shard = -(-vectors // self.world_size) * 16 // self.dtype.itemsize
        mixed = torch.full((self.count,), PEER_VALUE, dtype=self.dtype)
        own = expected_sum([self.source, *[other] * (self.world_size - 1)])[:shard]
        mixed[:shard] = own.view(self.dtype)
        return mixed.view(own.dtype)

    def check(self) -> None:
        """Raise unless every lane has the right result and no kernel gave up."""
        self.driver.stream_synchronize(self.stream)
        failure = kernel_layout.read_failure(
            self.driver.memcpy_dtoh(self._error, kernel_layout.ERROR_RECORD_BYTES)
        )
        if failure is not None:
            raise AssertionError(f"{self.kernel}: {failure}")
        if self.norm is not None:
            return
        expected = self.expected()
        for output in self.outputs:
            found = self.memory.get(output, self.count, self.dtype).view(expected.dtype)
            if not torch.equal(found, expected):
                raise AssertionError(f"{self.kernel}, {self.nbytes} bytes: wrong bits")

    def close(self) -> None:
        """Give everything back."""
        self.driver.module_unload(self.module)
        self.memory.free()


def two_shot_bytes(nbytes: int, world_size: int) -> int:
    """Return the bytes that a two-shot push reads and writes on one rank, counted from the kernel.

    In shards of nbytes / world_size, with p = world_size - 1 peers. Read: p of the input to be scattered, 1 of its own,
    p of the arena, p of the results. Written: p to peers, p cleared, p results to peers, 1 of the output, p cleared,
    p of the output. Polls that find nothing yet are not counted.
    """
    peers = world_size - 1
    shard = -(-nbytes // (16 * world_size)) * 16
    return (8 * peers + 2) * shard


def moved_bytes(nbytes: int, world_size: int) -> int:
    """Return the same for a one-shot push: the input twice, the arena, to peers, cleared, the output."""
    peers = world_size - 1
    return (3 + 3 * peers) * nbytes


class Timer:
    """Times launches in a graph, on the device."""

    def __init__(self, driver: GpuDriver, stream: int, program: bytes) -> None:
        """Load `program`, the machine code of `test_programs.cu`."""
        self.driver, self.stream = driver, stream
        self._module = driver.module_load(program)
        self._spin = driver.module_function(self._module, "spin")
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
            record: Makes them.
            before: Queues what each replay needs, outside of the time.
            repeats: Replays, after two that do not count.
        """
        driver, stream = self.driver, self.stream
        driver.begin_capture(stream)
        record()
        graph = driver.end_capture(stream)
        clock = Clock(driver, stream)
        seen: list[float] = []
        try:
            for number in range(repeats + 2):
                if before is not None:
                    before()
                # While it runs the host queues the clock's start and the graph: between them the device idles no
                # more than between two kernels.
                driver.launch(self._spin, 1, 1, stream, self._hold)
                with clock:
                    driver.replay(graph, stream)
                spent = clock.microseconds()
                if number >= 2:
                    seen.append(spent / launches)
        finally:
            clock.close()
            driver.forget(graph)
        return statistics.median(seen)

    def close(self) -> None:
        """Give the program back."""
        self.driver.module_unload(self._module)


def copies(driver: Any, stream: int, nbytes: int, pairs: Sequence[tuple[int, int]]) -> Callable[[], None]:
    """Return what queues one plain copy of `nbytes` for each (source, destination)."""

    def record() -> None:
        for source, destination in pairs:
            driver.memcpy_dtod(destination, source, nbytes, stream)

    return record
