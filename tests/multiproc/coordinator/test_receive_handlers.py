"""Signal handlers that raise at any place of a call of a group that receives: no message is lost or repeated."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import (
    DecodeError,
    DisagreementError,
    GroupBrokenError,
    GroupCoordinator,
    PeerLostError,
    UsageError,
)
from tests.handlers import raising_at
from tests.harness import RankPool, run_ranks
from tests.torch_groups import torch_world
from tests.unit.shm_broadcast.test_signal_handlers import FEW, LONG_S, MANY, AlarmError, alarms
from tests.worlds import FarPool, meet, new_group, run_far, world

# No wait of these tests may take so long, on any machine.
HANG_S = 60.0
RANKS = range(2)
# More than the places of any call, and a few thousand.
STEPS, COUNT = 600, 3000
# The files in which a call receives, and in which handlers run.
FILES = (
    *(f"coordinator/{name}.py" for name in ("calls", "planes")),
    *(f"coordinator/collectives/{name}.py" for name in ("object_collectives", "point_to_point")),
    *(f"coordinator/collectives/{name}.py" for name in ("scalar_collectives", "tensor_dicts")),
    *(f"coordinator/host/{name}.py" for name in ("object_order", "shared")),
    *(f"coordinator/queues/{name}.py" for name in ("broadcast_order", "broadcaster")),
    *(f"device_comm/{name}.py" for name in ("base", "checks", "health", "movable")),
    *(f"device_comm/cpu/{name}.py" for name in ("channels", "channel_receiver", "communicator")),
    *(f"device_comm/cpu/{name}.py" for name in ("received_tensors", "receiving_any")),
    *(f"shm_broadcast/{name}.py" for name in ("queue", "timeouts", "codec/__init__", "ring/reader", "turn")),
    *(f"shm_broadcast/remote/{name}.py" for name in ("end", "ledger", "reader", "reads")),
)

# Where a receive from any rank that torch asks for passes outside of its wait: what is raised in that breaks the group.
ANY_FILES = (
    *(f"coordinator/torch_interop/{name}.py" for name in ("works", "process_group")),
    *("coordinator/torch_backend/process_group.py", "coordinator/collectives/point_to_point.py"),
    *("coordinator/host/shared.py", "device_comm/cpu/received_tensors.py"),
    *(f"device_comm/{name}.py" for name in ("checks", "movable", "outputs")),
)

Send = Callable[[GroupCoordinator, int], object]
Receive = Callable[[GroupCoordinator], Any]


def tensor(number: int) -> torch.Tensor:
    """Return a tensor that carries a number."""
    return torch.full((4,), float(number))


def number_of(received: Any) -> int:
    """Return the number that was sent."""
    if isinstance(received, dict):
        return int(received["number"])
    if isinstance(received, (tuple, list)):
        return number_of(received[0])
    return int(received[0]) if isinstance(received, torch.Tensor) else int(received)


SENDS: dict[str, Send] = {
    "recv": lambda group, number: group.send(tensor(number), 1),
    "tagged": lambda group, number: group.send(tensor(number), 1, tag=3),
    "object": lambda group, number: group.send_object(number, 1),
    "typed": lambda group, number: group.send_object([number], 1),
    "dict": lambda group, number: group.send_tensor_dict({"number": number, "tensor": tensor(number)}, 1),
    "broadcast": lambda group, number: group.broadcast_object(number, 0),
    "timed": lambda group, number: group.broadcast_object(number, 0),
    "converted": lambda group, number: group.broadcast_object([number], 0),
    "broadcast dict": lambda group, number: group.broadcast_tensor_dict({"number": number}, 0),
}

# Nothing is called behind the receive: what is lost there is the caller's.
RECEIVES: dict[str, Receive] = {
    "recv": lambda group: group.recv((4,), torch.float32, 0),
    "tagged": lambda group: group.recv((4,), torch.float32, 0, tag=3),
    "object": lambda group: group.recv_object(0),
    "typed": lambda group: group.recv_object(0, type=tuple[int]),
    "dict": lambda group: group.recv_tensor_dict(0),
    "broadcast": lambda group: group.broadcast_object(),
    "timed": lambda group: group.broadcast_object(timeout_s=30.0),
    "converted": lambda group: group.broadcast_object(type=tuple[int]),
    "broadcast dict": lambda group: group.broadcast_tensor_dict(),
}

BROADCASTS = ("broadcast", "timed", "converted", "broadcast dict")
POINT_TO_POINT = ("recv", "tagged", "object", "typed", "dict")
WAYS = [(kind, False) for kind in (*POINT_TO_POINT, *BROADCASTS)] + [(kind, True) for kind in BROADCASTS]


def sent_before(
    rank: int,
    directory: Path,
    group: GroupCoordinator,
    send: Send,
    receive: Callable[[], None],
    count: int,
    turn: str = "",
) -> None:
    """Let rank 0 send `count` messages, and the others receive behind that, so that they never wait."""
    if rank == 0:
        for number in range(count):
            send(group, number)
    ranks = range(group.world_size)
    meet(rank, ranks, directory, f"sent{turn}")
    try:
        if rank > 0:
            receive()
    finally:
        meet(rank, ranks, directory, f"received{turn}")


def group_of(everyone: GroupCoordinator, by_queue: bool) -> GroupCoordinator:
    """Return a group that broadcasts by a queue, or does not."""
    group = new_group(everyone)
    if by_queue:
        group.enable_broadcaster()
    return group


def struck_at_each_place(rank: int, world_size: int, directory: Path, kind: str, by_queue: bool) -> None:
    """Receive once for each place of the call, at which a handler raises, and again behind that."""
    with world(rank, world_size, directory) as everyone:
        group = group_of(everyone, by_queue)
        seen: list[int] = []

        def take() -> None:
            seen.append(number_of(RECEIVES[kind](group)))

        def receive() -> None:
            for step in range(STEPS):
                count = len(seen)
                is_struck = raising_at(step, take, FILES)
                if len(seen) == count:
                    assert is_struck
                    take()
                assert seen == list(range(step + 1)), step
                if not is_struck:
                    assert step > 1
                    break
            else:
                raise AssertionError("the call has more places")

        sent_before(rank, directory, group, SENDS[kind], receive, STEPS + 1)
        group.destroy()


@pytest.mark.guarantee("D91")
@pytest.mark.parametrize(("kind", "by_queue"), WAYS)
def test_a_strike_at_any_place_of_a_receive_leaves_the_message(
    ranks2: RankPool, kind: str, by_queue: bool
) -> None:
    """The handler's exception arrives as it is, and the same message comes with the next call."""
    ranks2.run(struck_at_each_place, kind, by_queue)


