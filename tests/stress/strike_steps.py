"""Calls of a group of their own in which a handler raises: they can be made again, or the group is broken for all."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from coordinator import ClosedError, GroupBrokenError, GroupCoordinator, PeerLostError
from tests.crash.test_interrupted_collectives import begun
from tests.stress.alarms import Alarms, StrikeError
from tests.stress.collective_steps import MAKERS, Check, dict_of
from tests.stress.message_steps import Queues, pretended_place
from tests.stress.model import MOST_BYTES, MismatchError, Model, check_same
from tests.stress.queue_reads import read_next

__all__ = ["calls"]

MOST_CALLS = 12
Made = Callable[[], object]


def calls(everyone: GroupCoordinator, alarms: Alarms, model: Model, name: str) -> None:
    """Make calls of a new group until one is left and breaks it. `everyone` tells the ranks how each call ended."""
    group = GroupCoordinator(
        [everyone.ranks],
        everyone.local_rank,
        "gloo",
        True,
        True,
        group_name=name,
        settings=Queues.settings(),
    )
    everyone.barrier()  # a rank that is still inside of the creation would rightly be told that the group is broken
    for number in range(model.plan.randrange(1, MOST_CALLS)):
        inner = model.inner(f"call {number}")
        victim, kind = inner.rank(), inner.plan.choice(sorted(CALLS))
        try:
            CALLS[kind](group, alarms, inner, victim)
            group.barrier()
            ended: tuple[bool, str] = (False, "")
        except (PeerLostError, GroupBrokenError) as error:
            ended = (True, _reason_of(group, error, group.rank_in_group == victim, victim))
        every = everyone.all_gather_object(ended)
        if len({is_broken for is_broken, _ in every}) != 1 or any(text for _, text in every):
            raise MismatchError(f"{kind} was struck on rank {victim} and ended as {every}")
        if ended[0]:
            break
    group.destroy()


def _reason_of(group: GroupCoordinator, error: Exception, is_victim: bool, victim: int) -> str:
    """Return nothing if this is how a group that a strike has broken fails, else what is wrong."""
    said = f"{type(error).__name__}: {error}, because of {error.__cause__!r}"
    if is_victim:
        return (
            "" if isinstance(error, GroupBrokenError) and isinstance(error.__cause__, StrikeError) else said
        )
    lost = error if isinstance(error, PeerLostError) else error.__cause__
    is_told = isinstance(lost, PeerLostError) and lost.peers == (group.ranks[victim],)
    return (
        "" if is_told and f"rank {group.ranks[victim]}" in str(lost) and "StrikeError" in str(lost) else said
    )


def _struck(group: GroupCoordinator, alarms: Alarms, call: Made) -> bool:
    """Make a call that is struck. Return whether it can be made again; a broken group raises here."""
    if alarms.strike(call) and group._health.is_broken:
        group.barrier()
        raise MismatchError("the barrier of a broken group ended without an error")
    return True


def _collective(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    start: Callable[[], object]
    check: Check
    if model.plan.random() < 0.8:
        start, check = model.plan.choice(MAKERS)(group, model)
    elif model.plan.random() < 0.5:
        start, check = group.barrier, lambda found: check_same(found, None, "barrier")
    else:
        every = [model.object(rank) for rank in range(model.world_size)]
        start = partial(group.all_gather_object, every[group.rank_in_group])
        check = lambda found: check_same(found, every, "all_gather_object")  # noqa: E731
    taken: list[object] = []

    def call() -> None:
        taken.append(start())

    if group.rank_in_group != victim:
        call()
    else:
        number = _numbers if model.is_apart else begun
        before = number(group)
        _struck(group, alarms, call)
        if not taken and number(group) == before:
            call()  # the strike came before the call had begun
    for found in taken:
        check(found)


def _numbers(group: GroupCoordinator) -> int:
    """Return how many collectives a rank has begun on both planes of a group over several hosts."""
    return sum(int(repr(each).strip("count()")) for each in group._health._numbers.values())


def _received(
    group: GroupCoordinator,
    alarms: Alarms,
    model: Model,
    victim: int,
    send: Made,
    receive: Callable[[], Any],
    expected: Any,
) -> None:
    """Let rank `victim` be struck while it receives what another rank sends.

    `receive` is written in Python: behind a native one a strike would lose what it has returned.
    """
    if group.rank_in_group == (victim + 1) % model.world_size:
        send()
    elif group.rank_in_group == victim:
        taken: list[Any] = []

        def call() -> None:
            taken.append(receive())

        while not taken:
            _struck(group, alarms, call)
        check_same(taken[0], expected, "what was received after strikes")


def _object(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    src, expected = (victim + 1) % model.world_size, model.object("sent")
    send = partial(group.send_object, expected, victim)
    _received(group, alarms, model, victim, send, lambda: group.recv_object(src), expected)


def _tensor(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    src, dtype = (victim + 1) % model.world_size, model.dtype()
    expected = model.tensor((model.count(),), dtype, "sent")
    if model.is_apart or model.plan.random() < 0.5:
        receive: Callable[[], Any] = lambda: group.recv(expected.shape, dtype, src)  # noqa: E731
    else:
        receive = lambda: group.recv_any(expected.shape, dtype)[0]  # noqa: E731
    _received(group, alarms, model, victim, partial(group.send, expected, victim), receive, expected)


def _dict(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    src, expected = (victim + 1) % model.world_size, dict_of(model, "sent")
    send = partial(group.send_tensor_dict, expected, victim)
    _received(group, alarms, model, victim, send, lambda: group.recv_tensor_dict(src), expected)


def _broadcast(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    """Strike a rank that awaits an object that another one broadcasts."""
    src, expected = (victim + 1) % model.world_size, model.object("broadcast")
    taken: list[Any] = []

    def call() -> None:
        taken.append(group.broadcast_object(expected if group.rank_in_group == src else None, src))

    if group.rank_in_group != victim:
        call()
    while not taken:
        _struck(group, alarms, call)
    check_same(taken[0], expected, "what was broadcast")


def _sent(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    """Strike a rank that sends an object: it is sent whole or not at all, and the next one comes."""
    dst = (victim + 1) % model.world_size
    expected = model.object("sent") if model.plan.random() < 0.5 else _long(model, "sent")
    if group.rank_in_group == victim:
        _struck(group, alarms, partial(group.send_object, expected, dst))
        group.send_object("last", dst)
    elif group.rank_in_group == dst:
        found = group.recv_object(victim)
        if not (isinstance(found, str) and found == "last"):
            check_same(found, expected, "what was sent before the strike")
            check_same(group.recv_object(victim), "last", "what was sent after the strike")


def _sent_tensor(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    """Strike a rank that sends a long tensor, as `_sent`, in a call that waits or through a handle."""
    dst, waits = (victim + 1) % model.world_size, model.plan.random() < 0.5
    expected, last = _long(model, "sent"), _long(model, "sent").neg()
    if group.rank_in_group == victim:
        send: Made = lambda: group.send(expected, dst) if waits else group.isend(expected, dst).wait()  # noqa: E731
        _struck(group, alarms, send)
        group.send(last, dst)
    elif group.rank_in_group == dst:
        found = group.recv(last.shape, last.dtype, victim)
        if not torch.equal(found, last):
            check_same(found, expected, "what was sent before the strike")
            check_same(group.recv(last.shape, last.dtype, victim), last, "what was sent after the strike")


def _long(model: Model, *whose: object) -> torch.Tensor:
    """Return a tensor that a channel and a queue write in several parts, with handlers between them."""
    return model.tensor(
        (model.private(whose).randrange(MOST_BYTES // 12, MOST_BYTES // 4),), torch.float32, whose
    )


def _enqueued(group: GroupCoordinator, alarms: Alarms, model: Model, victim: int) -> None:
    """Strike a rank that enqueues long messages: one that is cut breaks the queue, and no reader gets it."""
    n, plan = model.world_size, model.plan
    places = [plan.randrange(2) for _ in range(n)] if plan.random() < 0.5 and not model.is_apart else [0] * n
    with pretended_place(places[group.rank_in_group]):
        end: Any = group.create_mq_broadcaster(victim)
    count = 0
    with end:
        for number in range(plan.randrange(1, 5)):
            expected = _long(model, number)
            try:
                if group.rank_in_group == victim:
                    while end.statistics().messages == count:
                        alarms.strike(partial(end.enqueue, expected))
                else:
                    own = model.private((number, group.rank_in_group))
                    read_next(end, expected, alarms, own, f"long message {number}")
                count += 1
            except GroupBrokenError as error:
                if group.rank_in_group != victim or not isinstance(error.__cause__, StrikeError):
                    raise
                break
            except ClosedError:
                break
    check_same(group.all_gather_object(count), [count] * n, "how many messages each rank has")


CALLS = {
    "collective": _collective,
    "collective again": _collective,
    "receiving an object": _object,
    "receiving a tensor": _tensor,
    "receiving a dict": _dict,
    "receiving a broadcast": _broadcast,
    "sending": _sent,
    "sending a tensor": _sent_tensor,
    "enqueuing": _enqueued,
}
"""By name: what a rank is struck in."""
