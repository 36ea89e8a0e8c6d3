"""The meeting of members whose devices have come to rest, and the order of the steps by which an epoch ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import closing
from typing import cast
from unittest import mock

import pytest
import torch.distributed as dist

from coordinator.bootstrap.world import Line
from coordinator.elastic.ending import NOTHING, Ending, Meeting, ending_of
from coordinator.elastic.part import Note, Part
from coordinator.graph_capture import CaptureGuard
from device_comm.base import DeviceCommunicator
from shm_broadcast.errors import CommError, CommTimeoutError, CudaError, GroupBrokenError, PeerLostError
from shm_broadcast.liveness import PeerWatch, this_process
from tests.waiting import wait_until

RANKS = {7: 0, 9: 2}
"""Two members and their ranks."""


def meeting(store: dist.Store, me: int, dead: tuple[int, ...] = ()) -> Meeting:
    """Return one member's part in the meeting of attempt 3."""
    return Meeting(store, 3, me, lambda: dead, "the end")


def refused(call: Callable[[], object]) -> CommError:
    """Return with what a call is refused."""
    with pytest.raises(CommError) as caught:
        call()
    return caught.value


@pytest.mark.guarantee("D89")
def test_members_wait_until_all_have_come() -> None:
    """That a member has made its groups, as in a planned change, says nothing of the groups that end."""
    store, passed = dist.HashStore(), threading.Event()

    def come() -> None:
        meeting(store, 7).come(RANKS, 20.0)
        passed.set()

    store.set("3/made/7", "ok")
    store.set("3/made/9", "ok")
    thread = threading.Thread(target=come)
    thread.start()
    wait_until(lambda: store.check(["3/rest/7"]), "the first member")
    assert not passed.wait(0.1)
    meeting(store, 9).come(RANKS, 20.0)
    thread.join(20.0)
    assert passed.is_set()


def test_the_end_of_an_epoch_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    """Though both the log and what the meeting raises begin with it, on this rank and on those that it tells."""
    store, me = dist.HashStore(), this_process()
    failing = NOTHING._replace(
        quiesce=mock.Mock(side_effect=GroupBrokenError("the end of epoch 0: rank 1 is gone"))
    )
    line, note = Line(store, 0, 0, (), (), 1), Note(me, {}, {}, 0, 0, rank=0)
    with (
        closing(PeerWatch(me, {})) as watch,
        closing(Part(line, note, watch, mock.Mock(), failing, 1.0)) as part,
    ):
        part.finish(1)
    (record,) = caplog.records
    assert record.getMessage() == "the end of epoch 0: rank 1 is gone"
    assert store.get("1/rest/0") == b"rank 1 is gone"


@pytest.mark.guarantee("D10")
def test_an_error_of_a_handler_in_the_end_of_an_epoch_arrives_unchanged() -> None:
    """Though the end itself raises errors of that type, behind which the change goes on."""

    def lose(*_: object) -> None:
        raise PeerLostError("of another group", peers=(5,))

    store, me = dist.HashStore(), this_process()
    struck = NOTHING._replace(quiesce=lambda _: signal.raise_signal(signal.SIGUSR1))
    line, note = Line(store, 0, 0, (), (), 1), Note(me, {}, {}, 0, 0, rank=0)
    before = signal.signal(signal.SIGUSR1, lose)
    try:
        with (
            closing(PeerWatch(me, {})) as watch,
            closing(Part(line, note, watch, mock.Mock(), struck, 1.0)) as part,
            pytest.raises(PeerLostError, match="of another group"),
        ):
            part.finish(1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert store.get("1/rest/0") == b"rank 0 was interrupted (PeerLostError)"


@pytest.mark.guarantee("D88")
def test_a_member_that_cannot_come_says_why_at_once() -> None:
    """At the meeting itself, or, behind a failure, by giving up the attempt."""
    store = dist.HashStore()
    meeting(store, 9).refuse("the device has failed", 20.0)
    error = refused(lambda: meeting(store, 7).come(RANKS, 20.0))
    assert (type(error), str(error)) == (GroupBrokenError, "the end: the device has failed")
    store = dist.HashStore()
    store.set("3/made/9", "lost member 9 was interrupted")
    error = refused(lambda: meeting(store, 7).come(RANKS, 20.0))
    assert (type(error), str(error)) == (GroupBrokenError, "the end: lost member 9 was interrupted")


@pytest.mark.guarantee("D89")
def test_a_member_that_has_ended_or_is_late_is_named_by_its_rank() -> None:
    """Not by its number as a member."""
    error = refused(lambda: meeting(dist.HashStore(), 7, (9,)).come(RANKS, 20.0))
    assert isinstance(error, PeerLostError)
    assert error.peers == (2,)
    error = refused(lambda: meeting(dist.HashStore(), 7).come(RANKS, 0.05))
    assert isinstance(error, CommTimeoutError)
    assert error.missing == (2,)


class Steps:
    """Stands for a communicator that notes what is called."""

    def __init__(self, name: str, noted: list[str], failure: CommError | None = None) -> None:
        self.name, self.noted, self.failure = name, noted, failure

    def check_device(self) -> None:
        self.noted.append(f"check {self.name}")

    def end_calls(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self.noted.append(f"end {self.name}")

    def quiesce(self, timeout_s: float) -> None:
        assert timeout_s > 0
        self.noted.append(f"quiesce {self.name}")
        if self.failure is not None:
            raise self.failure

    def met(self, ranks: tuple[int, ...]) -> None:
        self.noted.append(f"met {self.name} {ranks}")


def ending(noted: list[str], *communicators: Steps) -> Ending:
    """Return the end of some groups."""
    guards: list[CaptureGuard] = []
    found = [cast("DeviceCommunicator", each) for each in communicators]
    return ending_of(found, guards, lambda: noted.append("destroy"))


@pytest.mark.guarantee("D87")
@pytest.mark.guarantee("D88")
def test_all_groups_end_their_calls_before_one_of_them_waits_for_the_device() -> None:
    """A kernel that waits for a lost rank leaves only when its own group is ended."""
    noted: list[str] = []
    end = ending(noted, Steps("tp", noted), Steps("dp", noted))
    end.check()
    end.quiesce(10.0)
    end.met((0, 2))
    end.destroy()
    assert noted == [
        *("check tp", "check dp", "end tp", "end dp", "quiesce tp", "quiesce dp"),
        *("met tp (0, 2)", "met dp (0, 2)", "destroy"),
    ]


@pytest.mark.guarantee("D88")
def test_a_device_that_has_failed_ends_the_steps() -> None:
    """The error arrives as it is."""
    noted: list[str] = []
    failure = CudaError("illegal address", library="fake", function="cuCtxSynchronize", code=700)
    end = ending(noted, Steps("tp", noted, failure), Steps("dp", noted))
    assert refused(lambda: end.quiesce(10.0)) is failure
    assert noted == ["end tp", "end dp", "quiesce tp"]
