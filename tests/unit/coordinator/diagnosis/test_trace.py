"""A trace of status pages follows the Trace Event Format, and shows each call, wait and last arriver where it was."""

import os
import random
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.cli import main
from coordinator.diagnosis.decoding import decode_page
from coordinator.diagnosis.model import Page, Record
from coordinator.diagnosis.trace import Trace, make_trace
from shm_broadcast.status.layout import MAGIC, PAGE_BYTES, TABLES, VERSION
from shm_broadcast.status.page import own_page
from tests.trace_format import Event, check_trace
from tests.trace_pages import call, group, lane, page, shifted

RANKS = (0, 1, 2, 3)
SHARED: dict[str, Any] = {"plane": "shared", "algorithm": "one-shot", "call": "all_reduce", "count": 16}


def one_sum(last: int = 3) -> list[Page]:
    """Return the pages of four ranks that came to a sum 10 us apart; `last` came 100 us after the others."""
    pages = []
    for rank in RANKS:
        begin_ns = 1_000_000 + (130_000 if rank == last else 10_000 * rank)
        waited_ns = 1_130_000 - begin_ns
        record = call(begin_ns, 1_140_000, **SHARED, last=last, waited_ns=waited_ns, late_ns=100_000)
        pages.append(page(rank, [group(rank, RANKS)], [record]))
    return pages


def slices(trace: Trace, name: str = "all_reduce #1") -> list[Event]:
    """Return the checked slices of this name."""
    return [event for event in check_trace(trace.to_json()) if event["ph"] == "X" and event["name"] == name]


def arrows(trace: Trace) -> list[tuple[int, int]]:
    """Return the processes that the arrows of a trace lead from and to."""
    events = check_trace(trace.to_json())
    ends = {event["id"]: event["pid"] for event in events if event["ph"] == "f"}
    return sorted((event["pid"], ends[event["id"]]) for event in events if event["ph"] == "s")


def test_each_rank_is_a_process_with_a_track_for_each_plane() -> None:
    """The process has the number of the rank, and says rank, host and pid; a track says group and plane."""
    events = check_trace(make_trace(one_sum()).to_json())
    names = {
        (each["pid"], each["name"]): each["args"].get("name")
        for each in events
        if each["ph"] == "M" and each["name"].endswith("_name")
    }
    for rank in RANKS:
        assert names[rank, "process_name"] == f"rank {rank} · a · pid {100 + rank}"
        assert names[rank, "thread_name"] == "world:0 · shared"


def test_a_call_has_its_times_its_wait_and_arguments_by_the_names_of_torch() -> None:
    """Times begin at 0 with the first call, and the wait for the last rank is a slice inside of the call."""
    trace = make_trace(one_sum())
    found = slices(trace)
    assert [(each["pid"], each["ts"], each["dur"]) for each in found] == [
        (0, 0.0, 140.0),
        (1, 10.0, 130.0),
        (2, 20.0, 120.0),
        (3, 130.0, 10.0),
    ]
    waits = slices(trace, "wait for rank 3")
    assert [(each["pid"], each["ts"], each["dur"]) for each in waits] == [
        (0, 0.0, 130.0),
        (1, 10.0, 120.0),
        (2, 20.0, 110.0),
    ]
    for word, value in {
        "Collective name": "all_reduce",
        "dtype": "Float",
        "In msg nelems": 16,
        "Out msg nelems": 16,
        "Group size": 4,
        "Process Group Name": "world:0",
        "Process Group Ranks": "[0, 1, 2, 3]",
        "Seq": 1,
        "reduction": "sum",
        "last to come": "rank 3",
        "late_us": 100.0,
    }.items():
        assert found[0]["args"][word] == value, word


def test_sizes_are_told_where_shared_memory_shows_them() -> None:
    """It counts bytes of what is only moved, of an all-gather those of the result; objects have no dtype."""
    moved: dict[str, Any] = {"plane": "shared", "algorithm": "shared memory", "dtype": 3}
    records = [
        call(1000, 1100, **moved, call="broadcast", count=40),
        call(2000, 2100, **moved, call="all_gather", count=64, number=2),
        call(3000, 3100, **{**moved, "dtype": 255}, call="all_gather", count=64, number=3),
        call(4000, 4100, **{**moved, "plane": "shared host"}, call="all_gather", count=64, number=4),
        call(5000, 5100, call="all_reduce", count=64, plane="device", number=5),
    ]
    events = check_trace(make_trace([page(0, [group(0, RANKS)], records)]).to_json())
    words = "dtype", "In msg nelems", "Out msg nelems"
    found = {
        each["args"]["Seq"]: [each["args"].get(word) for word in words]
        for each in events
        if each["ph"] == "X"
    }
    nothing = [None, None, None]
    assert found == {
        1: ["BFloat16", 20, 20],
        2: ["BFloat16", None, 32],
        3: nothing,
        4: nothing,
        5: nothing,
    }


