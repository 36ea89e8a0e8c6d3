"""The sums that are exported never fall, and count each call once."""

import os
import time
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.diagnosis.metrics import totals
from coordinator.diagnosis.metrics.totals import Key, Member, Totals
from coordinator.diagnosis.model import Counters, Group, Lane, Page, Record
from coordinator.diagnosis.pages import Found, Search
from shm_broadcast.liveness import time_namespace
from shm_broadcast.status.layout import BUCKETS

KEY = Key("0", "tp:0", "shared", "all_reduce")


def counters(calls: int, call: str = "all_reduce", errors: int = 0) -> Counters:
    return Counters(
        call=call,
        algorithm="one-shot",
        calls=calls,
        errors=errors,
        nbytes=8 * calls,
        waited_ns=1000 * calls,
        last=calls // 2,
        late_ns=10 * calls,
        sleeps=0,
        polled_ns=0,
        waits=(calls,) + (0,) * (BUCKETS - 1),
    )


def lane(
    *rows: Counters, plane: str = "shared", state: str = "idle", begin_ns: int = 0, call: str = ""
) -> Lane:
    return Lane(
        plane=plane,
        algorithm="shared memory",
        state=state,
        call=call,
        number=1,
        count=1,
        nbytes=1,
        root=None,
        dtype=0,
        op=0,
        detail=0,
        begin_ns=begin_ns,
        end_ns=0,
        is_torn=False,
        counters=rows,
    )


def group(
    *lanes: Lane, name: str = "tp:0", created_ns: int = 1, state: str = "usable", torn: bool = False
) -> Group:
    return Group(name, state, 0, 0, 2, (0, 1), created_ns, "", torn, lanes)


def found(*groups: Group, pid: int = 10, rank: int | None = 0, alive: bool = True, **words: Any) -> Found:
    page = Page(
        **{
            "pid": pid,
            "start_ticks": 5,
            "pid_namespace": 1,
            "time_namespace": time_namespace(),
            "boot_id": "b",
            "hostname": "h",
            "rank": rank,
            "world_size": 2,
            "stack_signal": 0,
            "refused": 0,
            "created_ns": 0,
            "realtime_ns": 0,
            "calls": 0,
            "groups": groups,
            "queues": (),
            "records": (),
            **words,
        }
    )
    return Found(page, pid if alive else None, (pid,))


def search(*pages: Found, faults: dict[int, str] | None = None) -> Search:
    return Search(pages, (), faults or {})


def failing_record(index: int, outcome: str, name: str = "tp:0") -> Record:
    return Record(
        index=index,
        group=name,
        epoch=0,
        plane="shared",
        algorithm="one-shot",
        call="all_reduce",
        number=index,
        count=1,
        dtype=0,
        op=0,
        root=None,
        detail=0,
        begin_ns=2,
        end_ns=3,
        last=None,
        waited_ns=0,
        late_ns=0,
        outcome=outcome,
    )


@pytest.fixture
def sums() -> Totals:
    return Totals(lambda page: None)


def test_lanes_of_one_plane_are_added(sums: Totals) -> None:
    """Calls between two ranks have several lanes, and an algorithm has a row of its own: no label tells them apart."""
    reading = sums.update(search(found(group(lane(counters(3), counters(4)), lane(counters(5))))))
    assert reading.counts[KEY].calls == 12
    assert reading.counts[KEY].waits[0] == 12


def test_two_processes_of_one_name_are_added(sums: Totals) -> None:
    """Two jobs of a host may both have a rank 0 in `tp:0`."""
    reading = sums.update(
        search(found(group(lane(counters(3))), pid=10), found(group(lane(counters(4))), pid=11))
    )
    assert reading.counts[KEY].calls == 7


def test_a_group_that_gives_its_place_away_still_counts(sums: Totals) -> None:
    """A new group of the same name begins at 0, and what the old one counted stays."""
    sums.update(search(found(group(lane(counters(100)), created_ns=1))))
    reading = sums.update(search(found(group(lane(counters(1)), created_ns=2))))
    assert reading.counts[KEY].calls == 101


def test_an_ended_process_still_counts_and_its_successor_goes_on(sums: Totals) -> None:
    """A rank that is started again adds to what its predecessor did."""
    sums.update(search(found(group(lane(counters(100))), pid=10)))
    assert sums.update(search()).counts[KEY].calls == 100
    reading = sums.update(search(found(group(lane(counters(1))), pid=11)))
    assert reading.counts[KEY].calls == 101


