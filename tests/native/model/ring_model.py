"""The ring's protocol as a state machine, and a search through every interleaving of its steps.

A scenario has one writer, one or two readers and optionally a thread that closes the writer. The ring has a few
units, and a record takes one or two of them. A record that does not fit behind the others is put at the start of the
ring, after a skip. Every access to shared memory in `csrc/ring/ring.hpp` is a step of its own, and each unit that is
filled or copied is one too. A sleeping process continues after a wake-up or, once a peer is dead, when its slice of
time has passed. A scenario may stream records of two units: the writer publishes the header alone and then fills the
record unit by unit, and readers copy what is filled. A scenario may also announce each message, which wakes readers
although there is nothing to read yet. A thread that closes the writer first says so within the writer's process, then
waits while the writer copies and publishes, and only then stores the end.

The model leaves out: memory that is weaker than sequentially consistent (the parking protocol uses seq_cst operations
and fences, and the thread sanitizer checks the edges of the payload); that the `consumed` words are read one by one
(they only grow, and an older value means less room); how readers attach; messages in parts (each part is a record);
and the counters for statistics.

The search checks in every state that the writer overwrites nothing that a reader has still to read, and that a reader
copies no unit of another record than its next one. Where no step leads on it checks that no process sleeps although
the thing that it waits for is there, and that a reader at the end has read everything that was published.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

__all__ = ["BUGS", "NEARLY", "Outcome", "Scenario", "explore"]

State = tuple[Any, ...]

PUBLISHED, SEQUENCE, CLOSED, WORD, WAITING, MESSAGE, SEEN, LEFT, WRITER, CLOSER, FILLED = range(11)
SHUT, COPYING, CELLS = range(11, 14)
CONSUMED, PARKED, READER, READER_SEEN, NEXT, TAKEN = range(6)
FIELDS = 6
SKIP, HEADER = -1, -2
NONE_TAKEN = -1  # the reader has begun no streamed record

BUGS = (
    "readers are woken before the sequence changes",
    "the sequence is read behind the second look",
    "the waiting flag is set behind the second look",
    "consumed is published before the copy",
    "published is stored before the fill",
    "the end is looked for behind the data",
    "a skip is given back without a wake-up",
    "a close wakes the writer without changing its word",
    "room is reckoned without the skip",
    "parked flags are read before the sequence changes, and set behind the second look",
    "a stream ends without a wake-up",
    "a streamed record is given back before all of it is there",
    "units are told as filled before they are",
    "the end is stored while the writer copies",
)
NEARLY = (
    "parked flags are read before the sequence changes",
    "the parked flag is set behind the second look",
)
"""None of these bugs alone loses a wake-up: the second look and the kernel's look at the sequence both guard it."""


class Scenario(NamedTuple):
    """The events that may happen in a search.

    Attributes:
        sizes: The units of each record that the writer writes.
        units: The units of the ring.
        readers: The number of readers.
        closes: Whether the writer closes behind the last record; otherwise it stays idle.
        closer: Whether another thread may close the writer at any time.
        leaves: Whether reader 0 may leave between two records.
        lingers: Whether reader 0 may stop for ever while it holds a record.
        reader_dies: Whether reader 0 may be killed at any time.
        writer_dies: Whether the writer may be killed at any time.
        streams: Whether records of two units and more are streamed.
        announces: Whether the writer announces each message.
        bug: One of `BUGS` or `NEARLY`, or "".
    """

    sizes: tuple[int, ...]
    units: int = 4
    readers: int = 1
    closes: bool = True
    closer: bool = False
    leaves: bool = False
    lingers: bool = False
    reader_dies: bool = False
    writer_dies: bool = False
    streams: bool = False
    announces: bool = False
    bug: str = ""


class Outcome(NamedTuple):
    """The result of a search: the number of states, the error if there is one, and the steps that lead to it."""

    states: int
    problem: str
    steps: tuple[str, ...]


class ProblemError(Exception):
    """An error for a step that must not be possible."""


