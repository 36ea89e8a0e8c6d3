"""`top` shows what each rank does, within two seconds, also if it cannot answer: real processes in each state."""

import os
import signal
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.diagnosis import pages
from coordinator.diagnosis.queues import Ring
from coordinator.diagnosis.top.rows import Row, rows_of
from coordinator.diagnosis.top.sampling import NEWEST, Sample, Sampler
from coordinator.errors import PeerLostError
from coordinator.group import GroupCoordinator
from shm_broadcast import _core
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.status.layout import TABLES
from shm_broadcast.status.page import own_page
from tests.harness import RankPool, run_ranks
from tests.waiting import has_ended, sleep_until, wait_until
from tests.worlds import meet, new_group, world

INTERVAL_S = 1.0
"""Between two samples, as in `top`."""

SETTLES_S = 0.5
"""From the beginning of a state to the first sample: what a rank on a busy host may need to get into it."""

WITHIN_S = 2.0
"""The promise: the sample that shows the right state is taken no later than this after the state's beginning.

The time does not count in which other processes had this one's processor: what is promised is what `top` does.
"""


@contextmanager
def sampler() -> Iterator[Sampler]:
    """Yield a sampler, which is closed behind the test."""
    made = Sampler()
    try:
        yield made
    finally:
        made.close()


def look(made: Sampler, pids: Sequence[int]) -> tuple[Sample, list[Row]]:
    """Take two samples, and return the second one with the rows of `pids`."""
    before = made.sample()
    time.sleep(INTERVAL_S)
    now = made.sample()
    return now, [row for row in rows_of(before, now) if row.pid in pids]


def are_there(paths: list[Path]) -> bool:
    """Return whether all these files exist."""
    return all(path.exists() for path in paths)


def begun(directory: Path, ranks: int) -> None:
    """Wait until each rank has said that it does next what the test is about."""
    marks = [directory / f"begins-{rank}" for rank in range(ranks)]
    wait_until(partial(are_there, marks), "the states")


def shown(made: Sampler, pids: Sequence[int]) -> tuple[Sample, list[Row]]:
    """Return the one look within two seconds of now, when the ranks begin what the test is about."""
    begin_s, kept_s = time.monotonic(), kept_waiting_s()
    time.sleep(SETTLES_S)
    sample, rows = look(made, pids)
    assert sample.at_ns / 1e9 - begin_s - (kept_waiting_s() - kept_s) <= WITHIN_S
    return sample, rows


def kept_waiting_s() -> float:
    """Return for how long this thread has been ready to run while others ran."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def states(rows: list[Row], plane: str = "shared") -> list[str]:
    """Return the state of each rank in a plane of the world."""
    return [row.state for row in rows if row.group == "world:0" and row.plane == plane]


def rings_of(sample: Sample, rows: list[Row], name: str) -> list[Ring]:
    """Return the queues or channels that begin with `name` and that rank 0 of the rows writes.

    Other tests that run meanwhile have groups of the same names.
    """
    writer = next(row.pid for row in rows if row.rank == 0)
    return [ring for ring in sample.rings if ring.pid == writer and ring.name.startswith(name)]


def rank_of(rows: list[Row], pid: int | None) -> int | None:
    """Return the rank of a process in its group.

    A queue's own ranks are those of the first worlds of its processes, and these have done other tests before.
    """
    (found,) = {row.rank for row in rows if row.pid == pid}
    return found


def begin(rank: int, done: str) -> None:
    """Tell the test, in a rank, that it does next what the test is about."""
    (Path(done).parent / f"begins-{rank}").touch()


def wait_for(path: str) -> None:
    """Wait, in a rank, until the test has seen enough."""
    wait_until(Path(path).exists, "the end of the test", poll_s=0.05)


# --- In no call -----------------------------------------------------------------------------------------------


def four_states(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory) as group:
        tensor = torch.ones(256)
        group.all_reduce(tensor)
        meet(rank, range(world_size), Path(done).parent, "begins")
        # Rank 0 waits for the others.
        if rank == 1:
            # One sleep, because a look at a process that wakes up finds it nowhere in the kernel.
            sleep_until(Path(done).exists, "the end of the test")
        while rank == 2 and not Path(done).exists():
            # One call of C code for about 0.1 s, which holds the GIL.
            pow(7, 400_000)
        if rank == 3:
            source = Path(done).with_name("weights")
            while not Path(done).exists():
                source.read_bytes()
                time.sleep(0.02)
        group.all_reduce(tensor)


def place_of_a_sleep() -> str:
    """Return the kernel's function in which a process that sleeps for a time waits, or nothing if it does not tell."""
    with subprocess.Popen(["sleep", "600"]) as child:
        told = Path(f"/proc/{child.pid}/wchan")
        try:
            until = time.monotonic() + 20.0
            while "sleep" not in told.read_text() and time.monotonic() < until:
                time.sleep(0.02)
            place = told.read_text()
        finally:
            child.kill()
    return "" if place == "0" else place


