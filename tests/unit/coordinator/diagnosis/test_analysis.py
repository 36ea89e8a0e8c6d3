"""Who is named, rule by rule, from pages of jobs that never ran."""

import random
from typing import Any

import msgspec
import pytest

from coordinator.diagnosis.blame.analysis import judge
from coordinator.diagnosis.blame.evidence import Evidence, Failure, Process
from coordinator.diagnosis.blame.verdict import Finding
from coordinator.diagnosis.queues import Reader, Ring
from coordinator.diagnosis.stragglers import FEWEST_CALLS
from tests.fake_pages import SECOND, FakeRank

RANKS = (0, 1, 2, 3)


def job(*calls: str, host_of: dict[int, str] | None = None) -> list[FakeRank]:
    """Return four ranks that have made `calls` together in 'tp:0'."""
    hosts = host_of or {}
    ranks = [FakeRank(rank, 4, host=hosts.get(rank, "node1")) for rank in RANKS]
    for rank in ranks:
        rank.group("tp:0", RANKS).calls("tp:0", *calls)
    return ranks


def first(*processes: Process, **words: object) -> Finding:
    """Return the first finding."""
    return judge(Evidence(processes, **words)).findings[0]  # type: ignore[arg-type]


def test_nobody_is_named_where_all_have_come_as_far() -> None:
    """Four ranks between two calls."""
    verdict = judge(Evidence(tuple(rank.process() for rank in job("all_reduce", "barrier"))))
    assert verdict.findings == ()
    assert "Nobody" in verdict.text()


def test_a_rank_outside_of_calls_is_the_root_cause() -> None:
    """Three wait in a call to which the fourth does not come; its last call is told, and since when it is in none."""
    ranks = job("all_reduce", "barrier")
    for rank in ranks[:3]:
        rank.enter("tp:0", "all_gather")
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks, found.call, found.number) == ("root cause", (3,), "all_gather", 3)
    assert found.culprits[0].what == "in no call for 1.0 s; its last was barrier #2 on 'tp:0' (shared)"
    assert "rank 0 waits in all_gather #3 on 'tp:0' (shared) for rank 3" in found.details


def test_all_ranks_of_several_hosts_wait_for_a_rank_that_does_not_come_to_a_broadcast() -> None:
    """Leaders tell each other of it first. A scatter goes over a process group, where the root alone is awaited."""
    words: dict[str, Any] = {"plane": "device", "algorithm": "two levels", "root": 0}
    for call, named in (("broadcast", (3,)), ("scatter", (0,))):
        ranks = [FakeRank(rank, 4, host=f"node{rank // 2}").group("tp:0", RANKS) for rank in RANKS]
        missing = ranks.pop(named[0])
        for rank in ranks:
            rank.enter("tp:0", call, **words)
        found = first(*(rank.process() for rank in [*ranks, missing]))
        assert (found.rule, found.ranks, found.call) == ("root cause", named, call)
        assert len([line for line in found.details if "waits in" in line]) == 3


@pytest.mark.guarantee("W2")
def test_a_rank_without_any_page_is_named_only_if_nobody_else_can_be() -> None:
    """An innocent rank's page is missing: the one that is outside of calls is named. Alone, it is named."""
    ranks = job("barrier")
    for rank in ranks[:3]:
        rank.enter("tp:0", "all_gather")
    without = [rank.process() for rank in ranks if rank.rank != 1]
    found = judge(Evidence(tuple(without)))
    assert found.findings[0].ranks == (3,)
    assert found.unseen == ("rank 1: neither a page nor a dump",)
    alone = first(*(rank.process() for rank in ranks[:3]))
    assert (alone.rule, alone.ranks) == ("root cause", (3,))
    assert alone.culprits[0].pid is None


