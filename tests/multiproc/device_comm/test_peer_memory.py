"""Peer memory over real processes, with a driver that needs no GPU and reports errors that a GPU sometimes hides."""

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from device_comm.cuda.custom.peer_access import verify_peer_access
from device_comm.cuda.custom.peer_memory import PeerMemory
from device_comm.cuda.custom.peer_messages import PeerExchange
from shm_broadcast.errors import CommError, DecodeError, PeerLostError
from tests.fake_cuda import FakeDriver, FakeFaults, violations
from tests.harness import RankPool, run_ranks

NBYTES = 1 << 16
GIVE_UP_S = 20.0


class Files:
    """`exchange` and `barrier` over files, without a group."""

    def __init__(self, directory: Path, rank: int, world_size: int) -> None:
        self.directory = directory
        self.rank = rank
        self.world_size = world_size
        self.number = 0
        self.gone: set[int] = set()
        self.spoil: dict[int, bytes] = {}

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes; raise if a rank is marked as gone."""
        self.number += 1
        data = self.spoil.get(self.number, data)
        mine = self.directory / f"said-{self.number}-{self.rank}"
        mine.with_suffix(".part").write_bytes(data)
        mine.with_suffix(".part").rename(mine)
        until = time.monotonic() + GIVE_UP_S
        result = []
        for rank in range(self.world_size):
            path = self.directory / f"said-{self.number}-{rank}"
            while not path.exists():
                self.gone |= {int(each.suffix[1:]) for each in self.directory.glob("gone.*")}
                if rank in self.gone:
                    raise PeerLostError(f"rank {rank} is gone", peers=[rank])
                if time.monotonic() > until:
                    raise PeerLostError(f"rank {rank} did not come", peers=[rank])
                time.sleep(0.001)
            result.append(path.read_bytes())
        return result

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""
        self.exchange(b"")


class Rank:
    """A rank and its device."""

    def __init__(self, rank: int, world_size: int, directory: Path, **options: Any) -> None:
        faults = FakeFaults(**options)
        self.rank, self.world_size, self.directory = rank, world_size, directory
        self.driver = FakeDriver(directory, rank, faults=faults)
        self.files = Files(directory, rank, world_size)
        self.peers = PeerExchange(self.exchange, rank, range(world_size))

    def exchange(self, data: bytes) -> list[bytes]:
        """Exchange by the files, whose method a test may have replaced."""
        return self.files.exchange(data)

    def create(self, nbytes: int = NBYTES, **options: Any) -> PeerMemory:
        """Create the memory of all ranks."""
        return PeerMemory.create(self.driver, self.peers, nbytes, lambda: self.files.gone, **options)

    def check(self, memory: PeerMemory) -> None:
        """Let every rank write into every region, and read what the others wrote."""
        for peer, address in enumerate(memory.addresses):
            self.driver.memset_d32(address + 64 * self.rank, 100 * self.rank + peer, 16, 0)
        self.files.barrier()
        own = memory.addresses[self.rank]
        for writer in range(self.world_size):
            expected = (100 * writer + self.rank).to_bytes(4, "little") * 16
            assert self.driver.memcpy_dtoh(own + 64 * writer, 64) == expected
        self.files.barrier()

    def verify(self, memory: PeerMemory, cache: Path) -> tuple[str, bool]:
        """Return why peer access does not work, and whether it was tested now."""
        before = self.driver.calls.get("memset_d32", 0)
        reason = verify_peer_access(self.driver, self.peers, memory.addresses, cache)
        return reason, self.driver.calls.get("memset_d32", 0) > before

    def finish(self, memory: PeerMemory | None) -> None:
        """Close; check that nothing is left and that the calls came in the right order."""
        if memory is not None:
            memory.close(self.files.barrier)
            memory.close(self.files.barrier)
        self.files.barrier()
        assert self.driver.leaks() == []
        assert violations(self.directory) == []
        self.driver.release()


def outcome(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the name and text of the error."""
    try:
        call()
    except CommError as error:
        return type(error).__name__, str(error)
    return "", ""


# --- kinds ----------------------------------------------------------------------------------------------------


def shares(rank: int, world_size: int, directory: Path, faults: list[dict[str, Any]], kind: str) -> str:
    me = Rank(rank, world_size, directory, **faults[rank % len(faults)])
    memory = me.create()
    assert memory.kind == kind
    assert memory.nbytes >= NBYTES
    me.check(memory)
    me.finish(memory)
    return memory.reason


