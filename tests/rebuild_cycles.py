"""Processes that lose and replace members again and again: what a member does, and who tells it what to do.

`serve` is the program of a member. It keeps its groups from one step to the next and does what the test asks over a
socket; `Crowd` is the other side, in the process of the test, and starts members, asks and kills them.
"""

import dataclasses
import gc
import os
import random
import select
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Self

import torch

from coordinator.elastic.driver import Driver
from coordinator.elastic.joining import join_distributed_environment
from coordinator.elastic.layouts import LayoutRule, Placement, drop_replicas
from coordinator.elastic.protocol import Operation, Pause
from coordinator.errors import CommError, CommTimeoutError, DisagreementError, ExcludedError, UsageError
from coordinator.group import GroupCoordinator
from coordinator.groups import ParallelGroups
from coordinator.layout import ParallelLayout
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.queues.external_writer import ExternalWriter
from coordinator.settings import CoordinatorSettings
from device_comm.cpu.shared_memory import SharedMemory
from shm_broadcast.queue import QueueReader, QueueWriter
from tests.rank_main import receive, send
from tests.rank_processes import RankProcess
from tests.waiting import wait_until

__all__ = ["TIMEOUT_S", "Crowd", "use_all_planes"]

TIMEOUT_S = 40.0
"""How long a change of members, and each call behind it, may take on a busy machine."""

MESSAGES = 4


def numbers(size: int, *seed: int) -> torch.Tensor:
    """Return pseudo-random integers that every rank can compute for every other one."""
    chance = random.Random(repr(seed))
    return torch.tensor([chance.randrange(-(1 << 40), 1 << 40) for _ in range(size)])


def use_all_planes(groups: ParallelGroups, cycle: int, writer: int) -> None:
    """Call everything in the world group and in `dp`, and compare each bit with what the inputs of all ranks give.

    Rank `writer` writes the queue that each of them gets.
    """
    for group in (groups.world, groups.dp):
        me, size = group.rank_in_group, group.world_size
        given = [numbers(8 * size, cycle, rank) for rank in range(size)]
        total = torch.stack(given).sum(0)
        assert torch.equal(group.all_reduce(given[me].clone()), total)
        assert torch.equal(group.all_gather(given[me]), torch.cat(given))
        assert torch.equal(group.reduce_scatter(given[me].clone()), total[8 * me : 8 * me + 8])
        source = cycle % size
        assert torch.equal(group.broadcast(given[me].clone(), source), given[source])
        for one in range(size):
            found = group.broadcast_object({"cycle": cycle, "from": me}, one)
            assert found == {"cycle": cycle, "from": one}
        assert group.all_gather_object((cycle, me)) == [(cycle, rank) for rank in range(size)]
        sent = group.broadcast_tensor_dict({"x": given[me], "n": cycle}, source)
        assert sent is not None
        assert torch.equal(sent["x"], given[source])
        _use_neighbours(group, given, cycle)
        _use_queue(group, cycle, writer)
        group.barrier()


def _use_neighbours(group: Any, given: Sequence[torch.Tensor], cycle: int) -> None:
    """Send a tensor, an object and a dict to the next rank, and take those of the previous one."""
    me, size = group.rank_in_group, group.world_size
    if size == 1:
        return
    after, before = (me + 1) % size, (me - 1) % size
    group.send(given[me], after)
    assert torch.equal(group.recv(given[before].shape, torch.int64, before), given[before])
    group.send_object(["object", cycle, me], after)
    assert group.recv_object(before) == ["object", cycle, before]
    group.send_tensor_dict({"x": given[me]}, after)
    assert torch.equal(group.recv_tensor_dict(before)["x"], given[before])


def _use_queue(group: Any, cycle: int, writer: int) -> None:
    """Send messages through a queue of the group's own."""
    end = group.create_mq_broadcaster(writer)
    messages = [{"cycle": cycle, "number": number, "data": bytes(1000)} for number in range(MESSAGES)]
    if isinstance(end, QueueWriter):
        end.wait_until_ready(TIMEOUT_S)
        for message in messages:
            end.enqueue(message, TIMEOUT_S)
    elif isinstance(end, QueueReader):
        assert [end.dequeue(TIMEOUT_S) for _ in messages] == messages