def test_a_stopped_rank_waits_for_nobody() -> None:
    """It has come to the call before; the others have gone on to one that it cannot come to."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter("tp:0", "all_reduce")
    for rank in ranks[:3]:
        rank.end("tp:0").enter("tp:0", "broadcast", root=0)
    processes = [rank.process(state="stopped" if rank.rank == 3 else "alive") for rank in ranks]
    found = first(*processes)
    assert (found.rule, found.ranks, found.call, found.number) == ("root cause", (3,), "broadcast", 3)
    assert found.culprits[0].what.startswith("stopped, in all_reduce #2")


def test_all_have_come_and_one_is_stopped() -> None:
    """Nobody is behind, and the one that does not go on is named."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter("tp:0", "all_reduce")
    found = first(*(rank.process(state="stopped" if rank.rank == 1 else "alive") for rank in ranks))
    assert (found.rule, found.ranks, found.number) == ("stalled", (1,), 2)


def test_all_have_come_and_nothing_moves() -> None:
    """All are named where nothing tells them apart; who computes is named alone."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter("tp:0", "all_reduce")
    assert first(*(rank.process() for rank in ranks)).ranks == RANKS
    ranks[2].end("tp:0")
    ranks[2] = job("barrier")[2].enter("tp:0", "all_reduce", state="computing")
    assert first(*(rank.process() for rank in ranks)).ranks == (2,)


def test_the_dead_come_first() -> None:
    """A rank was seen dead when the group broke; another one is outside of calls."""
    ranks = job("barrier")
    ranks[0].enter("tp:0", "all_reduce")
    lost = Failure("tp:0", "lost", (2,), 0, "all_reduce #2", detail="2 (pid 4002, dead)")
    waiting = ranks[0].process(failures=(lost,), others={"tp:0": {1: "alive", 2: "dead", 3: "alive"}})
    for processes in ([rank.process() for rank in ranks[1:]], [ranks[1].process(), ranks[3].process()]):
        found = first(waiting, *processes)
        assert (found.rule, found.ranks, found.call, found.number) == ("dead", (2,), "all_reduce", 2)
        assert "rank 0 saw that its process had ended" in found.details


def test_who_was_interrupted_is_named_though_its_own_group_broke_by_that() -> None:
    """Ctrl-C on rank 2 breaks the group on all ranks, on rank 2 first."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter("tp:0", "all_reduce").end("tp:0", "failed").group("tp:0", RANKS, "broken")
    stop = Failure("tp:0", "interrupted", (2,), 2, "all_reduce #2", detail="2 (KeyboardInterrupt)")
    found = first(*(rank.process(failures=(stop,)) for rank in ranks))
    assert (found.rule, found.ranks, found.number) == ("dead", (2,), 2)
    assert "rank 2: 'tp:0' broke in all_reduce #2: 2 (KeyboardInterrupt)" in found.details


def test_who_has_left_before_it_ended_is_not_dead() -> None:
    """A process that destroyed the group and exited is no victim of a kill."""
    ranks = job("barrier")
    ranks[2].group("tp:0", RANKS, "left")
    seen = ranks[0].process(others={"tp:0": {2: "dead"}})
    assert judge(Evidence((seen, *(rank.process() for rank in ranks[1:])))).findings == ()


