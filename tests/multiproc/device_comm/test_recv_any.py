"""Messages from whichever rank sends first: what waiting costs, that no wake-up and no message is lost, how it ends."""

from __future__ import annotations

import random
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator.host.tags import OBJECT_TAG
from device_comm import health
from device_comm.cpu.channels import Channels
from device_comm.cpu.receiving_any import ReceivingAny
from shm_broadcast import codec
from shm_broadcast.errors import ClosedError, CommError, UsageError
from tests.channels import channels_of, health_of
from tests.handlers import alarm
from tests.harness import RankPool
from tests.idle import Spent, spent
from tests.queues import background
from tests.unit.shm_broadcast.test_signal_handlers import FEW, LONG_S, MANY, AlarmError, Numbered, alarms
from tests.worlds import meet, new_group, outcome_of, tell_when_waiting, world

TAG, OTHER_TAG = 1, 2
# A call whose wake-up is lost sleeps this long, which fails a test that has a shorter limit.
LOST_S = 40.0
# No wait of these tests may take so long, on any machine.
HANG_S = 120.0
LIMIT_S = 20.0
MIB = 1 << 20


def send(channels: Channels, obj: Any, dst: int, tag: int = TAG) -> None:
    """Send an object."""
    channels.send("host", "send", obj, (dst,), tag, LIMIT_S)


def recv(channels: Channels, src: int, tag: int = TAG, timeout_s: float | None = LIMIT_S) -> Any:
    """Receive an object from one rank."""
    return channels.recv("host", "recv", src, tag, timeout_s)


def recv_any(channels: Channels, tag: int = TAG, timeout_s: float | None = LIMIT_S) -> tuple[Any, int]:
    """Receive an object from any rank."""
    return channels.recv_any("host", "recv", tag, timeout_s)


def poll_any(
    channels: Channels, others: Sequence[int], tag: int, seen: dict[tuple[int, int], list[int]]
) -> None:
    """Receive as `recv_any` does, but outside of `GroupHealth.wait`, from which an exception breaks the group."""
    receivers = tuple([channels._receiver(src, "recv") for src in others])
    awaiting = ReceivingAny(receivers, tag, channels, channels._bells[0])
    until = time.monotonic() + HANG_S
    try:
        while not awaiting.poll(0.1):
            assert time.monotonic() < until
    except BaseException:
        awaiting.abandon()
        raise
    found = awaiting.found
    assert found is not None
    seen[found.receiver.peer, tag].append(found.message[0].number)


@contextmanager
def long_slices() -> Iterator[None]:
    """Let waiting calls look around so seldom that only a wake-up ends their sleep in time."""
    with mock.patch.object(health, "SLICE_S", LOST_S):
        yield


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    codec.register_type(
        Numbered, encode=lambda each: {"number": each.number}, decode=lambda data: Numbered(data["number"])
    )


@pytest.mark.guarantee("D91")
def test_a_strike_while_a_message_from_any_rank_is_landed_leaves_it() -> None:
    """The handler's exception passes, the group is intact, and the next receive returns the message."""

    def land(received: Any, _src: int) -> Any:
        if strikes:
            raise AlarmError(strikes.pop())
        return [received]

    strikes = ["struck"]
    with channels_of(2) as (zero, one):
        send(zero, "first", 1)
        send(zero, "second", 1)
        with pytest.raises(AlarmError):
            one.recv_any("host", "recv", TAG, LIMIT_S, land)
        assert one.recv_any("host", "recv", TAG, LIMIT_S, land) == (["first"], 0)
        assert recv_any(one) == ("second", 0)
        assert not health_of(one).is_broken


