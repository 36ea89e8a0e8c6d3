"""The queue's transport to readers on other hosts: processes that die or stop, and broken connections."""

import asyncio
import contextlib
import ctypes
import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import zmq

from shm_broadcast import codec
from shm_broadcast.endpoint import RemoteKeys, RemoteSettings
from shm_broadcast.errors import ClosedError, CommTimeoutError, GroupBrokenError, PeerLostError
from shm_broadcast.queue import QueueReader, QueueWriter
from shm_broadcast.remote.wire import Kind, pack, unpack
from shm_broadcast.reports.log_fields import LogFields
from tests.harness import RankPool, run_ranks
from tests.queue_ranks import DEADLINE_S, Marks, blob, ended_with
from tests.queues import background
from tests.remotes import HERE, MEGABYTE, Cable, counted, over, remote_queue, share_queue, slowly, take_remote
from tests.waiting import wait_until

# --- death ----------------------------------------------------------------------------------------------------


def die(rank: int, world_size: int, directory: Path, victim: int, how: int, full: bool) -> dict[str, Any]:
    """Use the queue until process `victim` dies or stops; return this rank's errors."""
    marks = Marks(directory)
    if rank == 0:
        with share_queue(marks, remote=[1, 2], high_water_bytes=MEGABYTE) as writer:
            writer.wait_until_ready(DEADLINE_S)
            for number in range(3):
                writer.enqueue(number)
            marks.mark("sent")
            for reader in (1, 2):
                if reader != victim:
                    marks.wait(f"read-{reader}")
            marks.mark("now")
            if victim == 0:
                os.kill(os.getpid(), how)
            step = blob(0, 100_000) if full else None

            def call() -> None:
                writer.enqueue(step)
                time.sleep(0 if full else 0.01)  # slow enough that the connection never fills

            found = ended_with(call)
            again = ended_with(lambda: writer.enqueue(1))
            marks.mark("over")
            return {**found, "again": again["kind"]}
    with take_remote(marks, rank) as end:
        marks.wait("sent")
        if rank != victim:
            assert counted(end, 3) == [0, 1, 2]
            marks.mark(f"read-{rank}")
        marks.wait("now")
        if rank == victim:
            os.kill(os.getpid(), how)
            marks.wait("over")
        found = ended_with(end.dequeue)
        return {**found, "again": ended_with(end.dequeue)["kind"]}


@pytest.mark.guarantee("R4")
@pytest.mark.parametrize("full", [True, False], ids=["while it waits", "when it writes"])
def test_the_writer_is_told_which_reader_was_killed(full: bool) -> None:
    """A blocked call, or the next one, raises PeerLostError with the killed reader's rank; then the queue is broken."""
    told, other, _ = run_ranks(die, 3, 2, signal.SIGKILL, full, expect_dead=[2], timeout_s=40.0)
    assert (told["kind"], told["ranks"], told["again"]) == ("PeerLostError", [2], "GroupBrokenError"), told
    assert "rank 2 (pid" in told["text"]
    # The writer then closed the queue, which is the other reader's error.
    assert other["kind"] == "ClosedError"


@pytest.mark.guarantee("R4")
def test_readers_are_told_that_the_writer_was_killed() -> None:
    """Every reader reads the messages that have arrived, and then gets an error that names the writer's rank."""
    _, *told = run_ranks(die, 3, 0, signal.SIGKILL, False, expect_dead=[0], timeout_s=40.0)
    for each in told:
        assert (each["kind"], each["ranks"], each["again"]) == ("PeerLostError", [0], "GroupBrokenError"), (
            each
        )
        assert "rank 0, pid" in each["text"]


def stop(rank: int, world_size: int, directory: Path, seconds: float, lost_after_s: float) -> dict[str, Any]:
    """Stop rank 1 for a while, while rank 0 goes on sending."""
    marks = Marks(directory)
    if rank == 0:
        with share_queue(marks, remote=[1], lost_after_s=lost_after_s) as writer:
            pid = int(marks.wait("pid"))
            writer.wait_until_ready(DEADLINE_S)
            until = time.monotonic() + seconds
            os.kill(pid, signal.SIGSTOP)
            try:
                found = ended_with(partial(slowly, writer, 1), lambda: time.monotonic() > until)
            finally:
                os.kill(pid, signal.SIGCONT)
            if found["kind"] == "over":
                writer.enqueue("end")
            marks.wait("done")
            return found
    marks.mark("pid", str(os.getpid()))
    with take_remote(marks, rank) as end:
        found = ended_with(
            lambda: marks.mark("end") if end.dequeue() == "end" else None, lambda: marks.has("end")
        )
        marks.mark("done")
        return found