def test_who_died_of_a_disagreement_is_no_cause() -> None:
    """Rank 3 made another call, and the ranks that raised for it exit one after the other."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter(
            "tp:0", "broadcast" if rank.rank == 3 else "all_reduce", root=0 if rank.rank == 3 else None
        )
        rank.end("tp:0", "disagreed")
    ranks[0].enter("tp:0", "barrier")
    lost = Failure("tp:0", "lost", (1,), 0, "barrier #3")
    verdict = judge(Evidence((ranks[0].process(failures=(lost,)), *(each.process() for each in ranks[1:]))))
    assert [(found.rule, found.ranks) for found in verdict.findings] == [("divergent", (3,)), ("dead", (1,))]


@pytest.mark.parametrize(
    "words", [{"dtype": 2}, {"op": 3}, {"count": 17}, {"detail": 5}, {"call": "barrier"}, {"root": 2}]
)
def test_the_first_call_that_differs_is_shown_with_both_views(words: dict[str, int | str]) -> None:
    """In shared memory kind, dtype, reduction, count, root and the hash of the rest must be equal."""
    ranks = job("barrier")
    for rank in ranks:
        rank.calls("tp:0", "all_reduce")
        given: dict[str, Any] = {"call": "reduce", "root": 1, **(words if rank.rank == 2 else {})}
        rank.enter("tp:0", str(given.pop("call")), **given).end("tp:0", "disagreed")
        rank.enter("tp:0", "all_gather" if rank.rank == 1 else "barrier").end("tp:0", "disagreed")
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks, found.number, found.plane) == ("divergent", (2,), 3, "shared")
    assert len(found.details) == 3
    assert all("called reduce of 16 elements" in line for line in found.details)


def test_a_process_group_lets_ranks_bring_different_amounts() -> None:
    """Over Gloo a gather takes what each rank brings; a sum of different lengths is an error."""
    for call, count in (("all_gather", 0), ("all_reduce", 1)):
        ranks = [FakeRank(rank, 2).group("tp:0", (0, 1)) for rank in (0, 1)]
        for rank in ranks:
            rank.enter("tp:0", call, plane="device", count=10 + rank.rank)
        found = judge(Evidence(tuple(rank.process() for rank in ranks))).findings
        assert [each.rule for each in found] == (["divergent"] if count else ["stalled"])


def test_two_that_differ_are_both_named() -> None:
    """Of two ranks nobody knows who is right."""
    ranks = [FakeRank(rank, 2).group("tp:0", (0, 1)) for rank in (0, 1)]
    ranks[0].enter("tp:0", "all_reduce").end("tp:0", "disagreed")
    ranks[1].enter("tp:0", "barrier").end("tp:0", "disagreed")
    found = first(*(rank.process() for rank in ranks))
    assert (found.ranks, found.details) == ((0, 1), ("no call has a majority, so that all are named",))


def test_a_difference_that_was_dealt_with_is_past() -> None:
    """All ranks raised, and made the next call together."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter("tp:0", "barrier" if rank.rank else "all_reduce").end("tp:0", "disagreed")
        rank.calls("tp:0", "barrier")
    assert judge(Evidence(tuple(rank.process() for rank in ranks))).findings == ()


def test_groups_entered_in_different_orders_are_a_circle() -> None:
    """Rank 0 waits in 'tp:0' for rank 1, which waits in 'dp:0' for rank 2, which waits in 'ep:0' for rank 0."""
    ranks = job("barrier")
    pairs = {"a:0": (0, 1), "b:0": (1, 2), "c:0": (2, 0)}
    for name, members in pairs.items():
        for member in members:
            ranks[member].group(name, members)
    for member, name in ((0, "a:0"), (1, "b:0"), (2, "c:0")):
        ranks[member].enter(name, "all_reduce")
    for rank in (*ranks[:3],):
        rank.group("tp:0", RANKS)
    ranks[3].enter("tp:0", "barrier")
    for missing in (None, 3):
        found = first(*(rank.process() for rank in ranks if rank.rank != missing))
        assert (found.rule, found.ranks, found.group, found.number) == ("order", (0, 1, 2), "a:0", 1)
        assert found.culprits[1].what == "waits in all_reduce #1 on 'b:0' (shared) for rank 2"


def test_who_has_missed_a_call_and_waits_in_the_next_is_named_alone() -> None:
    """Rank 2 is in a barrier of the host plane, the others are in a sum of the device plane."""
    ranks = job("barrier")
    for rank in ranks:
        if rank.rank == 2:
            rank.enter("tp:0", "barrier", plane="shared host")
        else:
            rank.enter("tp:0", "all_reduce")
    for missing in (None, 1):
        found = first(*(rank.process() for rank in ranks if rank.rank != missing))
        assert (found.rule, found.ranks, found.call, found.plane) == ("order", (2,), "barrier", "shared host")
        assert found.details[-1] == "rank 0 waits in all_reduce #2 on 'tp:0' (shared) for rank 2"


