"""Only a rank that is late all the time is named, by the counters of simulated windows."""

import random
from collections.abc import Callable, Sequence

import msgspec
import pytest

from coordinator.cli import stragglers
from coordinator.diagnosis.model import Counters, Page
from coordinator.diagnosis.pages import Found
from coordinator.diagnosis.stragglers import LaneCount, LaneName, StragglerWatch, counts_of
from tests.trace_pages import group, lane, page

CALLS = 250
MS = 1_000_000


class Ranks:
    """Ranks that meet in calls, and count who came last as the status pages do."""

    def __init__(self, number: int) -> None:
        self.counts = {
            LaneName("boot", 1, 100 + rank, 1, 0, "tp:0", 0, tuple(range(number)), "shared"): LaneCount(
                rank, 0, 0, 0
            )
            for rank in range(number)
        }
        self.now_ns = 0
        self.watch = StragglerWatch()
        self.watch.count(dict(self.counts), 0)

    def window(self, delays: Callable[[int, int], float], calls: int = CALLS) -> list[int]:
        """Make calls, to which rank r comes `delays(call, r)` ns after the last one; return who is named at the end."""
        names = list(self.counts)
        totals = [list(self.counts[name]) for name in names]
        for at in range(calls):
            came = [delays(at, rank) for rank in range(len(names))]
            order = sorted(range(len(names)), key=came.__getitem__)
            last, before = order[-1], order[-2]
            totals[last][2] += 1
            totals[last][3] += int(came[last] - came[before])
            self.now_ns += int(came[last]) + 10_000
        for name, total in zip(names, totals, strict=True):
            self.counts[name] = LaneCount(total[0], total[1] + calls, total[2], total[3])
        return [each.rank for each in self.watch.count(dict(self.counts), self.now_ns)]


def held(one: Page, *keepers: int) -> Found:
    """Return a page that its process and others have."""
    return Found(one, one.pid, (one.pid, *keepers))


def replica(first_pid: int, last: int, late_ms: int) -> list[Found]:
    """Return the pages of a job of three ranks behind so many calls to which rank 2 was last. Rank 0 keeps them."""
    found = []
    for rank in range(3):
        counted = Counters(
            "all_reduce", "one-shot", last, 0, 0, 0, last * (rank == 2), late_ms * MS * (rank == 2), 0, 0, ()
        )
        lanes = [lane(plane="shared", counters=(counted,))]
        pid, keepers = first_pid + rank, (first_pid,) if rank else (first_pid + 1, first_pid + 2)
        found.append(held(page(rank, [group(rank, (0, 1, 2), "tp:0", lanes)], [], pid=pid), *keepers))
    return found


def varying(generator: random.Random, number: int) -> Sequence[Callable[[int, int], float]]:
    """Return loads under which no rank is slower than the others."""
    jitter = generator.expovariate

    def rotating(at: int, rank: int) -> float:
        return 20_000 + jitter(1 / 5_000) + (2 * MS if at % number == rank else 0)

    def busy_cores(_at: int, _rank: int) -> float:
        # Of some calls the kernel runs another process for one to four slices of 3 ms first.
        return 20_000 + jitter(1 / 20_000) + (3 * MS * generator.randrange(1, 5) if jitter(1) > 2.5 else 0)

    def uneven_work(_at: int, _rank: int) -> float:
        return jitter(1 / MS)

    return rotating, busy_cores, uneven_work


def test_a_rank_that_is_2_ms_late_is_named_with_the_second_window() -> None:
    """The others are busy with work that varies by half of it."""
    generator = random.Random(1)
    ranks = Ranks(4)

    def delays(_at: int, rank: int) -> float:
        return generator.expovariate(1 / MS * 4) + (2 * MS if rank == 2 else 0)

    assert ranks.window(delays) == []
    assert ranks.window(delays) == [2]
    assert ranks.window(delays) == [2]
    # It is taken back with the first window in which it is as fast as the others.
    assert ranks.window(lambda _at, _rank: generator.expovariate(1 / MS)) == []
    assert ranks.window(delays) == []


@pytest.mark.parametrize("load", [0, 1, 2], ids=["rotating", "busy cores", "uneven work"])
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("windows", [200, pytest.param(1000, marks=pytest.mark.thorough)])
def test_nobody_is_named_in_any_window_where_no_rank_is_slower(load: int, number: int, windows: int) -> None:
    """Also not where two ranks alone share all the delays, so that each is last to half of the calls."""
    generator = random.Random(load)
    ranks = Ranks(number)
    delays = varying(generator, number)[load]
    assert [ranks.window(delays) for _ in range(windows)] == [[]] * windows


