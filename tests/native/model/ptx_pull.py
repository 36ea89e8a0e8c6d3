"""The barriers of the pull all-reduce, and the epochs that blocks keep, as programs for the model of PTX.

A rank is a GPU with one stream, and has one block of two threads. Thread 0 stores and polls the flags, thread 1 moves
the data, so that both `__syncthreads` of a barrier matter.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.native.model.ptx_model import Program, Thread, executions
from tests.native.model.ptx_protocol import Grid, Steps, joined

__all__ = ["Epochs", "Pull"]


def in_one_block(threads: list[Thread]) -> list[Thread]:
    """Return the threads of a rank with the two of the block in one CTA; -1 is another kernel's."""
    return [thread._replace(cta=0 if thread.cta >= 0 else 9) for thread in threads]


@dataclass(frozen=True)
class Pull:
    """Two pulls on two ranks, behind each a kernel that overwrites the input, and how each part is done.

    Attributes:
        boundary: One of BOUNDARIES.
        flag: How a flag is stored.
        poll: How a flag is polled.
        read: How a peer's input or result is read; the tail of a tensor is read with `ld.weak`.
        sync_before, sync_behind: Whether `__syncthreads` stands before the flags, and behind them.
        end_barrier: Whether one-shot has its second barrier.
        two_shot: Whether the ranks exchange results behind the second barrier.
    """

    boundary: str = "stream"
    flag: str = "st.release.sys"
    poll: str = "ld.acquire.sys"
    read: str = "ld.relaxed.sys"
    sync_before: bool = True
    sync_behind: bool = True
    end_barrier: bool = True
    two_shot: bool = False

    def pull(self, rank: int, number: int) -> Grid:
        """Return a rank's pull, the barriers of which are 2 number + 1 and, if there is one, the next."""
        peer = 1 - rank
        flags: list[str] = []
        data: list[str] = []
        moves = [[f"{self.read} input.{rank}.{number} {peer}.input"], []]
        if self.two_shot:
            moves[0].append(f"st.relaxed.sys {rank}.result {number + 1}")
            moves[1] = [f"{self.read} result.{rank}.{number} {peer}.result"]
        for half in range(2 if self.end_barrier or self.two_shot else 1):
            barrier = 2 * number + half + 1
            before = [f"bar.sync {number}.{half}.before"] if self.sync_before else []
            behind = [f"bar.sync {number}.{half}.behind"] if self.sync_behind else []
            own, other = f"{rank}.flag", f"{peer}.flag"
            flags += [
                *before,
                f"{self.flag} {other} {barrier}",
                f"{self.poll} {barrier}.{rank} {own}",
                *behind,
            ]
            data += [*before, *behind, *moves[half]]
        return Grid({}, {0: flags, 1: data})

    def program(self) -> Program:
        """Return the program. Flags are compared, so a poll ends with the barrier's number or a later one."""
        threads: list[Thread] = []
        for rank in range(2):
            grids = [Grid({}, {-1: [f"st.weak {rank}.input 1"]})]
            for number in range(2):
                grids += [self.pull(rank, number), Grid({}, {-1: [f"st.weak {rank}.input {number + 2}"]})]
            threads += in_one_block(joined(rank, grids, self.boundary))
        operations = [str(step).split() for thread in threads for step in thread.steps]
        polls = [words[1] for words in operations if words[0] == self.poll and words[1][0].isdigit()]
        return Program(threads, wanted={name: frozenset(range(int(name[0]), 5)) for name in polls})

    def failures(self) -> Iterator[str]:
        """Yield what goes wrong, for every execution in which something does."""
        for execution in executions(self.program()):
            for register, value in execution.registers.items():
                kind, *rest = register.split(".")
                if kind in ("input", "result") and value != int(rest[1]) + 1:
                    age = "old" if value <= int(rest[1]) else "later"
                    yield f"{age} {kind}: pull {rest[1]} reads that of {value - 1}"


@dataclass(frozen=True)
class Epochs:
    """Three push launches of one block, of which both threads read the epoch and thread 0 then stores the next.

    Attributes:
        boundary: One of BOUNDARIES.
        before_the_wait: Whether the epoch is read before the wait for the stream.
        sync: Whether `__syncthreads` stands before the store.
    """

    boundary: str = "stream"
    before_the_wait: bool = False
    sync: bool = True

    def program(self) -> Program:
        """Return the program."""
        grids = []
        for launch in range(3):
            read: dict[int, Steps] = {thread: [f"ld.weak {launch}.{thread} epoch"] for thread in range(2)}
            sync = [f"bar.sync {launch}"] if self.sync else []
            rest = {0: [*sync, f"st.weak epoch {launch + 1}"], 1: sync}
            if self.before_the_wait:
                grids.append(Grid(read, rest))
            else:
                grids.append(Grid({}, {thread: [*read[thread], *rest[thread]] for thread in range(2)}))
        return Program(in_one_block(joined(0, grids, self.boundary)))

    def failures(self) -> Iterator[str]:
        """Yield the launches in which a thread may take another epoch than the launch's."""
        for execution in executions(self.program()):
            for register, value in execution.registers.items():
                if value != int(register[0]):
                    yield f"wrong epoch: launch {register[0]} takes {value}"