def test_groups_with_one_name_and_other_members_are_told_apart() -> None:
    """Groups that are created together have one name: rank 3's 'pp:0' is not the one in which the others wait."""
    ranks = job("barrier")
    for rank, members in enumerate(((0, 1), (0, 1), (2, 3), (2, 3))):
        ranks[rank].group("pp:0", members)
    ranks[0].enter("pp:0", "all_reduce")
    ranks[2].calls("pp:0", "barrier")
    ranks[3].calls("pp:0", "barrier")
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks, found.call, found.number) == ("root cause", (1,), "all_reduce", 1)


def test_who_has_given_up_and_ended_still_tells_for_whom_it_waited() -> None:
    """The others' processes have ended after their group broke: the rank that did not come is the cause, not they."""
    ranks = job("barrier")
    for rank in ranks[:3]:
        rank.enter("tp:0", "all_reduce").end("tp:0", "failed").group("tp:0", RANKS, "broken")
    verdict = judge(
        Evidence(tuple(rank.process(state="alive" if rank.rank == 3 else "dead") for rank in ranks))
    )
    assert [(found.rule, found.ranks) for found in verdict.findings] == [
        ("root cause", (3,)),
        ("dead", (0, 1, 2)),
    ]


def test_who_has_ended_where_nobody_misses_it_is_no_cause() -> None:
    """Two ranks have done their work and exited without a word; the others wait for one that sleeps."""
    ranks = job("barrier")
    for rank in ranks[1:]:
        rank.group("dp:0", (1, 2, 3))
    ranks[1].enter("dp:0", "all_reduce")
    ranks[2].enter("dp:0", "all_reduce")
    processes = [rank.process(state="dead" if rank.rank == 0 else "alive") for rank in ranks]
    verdict = judge(Evidence(tuple(processes)))
    assert [(found.rule, found.ranks) for found in verdict.findings] == [("root cause", (3,)), ("dead", (0,))]
    # If nobody else can be named, it is told.
    alone = judge(Evidence((job("barrier")[0].process(state="dead"), job("barrier")[1].process())))
    assert [(found.rule, found.ranks) for found in alone.findings] == [("dead", (0,))]


def test_a_wait_for_a_queued_call_is_one_of_its_plane() -> None:
    """Calls on a device end when they are queued; a rank that waits for the third waits for who has queued two."""
    ranks = job()
    for rank in ranks:
        rank.calls("tp:0", *["all_reduce"] * (2 if rank.rank == 1 else 4), plane="nccl", algorithm="NCCL")
    ranks[0].enter("tp:0", "all_reduce", plane="nccl waits", number=3, algorithm="waiting")
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks, found.plane, found.number) == ("root cause", (1,), "nccl", 3)


def test_a_call_that_has_begun_only_just_is_no_wait() -> None:
    """Its rank waits for nobody yet."""
    ranks = job("barrier")
    ranks[0].enter("tp:0", "all_reduce")
    settling = ranks[0].process(settling=frozenset({("tp:0", 1, 0)}))
    assert judge(Evidence((settling, *(rank.process() for rank in ranks[1:])))).findings == ()


def test_a_group_that_was_left_holds_up_nobody() -> None:
    """The ranks have destroyed a broken group, and work in another one."""
    ranks = job("barrier")
    for rank in ranks:
        if rank.rank != 2:
            rank.enter("tp:0", "all_reduce").end("tp:0", "failed")
        rank.group("tp:0", RANKS, "left").group("tp:1", RANKS).calls("tp:1", "barrier")
    assert judge(Evidence(tuple(rank.process() for rank in ranks))).findings == ()
    ranks[2].group("tp:1", RANKS, "left")
    for rank in (ranks[0], ranks[1], ranks[3]):
        rank.enter("tp:1", "barrier")
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks) == ("root cause", (2,))
    assert found.culprits[0].what.startswith(
        "in no group any more for 1.0 s; its last was barrier #1 on 'tp:1'"
    )


