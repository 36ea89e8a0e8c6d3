"""Ranks as threads and streams of one process: the product's `CustomAllReduce`, over memory of kind "local"."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import torch.distributed as dist

from coordinator.board import StoreBoard
from device_comm.cuda_settings import CudaSettings
from device_comm.custom_all_reduce import CustomAllReduce, CustomContext
from device_comm.custom_launches import CubinSource
from device_comm.driver import Driver
from device_comm.health import GroupHealth
from device_comm.policy import GroupFacts
from device_comm.policy_file import MeasuredThreshold, PolicyFile, write_policy_file
from shm_broadcast.liveness import PeerWatch, this_process

__all__ = ["LocalRanks", "facts_for", "policy_file"]

Value = TypeVar("Value")


class _Exchange:
    """Hands every thread's bytes to all threads."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._said: list[bytes] = [b""] * world_size
        self._barrier = threading.Barrier(world_size, timeout=timeout_s)

    def speak(self, rank: int, data: bytes) -> list[bytes]:
        self._said[rank] = data
        self._barrier.wait()
        heard = list(self._said)
        # Nobody says the next thing before all have heard this one.
        self._barrier.wait()
        return heard

    def begin(self) -> None:
        """Forget that a thread did not come to an earlier meeting. Nobody may wait."""
        self._barrier.reset()

    def give_up(self) -> None:
        """Let all who wait fail: a thread will not come."""
        self._barrier.abort()


def facts_for(driver: Driver, world_size: int, *, blocks: int | None = None) -> GroupFacts:
    """Return the facts of ranks that share a device: each gets its part of the multiprocessors, and one stays free.

    All blocks of all ranks must run at once, beside what else a test launches.
    """
    major, minor = driver.compute_capability()
    share = max(1, (driver.multiprocessors() - world_size) // world_size)
    return GroupFacts(
        world_size=world_size,
        device_name=driver.device_name(),
        arch=f"sm_{major}{minor}",
        multiprocessors=share if blocks is None else blocks,
        has_nvlink=True,
        is_verified=True,
        is_exportable=True,
    )


def policy_file(path: Path, facts: GroupFacts, limits: dict[str, int]) -> str:
    """Write a policy file with thresholds such as {"push_one_shot": 4096}; return its path."""
    carriers = {"push_reduce_scatter": "reduce_scatter", "push_all_gather": "all_gather"}
    rows = [
        msgspec.convert(
            {
                "operation": carriers.get(name, "all_reduce"),
                "algorithm": name,
                "world_size": facts.world_size,
                "mode": "any",
                "max_bytes": most,
            },
            MeasuredThreshold,
        )
        for name, most in limits.items()
    ]
    content = PolicyFile(
        version=1,
        device_name=facts.device_name,
        arch=facts.arch,
        link="nvlink",
        host="test",
        driver="test",
        date="2026-01-01",
        thresholds=tuple(rows),
    )
    write_policy_file(path, content)
    return str(path)


class LocalRanks:
    """A group whose ranks are threads of this process; `each(rank)` runs on all of them at once.

    Attributes:
        customs: The collectives of each rank.
        drivers: The driver of each rank.
        streams: A stream of each rank.
    """

    def __init__(
        self,
        drivers: Sequence[Driver],
        facts: GroupFacts,
        settings: CudaSettings,
        cubin: CubinSource,
        timeout_s: float = 30.0,
    ) -> None:
        """Make the group; blocks until all ranks have everything."""
        self.drivers = list(drivers)
        self.world_size = len(self.drivers)
        self.timeout_s = timeout_s
        self.ranks = tuple(range(self.world_size))
        self._exchange = _Exchange(self.world_size, timeout_s)
        self._store = dist.HashStore()
        self.streams = [driver.stream_create() for driver in self.drivers]
        self._healths = [self._health(rank) for rank in self.ranks]
        self.customs = self.each(lambda rank: self._create(rank, facts, settings, cubin))

    def _health(self, rank: int) -> GroupHealth:
        process = this_process()
        watch = PeerWatch(process, {other: process for other in self.ranks if other != rank})
        board = StoreBoard(dist.PrefixStore("board", self._store), rank, self.ranks)
        return GroupHealth("local:0", rank, self.ranks, watch, board)

    def _create(
        self, rank: int, facts: GroupFacts, settings: CudaSettings, cubin: CubinSource
    ) -> CustomAllReduce:
        return CustomAllReduce.create(
            CustomContext(
                driver=self.drivers[rank],
                health=self._healths[rank],
                rank_in_group=rank,
                ranks=self.ranks,
                exchange=lambda data: self._exchange.speak(rank, data),
                facts=facts,
                settings=settings,
                timeout_s=self.timeout_s,
                cubin=cubin,
            )
        )

    def each(self, work: Callable[[int], Value]) -> list[Value]:
        """Run `work` as every rank at once; return what each returned, or raise what the first raised."""
        self._exchange.begin()
        results: dict[int, Value] = {}
        problems: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                problems.append(error)
                self._exchange.give_up()

        threads = [threading.Thread(target=run, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]
        return [results[rank] for rank in self.ranks]

    def meet(self, rank: int) -> None:
        """Wait until every rank's thread is here."""
        self._exchange.speak(rank, b"")

    def close(self) -> None:
        """Destroy the group, and give the streams back. A broken one does not meet, and keeps its memory."""
        is_broken = any(health.is_broken for health in self._healths)

        def end(rank: int) -> None:
            self.customs[rank].destroy(None if is_broken else lambda: self.meet(rank))
            self.drivers[rank].stream_destroy(self.streams[rank])
            self._healths[rank].close()
            self._healths[rank].release()

        self.each(end)
