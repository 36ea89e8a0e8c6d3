"""Who is named where no page shows a member of a group, as of one whose ranks count in another world."""

import msgspec
import pytest

from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.evidence import Evidence, Failure
from shm_broadcast.status.page import LEFT_GROUPS
from tests.fake_pages import FakeRank
from tests.unit.coordinator.diagnosis.test_analysis import RANKS, first, job


@pytest.mark.guarantee("W2")
def test_the_root_of_a_group_of_another_world_is_no_rank_of_this_one() -> None:
    """A trainer on another host is rank 0 of the group through which it sends weights; the workers 0 and 1 wait."""
    workers = [FakeRank(rank, 2).group("world:0", (0, 1)).calls("world:0", "barrier") for rank in (0, 1)]
    for worker in workers:
        worker.group("weights:0", (0, 1, 2), place=1 + worker.rank)
        worker.enter("weights:0", "broadcast", plane="device", root=0)
    verdict = judge(Evidence(tuple(worker.process() for worker in workers)))
    (found,) = verdict.findings
    assert (found.rule, found.ranks, found.call) == ("root cause", (), "broadcast")
    assert str(found.culprits[0]) == (
        "rank 0 of 'weights:0' (of which nothing was seen): its page and its dump are missing"
    )
    assert "rank 1 waits in broadcast #1 on 'weights:0' (device) for rank 0 of 'weights:0'" in found.details
    assert verdict.unseen == ("rank 0 of 'weights:0': neither a page nor a dump",)


@pytest.mark.guarantee("W2")
def test_a_process_whose_page_shows_all_its_groups_is_in_no_other_one() -> None:
    """Rank 0 waits for rank 1 of another world: rank 1 of its own world has nothing to do with that."""
    ranks = job("barrier")
    ranks[0].group("pair:0", (0, 1)).enter("pair:0", "recv", plane="device waits", root=1)
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks) == ("root cause", ())
    assert [culprit.role for culprit in found.culprits] == ["rank 1 of 'pair:0'"]


@pytest.mark.parametrize("why", ["refused", "left", "torn"])
def test_a_process_whose_page_may_hide_a_group_is_the_rank_of_its_world(why: str) -> None:
    """There was no room for the group, or it was left before 16 others, or its record was being written."""
    ranks = job("barrier")
    for rank in ranks:
        if rank.rank != 2:
            rank.group("tp:1", RANKS).enter("tp:1", "all_reduce")
    if why == "left":
        for number in range(LEFT_GROUPS):
            ranks[2].group(f"old:{number}", RANKS, "left")
    elif why == "torn":
        ranks[2].group("tp:1", RANKS)
    processes = [rank.process() for rank in ranks]
    page = processes[2].page
    if why == "torn":
        torn = msgspec.structs.replace(page.groups[-1], is_torn=True)
        page = msgspec.structs.replace(page, groups=(*page.groups[:-1], torn))
    page = msgspec.structs.replace(page, refused=int(why == "refused"))
    processes[2] = msgspec.structs.replace(processes[2], page=page)
    found = first(*processes)
    assert (found.rule, found.ranks) == ("root cause", (2,))
    assert found.culprits[0].pid == 4002


def test_who_has_died_before_the_ranks_changed_is_not_named_for_the_one_with_its_number() -> None:
    """The members go on as ranks 0 to 2; of the new rank 1, which is lost later, no page is left."""
    dead = job("barrier")[1].process()
    ranks = [FakeRank(rank, 3).group("tp:1", (0, 1, 2)).calls("tp:1", "barrier") for rank in range(3)]
    lost = Failure("tp:1", "lost", (1,), 0, "all_reduce #2")
    for rank in ranks:
        rank.enter("tp:1", "all_reduce").end("tp:1", "failed")
    found = first(dead, *(ranks[at].process(failures=(lost,)) for at in (0, 2)))
    assert (found.rule, [culprit.pid for culprit in found.culprits]) == ("dead", [None])


MANY = tuple(range(260))


def many(*without: int) -> list[FakeRank]:
    """Return the ranks of a group of which a page names 256; all but some of them are in a call."""
    ranks = [FakeRank(rank, 260, host=f"node{rank // 8}") for rank in MANY]
    for rank in ranks:
        rank.group("world:0", MANY).calls("world:0", "barrier", plane="device")
        if rank.rank not in without:
            rank.enter("world:0", "all_reduce", plane="device")
    return ranks


@pytest.mark.guarantee("W2")
def test_a_rank_that_no_page_of_its_group_names_is_waited_for() -> None:
    """If its own page is seen it is named; if not, one of those behind the first 256. All are not said to have come."""
    ranks = many(258)
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks) == ("root cause", (258,))
    verdict = judge(Evidence(tuple(rank.process() for rank in ranks if rank.rank != 258)))
    (found,) = verdict.findings
    assert (found.rule, found.ranks) == ("root cause", ())
    assert [culprit.role for culprit in found.culprits] == ["a rank behind the first 256 of 'world:0'"]
    assert verdict.unseen == (
        "rank 258: neither a page nor a dump",
        "a rank behind the first 256 of 'world:0': neither a page nor a dump",
    )


def test_all_have_come_to_a_call_of_a_large_group() -> None:
    """All 260 are named where all pages are seen."""
    found = first(*(rank.process() for rank in many()))
    assert (found.rule, found.ranks) == ("stalled", MANY)


@pytest.mark.parametrize(
    ("kind", "is_seen", "rule"),
    [("lost", True, "dead"), ("lost", False, "dead"), ("timeout", False, "behind")],
)
def test_a_failure_record_names_a_rank_that_no_page_of_its_group_names(
    kind: str, is_seen: bool, rule: str
) -> None:
    """The ranks have agreed on who is at fault."""
    ranks = many(258)
    failure = Failure("world:0", kind, (258,), 0, "all_reduce #2")
    for rank in ranks:
        if rank.rank != 258:
            rank.end("world:0", "failed", plane="device")
    processes = [rank.process(failures=(failure,)) for rank in ranks if rank.rank != 258]
    found = first(*processes, *([ranks[258].process()] if is_seen else []))
    assert (found.rule, found.ranks) == (rule, (258,))
    assert [culprit.pid for culprit in found.culprits] == ([4258] if is_seen else [None])


def test_who_was_seen_dead_is_named_though_no_page_of_its_group_names_it() -> None:
    """A rank saw that the process of rank 258 had ended; it has left no page."""
    ranks = many(258)
    seen = ranks[0].process(others={"world:0": {1: "alive", 258: "dead"}})
    found = first(seen, *(rank.process() for rank in ranks[1:] if rank.rank != 258))
    assert (found.rule, found.ranks) == ("dead", (258,))
    assert "rank 0 saw that its process had ended" in found.details


@pytest.mark.guarantee("W4")
@pytest.mark.parametrize("rank", [-1, -3, 1 << 32, 1 << 40, -(1 << 60)])
def test_a_hostile_dump_of_a_large_group_names_nobody_by_a_number_that_is_no_rank(rank: int) -> None:
    """It stands in the failure record and among the states of processes."""
    page = many()[0]
    failure = Failure("world:0", "lost", (rank,), 0, "all_reduce #2")
    process = page.process(failures=(failure,), others={"world:0": {rank: "dead"}})
    assert [found.rule for found in judge(Evidence((process,))).findings] == ["root cause"]


def test_a_wait_for_a_single_rank_that_no_page_of_its_group_names() -> None:
    """Rank 0 receives from rank 258, which is in no call."""
    ranks = many(*MANY)
    ranks[0].enter("world:0", "recv", plane="device waits", root=258)
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks) == ("root cause", (258,))
