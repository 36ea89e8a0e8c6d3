"""The staged all-gather as a program for the model of PTX; `csrc/cuda/staged_all_gather.cu` is the kernel."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.native.model.ptx_model import Program, Thread, executions
from tests.native.model.ptx_protocol import Grid, Steps, joined

__all__ = ["Gather"]


@dataclass(frozen=True)
class Gather:
    """Staged all-gathers on two ranks, one behind the other, and how each part is done.

    A rank is a GPU with one stream. A block has two threads: the first stores and polls the flags of the barriers, the
    second stages the block's own vector, reads that of the peer and stores it into the output. So both `__syncthreads`
    of a barrier matter. Behind each launch a kernel of the same stream reads the output. Every launch uses the same
    staging area, and what a rank stages is the number of the launch, counted from 1.

    Attributes:
        boundary: One of BOUNDARIES.
        flag: How a flag is stored.
        poll: How a flag is polled.
        stage: How a vector is staged.
        read: How a staged vector is read.
        sync_before, sync_behind: Whether `__syncthreads` stands before the flags, and behind them.
        first_barrier, end_barrier: Whether the barrier in front of the reads, and the one behind them, is there.
        blocks: The number of blocks, each with a vector and flags of its own.
        shift: How many blocks further the one lies whose vector a block reads; the kernel reads that of its own index.
        launches: The number of launches.
        pull: The launch, counted from 0, in place of which a pull is replayed that was captured with a copy of its
            input into the staging area; -1 for none. The copy counts as a grid of the stream.
    """

    boundary: str = "stream"
    flag: str = "st.release.sys"
    poll: str = "ld.acquire.sys"
    stage: str = "st.relaxed.sys"
    read: str = "ld.relaxed.sys"
    sync_before: bool = True
    sync_behind: bool = True
    first_barrier: bool = True
    end_barrier: bool = True
    blocks: int = 1
    shift: int = 0
    launches: int = 2
    pull: int = -1

    def grids(self, rank: int, launch: int) -> list[Grid]:
        """Return a rank's launch, whose barriers are 2 launch + 1 and the next, and the kernel behind it."""
        peer = 1 - rank
        grids: list[Grid] = []
        if launch == self.pull:
            copies = [f"st.weak {rank}.staging.{block} {launch + 1}" for block in range(self.blocks)]
            grids.append(Grid({}, {-1: copies}))
        late: dict[int, Steps] = {}
        looks: list[str] = []
        for block in range(self.blocks):
            other = (block + self.shift) % self.blocks
            flags: list[str] = []
            data = [] if launch == self.pull else [f"{self.stage} {rank}.staging.{block} {launch + 1}"]
            register = f"part.{launch}.{rank}.{block}"
            moves = [
                [
                    f"{self.read} {register} {peer}.staging.{other}",
                    f"st.weak {rank}.out.{other} {register}+0",
                ],
                [],
            ]
            for half, is_there in enumerate((self.first_barrier, self.end_barrier)):
                name = f"{launch}.{block}.{half}"
                before = [f"bar.sync {name}.before"] if self.sync_before and is_there else []
                behind = [f"bar.sync {name}.behind"] if self.sync_behind and is_there else []
                number = 2 * launch + half + 1
                signals = [
                    f"{self.flag} {peer}.flag.{block} {number}",
                    f"{self.poll} {number}.{name}.{rank} {rank}.flag.{block}",
                ]
                flags += [*before, *(signals if is_there else []), *behind]
                data += [*before, *behind, *moves[half]]
            late[2 * block], late[2 * block + 1] = flags, data
            looks.append(f"ld.weak out.{launch}.{rank}.{block} {rank}.out.{block}")
        return [*grids, Grid({}, late), Grid({}, {-1: looks})]

    def program(self) -> Program:
        """Return the program. Flags are compared, so a poll ends with the barrier's number or a later one."""
        threads: list[Thread] = []
        for rank in range(2):
            grids = [grid for launch in range(self.launches) for grid in self.grids(rank, launch)]
            # Threads 2 b and 2 b + 1 are those of block b; the others' CTAs take part in no barrier.
            threads += [each._replace(cta=each.cta // 2) for each in joined(rank, grids, self.boundary)]
        operations = [str(step).split() for thread in threads for step in thread.steps]
        polls = [words[1] for words in operations if words[0] == self.poll and words[1][0].isdigit()]
        most = 2 * self.launches + 1
        return Program(
            threads, wanted={name: frozenset(range(int(name.partition(".")[0]), most)) for name in polls}
        )

    def failures(self) -> Iterator[str]:
        """Yield what goes wrong, for every execution in which something does."""
        for execution in executions(self.program()):
            for register, value in execution.registers.items():
                kind, launch, *_ = register.split(".")
                if kind in ("part", "out") and value != int(launch) + 1:
                    age = "old" if value <= int(launch) else "later"
                    yield f"{age} {kind}: launch {launch} reads that of launch {value - 1}"
