"""Exceptions of signal handlers that strike at the beginning of a collective, and collectives called by handlers."""

import random
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import (
    CallHandle,
    DisagreementError,
    GroupBrokenError,
    GroupCoordinator,
    PeerLostError,
    UsageError,
)
from tests.handlers import alarm, alarm_in
from tests.harness import RankPool
from tests.samples import sampled
from tests.waiting import wait_until
from tests.worlds import meet, new_group, world

# A call first polls, then sleeps for 50 ms, then waits in slices of 0.1 s, each in other code.
STRIKES_S = (0.0001, 0.0005, 0.001, 0.003, 0.01, 0.03, 0.049, 0.05, 0.051, 0.1)
CALLS: dict[str, Callable[[GroupCoordinator], Any]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(256)),
    "all_gather": lambda group: group.all_gather(torch.ones(300_000)),
    "barrier": lambda group: group.barrier(),
    "all_gather_object": lambda group: group.all_gather_object({"rank": group.rank}),
}
# What a group and its communicator both have.
BOTH: dict[str, Callable[[Any], Any]] = {
    "broadcast": lambda called: called.broadcast(torch.ones(256)),
    "reduce": lambda called: called.reduce(torch.ones(256)),
    "all_to_all": lambda called: called.all_to_all(torch.ones(256)),
    "scatter": lambda called: called.scatter(
        torch.empty(4), torch.ones(8) if called.rank_in_group == 0 else None
    ),
}
DIRECT: dict[str, Callable[[Any], Any]] = BOTH | {
    "all_reduce": lambda called: called.all_reduce(torch.ones(256)),
    "all_reduce with a deadline": lambda called: called.all_reduce(torch.ones(256), timeout_s=60.0),
    "all_reduce_": lambda called: called.all_reduce_(torch.ones(256)),
    "all_reduce_into_output": lambda called: called.all_reduce_into_output(torch.ones(256), torch.ones(256)),
    "short all_gather": lambda called: called.all_gather(torch.ones(256)),
    "long all_gather": lambda called: called.all_gather(torch.ones(300_000)),
}
CALLS |= BOTH
FLOATS = 256


def pair() -> list[torch.Tensor]:
    """Return two tensors for a call that takes several."""
    return [torch.ones(FLOATS), torch.ones(2, FLOATS)]


def coalesced(group: GroupCoordinator) -> None:
    """Make several calls as one."""
    with group.coalescing() as calls:
        calls.all_reduce(torch.ones(FLOATS))
        calls.all_gather(torch.ones(FLOATS))


def into(name: str, output: int, input_: int, **options: Any) -> Callable[[Any], Any]:
    """Return a call that fills a tensor of the caller."""
    return lambda group: getattr(group, name)(torch.empty(output), torch.ones(input_), **options)


def dispatched(group: GroupCoordinator) -> Any:
    """Send tokens to experts, and combine what comes back."""
    ids = torch.tensor([[0, 1], [1, 0]])
    routed = group.dispatch(torch.ones(2, 8), torch.ones(2, 2), ids, experts=2)
    return group.combine(routed.hidden_states, routed=routed)