def test_waiting_sleeping_running_and_loading_ranks_are_told_apart(ranks4: RankPool, tmp_path: Path) -> None:
    """One rank waits in a call for three that are in none: one sleeps, one computes in C, one reads a file."""
    done = tmp_path / "done"
    (tmp_path / "weights").write_bytes(bytes(4 << 20))
    seen: list[tuple[Sample, list[Row]]] = []
    expected = ["waiting", "sleeping", "running", "loading"]

    def watch(pids: Sequence[int]) -> None:
        begun(tmp_path, 4)
        with sampler() as made:
            seen.append(shown(made, pids))
        done.touch()

    ranks4.run(four_states, str(done), while_running=watch)
    _, rows = seen[0]
    assert states(rows) == expected
    waiting, sleeping, running, loading = (row for row in rows if row.plane == "shared")
    assert (waiting.call, waiting.waits_for, waiting.unseen) == ("all_reduce #2", (1, 2, 3), ())
    assert waiting.since_s is not None
    assert waiting.since_s > INTERVAL_S / 2
    assert [row.rank for row in (waiting, sleeping, running, loading)] == [0, 1, 2, 3]
    assert {row.call for row in (sleeping, running, loading)} == {""}
    assert "CPU" in running.note
    assert sleeping.note == place_of_a_sleep()
    assert loading.note.startswith("reading ")
    assert loading.note.endswith("MB/s")
    # In its other planes the rank that waits is shown to be elsewhere.
    assert states(rows, "shared host")[0] == "elsewhere"


def queue_states(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory) as group:
        queue = group.create_mq_broadcaster(0)
        group.barrier()
        if isinstance(queue, QueueWriter):
            queue.enqueue("step")
            begin(rank, done)
            wait_for(done)
            queue.enqueue("end")
        else:
            assert isinstance(queue, QueueReader)
            begin(rank, done)
            if rank != 1:
                wait_for(done)
            assert [queue.dequeue(), queue.dequeue()] == ["step", "end"]
        group.barrier()


def test_an_idle_rank_waits_for_work_and_a_slow_reader_does_not(ranks4: RankPool, tmp_path: Path) -> None:
    """The reader that sleeps in dequeue is idle. Those that have not read are a message behind, and wait for nobody."""
    done = tmp_path / "done"
    seen: list[tuple[Sample, list[Row]]] = []

    def watch(pids: Sequence[int]) -> None:
        begun(tmp_path, 4)
        with sampler() as made:
            seen.append(shown(made, pids))
        done.touch()

    ranks4.run(queue_states, str(done), while_running=watch)
    sample, rows = seen[0]
    assert states(rows, "shared host") == ["sleeping", "idle", "sleeping", "sleeping"]
    (ring,) = rings_of(sample, rows, "world:0/")
    assert next(row.note for row in rows if row.state == "idle") == f"reads {ring.name}"
    assert (ring.messages, ring.is_channel, ring.writer_waits, ring.fault) == (1, False, False, "")
    assert [(rank_of(rows, each.pid), each.behind_messages, each.waits) for each in ring.readers] == [
        (1, 0, True),
        (2, 1, False),
        (3, 1, False),
    ]
    assert [reader.behind_bytes > 0 for reader in ring.readers] == [False, True, True]


