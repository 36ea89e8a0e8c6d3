"""Lives of a stress run: start the ranks of one, disturb them, and judge how it ended."""

import contextlib
import math
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import run_ranks
from tests.leaks import SHM
from tests.stress.life import CREATES, live
from tests.waiting import wait_until

__all__ = ["LifePlan", "plan_of", "run_life"]

HANG_S = 120.0
"""How much longer than planned a life may take before it counts as hanging; its ranks show their stacks then."""
BLAME_S = 15.0
"""Within how many seconds of a kill each survivor must raise. It takes milliseconds, but the machine is busy."""
HIT_AFTER_S = 1.5
MOST_STOPPED_S = 0.03
"""How long a rank is stopped. The shortest deadline of a life is 5 s."""
APART = 0.4
"""The share of lives whose ranks pretend to be on two hosts."""
KINDS = ("healthy", "healthy", "killed", "interrupted", "all interrupted", "struck")


@dataclass(frozen=True)
class LifePlan:
    """One life: the same ranks from their start to their end.

    Attributes:
        seed: What it is named and derived from.
        kind: How it is disturbed.
        ranks: Number of ranks.
        seconds: How long it lasts unless it is hit.
        culprits: Ranks that are hit.
        hit_after_s: When, after all ranks are ready.
        places: The host of each rank, a letter each.
    """

    seed: str
    kind: str
    ranks: int
    seconds: float
    culprits: tuple[int, ...]
    hit_after_s: float
    places: str


def plan_of(seed: int, number: int, most_ranks: int, kind: str | None = None) -> LifePlan:
    """Return life `number` of the run with `seed`."""
    name = f"{seed}:{number}"
    chosen = random.Random(name)
    kind = kind or KINDS[number % len(KINDS)]
    ranks = chosen.randint(2, most_ranks)
    culprits: Sequence[int] = ()
    if kind == "all interrupted":
        culprits = range(ranks)
    elif kind not in ("healthy", "struck"):
        culprits = chosen.sample(range(ranks), 2 if ranks > 3 and chosen.random() < 0.2 else 1)
    hit_after_s, seconds = chosen.uniform(0.0, HIT_AFTER_S), chosen.uniform(2.0, 6.0)
    places = "A" * ranks
    if chosen.random() < APART:
        others = chosen.sample(range(ranks), chosen.randrange(1, ranks))
        places = "".join("B" if rank in others else "A" for rank in range(ranks))
    return LifePlan(name, kind, ranks, seconds, tuple(sorted(culprits)), hit_after_s, places)


def run_life(plan: LifePlan) -> int:
    """Run one life; return how many steps its ranks have taken.

    Raises:
        AssertionError: A rank failed or hung, something arrived that nobody sent, a survivor blamed another rank than
            the culprit or did so too late, or something was left behind. The text holds seed, step and rank.
    """
    before = _files()
    with tempfile.TemporaryDirectory(prefix="st-") as marks, contextlib.ExitStack() as ends:
        disturber = _Disturber(plan, Path(marks))
        ends.callback(disturber.end)
        found = run_ranks(
            live,
            plan.ranks,
            plan.seed,
            plan.seconds,
            marks,
            list(plan.culprits),
            plan.kind,
            plan.places,
            timeout_s=plan.seconds + HANG_S,
            expect_dead=plan.culprits if plan.kind == "killed" else (),
            while_running=disturber.start,
        )
        disturber.end()
    left = _files() - before
    if left:
        raise AssertionError(f"life {plan.seed} left files behind: {sorted(left)}")
    for rank, each in enumerate(found):
        try:
            _judge(plan, rank, each, disturber.hit_at)
        except AssertionError as error:
            error.add_note(f"the ranks ended so: {found}")
            raise
    steps: int = max(each["steps"] for each in found if each is not None)
    return steps


def _judge(plan: LifePlan, rank: int, found: dict[str, Any] | None, hit_at: float) -> None:
    said = f"life {plan.seed}, {plan.kind} {list(plan.culprits)} of {plan.places}, rank {rank}: {found}"
    if found is None or not plan.culprits:
        return
    if rank in plan.culprits and found["end"] == "KeyboardInterrupt":
        return
    # A rank that is hit before others have seen it in a creation does not come: they miss it at the deadline.
    is_late = found["doing"] in CREATES and found["end"] == "CommTimeoutError"
    if not is_late and (
        found["end"] not in ("PeerLostError", "GroupBrokenError") or found["blamed"] != "PeerLostError"
    ):
        raise AssertionError(f"expected PeerLostError, or GroupBrokenError because of one. {said}")
    if not found["peers"] or not set(found["peers"]) <= set(plan.culprits):
        raise AssertionError(f"expected the culprits to be blamed, and nobody else. {said}")
    if found["at"] - hit_at > BLAME_S:
        raise AssertionError(f"blamed {found['at'] - hit_at:.1f} s after the hit. {said}")


def _files() -> set[str]:
    """Return what is left in /dev/shm; the directories of ranks are looked at by the harness.

    Other programs on the machine come and go: the names that Python gives to their semaphores and memory do not count,
    as the product makes none of those.
    """
    names = os.listdir(SHM) if SHM.exists() else []
    return {name for name in names if not name.startswith(("sem.mp-", "psm_"))}


class _Disturber:
    """Stops and continues ranks from time to time, and hits the culprits."""

    def __init__(self, plan: LifePlan, marks: Path) -> None:
        self.hit_at = 0.0
        self._plan = plan
        self._marks = marks
        self._random = random.Random(f"{plan.seed}/disturber")
        self._over = threading.Event()
        self._processes: list[int] = []
        self._thread = threading.Thread(target=self._disturb)

    def start(self, pids: Sequence[int]) -> None:
        """Begin with the processes that the harness has started."""
        self._processes = [os.pidfd_open(pid) for pid in pids]
        self._thread.start()

    def end(self) -> None:
        """Leave the processes alone."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
        while self._processes:
            os.close(self._processes.pop())

    def _disturb(self) -> None:
        if self._plan.culprits:
            ready = [self._marks / f"ready-{rank}" for rank in range(self._plan.ranks)]
            wait_until(
                lambda: self._over.is_set() or all(each.exists() for each in ready), "ranks that are ready"
            )
            self._stop_ranks(time.monotonic() + self._plan.hit_after_s)
            self._hit()
        self._stop_ranks(math.inf)

    def _stop_ranks(self, until: float) -> None:
        """Stop one rank after another, each for far less than any deadline: nobody may be blamed for it."""
        while not self._over.wait(min(self._random.uniform(0.005, 0.2), max(0.0, until - time.monotonic()))):
            if time.monotonic() >= until:
                return
            chosen = self._random.choice(self._processes)
            _send(chosen, signal.SIGSTOP)
            time.sleep(self._random.uniform(0.001, MOST_STOPPED_S))
            _send(chosen, signal.SIGCONT)

    def _hit(self) -> None:
        self.hit_at = time.monotonic()
        for rank in self._plan.culprits:
            _send(self._processes[rank], signal.SIGKILL if self._plan.kind == "killed" else signal.SIGINT)


def _send(process: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(process, number)
