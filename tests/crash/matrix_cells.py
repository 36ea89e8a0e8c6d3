"""What the ranks of one cell of `matrix.md` do, and what the process that sends the signal does."""

import gc
import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from coordinator.errors import CommError, PeerLostError
from coordinator.group import GroupCoordinator
from coordinator.settings import CoordinatorSettings
from device_comm.cpu import shared_memory
from shm_broadcast.settings import BroadcastSettings
from tests.handlers import is_swallowing
from tests.leaks import Snapshot, leaked_since
from tests.waiting import has_ended, sleeping_in, wait_until
from tests.worlds import meet, world

__all__ = ["RANKS", "STOP_S", "VICTIMS", "Sender", "live_in_a_cell", "witnesses"]

RANKS = 3
VICTIMS = {"first": [0], "other": [2], "all": [0, 1, 2]}
STOP_S = 0.5
"""Deadline of the witnesses' calls where a rank is stopped, since only the clock reveals that."""
SETTLE_S = 0.15
"""How long a victim has to come from its mark into the wait."""
LARGE = 1 << 19
"""Elements of a float32 tensor of 2 MiB: eight slots of a region, four records of a channel."""
QUEUED = (bytes(40_000), bytes(300_000), bytes(3_000_000))
"""What a queue's writer sends. At "mid-copy" its ring has 1 MiB: the first goes in one copy, the second while readers
already copy its beginning, the third in parts."""

Call = Callable[[], object]


def large() -> torch.Tensor:
    """Return a tensor that takes several steps."""
    return torch.ones(LARGE)


class Interrupts:
    """A handler of SIGINT that raises `KeyboardInterrupt` while it is armed."""

    def __init__(self) -> None:
        """Install it."""
        self.has_come = False
        self.is_armed = True
        signal.signal(signal.SIGINT, self._come)
        signal.signal(signal.SIGALRM, self._come)

    def _come(self, number: int, frame: FrameType | None) -> None:
        if is_swallowing(frame):
            signal.setitimer(signal.ITIMER_REAL, 0.001)
            return
        self.has_come = True
        if self.is_armed:
            raise KeyboardInterrupt


class Part:
    """One rank's part in a cell."""

    def __init__(
        self,
        everyone: GroupCoordinator,
        directory: Path,
        marks: Path,
        place: str,
        victims: list[int],
        name: str,
    ) -> None:
        """Store the arguments."""
        self.everyone = everyone
        self.rank = everyone.rank
        self.directory = directory
        self.marks = marks
        self.place = place
        self.is_victim = self.rank in victims
        self.victims = victims
        self.is_stop = name == "SIGSTOP"
        # A rank that is interrupted before it comes to the creation lives on, so only the deadline tells.
        self.has_late = name in ("SIGSTOP", "SIGINT")
        # A stopped victim goes on where everybody was stopped, and its calls then need time.
        self.limit = STOP_S if self.is_stop and not self.is_victim else None
        self.groups: list[GroupCoordinator] = []
        self.marks_later = False  # whether the wait itself says when it has begun
        self.is_single = False  # whether a call at "mid-copy" is the only one
        self.peer = victims[0] if not self.is_victim else (self.rank + 1) % RANKS

    def settings(self, *, soon: bool = False) -> CoordinatorSettings:
        """Return the settings of this cell's groups; with `soon` their creation waits shortly for a late rank."""
        seconds = {"create_timeout_s": 4 * STOP_S} if soon and self.has_late else {}
        ring_bytes = 1 << 20 if self.place == "mid-copy" else 1 << 17
        return CoordinatorSettings.resolve({}, broadcast=BroadcastSettings(ring_bytes=ring_bytes), **seconds)

    def new_group(self, name: str = "cell", *, soon: bool = False) -> GroupCoordinator:
        """Create a group of all ranks."""
        everyone = self.everyone
        settings = self.settings(soon=soon)
        made = GroupCoordinator(
            [everyone.ranks], everyone.local_rank, "gloo", True, group_name=name, settings=settings
        )
        self.groups.append(made)
        return made

    def mark(self) -> None:
        """Say that the signal may come. A folder is made in one step; a file would be open when the signal comes."""
        (self.marks / f"ready-{self.rank}").mkdir()

    def is_sent(self) -> bool:
        """Tell whether it has been sent."""
        return (self.marks / "sent").exists()

    def play(self, waits: Call, call: Call) -> None:
        """Be hit at the place of this cell, or make the call of a witness once the signal has been sent.

        Args:
            waits: What a victim waits in; it never ends by itself.
            call: What all ranks do at the place "mid-copy", again and again; else what the witnesses do.
        """
        if self.place == "mid-copy":
            for number in itertools.count():
                # The signal finds this rank in the sequence, not on the way to its first call. A call that leaves or
                # creates is alone.
                if number == (0 if self.is_single else 1):
                    self.mark()
                call()
        if not self.is_victim:
            wait_until(self.is_sent, "the signal")
            while True:
                call()
        if self.place == "waiting":
            if not self.marks_later:
                self.mark()
            waits()
        else:
            self.mark()
        # A rank that is idle, or was stopped while it waited, and goes on.
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:
            time.sleep(0.01)


