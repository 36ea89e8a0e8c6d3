"""Define what a status page says, as frozen records with names and times in place of codes and ticks."""

from __future__ import annotations

import msgspec

__all__ = ["Clock", "Counters", "Group", "Lane", "Page", "Queue", "Record"]


class Counters(msgspec.Struct, frozen=True):
    """Counts the calls of one kind in one lane. It only ever grows while its group exists.

    Attributes:
        call: Name of the calls.
        algorithm: What carries them.
        calls: How many have ended.
        errors: How many of these with an error.
        nbytes: Bytes that this rank brought.
        waited_ns: How long this rank waited for the last rank to come, in all.
        last: Calls to which this rank came last.
        late_ns: By how much it was later than the last but one rank in these calls, in all.
        sleeps: How often it slept.
        polled_ns: Polled in waits of more than some microseconds.
        waits: Histogram of the waits; bucket i is below `layout.FIRST_BUCKET_NS * 2**i` ns, the last has no limit.
    """

    call: str
    algorithm: str
    calls: int
    errors: int
    nbytes: int
    waited_ns: int
    last: int
    late_ns: int
    sleeps: int
    polled_ns: int
    waits: tuple[int, ...]


class Lane(msgspec.Struct, frozen=True):
    """One plane of a group, and its last call, which goes on unless the state is "idle".

    Attributes:
        plane: Such as "device" or "host".
        algorithm: What carries its calls.
        state: "idle", "computing", "posted" (it has come and waits) or "asleep".
        call: Name of the last call; empty if there was none.
        number: Its number in the plane; 0 for a call between two ranks.
        count: Elements or bytes.
        nbytes: Bytes that this rank brings.
        root: Place in the group of the root, or of the other rank; None if there is none.
        dtype: Code of device_comm, or 0.
        op: Code of the reduction.
        detail: Hash of what else must be equal on all ranks.
        begin_ns: When it began, on CLOCK_MONOTONIC.
        end_ns: When the last call that has ended did; 0 if none has.
        is_torn: Whether the record was being written for the whole time of the look.
        counters: One for each kind of call.
    """

    plane: str
    algorithm: str
    state: str
    call: str
    number: int
    count: int
    nbytes: int
    root: int | None
    dtype: int
    op: int
    detail: int
    begin_ns: int
    end_ns: int
    is_torn: bool
    counters: tuple[Counters, ...]


class Group(msgspec.Struct, frozen=True):
    """A group of the process.

    Attributes:
        name: Its unique name.
        state: "forming", "usable", "broken" or "left".
        epoch: How often its members have changed.
        place: This process's place in the group.
        world_size: How many members there are.
        ranks: The global ranks of the first 256 members, in group order.
        created_ns: On CLOCK_MONOTONIC.
        cause: Why it is broken, or empty.
        is_torn: As in `Lane`.
        lanes: Its planes.
    """

    name: str
    state: str
    epoch: int
    place: int
    world_size: int
    ranks: tuple[int, ...]
    created_ns: int
    cause: str
    is_torn: bool
    lanes: tuple[Lane, ...]


class Queue(msgspec.Struct, frozen=True):
    """One end of a queue.

    Attributes:
        name: Its name.
        inode: Of the memfd that holds the ring, which tells ends of one queue.
        offset: Of the ring in it.
        reader: This end's place among the readers; -1 for the writer.
        descriptor: Number of the memfd in the process.
    """

    name: str
    inode: int
    offset: int
    reader: int
    descriptor: int


class Record(msgspec.Struct, frozen=True):
    """A call that has ended.

    Attributes:
        index: Counts the calls of the process, from 1.
        group: Name of its group.
        epoch: Of the group.
        plane: Such as "device".
        algorithm: What carried it.
        call: Its name.
        number: In the plane.
        count: Elements or bytes.
        dtype: Code of device_comm, or 0.
        op: Code of the reduction.
        root: Place of the root, or of the other rank; None if there is none.
        detail: Folded hash of what else must be equal on all ranks.
        begin_ns: When this rank came, on CLOCK_MONOTONIC.
        end_ns: When it ended here.
        last: Place of the rank that came last; None if that is not known.
        waited_ns: How long this rank waited for the last one.
        late_ns: By how much the last rank was later than the last but one.
        outcome: "done", "failed" or "disagreed".
    """

    index: int
    group: str
    epoch: int
    plane: str
    algorithm: str
    call: str
    number: int
    count: int
    dtype: int
    op: int
    root: int | None
    detail: int
    begin_ns: int
    end_ns: int
    last: int | None
    waited_ns: int
    late_ns: int
    outcome: str


class Clock(msgspec.Struct, frozen=True):
    """How a page's times were made of ticks, which all processes of a host count alike.

    Attributes:
        source: What ticks: 0 CLOCK_MONOTONIC in ns, 1 the x86 timestamp counter, 2 CNTVCT_EL0.
        ticks: The ticks at `monotonic_ns`.
        monotonic_ns: CLOCK_MONOTONIC.
        rate: Nanoseconds per tick, times 2^32. Each process measures it, and two differ by some parts in a million.
    """

    source: int = 0
    ticks: int = 0
    monotonic_ns: int = 0
    rate: int = 1 << 32


class Page(msgspec.Struct, frozen=True):
    """What one process says.

    Attributes:
        pid: The process, in its own PID namespace.
        start_ticks: Its start, in clock ticks since boot; it tells processes with the same pid apart.
        pid_namespace: Inode.
        time_namespace: Inode; 0 on kernels without them.
        boot_id: Of the kernel.
        hostname: For people.
        rank: In the world, or None.
        world_size: Of the world, or 0.
        stack_signal: Signal that makes the process write its stacks, or 0.
        refused: Groups, queues and lanes for which the page had no room.
        created_ns: When the page was made, on CLOCK_MONOTONIC.
        realtime_ns: CLOCK_REALTIME minus CLOCK_MONOTONIC then.
        calls: Calls recorded so far; `records` holds the last 4,096 of them.
        groups: In the order of their creation.
        queues: Ends of queues.
        records: In the order of their ends.
        clock: Of the times of lanes and records.
    """

    pid: int
    start_ticks: int
    pid_namespace: int
    time_namespace: int
    boot_id: str
    hostname: str
    rank: int | None
    world_size: int
    stack_signal: int
    refused: int
    created_ns: int
    realtime_ns: int
    calls: int
    groups: tuple[Group, ...]
    queues: tuple[Queue, ...]
    records: tuple[Record, ...]
    clock: Clock = Clock()