def full_queue(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory, broadcast={"ring_bytes": 1 << 16}) as group:
        queue = group.create_mq_broadcaster(0)
        begin(rank, done)
        if isinstance(queue, QueueWriter):
            for _ in range(20):
                queue.enqueue(bytes(10_000))
        else:
            assert isinstance(queue, QueueReader)
            wait_for(done)
            for _ in range(20):
                queue.dequeue()
        tensor = torch.ones(64)
        if rank:
            group.send(tensor, 0)
        else:
            group.recv(tensor.size(), tensor.dtype, 1)
        group.barrier()


def test_a_writer_without_room_waits_for_the_reader_that_is_behind(ranks2: RankPool, tmp_path: Path) -> None:
    """The queue's row says that the writer waits, and how far the reader is behind."""
    done = tmp_path / "done"
    seen: list[tuple[Sample, list[Row]]] = []

    def watch(pids: Sequence[int]) -> None:
        begun(tmp_path, 2)
        with sampler() as made:
            seen.append(shown(made, pids))
        done.touch()

    ranks2.run(full_queue, str(done), while_running=watch)
    sample, rows = seen[0]
    assert states(rows, "shared host") == ["waiting", "sleeping"]
    assert rows[0].note.startswith("for room in world:0/")
    (ring,) = rings_of(sample, rows, "world:0/")
    assert ring.writer_waits
    (reader,) = ring.readers
    assert (rank_of(rows, reader.pid), reader.waits) == (1, False)
    assert reader.behind_messages == ring.messages > 0
    assert reader.behind_bytes > 10_000


def channel(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory) as group:
        tensor = torch.ones(64)
        if rank == 0:
            group.send(tensor, 1)
            begin(rank, done)
            wait_for(done)
            group.send(tensor, 1)
        else:
            group.recv(tensor.size(), tensor.dtype, 0)
            begin(rank, done)
            group.recv(tensor.size(), tensor.dtype, 0)
        group.barrier()


def test_a_receive_between_two_ranks_names_the_sender_and_its_channel(
    ranks2: RankPool, tmp_path: Path
) -> None:
    """The rank that receives waits for rank 0, and the channel from there has a row."""
    done = tmp_path / "done"
    seen: list[tuple[Sample, list[Row]]] = []

    def watch(pids: Sequence[int]) -> None:
        begun(tmp_path, 2)
        with sampler() as made:
            seen.append(shown(made, pids))
        done.touch()

    ranks2.run(channel, str(done), while_running=watch)
    sample, rows = seen[0]
    (row,) = [row for row in rows if row.call]
    assert (row.rank, row.call, row.state, row.waits_for) == (1, "recv", "waiting", (0,))
    (ring,) = rings_of(sample, rows, "world:0 0 to 1")
    assert (ring.is_channel, rank_of(rows, ring.pid), ring.fault, ring.messages) == (True, 0, "", 1)
    (reader,) = ring.readers
    assert (rank_of(rows, reader.pid), reader.behind_messages) == (1, 0)


# --- Stopped, dead, broken ------------------------------------------------------------------------------------


def in_a_call(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory) as group:
        begin(rank, done)
        if rank == 0:
            wait_for(done)
        group.barrier()