@pytest.mark.guarantee("R4")
def test_a_reader_stopped_for_longer_than_it_may_is_lost_to_both() -> None:
    """From another host a stopped process looks dead. The writer gives it up, and refuses it when it continues."""
    told, reader = run_ranks(stop, 2, DEADLINE_S, 0.8)
    assert (told["kind"], told["ranks"]) == ("PeerLostError", [1]), told
    assert (reader["kind"], reader["ranks"]) == ("PeerLostError", [0]), reader


@pytest.mark.guarantee("R5")
def test_a_short_stop_costs_nothing() -> None:
    """A reader that was stopped for less than `lost_after_s` gets everything, although its connection broke."""
    assert [each["kind"] for each in run_ranks(stop, 2, 1.8, 3.0)] == ["over", "over"]


def hold_the_interpreter(rank: int, world_size: int, directory: Path, sleeper: int) -> str:
    """Keep all Python threads of one process from running for two seconds, while the other process waits for it."""
    marks = Marks(directory)
    end: Any = share_queue(marks, remote=[1]) if rank == 0 else take_remote(marks, rank)
    with end:
        if rank == 0:
            end.wait_until_ready(DEADLINE_S)
        marks.mark(f"ready-{rank}")
        marks.wait(f"ready-{1 - rank}")
        if rank == sleeper:
            # PyDLL keeps the lock of the interpreter for the whole call, as some extensions do.
            ctypes.PyDLL(None).usleep(2_000_000)
        if rank == 0:
            for number in range(200):
                slowly(end, number)
            marks.wait("read")
            return "fine"
        assert counted(end, 200) == list(range(200))
        marks.mark("read")
        return "fine"


@pytest.mark.guarantee("R4")
@pytest.mark.parametrize("sleeper", [0, 1], ids=["the writer", "a reader"])
def test_who_is_merely_busy_is_not_lost(ranks2: RankPool, sleeper: int) -> None:
    """If a process runs no Python for longer than `lost_after_s`, its transport still shows that it is alive."""
    assert ranks2.run(hold_the_interpreter, sleeper) == ["fine", "fine"]


@pytest.mark.guarantee("R4")
def test_a_reader_that_closes_is_named() -> None:
    """The writer learns at once that the reader has closed the queue. This is not reported as a death."""
    with remote_queue(remote=[1, 2]) as (writer, readers):
        readers[2].close()
        found = ended_with(lambda: writer.enqueue(None))
        assert (found["kind"], found["ranks"]) == ("PeerLostError", [2])
        assert "closed the queue" in found["text"]
        with pytest.raises(GroupBrokenError):
            writer.enqueue(None)


# --- broken connections ---------------------------------------------------------------------------------------


def reconnected(cable: Cable, connections: int, carried: int) -> None:
    """Wait until a new connection has carried the lost messages again."""
    wait_until(
        lambda: cable.connections != connections and cable.carried >= carried, "a new connection that carries"
    )


@pytest.mark.guarantee("R5")
def test_a_broken_connection_goes_on_without_loss_or_repetition() -> None:
    """Messages of all sizes each arrive once and in order while the cable is cut again and again."""
    keys = RemoteKeys.generate()
    with (
        QueueWriter.create("steps", remote_readers={1: keys.public}, bind_address=HERE, writer=0) as writer,
        Cable(writer.handle.remote.port if writer.handle.remote else 0) as cable,
        QueueReader.open(over(cable, writer.handle), writer.key, 1, DEADLINE_S, remote_keys=keys) as reader,
    ):
        sizes = [(number * 7919) % 3000 if number % 10 else 700_000 for number in range(120)]

        def read() -> int:
            for number, size in enumerate(sizes):
                assert np.array_equal(reader.dequeue(DEADLINE_S), blob(number, size))
            return len(sizes)

        with background(read) as got:
            for number, size in enumerate(sizes):
                writer.enqueue(blob(number, size), DEADLINE_S)
                if number % 30 == 15:
                    connections, carried = cable.connections, cable.carried
                    cable.cut()
                    reconnected(cable, connections, carried + 10_000)
        assert got == [len(sizes)]
        assert cable.connections > 4