# Rank 0 writes to rank 1 on another host, or on its own host into a queue that reaches another host, too.
HOSTS = [["one", "another"], ["one", "one", "another"]]


@pytest.mark.guarantee("D91")
@pytest.mark.parametrize("places", HOSTS, ids=str)
@pytest.mark.parametrize("kind", BROADCASTS)
def test_a_strike_leaves_the_message_of_a_queue_that_reaches_other_hosts(
    places: list[str], kind: str
) -> None:
    """Its messages carry their numbers, and are counted when they are handed out."""
    body = struck_at_each_place
    run_ranks(run_far, len(places), places, body.__module__, body.__qualname__, kind, True)


def send_from(kind: str, first: int, group: GroupCoordinator, number: int) -> None:
    """Send the message with `number` of those that begin with `first`."""
    SENDS[kind](group, first + number)


def receive_among_alarms(
    rank: int, world_size: int, directory: Path, kind: str, by_queue: bool, least: int
) -> dict[str, Any]:
    """Receive `COUNT` messages at a time while a handler raises every 0.2 ms, until it has raised enough.

    Returns:
        Whether the group broke, what came, and how often the handler raised.
    """
    with world(rank, world_size, directory) as everyone:
        group = group_of(everyone, by_queue)
        seen: list[int] = []
        failures: list[str] = []
        raised: list[int] = []

        def receive() -> None:
            # The first message opens the channel and loads the codec's part for tensors.
            seen.append(number_of(RECEIVES[kind](group)))
            total = len(seen) - 1 + COUNT
            end = time.monotonic() + HANG_S
            with alarms(0.0002) as handler:
                handler.driver = sys._getframe().f_code
                while len(seen) < total and not failures:
                    assert time.monotonic() < end
                    try:
                        while len(seen) < total:
                            handler.is_armed = True
                            received = RECEIVES[kind](group)
                            handler.is_armed = False
                            seen.append(number_of(received))
                    except AlarmError:
                        pass
                    except (GroupBrokenError, PeerLostError) as error:
                        failures.append(str(error))
                raised.append(handler.count)

        def drain() -> None:
            for _ in range(COUNT):
                RECEIVES[kind](group)

        end = time.monotonic() + LONG_S
        for turn in itertools.count():
            assert time.monotonic() < end, sum(raised)
            send = partial(send_from, kind, turn * COUNT)
            sent_before(rank, directory, group, send, receive if rank == 1 else drain, COUNT, f" {turn}")
            if rank == 1 and (failures or least == FEW or sum(raised) >= least):
                (directory / "over").touch()
            meet(rank, range(world_size), directory, f"decided {turn}")
            if (directory / "over").exists():
                break
        group.destroy()
        return {"seen": seen, "failures": failures, "raised": sum(raised)}


