"""How a look at live processes sorts them into jobs, and calls into waits."""

from collections.abc import Sequence

import msgspec
import pytest

from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.live import evidence_of, jobs_of
from coordinator.diagnosis.model import Page
from coordinator.diagnosis.processes import Process
from coordinator.diagnosis.queues import Reader, Ring
from coordinator.diagnosis.top.sampling import Sample, Seen
from tests.fake_pages import SECOND, FakeRank

AT_NS = 2000 * SECOND


def seen(page: Page, pid: int | None, holders: Sequence[int], state: str = "S") -> Seen:
    """Return a page as a look finds it."""
    process = None
    if pid is not None:
        process = Process(
            pid=pid,
            start_ticks=1,
            state=state,
            command="rank",
            threads=1,
            cpu_ns=0,
            read_bytes=0,
            stored_bytes=0,
            written_bytes=0,
            waits_in="",
        )
    return Seen(page=page, pid=pid, process=process, holders=tuple(holders), job=0, shift_ns=0)


def ranks(number: int = 3) -> list[FakeRank]:
    """Return the ranks of one group, which have made a call."""
    members = tuple(range(number))
    return [FakeRank(rank, number).group("world:0", members).calls("world:0", "barrier") for rank in members]


def job(first_pid: int, dead: int | None = None, reader: int = 7) -> list[Seen]:
    """Return a job whose ranks keep each other's pages; the process `reader` has all of them open too."""
    pids = [None if rank == dead else first_pid + rank for rank in range(3)]
    found = []
    for rank, each in enumerate(ranks()):
        keepers = pids if rank == 0 else [pids[0], pids[rank]]
        page = msgspec.structs.replace(each.page(), pid=first_pid + rank)
        found.append(seen(page, pids[rank], [*(pid for pid in keepers if pid is not None), reader]))
    return found


@pytest.mark.parametrize("dead", [None, 0, 2])
def test_jobs_are_told_apart_by_who_keeps_whose_page(dead: int | None) -> None:
    """Two jobs have the same groups, and a process that reads all pages has a group of its own."""
    reader = FakeRank(0, 1).group("world:0", (0,)).page()
    both = [*job(100, dead), *job(200), seen(msgspec.structs.replace(reader, pid=7), 7, [7])]
    both.reverse()
    found = sorted([each.page.pid for each in found] for found in jobs_of(both))
    assert found == [[7], [100, 101, 102], [200, 201, 202]]


def without_group(pid: int, *queues: tuple[int, int]) -> Seen:
    """Return a process that has ends of queues alone, each as (inode, place)."""
    page = FakeRank(0, 1)
    for inode, place in queues:
        page.queue(f"queue {inode}", inode, place)
    return seen(msgspec.structs.replace(page.page(), pid=pid, rank=None, world_size=0), pid, [pid])


def test_who_has_queues_alone_belongs_to_each_job_with_which_it_has_one() -> None:
    """An engine writes to two jobs and is in both, so is the process behind it; two without groups are a job too."""
    jobs = [job(100), job(200)]
    for number, each in enumerate(jobs):
        page = msgspec.structs.replace(
            each[0].page, queues=FakeRank(0, 3).queue("steps", 10 + number, 0).page().queues
        )
        each[0] = msgspec.structs.replace(each[0], page=page)
    engine = without_group(7, (10, -1), (11, -1), (12, 0))
    both = [*jobs[0], *jobs[1], engine, without_group(8, (12, -1)), without_group(9)]
    both += [without_group(5, (20, -1)), without_group(6, (20, 0))]
    found = sorted([each.page.pid for each in found] for found in jobs_of(both))
    assert found == [[5, 6], [100, 101, 102, 7, 8], [200, 201, 202, 7, 8]]


def look(pages: Sequence[Seen]) -> Sample:
    """Return one look."""
    return Sample(at_ns=AT_NS, seen=tuple(pages), rings=(), refused=(), faults={})


@pytest.mark.guarantee("W3")
@pytest.mark.parametrize(
    ("since_s", "was_in_it", "is_named"), [(5, True, True), (0.5, True, False), (5, False, False)]
)
def test_a_wait_is_a_call_that_goes_on_for_long_in_both_looks(
    since_s: float, was_in_it: bool, is_named: bool
) -> None:
    """A call that has just begun, or that was not there before, is none."""
    all_ranks = ranks()
    before = look([seen(each.page(), 100 + each.rank, [100]) for each in all_ranks])
    begin_ns = AT_NS - int(since_s * SECOND)
    for each in all_ranks[:2]:
        each.enter("world:0", "all_reduce", begin_ns=begin_ns)
    now = look([seen(each.page(), 100 + each.rank, [100]) for each in all_ranks])
    findings = judge(evidence_of(now if was_in_it else before, now, now.seen, 1.0)).findings
    assert [(found.rule, found.ranks) for found in findings] == ([("root cause", (2,))] if is_named else [])


