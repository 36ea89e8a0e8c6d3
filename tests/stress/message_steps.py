"""Steps of a stress life in which ranks send each other messages and read queues."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import torch

from coordinator import CapabilityError, GroupCoordinator, P2POperation
from coordinator.queues import group_queues
from coordinator.settings import CoordinatorSettings
from shm_broadcast.endpoint import RemoteSettings
from shm_broadcast.liveness import ProcessIdentity, this_process
from shm_broadcast.queue import QueueWriter, dequeue_any
from shm_broadcast.settings import BroadcastSettings
from tests.stress.alarms import Alarms
from tests.stress.collective_steps import dict_of
from tests.stress.model import MismatchError, Model, check_same
from tests.stress.queue_reads import PATIENCE_S, read_any, read_next

__all__ = ["CREATION_S", "STEPS", "Queues", "pretended_place"]

RING_BYTES = 1 << 20
"""A quarter of the default, so that rings turn around often and more messages exceed half of one."""
MOST_LAG = 10
"""How many small messages a reader leaves unread between steps; they fill a thirtieth of the ring."""
STRUCK = 0.2
"""The share of calls that write a short message in which a handler may raise."""
LOST_AFTER_S = 5.0
"""How long a rank may be silent on TCP. The group learns of a death at once, and a stopped rank is busy for longer."""
CREATION_S = 8.0
"""A rank that is interrupted while it creates a group lives on, and the others may learn that at this deadline only."""


@dataclass
class Queues:
    """The queues of a group. Broadcasts have one writer; the answers of all ranks go to one reader.

    Ranks may pretend to be on two hosts. A queue then has readers in shared memory and others over TCP.

    Attributes:
        alarms: What strikes this rank's calls.
        ends: This rank's end of the broadcast of each rank.
        answer: This rank's writing end of the answers.
        answers: The reading ends, by rank, on rank `reader`.
        unread: By writer: what has been enqueued, and this rank has not read.
    """

    alarms: Alarms
    ends: list[Any]
    reader: int
    answer: Any
    answers: list[Any]
    unread: dict[int, list[Any]] = field(default_factory=dict)

    @classmethod
    def create(cls, group: GroupCoordinator, reader: int, alarms: Alarms, place: int) -> "Queues":
        """Create a broadcast from each rank, and answers to rank `reader`. Collective.

        Ranks with the same `place` share memory.
        """
        with pretended_place(place):
            ends = [group.create_mq_broadcaster(writer) for writer in range(group.world_size)]
            answer, answers = group.create_single_reader_mq_broadcasters(reader)
        unread: dict[int, list[Any]] = {writer: [] for writer in range(group.world_size)}
        return cls(alarms, ends, reader, answer, answers, unread)

    @staticmethod
    def settings() -> CoordinatorSettings:
        """Return the settings of a group with such queues."""
        return CoordinatorSettings.resolve(
            {},
            timeout_s=PATIENCE_S,
            create_timeout_s=CREATION_S,
            broadcast=BroadcastSettings(ring_bytes=RING_BYTES),
            remote=RemoteSettings(lost_after_s=LOST_AFTER_S),
        )


@contextmanager
def pretended_place(place: int) -> Iterator[None]:
    """Let the queues that are created in the block share memory between ranks with the same `place` only."""
    own = this_process()
    pretended = msgspec.structs.replace(own, network_namespace=own.network_namespace + place)

    def pretend() -> ProcessIdentity:
        return pretended

    with mock.patch.object(group_queues, "this_process", pretend):
        yield


def messages(group: GroupCoordinator, _: Queues, model: Model) -> None:
    """Send any number of tensors, objects and dicts between any ranks, and receive them in another order."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    streams: dict[tuple[int, int, str, int], list[int]] = {}
    sent = []
    for number in range(plan.randrange(1, 4 * n)):
        src, dst = plan.sample(range(n), 2)
        kind = plan.choice(("tensor", "tensor", "object", "dict"))
        tag = plan.choice((0, 0, 1, 7)) if kind != "dict" else 0
        streams.setdefault((src, dst, kind, tag), []).append(number)
        # Between hosts a call that sends may wait for its receiver, and here all ranks send first.
        sent.append((src, dst, kind, tag, number, plan.choice((True, False)) and not model.is_apart))
    shapes = {each[4]: (model.count(), model.dtype()) for each in sent}
    handles: list[Any] = []
    for src, dst, kind, tag, number, waits in sent:
        if src != me:
            continue
        if kind == "tensor":
            value = model.tensor((shapes[number][0],), shapes[number][1], number)
            if waits:
                group.send(value, dst, tag=tag)
            else:
                handles.append(group.isend(value, dst, tag=tag))
        elif kind == "object":
            if waits:
                group.send_object(model.object(number), dst, tag=tag)
            else:
                handles.append(group.isend_object(model.object(number), dst, tag=tag))
        elif waits:
            group.send_tensor_dict(dict_of(model, number), dst)
        else:
            handles += group.isend_tensor_dict(dict_of(model, number), dst)
    order = model.private(f"order of rank {me}")
    mine = {stream: list(numbers) for stream, numbers in streams.items() if stream[1] == me}
    while mine:
        stream = order.choice(sorted(mine))
        number = mine[stream].pop(0)
        if not mine[stream]:
            del mine[stream]
        _receive(group, model, stream, number, shapes[number])
    order.shuffle(handles)
    for handle in handles:
        handle.wait()