@pytest.mark.guarantee("D30")
@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ([{}], "ipc"),
        ([{"ipc": False}], "vmm"),
        ([{}, {"ipc": False}, {}], "vmm"),
        ([{"fail": {"ipc_open_handle": [1, 999]}}, {}], "vmm"),
        ([{"fail": {"ipc_get_handle": [1, 1]}}, {}], "vmm"),
    ],
    ids=["ipc", "no ipc", "no ipc on one rank", "opening fails on one rank", "exporting fails on one rank"],
)
def test_every_rank_writes_into_every_region(
    ranks4: RankPool, faults: list[dict[str, Any]], kind: str
) -> None:
    """All ranks use the first kind that works on all of them, for the same reason, and nothing is left."""
    reasons = ranks4.run(shares, faults, kind)
    assert len(set(reasons)) == 1
    assert ("rank 1" in reasons[0] or "rank 0" in reasons[0]) == (kind == "vmm")


def test_ranks_of_one_process_use_plain_addresses(tmp_path: Path) -> None:
    """If the ranks are threads, neither handles nor descriptors are created."""
    ranks = [Rank(rank, 3, tmp_path) for rank in range(3)]

    def body(me: Rank) -> tuple[str, dict[str, int]]:
        memory = me.create()
        me.check(memory)
        buffer = me.driver.tensor(16, torch.float32, padding_bytes=64)
        record = memory.record_of(buffer.data_ptr(), 64, {})
        records = me.peers.gather(record)
        peer = (me.rank + 1) % 3
        me.driver.memset_d32(memory.address_of(peer, records[peer]), 7, 16, 0)
        me.files.barrier()
        assert buffer.view(torch.int32).tolist() == [7] * 16
        me.finish(memory)
        return memory.kind, me.driver.calls

    with ThreadPoolExecutor(3) as pool:
        for kind, calls in pool.map(body, ranks):
            assert kind == "local"
            assert "ipc_get_handle" not in calls
            assert "vmm_create" not in calls


# --- failures -------------------------------------------------------------------------------------------------


def fails(
    rank: int, world_size: int, directory: Path, faults: dict[str, Any], nbytes: list[int]
) -> tuple[str, str]:
    me = Rank(rank, world_size, directory, **(faults if rank == 1 else {}))
    result = outcome(lambda: me.create(nbytes[rank % len(nbytes)]))
    me.finish(None)
    return result


@pytest.mark.guarantee("D30")
@pytest.mark.parametrize(
    ("faults", "nbytes", "kind", "text"),
    [
        ({"memory_bytes": 1000}, [NBYTES], "CapabilityError", "rank 1: mem_alloc .*OUT_OF_MEMORY"),
        (
            {"ipc": False, "vmm": False},
            [NBYTES],
            "CapabilityError",
            "rank 1: the device or its driver does not",
        ),
        ({"blocked": [0]}, [NBYTES], "CapabilityError", "rank 1: the memory of rank 0 cannot be mapped"),
        (
            {"fail": {"ipc_supported": [1, 999]}, "vmm": False},
            [NBYTES],
            "CapabilityError",
            "as the test asked",
        ),
        ({}, [NBYTES, NBYTES * 2], "DisagreementError", "different sizes"),
    ],
    ids=["no memory", "no kind", "no peer access", "probe fails", "sizes"],
)
def test_a_failure_on_one_rank_is_reported_on_all(
    ranks2: RankPool, faults: dict[str, Any], nbytes: list[int], kind: str, text: str
) -> None:
    """The error is the same on all ranks and names the rank and the reason. No memory stays allocated."""
    one, other = ranks2.run(fails, faults, nbytes)
    assert one == other
    assert one[0] == kind
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(one[1])


def told_nonsense(rank: int, world_size: int, directory: Path, step: int) -> tuple[str, str]:
    me = Rank(rank, world_size, directory)
    if rank == 0:
        me.files.spoil[step] = b"\x80\x04\x95 no message"
    result = outcome(me.create)
    me.files.barrier()
    assert violations(directory) == []
    me.driver.release()
    return result


@pytest.mark.parametrize("step", [1, 2, 3])
def test_nonsense_is_refused_on_every_rank(ranks2: RankPool, step: int) -> None:
    """Bytes that are no message give the same `DecodeError` on all ranks, whatever the step is."""
    results = ranks2.run(told_nonsense, step)
    assert results[0] == results[1]
    assert results[0][0] == DecodeError.__name__
    assert "rank 0" in results[0][1]


def dies_meanwhile(
    rank: int, world_size: int, directory: Path, step: int, vmm: bool
) -> tuple[str, float, bool]:
    me = Rank(rank, world_size, directory, ipc=not vmm)
    if rank == 1:
        exchange = me.files.exchange

        def until_then(data: bytes) -> list[bytes]:
            if me.files.number + 1 == step:
                (directory / "gone.1").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(data)

        me.files.exchange = until_then  # type: ignore[method-assign]
    start = time.monotonic()
    name, _ = outcome(lambda: me.create(timeout_s=5.0))
    seconds = time.monotonic() - start
    left = me.driver.leaks() == []
    assert violations(directory) == []
    me.driver.release()
    return name, seconds, left


