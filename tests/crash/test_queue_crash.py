"""When an end of a queue is killed or stopped in any state, the others learn which, and nothing is left behind."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from shm_broadcast import _core
from shm_broadcast.handle import QueueHandle
from shm_broadcast.layout import FIELDS, LINE
from shm_broadcast.queue import QueueReader
from shm_broadcast.segment import take_over
from tests.harness import run_ranks
from tests.queue_ranks import Marks, blob, ended_with, offer, take
from tests.queues import fill, find_sockets, memory_of, segments_of, word
from tests.samples import sampled
from tests.waiting import has_ended, wait_until

# The promise is one second; a loaded machine gets more. After a kill the calls have no deadline of their own.
PROMPT_S = 10.0
STOPPED_LIMIT_S = 0.5
SMALL, LARGE = 50_000, 6 << 20

PLACES = ["idle", "full", "copying", "attaching", "closing"]
VICTIMS = {"writer": [0], "one reader": [2], "all readers": [1, 2], "all": [0, 1, 2]}
SIGNALS = ["SIGKILL", "SIGSTOP", "SIGTERM"]


class Part(NamedTuple):
    """One process's part in a case: its role, the place that it has to reach, and which process gets the signal."""

    rank: int
    marks: Marks
    place: str
    victims: list[int]
    is_stop: bool

    @property
    def is_victim(self) -> bool:
        """Return whether this process gets the signal."""
        return self.rank in self.victims

    @property
    def is_told(self) -> bool:
        """Return whether this process waits for a victim, so that it gets the error first and then closes its end."""
        return not self.is_victim and (self.rank == 0 or 0 in self.victims)

    @property
    def limit(self) -> float | None:
        """Return the deadline of a call: only the clock reveals a stopped process."""
        return STOPPED_LIMIT_S if self.is_stop and self.is_told else None

    def ready(self, *, waits: bool) -> None:
        """Mark that the place is reached; return at once, or when the signals have been sent."""
        self.marks.mark(f"ready-{self.rank}")
        if waits:
            self.marks.wait("signalled")

    def over(self) -> bool:
        """Return whether every process has its error and every stopped process runs again."""
        return self.marks.has("end")


def take_part(
    rank: int, world_size: int, directory: Path, folder: str, place: str, victims: list[int], is_stop: bool
) -> dict[str, Any]:
    """Go to the place, wait for the signal, and return the outcome."""
    part = Part(rank, Marks(folder), place, victims, is_stop)
    found = write(part) if rank == 0 else read(part)
    assert segments_of() == []
    return found


def write(part: Part) -> dict[str, Any]:
    with offer(part.marks, [1, 2], 1 << 20) as writer:
        part.marks.mark("inode", str(os.fstat(writer._ring._segment.descriptor).st_ino))
        nbytes = LARGE if part.place == "copying" else SMALL

        def step() -> None:
            if part.place == "attaching":
                writer.wait_until_ready(part.limit)
            else:
                writer.enqueue(bytes(nbytes), part.limit)

        if part.place != "attaching":
            writer.wait_until_ready(30.0)
            writer.enqueue("first")
        if part.place == "full":
            fill(writer, bytes(SMALL))
        if part.place == "closing" and part.is_victim:
            writer.close()
        part.ready(waits=part.is_stop or part.place not in ("full", "copying"))
        rests = part.is_victim and part.place in ("idle", "attaching", "closing")
        found = {"kind": "over"} if rests else ended_with(step, part.over)
        part.marks.mark("told-0")
        part.marks.wait("end")
    return found


def read(part: Part) -> dict[str, Any]:
    if part.place == "attaching" and part.is_victim:
        return half_attached(part)
    readers: list[QueueReader] = []

    def step() -> None:
        if not readers:
            readers.append(take(part.marks, part.rank, timeout_s=part.limit or 30.0))
        readers[0].dequeue(part.limit)

    if part.place != "attaching":
        step()
    elif 0 not in part.victims:
        readers.append(take(part.marks, part.rank))
    if part.place == "closing" and part.is_victim:
        readers[0].close()
    part.ready(waits=part.place not in ("idle", "copying"))
    rests = part.is_victim and part.place == "closing"
    found = {"kind": "over"} if rests else ended_with(step)
    part.marks.mark(f"told-{part.rank}")
    part.marks.wait("end")
    for reader in readers:
        reader.close()
    return found


