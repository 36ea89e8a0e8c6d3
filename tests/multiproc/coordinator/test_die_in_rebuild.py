"""A process dies in the middle of a `rebuild`: whichever it is, and wherever it is, the others go on without it."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from coordinator.elastic.driver import Driver
from coordinator.elastic.ending import Meeting
from coordinator.elastic.protocol import Get, Operation, Pause, Put, Swap
from coordinator.errors import PeerLostError
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild import TIMEOUT_S, elastic_groups, end, failing, use
from tests.waiting import wait_until

OUTCOMES = {"Get present": "members", "Get confirm": "go", "Get made": "result"}
"""What is decided in a rebuild, each by whoever writes its key first, and the step that asks for it."""

FOLLOWS = (
    "Get members",
    "Dead",
    "Put present",
    "Get present",
    "Get joining",
    "Judge",
    "Put confirm",
    "Get confirm",
    "TearDown",
    "Build",
    "come to rest",
    "Put made",
    "Get made",
)
"""The steps of a member that finds everything decided by others; see `protocol.py`. A `Get` asks for several keys."""

LEADS = (
    *FOLLOWS[:4],
    "Choose",
    "Swap members",
    *FOLLOWS[4:8],
    "Swap go",
    *FOLLOWS[8:],
    "Swap result",
)
"""The steps of the member that decides everything."""

END = "the end"
"""Stands for a victim that has come to the end of its rebuild, and dies behind it."""


def step_of(wants: Operation) -> str:
    """Return the name of an operation: its kind, and the key, of several ones the last, without its numbers."""
    keys = wants.keys if isinstance(wants, Get) else (wants.key,) if isinstance(wants, (Put, Swap)) else ()
    return " ".join(
        (type(wants).__name__, *(key.split("/")[1 if key[0].isdigit() else 0] for key in keys[-1:]))
    )


class Steps:
    """The steps of one rank's rebuild. The rank that leads decides, and the victim dies before one of its steps."""

    def __init__(self, directory: Path, dies_before: str | None, leads: bool) -> None:
        self._death = directory / "death"
        self._taken = directory / "taken"
        self._dies_before = dies_before
        self._leads = leads
        self._seen = list[str]()
        self._do, self._come = Driver._do, Meeting.come

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        """Come by before each step."""

        def do(driver: Driver, wants: Operation) -> Any:
            # How often a rank pauses, and asks again behind that, is by chance: what it repeats is no step.
            if not isinstance(wants, Pause):
                self.before(step_of(wants))
            if isinstance(wants, Get) and not self._leads:
                self._wait_for_the_leader(driver, wants)
            return self._do(driver, wants)

        def come(meeting: Meeting, *args: Any) -> None:
            self.before("come to rest")
            self._come(meeting, *args)

        patch.setattr(Driver, "_do", do)
        patch.setattr(Meeting, "come", come)

    def before(self, step: str) -> None:
        """Die if this is the victim and its time has come."""
        if self._dies_before is None or step in self._seen:
            return
        if step == self._dies_before:
            self._taken.write_text(json.dumps(self._seen))
            self._death.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._seen.append(step)

    def _wait_for_the_leader(self, driver: Driver, wants: Get) -> None:
        """Ask for an outcome only once there is one, or nobody who would decide it."""
        name = OUTCOMES.get(step_of(wants))
        if name is not None:
            outcome = f"{wants.keys[0].partition('/')[0]}/{name}"
            wait_until(
                lambda: driver._store.check([outcome]) or self._death.exists(), f"{outcome} from the leader"
            )

    def taken(self) -> list[str]:
        """Return the steps that the victim has taken before it died."""
        return list(json.loads(self._taken.read_text()))


def dies_in_the_rebuild(
    rank: int, world_size: int, directory: Path, victim: int, is_led: bool, step: str
) -> dict[str, Any]:
    groups = elastic_groups(rank, world_size, directory)
    use(groups)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert failing(groups) is PeerLostError
    steps = Steps(directory, step if rank == victim else None, is_led == (rank == victim))
    with pytest.MonkeyPatch.context() as patch:
        steps.patch(patch)
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
    steps.before(END)
    try:
        sums = use(groups)
    except PeerLostError:
        groups = groups.rebuild(timeout_s=TIMEOUT_S)
        sums = use(groups)
    change = groups.change
    assert change is not None
    end(groups)
    world = [groups.world.rank, groups.world.world_size, *sums]
    return {"epoch": change.epoch, "world": world, "taken": steps.taken()}


def check_death_in_the_rebuild(victim: int, is_led: bool, step: str) -> None:
    """Kill `victim` of three ranks that are left of four before it does `step`; the other two go on together.

    Args:
        victim: The rank.
        is_led: Whether the victim decides everything, so far as it comes; else it finds everything decided.
        step: One of `LEADS` or `FOLLOWS`, or `END`.
    """
    found = run_ranks(dies_in_the_rebuild, 4, victim, is_led, step, expect_dead=[victim, 3])
    first, second = [each for each in found if each is not None]
    assert first["world"] == [0, 2, 1.0, 0.0, 1.0]
    assert second["world"] == [1, 2, 1.0, 1.0, 1.0]
    assert first["epoch"] == second["epoch"]
    steps = (*(LEADS if is_led else FOLLOWS), END)
    assert first["taken"] == list(steps[: steps.index(step)]), "the steps before its death"


@pytest.mark.guarantee("E5")
@pytest.mark.parametrize(
    ("victim", "is_led", "step"),
    [
        (0, True, "Swap members"),
        (1, False, "Put confirm"),
        (2, True, "TearDown"),
        (0, False, "come to rest"),
        (1, True, "Put made"),
        (2, True, "Swap result"),
        (0, True, END),
    ],
)
def test_a_rank_that_dies_in_a_rebuild_is_left_out_too(victim: int, is_led: bool, step: str) -> None:
    """The others complete the attempt without it, or the next one."""
    check_death_in_the_rebuild(victim, is_led, step)


@pytest.mark.thorough
@pytest.mark.guarantee("E5")
@pytest.mark.parametrize("is_led", [True, False], ids=["leads", "follows"])
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_can_die_at_each_step_of_a_rebuild(victim: int, is_led: bool) -> None:
    """Whichever rank, whether it decides or others do, before each of its steps, and behind the last one."""
    for step in (*(LEADS if is_led else FOLLOWS), END):
        check_death_in_the_rebuild(victim, is_led, step)
