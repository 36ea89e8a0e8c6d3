"""How `top` lays out its rows: within 120 columns, with nothing that a terminal might obey."""

import random
from typing import Any

import pytest
from rich.console import Console

from coordinator.diagnosis.decoding import decode_lateness, decode_page
from coordinator.diagnosis.processes import Process
from coordinator.diagnosis.queues import Reader, Ring
from coordinator.diagnosis.top.quantities import in_bytes, in_number, in_seconds
from coordinator.diagnosis.top.rich_adapter import rich_screen
from coordinator.diagnosis.top.rows import Row, rows_of
from coordinator.diagnosis.top.sampling import Sample, Seen
from coordinator.diagnosis.top.screen import WIDTH, text_screen
from shm_broadcast import _core
from shm_broadcast.errors import DecodeError
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import TABLES, GroupState, LaneState
from shm_broadcast.status.page import OwnPage

NOW_NS = 10**12
MUTATIONS = (2_000, pytest.param(20_000, marks=pytest.mark.thorough))


def row(**more: Any) -> Row:
    values: dict[str, Any] = {
        "job": 0,
        "group": "tp:0",
        "plane": "shared",
        "rank": 3,
        "pid": 4242,
        "state": "waiting",
        "call": "all_reduce #118",
        "since_s": 541.0,
        "waits_for": (1, 2),
        "unseen": (),
        "note": "",
        "cause": "",
        "calls_per_s": 1234.5,
        "bytes_per_s": 1.2e9,
        "last_share": 0.25,
        "late_ns": 23_000.0,
        "wait_share": 0.03,
    }
    return Row(**{**values, **more})


def looked(*rings: Ring, **more: Any) -> Sample:
    return Sample(**{"at_ns": NOW_NS, "seen": (), "rings": rings, "refused": (), "faults": {}, **more})


def lines(rows: tuple[Row, ...], sample: Sample | None = None) -> list[str]:
    return text_screen(sample or looked(), rows).splitlines()


def test_a_row_says_who_is_awaited_since_when() -> None:
    """All columns of a rank in a call."""
    line = lines((row(),))[-1]
    assert line.split() == [
        *("tp:0", "shared", "3", "4242", "waiting", "all_reduce", "#118", "541", "s"),
        *("1,", "2", "1.2k", "1.2G", "25%", "23us", "3%"),
    ]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (row(waits_for=()), "all came"),
        (row(waits_for=(1,), unseen=(5,)), "1, 5?"),
        (row(waits_for=None), "any rank"),
        (row(call="", state="loading", note="reading 1.2 GB/s"), "reading 1.2 GB/s"),
        (row(state="dead", note="kept by pid 7"), "kept by pid 7"),
        (row(call="", waits_for=None, note=""), "not in a call"),
    ],
)
def test_the_text_of_a_cell(said: Row, expected: str) -> None:
    """For whom a rank waits, or what it does."""
    assert expected in lines((said,))[-1]


def test_unknown_figures_are_dashes() -> None:
    """In the first look there are no rates."""
    names = ("since_s", "calls_per_s", "bytes_per_s", "last_share", "late_ns", "wait_share", "rank")
    line = lines((row(**dict.fromkeys(names)),))[-1]
    assert line.split().count("-") == len(names)


def ring(**more: Any) -> Ring:
    reader = Reader(0, 7, 1, "attached", 0, 0, NOW_NS - 2 * 10**9, waits=True)
    values: dict[str, Any] = {
        "name": "world:0/1",
        "is_channel": False,
        "inode": 1,
        "offset": 0,
        "pid": 6,
        "rank": 0,
        "capacity_bytes": 1 << 20,
        "messages": 12,
        "published_ns": NOW_NS - 3 * 10**9,
        "readers": (reader,),
    }
    return Ring(**{**values, **more})


