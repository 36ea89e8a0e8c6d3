"""Bodies of ranks in which one of them is at fault, for tests of who is named: the world has four ranks.

Each fault names the rank and the call that must be found. Rank `CULPRIT` is at fault where one is; rank 3 is innocent.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from coordinator.errors import CommTimeoutError
from coordinator.group import GroupCoordinator
from coordinator.parallel_state import destroy_distributed_environment, get_world_group
from coordinator.settings import CoordinatorSettings
from tests.waiting import wait_until
from tests.worlds import join_world, meet, outcome_of, tell_when_waiting

__all__ = ["CULPRIT", "FAULTS", "RANKS", "Fault", "suffer"]

RANKS: Final = 4
CULPRIT: Final = 2
# How long the witnesses wait, and how long where only a look meanwhile shows the fault.
PATIENCE_S: Final = 0.8
LOOKED_AT_S: Final = 3.0


class Run(NamedTuple):
    """What a rank knows of the test.

    Attributes:
        directory: In which the ranks meet.
        within_s: How long a call waits.
        record: The folder of the run's records; the marks of the ranks and of the look have names that begin with its.
    """

    directory: Path
    within_s: float
    record: Path

    @property
    def looked(self) -> Path:
        """Return a file that is there once the live processes were looked at."""
        return self.record.with_name(f"{self.record.name}-looked")

    def begins_to_wait_in(self, group: GroupCoordinator) -> None:
        """Let this rank begin the fault once a call of `group` has waited for 0.1 s."""
        tell_when_waiting(group, self.record.parent, f"{self.record.name}-begins")


class Fault(NamedTuple):
    """What happens, and what must be found.

    Attributes:
        happens: Called on each rank with its group and its rank.
        rule: Of the finding.
        ranks: Who is named.
        call: In which call.
        number: Of it in its plane; 0 for a call between two ranks.
        dead: Ranks that end without an answer.
        live_rule: Of the finding of a look at the live processes, if it is another one.
        within_s: How long the witnesses wait.
        says_itself: Whether `happens` lets each rank begin; else that is the moment before it.
        is_brief: Whether nothing shows the fault once the witnesses have waited.
    """

    happens: Callable[[GroupCoordinator, int, Run], Any]
    rule: str
    ranks: tuple[int, ...]
    call: str
    number: int
    dead: tuple[int, ...] = ()
    live_rule: str = ""
    within_s: float = PATIENCE_S
    says_itself: bool = False
    is_brief: bool = False


def ones(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(16, dtype=dtype)


def killed(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGKILL)
    group.all_reduce(ones(), timeout_s=60.0)


def stopped(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank == CULPRIT:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.all_reduce(ones(), timeout_s=run.within_s)


def asleep(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank == CULPRIT:
        others = [other for other in range(RANKS) if other != CULPRIT]
        wait_until(lambda: all((run.directory / f"told-{other}").exists() for other in others), "the others")
        return
    group.all_reduce(ones(), timeout_s=run.within_s)


def missed(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank != CULPRIT:
        group.all_reduce(ones(), timeout_s=run.within_s)
    group.all_gather(ones(), timeout_s=run.within_s)


def missed_before_a_barrier(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank != CULPRIT:
        group.all_reduce(ones(), timeout_s=run.within_s)
    group.barrier(2 * run.within_s)


def swapped(group: GroupCoordinator, rank: int, run: Run) -> None:
    calls: list[Callable[..., Any]] = [group.all_reduce, group.all_gather]
    for call in reversed(calls) if rank == CULPRIT else calls:
        call(ones(), timeout_s=run.within_s)


def mistyped(group: GroupCoordinator, rank: int, run: Run) -> None:
    group.all_reduce(ones(torch.float64 if rank == CULPRIT else torch.float32), timeout_s=run.within_s)


def crossed(group: GroupCoordinator, rank: int, run: Run) -> None:
    settings = CoordinatorSettings.resolve({})
    pairs = ([[0, 1], [2], [3]], [[1, 2], [0], [3]], [[0, 2], [1], [3]])
    groups = [
        GroupCoordinator(table, 0, "gloo", True, group_name=f"pair{number}", settings=settings)
        for number, table in enumerate(pairs)
    ]
    try:
        run.begins_to_wait_in(group if rank == 3 else groups[rank])
        if rank == 3:
            group.barrier(run.within_s)
        else:
            groups[rank].all_reduce(ones(), timeout_s=run.within_s)
    finally:
        meet(rank, range(RANKS), run.directory, "crossed")
        for each in groups:
            each.destroy()


def received_in_a_circle(group: GroupCoordinator, rank: int, run: Run) -> None:
    run.begins_to_wait_in(group)
    if rank == 3:
        group.barrier(run.within_s)
    else:
        group.recv_object((rank + 1) % 3, timeout_s=run.within_s)


def late(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank == CULPRIT:
        time.sleep(run.within_s + 0.4)
    group.all_reduce(ones(), timeout_s=run.within_s)


def read_slowly(group: GroupCoordinator, rank: int, run: Run) -> None:
    end: Any = group.create_mq_broadcaster(0)
    if rank == 0:
        # It waits for room as long as the other readers wait for a message.
        while not all((run.directory / f"told-{other}").exists() for other in (1, 3)):
            with suppress(CommTimeoutError):
                end.enqueue(bytes(1 << 20), timeout_s=run.within_s)
        return
    others = [other for other in range(RANKS) if other != CULPRIT]
    if rank == CULPRIT:
        wait_until(lambda: all((run.directory / f"told-{other}").exists() for other in others), "the others")
        return
    while not run.looked.exists():
        with suppress(CommTimeoutError):
            # At another moment than the writer, which has a new deadline then.
            end.dequeue(timeout_s=0.7 * run.within_s)


def left_without_a_writer(group: GroupCoordinator, rank: int, run: Run) -> None:
    end: Any = group.create_mq_broadcaster(CULPRIT)
    if rank == CULPRIT:
        end.enqueue(1)
        # The readers are idle before the writer dies.
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        end.dequeue(timeout_s=60.0)


def all_killed(group: GroupCoordinator, rank: int, run: Run) -> None:
    if rank == CULPRIT:
        time.sleep(60.0)
    group.all_reduce(ones(), timeout_s=60.0)


ALL: Final = tuple(range(RANKS))
FAULTS: Final = {
    "kill": Fault(killed, "dead", (CULPRIT,), "all_reduce", 6, dead=(CULPRIT,)),
    "stop": Fault(stopped, "root cause", (CULPRIT,), "all_reduce", 6, dead=(CULPRIT,)),
    "sleep": Fault(asleep, "root cause", (CULPRIT,), "all_reduce", 6),
    "missed call": Fault(missed, "divergent", (CULPRIT,), "all_gather", 6),
    "missed call before a barrier": Fault(missed_before_a_barrier, "order", (CULPRIT,), "barrier", 3),
    "swapped calls": Fault(swapped, "divergent", (CULPRIT,), "all_gather", 6),
    "wrong dtype": Fault(mistyped, "divergent", (CULPRIT,), "all_reduce", 6),
    "cross-group cycle": Fault(
        *(crossed, "order", (0, 1, 2), "all_reduce", 1), within_s=LOOKED_AT_S, says_itself=True, is_brief=True
    ),
    "p2p cycle": Fault(
        *(received_in_a_circle, "order", (0, 1, 2), "recv_object", 0),
        within_s=LOOKED_AT_S,
        says_itself=True,
        is_brief=True,
    ),
    "late rank": Fault(
        *(late, "behind", (CULPRIT,), "all_reduce", 6),
        live_rule="root cause",
        within_s=LOOKED_AT_S,
        is_brief=True,
    ),
    "slow reader": Fault(read_slowly, "root cause", (CULPRIT,), "enqueue", 0),
    "dead writer": Fault(left_without_a_writer, "dead", (CULPRIT,), "dequeue", 0, dead=(CULPRIT,)),
    "kill -9 of all": Fault(all_killed, "root cause", (CULPRIT,), "all_reduce", 6, dead=ALL),
}


def suffer(rank: int, world_size: int, directory: Path, name: str, record: str, longer: float = 1.0) -> str:
    """Make some calls together, then let the fault happen; return the error that this rank raised.

    A brief fault lasts `longer` times as long as it says.
    """
    fault = FAULTS[name]
    join_world(rank, world_size, directory, record_dir=record)
    group = get_world_group()
    pids = group.all_gather_object(os.getpid())
    for _ in range(5):
        group.all_reduce(ones())
    if not fault.says_itself:
        Path(f"{record}-begins-{rank}").touch()
    run = Run(directory, fault.within_s * (longer if fault.is_brief else 1.0), Path(record))
    found = outcome_of(lambda: fault.happens(group, rank, run))
    Path(f"{record}-over-{rank}").touch()
    witnesses = [other for other in range(world_size) if other not in fault.dead]
    meet(rank, witnesses, directory, "told")
    wait_until(run.looked.exists, "the look")
    if rank == 0 and "stop" in name:
        os.kill(pids[CULPRIT], signal.SIGKILL)
    destroy_distributed_environment()
    return str(found["kind"])