@pytest.mark.guarantee("R4")
def test_silence_is_noticed_on_both_sides() -> None:
    """If a cable carries nothing any more, without an error, writer and reader each lose the other and name it."""
    keys = RemoteKeys.generate()
    with (
        QueueWriter.create("steps", remote_readers={1: keys.public}, bind_address=HERE, writer=0) as writer,
        Cable(writer.handle.remote.port if writer.handle.remote else 0) as cable,
        QueueReader.open(over(cable, writer.handle), writer.key, 1, DEADLINE_S, remote_keys=keys) as reader,
    ):
        writer.enqueue("before")
        assert reader.dequeue(DEADLINE_S) == "before"
        with background(partial(ended_with, reader.dequeue)) as got:
            cable.block()
            found = ended_with(partial(slowly, writer, None))
        assert (found["kind"], found["ranks"]) == ("PeerLostError", [1])
        assert (got[0]["kind"], got[0]["ranks"]) == ("PeerLostError", [0])


@pytest.mark.guarantee("R5")
def test_a_part_that_a_signal_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next heartbeat tells a reader that it lacks a message, and the writer sends that again."""
    with remote_queue() as (writer, readers):
        leg: Any = writer._remote
        with monkeypatch.context() as patch:
            patch.setattr(leg, "_push_to_all", lambda frame: None)
            writer.enqueue("swallowed")
        writer.enqueue("next")
        assert counted(readers[1], 2) == ["swallowed", "next"]


@pytest.mark.guarantee("R5", "R7")
def test_an_end_that_a_signal_lost_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next heartbeat tells a reader that the writer has closed the queue, and the reader is not told of a loss."""
    with remote_queue(lost_after_s=3.0, heartbeat_s=0.1) as (writer, readers):
        leg: Any = writer._remote
        push = leg._push_to_all
        lost: list[zmq.Frame] = []

        def push_to_all(frame: zmq.Frame) -> None:
            if unpack(frame).kind == Kind.END and not lost:
                lost.append(frame)
            else:
                push(frame)

        monkeypatch.setattr(leg, "_push_to_all", push_to_all)
        writer.enqueue("last")
        writer.close()
        assert lost
        assert readers[1].dequeue(DEADLINE_S) == "last"
        with pytest.raises(ClosedError, match="the writer closed"):
            readers[1].dequeue(DEADLINE_S)


@pytest.mark.slow
@pytest.mark.guarantee("R6", "R17")
def test_a_reader_that_has_failed_takes_no_processor_time() -> None:
    """After nonsense from the writer the thread sleeps, though the descriptor of `fileno` stays readable."""
    with remote_queue() as (writer, readers):
        readers[1].fileno()
        leg: Any = writer._remote
        with leg._lock:
            leg._push_to_all(zmq.Frame(pack(99)))
        far: Any = readers[1]._ring
        wait_until(lambda: far._failure is not None, "the failure")
        shares = []
        for _ in range(3):  # a busy machine makes wake-ups dearer, so the best of three counts
            before = time.process_time()
            time.sleep(0.5)
            shares.append((time.process_time() - before) / 0.5)
        assert min(shares) < 0.1, shares


