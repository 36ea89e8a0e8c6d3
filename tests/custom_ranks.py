"""A rank with a fake device and the product's own CUDA collectives on it; kernels run as threads."""

import itertools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from coordinator.bootstrap.status_store import WorldStatusStore
from device_comm.cuda.custom.all_reduce import CustomAllReduce
from device_comm.cuda.custom.peer_messages import PeerExchange
from device_comm.cuda.custom.resources import CustomContext
from device_comm.cuda.policy.decision import GroupFacts
from device_comm.cuda.policy.file import MeasuredThreshold, PolicyFile, write_policy_file
from device_comm.cuda_settings import CudaSettings
from device_comm.health import GroupHealth
from device_comm.reduction import ReduceOperation, reduce_in_rank_order
from shm_broadcast.errors import CapabilityError
from shm_broadcast.liveness import PeerWatch, ProcessIdentity, this_process
from tests.fake_cuda import FakeDriver, FakeFaults, fake_cubin, fake_devices, violations
from tests.native.cuda.host_build import build_host_library
from tests.waiting import wait_until

__all__ = ["FIRST_RANK", "SMALL_POLICY", "CustomRank", "policy_file", "shuffled", "store_exchange"]

FIRST_RANK = 4
"""The global rank of rank 0 of the group. It is not 0, and a test that mixes up the two kinds of ranks fails."""

KIB = 1 << 10
MULTIPROCESSORS = 4


def policy_file(
    path: Path, world_size: int, device_name: str = "Fake H100", arch: str = "sm_90", /, **limits: int
) -> str:
    """Write thresholds such as `push_one_shot=4096` for a device; return the path."""
    rows = [
        msgspec.convert(
            {
                "operation": "all_reduce",
                "algorithm": name,
                "world_size": world_size,
                "mode": "any",
                "max_bytes": most,
            },
            MeasuredThreshold,
        )
        for name, most in limits.items()
    ]
    content = PolicyFile(
        version=1,
        device_name=device_name,
        arch=arch,
        link="nvlink",
        host="here",
        driver="fake",
        date="2026-05-31",
        thresholds=tuple(rows),
    )
    write_policy_file(path, content)
    return str(path)


def store_exchange(store: dist.Store, rank: int, world_size: int) -> Callable[[bytes], list[bytes]]:
    """Return a function that takes this rank's bytes and returns those of every rank."""
    numbers = itertools.count(1)

    def exchange(data: bytes) -> list[bytes]:
        number = next(numbers)
        # The prefix keeps the value non-empty, as the store requires.
        store.set(f"{number}/{rank}", "+" + data.hex())
        keys = [f"{number}/{other}" for other in range(world_size)]
        wait_until(lambda: store.check(keys), f"every answer in exchange {number}", 20.0, 0.001)
        return [bytes.fromhex(store.get(key).decode()[1:]) for key in keys]

    return exchange


SMALL_POLICY = {
    "push_one_shot": 2 * KIB,
    "push_two_shot": 8 * KIB,
    "pull_one_shot": 16 * KIB,
    "pull_two_shot": 32 * KIB,
}
"""Limits of the algorithms that are low enough for kernels that run as threads of a host."""