def half_attached(part: Part) -> dict[str, Any]:
    """Receive the segment, but stop before marking so in it."""
    data, key = map(bytes.fromhex, part.marks.wait("queue-0").split())
    handle = QueueHandle.from_bytes(data, key)
    segment, _, descriptor = take_over(handle.address, key, part.rank - 1, handle.segment_bytes, 30.0)
    part.ready(waits=True)
    part.marks.wait("end")
    os.close(descriptor)
    segment.close()
    return {"kind": "over"}


def disturb(marks: Marks, victims: Sequence[int], number: int) -> Callable[[Sequence[int]], None]:
    """Return a function that sends the signal once all are in place, and resumes stopped processes at the end."""

    def run(pids: Sequence[int]) -> None:
        for rank in range(len(pids)):
            marks.wait(f"ready-{rank}")
        time.sleep(0.02)  # a rank that is ready makes its call next
        for victim in victims:
            os.kill(pids[victim], number)
        marks.mark("signalled", str(time.monotonic()))
        for rank in range(len(pids)):
            if rank not in victims and (rank == 0 or 0 in victims):
                marks.wait(f"told-{rank}")
        if number == signal.SIGSTOP:
            time.sleep(0.05)  # the other ranks act on the error while the victim is still stopped
            for victim in victims:
                os.kill(pids[victim], signal.SIGCONT)
        marks.mark("end")

    return run


def holders_of(inode: int) -> list[str]:
    """Return the descriptors of all processes that refer to the memory with this inode."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with suppress(OSError):
                    if "memfd:group" in str(descriptor.readlink()) and descriptor.stat().st_ino == inode:
                        found.append(str(descriptor))
    return found


def assert_nothing_stays(marks: Marks) -> None:
    """Check that no process holds a socket of the queue or a descriptor of its memory."""
    handle, key = map(bytes.fromhex, marks.wait("queue-0").split())
    assert f"@{QueueHandle.from_bytes(handle, key).address}" not in find_sockets()
    assert holders_of(int(marks.wait("inode"))) == []


@pytest.mark.guarantee("B13", "B14")
@pytest.mark.parametrize(("place", "who", "name"), sampled(7, product(PLACES, VICTIMS, SIGNALS)))
def test_the_others_are_told_who_is_gone_or_stopped(place: str, who: str, name: str, tmp_path: Path) -> None:
    """A killed end raises `PeerLostError` with its rank, a stopped one `CommTimeoutError`; nothing is left."""
    victims, number, marks = VICTIMS[who], getattr(signal, name), Marks(tmp_path)
    is_stop = name == "SIGSTOP"
    found = run_ranks(
        take_part,
        3,
        str(tmp_path),
        place,
        victims,
        is_stop,
        expect_dead=[] if is_stop else victims,
        while_running=disturb(marks, victims, number),
    )
    signalled = float(marks.wait("signalled"))
    for rank in {0, 1, 2} - set(victims):
        told = found[rank]
        if place == "closing" and 0 in victims:
            assert told["kind"] == "ClosedError"
        elif rank != 0 and 0 not in victims:
            # This reader waits for the writer, which closes after its own error.
            assert told["kind"] == "ClosedError"
        else:
            times_out = is_stop and place != "closing"
            assert told["kind"] == ("CommTimeoutError" if times_out else "PeerLostError"), told
            assert told["ranks"], told
            assert set(told["ranks"]) <= set(victims), told
            assert "on queue 'steps:0' (" in told["text"]
            if not is_stop:
                assert told["at"] - signalled < PROMPT_S
            elif place != "closing" and (place, rank) not in {("attaching", 1), ("attaching", 2)}:
                assert ", stopped" in told["text"]
    assert_nothing_stays(marks)


# --- a forked child of the dead --------------------------------------------------------------------------------


def outlived_by_a_child(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Rank 1 forks a child that keeps its descriptors, and is killed; rank 0 waits for room in the ring."""
    marks = Marks(directory)
    if rank == 1:
        with take(marks, 1):
            if os.fork() == 0:
                with suppress(TimeoutError):
                    marks.wait("told")
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
    with offer(marks, [1]) as writer:
        found = ended_with(lambda: writer.enqueue(bytes(SMALL)))
        marks.mark("told")
    return found


@pytest.mark.guarantee("B13")
def test_a_forked_child_does_not_keep_a_dead_reader_alive() -> None:
    """A reader's death is noticed although its child keeps its memory and descriptors."""
    found = run_ranks(outlived_by_a_child, 2, expect_dead=[1])[0]
    assert (found["kind"], found["ranks"]) == ("PeerLostError", [1])
    assert ", dead, " in found["text"]


# --- death within a stream -------------------------------------------------------------------------------------