def test_few_calls_and_small_delays_name_nobody() -> None:
    """199 calls in a window are too few, and 9 % of the window is too little, however steady."""
    ranks = Ranks(4)
    for _ in range(3):
        assert ranks.window(lambda _at, rank: MS * (rank == 2), calls=199) == []
    assert ranks.watch.judged == 0
    ranks = Ranks(4)
    for _ in range(3):
        assert ranks.window(lambda _at, rank: MS + MS * 0.09 * (rank == 2)) == []
    assert ranks.watch.judged == 4


def test_a_rank_that_is_last_more_often_is_not_named_if_another_one_costs_more() -> None:
    """Rank 0 is 0.5 ms late to two calls of three, and rank 1 five ms late to the third."""
    ranks = Ranks(2)
    for _ in range(3):
        assert ranks.window(lambda at, rank: MS / 2 * (rank == 0) if at % 3 else 5 * MS * (rank == 1)) == []


def test_a_rank_must_be_suspect_in_the_same_group_twice() -> None:
    """A group that is made again begins anew, and so does a process with the pid of one that has ended."""
    ranks = Ranks(4)
    assert ranks.window(lambda _at, rank: MS * (rank == 2)) == []
    ranks.counts = {name._replace(created_ns=5): count._replace() for name, count in ranks.counts.items()}
    assert ranks.window(lambda _at, rank: MS * (rank == 2)) == []
    assert ranks.window(lambda _at, rank: MS * (rank == 2)) == [2]


def test_counters_that_fall_are_left_out() -> None:
    """A page that was read torn accuses nobody."""
    ranks = Ranks(4)
    ranks.window(lambda _at, rank: MS * (rank == 2))
    name = list(ranks.counts)[2]
    ranks.counts[name] = ranks.counts[name]._replace(late_ns=0)
    assert ranks.window(lambda _at, _rank: 0.0) == []
    assert ranks.watch.judged == 3


def test_a_straggler_of_one_job_hides_none_of_another_job() -> None:
    """Two replicas on a host have groups of the same name and ranks, and each one has a slow rank 2."""
    watch = StragglerWatch()
    for at in range(3):
        now = [*replica(10, 1000 * at, 300 * at), *replica(20, 1000 * at, 310 * at)]
        found = watch.look(now, 1000 * MS * at)
    assert [(each.rank, each.pid) for each in found] == [(2, 12), (2, 22)]
    # Between the ranks of one job the rule holds: rank 1 costs nearly as much as rank 2.
    watch = StragglerWatch()
    for at in range(3):
        now = replica(10, 1000 * at, 300 * at)
        (slow,) = replica(10, 1000 * at, 250 * at)[2].page.groups
        one = msgspec.structs.replace(now[1].page, groups=(msgspec.structs.replace(slow, place=1),))
        now[1] = msgspec.structs.replace(now[1], page=one)
        assert watch.look(now, 1000 * MS * at) == ()


def test_the_counters_of_all_kinds_of_calls_in_a_plane_count_together() -> None:
    """A rank that is late to sums and to gathers in turn is late in the plane."""
    kinds = [
        Counters("all_reduce", "one-shot", 150, 0, 0, 0, 140, 5, 0, 0, ()),
        Counters("all_gather", "shared memory", 100, 0, 0, 0, 90, 7, 0, 0, ()),
    ]
    one = lane(plane="shared", counters=tuple(kinds))
    (found,) = counts_of([held(page(3, [group(1, (2, 3), lanes=[one])], []))]).values()
    assert found == LaneCount(3, 250, 230, 12)


@pytest.mark.parametrize("logs", [False, True])
def test_ctrl_c_is_the_way_to_end_the_command(monkeypatch: pytest.MonkeyPatch, logs: bool) -> None:
    """Nobody was named, and no traceback is printed."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stragglers, "_pages", lambda pids: [held(page(3, [group(1, (2, 3))], []))])
    monkeypatch.setattr("coordinator.cli.stragglers.time.sleep", interrupted)
    assert stragglers.watch_stragglers(60.0, [], logs=logs) == 0


def test_the_text_names_the_rank_the_group_and_the_cost() -> None:
    """Of all calls, and of the window."""
    ranks = Ranks(2)
    name = list(ranks.counts)[1]
    for _ in range(2):
        ranks.counts[name] = ranks.counts[name]._replace(
            calls=ranks.counts[name].calls + 400,
            last=ranks.counts[name].last + 300,
            late_ns=ranks.counts[name].late_ns + 600 * MS,
        )
        ranks.now_ns += 2000 * MS
        found = ranks.watch.count(dict(ranks.counts), ranks.now_ns)
    (straggler,) = found
    assert str(straggler) == (
        "rank 1 (pid 101) is late in 'tp:0' (shared): last to 300 of 400 calls, by 2.00 ms each, 30% of the last 2 s"
    )
