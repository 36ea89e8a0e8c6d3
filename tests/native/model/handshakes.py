"""A model of threads that each store to one word and then load others, on a machine that delays stores.

The thread sanitizer cannot show whether this handshake needs its seq_cst operations. This model therefore tries
every interleaving. A store first enters a buffer of its thread. Stores to one word leave the buffer in order, stores
to different words in any order. A release or seq_cst store leaves it after all earlier stores, as on processors with
weak memory (Arm's STLR). A seq_cst load waits until no seq_cst store is in the buffer (LDAR). A fence and a
system call empty the buffer. Loads are not reordered: the sanitizer shows which of them need acquire.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Thread", "leaving", "listening", "outcomes", "stepping"]

Instruction = tuple[Any, ...]
Program = Sequence[Instruction]


class Thread(NamedTuple):
    """The state of a thread.

    Attributes:
        at: The number of its next instruction.
        registers: The values that it has loaded, by name.
        buffer: Its stores that no other thread sees yet; each is a word, a value and a memory order.
        sleeps: Whether it is asleep in the kernel.
    """

    at: int = 0
    registers: tuple[tuple[str, int], ...] = ()
    buffer: tuple[tuple[str, int, str], ...] = ()
    sleeps: bool = False

    def get(self, register: str) -> int:
        """Return the value that was loaded into a register, or 0 if none was."""
        return dict(self.registers).get(register, 0)


Memory = tuple[tuple[str, int], ...]
State = tuple[Memory, tuple[Thread, ...]]


def stored(memory: Memory, word: str, value: int) -> Memory:
    """Return a copy of the memory in which a word has another value."""
    return tuple(sorted({**dict(memory), word: value}.items()))


def drained(memory: Memory, thread: Thread) -> list[tuple[Memory, Thread]]:
    """Return memory and thread after each store that may leave the thread's buffer next."""
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
    """Return the value that the thread sees in a word: that of its own latest store, otherwise that in memory."""
    own = [value for name, value, _ in thread.buffer if name == word]
    return own[-1] if own else dict(memory).get(word, 0)


def executed(memory: Memory, thread: Thread, program: Program) -> tuple[Memory, Thread] | None:
    """Return memory and thread after the next instruction, or None if the instruction has to wait."""
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
    if name == "set":
        register, value = operands
        return memory, after._replace(
            registers=tuple(sorted({**dict(thread.registers), register: value}.items()))
        )
    if name == "jump":
        return memory, thread._replace(at=operands[0])
    if name == "unless":
        register, target = operands
        return memory, after if thread.get(register) else thread._replace(at=target)
    if name in ("below", "differs"):
        word, value, target = operands
        found = loaded(memory, thread, word)
        jumps = found < value if name == "below" else found != value
        return memory, thread._replace(at=target) if jumps else after
    return memory, after  # this was a fence, or a wake-up, which changes only the other threads


def successors(state: State, programs: Sequence[Program]) -> list[State]:
    """Return all states to which one step of a thread or of its buffer leads."""
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
    """Return the states of the threads from which no step leads on."""
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


def linked(program: Sequence[Instruction]) -> list[Instruction]:
    """Return the program without its labels, and with the places of the labels in its jumps."""
    places: dict[str, int] = {}
    code: list[Instruction] = []
    for each in program:
        if each[0] == "label":
            places[each[1]] = len(code)
        else:
            code.append(each)
    jumps = ("jump", "unless", "below", "differs")
    return [(*each[:-1], places[each[-1]]) if each[0] in jumps else each for each in code]


def look(ranks: Sequence[int], step: int, otherwise: str) -> list[Instruction]:
    """Return the instructions that jump to a label if one of the ranks has not posted the step."""
    return [("below", f"post {rank} {step % 2}", step, otherwise) for rank in ranks]


def posting(
    rank: int, others: Sequence[int], step: int, orders: Mapping[str, str], mistake: str
) -> list[Instruction]:
    """Return the instructions of a rank that posts a step, as in `SharedRegion::post`."""
    fence = [("fence",)] if orders["poster's fence"] == "seq_cst" else []
    return [
        ("store", f"post {rank} {step % 2}", step, "release"),
        *fence,
        ("differs", sleeping(step, mistake), step, f"posted {step}"),
        *look(others, step, f"posted {step}"),
        ("add", "gong"),
        ("wake",),
        ("label", f"posted {step}"),
    ]


def sleeping(step: int, mistake: str) -> str:
    """Return the word in which ranks say that they sleep in this step."""
    return "sleeping" if mistake == "even and odd steps have one word" else f"sleeping {step % 2}"


def ending(others: Sequence[int], step: int, place: str) -> list[Instruction]:
    """Return the instructions that end a wait if all have posted the step, or one has left without that."""
    program = [
        *look(others, step, f"missing {place}"),
        ("jump", f"done {step}"),
        ("label", f"missing {place}"),
    ]
    for other in others:
        program += [("below", f"closed {other}", 1, f"{other} stays {place}")]
        program += [*look([other], step, "left"), ("label", f"{other} stays {place}")]
    return program


