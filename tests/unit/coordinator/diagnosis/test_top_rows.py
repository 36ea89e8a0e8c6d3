"""The rows of `top`, made of pages that are written down here: who waits for whom, rates, and lateness."""

from typing import Any

import msgspec

from coordinator.diagnosis.model import Counters, Group, Lane, Page, Queue
from coordinator.diagnosis.processes import Process
from coordinator.diagnosis.queues import Reader, Ring
from coordinator.diagnosis.top.activity import activity_of
from coordinator.diagnosis.top.late_ranks import WINDOW_S, LateRanks
from coordinator.diagnosis.top.rows import Row, rows_of
from coordinator.diagnosis.top.sampling import Sample, Seen, jobs_of, of_processes

NOW_NS = 100_000_000_000


def lane(state: str = "idle", call: str = "all_reduce", number: int = 5, **more: Any) -> Lane:
    values: dict[str, Any] = {
        "plane": "shared",
        "algorithm": "shared memory",
        "count": 1,
        "nbytes": 4,
        "root": None,
        "dtype": 0,
        "op": 0,
        "detail": 0,
        "begin_ns": NOW_NS - 3_000_000_000,
        "end_ns": NOW_NS - 7_000_000_000,
        "is_torn": False,
        "counters": (counters(),),
    }
    return Lane(state=state, call=call, number=number, **{**values, **more})


def counters(**more: int) -> Counters:
    values = dict.fromkeys(
        ("calls", "errors", "nbytes", "waited_ns", "last", "late_ns", "sleeps", "polled_ns"), 0
    )
    return Counters(call="all_reduce", algorithm="shared memory", waits=(0,) * 30, **{**values, **more})


def group(place: int, *lanes: Lane, **more: Any) -> Group:
    values: dict[str, Any] = {
        "name": "tp:0",
        "state": "usable",
        "epoch": 0,
        "world_size": 3,
        "ranks": (4, 5, 6),
        "created_ns": 1,
        "cause": "",
        "is_torn": False,
    }
    return Group(place=place, lanes=lanes, **{**values, **more})


def page(pid: int, *groups: Group, **more: Any) -> Page:
    values: dict[str, Any] = {
        "start_ticks": 77,
        "pid_namespace": 1,
        "time_namespace": 1,
        "boot_id": "boot",
        "hostname": "host",
        "rank": pid - 100,
        "world_size": 8,
        "stack_signal": 0,
        "refused": 0,
        "created_ns": 1,
        "realtime_ns": 0,
        "calls": 0,
        "queues": (),
        "records": (),
    }
    known = {field for field in Page.__struct_fields__ if field not in ("pid", "groups")}
    # A word that a later version of the page has beside these.
    rest = {field: 0 for field in known if field not in values}
    return Page(pid=pid, groups=groups, **{**rest, **values, **more})


def process(pid: int = 104, state: str = "S", **more: Any) -> Process:
    values: dict[str, Any] = {
        "start_ticks": 77,
        "command": "python",
        "threads": 3,
        "cpu_ns": 0,
        "read_bytes": 0,
        "stored_bytes": 0,
        "written_bytes": 0,
        "waits_in": "",
    }
    return Process(pid=pid, state=state, **{**values, **more})


def seen(said: Page, its: Process | None = None, **more: Any) -> Seen:
    values: dict[str, Any] = {"pid": said.pid, "holders": (said.pid,), "job": 0, "shift_ns": 0}
    return Seen(page=said, process=its, **{**values, **more})


def sample(*pages: Page, at_ns: int = NOW_NS) -> Sample:
    return Sample(at_ns, tuple(seen(each, process(each.pid)) for each in pages), (), (), {})


def by_rank(rows: tuple[Row, ...]) -> dict[int | None, Row]:
    return {row.rank: row for row in rows}


def test_a_rank_waits_for_those_that_have_not_come_to_its_call() -> None:
    """One that is behind in the same plane has not come; one that has come, or is further, has."""
    rows = by_rank(
        rows_of(
            None,
            sample(
                page(104, group(0, lane("asleep", number=6))),
                page(105, group(1, lane("posted", number=6))),
                page(106, group(2, lane("idle", number=5))),
            ),
        )
    )
    assert [rows[rank].state for rank in (4, 5, 6)] == ["waiting", "waiting", "sleeping"]
    assert [rows[rank].waits_for for rank in (4, 5, 6)] == [(6,), (6,), None]
    assert rows[4].call == "all_reduce #6"
    assert rows[4].since_s == 3.0
    # It has been in no call since the end of its last one.
    assert (rows[6].call, rows[6].since_s) == ("", 7.0)