@pytest.mark.parametrize("call", ["send", "recv"])
def test_two_that_both_send_or_both_receive_are_a_circle(call: str) -> None:
    """Nobody takes what the other waits to send, or sends what it waits for."""
    ranks = job("barrier")
    ranks[0].enter("tp:0", call, plane="host waits", root=1)
    ranks[1].enter("tp:0", call, plane="host waits", root=0)
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks, found.call, found.plane) == ("order", (0, 1), call, "host")


def test_one_that_sends_to_one_that_receives_is_a_transfer() -> None:
    """It goes on, or the memory between them is at fault: no circle."""
    ranks = job("barrier")
    ranks[0].enter("tp:0", "send", plane="host waits", root=1)
    ranks[1].enter("tp:0", "recv", plane="host waits", root=0)
    assert judge(Evidence(tuple(rank.process() for rank in ranks))).findings == ()


def test_a_chain_of_waits_leads_to_its_end() -> None:
    """Three wait for rank 1, which waits in a receive for rank 2, which is outside of calls."""
    ranks = job("barrier")
    for rank in (0, 3):
        ranks[rank].enter("tp:0", "all_reduce")
    ranks[1].enter("tp:0", "recv", plane="device waits", root=2)
    for missing in (None, 3):
        found = first(*(rank.process() for rank in ranks if rank.rank != missing))
        assert (found.rule, found.ranks) == ("root cause", (2,))


def test_a_rank_that_came_when_the_others_had_given_up_is_behind() -> None:
    """The ranks have agreed on who was missing; all pages show the same call."""
    ranks = job("barrier")
    ranks[2].now_ns += 9 * SECOND
    for rank in ranks:
        rank.enter("tp:0", "all_reduce").end("tp:0", "failed").group("tp:0", RANKS, "broken")
    failure = Failure("tp:0", "timeout", (2,), 0, "all_reduce #2", 3.0)
    for missing in (None, 1):
        found = first(*(rank.process(failures=(failure,)) for rank in ranks if rank.rank != missing))
        assert (found.rule, found.ranks, found.call, found.number) == ("behind", (2,), "all_reduce", 2)
        assert found.details == (
            "rank 0 found in all_reduce #2: rank 2 had not come within 3.0 s",
            "rank 2 came 9.5 s after the end of its barrier #1",
        )


def test_a_timeout_that_names_nobody_is_a_stall() -> None:
    """All had come, and the transfer did not end."""
    ranks = job("barrier")
    for rank in ranks:
        rank.enter("tp:0", "all_reduce").end("tp:0", "failed").group("tp:0", RANKS, "broken")
    failure = Failure("tp:0", "timeout", (), 0, "all_reduce #2", 3.0)
    found = first(*(rank.process(failures=(failure,)) for rank in ranks))
    assert (found.rule, found.ranks, found.number) == ("stalled", RANKS, 2)


@pytest.mark.guarantee("W1")
def test_clocks_of_two_hosts_are_never_compared() -> None:
    """Shifting the clock of a host by an hour changes nothing but the times that are told on it."""
    for shift in (-3600, 3600):
        ranks = job("barrier", host_of={2: "node2", 3: "node2"})
        for rank in ranks[2:]:
            rank.now_ns += shift * SECOND
        for rank in ranks:
            rank.enter("tp:0", "all_reduce", plane="device") if rank.rank != 2 else None
            rank.calls("tp:0", "barrier", plane="host")
            rank.enter("tp:0", "barrier" if rank.rank == 3 else "all_gather", plane="host").end(
                "tp:0", "failed", plane="host"
            )
        found = first(*(rank.process() for rank in ranks))
        assert (found.rule, found.ranks, found.number) == ("divergent", (3,), 2)


