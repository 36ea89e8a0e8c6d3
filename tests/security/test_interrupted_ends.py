"""A world that is joined or left by an interrupted call, or left by a signal handler, leaves nothing open."""

import dataclasses
import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator import create_stateless_group
from coordinator.bootstrap import rendezvous
from coordinator.bootstrap import secured as meeting
from coordinator.bootstrap.methods.address import Rendezvous, join_address, meet_at_rank_0
from coordinator.bootstrap.rendezvous import join_rendezvous, leave_world
from coordinator.bootstrap.secured import meet_by_hint
from coordinator.meeting import Offer, make_tickets, offer, withdraw
from coordinator.parallel_state import destroy_distributed_environment, init_distributed_environment
from coordinator.security import store, store_thread
from coordinator.security.store import secured
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommTimeoutError, NativeError, UsageError
from shm_broadcast.liveness import fork_count
from tests.handlers import Interrupt, alarm_in, handling_at, raising_at
from tests.harness import RankPool
from tests.leaks import Snapshot, leaked_since
from tests.ports import free_port, listening_ports
from tests.secured import HERE, VALUE, check_nothing, place, ranks_of, server_of
from tests.waiting import wait_until

LEAVING = (
    "/bootstrap/rendezvous.py",
    "/methods/address.py",
    *(f"/security/{name}.py" for name in ("store", "client", "store_thread")),
)


def settings_of(directory: Path, **settings: Any) -> CoordinatorSettings:
    path = directory / "secret"
    path.write_bytes(VALUE)
    path.chmod(0o600)
    return CoordinatorSettings.resolve({}, secret_file=str(path), **settings)


def keep(met: Rendezvous) -> None:
    """Make a rendezvous that of this process's world, which torch does not know."""
    group: Any = None
    rendezvous._world = rendezvous._World(group, met, fork_count(), {}, False)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("way", ["address", "directory"])