class Owner:
    """Stand for the owner of an end; remember what it is told, and close the end when that has failed."""

    def __init__(self, reader: QueueReader) -> None:
        self._reader = reader
        self.told: list[str] = []

    def log_fields(self) -> LogFields:
        """Say nothing."""
        return {}

    def look(self, call: str) -> None:
        """Do nothing."""

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Remember that the end of the queue was found."""
        self.told.append(f"ended {call}")

    def failed(self, call: str, error: PeerLostError) -> None:
        """Remember the failure, and close the end."""
        self.told.append(f"failed {call}")
        self._reader.close()


def lend(reader: QueueReader) -> Any:
    """Return the next object by a loan."""
    with reader.loan(DEADLINE_S) as value:
        return value


READS: dict[str, Callable[[QueueReader], Any]] = {
    "dequeue": lambda reader: reader.dequeue(DEADLINE_S),
    "try_dequeue": lambda reader: reader.try_dequeue(),
    "adequeue": lambda reader: asyncio.run(reader.adequeue(DEADLINE_S)),
    "loan": lend,
}


@pytest.mark.guarantee("R1", "R4")
@pytest.mark.parametrize("call", READS)
def test_every_read_tells_the_owner_of_a_lost_writer(call: str) -> None:
    """The owner learns of it from whichever call finds it, may close the end, and is not told by a time-out."""
    keys = RemoteKeys.generate()
    with (
        QueueWriter.create("steps", remote_readers={1: keys.public}, bind_address=HERE, writer=0) as writer,
        Cable(writer.handle.remote.port if writer.handle.remote else 0) as cable,
        QueueReader.open(over(cable, writer.handle), writer.key, 1, DEADLINE_S, remote_keys=keys) as reader,
    ):
        owner = Owner(reader)
        reader.guard(owner)
        with pytest.raises(CommTimeoutError):
            reader.dequeue(0.01)
        assert owner.told == []
        cable.block()
        far: Any = reader._ring
        wait_until(lambda: far._failure is not None, "the failure")
        with pytest.raises(PeerLostError):
            READS[call](reader)
        assert owner.told == [f"ended {call}", f"failed {call}"]
        assert far._context.closed


def fill(writer: QueueWriter, timeout_s: float = DEADLINE_S) -> None:
    """Write more than the ring holds, so that the writer needs room from a reader that does not read."""
    for _ in range(1000):
        writer.enqueue(bytes(1 << 20), timeout_s)


class FailedOwner:
    """Stand for the owner of a writer, whose failure is why the readers have left."""

    def log_fields(self) -> LogFields:
        """Name nothing."""
        return {}

    def look(self, call: str) -> None:
        """Say so."""
        self.ended(call)

    def ended(self, call: str, *, by_writer: bool = False) -> None:
        """Say so."""
        raise PeerLostError(f"{call}: another rank is the culprit", peers=(7,))

    def failed(self, call: str, error: PeerLostError) -> None:
        """Never learn that a reader is to blame."""
        raise AssertionError(f"{call} blames {error.peers}")


@pytest.mark.guarantee("R1", "R4")
@pytest.mark.parametrize("leaver", [1, 2], ids=["on this host", "elsewhere"])
def test_a_reader_that_leaves_as_its_owner_has_failed_is_not_blamed(leaver: int) -> None:
    """The writer of a queue with readers here and elsewhere asks its owner first, in each later call too."""
    keys = RemoteKeys.generate()
    with (
        QueueWriter.create(
            "steps", [1], remote_readers={2: keys.public}, bind_address=HERE, writer=0
        ) as writer,
        QueueReader.open(writer.handle, writer.key, 1, DEADLINE_S) as near,
        QueueReader.open(writer.handle, writer.key, 2, DEADLINE_S, remote_keys=keys) as far,
    ):
        writer.wait_until_ready(DEADLINE_S)
        writer.guard(FailedOwner())
        writer.enqueue(0)
        {1: near, 2: far}[leaver].close()
        for _ in range(2):
            with pytest.raises(PeerLostError, match="another rank is the culprit") as found:
                fill(writer)
            assert found.value.peers == (7,)


def leave(_writer: QueueWriter, far: QueueReader, _cable: Cable) -> None:
    """Close the reader elsewhere."""
    far.close()


def fall_silent(_writer: QueueWriter, _far: QueueReader, cable: Cable) -> None:
    """Let nothing of the reader elsewhere come through any more."""
    cable.block()


def fail(writer: QueueWriter, _far: QueueReader, _cable: Cable) -> None:
    """Let the owner of the writer fail."""
    writer.guard(FailedOwner())


ENDS: dict[str, tuple[Callable[[QueueWriter, QueueReader, Cable], None], str]] = {
    "closed": (leave, "rank 2 .*closed the queue"),
    "silent": (fall_silent, r"rank 2 .*lost, last heard"),
    "owner": (fail, "another rank is the culprit"),
}


@pytest.mark.guarantee("R4")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("call", ["enqueue", "wait_until_ready"])
def test_a_wait_for_a_reader_here_ends_when_one_elsewhere_is_lost(call: str, end: str) -> None:
    """Nothing but the wait's own look can find it: the reader on this host never reads, or never comes."""
    keys = RemoteKeys.generate()
    brief = RemoteSettings(heartbeat_s=0.05, lost_after_s=0.5)
    with (
        QueueWriter.create(
            "steps", [1], remote_readers={2: keys.public}, bind_address=HERE, writer=0, remote=brief
        ) as writer,
        Cable(writer.handle.remote.port if writer.handle.remote else 0) as cable,
        QueueReader.open(over(cable, writer.handle), writer.key, 2, DEADLINE_S, remote_keys=keys) as far,
        contextlib.ExitStack() as near,
    ):
        if call == "enqueue":
            near.enter_context(QueueReader.open(writer.handle, writer.key, 1, DEADLINE_S))
            writer.wait_until_ready(DEADLINE_S)
            with pytest.raises(CommTimeoutError, match="rank 1"):
                fill(writer, 0.2)
        happen, text = ENDS[end]
        waits: Callable[[], Any] = (
            partial(fill, writer) if call == "enqueue" else partial(writer.wait_until_ready, DEADLINE_S)
        )
        with background(waits) as got:
            time.sleep(0.3)
            happen(writer, far, cable)
        (found,) = got
        assert isinstance(found, PeerLostError), found
        assert re.search(text, str(found))
        assert found.peers == ((7,) if end == "owner" else (2,))


