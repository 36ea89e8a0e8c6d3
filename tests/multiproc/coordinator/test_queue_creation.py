"""Creating a queue of a group when a rank ends in the middle."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.queues.group_queues import GroupQueues
from shm_broadcast.errors import CommTimeoutError, PeerLostError
from shm_broadcast.queue import QueueReader
from tests.harness import run_ranks
from tests.waiting import wait_until
from tests.worlds import outcome_of, world


def writer_dies(rank: int, world_size: int, directory: Path, is_reset: bool) -> dict[str, Any] | None:
    """Kill rank 0 once it has said that it has opened all its ends, which are none, and before rank 1 says so.

    With `is_reset` rank 1 finds its connection to rank 0 closed before that has ended.
    """
    (directory / f"pid-{rank}").write_text(str(os.getpid()))
    told = directory / "told"
    gather = GroupQueues._gather

    def gathering(queues: GroupQueues, obj: object) -> list[Any]:
        if obj == "":
            told.touch()
        return gather(queues, obj)

    def unanswered(*_args: object, **_kwargs: object) -> None:
        wait_until(told.exists, "the writer's word", 20.0)
        time.sleep(0.3)
        kill = partial(os.kill, int((directory / "pid-0").read_text()), signal.SIGKILL)
        if is_reset:
            ends_later = threading.Timer(0.3, kill)
            ends_later.daemon = True
            ends_later.start()
            raise PeerLostError("the segment is no longer offered")
        kill()
        wait_until(group._health.watch.lost, "the writer's end", 20.0)
        raise CommTimeoutError("no answer from the writer", missing=(0,))

    with world(rank, world_size, directory) as group, pytest.MonkeyPatch.context() as patches:
        if rank == 0:
            patches.setattr(GroupQueues, "_gather", gathering)
        else:
            patches.setattr(QueueReader, "open", unanswered)
        group.barrier()
        found = outcome_of(lambda: group.create_mq_broadcaster(0))
        return {**found, "is_broken": group._health.is_broken}


@pytest.mark.guarantee("D7")
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_writer_that_ends_while_its_readers_open_a_queue_is_named(*, is_reset: bool) -> None:
    """It answers no reader. All had its word that nothing had failed there, which it gave before.

    The kernel closes its connections before it says that the process has ended.
    """
    _, found = run_ranks(writer_dies, 2, is_reset, expect_dead=[0])
    assert (found["kind"], found["peers"], found["is_broken"]) == ("PeerLostError", [0], True)