def test_the_shared_memory_of_two_hosts_counts_apart() -> None:
    """Groups of several hosts make steps in the memory of each, whose numbers mean nothing elsewhere."""
    ranks = job(host_of={2: "node2", 3: "node2"})
    for rank in ranks:
        rank.calls("tp:0", *["all_reduce"] * (5 if rank.rank > 1 else 2))
    ranks[0].enter("tp:0", "barrier")
    found = first(*(rank.process() for rank in ranks))
    assert (found.rule, found.ranks) == ("root cause", (1,))


def queue(writer_waits: bool, *behind: int, waits: bool = False) -> Ring:
    """Return a queue from rank 0 to ranks 1, 2 and 3, of which each is behind by some messages of 100 bytes."""
    readers = tuple(
        Reader(
            place=place,
            pid=4001 + place,
            rank=1 + place,
            state="attached",
            behind_messages=number,
            behind_bytes=100 * number,
            progress_ns=1,
            waits=waits,
        )
        for place, number in enumerate(behind)
    )
    return Ring(
        name="steps",
        is_channel=False,
        inode=5,
        offset=0,
        pid=4000,
        rank=0,
        capacity_bytes=1000,
        messages=50,
        writer_waits=writer_waits,
        readers=readers,
    )


def test_the_slow_reader_of_a_queue_is_named() -> None:
    """The writer has no room; of its readers the one that is farthest behind is told, with its lag."""
    ranks = [rank.queue("steps", 5, rank.rank - 1) for rank in job("barrier")]
    found = first(*(rank.process() for rank in ranks), rings=(queue(True, 0, 10, 3),))
    assert (found.rule, found.ranks, found.call, found.group) == ("root cause", (2,), "enqueue", "steps")
    assert found.details[-1] == "rank 2 is 10 messages and 1000 bytes behind in queue 'steps'"


@pytest.mark.guarantee("W3")
def test_a_reader_that_waits_for_work_blames_nobody() -> None:
    """It is idle. If others wait for the reader in a call, its writer is the cause."""
    ranks = [rank.queue("steps", 5, rank.rank - 1) for rank in job("barrier")]
    idle = queue(False, 0, 0, 0, waits=True)
    assert judge(Evidence(tuple(rank.process() for rank in ranks), (idle,))).findings == ()
    ranks[3].enter("tp:0", "barrier")
    found = first(*(rank.process() for rank in ranks), rings=(idle,))
    assert (found.rule, found.ranks) == ("root cause", (0,))


def test_the_writer_of_a_queue_that_has_ended_is_named() -> None:
    """Nothing is left of rank 0, which shared memory with the others."""
    ranks = [rank.queue("steps", 5, rank.rank - 1) for rank in job("barrier")]
    found = first(
        *(rank.process() for rank in ranks[1:]), ended={0: "it is in 'tp:0', and no process has its page"}
    )
    assert (found.rule, found.ranks) == ("dead", (0,))


