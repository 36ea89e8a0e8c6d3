"""Who is at fault when calls of Ray's actors fail: the dead, then who has caused it, then the others.

The module here stands for Ray: a call is a text, and has a result or an error.
"""

import types
from typing import Any

import pytest

from coordinator.integrations.ray import Meeting, RankActor, Seat, meet, rank_actor, watch
from coordinator.integrations.ray import calls as module
from coordinator.integrations.ray.calls import collect
from coordinator.integrations.ray.library import import_ray
from shm_broadcast.errors import CapabilityError, CommTimeoutError, PeerLostError, UsageError


class RayError(Exception):
    """As in Ray, the base of its errors."""


class RayActorError(RayError):
    """As in Ray, the death of an actor."""


class RaySystemError(RayError):
    """As in Ray, a result that cannot be had."""


class RayTaskError(RayError):
    """As in Ray, what a method has raised."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"remote traceback of {cause}")
        self.cause = cause


class Ray:
    """What `collect` calls of Ray; `wait` returns one call at a time, in the order of the dict, and then none."""

    def __init__(self, outcomes: dict[str, Any]) -> None:
        self.outcomes = outcomes
        others = ("WorkerCrashedError", "NodeDiedError", "OutOfMemoryError", "OwnerDiedError")
        self.exceptions = types.SimpleNamespace(
            RayError=RayError,
            RayTaskError=RayTaskError,
            RayActorError=RayActorError,
            **{name: type(name, (RayError,), {}) for name in others},
        )

    def wait(self, calls: list[str], timeout: float | None) -> tuple[list[str], list[str]]:
        return [call for call in self.outcomes if call in calls][:1], []

    def get(self, call: str) -> Any:
        outcome = self.outcomes[call]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


SEATS = [
    Seat(
        rank=rank,
        bundle=rank,
        node_id="n",
        address=f"10.0.0.{rank}",
        local_rank=rank,
        local_world_size=3,
    )
    for rank in range(3)
]


def collected(monkeypatch: pytest.MonkeyPatch, outcomes: dict[str, Any]) -> tuple[Any, list[tuple[int, str]]]:
    """Return what calls "0", "1" and "2" come to, and the deaths that were told."""
    told: list[tuple[int, str]] = []
    monkeypatch.setattr(module, "import_ray", lambda: Ray(outcomes))
    try:
        return collect(
            ["0", "1", "2"], SEATS, "test", 5.0, 5.0, lambda rank, how: told.append((rank, how))
        ), told
    except Exception as error:
        return error, told


def test_results_come_by_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ends first."""
    assert collected(monkeypatch, {"2": "c", "0": "a", "1": None}) == (["a", None, "c"], [])


class OtherActorError(RayTaskError, RayActorError):
    """As Ray raises what a method raises that has called a dead actor."""


@pytest.mark.guarantee("M8")
@pytest.mark.parametrize(
    "error", [RaySystemError("it holds a CUDA tensor"), OtherActorError(ValueError("other"))]
)
def test_an_actor_that_lives_is_not_told_lost(monkeypatch: pytest.MonkeyPatch, error: RayError) -> None:
    """Its result cannot be read here, or its method has raised the death of an actor of its own."""
    raised, told = collected(monkeypatch, {"0": "a", "1": error, "2": "c"})
    assert raised is error
    assert told == []


@pytest.mark.guarantee("M8")
def test_a_death_counts_before_what_it_has_caused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The survivors' errors come first and are notes; Ray's text on the dead actor is told at once."""
    lost = PeerLostError("lost rank 1", peers=(1,))
    outcomes = {
        "0": RayTaskError(lost),
        "1": RayActorError("The actor died.\nlong story"),
        "2": RayTaskError(lost),
    }
    error, told = collected(monkeypatch, outcomes)
    assert type(error) is PeerLostError
    assert error.peers == (1,)
    assert str(error) == "test: lost rank 1 on node 10.0.0.1: The actor died."
    assert error.__notes__ == ["rank 0: PeerLostError: lost rank 1", "rank 2: PeerLostError: lost rank 1"]
    assert told == [(1, "Ray has lost its actor on node 10.0.0.1: The actor died.")]


@pytest.mark.guarantee("M8")
def test_the_cause_counts_before_its_consequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of ours arrives as it was raised, with the rank in a note; nobody is told of a death."""
    outcomes = {"0": RayTaskError(PeerLostError("lost rank 2")), "2": RayTaskError(UsageError("bad shape"))}
    error, told = collected(monkeypatch, outcomes)
    assert type(error) is UsageError
    assert error.__notes__[0] == "test: raised by rank 2 on node 10.0.0.2"
    assert error.__notes__[1].startswith("rank 0: PeerLostError")
    assert told == []


def test_an_error_of_the_application_is_raised_as_ray_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends the wait at once: the other ranks may wait for that rank for as long as their deadline."""
    raised = RayTaskError(KeyError("weights"))
    assert collected(monkeypatch, {"1": raised})[0] is raised


def test_a_deadline_names_the_ranks_whose_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that have ended are not named."""
    error, _ = collected(monkeypatch, {"1": "done"})
    assert type(error) is CommTimeoutError
    assert error.missing == (0, 2)


def test_the_drivers_mistakes_are_named() -> None:
    """Before Ray is asked for anything."""
    with pytest.raises(UsageError, match="an actor for each seat, by rank; got 1 actors"):
        meet([object()], SEATS)
    with pytest.raises(UsageError, match=r"seats of ranks \[1, 0\]"):
        meet([object()] * 2, [SEATS[1], SEATS[0]])
    with pytest.raises(UsageError, match=r"ranks \[0, 1, 2\] were not made by rank_actor"):
        meet([object()] * 3, SEATS)
    with pytest.raises(UsageError, match="one call per rank: 3, not 1"):
        watch(["0"], Meeting((None,) * 3, tuple(SEATS)))
    with pytest.raises(UsageError, match="class derived from RankActor, not <class 'int'>"):
        rank_actor(int)  # type: ignore[arg-type]


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module can be imported without it; what needs it cannot be called."""
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(CapabilityError, match=r"pip install 'group-coordinator\[ray\]'"):
        import_ray()
    with pytest.raises(CapabilityError):
        rank_actor(RankActor)