def test_a_page_that_was_unreadable_for_a_while_is_not_counted_twice(sums: Totals) -> None:
    """It is the same group of the same process."""
    sums.update(search(found(group(lane(counters(100))))))
    sums.update(search(faults={10: "not sealed"}))
    assert sums.update(search(found(group(lane(counters(101)))))).counts[KEY].calls == 101


def test_a_page_cannot_make_a_sum_fall(sums: Totals) -> None:
    """A page that lies, or a rank whose memory is broken, changes nothing backwards."""
    sums.update(search(found(group(lane(counters(100))))))
    assert sums.update(search(found(group(lane(counters(7)))))).counts[KEY].calls == 100


def test_a_torn_group_changes_nothing(sums: Totals) -> None:
    """Its name may be a mixture of two, and would be a label for ever."""
    sums.update(search(found(group(lane(counters(5))))))
    reading = sums.update(search(found(group(lane(counters(6)), name="tp:0garbage", torn=True))))
    assert list(reading.counts) == [KEY]
    assert reading.counts[KEY].calls == 5
    assert reading.usable == {}


def test_errors_are_told_apart_by_the_records(sums: Totals) -> None:
    """The counters count errors; the records of the calls say which of them were disagreements."""
    pages = [found(group(lane(counters(10, errors=3))), records=(failing_record(4, "disagreed"),))]
    sums = Totals(lambda page: pages[0].page)
    counts = sums.update(search(pages[0])).counts[KEY]
    assert (counts.disagreed, counts.failed) == (1, 2)
    pages = [
        found(
            group(lane(counters(12, errors=5))),
            records=(
                failing_record(4, "disagreed"),
                failing_record(5, "failed"),
                failing_record(6, "disagreed"),
            ),
        )
    ]
    counts = sums.update(search(pages[0])).counts[KEY]
    assert (counts.disagreed, counts.failed) == (2, 3)


def test_an_error_is_that_of_the_group_in_which_it_was_made() -> None:
    """A world that is joined again has a group of the same name, in which no call has failed."""
    left = group(lane(counters(4, errors=1)), created_ns=1, state="left")
    again = group(lane(counters(4, errors=1)), created_ns=100)
    page = found(left, again, records=(failing_record(4, "disagreed"),))
    sums = Totals(lambda each: each.page)
    counts = sums.update(search(page)).counts[KEY]
    assert (counts.disagreed, counts.failed) == (1, 1)
    shares = {instance.created_ns: share[KEY] for instance, share in sums._shares.items()}
    assert (shares[1].disagreed, shares[100].disagreed) == (1, 0)


def test_the_sums_of_a_group_go_on_when_its_members_change(sums: Totals) -> None:
    """The epoch, which ends the name then, is a gauge of its own: a series for each would never end."""
    before = group(lane(counters(4)), state="left")
    after = msgspec.structs.replace(group(lane(counters(3)), name="tp:0@1", created_ns=100), epoch=1)
    reading = sums.update(search(found(before, after)))
    assert {key: of.calls for key, of in reading.counts.items()} == {KEY: 7}
    assert (reading.usable, reading.epoch) == ({Member("0", "tp:0"): True}, {Member("0", "tp:0"): 1})


def test_calls_of_before_a_change_of_members_do_not_count_again_after_it(sums: Totals) -> None:
    """A group keeps the rank with which it was seen first; one of the next epoch has its rank there from the start."""
    old = group(lane(counters(1000)))
    new = msgspec.structs.replace(group(name="tp:0@1", created_ns=2, state="forming"), epoch=1, place=1)
    sums.update(search(found(old, rank=2)))
    before = sums.update(search(found(old, new, rank=2)))
    assert before.usable == {Member("2", "tp:0"): True, Member("1", "tp:0"): False}
    old, new = (
        msgspec.structs.replace(old, state="left"),
        msgspec.structs.replace(new, state="usable", lanes=(lane(counters(5)),)),
    )
    reading = sums.update(search(found(old, new, rank=1)))
    counted = {(key.rank, key.group): count.calls for key, count in reading.counts.items()}
    assert counted == {("2", "tp:0"): 1000, ("1", "tp:0"): 5}
    assert reading.usable == {Member("1", "tp:0"): True}
    assert {key.rank for key in reading.inflight_s} == {"1"}


def test_records_are_read_only_where_errors_were_counted() -> None:
    """Decoding them takes long, so a look at a healthy job does without."""
    asked = []

    def read_records(page: Found) -> Page:
        asked.append(page.pid)
        return page.page

    sums = Totals(read_records)
    healthy, failing = found(group(lane(counters(1)))), found(group(lane(counters(2, errors=1))))
    for page in (healthy, failing, failing):
        sums.update(search(page))
    assert asked == [10]