def test_a_call_to_which_all_have_come_waits_for_nobody() -> None:
    """Nobody is named, which is not the same as not knowing."""
    rows = by_rank(
        rows_of(None, sample(*(page(104 + i, group(i, lane("posted", number=6))) for i in range(3))))
    )
    assert {row.waits_for for row in rows.values()} == {()}
    assert {row.unseen for row in rows.values()} == {()}


def test_a_rank_whose_page_is_not_seen_may_or_may_not_have_come() -> None:
    """It is named apart from those that have not."""
    rows = by_rank(
        rows_of(
            None,
            sample(page(104, group(0, lane("asleep", number=6))), page(105, group(1))),
        )
    )
    assert (rows[4].waits_for, rows[4].unseen) == ((5,), (6,))


def test_a_call_between_two_ranks_waits_for_the_other_one() -> None:
    """Its number is 0 and its root the other rank's place; with none it waits for any rank."""
    waits = {"plane": "host waits", "algorithm": "waiting"}
    named = lane("asleep", "recv", 0, root=2, **waits)
    other = lane("asleep", "recv_any", 0, root=None, **waits)
    rows = by_rank(rows_of(None, sample(page(104, group(0, named)), page(105, group(1, other)))))
    assert (rows[4].call, rows[4].waits_for) == ("recv", (6,))
    assert (rows[5].call, rows[5].waits_for) == ("recv_any", None)


def test_waits_for_messages_have_a_row_only_while_one_goes_on() -> None:
    """The plane of the group's collectives has one at any time."""
    waits = lane("idle", "recv", 0, root=2, plane="host waits", algorithm="waiting")
    assert [row.plane for row in rows_of(None, sample(page(104, group(0, waits, lane()))))] == ["shared"]
    assert [row.plane for row in rows_of(None, sample(page(104, group(0, waits))))] == [""]


def test_jobs_with_equal_names_are_told_apart() -> None:
    """The ranks of another job, whose group has the same name, have not to come."""
    first = page(104, group(0, lane("asleep", number=6), ranks=(4, 5), world_size=2))
    second = page(105, group(1, lane("idle", number=6), ranks=(4, 5), world_size=2))
    other = page(205, group(1, lane("idle", number=2), ranks=(4, 5), world_size=2), rank=5)
    looked = Sample(
        NOW_NS,
        (
            seen(first, process(104)),
            seen(second, process(105)),
            seen(other, process(205), job=1),
        ),
        (),
        (),
        {},
    )
    rows = rows_of(None, looked)
    assert [(row.job, row.rank, row.waits_for) for row in rows] == [(0, 4, ()), (0, 5, None), (1, 5, None)]


def test_groups_of_one_job_with_one_name_are_told_apart() -> None:
    """Tensor-parallel groups are made together and share a name: what one does says nothing of the other."""
    first, second = {"ranks": (4, 5), "world_size": 2}, {"ranks": (6, 7), "world_size": 2}
    rows = rows_of(
        None,
        sample(
            page(104, group(0, lane("asleep", number=6), **first)),
            page(105, group(1, lane("asleep", number=6), **first)),
            page(106, group(0, lane("asleep", number=3), **second)),
            page(107, group(1, lane("idle", number=2), **second)),
        ),
    )
    assert {row.rank: row.waits_for for row in rows} == {4: (), 5: (), 6: (7,), 7: None}


def test_pages_that_share_memory_or_a_holder_are_one_job() -> None:
    """Also by others between them."""
    marked: list[tuple[tuple[int, int], set[object]]] = [
        ((0, 1), {1, "a"}),
        ((0, 2), {2, "b"}),
        ((0, 3), {3}),
        ((0, 4), {"a", "b"}),
    ]
    jobs = jobs_of(marked)
    assert jobs[0, 1] == jobs[0, 2] == jobs[0, 4] != jobs[0, 3]


def test_a_rank_that_waits_in_another_group_is_elsewhere() -> None:
    """The rows of its other groups say where it is, and since when."""
    waits = lane("asleep", "recv", 0, plane="host waits", root=1, begin_ns=NOW_NS - 3_000_000_000)
    pp = group(0, waits, name="pp:0", ranks=(4, 8))
    rows = rows_of(None, sample(page(104, group(0, lane()), pp)))
    assert [row.since_s for row in rows] == [3.0, 3.0]
    assert [(row.group, row.state, row.note) for row in rows] == [
        ("pp:0", "waiting", ""),
        ("tp:0", "elsewhere", "in pp:0 host waits"),
    ]


