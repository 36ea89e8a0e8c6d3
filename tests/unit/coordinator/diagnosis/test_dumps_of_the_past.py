"""Reading what a run has recorded whose processes have gone on after a failure."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.evidence import Evidence
from coordinator.diagnosis.blame.recorded import read_run, run_folders
from shm_broadcast.errors import PeerLostError
from shm_broadcast.reports.failure_record import FailureRecord
from shm_broadcast.status.kinds import kind_of
from shm_broadcast.status.layout import NOBODY, GroupState, LaneState, Outcome
from shm_broadcast.status.page import GroupStatus
from shm_broadcast.status.record_file import PAGE_SUFFIX
from tests.unit.coordinator.diagnosis.test_dumps import RUN, Rank


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    """Return three ranks with a group beside 'tp:0', in which they have made no call."""
    tmp_path.chmod(0o700)
    made = [Rank(tmp_path, rank) for rank in range(3)]
    for rank in made:
        rank.status.set_state(GroupState.USABLE)
    yield made
    for rank in made:
        rank.close()


def break_down(ranks: Sequence[Rank]) -> None:
    """Let ranks give up waiting for rank 2 in 'tp:0'."""
    for rank in ranks:
        rank.wait()
        rank.lane.end(Outcome.FAILED)
        rank.status.set_state(GroupState.BROKEN, "no answer")
        rank.dump()


def join(rank: Rank, name: str, place: int, ranks: Sequence[int]) -> "Work":
    """Create another group."""
    return Work(rank.page.group(name, place, ranks, 1))


class Work:
    """Calls of a rank in a group."""

    def __init__(self, status: GroupStatus) -> None:
        """Make none yet."""
        self.status = status
        self.lane = status.lane("device", "process group")
        status.set_state(GroupState.USABLE)

    def call(self, number: int, *, ends: bool = True) -> None:
        """Make a call, or stay in it."""
        self.lane.begin(kind_of("barrier"), number, 0, NOBODY)
        self.lane.set_state(LaneState.ASLEEP)
        if ends:
            self.lane.end(Outcome.DONE)


def read(directory: Path) -> Evidence:
    """Return what was recorded."""
    return read_run(run_folders([directory]))


def sources(evidence: Evidence | None) -> list[str]:
    """Return where the page of each process was read."""
    return [] if evidence is None else [each.source for each in evidence.processes]


@pytest.mark.guarantee("W5")
@pytest.mark.parametrize("is_new", [True, False], ids=["another group", "a group beside"])
def test_a_later_hang_counts_before_the_failure_after_which_the_ranks_went_on(
    ranks: list[Rank], tmp_path: Path, is_new: bool
) -> None:
    """They have left the group, and wait for rank 0 in another one, of then or made since."""
    beside = [] if is_new else [join(rank, "dp:0", at, [0, 1, 2]) for at, rank in enumerate(ranks)]
    break_down(ranks[:2])
    for rank in ranks:
        rank.status.leave()
    works = beside or [join(rank, "tp:0@1", at, [0, 1, 2]) for at, rank in enumerate(ranks)]
    for at, work in enumerate(works):
        work.call(1)
        if at:
            work.call(2, ends=False)
    evidence = read(tmp_path)
    assert (sources(evidence), sources(evidence.earlier)) == (["file"] * 3, ["dump", "dump", "file"])
    verdict = judge(evidence)
    (found,) = verdict.findings
    assert (found.rule, found.ranks, found.call, found.number) == ("root cause", (0,), "barrier", 2)
    assert found.group == ("tp:0@1" if is_new else "dp:0")
    assert verdict.seen.startswith("3 processes")
    assert "went on" not in verdict.seen


@pytest.mark.guarantee("W5")
def test_a_failure_is_told_where_nothing_came_of_what_the_ranks_did_after_it(
    ranks: list[Rank], tmp_path: Path
) -> None:
    """They have left the broken group, and have met once more in the one beside it before their end."""
    beside = [join(rank, "dp:0", at, [0, 1, 2]) for at, rank in enumerate(ranks)]
    break_down(ranks[:2])
    for rank, work in zip(ranks, beside, strict=True):
        rank.status.leave()
        work.call(1)
    evidence = read(tmp_path)
    assert sources(evidence) == ["file"] * 3
    verdict = judge(evidence)
    (found,) = verdict.findings
    assert (found.rule, found.ranks, found.group) == ("root cause", (2,), "tp:0")
    assert verdict.seen == "3 processes, groups: dp:0, tp:0; some went on after this failure"


@pytest.mark.parametrize("end", ["left", "broken too"])
def test_who_has_left_its_groups_or_lost_them_in_the_same_failure_did_not_go_on(
    ranks: list[Rank], tmp_path: Path, end: str
) -> None:
    """Its dump counts: the page tells no more."""
    beside = [join(rank, "dp:0", at, [0, 1, 2]) for at, rank in enumerate(ranks[:2])]
    break_down(ranks[:2])
    for rank, work in zip(ranks[:2], beside, strict=True):
        work.call(1)
        work.status.set_state(GroupState.BROKEN, "lost")
        if end == "left":
            rank.status.leave()
            work.status.leave()
    evidence = read(tmp_path)
    assert (sources(evidence), evidence.earlier) == (["dump", "dump", "file"], None)
    assert judge(evidence).findings[0].ranks == (2,)


def test_who_dies_after_the_members_have_changed_is_named(ranks: list[Rank], tmp_path: Path) -> None:
    """Rank 1 of then died first. The new rank 1, which was rank 2, is lost later: its dump is of the first failure."""

    def lose(status: GroupStatus, call: str) -> None:
        status.set_state(GroupState.BROKEN, "lost")
        status.dump(PeerLostError("lost"), FailureRecord("lost", (1,), 0, call, 0.0, "dead"), {1: "dead"})

    for rank in (ranks[0], ranks[2]):
        rank.wait()
        rank.lane.end(Outcome.FAILED)
        lose(rank.status, "all_reduce #2")
        rank.status.leave()
    works = [join(ranks[at], "tp:0@1", place, [0, 1]) for place, at in enumerate((0, 2))]
    ranks[2].page.change_rank(1, 2)
    for work in works:
        work.call(1)
    works[0].call(2)
    lose(works[0].status, "barrier #2")
    evidence = read(tmp_path)
    (found, *_) = judge(evidence).findings
    assert (found.rule, found.ranks, found.group) == ("dead", (1,), "tp:0@1")
    assert "its last was barrier #1 on 'tp:0@1'" in found.culprits[0].what


def test_the_dump_of_a_process_whose_page_cannot_be_read_counts(ranks: list[Rank], tmp_path: Path) -> None:
    """What is wrong with the page is told."""
    break_down(ranks[:2])
    (page,) = (tmp_path / RUN).glob(f"rank-0-*{PAGE_SUFFIX}")
    page.unlink()
    page.write_bytes(b"short")
    evidence = read(tmp_path)
    assert sources(evidence) == ["dump", "dump", "file"]
    assert evidence.unseen == (f"{page.name}: a status page has 417792 bytes, this has 5",)
