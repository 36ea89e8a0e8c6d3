"""The memory consistency model of PTX, as a search for executions of small programs without branches.

It is written from NVIDIA's *PTX ISA*, chapter "Memory Consistency Model" (sections 8.2 to 8.11 of versions 8.x and
9.0), and agrees with its formalization in Lustig, Sahasrabuddhe and Giroux, "A Formal Analysis of the NVIDIA PTX
Memory Consistency Model" (ASPLOS 2019, figures 4 and 7). Comments name sections of the manual.

Nothing is executed. An execution says which write each read returns (`rf`), and in which *coherence order* the writes
of each location stand. The model admits an execution unless it contradicts an axiom. What no execution shows cannot
happen on any GPU that obeys the manual, in whatever order it performs the operations.

Covered: weak and strong operations, scopes .cta, .gpu and .sys, release and acquire patterns, fences including
fence.sc, atomic additions, bar.sync, and synchronization by the stream. Not covered, as our kernels do without:
proxies other than the generic one, two virtual addresses of one location, accesses that overlap partly, `red`,
clusters.

Operations are written as in PTX: `st.relaxed.sys x 1`, `ld.acquire.gpu r x`, `atom.acq_rel.sys r x 1` (which adds),
`fence.sc.sys`, `st.weak x r+1`. `bar.sync NAME` is a barrier of a CTA. `signal NAME` and `wait NAME` are the two ends
of a synchronization by the stream (8.9.4, API synchronization). `publish NAME` and `observe NAME` are an assumption
weaker than any rule of the manual: what stands in front of the one is visible to what stands behind the other, on one
location, and nothing else follows from it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

__all__ = ["Event", "Execution", "Order", "Program", "Thread", "executions", "is_allowed"]

# A relation: the bits of row i are the events to which event i is related.
Relation = list[int]
# A coherence order of one location: pairs of writes, transitively closed.
Order = frozenset[tuple[int, int]]


class Event(NamedTuple):
    """An operation on one scalar.

    Attributes:
        thread: The number of its thread, or -1 for the write that initializes a location (8.2.6).
        kind: "ld", "st", "fence", "bar", "signal", "wait", "publish" or "observe". An `atom` is an "ld" and an "st".
        order: "weak", "relaxed", "acquire", "release", "acq_rel" or "sc".
        scope: "cta", "gpu" or "sys"; empty if weak.
        name: The location, or the name of a barrier or of a boundary.
        register: What the "ld" sets, or what the "st" adds to its value.
        value: What an "st" writes, less the register.
        text: The operation as written.
    """

    thread: int
    kind: str
    order: str = "weak"
    scope: str = ""
    name: str = ""
    register: str = ""
    value: int = 0
    text: str = ""


class Thread(NamedTuple):
    """A thread: where it runs, and its operations in program order.

    Several operations in one step are the elements of a vector: a set of operations in unspecified order (8.2.4).
    """

    gpu: int
    cta: int
    steps: Sequence[str | Sequence[str]]


@dataclass
class Program:
    """Threads and what they start from.

    Attributes:
        threads: The threads.
        initial: Values of locations that do not start as 0.
        wanted: Values of which a register must hold one; other executions are left out. A poll that is repeated only
            adds constraints, so a loop is one read with the values that end it.
    """

    threads: Sequence[Thread]
    initial: Mapping[str, int] = field(default_factory=dict)
    wanted: Mapping[str, frozenset[int]] = field(default_factory=dict)


class Execution(NamedTuple):
    """An execution that the axioms admit.

    Attributes:
        events: All events.
        rf: The write from which each read reads.
        registers: The values that were read.
        coherence: By location, every order of its writes that the axioms admit beside these reads. No axiom relates the
            orders of two locations with each other, so each may be chosen freely.
    """

    events: Sequence[Event]
    rf: Mapping[int, int]
    registers: Mapping[str, int]
    coherence: Mapping[str, Sequence[Order]]

    def last(self, location: str, order: Order) -> set[int]:
        """Return the values that a location may hold at the end: of each write that no other one follows."""
        writes = [i for i, e in enumerate(self.events) if e.kind == "st" and e.name == location]
        before = {first for first, _ in order}
        return {written(self.events[i], self.registers) for i in writes if i not in before}


def is_allowed(program: Program, outcome: Mapping[str, int]) -> bool:
    """Return whether an execution ends with an outcome: values of registers, and of locations at the end."""
    for execution in executions(program):
        at_end = {name: value for name, value in outcome.items() if name in execution.coherence}
        if any(execution.registers[name] != outcome[name] for name in outcome.keys() - at_end.keys()):
            continue
        if all(
            any(value in execution.last(name, order) for order in execution.coherence[name])
            for name, value in at_end.items()
        ):
            return True
    return False


def executions(program: Program) -> Iterator[Execution]:
    """Yield every execution of a program that the axioms admit."""
    model = Model(program)
    for base in model.fence_orders():
        yield from model.choose(base, {}, model.reads)


def parsed(text: str, thread: int) -> list[Event]:
    """Return the events of an operation."""
    code, *operands = text.split()
    kind, *qualifiers = code.split(".")
    if kind in ("bar", "signal", "wait", "publish", "observe"):
        return [Event(thread, kind, name=operands[0], text=text)]
    order, scope = qualifiers[0], qualifiers[1] if len(qualifiers) > 1 else ""
    if kind == "fence":
        return [Event(thread, kind, order, scope, text=text)]
    if kind == "ld":
        return [Event(thread, kind, order, scope, operands[1], operands[0], text=text)]
    if kind == "st":
        register, _, number = operands[1].rpartition("+")
        if not number.isdigit():
            register, number = number, "0"
        return [Event(thread, kind, order, scope, operands[0], register, int(number), text=text)]
    if kind != "atom":
        raise ValueError(text)
    register, location, number = operands
    return [
        Event(thread, "ld", order, scope, location, register, text=text),
        Event(thread, "st", order, scope, location, register, int(number), text=text),
    ]


def written(event: Event, registers: Mapping[str, int]) -> int:
    """Return the value that a write writes."""
    return event.value + (registers[event.register] if event.register else 0)


def bits(row: int) -> Iterator[int]:
    """Yield the numbers of the bits that are set."""
    while row:
        lowest = row & -row
        yield lowest.bit_length() - 1
        row ^= lowest


def join(closed: Relation, first: int, second: int) -> None:
    """Add a pair to a transitively closed relation and close it again."""
    if closed[first] >> second & 1:
        return
    reached = closed[second] | 1 << second
    for i, row in enumerate(closed):
        if i == first or row >> first & 1:
            closed[i] = row | reached


class Model:
    """The relations of a program that do not depend on the execution, and the search for executions."""

    def __init__(self, program: Program) -> None:
        """Lay out the events of a program."""
        self.program = program
        self.events: list[Event] = []
        self.steps: list[int] = []  # of each event: its place in program order
        self.rmw: list[tuple[int, int]] = []
        for number, thread in enumerate(program.threads):
            for at, step in enumerate(thread.steps):
                for text in [step] if isinstance(step, str) else step:
                    self._add(parsed(text, number), 2 * at)
        names = dict.fromkeys(event.name for event in self.events if event.kind in ("ld", "st"))
        for name in names:
            self._add(
                [Event(-1, "st", name=name, value=program.initial.get(name, 0), text=f"initial {name}")], 0
            )
        self.count = len(self.events)
        self.locations = {name: [i for i, e in enumerate(self.events) if self._at(e, name)] for name in names}
        self.writes = {
            name: [i for i in at if self.events[i].kind == "st"] for name, at in self.locations.items()
        }
        self.reads = tuple(i for i, event in enumerate(self.events) if event.kind == "ld")
        self.known: dict[tuple[object, ...], list[Order]] = {}
        self._relate()

    def _add(self, events: Sequence[Event], step: int) -> None:
        """Append one event, or the two of an atomic operation, the write behind the read."""
        at = len(self.events)
        self.events += events
        self.steps += [step + k for k in range(len(events))]
        self.rmw += pairwise(range(at, at + len(events)))

    @staticmethod
    def _at(event: Event, location: str) -> bool:
        """Return whether an event accesses a location."""
        return event.kind in ("ld", "st") and event.name == location

    def _relate(self) -> None:
        """Compute what depends on the program alone."""
        every = range(self.count)
        # 8.9.1: program order. Elements of a vector are not ordered.
        self.po = [0] * self.count
        for a in every:
            for b in every:
                same = self.events[a].thread == self.events[b].thread >= 0
                self.po[a] |= (same and self.steps[a] < self.steps[b]) << b
        # 8.7: morally strong, among events that may matter: memory operations of one location, and fences.
        self.strong = [sum(self._are_morally_strong(a, b) << b for b in every) for a in every]
        # 8.9.5: base causality order, as far as it holds in every execution.
        self.base = [0] * self.count
        for a in every:
            for b in every:
                started = self.events[a].thread < 0 <= self.events[b].thread  # 8.2.6
                if (
                    started
                    or self.po[a] >> b & 1
                    or self._synchronize_without_memory(self.events[a], self.events[b])
                ):
                    join(self.base, a, b)
        self.releases = {i: self._patterns(i, "st") for i in every if self.events[i].kind == "st"}
        self.acquires = {i: self._patterns(i, "ld") for i in self.reads}
        self.seen = [sum(self._is_seen(a, b) << b for b in every) for a in every]

    def _are_morally_strong(self, a: int, b: int) -> bool:
        """Return whether two events are morally strong relative to each other (8.7)."""
        first, second = self.events[a], self.events[b]
        memory = {event.kind for event in (first, second)} <= {"ld", "st"}
        if a == b or (memory and first.name != second.name):
            return False
        if self.po[a] >> b & 1 or self.po[b] >> a & 1:
            return True
        return self._includes(first, second) and self._includes(second, first)

    def _includes(self, event: Event, other: Event) -> bool:
        """Return whether an event is strong and its scope includes the other event's thread (8.4, 8.5)."""
        if event.order == "weak" or event.thread < 0 or other.thread < 0:
            return False
        mine, theirs = self.program.threads[event.thread], self.program.threads[other.thread]
        if event.scope == "sys":
            return True
        return mine.gpu == theirs.gpu and (event.scope == "gpu" or mine.cta == theirs.cta)

    def _synchronize_without_memory(self, a: Event, b: Event) -> bool:
        """Return whether two events synchronize as ends of a barrier or by the stream (8.9.4)."""
        if a.kind == "bar" == b.kind and a.name == b.name and a.thread != b.thread:
            mine, theirs = self.program.threads[a.thread], self.program.threads[b.thread]
            return (mine.gpu, mine.cta) == (theirs.gpu, theirs.cta)
        return a.kind == "signal" and b.kind == "wait" and a.name == b.name

    def _patterns(self, i: int, kind: str) -> list[int]:
        """Return the outer ends of the release patterns of a write, or of the acquire patterns of a read (8.8)."""
        event = self.events[i]
        wanted = ("release", "acq_rel") if kind == "st" else ("acquire", "acq_rel")
        if event.order == "weak":
            return []
        ends = [i] if event.order in wanted else []
        for k, other in enumerate(self.events):
            outside = self.po[k] >> i & 1 if kind == "st" else self.po[i] >> k & 1
            if not outside:
                continue
            is_fence = other.kind == "fence" and other.order in (*wanted, "sc")
            if is_fence or (other.kind == kind and other.name == event.name and other.order in wanted):
                ends.append(k)
        return ends

    def _is_seen(self, a: int, b: int) -> bool:
        """Return whether a program states that b sees what a did to their location."""
        if not self.events[a].name or not self._at(self.events[b], self.events[a].name):
            return False
        published = {self.events[k].name for k in bits(self.po[a]) if self.events[k].kind == "publish"}
        return any(
            self.po[k] >> b & 1 and e.kind == "observe" and e.name in published
            for k, e in enumerate(self.events)
        )

    def fence_orders(self) -> Iterator[Relation]:
        """Yield base causality order with each Fence-SC order that does not contradict it (8.9.3, 8.10.2)."""
        fences = [i for i, event in enumerate(self.events) if event.kind == "fence" and event.order == "sc"]
        pairs = [(a, b) for a in fences for b in fences if a < b and self.strong[a] >> b & 1]

        def extend(base: Relation, rest: Sequence[tuple[int, int]]) -> Iterator[Relation]:
            if any(base[fence] >> fence & 1 for fence in fences):
                return
            if not rest:
                yield base
                return
            a, b = rest[0]
            for first, second in ((a, b), (b, a)):
                longer = list(base)
                join(longer, first, second)
                yield from extend(longer, rest[1:])

        yield from extend(self.base, pairs)

    def choose(self, base: Relation, rf: dict[int, int], rest: Sequence[int]) -> Iterator[Execution]:
        """Yield the executions in which some reads read as given and the rest reads anything.

        Another read only adds to causality order. What contradicts an axiom already is therefore not pursued.
        """
        observed = self._observed(rf)
        if any(base[f] >> f & 1 for f, event in enumerate(self.events) if event.order == "sc"):
            return  # 8.10.2
        cause = self._cause(base, observed)
        orders: dict[str, list[Order]] = {}
        for name in self.locations:
            found = self._known_coherence(name, rf, cause, every=not rest)
            if not found:
                return
            orders[name] = found
        if not rest:
            registers = self._values(rf)
            if registers is not None:
                yield Execution(self.events, rf, registers, orders)
            return
        read = rest[0]
        for write in self.writes[self.events[read].name]:
            wanted = self.program.wanted.get(self.events[read].register)
            known = not self.events[write].register
            if known and wanted is not None and self.events[write].value not in wanted:
                continue
            chosen = {**rf, read: write}
            longer = list(base)
            for source, target in self._observed(chosen) - observed:
                # 8.9.4: a release pattern synchronizes with an acquire pattern.
                for first in self.releases[source]:
                    for last in self.acquires[target]:
                        if self.strong[first] >> last & 1:
                            join(longer, first, last)
            yield from self.choose(longer, chosen, rest[1:])

    def _observed(self, rf: Mapping[int, int]) -> set[tuple[int, int]]:
        """Return the observation order: which writes reach which reads, also through atomic operations (8.9.2)."""
        direct = {(write, read) for read, write in rf.items() if self.strong[write] >> read & 1}
        found = set(direct)
        while True:
            through = {(a, d) for a, b in found for c, d in direct if (b, c) in self.rmw}
            if through <= found:
                return found
            found |= through

    def _cause(self, base: Relation, observed: set[tuple[int, int]]) -> Relation:
        """Return the causality order (8.9.5). It matters between operations on one location only."""
        cause = [row | seen for row, seen in zip(base, self.seen, strict=True)]
        for write, read in observed:
            cause[write] |= base[read] | self.seen[read]
        return cause

    def _known_coherence(
        self, name: str, rf: Mapping[int, int], cause: Relation, *, every: bool
    ) -> list[Order]:
        """Return the result of `_coherence`, remembered by all that it depends on."""
        at = sum(1 << i for i in self.locations[name])
        among = tuple(cause[i] & at for i in self.locations[name])
        key = (name, tuple(rf.get(i, -1) for i in self.locations[name]), among, every)
        if key not in self.known:
            self.known[key] = self._coherence(name, rf, cause, every=every)
        return self.known[key]

    def _coherence(self, name: str, rf: Mapping[int, int], cause: Relation, *, every: bool) -> list[Order]:
        """Return the coherence orders of a location that the axioms admit beside some reads, or one if not `every`."""
        writes = self.writes[name]
        readers = [(read, rf[read]) for read in self.locations[name] if read in rf]
        if any(cause[read] >> write & 1 for read, write in readers):
            return []  # 8.10.6, 1
        order = [0] * self.count
        for a in writes:
            for b in writes:
                if cause[a] >> b & 1:  # 8.10.1
                    join(order, a, b)
        for read, write in readers:
            for other in writes:
                if other != write and cause[other] >> read & 1 and self.strong[other] >> write & 1:
                    join(
                        order, other, write
                    )  # 8.10.6, 2: the other way round is forbidden, and one must hold (8.9.6)
        pairs = [(a, b) for a in writes for b in writes if a < b and self.strong[a] >> b & 1]
        found = []
        for closed in self._oriented(order, writes, pairs):
            if self._is_consistent(name, readers, closed, cause):
                found.append(frozenset((a, b) for a in writes for b in bits(closed[a])))
                if not every:
                    break
        return found

    def _oriented(
        self, order: Relation, writes: Sequence[int], pairs: Sequence[tuple[int, int]]
    ) -> Iterator[Relation]:
        """Yield the partial orders that relate all of some pairs of writes, one way or the other (8.9.6)."""
        if any(order[write] >> write & 1 for write in writes):
            return
        rest = [(a, b) for a, b in pairs if not (order[a] >> b & 1 or order[b] >> a & 1)]
        if not rest:
            yield order
            return
        a, b = rest[0]
        for first, second in ((a, b), (b, a)):
            longer = list(order)
            join(longer, first, second)
            yield from self._oriented(longer, writes, rest[1:])

    def _is_consistent(
        self, name: str, readers: Sequence[tuple[int, int]], order: Relation, cause: Relation
    ) -> bool:
        """Return whether a coherence order agrees with the axioms of a location."""
        # 8.9.7: a read precedes the writes that follow, in coherence order, what it read.
        later = {read: order[write] for read, write in readers}
        if any(cause[w] >> read & 1 for read, row in later.items() for w in bits(row)):
            return False  # 8.10.6, 2
        for read, write in self.rmw:
            between = later.get(read, 0) & self.strong[read]
            if any(order[w] >> write & 1 and self.strong[w] >> write & 1 for w in bits(between)):
                return False  # 8.10.3
        # 8.10.5: program order and morally strong communication have no cycle.
        at = sum(1 << i for i in self.locations[name])
        path = [0] * self.count
        for i in self.locations[name]:
            reached = self.po[i] & at | (order[i] | later.get(i, 0)) & self.strong[i]
            for k in bits(reached):
                join(path, i, k)
        for read, write in readers:
            if self.strong[write] >> read & 1:
                join(path, write, read)
        return not any(path[i] >> i & 1 for i in self.locations[name])

    def _values(self, rf: Mapping[int, int]) -> dict[str, int] | None:
        """Return what was read, or None if it is unwanted or comes out of thin air (8.10.4)."""
        registers: dict[str, int] = {}
        while len(registers) < len(rf):
            ready = {
                self.events[read].register: written(self.events[write], registers)
                for read, write in rf.items()
                if not self.events[write].register or self.events[write].register in registers
            }
            if ready.keys() == registers.keys():
                return None
            registers = ready
        wanted = self.program.wanted
        return registers if all(registers[name] in wanted[name] for name in wanted) else None