# The calls whose forms those above have not: each runs code of its own until it waits.
MORE: dict[str, Callable[[GroupCoordinator], Any]] = {
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(FLOATS)),
    "reduce_scatterv": lambda group: group.reduce_scatterv(torch.ones(5, 8), 0, [2, 3]),
    "reduce_scatterv_into_output": lambda group: group.reduce_scatterv_into_output(
        torch.ones(5, 8), torch.empty(2 + group.rank_in_group, 8), 0, [2, 3]
    ),
    "gather": lambda group: group.gather(torch.ones(FLOATS)),
    "all_gatherv": lambda group: group.all_gatherv(torch.ones(2 + group.rank_in_group, 8), sizes=[2, 3]),
    "all_gatherv of unknown sizes": lambda group: group.all_gatherv(torch.ones(2 + group.rank_in_group, 8)),
    "all_reduce_coalesced": lambda group: group.all_reduce_coalesced(pair()),
    "all_gather_coalesced": lambda group: group.all_gather_coalesced(pair()),
    "reduce_scatter_coalesced": lambda group: group.reduce_scatter_coalesced(pair()),
    "coalescing": coalesced,
    "all_sum": lambda group: group.all_sum(1.5),
    "all_gather_into_tensor": into("all_gather_into_tensor", 2 * FLOATS, FLOATS),
    "reduce_scatter_tensor": into("reduce_scatter_tensor", FLOATS, 2 * FLOATS),
    "all_to_all_single": into("all_to_all_single", FLOATS, FLOATS),
    "all_reduce_": lambda group: group.all_reduce_(torch.ones(FLOATS)),
    "dispatch to all": lambda group: group.dispatch_router_logits(torch.ones(2, 8), torch.ones(2, 4)),
    "dispatch and combine": dispatched,
    "monitored_barrier": lambda group: group.monitored_barrier(60.0),
}
# Their handles are waited for; the group's own thread makes them.
ASYNCHRONOUS: dict[str, Callable[[GroupCoordinator], CallHandle[Any]]] = {
    "all_reduce": lambda group: group.all_reduce(torch.ones(FLOATS), async_op=True),
    "all_gather": lambda group: group.all_gather(torch.ones(300_000), async_op=True),
    "all_to_all": lambda group: group.all_to_all(torch.ones(FLOATS), async_op=True),
    "barrier": lambda group: group.barrier(async_op=True),
    "reduce_scatter": lambda group: group.reduce_scatter(torch.ones(FLOATS), async_op=True),
    "all_gather_into_tensor": lambda group: group.all_gather_into_tensor(  # type: ignore[dict-item,return-value]
        torch.empty(2 * FLOATS), torch.ones(FLOATS), async_op=True
    ),
    "all_reduce_coalesced": lambda group: group.all_reduce_coalesced(pair(), async_op=True),
}


def directly(call: Callable[[Any], Any]) -> Callable[[GroupCoordinator], Any]:
    """Return the call of the group's communicator instead of the group's own method."""
    return lambda group: call(group.device_communicator)


CALLS |= {f"the communicator's {name}": directly(call) for name, call in DIRECT.items()}


EVERY = CALLS | MORE
THOUSAND = 1000


class AlarmError(Exception):
    """What the handler raises."""


def begun(group: GroupCoordinator) -> int:
    """Return how many collectives this rank has begun natively, on both planes."""
    shared: Any = group._parts.communicator.context.shared
    return int(shared.device.core.number + shared.host.core.number)


KINDS: tuple[type[BaseException], ...] = (AlarmError, KeyboardInterrupt)
"""What handlers raise, in turn; the second is that of Ctrl-C."""


def once_begun(
    group: GroupCoordinator, act: Callable[[], object], told: Path | None = None
) -> Callable[[], None]:
    """Return a handler that acts as soon as a collective has begun, then makes the file `told`.

    On a slow machine the collective may not have begun yet at the first signal.
    """
    before, has_acted = begun(group), False

    def handler() -> None:
        nonlocal has_acted
        if begun(group) == before:
            signal.setitimer(signal.ITIMER_REAL, 0.00005)
        elif not has_acted:
            has_acted = True
            act()
            if told:
                told.touch()

    return handler


def strike_in(group: GroupCoordinator, kind: type[BaseException] = AlarmError) -> Callable[[], None]:
    """Return a handler that raises as soon as a collective has begun."""

    def strike() -> None:
        raise kind("struck")

    return once_begun(group, strike)