# --- layout rules -------------------------------------------------------------------------------------------------


def pairs(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
    """Let each two ranks share layers."""
    kept = tuple(sorted(ranks))
    return Placement(dataclasses.replace(layout, tensor=2, data=len(kept) // 2), kept)


def raising(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
    """Fail as a rule with a mistake does."""
    return Placement(dataclasses.replace(layout, data=len(ranks) // 0), tuple(ranks))


def malformed(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
    """Return something else."""
    del layout, ranks
    return None  # type: ignore[return-value]


def reversing(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
    """Number the ranks from the other end."""
    return Placement(dataclasses.replace(layout, data=len(ranks)), tuple(sorted(ranks, reverse=True)))


def without_rank_2(layout: ParallelLayout, ranks: Collection[int]) -> Placement:
    """Have no place for rank 2."""
    return drop_replicas(layout, set(ranks) - {2})


RULES: dict[str, LayoutRule] = {
    "replicas": drop_replicas,
    "pairs": pairs,
    "another shape": pairs,
    "another order": reversing,
    "raises": raising,
    "is malformed": malformed,
    "drops rank 2": without_rank_2,
}


def rule_of(name: str) -> LayoutRule:
    """Return a rule by its name; with "on rank R" at its end it is what that rank has, and the others the default."""
    what, is_of_one, rank = name.partition(" on rank ")
    return drop_replicas if is_of_one and get_world_group().rank != int(rank) else RULES[what]


CALLS: dict[str, Callable[[GroupCoordinator, dict[str, Any]], Any]] = {
    "barrier": lambda group, _: group.barrier(),
    "all_reduce": lambda group, _: group.all_reduce(torch.ones(8)),
    "all_reduce of 1 MiB": lambda group, _: group.all_reduce(torch.ones(1 << 18)),
    "all_gather_object": lambda group, _: group.all_gather_object("x"),
    "broadcast_object": lambda group, _: group.broadcast_object(None, 0),
    "broadcast_tensor_dict": lambda group, _: group.broadcast_tensor_dict(None, 1),
    "send": lambda group, _: group.send(torch.ones(1 << 16), 0),
    "recv": lambda group, _: group.recv((8,), torch.float32, 0),
    "send_object": lambda group, _: group.send_object(bytes(1 << 16), 1),
    "recv_object": lambda group, _: group.recv_object(0),
    "dequeue": lambda _, queues: queues["read"].dequeue(TIMEOUT_S),
    "enqueue": lambda _, queues: queues["write"].enqueue(bytes(1 << 16), TIMEOUT_S),
    "create_mq_broadcaster": lambda group, _: group.create_mq_broadcaster(0),
}
"""What the last rank of three may be about to do in a group."""


def failure_of(call: Callable[[], Any]) -> CommError:
    """Repeat a call until it fails; return its error."""
    while True:
        try:
            call()
        except CommError as error:
            return error


# --- a member ---------------------------------------------------------------------------------------------------


class Member:
    """What one process keeps from step to step."""

    def __init__(self, directory: Path) -> None:
        self._path = f"file://{directory}/store"
        self._groups: ParallelGroups | None = None
        self._queues: dict[str, Any] = {}
        self._has_world = False

    @property
    def groups(self) -> ParallelGroups:
        """Return the groups in which this process is a member."""
        assert self._groups is not None
        return self._groups

    def start(self, rank: int, size: int, tensor: int = 1) -> None:
        """Be one of the first members."""
        init_distributed_environment(size, rank, self._path, backend="gloo", timeout=TIMEOUT_S, elastic=True)
        self._has_world = True
        self._groups = ParallelGroups.from_sizes(tensor_parallel_size=tensor)

    def join(self, replaces: int | None = None) -> list[Any] | str:
        """Wait to be taken in; return what `said` does, or why it was not."""
        settings = CoordinatorSettings.resolve(timeout_s=TIMEOUT_S)
        try:
            self._groups = join_distributed_environment(
                self._path, replaces=replaces, settings=settings, timeout_s=TIMEOUT_S
            )
        except (DisagreementError, UsageError) as error:
            return str(error)
        return self.said()

    def said(self) -> list[Any]:
        """Return rank, world size, and what has changed."""
        change = self.groups.change
        assert change is not None
        return [self.groups.world.rank, self.groups.world.world_size, change.epoch, list(change.lost)]

    def change(self) -> dict[str, Any]:
        """Return more of what has changed."""
        change = self.groups.change
        assert change is not None
        return {
            "places": list(change.places),
            "joined": list(change.joined),
            "old_to_new": change.old_to_new,
            "tp": self.groups.tp.ranks,
        }

    def use(self, cycle: int, writer: int = 0) -> None:
        """Call everything; see `use_all_planes`."""
        use_all_planes(self.groups, cycle, writer)

    def rebuild(self) -> list[Any]:
        """Call until a rank is found to be lost, and go on without it."""
        failure_of(self.groups.world.barrier)
        self._groups = self.groups.rebuild(timeout_s=TIMEOUT_S)
        return self.said()

    def die_before(self, step: int) -> None:
        """Kill this process before that step of an agreement. What it repeats while it waits is no step."""
        done, do = set[str](), Driver._do

        def do_or_die(driver: Driver, wants: Operation) -> Any:
            done.add("pauses" if isinstance(wants, Pause) else repr(wants))
            if len(done - {"pauses"}) > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return do(driver, wants)

        Driver._do = do_or_die  # type: ignore[method-assign, assignment]

    def try_exchange(self, leave: list[int], join: int) -> str:
        """Go over to other members as planned, or stay as another one has died; return what it was."""
        try:
            plan = self.groups.prepare(leave=leave, join=join, timeout_s=TIMEOUT_S / 2)
            self._groups = plan.commit()
        except (DisagreementError, CommTimeoutError):
            return "stayed"
        return "changed" if self._groups is not None else "left"

    def go_on(self, cycle: int) -> list[int]:
        """Use the groups; create them again if one has died in between. Return the rank and their number."""
        try:
            self.use(cycle)
        except CommError:
            self._groups = self.groups.rebuild(timeout_s=TIMEOUT_S)
            self.use(cycle)
        return [self.groups.world.rank, self.groups.world.world_size]

    def fail(self) -> str:
        """As `rebuild`, for a rank that cannot go on; return how that ends, and why unless it is excluded."""
        try:
            self.rebuild()
        except ExcludedError as error:
            return type(error).__name__
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def plan(self) -> str:
        """Plan a change that this rank has no part in; return how that ends."""
        try:
            self.groups.prepare(leave=[0], timeout_s=TIMEOUT_S)
        except CommError as error:
            return type(error).__name__
        return ""

    def give_up(self) -> list[Any]:
        """Wait for a rank that is stopped, as long as it takes to go on without it."""
        failure_of(lambda: self.groups.world.barrier(timeout_s=0.5))
        self._groups = self.groups.rebuild(timeout_s=1.5)
        return self.said()

    def make_queues(self, reading: str, writing: str, writer: int) -> None:
        """Create two queues: `writer` writes the one of the group `writing`, and rank 0 that of the group `reading`."""
        self._queues = {
            "read": self.groups.by_name()[reading].create_mq_broadcaster(0),
            "write": self.groups.by_name()[writing].create_mq_broadcaster(writer),
        }

    def stray(self, call: str, name: str) -> list[str]:
        """Make a call in a group until it fails, and once more; return the kinds of both errors, and the first text."""
        kinds, texts = [], []
        group = self.groups.by_name()[name]
        for _ in range(2):
            error = failure_of(lambda: CALLS[call](group, self._queues))
            kinds.append(type(error).__name__)
            texts.append(str(error))
        return [*kinds, texts[0]]

    def number_of(self, name: str) -> int:
        """Return the number in the header of the memory that carries a group's collectives."""
        health = self.groups.by_name()[name]._health
        (shared,) = (
            each
            for each in gc.get_objects()
            if isinstance(each, SharedMemory) and each.device._health is health
        )
        *_, number = struct.unpack_from("<QIIQQQ", shared._segment.memory)
        return int(number)

    def handle(self, queue: str) -> list[Any]:
        """Return handle, key and generation of a queue that this process writes."""
        writer = self._queues[queue]
        return [writer.handle.to_bytes(writer.key), writer.key, writer.handle.generation]

    def open(self, handle: bytes, key: bytes, rank: int) -> str:
        """Open a queue as a reader; return how that fails."""
        try:
            QueueReader.open(handle, key, rank, 1.0).close()
        except CommError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def read_from_outside(self, handle: bytes, key: bytes) -> list[Any] | str:
        """Let the world group read a queue of a process outside of it; return its messages, or why it cannot."""
        try:
            end = self.groups.world.create_mq_broadcaster(0, ExternalWriter(handle, key))
        except UsageError as error:
            return str(error)
        assert isinstance(end, QueueReader)
        return [end.dequeue(TIMEOUT_S), end.dequeue(TIMEOUT_S)]

    def waiting(self, leave: Sequence[int] = ()) -> int:
        """Return how many processes wait to join."""
        return self.groups.pending_members(leave=leave)

    def see_waiting(self, count: int, leave: Sequence[int] = ()) -> None:
        """Return once so many processes wait to join."""
        wait_until(lambda: self.waiting(leave) == count, f"{count} processes that join", TIMEOUT_S, 0.01)

    def refused(self, join: int, leave: Sequence[int] = (), rule: str = "replicas") -> str:
        """Plan a change that is refused; return the reason."""
        try:
            self.groups.prepare(leave=leave, join=join, layout=rule_of(rule), timeout_s=TIMEOUT_S)
        except DisagreementError as error:
            return str(error).partition(": ")[2]
        raise AssertionError(rule)

    def exchange(self, leave: list[int], join: int, rule: str = "replicas") -> list[Any]:
        """Go over to other members as planned. Rank 0 asks whether they wait, and tells the others."""
        if self.groups.world.rank == 0:
            wait_until(lambda: self.waiting(leave) >= join, "processes that join", TIMEOUT_S, 0.01)
        self.groups.world.barrier()
        plan = self.groups.prepare(leave=leave, join=join, layout=rule_of(rule), timeout_s=TIMEOUT_S)
        self._groups = plan.commit()
        return [] if self._groups is None else self.said()

    def holds(self) -> list[int]:
        """Return the numbers of descriptors, of threads and of Python's objects, and the resident memory in KiB."""
        gc.collect()
        status = Path("/proc/self/status").read_text()
        resident = int(status.partition("VmRSS:")[2].split()[0])
        tasks = len(os.listdir("/proc/self/task"))
        threads = max(tasks, threading.active_count())
        return [len(os.listdir("/proc/self/fd")), threads, len(gc.get_objects()), resident]

    def end(self) -> None:
        """Leave everything."""
        groups, self._groups = self._groups, None
        self._queues.clear()
        if groups is not None:
            groups.destroy()
        if self._has_world:
            destroy_distributed_environment()


def serve(rank: int, world_size: int, directory: Path) -> None:
    """Do the steps that the test asks for, until it asks for `end`. A function for a `RankProcess`."""
    del world_size
    member = Member(directory)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(str(directory / "control"))
        send(channel, {"number": rank})
        while (step := receive(channel)) is not None:
            do: Callable[..., Any] = getattr(member, step["step"])
            send(channel, {"value": do(*step["args"])})
            if step["step"] == "end":
                return


def _switches(status: Path) -> int:
    return int(
        status.read_text()
        .partition("nonvoluntary_ctxt_switches")[0]
        .rpartition("voluntary_ctxt_switches:")[2]
    )


# --- the test's side ----------------------------------------------------------------------------------------------


class Crowd:
    """Members, by a number that each process keeps. A context manager, which kills those that are left."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._control = socket.socket(socket.AF_UNIX)
        self._control.bind(str(self.directory / "control"))
        self._control.listen()
        self._control.settimeout(TIMEOUT_S)
        self._processes: dict[int, RankProcess] = {}
        self._channels: dict[int, socket.socket] = {}
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes.values():
            process.release()
        for channel in self._channels.values():
            channel.close()
        self._control.close()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def pids(self) -> dict[int, int]:
        """The process ids of the members that are left."""
        return {number: process.pid for number, process in self._processes.items()}

    def spawn(self) -> int:
        """Start a process; return its number."""
        number, self._count = self._count, self._count + 1
        process = RankProcess(number, self.directory, {}, fresh=False, brief=True)
        self._processes[number] = process
        job = {"target": f"{__name__}:serve", "rank": number, "world_size": 0, "args": []}
        job |= {"directory": str(self.directory), "check_leaks": True, "compiles": False}
        send(process.channel, job)
        channel, _ = self._control.accept()
        channel.settimeout(2 * TIMEOUT_S)
        said = receive(channel)
        assert said == {"number": number}
        self._channels[number] = channel
        return number

    def tell(self, number: int, step: str, *args: Any) -> None:
        """Ask a member for a step; `answer` has its result."""
        send(self._channels[number], {"step": step, "args": list(args)})

    def answer(self, number: int) -> Any:
        """Return the result of a member's step; raise an error with its traceback if it failed."""
        try:
            said = receive(self._channels[number])
        except TimeoutError:
            raise AssertionError(f"member {number} hangs:\n{self._processes[number].dump_stacks()}") from None
        if said is None:
            raise AssertionError(f"member {number} failed: {self._failure(number)}")
        return said["value"]

    def _failure(self, number: int) -> str:
        process = self._processes[number]
        process.channel.settimeout(TIMEOUT_S)
        said = receive(process.channel)
        return process.output() if said is None else str(said.get("failure", said))

    def ask(self, numbers: Collection[int], step: str, *args: Any) -> list[Any]:
        """Ask members for a step, at the same time; return their results in this order."""
        for number in numbers:
            self.tell(number, step, *args)
        found, failures = [], []
        for number in numbers:
            try:
                found.append(self.answer(number))
            except AssertionError as error:
                failures.append(str(error))
        assert not failures, "\n".join(failures)
        return found

    def has_answered(self, number: int) -> bool:
        """Return whether a member has ended its step."""
        return bool(select.select([self._channels[number]], [], [], 0.0)[0])

    def has_died(self, number: int) -> bool:
        """Return whether a member has died by itself."""
        return self._processes[number].wait(time.monotonic())

    def stop(self, number: int) -> None:
        """Stop a member, as a debugger does."""
        os.kill(self._processes[number].pid, signal.SIGSTOP)
        state = Path(f"/proc/{self._processes[number].pid}/stat")
        wait_until(lambda: state.read_text().rpartition(") ")[2].startswith("T"), "a member to stop")

    def see_asleep(self, number: int) -> None:
        """Return once a member has slept in the step that it was asked for; it must be one that waits."""
        assert not self.has_answered(number)
        status = Path(f"/proc/{self._processes[number].pid}/status")
        for _ in range(3):
            before = _switches(status)
            wait_until(lambda before=before: _switches(status) > before, "a member that waits")  # type: ignore[misc]

    def resume(self, number: int) -> None:
        """Let a member that was stopped run again."""
        os.kill(self._processes[number].pid, signal.SIGCONT)

    def kill(self, number: int) -> None:
        """Kill a member; release it once the others need not see it end any more."""
        os.kill(self._processes[number].pid, signal.SIGKILL)
        self.bury(number)

    def bury(self, number: int) -> None:
        """Release a member that is dead or about to die."""
        self._channels.pop(number).close()
        assert self._processes[number].wait(time.monotonic() + TIMEOUT_S)
        self._processes.pop(number).release()

    def end(self, numbers: Collection[int]) -> None:
        """End members; what one has left behind is an error."""
        self.ask(numbers, "end")
        for number in numbers:
            process = self._processes.pop(number)
            process.channel.settimeout(TIMEOUT_S)
            said = receive(process.channel)
            assert said == {"value": None}, said
            process.channel.close()
            assert process.wait(time.monotonic() + TIMEOUT_S), process.dump_stacks()
            assert process.status == 0, process.output()
            process.release()
            self._channels.pop(number).close()

    def files(self) -> list[str]:
        """Return the files of the rendezvous, without the random part of their names."""
        store = self.directory / "store"
        found = [each.relative_to(store) for each in store.rglob("*") if each.is_file()]
        return sorted(str(each) for each in found)

    def store(self) -> bytes:
        """Return the store's file."""
        return next((self.directory / "store").glob("generation-*/store")).read_bytes()

    def store_bytes(self) -> int:
        """Return the size of the store's file."""
        return max(each.stat().st_size for each in (self.directory / "store").rglob("store*"))
