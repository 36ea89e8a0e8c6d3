"""The exchange of expert-parallel rows, and the mailboxes of the norms, as programs for the model of PTX.

`csrc/cuda/expert_parallel.cu` (`meet`) and `csrc/cuda/clusters.cu` are the kernels' side.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from tests.native.model.ptx_model import Program, Thread, executions
from tests.native.model.ptx_protocol import Grid, Steps, joined

__all__ = ["Exchange", "Mailboxes"]


@dataclass(frozen=True)
class Exchange:
    """Dispatches and combines on two ranks: each launch stores rows at the peer, meets, and reads what came.

    A rank is a GPU with one stream. A block has two threads: one stores and polls flags, the other moves rows, so that
    both `__syncthreads` of a meeting matter. Every block reads the rows of all blocks of the peer.

    Attributes:
        boundary: One of BOUNDARIES.
        flag: How a flag is stored.
        poll: How a flag is polled; the kernels go on when it is the launch's own number.
        sync_before, sync_behind: Whether `__syncthreads` stands before the flags, and behind them.
        phases: The number of arenas, each with flags of its own.
        blocks: The number of blocks.
        awaited: How many blocks of the peer each block waits for; 0 stands for all.
        launches: The number of launches.
    """

    boundary: str = "stream"
    flag: str = "st.release.sys"
    poll: str = "ld.acquire.sys"
    sync_before: bool = True
    sync_behind: bool = True
    phases: int = 2
    blocks: int = 1
    awaited: int = 0
    launches: int = 3

    def grid(self, rank: int, launch: int) -> Grid:
        """Return a rank's launch, which stores the number of the launch, counted from 1."""
        peer, phase, number = 1 - rank, launch % self.phases, launch + 1
        before = [f"bar.sync {launch}.before"] if self.sync_before else []
        behind = [f"bar.sync {launch}.behind"] if self.sync_behind else []
        late: dict[int, Steps] = {}
        for block in range(self.blocks):
            polls = [
                f"{self.poll} flag.{launch}.{rank}.{block}.{other} {rank}.{phase}.flag.{other}"
                for other in range(self.awaited or self.blocks)
            ]
            reads = [
                f"ld.weak row.{launch}.{rank}.{block}.{other} {rank}.{phase}.row.{other}"
                for other in range(self.blocks)
            ]
            flags = [f"{self.flag} {peer}.{phase}.flag.{block} {number}", *polls]
            late[2 * block] = [*before, *flags, *behind]
            late[2 * block + 1] = [f"st.weak {peer}.{phase}.row.{block} {number}", *before, *behind, *reads]
        return Grid({}, late)

    def program(self) -> Program:
        """Return the program. A poll ends with the launch's own number only."""
        threads: list[Thread] = []
        for rank in range(2):
            grids = [self.grid(rank, launch) for launch in range(self.launches)]
            # Threads 2 b and 2 b + 1 are those of block b.
            threads += [each._replace(cta=each.cta // 2) for each in joined(rank, grids, self.boundary)]
        wanted = {
            f"flag.{launch}.{rank}.{block}.{other}": frozenset({launch + 1})
            for launch, rank, block, other in product(
                range(self.launches), range(2), range(self.blocks), range(self.awaited or self.blocks)
            )
        }
        return Program(threads, wanted=wanted)

    def failures(self) -> Iterator[str]:
        """Yield what goes wrong, for every execution in which something does."""
        for execution in executions(self.program()):
            for register, value in execution.registers.items():
                kind, launch, *_ = register.split(".")
                if kind == "row" and value != int(launch) + 1:
                    age = "old" if value <= int(launch) else "later"
                    yield f"{age} row: launch {launch} reads that of launch {value - 1}"


# A mailbox before its block has opened it holds 0; opening stores this.
OPENED = 100


@dataclass(frozen=True)
class Mailboxes:
    """Exchanges of one value between two blocks of a cluster, in turns that use the mailboxes in turn.

    A block has two threads. Both wait for the mail and read it; one of them sends. `st.async` is a thread of its own,
    which the sender starts: it stores the value weakly, then completes the transaction of the mailbox, which releases
    (PTX ISA, "st.async"). An `mbarrier` is a word that holds how many uses are complete. The model has no scope
    .cluster: the program has one cluster, so .gpu includes the same threads.

    That what the sender, or its block before a barrier, has done is in front of the started store is an assumption
    (`is_started`), which the manual does not spell out for `st.async`. The test shows that the protocol needs it.

    Attributes:
        turns: The number of exchanges.
        boxes: The number of mailboxes of a block.
        complete: How a transaction is completed.
        poll: How the completion is awaited.
        sync: Whether `__syncthreads` stands in front of the sending.
        is_started: Whether the asynchronous store is behind what its sender did before.
        has_opening: Whether the program begins with the opening of the mailboxes.
        open: The fence behind the opening, or "".
        join: How a thread waits for the cluster behind the opening.
    """

    turns: int = 3
    boxes: int = 2
    complete: str = "st.release.gpu"
    poll: str = "ld.acquire.gpu"
    sync: bool = True
    is_started: bool = True
    has_opening: bool = False
    open: str = "fence.release.gpu"
    join: str = "ld.acquire.gpu"

    def opening(self, block: int) -> tuple[list[str], list[str]]:
        """Return how both threads of a block begin: one opens the mailboxes, both wait for all blocks."""
        if not self.has_opening:
            return [], []
        opens = [f"st.weak {block}.mail.{box} {OPENED}" for box in range(self.boxes)]
        opens += [self.open] if self.open else []
        opens.append(f"st.relaxed.gpu {block}.arrived 1")
        joins = [[f"{self.join} joined.{block}.{thread} {1 - block}.arrived"] for thread in range(2)]
        # The other thread also waits for its own block's first one; a barrier of the block stands for that.
        return [*opens, "bar.sync opened", *joins[0]], ["bar.sync opened", *joins[1]]

    def program(self) -> Program:
        """Return the program. A wait ends with the use of the mailbox, or a later one."""
        threads: list[Thread] = []
        wanted: dict[str, frozenset[int]] = {}
        for block in range(2):
            steps = self.opening(block)
            for thread in range(2) if self.has_opening else ():
                wanted[f"joined.{block}.{thread}"] = frozenset({1})
            for turn in range(self.turns):
                box, use = turn % self.boxes, turn // self.boxes + 1
                other = 1 - block
                sync = [f"bar.sync {turn}"] if self.sync else []
                for thread in range(2):
                    send = [f"signal {turn}.{block}"] if thread == 0 else []
                    await_mail = f"{self.poll} mail.{turn}.{block}.{thread} {block}.mail.{box}"
                    read = f"ld.weak value.{turn}.{block}.{thread} {block}.box.{box}"
                    steps[thread].extend([*sync, *send, await_mail, read])
                    wanted[f"mail.{turn}.{block}.{thread}"] = frozenset(range(use, OPENED))
                started = [f"wait {turn}.{block}"] if self.is_started else []
                value = [f"st.weak {other}.box.{box} {turn + 1}", f"{self.complete} {other}.mail.{box} {use}"]
                # A CTA of its own: it takes part in no barrier.
                threads.append(Thread(0, 2 + len(threads), [*started, *value]))
            threads += [Thread(0, block, each) for each in steps]
        return Program(threads, wanted=wanted)

    def failures(self) -> Iterator[str]:
        """Yield what goes wrong, for every execution in which something does."""
        for execution in executions(self.program()):
            for register, value in execution.registers.items():
                kind, turn, *_ = register.split(".")
                if kind == "value" and value != int(turn) + 1:
                    age = "old" if value <= int(turn) else "later"
                    yield f"{age} mail: turn {turn} reads that of turn {value - 1}"
            opened = [i for i, event in enumerate(execution.events) if event.value == OPENED]
            for at in opened:
                name = execution.events[at].name
                mail = [i for i, e in enumerate(execution.events) if e.kind == "st" and e.name == name]
                for order in execution.coherence[name]:
                    if any((at, i) not in order for i in mail if 0 < execution.events[i].value < OPENED):
                        yield f"mail lost: {name} may be opened behind it"