@pytest.mark.slow
@pytest.mark.guarantee("D73")
def test_waiting_for_64_ranks_costs_next_to_nothing() -> None:
    """The wait takes next to nothing of a core, and looks ten times a second, however many ranks there are."""
    with channels_of(65) as ranks:
        for src in range(1, 65):
            send(ranks[src], src, 0)
        assert sorted(recv_any(ranks[0])[0] for _ in range(1, 65)) == list(range(1, 65))

        def wait(found: list[int]) -> Spent:
            return spent(lambda: found.append(recv_any(ranks[0])[1]), resource.RUSAGE_THREAD)

        found: list[int] = []
        with background(lambda: wait(found)) as idle:
            time.sleep(1.5)
            send(ranks[64], "found", 0)
        with mock.patch.object(health, "SLICE_S", 0.001), background(lambda: wait(found)) as warm:
            time.sleep(1.5)
            send(ranks[7], "found", 0)
        assert found == [64, 7]
        assert warm[0].wakeups > 50
        # To look at the rings in turn took 20 % of a core.
        assert idle[0].wakeups_per_s < 15
        assert idle[0].wakeups_per_s * warm[0].per_wakeup_s < 0.005, (idle, warm)


@pytest.mark.guarantee("D73")
@pytest.mark.parametrize("nbytes", [10, 300_000, 3 * MIB], ids=["short", "streamed", "parts"])
def test_no_wake_up_is_lost(nbytes: int) -> None:
    """Every message wakes the receiver, also the first of a channel that its sender opens meanwhile."""
    count, size = 400 if nbytes < MIB else 40, 4
    with channels_of(size) as ranks, long_slices():

        def send_some(src: int) -> None:
            choose = random.Random(src)
            for number in range(count):
                time.sleep(choose.choice((0.0, 0.0, 0.0001, 0.001)))
                send(ranks[src], [number, bytes(nbytes)], 0)

        seen: dict[int, list[int]] = {src: [] for src in range(1, size)}
        with (
            background(lambda: send_some(1)),
            background(lambda: send_some(2)),
            background(lambda: send_some(3)),
        ):
            for _ in range(count * (size - 1)):
                (number, content), src = recv_any(ranks[0])
                assert len(content) == nbytes
                seen[src].append(number)
        assert all(numbers == list(range(count)) for numbers in seen.values())


@pytest.mark.guarantee("D73")
def test_other_threads_may_receive_from_the_same_ranks_meanwhile() -> None:
    """A thread that awaits one tag of one rank takes in what others await from any rank, and wakes them."""
    count = 300
    with channels_of(3) as ranks, long_slices():

        def send_some(src: int) -> None:
            choose = random.Random(src)
            for number in range(count):
                time.sleep(choose.choice((0.0, 0.0002, 0.001)))
                send(ranks[src], number, 0, OTHER_TAG)
                send(ranks[src], number, 0, TAG)

        def receive_others() -> list[int]:
            return [recv(ranks[0], 1, OTHER_TAG) for _ in range(count)]

        with (
            background(lambda: send_some(1)),
            background(lambda: send_some(2)),
            background(receive_others) as others,
        ):
            found = [recv_any(ranks[0]) for _ in range(2 * count)]
        assert others == [list(range(count))]
        for src in (1, 2):
            assert [number for number, each in found if each == src] == list(range(count))
        assert [recv(ranks[0], 2, OTHER_TAG) for _ in range(count)] == list(range(count))