def _receive(
    group: GroupCoordinator,
    model: Model,
    stream: tuple[int, int, str, int],
    number: int,
    shape: tuple[int, torch.dtype],
) -> None:
    src, dst, kind, tag = stream
    what = f"{kind} {number} from rank {src} to rank {dst} with tag {tag}"
    if kind == "object":
        check_same(group.recv_object(src, tag), model.object(number), what)
    elif kind == "dict":
        check_same(_receive_dict(group, src, is_plain=bool(number % 2)), dict_of(model, number), what)
    else:
        expected = model.tensor((shape[0],), shape[1], number)
        if number % 2:
            found = torch.empty_like(expected)
            group.irecv(found, src, tag=tag).wait()
        else:
            found = group.recv((shape[0],), shape[1], src, tag=tag)
        check_same(found, expected, what)


def _receive_dict(group: GroupCoordinator, src: int, *, is_plain: bool) -> object:
    if is_plain:
        return group.recv_tensor_dict(src)
    found, handles, callbacks = group.irecv_tensor_dict(src)
    for handle in handles:
        handle.wait()
    for callback in callbacks:
        callback()
    return found


def from_any(group: GroupCoordinator, _: Queues, model: Model) -> None:
    """Let all ranks send tensors to one, which takes them as they come; between hosts it is told that it cannot."""
    if model.is_apart:
        try:
            group.recv_any((1,), torch.float32)
        except CapabilityError:
            return
        raise MismatchError("recv_any found a message of another host")
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    receiver, count, dtype, tag = model.rank(), model.count(100_000), model.dtype(), plan.choice((0, 3))
    each = plan.randrange(1, 4)
    if me != receiver:
        for number in range(each):
            group.send(model.tensor((count,), dtype, me, number), receiver, tag=tag)
        group.barrier()  # what a rank sends in a later step would be taken too
        return
    got = dict.fromkeys((rank for rank in range(n) if rank != me), 0)
    for _turn in range(each * (n - 1)):
        found, src = group.recv_any((count,), dtype, tag=tag)
        if got.get(src, each) == each:
            raise MismatchError(f"recv_any gave a message from rank {src} beyond its {each}")
        check_same(found, model.tensor((count,), dtype, src, got[src]), f"message {got[src]} of rank {src}")
        got[src] += 1
    group.barrier()