class Protocol:
    """The steps of all processes. A process is a slot of the state that holds (name of the next step, ...)."""

    def __init__(self, scenario: Scenario) -> None:
        """Prepare the steps of a scenario."""
        self.scenario = scenario
        self.first_reader = CELLS + scenario.units
        # Most of the bugs change the order of the steps of parking and waking.
        self.scans_first = scenario.bug in (BUGS[9], NEARLY[0])
        self.parks_late = scenario.bug in (BUGS[9], NEARLY[1])
        readers = [(f"reader {i}", self.of(i, READER)) for i in range(scenario.readers)]
        self.slots = [("writer", WRITER), ("closer", CLOSER), *readers]
        deaths = (
            (scenario.reader_dies, self.of(0, READER), "reader 0"),
            (scenario.writer_dies, WRITER, "writer"),
        )
        self.mortal = [(f"{name} dies", slot) for is_mortal, slot, name in deaths if is_mortal]
        self.places = {name[3:]: getattr(self, name) for name in dir(self) if name.startswith("at_")}

    def start(self) -> State:
        """Return the state before the first step."""
        closer = ("may_close",) if self.scenario.closer else ("done",)
        reader = (0, 0, ("look",), 0, 1, NONE_TAKEN)
        writer = (0, 0, 0, 0, 0, 1, 0, 0, ("begin",), closer, 0, 0, 0)
        return writer + (0,) * self.scenario.units + reader * self.scenario.readers

    def of(self, reader: int, field: int) -> int:
        """Return the index of a reader's field in the state."""
        return self.first_reader + reader * FIELDS + field

    def has(self, bug: int) -> bool:
        """Return whether the scenario has this bug of `BUGS`."""
        return self.scenario.bug == BUGS[bug]

    def successors(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the process of every step that is possible, or the death of one, and the state after it."""
        for name, slot in self.slots:
            for changes in self.places[state[slot][0]](state, slot):
                yield name, changed(state, changes)
        for name, slot in self.mortal:
            if state[slot][0] not in ("dead", "done"):
                yield name, changed(state, {slot: ("dead",)})

    def step(self, name: str, state: State) -> str:
        """Return the text of a step from `state` that `successors` has named."""
        slot = dict(self.slots).get(name)
        return name if slot is None else f"{name}: {' '.join(map(str, state[slot]))}"

    # ---------------------------------------------------------------- shared words

    def needed(self, state: State) -> int:
        """Return the units that the writer looks for: those of the present record, and of a skip before it."""
        return int(self.scenario.sizes[state[MESSAGE] - 1]) if self.has(8) else self.filled(state)

    def has_room(self, state: State) -> bool:
        """Return whether every reader, also one that is gone, has made room for the present record."""
        slowest = min(state[self.of(i, CONSUMED)] for i in range(self.scenario.readers))
        return bool(self.needed(state) + state[PUBLISHED] - slowest <= self.scenario.units)

    def gone(self, state: State) -> bool:
        """Return whether a reader has left or died."""
        return self.left(state) or state[self.of(0, READER)] == ("dead",)

    def left(self, state: State) -> bool:
        """Return whether reader 0 has said that it leaves. No other reader may leave."""
        return bool(state[LEFT])

    def has_data(self, state: State, slot: int) -> bool:
        """Return whether there is a record for the reader."""
        return bool(state[PUBLISHED] != state[slot - READER + CONSUMED])

    def is_streamed(self, message: int) -> bool:
        """Return whether a record is published before it is filled. The record's header says this too."""
        return self.scenario.streams and self.scenario.sizes[message - 1] > 1

    def available(self, state: State, slot: int) -> int:
        """Return how many units of the reader's next record, a streamed one, are filled."""
        filled = state[FILLED] - state[slot - READER]
        return int(min(max(filled, 0), self.size_of(state, slot)))

    def is_ready(self, state: State, slot: int) -> bool:
        """Return whether the reader can go on: there is a record, or more of the record that it has begun."""
        taken = state[slot + 3]
        return self.has_data(state, slot) if taken == NONE_TAKEN else self.available(state, slot) > taken

    # ---------------------------------------------------------------- writer

    def at_begin(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if state[SHUT]:
            yield {slot: ("done",)}
        elif state[MESSAGE] > len(self.scenario.sizes):
            yield {slot: ("close", ("done",)) if self.scenario.closes else ("done",)}
        elif self.scenario.announces and state[slot] == ("begin",):
            yield {slot: ("announce", 0)}
        elif self.has_room(state):
            fill = ("head", 0) if self.is_streamed(state[MESSAGE]) else ("fill", 0)
            yield {slot: ("publish",) if self.has(4) else fill, COPYING: 1}
        elif self.gone(state):
            yield {slot: ("close", ("done",))}
        else:
            yield {slot: ("recheck",) if self.has(2) else ("flag",), SEEN: state[WORD]}

    def at_flag(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("sleep_room",) if self.has(2) else ("recheck",), WAITING: 1}

    def at_recheck(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if state[CLOSED] or self.left(state) or self.has_room(state):
            yield {slot: ("unflag",)}
        else:
            yield {slot: ("flag",) if self.has(2) else ("sleep_room",)}

    def at_sleep_room(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("asleep_room",) if state[WORD] == state[SEEN] else ("unflag",)}

    def at_asleep_room(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if any(state[self.of(i, READER)][0] == "dead" for i in range(self.scenario.readers)):
            yield {slot: ("unflag",)}

    def at_unflag(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("begin", "once more"), WAITING: 0}

    def at_announce(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Look for parked readers, and wake them although nothing is published."""
        reader = state[slot][1]
        if state[self.of(reader, PARKED)]:
            yield {slot: ("hint",)}
        elif reader + 1 < self.scenario.readers:
            yield {slot: ("announce", reader + 1)}
        else:
            yield {slot: ("begin", "announced")}

    def at_hint(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("wake", ("begin", "announced")), SEQUENCE: state[SEQUENCE] + 1}

    def at_head(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Write the part of a streamed record that is published first: the skip before it and its header."""
        done, skipped = state[slot][1], self.filled(state) - self.scenario.sizes[state[MESSAGE] - 1]
        cell = self.cell_to_fill(state, state[PUBLISHED] + done)
        yield {
            cell: SKIP if done < skipped else HEADER,
            slot: ("head", done + 1) if done < skipped else ("open",),
        }

    def at_open(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        size = self.scenario.sizes[state[MESSAGE] - 1]
        yield {slot: ("publish_stream",), FILLED: state[PUBLISHED] + self.filled(state) - size}

    def at_publish_stream(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        first = ("tell", 1) if self.has(12) else ("pour", 1)
        yield {slot: ("bump", first), PUBLISHED: state[PUBLISHED] + self.filled(state)}

    def at_pour(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Fill one unit of a streamed record, which is published already."""
        number, size = state[slot][1], self.scenario.sizes[state[MESSAGE] - 1]
        # PUBLISHED is already behind the record. The check is therefore that of the record's own room.
        cell = self.cell_to_fill(state, state[PUBLISHED] - size + number - 1)
        told = self.behind_unit(number, size, "tell")
        yield {cell: state[MESSAGE], slot: told if self.has(12) else ("tell", number)}

    def at_tell(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        number, size = state[slot][1], self.scenario.sizes[state[MESSAGE] - 1]
        then = ("pour", number) if self.has(12) else self.behind_unit(number, size, "pour")
        yield {slot: then, FILLED: state[PUBLISHED] - size + number}

    def behind_unit(self, number: int, size: int, first: str) -> tuple[Any, ...]:
        """Return the writer's next step after it has filled and told unit `number` of a streamed record."""
        if number < size:
            return (first, number + 1)
        return ("next",) if self.has(10) else ("bump", ("next",))

    def cell_to_fill(self, state: State, position: int) -> int:
        """Return the cell at a position for the writer to fill; raise if a reader has not given the cell back."""
        for reader in range(self.scenario.readers):
            if position - state[self.of(reader, CONSUMED)] >= self.scenario.units:
                raise ProblemError(f"the writer overwrites what reader {reader} has still to read")
        return int(CELLS + position % self.scenario.units)

    def at_fill(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        done = state[slot][1]
        size = self.scenario.sizes[state[MESSAGE] - 1]
        needed = self.filled(state)
        cell = self.cell_to_fill(state, state[PUBLISHED] + done)
        content = SKIP if done < needed - size else state[MESSAGE]
        last = done + 1 == needed
        ready = ("bump", ("next",)) if self.has(4) else ("publish",)
        yield {cell: content, slot: ready if last else ("fill", done + 1)}

    def filled(self, state: State) -> int:
        """Return the units that are filled for the present record, with the skip before it."""
        at, size = state[PUBLISHED] % self.scenario.units, self.scenario.sizes[state[MESSAGE] - 1]
        return int(size if at + size <= self.scenario.units else self.scenario.units - at + size)

    def at_publish(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if self.has(4):
            # The fill goes on at the old position, after the message there was published.
            yield {slot: ("late_fill", 0, state[PUBLISHED]), PUBLISHED: state[PUBLISHED] + self.filled(state)}
        else:
            yield {slot: ("bump", ("next",)), PUBLISHED: state[PUBLISHED] + self.filled(state)}

    def at_late_fill(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        _, done, start = state[slot]
        before = changed(state, {PUBLISHED: start, slot: ("fill", done)})
        for changes in self.at_fill(before, slot):
            place = changes[slot]
            changes[slot] = ("late_fill", done + 1, start) if place[0] == "fill" else place
            yield changes

    def at_next(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Count the message. If another thread has closed the writer meanwhile, the next step sees that."""
        yield {slot: ("begin",), MESSAGE: state[MESSAGE] + 1, COPYING: 0}

    # ---------------------------------------------------------------- waking and closing

    def at_may_close(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("drain",), SHUT: 1}

    def at_drain(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Wait until the writer copies nothing."""
        if not state[COPYING] or self.has(13):
            yield {slot: ("close", ("done",))}

    def at_close(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        then = state[slot][1]
        yield {slot: ("bump", ("rouse" if self.has(7) else "waiting", then)), CLOSED: 1}

    def at_bump(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        then = ("scan", 0, state[slot][1])
        if self.scans_first or self.has(0):
            yield {slot: then}
        else:
            yield {slot: then, SEQUENCE: state[SEQUENCE] + 1}

    def at_scan(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        _, reader, then = state[slot]
        late = ("late_bump", then) if self.scans_first or self.has(0) else then
        if state[self.of(reader, PARKED)]:
            yield {slot: ("late_bump", ("wake", then)) if self.scans_first else ("wake", late)}
        elif reader + 1 < self.scenario.readers:
            yield {slot: ("scan", reader + 1, then)}
        else:
            yield {slot: late}

    def at_late_bump(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: state[slot][1], SEQUENCE: state[SEQUENCE] + 1}

    def at_wake(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        slots = [self.of(i, READER) for i in range(self.scenario.readers)]
        yield {slot: state[slot][1]} | {each: ("unpark",) for each in slots if state[each] == ("asleep",)}

    def at_waiting(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("word", state[slot][1]) if state[WAITING] else state[slot][1]}

    def at_word(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("rouse", state[slot][1]), WORD: state[WORD] + 1}

    def at_rouse(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        woken = {WRITER: ("unflag",)} if state[WRITER] == ("asleep_room",) else {}
        yield {slot: state[slot][1]} | woken

    # ---------------------------------------------------------------- readers

    def at_look(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Look for the end, then for data; a reader without either parks."""
        if self.has(5):
            yield {slot: ("take",) if self.has_data(state, slot) else ("look_end",)}
        else:
            yield {slot: ("look_data", state[CLOSED])}
        if self.scenario.leaves and slot == self.of(0, READER):
            yield {slot: ("bump", ("waiting", ("left",))), LEFT: 1}

    def at_look_end(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("ended",) if state[CLOSED] else ("park",)}

    def at_look_data(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if self.has_data(state, slot):
            yield {slot: ("take",)}
        elif state[slot][1] or state[WRITER] == ("dead",):
            yield {slot: ("ended",)}
        else:
            yield {slot: ("park",)}

    def at_park(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        then = ("second_look",) if self.parks_late else ("set_parked",)
        yield {slot: then, slot + 1: state[SEQUENCE]}

    def at_set_parked(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("sleep",) if self.parks_late else ("second_look",), slot - 1: 1}

    def at_second_look(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if self.is_ready(state, slot) or state[CLOSED]:
            yield {slot: ("unpark",)}
        elif self.has(1):
            yield {slot: ("late_read",)}
        else:
            yield {slot: ("set_parked",) if self.parks_late else ("sleep",)}

    def at_late_read(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("sleep",), slot + 1: state[SEQUENCE]}

    def at_sleep(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("asleep",) if state[SEQUENCE] == state[slot + 1] else ("unpark",)}

    def at_asleep(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if state[WRITER] == ("dead",):
            yield {slot: ("unpark",)}

    def at_unpark(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield {slot: ("look",), slot - 1: 0}

    def at_take(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        units, consumed = self.scenario.units, state[slot - READER]
        if state[CELLS + consumed % units] == SKIP:
            behind = consumed + units - consumed % units
            streams = self.is_streamed(state[slot + 2])
            then: tuple[Any, ...] = ("stream",) if streams else ("copy", 0)
            yield {
                slot: then if self.has(6) else ("waiting", then),
                slot - READER: behind,
                slot + 3: 0 if streams else NONE_TAKEN,
            }
        elif self.is_streamed(state[slot + 2]):
            yield {slot: ("stream",), slot + 3: max(state[slot + 3], 0)}
        elif self.has(3):
            size = self.size_of(state, slot)
            yield {slot: ("waiting", ("late_copy", 0, consumed)), slot - READER: consumed + size}
        else:
            yield {slot: ("copy", 0)}

    def size_of(self, state: State, slot: int) -> int:
        """Return the units of the reader's next record."""
        return int(self.scenario.sizes[state[slot + 2] - 1])

    def at_copy(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        done, consumed, size = state[slot][1], state[slot - READER], self.size_of(state, slot)
        if state[CELLS + (consumed + done) % self.scenario.units] != state[slot + 2]:
            raise ProblemError("a reader copies what is not of its next record")
        if done + 1 < size:
            yield {slot: ("copy", done + 1)}
        else:
            yield {
                slot: ("waiting", ("look",)),
                slot - READER: consumed + size,
                slot + 2: state[slot + 2] + 1,
            }
        if self.scenario.lingers and slot == self.of(0, READER):
            yield {slot: ("lingers",)}

    def at_late_copy(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        _, done, start = state[slot]
        if state[CELLS + (start + done) % self.scenario.units] != state[slot + 2]:
            raise ProblemError("a reader copies what is not of its next record")
        if done + 1 < self.size_of(state, slot):
            yield {slot: ("late_copy", done + 1, start)}
        else:
            yield {slot: ("look",), slot + 2: state[slot + 2] + 1}

    def at_stream(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Look how much of a streamed record is filled. A reader that has copied all of that parks."""
        taken, consumed = state[slot + 3], state[slot - READER]
        if self.available(state, slot) > taken:
            if self.has(11):
                behind = consumed + self.size_of(state, slot)
                yield {slot: ("waiting", ("late_stream", 0, consumed)), slot - READER: behind}
            else:
                yield {slot: ("draw", self.available(state, slot))}
        else:
            yield {slot: ("ended",) if state[WRITER] == ("dead",) else ("park",)}

    def at_draw(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        """Copy one of the units that were filled. After the last unit of the record give the record back."""
        available, taken, consumed = state[slot][1], state[slot + 3], state[slot - READER]
        if state[CELLS + (consumed + taken) % self.scenario.units] != state[slot + 2]:
            raise ProblemError("a reader copies what is not of its next record")
        if taken + 1 == self.size_of(state, slot):
            yield {
                slot: ("waiting", ("look",)),
                slot - READER: consumed + taken + 1,
                slot + 2: state[slot + 2] + 1,
                slot + 3: NONE_TAKEN,
            }
        else:
            then = ("draw", available) if taken + 1 < available else ("stream",)
            yield {slot: then, slot + 3: taken + 1}

    def at_late_stream(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        _, done, start = state[slot]
        if state[FILLED] - start <= done:
            return
        if state[CELLS + (start + done) % self.scenario.units] != state[slot + 2]:
            raise ProblemError("a reader copies what is not of its next record")
        if done + 1 < self.size_of(state, slot):
            yield {slot: ("late_stream", done + 1, start)}
        else:
            yield {slot: ("look",), slot + 2: state[slot + 2] + 1, slot + 3: NONE_TAKEN}

    def at_ended(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        if state[slot + 2] < state[MESSAGE]:
            raise ProblemError("a reader has reached the end before everything was read")
        yield from ()

    # ---------------------------------------------------------------- the ends of processes

    def at_done(self, state: State, slot: int) -> Iterator[dict[int, Any]]:
        yield from ()

    at_left = at_dead = at_lingers = at_done

    def stuck(self, state: State) -> str:
        """Return what is wrong with a state from which no step leads on, or ""."""
        if state[WRITER] == ("asleep_room",) and (state[CLOSED] or self.has_room(state) or self.gone(state)):
            return "the writer sleeps though it could go on"
        for reader in range(self.scenario.readers):
            slot = self.of(reader, READER)
            if state[slot] == ("asleep",) and (self.is_ready(state, slot) or state[CLOSED]):
                return f"reader {reader} sleeps though it could go on"
        places = {state[self.of(i, READER)][0] for i in range(self.scenario.readers)}
        idle = places <= {"asleep", "ended", "left", "dead", "lingers"}
        if not idle or state[WRITER][0] not in ("done", "dead", "asleep_room"):
            return "deadlock"
        if state[WRITER] == ("asleep_room",) and "lingers" not in places:
            return "deadlock"
        return ""


def changed(state: State, changes: dict[int, Any]) -> State:
    """Return a copy of `state` in which some slots are replaced."""
    copy = list(state)
    for slot, value in changes.items():
        copy[slot] = value
    return tuple(copy)


def explore(scenario: Scenario, most: int = 2_000_000) -> Outcome:
    """Visit every state that can be reached, in breadth-first order, until one is wrong."""
    protocol = Protocol(scenario)
    start = protocol.start()
    came: dict[State, tuple[State, str] | None] = {start: None}
    waiting = deque([start])
    while waiting:
        state = waiting.popleft()
        is_stuck = True
        try:
            for name, following in protocol.successors(state):
                is_stuck = is_stuck and name.endswith("dies")
                if following not in came:
                    came[following] = (state, name)
                    waiting.append(following)
            problem = protocol.stuck(state) if is_stuck else ""
        except ProblemError as error:
            problem = str(error)
        if problem:
            return Outcome(len(came), problem, steps_to(state, came, protocol))
        if len(came) > most:
            raise RuntimeError(f"more than {most} states")
    return Outcome(len(came), "", ())


def steps_to(
    state: State, came: dict[State, tuple[State, str] | None], protocol: Protocol
) -> tuple[str, ...]:
    """Return the steps that led to a state."""
    steps = []
    while (before := came[state]) is not None:
        state, name = before
        steps.append(protocol.step(name, state))
    return tuple(reversed(steps))