def dies_within_a_stream(rank: int, world_size: int, directory: Path, is_read_before: bool) -> dict[str, Any]:
    """Send from rank 0 a message whose second half is unmapped, so that the copy kills it."""
    marks, nbytes = Marks(directory), 4 << 20
    if rank == 0:
        place = Path(directory) / "content"
        place.write_bytes(bytes(nbytes))
        content = np.memmap(place, np.uint8, "r+")
        with offer(marks, [1, 2], 16 << 20) as writer:
            writer.wait_until_ready(30.0)
            writer.enqueue("whole")
            os.truncate(place, nbytes // 2)
            marks.mark("written", str(os.getpid()))
            if is_read_before:
                marks.wait("read-1")
                marks.wait("read-2")
                parked = FIELDS["parked"]
                wait_until(
                    lambda: all(word(memory_of(writer), parked, LINE * i) for i in (0, 1)), "readers asleep"
                )
            writer.enqueue(content.view(np.ndarray))
    with take(marks, rank) as reader:
        pid = int(marks.wait("written"))
        if not is_read_before:
            wait_until(lambda: has_ended(pid), "the end of rank 0, within its second message")
        whole = reader.dequeue(30.0)
        marks.mark(f"read-{rank}")
        found = ended_with(reader.dequeue)
        published, messages, _, _, readers = _core.ring_state(memory_of(reader))
        consumed = readers[rank - 1][0]
    return {**found, "whole": whole, "published": published, "consumed": consumed, "messages": messages}


@pytest.mark.guarantee("B13", "B22")
@pytest.mark.parametrize("is_read_before", [True, False], ids=["while readers wait", "before readers look"])
def test_a_writer_killed_within_a_stream_leaves_nothing_of_it(is_read_before: bool) -> None:
    """Readers get every whole message, and then the error, when the writer dies while streaming."""
    found = run_ranks(dies_within_a_stream, 3, is_read_before, expect_dead=[0])
    for told in found[1:]:
        assert (told["whole"], told["kind"], told["ranks"]) == ("whole", "PeerLostError", [0]), told
        assert told["messages"] == 1
        assert told["published"] - told["consumed"] > 4 << 20, "the stream was not under way"


# --- stress ----------------------------------------------------------------------------------------------------


def nbytes_of(number: int) -> int:
    rng = random.Random(number)
    return rng.choice([0, rng.randint(1, 1000), rng.randint(1, 60_000), rng.randint(1, 600_000)])


def under_stress(rank: int, world_size: int, directory: Path, folder: str) -> dict[str, Any]:
    """Send and check messages of random sizes until a peer is gone."""
    marks = Marks(folder)
    end: Any = offer(marks, range(1, world_size), 256 << 10) if rank == 0 else take(marks, rank)
    number = 0

    def step() -> None:
        nonlocal number
        if rank == 0:
            end.enqueue([number, blob(number, nbytes_of(number))])
        else:
            found, data = end.dequeue()
            assert found == number, f"message {found} in the place of {number}"
            assert np.array_equal(data, blob(number, nbytes_of(number)))
        number += 1

    if rank == 0:
        end.wait_until_ready(30.0)
        marks.mark("inode", str(os.fstat(end._ring._segment.descriptor).st_ino))
        marks.mark("running")
    with end:
        found = ended_with(step)
    assert segments_of() == []
    return {**found, "messages": number}


@pytest.mark.guarantee("B1", "B13", "B14")
@pytest.mark.parametrize("killed", [[0], [2], [1, 3]], ids=["writer", "reader", "readers"])
def test_stops_and_kills_at_random_tear_nothing(killed: list[int], tmp_path: Path) -> None:
    """With random stops and final kills every byte is right until the end, and all survivors get the error."""
    marks, rng = Marks(tmp_path), random.Random(killed[0])

    def torment(pids: Sequence[int]) -> None:
        marks.wait("running")
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            victim = rng.choice(pids)
            os.kill(victim, signal.SIGSTOP)
            time.sleep(rng.uniform(0.001, 0.12))  # as long as a busy machine may keep a process from running
            os.kill(victim, signal.SIGCONT)
            time.sleep(rng.uniform(0.001, 0.05))
        for rank in killed:
            os.kill(pids[rank], signal.SIGKILL)

    found = run_ranks(under_stress, 4, str(tmp_path), expect_dead=killed, while_running=torment)
    survivors = [found[rank] for rank in range(4) if rank not in killed]
    for each in survivors:
        assert each["messages"] > 10
        assert each["kind"] in ("PeerLostError", "ClosedError"), each
    first = survivors[0]
    assert first["kind"] == "PeerLostError"
    assert set(first["ranks"]) <= set(killed)
    assert_nothing_stays(marks)