def test_all_ranks_can_be_stopped(ranks4: RankPool, tmp_path: Path) -> None:
    """Nobody answers, and each rank is shown as stopped, in the call in which it was."""
    done = tmp_path / "done"
    seen: list[tuple[Sample, list[Row]]] = []

    def waited_for(rows: list[Row]) -> list[tuple[int, ...] | None]:
        return [row.waits_for for row in rows if row.plane == "shared host"]

    def watch(pids: Sequence[int]) -> None:
        begun(tmp_path, 4)
        with sampler() as made:
            assert waited_for(shown(made, pids)[1]) == [None, (0,), (0,), (0,)]
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                seen.append(shown(made, pids))
                with sampler() as late:
                    # It begins to watch them when nobody answers any more.
                    seen.append(shown(late, pids))
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
        done.touch()

    ranks4.run(in_a_call, str(done), while_running=watch)
    for _, rows in seen:
        assert states(rows, "shared host") == ["stopped"] * 4
        inside = [row for row in rows if row.plane == "shared host"]
        assert [row.call.partition(" ")[0] for row in inside] == ["", "barrier", "barrier", "barrier"]
        assert waited_for(rows) == [None, (0,), (0,), (0,)]


def loses_a_rank(rank: int, world_size: int, directory: Path, done: str) -> Any:
    with world(rank, world_size, directory) as group:
        # What a job does with the pages of its ranks, so that they survive these.
        group.barrier()
        kept = -1
        if rank == 0:
            own = own_page()
            pids = [int(text) for text in Path(done).with_name("pids").read_text().split()]
            kept = os.open(_page_of(pids[1]), os.O_RDONLY)
            assert own is not None
        begin(rank, done)
        if rank == 1:
            wait_for(str(Path(done).with_name("never")))
        with pytest.raises(PeerLostError) as caught:
            group.all_reduce(torch.ones(8))
        (Path(done).parent / f"broken-{rank}").touch()
        wait_for(done)
        os.close(kept)
        return str(caught.value)


def _page_of(pid: int) -> str:
    links = [f"/proc/{pid}/fd/{name}" for name in os.listdir(f"/proc/{pid}/fd")]
    return next(link for link in links if "group-coordinator-status" in os.readlink(link))


def test_a_killed_rank_is_dead_and_the_survivors_group_broken(tmp_path: Path) -> None:
    """The page of a rank that was killed is kept by another rank, and the group of that one says why it is broken."""
    done = tmp_path / "done"
    seen: list[tuple[Sample, list[Row]]] = []

    def watch(pids: Sequence[int]) -> None:
        (tmp_path / "pids").write_text(" ".join(map(str, pids)))
        begun(tmp_path, 2)
        with sampler() as early:
            early.sample()
            os.kill(pids[1], signal.SIGKILL)
            wait_until(lambda: has_ended(pids[1]) and (tmp_path / "broken-0").exists(), "the end of rank 1")
            with sampler() as late:
                # The second one has never seen the rank alive.
                for made in (early, late):
                    sample = made.sample()
                    wait_until(lambda: has_ended(pids[1]), "the end of rank 1")
                    rows = rows_of(None, sample)
                    seen.append((sample, [row for row in rows if row.pid in pids and row.plane]))
        done.touch()

    text, _ = run_ranks(loses_a_rank, 2, str(done), expect_dead={1}, while_running=watch)
    for _, rows in seen:
        by_rank = {row.rank: row for row in rows}
        assert set(by_rank) == {0, 1}
        assert by_rank[1].state == "dead"
        broken = [row for row in rows if row.rank == 0]
        assert {row.state for row in broken} == {"broken"}
        # The page has room for 319 bytes of it.
        assert text.startswith(broken[0].note[:100])
        assert "rank 1" in broken[0].note


def shows_a_torn_record(rank: int, world_size: int, directory: Path, done: str) -> None:
    with world(rank, world_size, directory) as group:
        group.barrier()
        memory = own_page().segment.memory
        lanes = TABLES["lanes"]
        at = next(
            lanes.offset + place * lanes.nbytes
            for place in range(lanes.number)
            if memory[lanes.offset + place * lanes.nbytes + 8 :][:12] == b"shared host\0"
        )
        (before,) = struct.unpack_from("<I", memory, at + 64)
        if rank == 1:
            struct.pack_into("<I", memory, at + 64, before | 1)
        begin(rank, done)
        wait_for(done)
        struct.pack_into("<I", memory, at + 64, before)
        group.barrier()


