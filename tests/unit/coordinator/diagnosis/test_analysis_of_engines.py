"""Who is named where an engine, which is in no group, writes to the ranks."""

from typing import Any

import msgspec
import pytest

from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.evidence import Evidence, Process, ProcessState
from coordinator.diagnosis.queues import Ring
from tests.fake_pages import SECOND, FakeRank
from tests.unit.coordinator.diagnosis.test_analysis import first, job, queue

ENGINE = 4009


def engine(state: ProcessState = "alive") -> Process:
    """Return the process of an engine, which has no group and no rank, and writes the queue of `steps`."""
    writer = FakeRank(ENGINE - 4000, 4).queue("engine", 5, -1)
    return msgspec.structs.replace(
        writer.process(state=state), page=msgspec.structs.replace(writer.page(), rank=None, world_size=0)
    )


def steps(*behind: int, waits: bool = True, **words: Any) -> Ring:
    """Return the queue from the engine to the ranks, whose last message is 3 s old."""
    published_ns = engine().now_ns - 3 * SECOND
    return msgspec.structs.replace(
        queue(False, *behind, waits=waits),
        **{"name": "engine", "pid": ENGINE, "rank": None, "published_ns": published_ns, **words},
    )


def answers(rank: int) -> Ring:
    """Return the queue from a rank to the engine, which waits for an answer."""
    (reader, *_) = queue(False, 0, waits=True).readers
    end = msgspec.structs.replace(reader, pid=ENGINE, rank=None)
    return msgspec.structs.replace(
        queue(False), name="answers", inode=6, pid=4000 + rank, rank=rank, readers=(end,)
    )


def workers() -> list[FakeRank]:
    """Return the ranks that read what the engine writes."""
    return [rank.queue("engine", 5, rank.rank - 1) for rank in job("barrier")]


@pytest.mark.guarantee("W3")
def test_a_stopped_engine_is_named_and_an_idle_one_is_not() -> None:
    """It is in no group and has no rank: its queue, pid and host tell who it is, and its last message since when."""
    ranks = [rank.process() for rank in workers()]
    assert judge(Evidence((*ranks, engine()), (steps(0, 0, 0),))).findings == ()
    verdict = judge(Evidence((*ranks, engine("stopped")), (steps(0, 0, 0),)))
    (found,) = verdict.findings
    assert (found.rule, found.ranks, found.call, found.group) == ("root cause", (), "dequeue", "engine")
    (culprit,) = found.culprits
    assert (culprit.rank, culprit.pid, culprit.host) == (None, ENGINE, "node1")
    assert str(culprit) == (
        "writer of queue 'engine' (pid 4009 on node1): stopped, in no group, wrote message #50 of 'engine' 3.0 s ago"
    )
    assert "rank 1 waits in dequeue on 'engine' for process 4009" in found.details
    assert verdict.seen == "5 processes, groups: tp:0"


@pytest.mark.parametrize(("behind", "waits"), [(1, True), (0, False)])
def test_a_stopped_engine_for_which_nobody_waits_is_not_named(behind: int, waits: bool) -> None:
    """The ranks have messages to read, or do something else."""
    ranks = [rank.process() for rank in workers()]
    ring = steps(behind, behind, behind, waits=waits)
    assert judge(Evidence((*ranks, engine("stopped")), (ring,))).findings == ()


def test_a_stopped_rank_whose_readers_wait_is_named() -> None:
    """The writer is rank 0, and nobody is in a call."""
    ranks = [rank.queue("steps", 5, rank.rank - 1) for rank in job("barrier")]
    processes = [rank.process(state="alive" if rank.rank else "stopped") for rank in ranks]
    found = first(*processes, rings=(queue(False, 0, 0, 0, waits=True),))
    assert (found.rule, found.ranks, found.group) == ("root cause", (0,), "steps")


def test_a_rank_that_leaves_a_call_out_and_waits_for_work_is_named_and_not_the_engine() -> None:
    """Rank 1 waits for the next step, the engine for rank 2's answer, and rank 2 in a call for rank 1."""
    ranks = workers()
    for rank in ranks:
        if rank.rank in (0, 2, 3):
            rank.enter("tp:0", "all_reduce")
    processes = (*(rank.process() for rank in ranks), engine())
    for rings in ((steps(0, 0, 0), answers(2)), (answers(2), steps(0, 0, 0))):
        found = first(*processes, rings=rings)
        assert (found.rule, found.ranks) == ("root cause", (1,)), found.text()


def test_an_engine_that_has_ended_without_closing_its_queue_is_dead() -> None:
    """Its readers have it open; an engine that has closed it has ended as it should."""
    ranks = [rank.process() for rank in workers()]
    (found,) = judge(Evidence((*ranks, engine("dead")), (steps(0, 0, 0, waits=False),))).findings
    assert (found.rule, [culprit.pid for culprit in found.culprits]) == ("dead", [ENGINE])
    closed = steps(0, 0, 0, waits=False, is_closed=True)
    assert judge(Evidence((*ranks, engine("dead")), (closed,))).findings == ()


def test_a_queue_of_another_job_is_not_mistaken_for_one_of_this_job() -> None:
    """The engine writes to the ranks of two jobs, which have the same numbers."""
    ranks = [rank.process() for rank in workers()]
    other = steps(0, 0, 0)
    readers = tuple(msgspec.structs.replace(reader, pid=9000) for reader in other.readers)
    other = msgspec.structs.replace(other, inode=7, readers=readers)
    ring = steps(0, 0, 0, waits=False)
    assert judge(Evidence((*ranks, engine("stopped")), (ring, other))).findings == ()