@pytest.mark.parametrize(
    ("reader", "writer_waits", "who", "since"),
    [
        (
            Reader(0, 7, 1, "attached", 0, 0, NOW_NS - 2 * 10**9, waits=True),
            False,
            "reader, for a message",
            "2.0 s",
        ),
        (
            Reader(0, 7, 1, "attached", 5, 640, NOW_NS - 9 * 10**9, waits=False),
            True,
            "writer, for room",
            "9.0 s",
        ),
        (Reader(0, 7, 1, "attached", 5, 640, 0, waits=False), False, "nobody, reader is behind", "start"),
        # It was stopped while it slept, and could not take what came afterwards.
        (Reader(0, 7, 1, "attached", 1, 64, 0, waits=True), False, "nobody, reader is behind", "start"),
        # Of a long message the first parts are there.
        (Reader(0, 7, 1, "attached", 0, 64, 0, waits=True), False, "reader, for a message", "start"),
        (Reader(0, 7, 1, "attached", 0, 0, 0, waits=False), False, "nobody", "3.0 s"),
        (Reader(0, None, None, "left", 0, 0, 5, waits=False), False, "reader is left", "3.0 s"),
    ],
)
def test_a_row_of_a_queue_says_which_side_waits(
    reader: Reader, writer_waits: bool, who: str, since: str
) -> None:
    """And since when: since the last message came, or the reader last made progress."""
    line = lines((row(),), looked(ring(readers=(reader,), writer_waits=writer_waits)))[-1]
    assert line.endswith(who)
    assert since in line


def test_a_queue_that_cannot_be_read_has_a_row_with_the_reason() -> None:
    """It hides neither the others nor the ranks."""
    text = lines((row(),), looked(ring(fault="the ring has version 9", readers=()), ring()))
    assert "the ring has version 9" in text[-2]
    assert text[-1].endswith("reader, for a message")


def test_nothing_of_a_name_reaches_the_terminal_as_a_command() -> None:
    """Escape sequences, line breaks and texts of any length: names come from other processes."""
    evil = "\x1b]0;owned\x07\x1b[2J\r\n\u202e" + "x" * 300
    rows = (
        *(row(**{field: evil}) for field in ("group", "plane", "state", "call", "note", "cause")),
        row(state="broken", cause=evil, group=evil),
    )
    sample = looked(ring(name=evil), ring(fault=evil, readers=()), faults={7: evil})
    for line in lines(rows, sample):
        assert line.isprintable()
    # All but the notes, which are whole, fit.
    table = [line for line in lines(rows, sample) if "broken on rank" not in line and "page held" not in line]
    assert max(map(len, table)) <= WIDTH


def test_a_cause_is_shown_whole_below_the_table() -> None:
    """Once for all planes of a rank."""
    cause = "no answer from ranks 7 (pid 4242, alive, last at barrier #118) within 30.0 s"
    rows = (row(state="broken", cause=cause), row(state="dead", cause=cause, plane="host"))
    text = lines(rows)
    assert [line for line in text if cause in line] == [f"tp:0 broken on rank 3: {cause}"]


def test_a_rank_that_is_late_all_the_time_is_marked_and_named() -> None:
    """In its row, and in a line below the tables."""
    text = lines((row(), row(rank=2, pid=7, is_late=True, last_share=1.0)))
    assert [word for line in text for word in line.split() if word.endswith("!")] == ["100%!"]
    assert text[-1] == "tp:0 shared: rank 2 (pid 7) is late all the time"


def test_several_jobs_are_told_apart() -> None:
    """Groups of two jobs may have one name, so each job has a title."""
    one, two, three = row(), row(job=1, pid=7), row(job=1, pid=8)
    assert not any("job of" in line for line in lines((one,)))
    text = lines((one, two, three))[-5:]
    assert [line[:12].strip() for line in text] == [
        *("job of pid 4", "tp:0 shared", "job of pid 7", "tp:0 shared", "tp:0 shared")
    ]
    assert text[2] == "job of pid 7, 8"