@pytest.mark.parametrize("last", RANKS)
def test_arrows_lead_from_the_rank_that_came_last_to_all_others(last: int) -> None:
    """They begin when that rank came."""
    trace = make_trace(one_sum(last))
    assert arrows(trace) == [(last, rank) for rank in RANKS if rank != last]
    events = check_trace(trace.to_json())
    assert {each["ts"] for each in events if each["ph"] in "sf"} == {130.0 if last else 120.0}


def test_who_came_last_over_a_process_group_is_told_by_the_clock() -> None:
    """A rank that did not wait, such as the root of a broadcast that was through before, gets no arrow."""
    times = [(0, 50), (10, 500), (200, 500)]
    pages = [
        page(rank, [group(rank, RANKS[:3])], [call(1000 + begin, 1000 + end)])
        for rank, (begin, end) in enumerate(times)
    ]
    assert arrows(make_trace(pages)) == [(2, 1)]


def test_calls_that_are_queued_on_a_device_have_no_arrows() -> None:
    """They end when they are queued, so that their times tell nothing of who waited."""
    words = {"plane": "nccl", "algorithm": "nccl", "call": "all_reduce", "count": 4}
    pages = [page(rank, [group(rank, RANKS[:2])], [call(1000, 2000, **words)]) for rank in RANKS[:2]]
    trace = make_trace(pages)
    assert (trace.calls, trace.arrows) == (2, 0)


def test_groups_of_one_name_with_other_ranks_are_not_connected() -> None:
    """The two tensor-parallel groups of four ranks are both `tp:0`."""
    members = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    pages = []
    for rank, ranks in members.items():
        record = call(1000 + rank, 2000, **SHARED, group="tp:0", last=1)
        pages.append(page(rank, [group(rank % 2, ranks, "tp:0")], [record]))
    assert arrows(make_trace(pages)) == [(1, 0), (3, 2)]


def test_two_jobs_on_a_host_get_no_arrows_and_the_trace_says_so() -> None:
    """Both have a rank 0 of `world:0`. Each process keeps a number of its own."""
    pages = one_sum() + [
        page(rank, each.groups, each.records, pid=200 + rank) for rank, each in enumerate(one_sum())
    ]
    trace = make_trace(pages)
    assert (trace.calls, trace.arrows) == (8, 0)
    assert any("'world:0': pids 100 and 200 claim one place" in note for note in trace.notes)
    events = check_trace(trace.to_json())
    assert len({each["pid"] for each in events}) == 8


def test_a_call_that_goes_on_is_open_until_now() -> None:
    """It says so, with what the rank does; times of other processes that are later count too."""
    open_lane = lane(**SHARED, state="asleep", begin_ns=1_200_000)
    pages = one_sum()
    pages[1] = page(1, [group(1, RANKS, lanes=[open_lane])], pages[1].records)
    trace = make_trace(pages, {1: 1_500_000})
    assert trace.running == 1
    (found,) = slices(trace, "all_reduce #9 (running)")
    assert (found["pid"], found["ts"], found["dur"], found["args"]["state"]) == (1, 200.0, 300.0, "asleep")
    assert slices(make_trace(pages), "all_reduce #9 (running)")[0]["dur"] == 0.0


def test_calls_between_two_ranks_that_overlap_have_tracks_of_their_own() -> None:
    """Threads receive at once, and slices of one track must not overlap."""
    words = {"plane": "host waits", "algorithm": "point to point", "call": "recv", "number": 0, "root": 1}
    spans = [(0, 100), (50, 150), (60, 90), (100, 200)]
    records = [call(1000 + begin, 1000 + end, **words) for begin, end in spans]
    events = check_trace(make_trace([page(0, [group(0, RANKS)], records)]).to_json())
    titles = [each["args"]["name"] for each in events if each["name"] == "thread_name"]
    assert titles == ["world:0 · host waits", "world:0 · host waits (2)", "world:0 · host waits (3)"]
    assert all(each["args"]["Src Rank"] == 1 for each in events if each["ph"] == "X")


def test_hosts_with_other_clocks_are_aligned_and_the_error_is_printed() -> None:
    """The clock of the second host shows an hour more; calls of 10 us are drawn together again."""
    hour = 3600 * 10**9
    pages = [page(rank, [group(rank, RANKS)], [call(1000 + 10 * rank, 11_000 + 10 * rank)]) for rank in RANKS]
    pages[2:] = [shifted(each, hour, "b") for each in pages[2:]]
    trace = make_trace(pages)
    (note,) = trace.notes
    assert "clock 1 (b): offset -3600000" in note
    assert "error at most 10.0 us, from 1 calls" in note
    starts = [each["ts"] for each in slices(trace, "barrier #1")]
    assert max(starts) - min(starts) < 10.0


def test_hosts_whose_calls_contradict_are_said_to() -> None:
    """The second call was over on one host long before the other one came to it."""
    pages = [
        page(0, [group(0, RANKS[:2])], [call(1000, 2000), call(3000, 4000, number=2)]),
        page(1, [group(1, RANKS[:2])], [call(1000, 2000), call(9000, 9500, number=2)], "b"),
    ]
    (note,) = make_trace(pages).notes
    assert "the calls contradict each other by 2.0 us" in note


