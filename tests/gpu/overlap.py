"""An asynchronous all-reduce on a group's side stream, beside a matrix product on the caller's stream, in one process.

Two ranks are streams of one GPU. Rank 0 is the caller; rank 1 makes its part of the all-reduces alone. The times are
those of rank 0's stream, by the clock of the device. No link is between the ranks, so only the overlap counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from device_comm.cuda.side_stream import SideStream
from device_comm.nccl.streams import Streams
from tests.gpu.device import measured_us, u64
from tests.gpu.notes import Notes
from tests.gpu.streams import StreamWorld
from tests.gpu.values import expect_equal, expected_sum, random_words

__all__ = ["GOAL", "Overlap", "overlap"]

GOAL = "asynchronous all-reduce beside a matrix product"
ROUNDS = 10
"""Of one measurement. A round is all-reduces of which none is waited for, a product, and the wait for all of them."""
REDUCES = 8
"""All-reduces of a round: together they take about as long as the product (an estimate, nobody has measured it)."""
TURNS = 7
_AHEAD_NS = 20_000_000


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a round consists of.

    Attributes:
        reduces: Whether it has all-reduces.
        multiplies: Whether it has the product.
        is_beside: Whether the all-reduces are on the side stream.
    """

    reduces: bool
    multiplies: bool
    is_beside: bool = False


PARTS = {
    "all-reduces alone": Parts(True, False),
    "the product alone": Parts(False, True),
    "one after the other": Parts(True, True),
    "beside each other": Parts(True, True, is_beside=True),
}


class Overlap:
    """The tensors and streams of the measurements; `multiply` queues the product on the current stream of `streams`."""

    def __init__(
        self, world: StreamWorld, streams: Streams, multiply: Callable[[], object], count: int
    ) -> None:
        """Put the inputs into the memory of the ranks.

        Args:
            world: Two ranks.
            streams: The streams of the device.
            multiply: Queues the product.
            count: Elements of each all-reduce.
        """
        self.world, self.streams, self.multiply, self.count = world, streams, multiply, count
        inputs = [random_words(count, world.dtype, rank) for rank in world.ranks]
        self.expected = expected_sum(inputs)
        self.places = []
        for memory, own in zip(world.memories, inputs, strict=True):
            memory.back_to(0)
            self.places.append((memory.put(own), memory.room(own.nbytes)))
        # As `CudaCommunicator` makes it, for streams that nothing captures.
        self.side = SideStream(streams, lambda: True, lambda _stream: 0, lambda _stream: nullcontext())

    def reduce(self, rank: int, stream: int) -> None:
        """Queue one all-reduce of a rank."""
        place, output = self.places[rank]
        if not self.world.customs[rank].all_reduce(place, output, self.count, self.world.dtype, stream):
            raise AssertionError(f"the policy sends {self.count} elements elsewhere")

    def round(self, parts: Parts) -> None:
        """Queue one round of rank 0."""
        marks = []
        for _ in range(REDUCES if parts.reduces else 0):
            call = partial(self.reduce, 0)
            with self.side.entered(call) if parts.is_beside else nullcontext():
                call(self.streams.current())
                if parts.is_beside:
                    marks.append(self.side.mark(None))
        if parts.multiplies:
            self.multiply()
        for mark in marks:
            mark.wait()

    def time_us(self, parts: Parts) -> float:
        """Return the time of one round on rank 0's stream; compare the last sum of both ranks."""
        driver: Any = self.world.drivers[0]
        stream = self.world.streams[0]

        def rounds() -> None:
            for _ in range(ROUNDS):
                self.round(parts)

        def work(rank: int) -> float:
            if rank == 0:
                # Meanwhile the host queues the rounds.
                self.world.launch(0, "spin", [u64(_AHEAD_NS)], threads=1)
                # A thread has a current stream of its own.
                with self.streams.use(stream):
                    return measured_us(driver, stream, rounds) / ROUNDS
            for _ in range(ROUNDS * REDUCES if parts.reduces else 0):
                self.reduce(rank, self.world.streams[rank])
            self.world.drivers[rank].stream_synchronize(self.world.streams[rank])
            return 0.0

        spent = self.world.each(work)[0]
        for rank in self.world.ranks if parts.reduces else ():
            self.world.customs[rank].check()
            found = self.world.memories[rank].get(self.places[rank][1], self.count, self.world.dtype)
            expect_equal(found, self.expected, f"rank {rank}")
        return spent


def overlap(notes: Notes, made: Overlap) -> dict[str, float]:
    """Measure every kind of round in turns; record the times and whether half of the shorter part is hidden."""
    for parts in PARTS.values():
        # What is loaded or allocated at the first use must not be so while kernels wait.
        made.time_us(parts)
    seen: dict[str, list[float]] = {name: [] for name in PARTS}
    for _ in range(TURNS):
        for name, parts in PARTS.items():
            seen[name].append(made.time_us(parts))
    times = {name: statistics.median(each) for name, each in seen.items()}
    for name, spent in times.items():
        notes.figure(f"{REDUCES} all-reduces of two streams and a product: {name}", spent, "us")
    apart, beside = times["one after the other"], times["beside each other"]
    shorter = min(times["all-reduces alone"], times["the product alone"])
    hidden = (apart - beside) / shorter
    notes.goal(
        GOAL,
        "at least half of the shorter one is hidden",
        f"{hidden:.0%} of {shorter:.1f} us: {beside:.1f} us beside each other, {apart:.1f} us one after the other",
        hidden >= 0.5,
    )
    return times


class Product:
    """A matrix product of torch on the GPU, on a few multiprocessors, whose result is compared at the end.

    A wide product would take all multiprocessors and leave the all-reduces none; 256 x 4096 outputs are about 32 tiles.
    """

    SHAPE = (256, 8192, 4096)

    def __init__(self, device: torch.device) -> None:
        """Make the operands, on the current stream."""
        rows, inner, columns = self.SHAPE
        self.left = torch.randn(rows, inner, dtype=torch.bfloat16, device=device)
        self.right = torch.randn(inner, columns, dtype=torch.bfloat16, device=device)
        self.out = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        self.first = torch.matmul(self.left, self.right)

    def __call__(self) -> None:
        """Queue the product on the current stream."""
        torch.matmul(self.left, self.right, out=self.out)

    def check(self) -> None:
        """Compare the last product with the first one, which nothing ran beside."""
        expect_equal(self.out.cpu(), self.first.cpu(), "the product")