@pytest.mark.parametrize(("step", "vmm"), [(2, False), (3, True)])
def test_a_rank_that_is_killed_meanwhile_gives_a_bounded_error(step: int, vmm: bool) -> None:
    """The other rank raises the error of the exchange, and frees its memory because no rank can use it any more."""
    results = run_ranks(dies_meanwhile, 2, step, vmm, expect_dead=[1])
    name, seconds, is_clean = results[0]
    assert name == PeerLostError.__name__
    assert seconds < GIVE_UP_S
    assert is_clean


# --- teardown -------------------------------------------------------------------------------------------------


def closes_without_barrier(rank: int, world_size: int, directory: Path, vmm: bool) -> list[int]:
    me = Rank(rank, world_size, directory, ipc=not vmm)
    memory = me.create()

    def broken() -> None:
        raise PeerLostError("rank 1 is gone", peers=[1])

    me.files.gone = {rank}
    memory.close(broken if rank else None)
    kept = len(me.driver.leaks())
    me.files.barrier()
    me.files.gone = {0, 1}
    memory.close(None)
    me.files.gone = set()
    left = len(me.driver.leaks())
    me.finish(None)
    return [kept, left]


@pytest.mark.guarantee("D31")
def test_memory_that_a_living_peer_may_have_open_is_not_freed(ranks2: RankPool) -> None:
    """Without a barrier, IPC memory stays until every other rank is gone; behind descriptors it goes at once."""
    assert ranks2.run(closes_without_barrier, False) == [[1, 0]] * 2
    assert ranks2.run(closes_without_barrier, True) == [[0, 0]] * 2


# --- verification ---------------------------------------------------------------------------------------------


def verifies(rank: int, world_size: int, directory: Path, lost: list[list[int]], cached: list[str]) -> Any:
    me = Rank(rank, world_size, directory, lost_writes=lost[rank])
    memory = me.create()
    cache = directory / (cached[rank] if cached else f"cache-{rank}")
    verdicts = [list(me.verify(memory, cache)) for _ in range(2)]
    if not any(lost):
        assert me.driver.memcpy_dtoh(memory.addresses[rank], NBYTES) == bytes(NBYTES)
    me.finish(memory)
    return verdicts


@pytest.mark.guarantee("D33")
def test_writes_are_verified_once(ranks4: RankPool) -> None:
    """Every rank writes to every other one and reads. The second time the result comes from the cache."""
    results = ranks4.run(verifies, [[], [], [], []], ["one", "one", "other", "other"])
    assert all(result == results[0] for result in results)
    assert results[0] == [["", True], ["", False]]


@pytest.mark.guarantee("D33")
def test_writes_that_never_arrive_are_found_in_one_direction(ranks4: RankPool) -> None:
    """All ranks get the same result, which names the two ranks. It is not cached, and the next call tests again."""
    results = ranks4.run(verifies, [[], [], [1], []], [])
    assert all(result == results[0] for result in results)
    for reason, is_tested in results[0]:
        assert is_tested
        assert "rank 2" in reason
        assert "rank 1" in reason
        assert "rank 3" not in reason


def verifies_anew(rank: int, world_size: int, directory: Path) -> list[bool]:
    me = Rank(rank, world_size, directory)
    memory = me.create()
    cache = directory / f"cache-{rank}"
    verdicts = []
    # One rank has lost its file; another user could have written the file; it is not ours; the driver is another one.
    for step in ("", "", "lost", "", "open to others", "no verdict", "driver", ""):
        for path in cache.iterdir() if cache.exists() else ():
            if step == "lost" and rank == 0:
                path.unlink()
            elif step == "open to others" and rank == 1:
                path.chmod(0o622)
            elif step == "no verdict":
                path.write_bytes(b"\x80\x04\x95")
        if step == "driver":
            me.driver.faults.version = 13010
        reason, is_tested = me.verify(memory, cache)
        assert reason == ""
        verdicts.append(not is_tested)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in cache.iterdir())
    me.finish(memory)
    return verdicts


@pytest.mark.guarantee("D33")
def test_a_cached_result_is_used_only_if_it_is_ours_and_all_have_it(ranks2: RankPool) -> None:
    """All ranks test again if the file of one of them is lost, foreign, corrupt or outdated."""
    expected = [False, True, False, True, False, False, False, True]
    assert ranks2.run(verifies_anew) == [expected, expected]
