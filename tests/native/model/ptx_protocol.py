"""The push protocol of the custom all-reduce on CUDA as a program for the model of PTX.

DESIGN.md of device_comm, "Custom all-reduce on CUDA", describes it. A rank is a GPU with one stream. A vector has two
words or one instead of four. A word of an arena is called OWNER.PHASE.SLOT.VECTOR.WORD.

All ranks' words have one address each here, although each process maps them elsewhere: the manual defines aliases
(8.2.2) within one address space, and no user of CUDA IPC fences between the addresses of two processes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from tests.native.model.ptx_model import Execution, Order, Program, Thread, executions

__all__ = ["BOUNDARIES", "FENCE", "Grid", "Push", "Round", "joined"]

# What the boundary between two grids of one stream is taken to give from where `wait_for_the_stream` stands: at the
# start of the grid, or at griddepcontrol.wait.
#   nothing    No order: programmatic dependent launch without griddepcontrol.wait.
#   visible    What earlier grids did to a location is visible to later operations on it; nothing else follows.
#              The weakest reading of what the manual says of griddepcontrol.wait: all memory operations of the
#              prerequisite grids "are performed and made visible to the current grid".
#   continued  As "visible", and a thread goes on in program order as the thread of that index in the next grid.
#   stream     All of a grid precedes all of the next in base causality order: the manual, 8.9.4, "API synchronization".
#              Threads of different grids are different threads, so program order (8.9.1) ends with the grid.
#   both       "stream" and "continued" together.
#   fenced     As "stream", and every thread begins and ends with fence.acq_rel.sys. No document says so.
BOUNDARIES = ("nothing", "visible", "continued", "stream", "both", "fenced")

FENCE = "fence.acq_rel.sys"
# The sentinel. So that clears can be told apart, that of launch e writes IDLE + e; all are one value to the protocol.
IDLE = 100

# The vectors that a launch pushes before it polls for them, each with the index of the thread that handles it.
Round = Mapping[int, int]
# The operations of a thread; a step of several is a vector.
Steps = Sequence[str | Sequence[str]]


class Grid(NamedTuple):
    """A grid: the operations of each thread, by index, in front of its wait for the stream and behind it."""

    early: Mapping[int, Steps]
    late: Mapping[int, Steps]


def joined(rank: int, grids: Sequence[Grid], boundary: str) -> list[Thread]:
    """Return the threads of a rank's grids with the boundaries between them; each thread has a CTA of its own."""
    threads: dict[tuple[int, int], Thread] = {}
    for number, grid in enumerate(grids):
        for index, late in grid.late.items():
            key = (-1 if boundary in ("continued", "both") else number, index)
            steps = list(threads[key].steps) if key in threads else []
            steps += grid.early.get(index, [])
            if boundary in ("visible", "continued"):
                steps += [f"observe {rank}.{earlier}" for earlier in range(number)]
                steps += [*late, f"publish {rank}.{number}"]
            elif boundary in ("stream", "both"):
                steps += [f"wait {rank}.{number - 1}", *late, f"signal {rank}.{number}"]
            elif boundary == "fenced":
                steps += [f"wait {rank}.{number - 1}", FENCE, *late, FENCE, f"signal {rank}.{number}"]
            else:
                steps += late
            threads[key] = Thread(rank, index, steps)
    return list(threads.values())


