"""Who is at fault when calls of Ray's actors fail: the dead, then who has caused it, then the others.

The module here stands for Ray: a call is a text, and has a result or an error.
"""

import types
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.integrations.ray import Meeting, RankActor, Seat, actor, meet, meeting, rank_actor, watch
from coordinator.integrations.ray import calls as module
from coordinator.integrations.ray.calls import collect
from coordinator.integrations.ray.library import import_ray
from coordinator.meeting import Offer, Ticket
from coordinator.settings import CoordinatorSettings
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


class Actors:
    """Ray and three actors, of which rank 1 raises in `join`; the others wait there until they hear of a loss."""

    def __init__(self) -> None:
        self.exceptions = Ray({}).exceptions
        self.outcomes: dict[tuple[str, int], Any] = {}
        self.heard: list[tuple[int, int, str]] = []
        self.handles = [types.SimpleNamespace(**self._methods(rank)) for rank in range(3)]

    def _methods(self, rank: int) -> dict[str, Any]:
        def offer(seat: Seat, ports: object) -> tuple[str, int]:
            port = 0 if seat.rank else 4000
            self.outcomes["offer", rank] = Offer(token=f"{rank:032x}", pid=7, host="127.0.0.1", port=port)
            return "offer", rank

        def join(ticket: Ticket, settings: object, backend: object) -> tuple[str, int]:
            if ticket.rank == 1:
                self.outcomes["join", rank] = RayTaskError(ValueError("no such weight"))
            return "join", rank

        def hear_of_loss(lost: int, how: str) -> tuple[str, int]:
            self.heard.append((rank, lost, how))
            self.outcomes["join", rank] = RayTaskError(PeerLostError("lost rank 1", peers=(1,)))
            self.outcomes["hear", rank] = None
            return "hear", rank

        return {each.__name__: types.SimpleNamespace(remote=each) for each in (offer, join, hear_of_loss)}

    def wait(self, calls: list[Any], num_returns: int = 1, timeout: float | None = None) -> Any:
        ready = [call for call in calls if call in self.outcomes]
        return ready[:num_returns], [call for call in calls if call not in ready[:num_returns]]

    def get(self, call: tuple[str, int]) -> Any:
        outcome = self.outcomes[call]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


@pytest.mark.guarantee("M7")
def test_the_others_hear_of_an_actor_that_cannot_join(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would wait for it until their deadline. The driver gets its error, once they have given up too."""
    actors = Actors()
    for place in (module, meeting):
        monkeypatch.setattr(place, "import_ray", lambda: actors)
    with pytest.raises(RayTaskError, match="no such weight") as caught:
        meet(actors.handles, SEATS, CoordinatorSettings.resolve({}))
    how = "it could not join: RayTaskError: remote traceback of no such weight"
    assert actors.heard == [(0, 1, how), (2, 1, how)]
    assert [note.partition(":")[0] for note in caught.value.__notes__[1:]] == ["rank 0", "rank 2"]


def test_an_actor_in_a_world_makes_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ticket would be refused when the others wait for it already."""
    context = types.SimpleNamespace(get_node_id=lambda: "n")
    monkeypatch.setattr(
        actor, "import_ray", lambda: types.SimpleNamespace(get_runtime_context=lambda: context)
    )
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    with pytest.raises(UsageError, match=r"rank 2 .* in a world already: let all actors leave first"):
        RankActor().offer(SEATS[2])


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