def test_what_has_gone_is_added_up_and_ends_somewhere(monkeypatch: pytest.MonkeyPatch, sums: Totals) -> None:
    """An exporter that runs for months keeps a bounded number of shares, and their sum is right."""
    monkeypatch.setattr(totals, "_MOST_GONE", 3)
    monkeypatch.setattr(totals, "_MOST_ENDED", 2)
    for created in range(1, 11):
        reading = sums.update(search(found(group(lane(counters(1)), created_ns=created))))
    assert reading.counts[KEY].calls == 10
    assert len(sums._shares) == 4
    for number in range(20):
        reading = sums.update(search(found(group(lane(counters(1)), name=f"tp:{number + 1}"))))
    assert len(reading.counts) <= 3 + 2 + 1


@given(
    st.lists(
        st.lists(
            st.tuples(st.integers(10, 12), st.integers(1, 3), st.integers(0, 50), st.booleans()), max_size=4
        ),
        max_size=20,
    )
)
def test_no_sum_ever_falls(looks: list[list[tuple[int, int, int, bool]]]) -> None:
    """Whatever pages come, go and say, each number of each series only grows."""
    sums = Totals(lambda page: None)
    before: dict[Key, Any] = {}
    for look in looks:
        pages = {
            pid: found(
                group(lane(counters(calls, errors=calls // 3)), created_ns=created, torn=torn), pid=pid
            )
            for pid, created, calls, torn in look
        }
        after = sums.update(search(*pages.values())).counts
        for key, counts in before.items():
            assert after[key] == after[key].most(counts)
        before = after


def test_gauges_are_those_of_live_ranks(sums: Totals) -> None:
    """The wait of a rank that has died would grow for ever."""
    waiting = lane(counters(1), state="asleep", begin_ns=1, call="all_reduce")
    live = sums.update(search(found(group(waiting))))
    assert live.inflight_s[KEY] > 1
    assert live.usable == {Member("0", "tp:0"): True}
    assert live.processes == 1
    dead = sums.update(search(found(group(waiting), alive=False)))
    assert (dead.inflight_s, dead.usable, dead.epoch, dead.processes) == ({}, {}, {}, 0)
    assert dead.counts[KEY].calls == 1


def test_an_idle_plane_shows_0_seconds(sums: Totals) -> None:
    """A series that comes and goes is hard to alert on."""
    assert sums.update(search(found(group(lane(counters(1)))))).inflight_s == {KEY: 0.0}


def test_a_call_that_begins_now_has_0_seconds(sums: Totals) -> None:
    """The page's clock may be a little ahead of ours."""
    ahead = lane(state="posted", begin_ns=time.monotonic_ns() + 10**9, call="all_reduce")
    assert sums.update(search(found(group(ahead)))).inflight_s == {KEY: 0.0}


@pytest.mark.parametrize(
    ("states", "usable"),
    [
        (["usable"], True),
        (["forming"], False),
        (["broken"], False),
        (["usable", "broken"], False),
        (["left", "usable"], True),
        (["left"], None),
    ],
)
def test_a_group_is_usable_for_all_of_a_name_or_for_none(
    sums: Totals, states: list[str], usable: bool | None
) -> None:
    """One that was left is shown no more; of several with one name all must be usable."""
    groups = [group(created_ns=place, state=state) for place, state in enumerate(states)]
    assert sums.update(search(found(*groups))).usable.get(Member("0", "tp:0")) is usable


def test_a_process_that_joined_no_world_has_its_rank_in_the_group(sums: Totals) -> None:
    """Groups of stateless worlds only."""
    reading = sums.update(search(found(group(lane(counters(1))), rank=None)))
    assert [key.rank for key in reading.counts] == ["0"]


def test_the_clock_of_another_time_namespace_is_used(sums: Totals) -> None:
    """In such a container CLOCK_MONOTONIC has another origin, which the page states."""
    shift_ns = 10**15
    begin_ns = time.monotonic_ns() + shift_ns - 5 * 10**9
    waiting = lane(state="posted", begin_ns=begin_ns, call="barrier")
    page = found(
        group(waiting),
        time_namespace=os.getpid() + 1,
        realtime_ns=time.time_ns() - time.monotonic_ns() - shift_ns,
    )
    (seconds,) = sums.update(search(page)).inflight_s.values()
    assert 4.9 < seconds < 60