def _collective(part: Part) -> None:
    group = part.new_group()
    part.play(
        lambda: group.all_reduce(large()), lambda: group.all_reduce(large(), timeout_s=part.limit or 60.0)
    )


def _gloo_collective(part: Part) -> None:
    group = part.new_group()
    if part.place == "mid-copy":
        objects = [bytes([rank]) * (LARGE * 4) for rank in range(RANKS)]
        part.play(
            lambda: None,
            lambda: group.all_gather_object(objects[part.rank], timeout_s=part.limit or 60.0),
        )
    else:
        part.play(group.barrier, lambda: group.barrier(part.limit or 60.0))


def _channel(part: Part) -> None:
    group = part.new_group()
    if part.is_victim and part.place == "mid-copy" and len(part.victims) == 1:
        others = [rank for rank in range(RANKS) if rank != part.rank]
        part.play(lambda: None, lambda: _send_to(group, others))
    elif part.place == "mid-copy" and len(part.victims) == RANKS:
        part.play(lambda: None, lambda: _around(group))
    else:
        part.play(
            lambda: group.recv((8,), torch.float32, part.peer),
            lambda: group.recv((LARGE,), torch.float32, part.peer, timeout_s=part.limit),
        )


def _send_to(group: GroupCoordinator, others: list[int]) -> None:
    handles = [group.isend(large(), rank) for rank in others]
    for handle in handles:
        handle.wait()


def _around(group: GroupCoordinator) -> None:
    handle = group.isend(large())
    group.recv((LARGE,), torch.float32)
    handle.wait()


def _queue(part: Part) -> None:
    group = part.new_group()
    end: Any = group.create_mq_broadcaster(0)
    if part.rank == 0:
        messages = itertools.cycle(QUEUED if part.place == "mid-copy" else QUEUED[:1])
        # The readers of a cell in which the writer waits do not read; the ring holds one and a half messages.
        part.play(
            lambda: [end.enqueue(QUEUED[0]) for _ in range(9)],
            lambda: end.enqueue(next(messages), timeout_s=part.limit),
        )
    elif part.is_victim or part.victims == [0] or part.place == "mid-copy":
        if part.victims == [2]:
            # The other reader is no witness. It must not give up before the writer, which would then lose it first.
            part.limit = None
        part.play(end.dequeue, lambda: end.dequeue(part.limit))
    else:
        # This reader is no witness: it makes room, so that the writer waits for the victim alone.
        part.limit = None
        wait_until(part.is_sent, "the signal")
        while True:
            end.dequeue()


def _creation(part: Part) -> None:
    def create() -> None:
        group = part.new_group(soon=True)
        while True:
            group.barrier(part.limit or 60.0)

    def wait_in_it() -> None:
        # A rank that is interrupted before the others have seen it tells them nothing, however long it has been here.
        threading.Thread(target=_mark_the_wait, args=[part, "_await_outcome"]).start()
        create()

    part.is_single = True
    # Where all create at once nobody waits for long.
    part.marks_later = len(part.victims) < RANKS
    part.play(wait_in_it if part.marks_later else create, create)


def _destroy(part: Part) -> None:
    group = part.new_group()
    group.barrier()
    if part.place == "mid-copy":
        # A rank that leaves during the reduction breaks the group: no rank may still be in the barrier then, and the
        # reduction of a rank that comes late fails.
        meet(part.rank, range(RANKS), part.marks, "in")
        with suppress(PeerLostError):
            group.all_reduce(large(), async_op=True)
    if part.is_victim and part.place == "waiting":
        group.isend(torch.ones(LARGE), part.peer)

    def leave() -> None:
        group.destroy()
        raise _LeftError

    def destroyed() -> None:
        if part.place == "waiting":
            # An interrupt at another place of `destroy` would not hit the wait for the message that nobody receives.
            threading.Thread(target=_mark_the_wait, args=[part, "flush"]).start()
        group.destroy()
        wait_until(lambda: False, "the signal")

    part.marks_later = part.is_single = True
    part.play(destroyed, leave if not part.is_victim else destroyed)


def witnesses(plane: str, victims: list[int]) -> list[int]:
    """Return the ranks whose calls need the victim."""
    if plane == "queue" and victims == [2]:
        return [0]
    return [rank for rank in range(RANKS) if rank not in victims]