class CustomRank:
    """One rank of a group on fake devices. Use `made`, or `create` and `finish`."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        directory: Path,
        libraries: str,
        *,
        faults: dict[str, Any] | None = None,
        facts: dict[str, Any] | None = None,
        policy: dict[str, int] | None = None,
        broken_compiler: bool = False,
        **settings: Any,
    ) -> None:
        """Join the other ranks; nothing is created yet."""
        self.rank, self.world_size, self.directory = rank, world_size, directory
        self.ranks = tuple(range(FIRST_RANK, FIRST_RANK + world_size))
        self.store = dist.FileStore(str(directory / "store"), world_size)
        self.exchange = store_exchange(self.store, rank, world_size)
        devices = fake_devices(world_size, multiprocessors=MULTIPROCESSORS)
        self.driver = FakeDriver(directory, rank, devices=devices, faults=FakeFaults(**(faults or {})))
        self.libraries = Path(libraries)
        self.broken_compiler = broken_compiler
        processes = [
            msgspec.msgpack.decode(each, type=ProcessIdentity)
            for each in self.exchange(msgspec.msgpack.encode(this_process()))
        ]
        own = self.ranks[rank]
        peers = {other: process for other, process in zip(self.ranks, processes, strict=True) if other != own}
        status_store = WorldStatusStore(dist.PrefixStore("status_store", self.store), own, self.ranks)
        self.health = GroupHealth("tp:0", own, self.ranks, PeerWatch(processes[rank], peers), status_store)
        if policy is not None:
            settings["policy_file"] = policy_file(directory / f"policy-{rank}.json", world_size, **policy)
        known: dict[str, Any] = {
            "world_size": world_size,
            "device_name": "Fake H100",
            "arch": "sm_90",
            "multiprocessors": MULTIPROCESSORS,
            "has_nvlink": True,
            "is_exportable": True,
            "is_deterministic": settings.get("deterministic", False),
        }
        self.facts = GroupFacts(**{**known, **(facts or {})})
        small = {"arena_bytes": 64 * KIB, "staging_bytes": 32 * KIB}
        self.settings = CudaSettings(**{**small, **settings})
        self.custom: CustomAllReduce | None = None

    def meet(self) -> None:
        """Wait until all ranks have arrived."""
        self.exchange(b"")

    def peers(self) -> PeerExchange:
        """Return the exchange between the ranks."""
        return PeerExchange(self.exchange, self.rank, self.ranks)

    def cubin(self, family: str, dtype: str) -> bytes:
        """Return the compiled kernels, or raise if this rank has no compiler."""
        del family
        if self.broken_compiler:
            raise CapabilityError("no compiler here", requirement="a compiler")
        return fake_cubin(build_host_library(self.world_size, dtype, self.libraries))

    def create(self) -> CustomAllReduce:
        """Create the collectives. Collective."""
        self.custom = CustomAllReduce.create(
            CustomContext(
                driver=self.driver,
                health=self.health,
                peers=self.peers(),
                facts=self.facts,
                settings=self.settings,
                timeout_s=20.0,
                cubin=self.cubin,
            )
        )
        return self.custom

    @contextmanager
    def made(self) -> Iterator[CustomAllReduce]:
        """Yield the collectives; destroy them afterwards and check that nothing is left. Collective."""
        custom = self.create()
        yield custom
        self.finish()

    def finish(self) -> None:
        """Destroy the collectives twice; check that nothing is left and that the calls came in the right order."""
        if self.custom is not None:
            self.custom.destroy(self.meet)
            self.custom.destroy()
        self.health.close()
        self.meet()
        assert self.driver.leaks() == []
        assert violations(self.directory) == []
        self.health.release()
        self.driver.release()

    def left(self) -> list[str]:
        """Return what is left once the memory is freed, which a thread does on a machine too busy to do it at once."""
        for thread in threading.enumerate():
            if thread.name == "group-coordinator-release":
                thread.join(20.0)
        return self.driver.leaks()

    def leave_alone(self) -> None:
        """Destroy alone, without the other ranks. Only the workspace is left, which peers may have open."""
        assert self.custom is not None
        self.custom.destroy()
        self.custom.destroy()
        self.health.close()
        left = self.left()
        assert all(each.startswith("memory memory-") for each in left)
        assert len(left) <= 1
        assert violations(self.directory) == []
        self.health.release()
        self.meet()
        self.driver.release()

    def inputs(self, seed: int, count: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the inputs of all ranks. Every rank computes the same ones."""
        made = torch.Generator().manual_seed(seed)
        return [(torch.randn(count, generator=made) * 8).to(dtype) for _ in range(self.world_size)]

    def reference(self, seed: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the sum of the inputs."""
        return reduce_in_rank_order(self.inputs(seed, count, dtype), ReduceOperation.SUM)

    def buffer(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeroed device memory."""
        return self.driver.tensor(count, dtype)

    def all_reduce(
        self, seed: int, count: int, dtype: torch.dtype, *, stream: int = 1, in_place: bool = False
    ) -> bool:
        """Reduce new data and check every bit; return whether our own kernels did it."""
        assert self.custom is not None
        input_ = self.buffer(count, dtype)
        input_.copy_(self.inputs(seed, count, dtype)[self.rank])
        output = input_ if in_place else self.buffer(count, dtype)
        done = self.custom.all_reduce(input_.data_ptr(), output.data_ptr(), count, dtype, stream)
        self.custom.check()
        if done:
            assert torch.equal(output, self.reference(seed, count, dtype)), (count, dtype)
        return done


def shuffled(sizes: Sequence[int], seed: int) -> list[int]:
    """Return the sizes in an order that depends on `seed` alone; all ranks use the same order."""
    result = list(sizes)
    random.Random(seed).shuffle(result)
    return result