def struck(
    rank: int, world_size: int, directory: Path, names: list[str], strikes_s: Sequence[float] = STRIKES_S
) -> None:
    with world(rank, world_size, directory) as everyone:
        for number, after_s in enumerate(strikes_s):
            call, kind = EVERY[names[number % len(names)]], KINDS[number // len(names) % 2]
            with new_group(everyone, f"g{number}") as group:
                # A rank whose creation still confirms the memory would find the group broken.
                meet(rank, range(world_size), directory, f"created {number}")
                if rank == 0:
                    with pytest.raises(kind, match="^struck$"), alarm(after_s, strike_in(group, kind)):
                        call(group)
                    with pytest.raises(GroupBrokenError) as broken:
                        call(group)
                    assert isinstance(broken.value.__cause__, kind)
                    meet(rank, range(world_size), directory, f"struck {number}")
                else:
                    meet(rank, range(world_size), directory, f"struck {number}")
                    start = time.monotonic()
                    with pytest.raises(
                        PeerLostError, match=rf"interrupted: rank 0 .*{kind.__name__}"
                    ) as lost:
                        call(group)
                    assert lost.value.peers == (0,)
                    assert time.monotonic() - start < 10.0
            everyone.barrier()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", sampled(2, CALLS) + sampled(5, MORE))
def test_an_exception_of_a_handler_breaks_the_group_on_every_rank(ranks2: RankPool, name: str) -> None:
    """It arrives as it is, whenever it strikes; the other rank learns who was interrupted instead of waiting."""
    ranks2.run(struck, [name])


@pytest.mark.thorough
@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("part", range(4))
def test_a_thousand_exceptions_of_handlers_break_a_thousand_groups(ranks2: RankPool, part: int) -> None:
    """Up to 0.1 s into every kind of call, in groups that are made one after the other in the same processes."""
    choose = random.Random(part)
    strikes = [choose.choice((0.002, 0.02, 0.1)) * choose.random() for _ in range(THOUSAND // 4)]
    ranks2.run(struck, list(EVERY), strikes, timeout_s=600.0)


def struck_wait(rank: int, world_size: int, directory: Path, name: str) -> None:
    call = ASYNCHRONOUS[name]

    def strike() -> None:
        raise AlarmError("struck")

    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        expected = call(group).wait()
        for number, after_s in enumerate(STRIKES_S):
            if rank == 0:
                handle = call(group)
                with pytest.raises(AlarmError, match="^struck$"), alarm(after_s, strike):
                    handle.wait()
                meet(rank, range(world_size), directory, f"struck {number}")
                assert equal(handle.wait(), expected)
            else:
                meet(rank, range(world_size), directory, f"struck {number}")
                assert equal(call(group).wait(), expected)
        assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4


def equal(result: Any, expected: Any) -> bool:
    """Return whether two results of a call are equal."""
    if isinstance(expected, list):
        return len(result) == len(expected) and all(map(torch.equal, result, expected))
    return result is None if expected is None else torch.equal(result, expected)


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", sampled(3, ASYNCHRONOUS))
def test_an_exception_in_the_wait_for_an_asynchronous_call_ends_the_wait_alone(
    ranks2: RankPool, name: str
) -> None:
    """It arrives as it is; the call goes on, and the next wait returns its result."""
    ranks2.run(struck_wait, name)


def struck_twice(rank: int, world_size: int, directory: Path, name: str) -> None:
    call = CALLS[name]
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            again = mock.patch.object(group._health, "left_halfway", side_effect=AlarmError("again"))
            with pytest.raises(AlarmError, match="^again$"), again, alarm(0.01, strike_in(group)):
                call(group)
            # Nobody continues the call, so that whoever meets it says so instead of refusing for ever.
            with pytest.raises(GroupBrokenError, match="left by an exception of a signal handler"):
                call(group)
            meet(rank, range(world_size), directory, "struck")
        else:
            meet(rank, range(world_size), directory, "struck")
            with pytest.raises(PeerLostError, match="interrupted: rank 0"):
                call(group)
        everyone.barrier()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", ["the communicator's all_reduce", "the communicator's broadcast", "barrier"])
def test_a_second_exception_while_the_first_is_handled_refuses_no_call_for_ever(
    ranks2: RankPool, name: str
) -> None:
    """The call is marked as left before anything else can be struck; the next call breaks the group."""
    ranks2.run(struck_twice, name)


# What rank 0 is struck in, and what the other rank does behind it.
MESSAGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "recv": (
        lambda called: called.recv((4,), torch.float32, 1),
        lambda called: called.recv((4,), torch.float32, 0),
    ),
    "send": (
        lambda called: called.send(torch.ones(1 << 20), 1),
        lambda called: called.recv((1 << 20,), torch.float32, 0),
    ),
}


def struck_message(rank: int, world_size: int, directory: Path, name: str) -> None:
    call, awaits = MESSAGES[name]

    def strike() -> None:
        raise AlarmError("struck")

    with world(rank, world_size, directory) as everyone:
        for number in range(2):
            with new_group(everyone, f"g{number}") as group:
                meet(rank, range(world_size), directory, f"created {number}")
                if rank == 0:
                    with pytest.raises(AlarmError, match="^struck$"), alarm_in(name, strike):
                        call(group.device_communicator)
                    with pytest.raises(GroupBrokenError) as broken:
                        call(group.device_communicator)
                    assert isinstance(broken.value.__cause__, AlarmError)
                    meet(rank, range(world_size), directory, f"struck {number}")
                else:
                    meet(rank, range(world_size), directory, f"struck {number}")
                    with pytest.raises(PeerLostError, match=r"interrupted: rank 0 .*AlarmError"):
                        awaits(group.device_communicator)
            everyone.barrier()


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("name", MESSAGES)
def test_an_exception_in_a_message_of_the_communicator_breaks_the_group(ranks2: RankPool, name: str) -> None:
    """A receive that waits, and a send that is halfway, end on both ranks."""
    ranks2.run(struck_message, name)


def alarmed(rank: int, world_size: int, directory: Path) -> None:
    seen: list[float] = []
    with (
        world(rank, world_size, directory) as everyone,
        new_group(everyone) as group,
        alarm(0.001, lambda: seen.append(0.0), 0.0005),
    ):
        for number in range(1000):
            assert group.all_reduce(torch.full((8,), float(number))).tolist() == [2.0 * number] * 8
            if number % 10 == 0:
                group.barrier()
                assert group.all_gather_object(rank) == [0, 1]
        more = True
        while more:
            more = group.all_reduce(torch.tensor(float(len(seen) < 1000))).item() > 0


@pytest.mark.guarantee("D10")
def test_a_thousand_alarms_disturb_no_collective(ranks2: RankPool) -> None:
    """Handlers that return interrupt the sleeps of a waiting rank, and nothing else."""
    ranks2.run(alarmed)


def nested(rank: int, world_size: int, directory: Path, is_direct: bool) -> None:
    refusals: list[str] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as owner:
        group = owner.device_communicator if is_direct else owner

        def call_inside() -> None:
            # The first refusal leaves no trace by which the second would take the outer call for left.
            for _ in range(2):
                try:
                    group.all_reduce(torch.ones(4))
                except UsageError as error:
                    refusals.append(str(error))

        if rank == 0:
            for number, after_s in enumerate(STRIKES_S):
                with alarm(after_s, once_begun(owner, call_inside, directory / f"called {number}")):
                    assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
            with (
                pytest.raises(UsageError, match="^all_reduce .* on the same thread"),
                alarm(0.01, once_begun(owner, lambda: group.all_reduce(torch.ones(4)))),
            ):
                group.all_reduce(torch.ones(4))
            meet(rank, range(world_size), directory, "left")
        else:
            for number in range(len(STRIKES_S)):
                wait_until((directory / f"called {number}").exists, "the handler's calls")
                assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
            meet(rank, range(world_size), directory, "left")
            with pytest.raises(PeerLostError, match=r"interrupted: rank 0 .*UsageError"):
                group.all_reduce(torch.ones(4))
        everyone.barrier()
    assert len(refusals) == (2 * len(STRIKES_S) if rank == 0 else 0)
    assert all("called by a signal handler or a finalizer" in each for each in refusals)
    assert all(each.startswith("all_reduce ") for each in refusals), refusals


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("is_direct", [False, True])
def test_a_collective_inside_of_a_collective_is_refused(ranks2: RankPool, is_direct: bool) -> None:
    """The outer one goes on if the handler catches the refusal; if it does not, the group is broken on every rank."""
    ranks2.run(nested, is_direct)


# Calls that a handler makes while its thread is in a collective, and that fail without harm to anybody.
HARMLESS: dict[str, Callable[[GroupCoordinator], Any]] = {
    "collective": lambda group: group.all_reduce(torch.ones(4)),
    "no tensor": lambda group: group.all_reduce("no tensor"),  # type: ignore[call-overload]
    "no such rank": lambda group: group.send(torch.ones(4), 99),
    "no such rank for an object": lambda group: group.send_object("x", 99),
    "no deadline": lambda group: group.barrier(-1.0),
    "another shape": lambda group: group.recv((4,), torch.float32, 1),
}


def harmless(rank: int, world_size: int, directory: Path, is_in_turn: bool) -> None:
    failed: list[str] = []
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:

        def call_inside() -> None:
            for name, call in HARMLESS.items():
                try:
                    call(group)
                except (UsageError, DisagreementError):
                    failed.append(name)

        def follow(before: int) -> None:
            # The handler must find this thread's call behind that of the main thread.
            wait_until(lambda: begun(group) > before, "the call of the main thread")
            assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4

        def call_in_turn() -> None:
            with ThreadPoolExecutor(1) as other:
                turns = [other.submit(follow, begun(group))] if is_in_turn else []
                assert group.all_reduce(torch.ones(4)).tolist() == [2.0] * 4
                for turn in turns:
                    turn.result()

        # In the first slice of a call, which ends before it is waited for, and in later ones.
        for number, after_s in enumerate((0.01, 0.2, 0.06)):
            if rank == 1:
                group.send(torch.ones(3), 0)
            meet(rank, range(world_size), directory, f"turn {number}")
            if rank == 0:
                with alarm(after_s, once_begun(group, call_inside, directory / f"called {number}")):
                    call_in_turn()
            else:
                wait_until((directory / f"called {number}").exists, "the handler's calls")
                call_in_turn()
                # The refused barrier is on another plane than the sum that it interrupts, and takes its number there.
                with pytest.raises(DisagreementError, match="rank 0 refused barrier"):
                    group.barrier()
        group.barrier()
        everyone.barrier()
    assert failed == (list(HARMLESS) * 3 if rank == 0 else [])


@pytest.mark.guarantee("D10")
@pytest.mark.parametrize("is_in_turn", [False, True])
def test_no_failed_call_of_a_handler_disturbs_the_collective_that_it_interrupts(
    ranks2: RankPool, is_in_turn: bool
) -> None:
    """Whatever is wrong with that call, and whether or not another thread waits for its turn meanwhile."""
    ranks2.run(harmless, is_in_turn)


def cut_message(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        if rank == 0:
            with (
                pytest.raises(UsageError, match="inside of a call that sends to rank 1 already"),
                alarm_in("send", lambda: group.send_object("from the handler", 1)),
            ):
                group.send(torch.ones(1 << 20), 1)
            with pytest.raises(GroupBrokenError) as broken:
                group.send(torch.ones(4), 1)
            assert isinstance(broken.value.__cause__, UsageError)
            meet(rank, range(world_size), directory, "struck")
        else:
            meet(rank, range(world_size), directory, "struck")
            start = time.monotonic()
            with pytest.raises(PeerLostError, match=r"interrupted: rank 0 .*UsageError"):
                group.recv((1 << 20,), torch.float32, 0)
            assert time.monotonic() - start < 10.0
        everyone.barrier()


@pytest.mark.guarantee("D10")
def test_a_refused_call_that_a_handler_lets_through_cuts_no_message_in_silence(ranks2: RankPool) -> None:
    """The handler's error leaves the long send halfway: the receiver learns of it instead of waiting for the rest."""
    ranks2.run(cut_message)