def _mark_the_wait(part: Part, function: str) -> None:
    wait_until(lambda: sleeping_in(function), f"the wait in {function}")
    part.mark()


class _LeftError(Exception):
    """A witness has left in order."""


APART = ("call between hosts", "Gloo collective", "Gloo message")
"""The kinds of call whose ranks pretend to be on hosts of their own."""
PLANES: dict[str, Callable[[Part], None]] = {
    "queue": _queue,
    "collective": _collective,
    "channel": _channel,
    "call between hosts": _collective,
    "Gloo collective": _gloo_collective,
    "Gloo message": _channel,
    "creation": _creation,
    "destroy": _destroy,
}


def live_in_a_cell(
    rank: int, world_size: int, directory: Path, plane: str, place: str, hit: str, name: str, marks: str
) -> dict[str, Any]:
    """Play this rank's part; return how it ended, and what it left behind. This is a function for `run_ranks`."""
    before, mapped = Snapshot.take(), _segments()
    found = _live(rank, world_size, directory, plane, place, hit, name, marks)
    gc.collect()
    left = leaked_since(before)
    more = _segments() - mapped
    left += [f"{more} mapped segments"] if more > 0 else []
    return {**found, "left": left}


def _segments() -> int:
    """Return how many mappings of shared memory of the product this process has."""
    return Path("/proc/self/maps").read_text().count("memfd:group-coordinator")


def _live(
    rank: int, world_size: int, directory: Path, plane: str, place: str, hit: str, name: str, marks: str
) -> dict[str, Any]:
    interrupts = Interrupts()
    victims = VICTIMS[hit]
    if plane in APART:
        shared_memory.host_id = lambda: f"host {rank}"
    with world(rank, world_size, directory) as everyone:
        part = Part(everyone, directory, Path(marks), place, victims, name)
        everyone.barrier()
        found: dict[str, Any] = {"kind": "done", "ranks": []}
        try:
            PLANES[plane](part)
        except _LeftError:
            pass
        except (CommError, KeyboardInterrupt) as error:
            ranks = [*getattr(error, "peers", ()), *getattr(error, "missing", ())]
            found = {"kind": type(error).__name__, "ranks": ranks, "text": str(error)}
        interrupts.is_armed = False
        if name == "SIGINT" and part.is_victim:
            # Another victim's end may have come first.
            wait_until(lambda: interrupts.has_come, "the own interrupt")
        needing = witnesses(plane, victims)
        if rank in needing:
            meet(rank, needing, Path(marks), "told")
        for group in part.groups:
            group.destroy()
    return found


class Sender:
    """Sends the signal of a cell, as `while_running` of `run_ranks`."""

    def __init__(self, marks: Path, plane: str, place: str, hit: str, name: str) -> None:
        """Store the arguments; `name` is that of the signal."""
        self._marks = marks
        self._plane = plane
        self._place = place
        self._victims = VICTIMS[hit]
        self._number = signal.Signals[name]
        self._random = random.Random(f"{marks.name} {place} {hit} {name}")

    def __call__(self, pids: Sequence[int]) -> None:
        """Send the signal when all are where they should be; kill stopped victims once the witnesses were told."""
        marked = range(RANKS) if self._place == "mid-copy" else self._victims
        ready = [self._marks / f"ready-{rank}" for rank in marked]
        if not self._comes(lambda: all(each.exists() for each in ready), pids):
            return
        time.sleep(self._random.uniform(0.0, 0.05) if self._place == "mid-copy" else SETTLE_S)
        self._send(pids, self._number)
        if self._number in (signal.SIGKILL, signal.SIGTERM):
            wait_until(lambda: all(has_ended(pids[rank]) for rank in self._victims), "the end of the victims")
        (self._marks / "sent").touch()
        if self._number != signal.SIGSTOP:
            return
        told = [self._marks / f"told-{rank}" for rank in witnesses(self._plane, self._victims)]
        if told:
            self._comes(lambda: all(each.exists() for each in told), pids)
        else:
            time.sleep(2 * STOP_S)
            self._send(pids, signal.SIGCONT)
            time.sleep(0.1)
        self._send(pids, signal.SIGKILL)

    def _send(self, pids: Sequence[int], number: signal.Signals) -> None:
        for rank in self._victims:
            with suppress(ProcessLookupError):  # the process is gone; the harness will say why
                os.kill(pids[rank], number)

    @staticmethod
    def _comes(condition: Callable[[], bool], pids: Sequence[int]) -> bool:
        """Wait for a condition; return whether it came before a process ended, which the harness will report."""
        wait_until(lambda: condition() or any(map(has_ended, pids)), "the ranks")
        return condition()