def test_a_host_without_a_common_call_is_placed_by_its_realtime_clock() -> None:
    """The trace says that the error is not known."""
    pages = [page(rank, [group(rank, RANKS[:2])], [], f"host{rank}") for rank in RANKS[:2]]
    (note,) = make_trace(pages).notes
    assert "no call ties it to clock 0" in note
    assert "its error is not known" in note


def test_a_group_that_was_made_again_is_another_group() -> None:
    """Who leaves the world and joins again counts its calls from 1 again, in a group of the same name."""
    records: list[Record] = [call(1000, 1100), call(9000, 9100)]
    pages = []
    for rank in RANKS[:2]:
        old = group(rank, RANKS[:2])
        pages.append(page(rank, [old, msgspec.structs.replace(old, created_ns=5000)], records))
    assert arrows(make_trace(pages)) == [(1, 0), (1, 0)]


@pytest.mark.parametrize("seed", range(10))
def test_no_page_makes_a_trace_that_readers_refuse(seed: int) -> None:
    """Calls that overlap, end before they begin, or name ranks, dtypes and operations that do not exist."""
    generator = random.Random(seed)
    latest_ns = 2**50  # 13 days, up to which a double holds microseconds with three decimals
    records = [
        call(
            generator.randrange(latest_ns),
            generator.randrange(latest_ns),
            number=generator.randrange(3),
            last=generator.choice([None, 0, 65534]),
            waited_ns=generator.randrange(2**32),
            dtype=generator.randrange(256),
            op=generator.randrange(256),
            call=generator.choice(["barrier", "all_reduce", "other", "send"]),
            root=generator.choice([None, 0, 2**32 - 2]),
            plane=generator.choice(["host", "shared", "device", ""]),
        )
        for _ in range(50)
    ]
    lanes = [lane(begin_ns=generator.randrange(latest_ns)) for _ in range(5)]
    hostile = page(0, [group(0, (65535, 65535), lanes=lanes)], records)
    trace = make_trace([hostile, *one_sum()])
    check_trace(trace.to_json())
    assert (trace.calls, trace.running) == (59, 5)


@pytest.mark.parametrize("seed", range(10))
def test_a_page_of_random_numbers_that_can_be_decoded_gives_a_trace(seed: int) -> None:
    """Times of centuries are shown as they are."""
    generator = random.Random(seed)
    content = bytearray(PAGE_BYTES)
    for name, table in TABLES.items():
        for place in range(min(table.number, 40)):
            at = table.offset + place * table.nbytes
            content[at : at + table.nbytes] = hostile_record(generator, table.nbytes)
            if name == "groups":
                # Without a state and a place that can be it is no page.
                state, ranks = generator.choice([0, 2]), (1).to_bytes(4, "little")
                content[at + 4 : at + 20] = state.to_bytes(4, "little") + ranks + bytes(4) + ranks
            if name == "lanes":
                content[at + 68] = generator.randrange(4)
            if name == "records":
                content[at + 47] = generator.randrange(3)
    content[0:16] = MAGIC.to_bytes(8, "little") + VERSION.to_bytes(4, "little") + bytes(4)
    make_trace([decode_page(bytes(content)), *one_sum()]).to_json()


def hostile_record(generator: random.Random, nbytes: int) -> bytes:
    """Return small and large numbers in turn."""
    return b"".join(
        generator.choice([generator.randrange(4), generator.randrange(2**64)]).to_bytes(8, "little")
        for _ in range(nbytes // 8)
    )


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file that holds no page, a directory that is not there, and a process without a page."""
    out = tmp_path / "out.json"
    (tmp_path / "rank.status-page").write_bytes(b"x" * PAGE_BYTES)
    assert main(["trace", str(out), str(tmp_path)]) == 1
    text = capsys.readouterr().err
    assert "nothing of the run can be read; rank.status-page: this is no status page" in text
    assert main(["trace", str(out), str(tmp_path / "none")]) == 1
    assert "cannot be read: No such file or directory" in capsys.readouterr().err
    assert main(["trace", str(out), "--pid", "1"]) == 1
    assert "there is no process with a group and a status page" in capsys.readouterr().err
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error names it."""
    own = own_page().group("trace:0", 0, [0])
    try:
        assert main(["trace", str(tmp_path / "none" / "out.json"), "--pid", str(os.getpid())]) == 1
    finally:
        own.leave()
    assert "out.json cannot be written: No such file or directory" in capsys.readouterr().err


def test_a_trace_belongs_to_its_user_alone(tmp_path: Path) -> None:
    """Another file of that name is replaced as a whole, and nothing else is left."""
    out = tmp_path / "out.json"
    out.write_text("an earlier trace")
    own = own_page().group("trace:0", 0, [0])
    try:
        assert main(["trace", str(out), "--pid", str(os.getpid())]) == 0
    finally:
        own.leave()
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert msgspec.json.decode(out.read_bytes())["traceEvents"]
    assert list(tmp_path.iterdir()) == [out]