@pytest.mark.parametrize("left", [(0, 1, 2), (0, 1)])
def test_a_wait_is_seen_in_a_world_that_is_joined_again(left: tuple[int, ...]) -> None:
    """The group that was left has the same name, whatever its size, and its lanes are idle."""
    members = (0, 1, 2)

    def again(rank: int) -> FakeRank:
        joined = FakeRank(rank, 3, began_s=1000).group("world:0", members)
        if rank not in left:
            return joined
        before = FakeRank(rank, len(left), began_s=500).group("world:0", left, "left")
        return joined.after(before.calls("world:0", "barrier"))

    waiting = [again(rank).enter("world:0", "all_reduce", begin_ns=AT_NS - 5 * SECOND) for rank in (0, 1)]
    now = look([seen(each.page(), 100 + each.rank, [100]) for each in (*waiting, again(2))])
    findings = judge(evidence_of(now, now, now.seen, 1.0)).findings
    assert [(found.rule, found.ranks) for found in findings] == [("root cause", (2,))]


def test_the_states_of_processes_come_from_the_kernel() -> None:
    """Stopped, ended but not waited for, gone, and alive."""
    all_ranks = ranks(4)
    states = ["T", "Z", "S", "R"]
    pages = [
        seen(each.page(), None if each.rank == 2 else 100 + each.rank, [100], states[each.rank])
        for each in all_ranks
    ]
    evidence = evidence_of(look(pages), look(pages), pages, 1.0)
    assert [process.state for process in evidence.processes] == ["stopped", "dead", "dead", "alive"]


@pytest.mark.guarantee("W2")
def test_a_process_in_another_container_is_neither_alive_nor_dead() -> None:
    """Its page is kept by a rank here. A third rank, of which no page is here, may live in one more container."""
    pages = [
        msgspec.structs.replace(
            seen(each.page(), None if each.rank else 100, [100]), is_foreign=each.rank > 0
        )
        for each in ranks(3)[:2]
    ]
    evidence = evidence_of(look(pages), look(pages), pages, 1.0)
    assert [process.state for process in evidence.processes] == ["alive", "unknown"]
    assert evidence.ended == {}
    assert judge(evidence).findings == ()


def test_who_is_stopped_in_one_look_alone_is_not_stopped() -> None:
    """A debugger or a profiler has stopped it for a moment."""
    page = ranks(1)[0].page()
    moving, stopped = (look([seen(page, 100, [100], state)]) for state in "St")
    assert evidence_of(moving, stopped, stopped.seen, 1.0).processes[0].state == "alive"
    assert evidence_of(stopped, moving, moving.seen, 1.0).processes[0].state == "alive"
    assert evidence_of(stopped, stopped, stopped.seen, 1.0).processes[0].state == "stopped"


@pytest.mark.guarantee("W3")
@pytest.mark.parametrize(
    ("waited_before", "silent_s", "waits"), [(True, 5, True), (False, 5, False), (True, 0.5, False)]
)
def test_a_reader_waits_that_waits_in_both_looks_for_what_is_long_not_there(
    waited_before: bool, silent_s: float, waits: bool
) -> None:
    """Nothing was published for the time of a wait."""

    def rings(reader_waits: bool) -> Sample:
        reader = Reader(0, 4000, 0, "attached", 0, 0, 1, reader_waits)
        published_ns = AT_NS - int(silent_s * SECOND)
        ring = Ring("steps", False, 5, 0, 7, None, 1000, 1, published_ns, readers=(reader,))
        return msgspec.structs.replace(look([seen(ranks(1)[0].page(), 100, [100])]), rings=(ring,))

    now = rings(True)
    (ring,) = evidence_of(rings(waited_before), now, now.seen, 1.0).rings
    assert [reader.waits for reader in ring.readers] == [waits]


@pytest.mark.guarantee("W2")
def test_a_member_without_a_page_on_this_host_has_ended() -> None:
    """It shares memory with the others; not so if the group has one lane over a network, or a page is not readable."""
    two = [seen(each.page(), 100 + each.rank, [100]) for each in ranks()[:2]]
    evidence = evidence_of(look(two), look(two), two, 1.0)
    assert list(evidence.ended) == [2]
    assert judge(evidence).findings[0].ranks == (2,)
    # A group that was not there in the first look may have been made after the search for pages.
    assert evidence_of(look([]), look(two), two, 1.0).ended == {}
    refused = msgspec.structs.replace(look(two), refused=(1,))
    hidden = evidence_of(refused, refused, two, 1.0)
    assert hidden.ended == {}
    assert hidden.unseen == ("processes whose descriptors this one may not read: 1",)
    faulty = msgspec.structs.replace(look(two), faults={102: "GroupState 9"})
    assert evidence_of(faulty, faulty, two, 1.0).ended == {}
    apart = [
        FakeRank(rank, 3).group("world:0", (0, 1, 2)).calls("world:0", "barrier", plane="device")
        for rank in (0, 1)
    ]
    far = [seen(each.page(), 100 + each.rank, [100]) for each in apart]
    assert evidence_of(look(far), look(far), far, 1.0).ended == {}