@dataclass(frozen=True)
class Push:
    """Launches of the push protocol on all ranks, and how each of its parts is done.

    Polls of the last launch's last round may return anything, and nothing is cleared behind them. So the model also
    has the executions in which a push is lost and its receiver would wait for ever.

    Attributes:
        boundary: One of BOUNDARIES.
        entry: The fence behind the wait for the stream, or "".
        leave: The fence behind a thread's last poll, or "".
        entry_of, leave_of: "every" or "first": which threads have that fence. The first is the thread of vector 0.
        push, poll, clear: The operation on a word. An empty `clear` leaves it out.
        first_push, first_poll: The same for vector 0, if it differs.
        phases: The number of arenas.
        input: Where the input is loaded: "behind the fence", "before the fence" or "before the wait".
        ranks: The number of ranks.
        launches: The rounds of each launch. Two-shot has a round for shards and one for results.
        slots_move: Whether slots lie elsewhere in every other launch of an arena, as they do when sizes change.
        width: The number of words of a vector.
    """

    boundary: str = "stream"
    entry: str = FENCE
    leave: str = ""
    entry_of: str = "every"
    leave_of: str = "every"
    push: str = "st.relaxed.sys"
    poll: str = "ld.relaxed.sys"
    clear: str = "st.relaxed.sys"
    first_push: str = ""
    first_poll: str = ""
    phases: int = 2
    input: str = "before the fence"
    ranks: int = 2
    launches: Sequence[Sequence[Round]] = (({0: 0},),) * 3
    slots_move: bool = False
    width: int = 2

    def words(self, owner: int, launch: int, sender: int, vector: int) -> list[str]:
        """Return the words of a vector that a rank sends to an owner."""
        slot = [rank for rank in range(self.ranks) if rank != owner].index(sender)
        if self.slots_move and launch // 2 % 2:
            slot = self.ranks - 2 - slot
        return [f"{owner}.{launch % self.phases}.{slot}.{vector}.{word}" for word in range(self.width)]

    def grid(self, rank: int, launch: int) -> Grid:
        """Return a rank's launch. It pushes the number of the launch, counted from 1."""
        rounds = self.launches[launch]
        peers = [peer for peer in range(self.ranks) if peer != rank]
        count = 1 + max(thread for each in self.launches for one in each for thread in one.values())
        early: dict[int, Steps] = {}
        late: dict[int, Steps] = {}
        for thread in range(count):
            first = any(one.get(0) == thread for one in rounds)
            entry = [self.entry] if self.entry and (first or self.entry_of == "every") else []
            leave = [self.leave] if self.leave and (first or self.leave_of == "every") else []
            load = [f"ld.weak input.{rank}.{launch}.{thread} {rank}.input"]
            moves: list[str | Sequence[str]] = []
            for vectors in rounds:
                at_end = launch == len(self.launches) - 1 and vectors is rounds[-1]
                mine = [vector for vector, handler in vectors.items() if handler == thread]
                for vector in mine:
                    push = self.first_push if self.first_push and vector == 0 else self.push
                    words = [self.words(peer, launch, rank, vector) for peer in peers]
                    moves += [[f"{push} {word} {launch + 1}" for word in each] for each in words]
                for vector in mine:
                    poll = self.first_poll if self.first_poll and vector == 0 else self.poll
                    words = [self.words(rank, launch, peer, vector) for peer in peers]
                    moves += [[f"{poll} {launch}.{word} {word}" for word in each] for each in words]
                    if self.clear and not at_end:
                        moves += [[f"{self.clear} {word} {IDLE + launch}" for word in each] for each in words]
            early[thread] = load if self.input == "before the wait" else []
            between = [*load, *entry] if self.input == "before the fence" else [*entry, *load]
            late[thread] = [*(entry if self.input == "before the wait" else between), *moves, *leave]
        return Grid(early, late)

    def program(self) -> Program:
        """Return the program. A kernel before each launch writes its input."""
        threads = []
        for rank in range(self.ranks):
            grids = []
            for launch in range(len(self.launches)):
                grids += [Grid({}, {-1: [f"st.weak {rank}.input {launch + 1}"]}), self.grid(rank, launch)]
            threads += joined(rank, grids, self.boundary)
        polls = {
            f"{launch}.{word}"
            for launch, rounds in enumerate(self.launches)
            for rank in range(self.ranks)
            for peer in range(self.ranks)
            if peer != rank
            for number, vectors in enumerate(rounds)
            if (launch, number) != (len(self.launches) - 1, len(rounds) - 1)
            for vector in vectors
            for word in self.words(rank, launch, peer, vector)
        }
        complete = frozenset(range(1, len(self.launches) + 1))
        return Program(threads, wanted=dict.fromkeys(polls, complete))

    def failures(self) -> Iterator[str]:
        """Yield what goes wrong, for every execution in which something does."""
        for execution in executions(self.program()):
            for register, value in execution.registers.items():
                kind, _, rest = register.partition(".")
                launch = int(rest.split(".")[1] if kind == "input" else kind)
                if kind == "input" and value != launch + 1:
                    yield f"stale input: launch {launch} loads that of launch {value - 1}"
                elif kind != "input" and 0 < value < IDLE and value != launch + 1:
                    yield f"wrong data: launch {launch} receives what launch {value - 1} pushed"
            for word, orders in execution.coherence.items():
                if not word.endswith("input"):
                    yield from (failure for order in orders for failure in disordered(execution, word, order))


def disordered(execution: Execution, word: str, order: Order) -> Iterator[str]:
    """Yield the writes of a word that coherence order does not order as push, clear, push, clear, ..."""

    def place(value: int) -> int:
        return 2 * (value - IDLE) + 1 if value >= IDLE else 2 * (value - 1)

    events = execution.events
    writes = [
        i for i, event in enumerate(events) if event.kind == "st" and event.name == word and event.thread >= 0
    ]
    writes.sort(key=lambda i: place(events[i].value))
    for first, second in combinations(writes, 2):
        if (first, second) not in order:
            what = "push" if events[second].value < IDLE else "clear"
            yield f"{what} lost: {events[first].text} may follow {events[second].text}"