def test_a_group_of_one_without_calls_has_no_row_beside_others() -> None:
    """An engine has many, and nobody waits in them. A process with nothing else, and a broken group, are shown."""
    alone = group(0, name="dp:0", world_size=1, ranks=(4,))
    broken = group(0, name="ep:0", world_size=1, ranks=(4,), state="broken", cause="why")
    silent = group(0, name="pp:0")
    made_calls = group(0, lane(), name="cp:0", world_size=1, ranks=(4,))
    rows = rows_of(None, sample(page(104, alone, broken, silent, made_calls)))
    assert [(row.group, row.state) for row in rows] == [
        ("cp:0", "sleeping"),
        ("ep:0", "broken"),
        ("pp:0", "sleeping"),
    ]
    assert [row.group for row in rows_of(None, sample(page(104, alone, alone)))] == ["dp:0"]


def test_a_process_has_a_row_before_its_first_call_and_groups_that_were_left_have_none() -> None:
    """A process without groups is shown too, unless it has ended."""
    fresh = page(104, group(0, lane(call="", number=0, counters=())), group(0, lane(), state="left"))
    left = page(105, group(0, lane(), state="left"))
    looked = Sample(
        NOW_NS,
        (
            seen(fresh, process(104)),
            seen(left, process(105)),
            seen(left, None, pid=None),
        ),
        (),
        (),
        {},
    )
    assert [(row.group, row.plane, row.pid) for row in rows_of(None, looked)] == [
        ("", "", 105),
        ("tp:0", "", 104),
    ]


def test_states_of_groups_and_records_come_before_what_the_process_does() -> None:
    """Dead, stopped, broken, torn and forming, in this order; the note tells more."""
    torn = lane("asleep", is_torn=True)
    broken = group(0, torn, state="broken", cause="no answer from rank 5")
    cases = [
        (broken, None, ("dead", "a record was left half written")),
        (group(0, lane()), None, ("dead", "kept by pid 900")),
        (group(0, lane()), process(state="Z"), ("dead", "its parent has not waited for it")),
        (broken, process(state="T"), ("stopped", "until SIGCONT")),
        (broken, process(state="t"), ("stopped", "by a debugger")),
        (broken, process(), ("broken", "no answer from rank 5")),
        (group(0, torn), process(), ("torn", "a record was left half written")),
        (group(0, lane(), is_torn=True), process(), ("torn", "a record was left half written")),
        (group(0, lane("asleep"), state="forming"), process(), ("forming", "")),
        (group(0, lane("computing")), process(), ("computing", "")),
    ]
    for which, its, expected in cases:
        pid = None if its is None else 104
        looked = Sample(NOW_NS, (seen(page(104, which), its, pid=pid, holders=(104, 900)),), (), (), {})
        if its is None:
            looked = msgspec.structs.replace(
                looked, seen=(msgspec.structs.replace(looked.seen[0], holders=(900,)),)
            )
        (row,) = rows_of(None, looked)
        assert (row.state, row.note) == expected


def test_rates_are_differences_of_two_samples() -> None:
    """Over two seconds; lanes of one plane count together, and a group that was made meanwhile from 0."""

    def at(calls: int, at_ns: int) -> Sample:
        first = lane(counters=(counters(calls=calls, nbytes=10 * calls, polled_ns=calls * 1_000_000),))
        second = lane(counters=(counters(calls=calls, nbytes=0),))
        return sample(page(104, group(0, first, second)), at_ns=at_ns)

    (row,) = rows_of(at(100, NOW_NS - 2_000_000_000), at(300, NOW_NS))
    assert (row.calls_per_s, row.bytes_per_s, row.wait_share) == (200.0, 1000.0, 0.1)
    (row,) = rows_of(None, at(300, NOW_NS))
    assert (row.calls_per_s, row.bytes_per_s, row.wait_share) == (None, None, None)
    before = sample(page(104, group(0, lane(), created_ns=9)), at_ns=NOW_NS - 1_000_000_000)
    (row,) = rows_of(before, at(3, NOW_NS))
    assert row.calls_per_s == 6.0


def test_lateness_is_that_of_the_newest_calls_to_which_the_rank_came_last() -> None:
    """Calls whose last rank is unknown, and those of other planes, tell nothing."""
    said = page(104, group(0, lane()))
    told = {
        ("tp:0", 0, "shared"): [(0, 10), (0, 30), (0, 20), (1, 500)],
        ("tp:0", 0, "host"): [(0, 999)],
        ("tp:0", 1, "shared"): [(0, 999)],
    }
    looked = Sample(NOW_NS, (seen(said, process(), lateness=told),), (), (), {})
    (row,) = rows_of(None, looked)
    assert (row.last_share, row.late_ns) == (0.75, 20.0)
    (row,) = rows_of(None, sample(said))
    assert (row.last_share, row.late_ns) == (None, None)