def test_the_rank_that_is_last_most_of_the_time_is_a_straggler() -> None:
    """It must be last in half of 200 calls, and cost a tenth of the time; ranks that take turns are nobody."""
    for place, late_ns, calls, named in (
        (lambda number: 2, SECOND // 5, FEWEST_CALLS, True),
        (lambda number: 2, SECOND // 5, FEWEST_CALLS - 1, False),
        (lambda number: 2, SECOND // 20, FEWEST_CALLS, False),
        (lambda number: number % 4, SECOND // 5, FEWEST_CALLS, False),
        # Each of two is last to half of the calls.
        (lambda number: 1 + number % 2, SECOND // 5, FEWEST_CALLS, False),
    ):
        ranks = job()
        for rank in ranks:
            for number in range(calls):
                rank.enter("tp:0", "all_reduce").end("tp:0", last=place(number), late_ns=late_ns)
        findings = judge(Evidence(tuple(rank.process() for rank in ranks))).findings
        assert [(found.rule, found.ranks) for found in findings] == ([("straggler", (2,))] if named else [])


def test_a_world_that_is_joined_again_is_not_compared_with_the_one_before() -> None:
    """Its groups have the same names, and its calls count from 1 again, in planes that it may not have used yet."""

    def joined_again(rank: int, calls: int) -> FakeRank:
        left = FakeRank(rank, 2, began_s=1000).group("tp:0", (0, 1), "left")
        left.calls("tp:0", *["broadcast"] * 4).calls("tp:0", "barrier", plane="shared host")
        again = FakeRank(rank, 2, began_s=2000).group("tp:0", (0, 1))
        return again.calls("tp:0", *["all_reduce"] * calls).after(left)

    waiting = joined_again(0, 3).enter("tp:0", "barrier", plane="shared host")
    found = first(waiting.process(), joined_again(1, 1).process())
    assert (found.rule, found.ranks, found.number, found.plane) == ("root cause", (1,), 1, "shared host")


def test_calls_belong_to_the_newest_of_the_groups_with_one_name() -> None:
    """A world of two is joined again with three ranks, and then with two: rank 0 gives up waiting there."""

    def joined(rank: int) -> FakeRank:
        first_, second = ((0, 1), 1000), ((0, 1, 2), 2000)
        found = FakeRank(rank, 2, began_s=first_[1]).group("tp:0", first_[0], "left").calls("tp:0", "barrier")
        again = FakeRank(rank, 3, began_s=second[1]).group("tp:0", second[0], "left").after(found)
        return FakeRank(rank, 2, began_s=3000).group("tp:0", (0, 1)).after(again)

    waiting = joined(0).enter("tp:0", "all_reduce").end("tp:0", "failed").group("tp:0", (0, 1), "broken")
    found = first(waiting.process(), joined(1).process())
    assert (found.rule, found.ranks, found.call, found.number) == ("root cause", (1,), "all_reduce", 1)


@pytest.mark.guarantee("W2")
@pytest.mark.parametrize("algorithm", ["NCCL", "our kernels", "custom kernels and nccl"])
def test_what_was_not_seen_is_told(algorithm: str) -> None:
    """Refused groups, missing ranks, torn records and calls in CUDA graphs."""
    ranks = job("barrier")
    ranks[0].enter("tp:0", "all_reduce", plane="device", algorithm=algorithm, state="idle", is_torn=True)
    page = msgspec.structs.replace(ranks[1].page(), refused=3)
    verdict = judge(Evidence((ranks[0].process(), Process(page)), unseen=("page of process 7: not sealed",)))
    assert verdict.unseen == (
        "ranks 2, 3: neither a page nor a dump",
        "rank 1: 3 groups, queues or lanes, for which its page had no room",
        "1 record that were being written",
        "calls inside of CUDA graphs that were replayed: only their capture is in the pages",
        "page of process 7: not sealed",
    )


def test_no_order_of_the_pages_changes_the_verdict() -> None:
    """Pages are found in any order."""
    ranks = job("barrier")
    for rank in ranks[1:]:
        rank.enter("tp:0", "all_gather")
    processes = [rank.process() for rank in ranks]
    for seed in range(20):
        random.Random(seed).shuffle(processes)
        assert first(*processes).ranks == (0,)


def test_a_verdict_is_also_for_machines() -> None:
    """It goes to JSON and back."""
    ranks = job("barrier")
    ranks[0].enter("tp:0", "all_gather")
    verdict = judge(Evidence(tuple(rank.process() for rank in ranks)))
    assert msgspec.json.decode(msgspec.json.encode(verdict), type=type(verdict)) == verdict