@pytest.mark.guarantee("R14")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("least", [FEW, pytest.param(MANY, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("nbytes", "count"), [(10, 2000), (300_000, 150)])
def test_no_alarm_loses_or_repeats_a_message_from_any_rank(nbytes: int, count: int, least: int) -> None:
    """Messages of two ranks and tags, of which a handler interrupts the receiver, come once each and in order.

    A thorough test goes on until a thousand exceptions of the handler have struck inside of a receive.
    """
    with channels_of(3) as ranks:

        def send_all(src: int, first: int) -> None:
            for number in range(first, first + count):
                for tag in (TAG, OTHER_TAG):
                    send(ranks[src], [Numbered(number), bytes(nbytes)], 0, tag)

        for src in (1, 2):
            send(ranks[src], "opens the channel", 0)
            assert recv(ranks[0], src) == "opens the channel"
        seen: dict[tuple[int, int], list[int]] = {
            (src, tag): [] for src in (1, 2) for tag in (TAG, OTHER_TAG)
        }
        total, raised = 0, 0
        end = time.monotonic() + (HANG_S if least == FEW else LONG_S)
        while raised < least:
            one, two = (partial(send_all, src, total) for src in (1, 2))
            total += count
            with background(one), background(two), alarms(0.0003) as handler:
                handler.driver = sys._getframe().f_code
                for tag in (TAG, OTHER_TAG):
                    while sum(len(seen[src, tag]) for src in (1, 2)) < 2 * total:
                        assert time.monotonic() < end
                        try:
                            handler.is_armed = True
                            poll_any(ranks[0], (1, 2), tag, seen)
                        except AlarmError:
                            pass
                        handler.is_armed = False
                raised += handler.count
            assert all(numbers == list(range(total)) for numbers in seen.values())
            if least == FEW:
                break
        assert raised >= least


@pytest.mark.guarantee("D73")
def test_a_rank_that_always_has_a_message_does_not_keep_the_others_waiting() -> None:
    """The message of each of the other ranks comes within as many calls as there are ranks."""
    with channels_of(4) as ranks:
        for number in range(100):
            send(ranks[1], number, 0)
        for quiet in (2, 3):
            assert recv_any(ranks[0])[1] == 1
            send(ranks[quiet], "quiet", 0)
            assert quiet in [recv_any(ranks[0])[1] for _ in range(3)]
        # Those of one rank come in order.
        rest = [recv_any(ranks[0]) for _ in range(94)]
        assert rest == [(number, 1) for number in range(6, 100)]


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("outer", ["recv", "recv_any"])
@pytest.mark.parametrize("inner", ["recv", "recv_any"])
def test_a_handler_that_receives_inside_of_a_wait_for_the_same_rank_is_refused(
    outer: str, inner: str
) -> None:
    """It gets an error at once, wherever the wait is, where it could wait for ever. The interrupted wait goes on."""
    errors: list[str] = []
    is_over = threading.Event()
    is_inside = False
    with channels_of(3) as ranks:

        def handler(_number: int, _frame: FrameType | None) -> None:
            nonlocal is_inside
            # On a busy machine alarms come before the call waits, and inside of the handler's own call.
            if is_over.is_set() or is_inside or threading.get_ident() not in ranks[0]._waits:
                return
            is_inside = True
            try:
                call = recv_any if inner == "recv_any" else lambda channels, tag: recv(channels, 1, tag)
                call(ranks[0], OTHER_TAG)
            except UsageError as error:
                errors.append(str(error))
            finally:
                is_inside = False

        before = signal.signal(signal.SIGALRM, handler)
        # At several points of several slices, some of them at the end of one.
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.0333)

        def end() -> None:
            time.sleep(0.5)
            is_over.set()
            time.sleep(0.1)
            send(ranks[1], 3, 0)

        timer = threading.Thread(target=end)
        timer.start()
        try:
            found = recv_any(ranks[0])[0] if outer == "recv_any" else recv(ranks[0], 1)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            timer.join()
        assert found == 3
        assert len(errors) > 3
        assert [text for text in errors if "inside of a call on the channel with rank 1" not in text] == []
        # Nothing of the refused calls stays.
        send(ranks[1], 4, 0, OTHER_TAG)
        assert recv_any(ranks[0], OTHER_TAG) == (4, 1)


@pytest.mark.guarantee("R15")
@pytest.mark.parametrize("outer", ["recv", "irecv"])
def test_a_handler_that_receives_from_any_rank_inside_of_a_native_poll_is_refused(outer: str) -> None:
    """The messages come only behind the call that it interrupts, which goes on."""
    errors: list[UsageError] = []
    found: list[object] = []
    with channels_of(2) as ranks:
        send(ranks[1], "opens", 0)
        assert recv(ranks[0], 1) == "opens"
        endpoint = ranks[0]._receivers[1].endpoint

        def handler() -> None:
            if not endpoint.is_busy:
                signal.setitimer(signal.ITIMER_REAL, 0.001)
                return
            send(ranks[1], "late", 0, OTHER_TAG)
            try:
                recv_any(ranks[0], OTHER_TAG)
            except UsageError as error:
                errors.append(error)
            send(ranks[1], "next", 0)

        ranks[0]._first_spin_ns = 300_000_000 if outer == "recv" else 0
        with alarm(0.05, handler):
            if outer == "recv":
                found.append(recv(ranks[0], 1))
            else:
                ranks[0].irecv("host", "irecv", 1, TAG, LIMIT_S, found.append).wait()
        assert found == ["next"]
        assert "inside of a call on the channel with rank 1" in str(errors[0])
        assert recv_any(ranks[0], OTHER_TAG) == ("late", 1)


@pytest.mark.guarantee("D73")
def test_a_group_that_is_destroyed_ends_the_wait() -> None:
    """Another thread of the rank closes the channels."""
    with channels_of(3) as ranks, long_slices():
        with background(lambda: recv_any(ranks[0], timeout_s=None)) as outcome:
            time.sleep(0.3)
            start = time.monotonic()
            health_of(ranks[0]).close()
            ranks[0].close()
        assert isinstance(outcome[0], ClosedError)
        assert time.monotonic() - start < LIMIT_S


@pytest.mark.guarantee("D73")
def test_the_wait_goes_on_while_one_rank_may_still_send() -> None:
    """What a rank has sent before it left comes; the wait ends when all other ranks have left."""
    with channels_of(3) as ranks:
        with long_slices():
            send(ranks[1], "last words", 0)
            ranks[1].close()
            assert recv_any(ranks[0]) == ("last words", 1)
            with background(lambda: recv_any(ranks[0], timeout_s=None)) as outcome:
                time.sleep(0.3)
                send(ranks[2], 5, 0)
            assert outcome == [(5, 2)]
        with background(lambda: recv_any(ranks[0], timeout_s=None)) as ended:
            time.sleep(0.3)
            ranks[2].close()
        assert isinstance(ended[0], CommError)


def crowd(rank: int, world_size: int, directory: Path) -> list[int]:
    with world(rank, world_size, directory) as group:
        if rank:
            choose = random.Random(rank)
            for number in range(100):
                time.sleep(choose.random() * 0.002)
                group.send_object((rank, number), 0)
            group.barrier()
            return []
        channels: Channels = getattr(group._host, "_channels")  # noqa: B009 - of one host plane only
        found = [channels.recv_any("host", "recv", OBJECT_TAG, 60.0) for _ in range(100 * (world_size - 1))]
        group.barrier()
        assert all(src == sender for (sender, _), src in found)
        counts = Counter(src for _, src in found)
        return [counts[src] for src in range(1, world_size)]


@pytest.mark.guarantee("D73")
def test_more_ranks_than_cores_send_to_one(ranks4: RankPool) -> None:
    """Every message comes, with its sender."""
    assert ranks4.run(crowd, timeout_s=120)[0] == [100] * 3


def loses_a_rank(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with world(rank, world_size, directory) as first:
        group = new_group(first)
        if rank == 2:
            meet(rank, range(world_size), directory, "waits")
            signal.raise_signal(signal.SIGKILL)
        if rank == 0:
            tell_when_waiting(group, directory)
        else:
            meet(rank, range(world_size), directory, "waits")
        outcome = outcome_of(lambda: group.recv_any((1,), torch.float32))
        group.destroy()
        return outcome


@pytest.mark.guarantee("D7", "D73")
def test_the_loss_of_any_rank_is_told(ranks4: RankPool) -> None:
    """A wait without a deadline raises the loss of a rank that has never sent anything."""
    outcomes = ranks4.run(loses_a_rank, expect_dead={2})
    for outcome in (outcomes[0], outcomes[1], outcomes[3]):
        assert (outcome["kind"], outcome["peers"]) == ("PeerLostError", [2])
