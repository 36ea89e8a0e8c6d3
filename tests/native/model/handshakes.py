"""Two threads that each store to one word and then look at another, on a machine that delays stores.

The thread sanitizer cannot show whether such a handshake needs its seq_cst operations, so every interleaving is
tried here. A store first goes into a buffer of its thread, out of which the stores to one word come in order and
others in any order. A release or seq_cst store comes out behind all stores before it, as processors with weak
memory do it (Arm's STLR); a seq_cst load waits until no seq_cst store is in the buffer (LDAR). A fence and a
call of the kernel empty the buffer. Loads are not reordered: what needs acquire is shown under the sanitizer.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Thread", "leaving", "outcomes", "parking", "posting"]

Instruction = tuple[Any, ...]
Program = Sequence[Instruction]


class Thread(NamedTuple):
    """Where a thread stands.

    Attributes:
        at: The number of its next instruction.
        registers: What it has loaded, by name.
        buffer: Its stores that no other thread sees yet: word, value, order.
        sleeps: Whether it is asleep in the kernel.
    """

    at: int = 0
    registers: tuple[tuple[str, int], ...] = ()
    buffer: tuple[tuple[str, int, str], ...] = ()
    sleeps: bool = False

    def get(self, register: str) -> int:
        """Return what was loaded into a register, 0 before."""
        return dict(self.registers).get(register, 0)


Memory = tuple[tuple[str, int], ...]
State = tuple[Memory, tuple[Thread, ...]]


def stored(memory: Memory, word: str, value: int) -> Memory:
    """Return the memory with another value in a word."""
    return tuple(sorted({**dict(memory), word: value}.items()))


def drained(memory: Memory, thread: Thread) -> list[tuple[Memory, Thread]]:
    """Return what one store may change that leaves the thread's buffer."""
    found = []
    for i, (word, value, order) in enumerate(thread.buffer):
        before = thread.buffer[:i]
        if order == "relaxed" and any(other[0] == word for other in before):
            continue
        if order == "relaxed" or not before:
            rest = before + thread.buffer[i + 1 :]
            found.append((stored(memory, word, value), thread._replace(buffer=rest)))
    return found


def loaded(memory: Memory, thread: Thread, word: str) -> int:
    """Return what the thread sees in a word: its own latest store, or else what is in memory."""
    own = [value for name, value, _ in thread.buffer if name == word]
    return own[-1] if own else dict(memory).get(word, 0)


def executed(memory: Memory, thread: Thread, program: Program) -> tuple[Memory, Thread] | None:
    """Return what the next instruction changes in memory and its thread; None where it has to wait."""
    name, *operands = program[thread.at]
    after = thread._replace(at=thread.at + 1)
    if name in ("fence", "add", "wait", "wake") and thread.buffer:
        return None
    if name == "store":
        word, value, order = operands
        return memory, after._replace(buffer=(*thread.buffer, (word, value, order)))
    if name == "load":
        word, register, order = operands
        if order == "seq_cst" and any(entry[2] == "seq_cst" for entry in thread.buffer):
            return None
        registers = {**dict(thread.registers), register: loaded(memory, thread, word)}
        return memory, after._replace(registers=tuple(sorted(registers.items())))
    if name == "add":
        (word,) = operands
        return stored(memory, word, dict(memory).get(word, 0) + 1), after
    if name == "wait":
        word, register = operands
        is_equal = dict(memory).get(word, 0) == thread.get(register)
        return memory, after._replace(sleeps=is_equal)
    if name in ("if", "unless"):
        register, target = operands
        return memory, thread._replace(at=target) if bool(thread.get(register)) == (name == "if") else after
    return memory, after  # a fence, or a wake-up, which concerns the others


def successors(state: State, programs: Sequence[Program]) -> list[State]:
    """Return all states that one step of a thread, or of its buffer, leads to."""
    memory, threads = state
    found: list[State] = []
    for i, thread in enumerate(threads):
        steps = drained(memory, thread)
        if not thread.sleeps and thread.at < len(programs[i]):
            step = executed(memory, thread, programs[i])
            steps += [step] if step else []
        for new_memory, new_thread in steps:
            after = [*threads]
            after[i] = new_thread
            if new_thread.at > thread.at and programs[i][thread.at][0] == "wake":
                after = [other._replace(sleeps=False) for other in after]
            found.append((new_memory, tuple(after)))
    return found


def outcomes(programs: Sequence[Program]) -> set[tuple[Thread, ...]]:
    """Return how the threads can stand when nothing can move any more."""
    start: State = ((), tuple(Thread() for _ in programs))
    seen, todo, ends = {start}, [start], set()
    while todo:
        state = todo.pop()
        following = successors(state, programs)
        if not following:
            ends.add(state[1])
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return ends


def posting(orders: Mapping[str, str]) -> list[Instruction]:
    """Return what a rank does that posts: `SharedRegion::post`."""
    fence = [("fence",)] if orders["poster's fence"] == "seq_cst" else []
    program = [("store", "post", 1, "release"), *fence, ("load", "parked", "parked", "relaxed")]
    return [*program, ("unless", "parked", len(program) + 3), ("add", "bell"), ("wake",)]


def parking(orders: Mapping[str, str], mistake: str = "") -> list[Instruction]:
    """Return what a rank does that waits for the post: `SharedRegion::sleep`, if wanted with a mistake."""
    bell = [("load", "bell", "seen", "relaxed")]
    park = [("store", "parked", 1, "relaxed")]
    fence = [("fence",)] if orders["sleeper's fence"] == "seq_cst" else []
    look = [("load", "post", "post", "acquire")]
    if mistake == "the bell is read behind the second look":
        first = [*park, *fence, *look, *bell]
    elif mistake == "parked is set behind the second look":
        first = [*bell, *look, *park, *fence]
    else:
        first = [*bell, *park, *fence, *look]
    program = [*first, ("if", "post", len(first) + 2), ("wait", "bell", "seen")]
    return [*program, ("store", "parked", 0, "relaxed"), *look, ("unless", "post", 0)]


def leaving(orders: Mapping[str, str]) -> list[list[Instruction]]:
    """Return what a rank does that makes a channel, `settle` and `has_left`, and one that leaves meanwhile."""
    return [
        [("store", "channel", 2, orders["maker's store"]), ("load", "left", "saw", orders["maker's look"])],
        [("store", "left", 1, orders["leaver's store"]), ("load", "channel", "saw", orders["leaver's look"])],
    ]