def test_a_world_whose_end_is_interrupted_anywhere_leaves_nothing(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a second call has returned, or a handler's call within the first: the address is free, no file is left."""
    monkeypatch.setattr(store_thread, "_END_S", 0.1)
    settings, port = settings_of(tmp_path), free_port()

    def meet() -> Rendezvous:
        if way == "address":
            return join_address(HERE, port, 0, 1, settings)
        return join_rendezvous(1, 0, f"file://{tmp_path}/meet", settings, False, False)

    before, others = Snapshot.take(), listening_ports()
    ends: list[Callable[[int], bool]] = [
        lambda step: raising_at(step, leave_world, LEAVING),
        lambda step: handling_at(step, leave_world, leave_world, LEAVING),
    ]
    for end in ends:
        step, comes = 0, True
        while comes:
            keep(meet())
            comes = end(step)
            leave_world()
            assert rendezvous._world is None
            assert listening_ports() == others
            assert not (tmp_path / "meet").exists()
            step += 1
        assert step > 15
    assert leaked_since(before) == []


JOINING = (
    *(
        "bootstrap/connections.py",
        "bootstrap/secured.py",
        "bootstrap/rendezvous.py",
        "bootstrap/blocking_calls.py",
    ),
    *("methods/address.py", "/contextlib.py", "/threading.py"),
)


@pytest.mark.guarantee("G9")
@pytest.mark.parametrize("way", ["address", "prefix", "directory", "ticket"])
def test_a_store_that_is_opened_by_an_interrupted_call_is_closed(tmp_path: Path, way: str) -> None:
    """Wherever the interrupt comes, until the caller has the store. Its address is free afterwards."""
    settings, others = settings_of(tmp_path, create_timeout_s=20.0), listening_ports()
    offers = list[Offer]()

    def meet() -> Rendezvous:
        if way == "address":
            return join_address(HERE, free_port(), 0, 1, settings)
        if way == "prefix":
            return meet_at_rank_0(HERE, free_port(), 0, 1, settings, run="run")
        if way == "directory":
            return join_rendezvous(1, 0, f"file://{tmp_path}/meet", settings, False, False)
        offers.append(offer(HERE))
        return rendezvous._meet_by_ticket(make_tickets(offers[-1:], [(0, 1)])[0], settings)

    for step in count():
        met = list[Rendezvous]()
        comes = raising_at(step, lambda met=met: met.append(meet()), JOINING)  # type: ignore[misc]
        for each in met:
            each.leave()
        for made in offers:
            withdraw(made.token)
        # The thread of an interrupted call may still be opening it.
        wait_until(
            lambda: not store._open and listening_ports() == others, f"the end of the store {step}", 10.0
        )
        if not comes:
            break
    assert step > 5


class StruckError(BaseException):
    """Raised by a signal handler."""


def strike() -> None:
    raise StruckError


@pytest.mark.guarantee("G9")
def test_ctrl_c_while_rank_0_waits_for_the_others_to_leave_ends_its_store(tmp_path: Path) -> None:
    """Without a second call: a rank that is still there is told, and the next world meets at the same address."""
    settings, port = settings_of(tmp_path), free_port()
    others = listening_ports()
    keep(join_address(HERE, port, 0, 2, settings))
    other = join_address(HERE, port, 1, 2, settings)
    with pytest.raises(StruckError), alarm_in("leave_world", strike):
        leave_world()
    assert listening_ports() == others
    with pytest.raises(dist.DistNetworkError, match="rank 0 has left"):
        other.store.check(["a"])
    other.leave()
    join_address(HERE, port, 0, 1, settings).leave()


class SlowStore(dist.HashStore):
    """The store of an agent that is stopped until `goes_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = threading.Event()

    def set(self, key: str, value: str) -> None:
        assert self.goes_on.wait(60.0)
        super().set(key, value)

    def check(self, keys: list[str]) -> bool:
        return self.goes_on.wait(60.0) and super().check(keys)


def by_hint(outer: dist.Store, rank: int, check: Callable[[], None], timeout_s: float = 0.1) -> None:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=timeout_s)
    meet_by_hint(place(rank), outer, HERE, settings, check)


@pytest.mark.guarantee("K7")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_launchers_store_that_does_not_answer_ends_the_meeting_at_the_deadline(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls have no deadline of their own. Once it answers, what was opened meanwhile is closed."""
    monkeypatch.setattr(meeting, "_ANSWER_S", 0.1)
    before = Snapshot.take()
    outer = SlowStore()
    with pytest.raises(CommTimeoutError, match="the launcher's store did not answer within 0.2 s"):
        by_hint(outer, rank, check_nothing)
    outer.goes_on.set()
    assert leaked_since(before) == []


def test_rank_0_that_is_interrupted_while_it_meets_by_hint_leaves_no_store() -> None:
    """Nobody takes the store that a thread has opened meanwhile."""
    before, others = Snapshot.take(), listening_ports()
    outer = SlowStore()
    with pytest.raises(StruckError):
        by_hint(outer, 0, strike, timeout_s=60.0)
    outer.goes_on.set()
    assert leaked_since(before) == []
    assert listening_ports() == others


class EndedStore(dist.HashStore):
    """The store of an agent that has ended."""

    def set(self, key: str, value: str) -> None:
        raise dist.DistNetworkError("planted")


def test_rank_0_that_cannot_tell_where_it_serves_does_not_serve() -> None:
    """Its own store is closed."""
    outer = EndedStore()
    before = Snapshot.take()
    with pytest.raises(NativeError, match="lost the connection to the launcher's store: planted"):
        by_hint(outer, 0, check_nothing, timeout_s=60.0)
    assert leaked_since(before) == []


def test_a_rank_that_gets_no_answer_whether_it_has_left_closes_its_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0's process is stopped just then. It does not count this rank as a member afterwards."""
    settings, port = settings_of(tmp_path, create_timeout_s=0.3), free_port()
    first = join_address(HERE, port, 0, 2, settings)
    store = secured(first.store)
    assert store is not None
    before = Snapshot.take()
    with monkeypatch.context() as patched:
        patched.setattr(server_of(store), "_answer", lambda *_: None)
        with pytest.raises(CommTimeoutError, match="did not answer within 0.3 s"):
            join_address(HERE, port, 1, 2, settings)
    assert leaked_since(before) == []
    wait_until(lambda: 1 not in ranks_of(store), "the rank's BYE at the server")
    first.leave()


def destroyed_by_a_handler(rank: int, world_size: int, directory: Path) -> list[str]:
    mine = directory / str(rank)
    mine.mkdir()
    settings, found = settings_of(mine, create_timeout_s=0.5), list[str]()

    def start() -> None:
        method = f"tcp://{HERE}:{free_port()}"
        init_distributed_environment(
            world_size,
            0,
            method,
            backend="gloo",
            settings=settings,
        )

    def join_destroy_and_strike() -> None:
        with pytest.raises(UsageError, match="a signal handler cannot initialise"):
            start()
        destroy_distributed_environment()
        raise StruckError

    for handler in (join_destroy_and_strike, destroy_distributed_environment):
        try:
            with alarm_in("init_distributed_environment", handler):
                start()
        except (StruckError, CommTimeoutError) as error:
            found.append(type(error).__name__)
    return found


@pytest.mark.guarantee("G9")
def test_a_signal_handler_may_destroy_the_world_that_is_being_joined(ranks2: RankPool) -> None:
    """It does not wait for the call that it interrupts, which goes on if the handler returns. Joining is refused."""
    for found in ranks2.run(destroyed_by_a_handler):
        assert found == ["StruckError", "CommTimeoutError"]


def interrupted_in_torch(rank: int, world_size: int, directory: Path) -> bool:
    settings = CoordinatorSettings.resolve({})
    with pytest.MonkeyPatch.context() as patched:
        for number in range(2):
            init_distributed_environment(
                world_size, rank, f"file://{directory}/{number}", backend="gloo", settings=settings
            )
            patched.setattr(dist, "destroy_process_group", _interrupted_once(dist.destroy_process_group))
            with pytest.raises(Interrupt):
                destroy_distributed_environment()
            assert dist.is_initialized()
            destroy_distributed_environment()
            assert not dist.is_initialized()
    return True


def _interrupted_once(call: Callable[..., None]) -> Callable[..., None]:
    calls = list[int]()

    def interrupted(*args: Any) -> None:
        if not args and not calls:
            calls.append(1)
            raise Interrupt
        call(*args)

    return interrupted


@pytest.mark.guarantee("G9")
def test_an_interrupted_end_of_torchs_world_is_finished_by_the_next_call(ranks2: RankPool) -> None:
    """The world stays ours until torch has let it go; then the next one can be joined."""
    assert ranks2.run(interrupted_in_torch) == [True, True]


def followed_by_another(rank: int, world_size: int, directory: Path) -> list[bool]:
    mine = directory / str(rank)
    mine.mkdir()
    settings, port, found = settings_of(mine), free_port(), []
    for _ in range(2):
        init_distributed_environment(1, 0, f"tcp://{HERE}:{port}", backend="gloo", settings=settings)
        world = rendezvous._world
        assert world is not None
        leave = world.rendezvous.leave
        world.rendezvous = dataclasses.replace(world.rendezvous, leave=_interrupted_once(leave))
        with pytest.raises(Interrupt):
            destroy_distributed_environment()
        found.append(port in listening_ports())
    destroy_distributed_environment()
    return [*found, port in listening_ports()]


@pytest.mark.guarantee("G9")
def test_the_next_world_finishes_the_end_of_the_last_one(ranks2: RankPool) -> None:
    """A handler has raised before rank 0's store was told to end; the address is free all the same."""
    assert ranks2.run(followed_by_another) == [[True, True, False]] * 2


ENDING = ("bootstrap/group_parts.py", "bootstrap/world.py", "methods/address.py", "bootstrap/fork_guard.py")


def struck_stateless(rank: int, world_size: int, directory: Path) -> list[int]:
    """Interrupt the end of a group at every place; return the places, and behind which the store still serves."""
    mine = directory / str(rank)
    mine.mkdir()
    settings, port, serving = settings_of(mine), free_port(), list[int]()
    for step in count():
        group = create_stateless_group(HERE, port, 0, 1, backend="gloo", settings=settings)
        comes = raising_at(step, group.destroy, ENDING)
        group.destroy()
        if port in listening_ports():
            serving.append(step)
            port = free_port()
        if not comes:
            return [step, *serving]
    raise AssertionError("the places come to an end")


@pytest.mark.guarantee("G35")
def test_a_stateless_group_whose_end_is_interrupted_anywhere_ends_its_store(ranks2: RankPool) -> None:
    """The call that was interrupted ends it, or another one if that had not begun."""
    for steps, *serving in ranks2.run(struck_stateless):
        assert steps > 20
        assert serving == []


def interrupted_stateless(rank: int, world_size: int, directory: Path) -> list[bool]:
    mine = directory / str(rank)
    mine.mkdir()
    settings, port, found = settings_of(mine), free_port(), []
    for where in ("process groups", "first step"):
        group = create_stateless_group(HERE, port, 0, 1, backend="gloo", settings=settings)
        assert port in listening_ports()
        with pytest.MonkeyPatch.context() as patched:
            if where == "first step":
                group._parts.after.insert(0, strike)
            else:
                patched.setattr(group._parts.process_groups, "destroy", strike)
            with pytest.raises(StruckError):
                group.destroy()
        found.append(port in listening_ports())
    return found


@pytest.mark.guarantee("G9")
def test_a_stateless_group_whose_end_is_interrupted_leaves_its_store(ranks2: RankPool) -> None:
    """The next one meets at the same address."""
    assert ranks2.run(interrupted_stateless) == [[False, False]] * 2
