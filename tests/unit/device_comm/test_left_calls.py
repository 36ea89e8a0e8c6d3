"""With a fake status store: the notes of calls that handlers have left halfway, on several threads."""

import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest

from device_comm.stages import in_stages
from shm_broadcast.errors import DecodeError, GroupBrokenError, UsageError
from tests.handlers import Interrupt, alarm
from tests.unit.device_comm.test_health import OPERATION, Group


@pytest.fixture
def group() -> Group:
    """Return the health of rank 4."""
    return Group()


def in_thread(act: Callable[[], object]) -> None:
    """Run `act` on another thread, and raise what it raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in raised:
        raise error


def struck_twice(group: Group, stages: Callable[[], object]) -> None:
    """Leave a call by what `stages` raises, and strike again just as that is dealt with."""
    with mock.patch.object(group.health, "left_halfway", side_effect=Interrupt), pytest.raises(Interrupt):
        in_stages(group.health, OPERATION, stages)


def fail(error: BaseException) -> None:
    raise error


@pytest.mark.guarantee("D10")
def test_a_thread_whose_own_call_fails_keeps_the_mark_of_another(group: Group) -> None:
    """The call that a handler has left halfway still breaks the group."""
    struck_twice(group, lambda: fail(KeyboardInterrupt("first")))
    with pytest.raises(DecodeError):
        in_thread(lambda: in_stages(group.health, OPERATION, lambda: fail(DecodeError("a message"))))
    with pytest.raises(GroupBrokenError, match="first"):
        group.health.check_usable("barrier")


@pytest.mark.guarantee("D10")
def test_a_handlers_error_of_this_package_is_recognised_on_another_thread(group: Group) -> None:
    """It has left the main thread's call halfway; the frames of the other thread tell nothing of it."""

    def stages() -> None:
        with alarm(0.01, lambda: fail(UsageError("of a handler"))):
            while True:
                time.sleep(0.001)

    struck_twice(group, stages)
    with pytest.raises(GroupBrokenError, match="of a handler"):
        in_thread(lambda: group.health.check_usable("barrier"))


def test_an_error_of_the_call_itself_is_recognised_on_another_thread(group: Group) -> None:
    """It leaves nothing halfway."""
    struck_twice(group, lambda: fail(UsageError("of the call")))
    in_thread(lambda: group.health.check_usable("barrier"))
    group.health.check_usable("barrier")