def test_the_screen_fits_a_low_terminal() -> None:
    """What has no room is counted; the last line says which key ends it."""
    console = Console(width=WIDTH, height=12, color_system=None)
    rows = tuple(row(rank=rank) for rank in range(40))
    with console.capture() as capture:
        console.print(rich_screen(looked(ring()), rows, console.height, "q ends"))
    shown = capture.get().splitlines()
    assert len(shown) <= console.height
    assert "more lines" in shown[-1]
    assert "q ends" in shown[-1]


def test_a_rank_elsewhere_is_not_said_to_be_in_no_call() -> None:
    """The note names the call's group; a rank in no call says so."""
    away, outside = lines(
        (row(state="elsewhere", call="", note="in pp:0 host"), row(state="running", call=""))
    )[3:5]
    assert "not in a call" not in away
    assert "in pp:0 host" in away
    assert "not in a call" in outside


def test_the_screen_shows_the_lines_of_the_text() -> None:
    """A terminal shows what is printed elsewhere, but for colours."""
    console = Console(width=WIDTH, height=40, color_system=None)
    rows = (row(), row(state="broken", cause="because"), row(state="idle", call=""), row(state="running"))
    with console.capture() as capture:
        console.print(rich_screen(looked(ring()), rows, console.height, "q ends"))
    shown = [line.rstrip() for line in capture.get().splitlines()]
    assert [line for line in shown if line][:-1] == [line for line in lines(rows, looked(ring())) if line]


@pytest.mark.parametrize("mutations", MUTATIONS)
def test_a_hostile_page_never_ends_top(mutations: int) -> None:
    """Of 20,000 changed pages each is refused or gives rows that can be shown."""
    page = OwnPage()
    try:
        page.set_rank(1, 4)
        for number in range(2):
            status = page.group(f"tp:{number}", 1, [4, 7, 8, 9])
            status.set_state(GroupState.USABLE)
            lane = status.lane("device", "process group")
            lane.begin(kind_of("all_reduce"), 1, 4096, 2)
            lane.set_state(LaneState.ASLEEP)
        page.add_queue("steps", page.segment, 0, -1)
        copy = _core.status_copy(page.segment.memory)
    finally:
        page.segment.close()
        vars(page).clear()
    random_ = random.Random(7)
    process = Process(1, 2, "S", "python", 1, 0, 0, 0, 0, "")
    before, shown = None, 0
    for number in range(mutations):
        changed = bytearray(copy)
        for _ in range(random_.randint(1, 8)):
            table = TABLES[random_.choice(("header", "groups", "lanes", "counters", "queues", "records"))]
            place = random_.randrange(min(table.number, 3))
            at = table.offset + place * table.nbytes + random_.randrange(0, min(table.nbytes, 256) - 8, 4)
            changed[at : at + 8] = random_.choice((random_.randbytes(8), b"\0" * 8, b"\xff" * 8))
        try:
            said = decode_page(bytes(changed), records=False)
        except DecodeError:
            continue
        seen = Seen(
            said,
            1,
            process if number % 2 else None,
            (1,),
            0,
            random_.choice((0, -(10**12), 10**12)),
            decode_lateness(bytes(changed), said, 8),
        )
        now = Sample(NOW_NS + number, (seen,), (), (), {})
        assert all(line.isprintable() for line in text_screen(now, rows_of(before, now)).splitlines())
        before, shown = now, shown + 1
    assert shown > mutations / 20


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7, "7"), (7.25, "7.2"), (999.4, "999"), (999.6, "1.0k"), (1.234e9, "1.2G"), (5e21, "5000E")],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    """Rounded, with a letter for the thousands."""
    assert in_number(value) == text
    assert in_bytes(value) == f"{text[:-1]} {text[-1]}B" if text[-1].isalpha() else f"{text} B"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (35e-6, "35 us"),
        (0.0012, "1.2 ms"),
        (0.25, "250 ms"),
        (1.2, "1.2 s"),
        (541, "541 s"),
        (1500, "25m"),
        (7500, "2h05m"),
        (200000, "2d7h"),
    ],
)
def test_durations_have_the_unit_that_fits(seconds: float, text: str) -> None:
    """From microseconds to days."""
    assert in_seconds(seconds) == text