def test_a_rank_that_is_late_in_two_windows_is_marked() -> None:
    """Not after one of them; and it is marked until the next window ends, in its own group and plane alone."""
    late, marked = LateRanks(), []
    for second in range(0, 50, 5):
        calls = second * 100
        # From the 30th second on nobody is late.
        slow = min(second, 30)
        first = counters(calls=calls, last=slow * 90, late_ns=slow * 400_000_000)
        pages = (
            page(104, group(0, lane(counters=(first,)), lane(plane="shared host"))),
            page(105, group(1, lane(counters=(counters(calls=calls, last=slow * 10),)))),
        )
        now = sample(*pages, at_ns=NOW_NS + second * 1_000_000_000)
        rows = rows_of(None, now, (), late.look(now))
        marked.append([(row.rank, row.plane) for row in rows if row.is_late])
    assert WINDOW_S == 10
    assert marked == [[], [], [], [], *[[(4, "shared")]] * 4, [], []]


def test_a_process_of_another_pod_with_the_same_pid_is_not_marked() -> None:
    """Each pod numbers its processes from 1: the number is that of another process in each of them."""
    late = LateRanks()
    for second in (0, 10, 20):
        calls = second * 100
        slow = counters(calls=calls, last=calls, late_ns=second * 400_000_000)
        there = page(104, group(0, lane(counters=(slow,))))
        here = page(104, group(0, lane(counters=(counters(calls=calls),))), pid_namespace=2)
        both = seen(there, process(904), pid=904, job=0), seen(here, process(905), pid=905, job=1)
        now = Sample(NOW_NS + second * 1_000_000_000, both, (), (), {})
        rows = rows_of(None, now, (), late.look(now))
    assert [(row.pid, row.is_late) for row in rows] == [(904, True), (905, False)]


def test_times_of_another_time_namespace_are_shifted() -> None:
    """What is 3 s ago there is 3 s ago here, however far apart the clocks are."""
    said = page(104, group(0, lane("asleep", begin_ns=NOW_NS - 3_000_000_000 - 50)))
    looked = Sample(NOW_NS, (seen(said, process(), shift_ns=50),), (), (), {})
    (row,) = rows_of(None, looked)
    assert row.since_s == 3.0


def test_what_a_process_does_outside_of_calls() -> None:
    """By processor time, what it reads, and where it sleeps."""
    before = process()
    cases = [
        (process(cpu_ns=900_000_000), ("running", "CPU 90%")),
        (process(cpu_ns=10_000_000, waits_in="hrtimer_nanosleep"), ("sleeping", "hrtimer_nanosleep")),
        (process(stored_bytes=1_200_000_000), ("loading", "reading 1.2 GB/s")),
        (process(read_bytes=5_000_000, cpu_ns=990_000_000), ("loading", "reading 5.0 MB/s")),
        (process(state="D"), ("blocked", "")),
        (process(read_bytes=None, stored_bytes=None), ("sleeping", "")),
    ]
    for its, expected in cases:
        assert tuple(activity_of(before, seen(page(104), its), 1.0, ())) == expected
    # A process that is always ready to run computes, however little of a core it gets.
    ready = process(state="R")
    assert activity_of(ready, seen(page(104), ready), 1.0, ()).state == "running"
    assert activity_of(None, seen(page(104), ready), 0.0, ()).state == "running"
    # Another process with the same number says nothing of this one.
    another = process(start_ticks=1)
    assert activity_of(another, seen(page(104), process(cpu_ns=10**9)), 1.0, ()).state == "sleeping"


def test_a_process_that_sleeps_in_a_queue_is_idle_and_a_writer_without_room_waits() -> None:
    """Only its own ends count."""
    reader = Reader(0, 104, 4, "attached", 0, 0, 1, waits=True)
    ring = Ring("steps", False, 9, 0, 103, 3, 4096, 1, 1, readers=(reader,))
    reads = page(104, queues=(Queue("steps", 9, 0, 0, 5),))
    writes = page(103, queues=(Queue("steps", 9, 0, -1, 5),))
    other = page(105, queues=(Queue("other", 10, 0, 0, 5),))
    full = msgspec.structs.replace(ring, writer_waits=True)
    assert tuple(activity_of(None, seen(reads, process()), 0.0, (ring,))) == ("idle", "reads steps")
    assert activity_of(None, seen(writes, process()), 0.0, (ring,)).state == "sleeping"
    assert tuple(activity_of(None, seen(writes, process()), 0.0, (full,))) == ("waiting", "for room in steps")
    assert activity_of(None, seen(other, process()), 0.0, (ring, full)).state == "sleeping"
    looked = Sample(NOW_NS, (seen(reads, process()), seen(other, process(105))), (ring,), (), {})
    assert of_processes(looked, [104]).rings == (ring,)
    assert of_processes(looked, [105]).rings == ()
    assert [row.pid for row in rows_of(None, looked, [105])] == [105]
    assert [row.pid for row in rows_of(None, looked, [105, 104, 99])] == [104, 105]