@pytest.mark.slow
@pytest.mark.guarantee("D91")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("least", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("kind", "by_queue"), WAYS)
def test_no_alarm_loses_or_repeats_a_message_of_a_group(
    ranks2: RankPool, kind: str, by_queue: bool, least: int
) -> None:
    """Thousands of messages come once each and in order while a handler raises every 0.2 ms.

    A thorough test goes on until a thousand exceptions have struck inside of a receive.
    """
    body = receive_among_alarms
    outcome = ranks2.run(body, kind, by_queue, least, timeout_s=60.0 if least == FEW else LONG_S + 60.0)[1]
    assert outcome["failures"] == []
    assert len(outcome["seen"]) % COUNT == 0
    assert outcome["seen"] == list(range(len(outcome["seen"])))
    assert outcome["raised"] >= (1 if least == FEW else least)


@pytest.mark.slow
@pytest.mark.guarantee("D91")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("least", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
def test_no_alarm_loses_or_repeats_a_message_beside_readers_on_another_host(least: int) -> None:
    """As on one host. On the other one the strikes above are placed: pyzmq drops what a handler raises in its calls."""
    body, places = receive_among_alarms, HOSTS[1]
    within_s = 60.0 if least == FEW else LONG_S + 60.0
    arguments = (places, body.__module__, body.__qualname__, "broadcast", True, least)
    outcome = run_ranks(run_far, len(places), *arguments, timeout_s=within_s)[1]
    assert outcome["failures"] == []
    assert outcome["seen"] == list(range(len(outcome["seen"])))
    assert outcome["raised"] >= (1 if least == FEW else least)


def refused_and_received(receive: Callable[..., Any]) -> None:
    """Receive three numbers, of which one does not fit, and pass a type into which nothing can be decoded."""
    with pytest.raises(UsageError, match="decode to"):
        receive(type=lambda: None)
    assert receive(type=int) == 0
    with pytest.raises(DecodeError):
        receive(type=str)
    assert receive(type=int) == 2


def refuse_broadcasts(rank: int, world_size: int, directory: Path, by_queue: bool) -> None:
    """Receive broadcasts of which some do not fit."""
    with world(rank, world_size, directory) as everyone:
        group = group_of(everyone, by_queue)
        if rank == 0:
            for number in range(3):
                group.broadcast_object(number, 0)
        else:
            refused_and_received(group.broadcast_object)
        meet(rank, range(world_size), directory, "received")
        group.destroy()


def refuse_and_receive(rank: int, world_size: int, directory: Path) -> None:
    """Receive messages of which some do not fit."""
    with world(rank, world_size, directory) as everyone:
        group = new_group(everyone)
        if rank == 0:
            for number in range(3):
                group.send_object(number, 1)
            for number in range(2):
                group.send(tensor(number), 1)
                group.send(tensor(number), 1, tag=3)
        else:
            refused_and_received(partial(group.recv_object, 0))
            for tag in (0, 3):
                with pytest.raises(DisagreementError):
                    group.recv((5,), torch.float32, 0, tag=tag)
                assert group.recv((4,), torch.float32, 0, tag=tag)[0] == 1
        meet(rank, RANKS, directory, "received")
        group.destroy()


@pytest.mark.guarantee("D91")
def test_a_message_that_does_not_fit_goes_and_one_whose_type_is_refused_stays(ranks2: RankPool) -> None:
    """The next call meets the next message, or the same one."""
    ranks2.run(refuse_and_receive)


@pytest.mark.guarantee("D91")
@pytest.mark.parametrize("by_queue", [False, True])
@pytest.mark.parametrize("places", [["one", "one"], ["one", "another"]], ids=str)
def test_a_broadcast_that_does_not_fit_goes_and_one_whose_type_is_refused_stays(
    ranks2: RankPool, places: list[str], by_queue: bool
) -> None:
    """Also over Gloo, over which a receive cannot be put back: the order of broadcasts keeps it."""
    FarPool(ranks2, places).run(refuse_broadcasts, by_queue)


def refused_at_each_place(rank: int, world_size: int, directory: Path, kind: str, by_queue: bool) -> None:
    """Receive with a type that is refused, once for each place at which a handler raises, and well behind that."""
    with world(rank, world_size, directory) as everyone:
        group = group_of(everyone, by_queue)
        get = partial(group.recv_object, 0) if kind == "object" else group.broadcast_object

        def refuse() -> None:
            with pytest.raises(UsageError, match="decode to"):
                get(type=lambda: None)

        def receive() -> None:
            for step in range(STEPS):
                is_struck = raising_at(step, refuse, FILES)
                assert get() == step
                if not is_struck:
                    assert step > 1
                    break
            else:
                raise AssertionError("the call has more places")

        sent_before(rank, directory, group, SENDS[kind], receive, STEPS + 1)
        group.destroy()


@pytest.mark.guarantee("D91")
@pytest.mark.parametrize(
    ("kind", "by_queue", "places"),
    [
        ("object", False, ["one", "one"]),
        ("broadcast", False, ["one", "one"]),
        ("broadcast", True, ["one", "one"]),
        ("broadcast", True, ["one", "another"]),
    ],
    ids=str,
)
def test_a_strike_at_any_place_of_a_receive_that_is_refused_leaves_the_message(
    ranks2: RankPool, kind: str, by_queue: bool, places: list[str]
) -> None:
    """The next call gets it, whichever exception the caller has got."""
    FarPool(ranks2, places).run(refused_at_each_place, kind, by_queue)


@contextmanager
def torch_group(rank: int, world_size: int, directory: Path, is_backend: bool) -> Iterator[Any]:
    """Yield a group as torch knows it: one of the backend, or a group of ours as a process group."""
    if is_backend:
        with torch_world(rank, world_size, directory) as group:
            yield group
    else:
        with world(rank, world_size, directory) as everyone:
            yield everyone.as_process_group()


def received_from_any(group: Any, into: torch.Tensor) -> None:
    """Receive as torch does where no source is named."""
    work = group.recv_anysource([into], 0)
    work.wait()
    assert work.source_rank() == 0


def struck_in_any(rank: int, world_size: int, directory: Path, is_backend: bool) -> None:
    """Receive into a tensor from any rank; a handler raises at each place of the call."""
    with torch_group(rank, world_size, directory, is_backend) as group:
        if rank == 0:
            for number in range(STEPS + 1):
                group.send([tensor(number)], 1, 0).wait()
        meet(rank, range(world_size), directory, "sent")
        for step in range(STEPS) if rank == 1 else ():
            into = tensor(-1)
            work = group.recv_anysource([into], 0)
            is_struck = raising_at(step, work.wait, ANY_FILES)
            if not work.is_completed():
                assert is_struck
                work.wait()
            assert number_of(into) == step
            if not is_struck:
                assert step > 1
                break
        meet(rank, range(world_size), directory, "received")


@pytest.mark.guarantee("D91", "G41")
@pytest.mark.parametrize("is_backend", [False, True])
def test_no_receive_from_any_rank_through_torch_loses_a_message(ranks2: RankPool, is_backend: bool) -> None:
    """The tensor is filled before the message is taken: whatever a handler raises, the next wait fills it."""
    ranks2.run(struck_in_any, is_backend, check_leaks=not is_backend)


def unfit_for_any(rank: int, world_size: int, directory: Path, is_backend: bool) -> list[float]:
    """Receive from any rank into a tensor that overlaps itself, then into one that was made in inference mode."""
    with torch_group(rank, world_size, directory, is_backend) as group:
        if rank == 0:
            group.send([tensor(7)], 1, 0).wait()
        meet(rank, range(world_size), directory, "sent")
        found: list[float] = []
        if rank == 1:
            with pytest.raises(UsageError, match="overlaps itself"):
                received_from_any(group, torch.zeros(1).expand(4))
            with torch.inference_mode():
                into = torch.zeros(4, 2)[:, 0]
            received_from_any(group, into)
            found = into.tolist()
        meet(rank, range(world_size), directory, "received")
        return found


@pytest.mark.guarantee("D91", "G41")
@pytest.mark.parametrize("is_backend", [False, True])
def test_a_tensor_that_cannot_be_filled_takes_no_message(ranks2: RankPool, is_backend: bool) -> None:
    """It is refused before, and one that was made in inference mode is filled."""
    assert ranks2.run(unfit_for_any, is_backend, check_leaks=not is_backend)[1] == [7.0] * 4