@pytest.mark.guarantee("R4")
@pytest.mark.parametrize("call", ["enqueue", "wait_until_ready"])
def test_a_wait_for_a_reader_elsewhere_ends_when_one_here_is_lost(call: str) -> None:
    """The other way round: the reader elsewhere never reads, or never comes, and the one on this host leaves."""
    keys = RemoteKeys.generate()
    with (
        QueueWriter.create(
            "steps", [1], remote_readers={2: keys.public}, bind_address=HERE, writer=0
        ) as writer,
        QueueReader.open(writer.handle, writer.key, 1, DEADLINE_S) as near,
        contextlib.ExitStack() as far,
    ):
        waits: Callable[[], Any] = partial(writer.wait_until_ready, DEADLINE_S)
        if call == "enqueue":
            far.enter_context(QueueReader.open(writer.handle, writer.key, 2, DEADLINE_S, remote_keys=keys))
            writer.wait_until_ready(DEADLINE_S)
            waits = partial(writer.enqueue, bytes(1 << 20), DEADLINE_S)

            def send_too_much() -> None:
                for _ in range(1000):
                    writer.enqueue(bytes(1 << 20), 0.2)
                    near.dequeue(DEADLINE_S)

            with pytest.raises(CommTimeoutError, match="rank 2"):
                send_too_much()
        with background(waits) as got:
            time.sleep(0.3)
            near.close()
        (found,) = got
        assert isinstance(found, PeerLostError), found
        assert re.search("rank 1 .*closed the queue", str(found))
        assert found.peers == (1,)


@pytest.mark.guarantee("R14")
def test_a_time_out_that_a_handler_raises_passes_a_remote_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """`try_dequeue` does not take it for its own, and the message stays the next one."""
    error = CommTimeoutError("the application's")

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise error

    def decode(frame: Any, *_: Any) -> Any:
        signal.raise_signal(signal.SIGALRM)

    with remote_queue() as (writer, readers):
        writer.enqueue("message")
        far: Any = readers[1]._ring
        wait_until(far.is_ready, "the message")
        before = signal.signal(signal.SIGALRM, handler)
        try:
            with monkeypatch.context() as patch:
                patch.setattr(codec, "decode", decode)
                with pytest.raises(CommTimeoutError) as raised:
                    readers[1].try_dequeue()
        finally:
            signal.signal(signal.SIGALRM, before)
        assert raised.value is error
        assert readers[1].try_dequeue() == (True, "message")