def waiting(others: Sequence[int], step: int, orders: Mapping[str, str], mistake: str) -> list[Instruction]:
    """Return the instructions of a rank that waits until all have posted, as in `SharedRegion::wait` and `sleep`."""
    gong = [("load", "gong", "seen", "relaxed")]
    announce = [("store", sleeping(step, mistake), step, "relaxed")]
    fence = [("fence",)] if orders["sleeper's fence"] == "seq_cst" else []
    again = ending(others, step, f"{step} asleep")
    if mistake == "the gong is read behind the second look":
        falls_asleep = [*announce, *fence, *again, *gong]
    elif mistake == "`sleeping` is stored behind the second look":
        falls_asleep = [*gong, *again, *announce, *fence]
    else:
        falls_asleep = [*gong, *announce, *fence, *again]
    # A rank whose first look finds all posts never says that it sleeps.
    return [
        *ending(others, step, f"{step} awake"),
        ("label", f"sleep {step}"),
        *falls_asleep,
        ("wait", "gong", "seen"),
        ("jump", f"sleep {step}"),
        ("label", f"done {step}"),
    ]


def stepping(
    rank: int, ranks: int, steps: int, orders: Mapping[str, str], mistake: str = "", *, leaves: bool = False
) -> list[Instruction]:
    """Return the program of a rank that takes some steps, and then may leave; `mistake` changes it.

    Its register `ended` is 1 if it has taken them all, and 2 if it was left alone in one of them.
    """
    others = [each for each in range(ranks) if each != rank]
    program: list[Instruction] = []
    for step in range(1, steps + 1):
        program += posting(rank, others, step, orders, mistake)
        program += waiting(others, step, orders, mistake)
    if leaves:
        # As in `SharedRegion::close`.
        program += [("store", f"closed {rank}", 1, "release"), ("add", "gong"), ("wake",)]
    program += [
        ("set", "ended", 1),
        ("jump", "end"),
        ("label", "left"),
        ("set", "ended", 2),
        ("label", "end"),
    ]
    return linked(program)


def leaving(orders: Mapping[str, str]) -> list[list[Instruction]]:
    """Return the programs of a rank that makes a channel (`settle`, `has_left`) and of one that leaves meanwhile."""
    return [
        [("store", "channel", 2, orders["maker's store"]), ("load", "left", "saw", orders["maker's look"])],
        [("store", "left", 1, orders["leaver's store"]), ("load", "channel", "saw", orders["leaver's look"])],
    ]


def sounding(writer: int, orders: Mapping[str, str]) -> list[Instruction]:
    """Return the program of a writer that publishes a message, as in `Ring::publish`, `wake_readers` and `Bell::sound`.

    No other thread changes the writer's sequence word, so that the addition to it is a store.
    """
    return linked(
        [
            ("store", f"published {writer}", 1, "release"),
            ("store", f"sequence {writer}", 1, orders["writer's change"]),
            ("load", "listeners", "saw", orders["writer's look"]),
            ("unless", "saw", "end"),
            ("add", "word"),
            ("wake",),
            ("label", "end"),
        ]
    )


def listening_for(
    writers: Sequence[int], orders: Mapping[str, str], mistake: str
) -> tuple[str, list[Instruction]]:
    """Return the label and the instructions of a thread that awaits a message of each of some writers in any order."""
    place = f"await {list(writers)}"
    if not writers:
        return place, [("label", place), ("set", "ended", 1), ("jump", "end")]
    seen = [("load", "word", "seen", "acquire")]
    count = [("store", "listeners", 1, orders["listener's count"])]
    look: list[Instruction] = []
    rest: list[Instruction] = []
    for writer in writers:
        others = [each for each in writers if each != writer]
        then, program = listening_for(others, orders, mistake)
        then = f"{place} {writer} {then}"
        look += [
            ("load", f"sequence {writer}", "sequence", orders["listener's look"]),
            ("below", f"published {writer}", 1, f"{place} without {writer}"),
            ("jump", then),
            ("label", f"{place} without {writer}"),
        ]
        # Each order in which messages come has its own code, with labels of its own.
        rest += [("label", then), *prefixed(program, f"{place} {writer} ")]
    if mistake == "the word is read behind the look":
        begin = [*count, *look, *seen]
    elif mistake == "a listener is counted behind its look":
        begin = [*seen, *look, *count]
    else:
        begin = [*seen, *count, *look]
    again = [("wait", "word", "seen"), ("store", "listeners", 0, "relaxed"), ("jump", place)]
    return place, [("label", place), *begin, *again, *rest]


def prefixed(program: Sequence[Instruction], prefix: str) -> list[Instruction]:
    """Return the program with other names for its labels, except for the end."""
    jumps = ("label", "jump", "unless", "below", "differs")
    return [
        (*each[:-1], prefix + each[-1]) if each[0] in jumps and each[-1] != "end" else each
        for each in program
    ]


def listening(writers: int, orders: Mapping[str, str], mistake: str = "") -> list[list[Instruction]]:
    """Return the programs of a thread that listens to its bell, and of writers that each send it one message.

    The register `ended` of the first thread is 1 when it has got all of them.
    """
    _, program = listening_for(range(writers), orders, mistake)
    sounders = [sounding(writer, orders) for writer in range(writers)]
    return [linked([*program, ("label", "end")]), *sounders]