def test_a_torn_record_is_shown_as_torn(tmp_path: Path) -> None:
    """A record whose sequence number stays odd is one that is half written; the other rank's is right."""
    done = tmp_path / "done"
    seen: list[list[Row]] = []

    def watch(pids: Sequence[int]) -> None:
        begun(tmp_path, 2)
        with sampler() as made:
            seen.append(shown(made, pids)[1])
        done.touch()

    run_ranks(shows_a_torn_record, 2, str(done), while_running=watch)
    assert states(seen[0], "shared host") == ["sleeping", "torn"]


# --- Groups that come and go, and what it costs ---------------------------------------------------------------


def many_groups(rank: int, world_size: int, directory: Path, done: str) -> list[int]:
    with world(rank, world_size, directory) as group:
        refused = []
        for number in range(100):
            made: GroupCoordinator = new_group(group, f"g{number}")
            made.barrier()
            made.destroy()
            if number in (20, 99):
                (Path(done).parent / f"made-{number}-{rank}").touch()
                wait_for(f"{done}-{number}")
            refused.append(number)
        return refused


def test_a_hundred_groups_that_were_destroyed_leave_no_rows(ranks2: RankPool, tmp_path: Path) -> None:
    """After 20 and after 100 groups there are the same rows, and no group was refused a place in the page."""
    done = tmp_path / "done"
    found: list[tuple[list[str], int, int]] = []

    def watch(pids: Sequence[int]) -> None:
        with sampler() as made:
            refused = None
            for number in (20, 99):
                marks = [tmp_path / f"made-{number}-{rank}" for rank in range(2)]
                wait_until(partial(are_there, marks), f"{number} groups", timeout_s=120)
                sample, rows = look(made, pids)
                own = [seen for seen in sample.seen if seen.pid in pids]
                said = sum(seen.page.refused for seen in own)
                refused = said if refused is None else refused
                found.append(
                    (
                        sorted(f"{row.group} {row.plane} {row.rank}" for row in rows),
                        said - refused,
                        max(len(seen.page.queues) for seen in own),
                    )
                )
                Path(f"{done}-{number}").touch()

    ranks2.run(many_groups, str(done), while_running=watch, timeout_s=180)
    early, late = found
    assert early == late
    assert late[0] == [f"world:0 shared host {rank}" for rank in range(2)]
    assert late[1] == 0


def has_found(made: Sampler, pids: Sequence[int]) -> bool:
    """Return whether a sample has the pages of all of `pids`, for which it searches now."""
    made._next_search_s = 0.0
    return {each.page.pid for each in made.sample().seen} >= set(pids)


def test_a_look_copies_each_page_once_and_searches_nothing(
    ranks4: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it costs little whatever else runs on the host; `benchmarks top` measures what the command takes of a core."""
    done = tmp_path / "done"
    copied, searched = list[object](), list[int]()
    copy, find = _core.status_copy, pages.find_memory

    def counted_copy(memory: Any) -> bytes:
        copied.append(memory)
        return copy(memory)

    def counted_find(pid: int) -> list[pages.Memory]:
        searched.append(pid)
        return find(pid)

    def watch(pids: Sequence[int]) -> None:
        with sampler() as made, monkeypatch.context() as patch:
            wait_until(lambda: has_found(made, pids), "the pages of the ranks", 60.0)
            patch.setattr(_core, "status_copy", counted_copy)
            patch.setattr(pages, "find_memory", counted_find)
            for number in range(1, 4):
                made._next_search_s = time.monotonic() + 60
                sample = made.sample()
                assert len(copied) <= number * len(made._kept)
                assert all(len(each.page.records) <= NEWEST for each in sample.seen)
        done.touch()

    ranks4.run(in_a_call, str(done), while_running=watch)
    assert copied
    assert not searched
