"""`python -m coordinator info --pid` tells what the groups of a process did: calls, bytes, algorithms, waits."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from coordinator.cli import main
from coordinator.cli.info import GROUPS
from coordinator.diagnosis.group_reports import ProcessReport, in_lines, report_of
from coordinator.diagnosis.model import Counters, Group, Lane, Page
from coordinator.diagnosis.pages import Found
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import BUCKETS, GroupState, Outcome
from shm_broadcast.status.page import own_page


def counters(algorithm: str, waits: dict[int, int], **words: int) -> Counters:
    given = {"errors": 0, "nbytes": 0, "waited_ns": 0, "last": 0, "late_ns": 0, "sleeps": 0, "polled_ns": 0}
    return Counters(
        call="all_reduce",
        algorithm=algorithm,
        calls=sum(waits.values()),
        waits=tuple(waits.get(place, 0) for place in range(BUCKETS)),
        **{**given, **words},
    )


def page(*rows: Counters, state: str = "usable", cause: str = "", pid: int | None = 7) -> Found:
    lanes = (
        Lane("shared", "shared memory", "idle", "all_reduce", 1, 1, 1, None, 0, 0, 0, 0, 0, False, rows),
    )
    groups = (Group("tp:0", state, 0, 1, 4, (0, 1, 2, 3), 1, cause, False, lanes),)
    return Found(Page(7, 1, 1, 1, "b", "h", 1, 4, 0, 0, 0, 0, 0, groups, (), ()), pid, (7,))


def test_calls_are_told_apart_by_their_algorithm() -> None:
    """What a label of a metric would not tell: which algorithm was taken how often."""
    found = page(
        counters("one-shot", {0: 60, 12: 40}, nbytes=800, waited_ns=10**9, last=50, late_ns=5 * 10**8),
        counters("two-shot", {20: 1}, errors=1),
    )
    (process,) = report_of([found])
    (group,) = process.groups
    assert [(call.algorithm, call.calls, call.errors, call.nbytes) for call in group.calls] == [
        ("one-shot", 100, 0, 800),
        ("two-shot", 1, 1, 0),
    ]
    assert group.calls[0].median_wait_below_s == 256e-9
    assert group.calls[0].p99_wait_below_s == pytest.approx(256e-9 * 2**12)
    assert in_lines([process]) == {
        "rank 1 of 4, pid 7": {
            "tp:0 (place 1 of 4, usable)": [
                (
                    "shared: all_reduce by one-shot: 100 calls, 800 B, waited 1.0 s (half below 1 us, 99 % below "
                    "1.0 ms each), last in 50 %, by 10 ms on average"
                ),
                "shared: all_reduce by two-shot: 1 call, 0 B, 1 with an error, waited 0 us",
            ]
        }
    }


def test_waits_beyond_the_histogram_have_no_limit() -> None:
    """The last bucket holds all longer waits, and no calls have no wait."""
    (process,) = report_of([page(counters("one-shot", {BUCKETS - 1: 3}), counters("two-shot", {}))])
    assert [call.median_wait_below_s for call in process.groups[0].calls] == [None, None]


def test_a_broken_group_and_an_ended_process_say_so() -> None:
    """The cause is the first line."""
    lines = in_lines(report_of([page(state="broken", cause="rank 3 is dead", pid=None)]))
    assert lines == {"rank 1 of 4, ended": {"tp:0 (place 1 of 4, broken)": ["because: rank 3 is dead"]}}


@pytest.fixture
def group() -> Iterator[str]:
    name = "info_of_a_group:0"
    status = own_page().group(name, 0, [0, 1])
    status.set_state(GroupState.USABLE)
    lane = status.lane("host", "process group")
    for _ in range(3):
        lane.begin(kind_of("barrier"), 0, 16, 0)
        lane.end(Outcome.DONE)
    yield name
    status.leave()


def test_info_shows_a_running_process(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the process that is asked for, as JSON and as text."""
    assert main(["info", "--json", "--pid", str(os.getpid())]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [GROUPS]
    (process,) = found[GROUPS]
    assert process["pid"] == os.getpid()
    (shown,) = [each for each in process["groups"] if each["name"] == group]
    (call,) = shown["calls"]
    assert (call["call"], call["algorithm"], call["calls"], call["nbytes"]) == (
        "barrier",
        "process group",
        3,
        48,
    )
    assert main(["info", "--pid", str(os.getpid())]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{GROUPS}\n")
    assert f"{group} (place 0 of 2, usable):\n" in text
    assert "host: barrier by process group: 3 calls, 48 B" in text


def test_info_without_a_process_shows_all_of_the_host(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A bug report tells what runs."""
    assert main(["info", "--json", "--no-start"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert os.getpid() in [process["pid"] for process in found[GROUPS]]
    assert main(["info", "--no-start"]) == 0
    assert f"    {group} (place 0 of 2, usable):\n" in capsys.readouterr().out


def test_a_process_without_groups_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    """It may have ended, or be none of ours."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert main(["info", "--pid", str(other.pid)]) == 1
        assert capsys.readouterr().err == (
            f"process {other.pid} has no groups: it has ended, or uses none of ours\n"
        )
        other.communicate(b"\n")


def test_reports_come_back_from_json() -> None:
    """Every field is a JSON type, so that programs can read them."""
    reports = report_of([page(counters("one-shot", {0: 1}))])
    assert msgspec.json.decode(msgspec.json.encode(reports), type=tuple[ProcessReport, ...]) == reports