def batch(group: GroupCoordinator, _: Queues, model: Model) -> None:
    """Let every rank send and receive some tensors in one call, in an order of its own, and wait in another one."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    sent = [(*plan.sample(range(n), 2), plan.choice((0, 0, 2))) for _ in range(plan.randrange(1, 3 * n))]
    values = [model.tensor((model.count(60_000),), model.dtype(), number) for number, _ in enumerate(sent)]
    found: dict[int, torch.Tensor] = {}
    operations = []
    for number, (src, dst, tag) in enumerate(sent):
        if src == me:
            operations.append(P2POperation(verb="isend", tensor=values[number], peer=dst, tag=tag))
        elif dst == me:
            found[number] = torch.empty_like(values[number])
            operations.append(P2POperation(verb="irecv", tensor=found[number], peer=src, tag=tag))
    handles = group.batch_isend_irecv(operations)
    model.private(me).shuffle(handles)
    for handle in handles:
        handle.wait()
    for number, tensor in found.items():
        src, _dst, tag = sent[number]
        check_same(tensor, values[number], f"tensor {number} of a batch from rank {src} with tag {tag}")


def short(plan: random.Random, number: int) -> dict[str, Any]:
    """Return a message that fits into a small part of a ring."""
    return {"step": number, "data": bytes([number]) * plan.randrange(3000)}


def enqueue(end: QueueWriter, message: Any, alarms: Alarms | None) -> None:
    """Send a message once. A call that is struck has sent it or has not, and its count of messages tells which."""
    before = end.statistics().messages
    while end.statistics().messages == before:
        if alarms is None or not alarms.wants_strike(STRUCK):
            end.enqueue(message)
        else:
            alarms.strike(partial(end.enqueue, message))


def broadcast(group: GroupCoordinator, queues: Queues, model: Model) -> None:
    """Enqueue some messages; let each reader take them when it likes, in any of the ways to read."""
    me, plan, writer = group.rank_in_group, model.plan, model.rank()
    is_small = plan.random() < 0.6
    burst: list[Any] = []
    for number in range(plan.randrange(1, 12 if is_small else 4)):
        if is_small:
            burst.append(short(plan, number))
        elif plan.random() < 0.3:
            burst.append(model.tensor((plan.randrange(1 << 19),), torch.float32, "long", number))
        else:
            burst.append(dict_of(model, number))
    if me == writer:
        for each in burst:
            enqueue(queues.ends[writer], each, queues.alarms if is_small else None)
        return
    unread, own = queues.unread[writer], model.private(f"reader {me}")
    unread += burst
    left = own.randrange(MOST_LAG) if is_small else 0
    while len(unread) > left:
        read_next(queues.ends[writer], unread.pop(0), queues.alarms, own, f"message of rank {writer}")


def several(group: GroupCoordinator, queues: Queues, model: Model) -> None:
    """Let several ranks enqueue short messages; each rank reads all their queues with `dequeue_any`."""
    me, n, plan = group.rank_in_group, model.world_size, model.plan
    for writer in plan.sample(range(n), plan.randint(2, n)):
        burst = [short(plan, number) for number in range(plan.randrange(1, 9))]
        if me == writer:
            for each in burst:
                enqueue(queues.ends[writer], each, queues.alarms)
        else:
            queues.unread[writer] += burst
    others = {rank: end for rank, end in enumerate(queues.ends) if rank != me}
    read_any(others, queues.unread, queues.alarms, model.private(f"reader {me}"))


def answers(group: GroupCoordinator, queues: Queues, model: Model) -> None:
    """Let every rank answer to one reader, which takes what comes first."""
    me, n = group.rank_in_group, model.world_size
    each = model.plan.randrange(1, 4)
    for number in range(each):
        answer = {"rank": me, "number": number, "object": model.object(me, number)}
        queues.answer.enqueue(answer)
    if me != queues.reader:
        return
    got = [0] * n
    while min(got) < each:
        # Ranks that have gone on answer in a later step already.
        open_ = [rank for rank in range(n) if got[rank] < each]
        at, found = dequeue_any([queues.answers[rank] for rank in open_])
        src, number = open_[at], got[open_[at]]
        expected = {"rank": src, "number": number, "object": model.object(src, number)}
        check_same(found, expected, f"answer {number} of rank {src}")
        got[src] += 1


STEPS = {
    "messages": (messages, 20),
    "from_any": (from_any, 6),
    "batch": (batch, 6),
    "broadcast": (broadcast, 15),
    "several": (several, 8),
    "answers": (answers, 6),
}
"""By name: the step, and how often it is chosen in relation to others."""
