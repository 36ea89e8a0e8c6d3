"""The first failure counts on all ranks, also if the rank that found it ends its process at once."""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import DisagreementError, UsageError
from coordinator.parallel_state import (
    destroy_distributed_environment,
    get_world_group,
    init_distributed_environment,
)
from coordinator.settings import CoordinatorSettings
from tests.harness import RankPool, run_ranks
from tests.ports import free_port
from tests.waiting import wait_until
from tests.worlds import meet, new_group, outcome_of, run_at, world

CALLS = {
    "barrier": lambda group, deadline_s: group.barrier(deadline_s),
    "all_reduce": lambda group, deadline_s: group.all_reduce(torch.ones(9), timeout_s=deadline_s),
}


def come_and_end(
    rank: int, world_size: int, directory: Path, kept: str, method: str, name: str, delays: list[float]
) -> None:
    """Wait for the last rank, write down what is raised, and end the process at once, as an engine's worker does."""
    settings = CoordinatorSettings.resolve({})
    init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
    group = get_world_group()
    group.barrier()
    others = [Path(kept) / f"{other}.json" for other in range(world_size - 1)]
    if rank == world_size - 1:
        wait_until(
            lambda: all(path.exists() for path in others), "the other ranks have ended", timeout_s=60.0
        )
        destroy_distributed_environment()
        return
    time.sleep(delays[rank])
    found = outcome_of(lambda: CALLS[name](group, delays[-1]))
    unfinished = Path(kept) / f"{rank}.unfinished"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(others[rank])
    os._exit(1)


@pytest.mark.guarantee("D6")
@pytest.mark.guarantee("D68")
@pytest.mark.parametrize(
    "delays",
    [
        pytest.param([0.0, 0.8, 1.6, 2.0], id="short"),
        pytest.param([0.0, 2.0, 4.0, 5.0], id="long", marks=pytest.mark.thorough),
    ],
)
@pytest.mark.parametrize("name", CALLS)
def test_all_ranks_name_the_absent_one_though_each_ends_at_once(
    tmp_path: Path, name: str, delays: list[float]
) -> None:
    """Three ranks come one after the other, within the deadline, and one never.

    Nobody blames a rank that has raised and gone, nor its store.
    """
    method = f"tcp://127.0.0.1:{free_port()}"
    run_ranks(come_and_end, 4, str(tmp_path), method, name, delays, expect_dead=[0, 1, 2])
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [each["kind"] for each in found] == ["CommTimeoutError"] * 3, found
    assert [each["missing"] for each in found] == [[3]] * 3, found
    assert "rank 3 (pid" in found[0]["text"]
    assert all("found by rank 0" in each["text"] for each in found[1:]), found


@pytest.mark.guarantee("D6")
@pytest.mark.parametrize("name", CALLS)
def test_ranks_of_several_hosts_name_the_absent_one_though_each_ends_at_once(
    tmp_path: Path, name: str
) -> None:
    """As far as a store tells that outlives them: here a directory. The last rank is on the other host with another."""
    places = ["one", "one", "another", "another"]
    body, method = (come_and_end.__module__, come_and_end.__qualname__), f"file://{tmp_path}/world"
    # A rank that has waited for half a second says so in the store.
    delays = [0.0, 0.8, 1.6, 3.0]
    run_ranks(run_at, 4, places, *body, str(tmp_path), method, name, delays, expect_dead=[0, 1, 2])
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [each["kind"] for each in found] == ["CommTimeoutError"] * 3, found
    assert [each["missing"] for each in found] == [[3]] * 3, found


def stay_away(rank: int, world_size: int, directory: Path, name: str) -> list[dict[str, Any]]:
    """Make three calls; then one rank stays away from a fourth."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        for _ in range(3):
            CALLS[name](group, None)
        found = [] if rank else [outcome_of(lambda: CALLS[name](group, 0.6))]
        meet(rank, range(world_size), directory, "expired")
        if rank:
            found = [outcome_of(lambda: CALLS[name](group, 0.6))]
        return found


@pytest.mark.guarantee("D68")
@pytest.mark.parametrize("name", CALLS)
def test_a_time_out_says_where_the_missing_rank_was_last_and_keeps_its_deadline(
    ranks2: RankPool, name: str
) -> None:
    """The text holds the last call of the missing rank; to that rank it says that the others had given up."""
    (waited,), (late,) = ranks2.run(stay_away, name)
    assert waited["missing"] == late["missing"] == [1]
    assert f"last at {name} #" in waited["text"], waited
    assert 0.6 <= waited["seconds"] < 1.0, waited
    assert (
        "the other ranks had given up before this rank came: no answer from it within 0.6 s" in late["text"]
    ), late


def refuse_and_stay_away(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        group.barrier()
        if rank:
            with pytest.raises(UsageError):
                group.barrier(-1.0)
        else:
            with pytest.raises(DisagreementError):
                group.barrier()
        text = "" if rank else str(outcome_of(lambda: group.barrier(0.6))["text"])
        meet(rank, range(world_size), directory, "expired")
        return text


@pytest.mark.guarantee("D68")
def test_a_time_out_says_that_the_missing_rank_has_refused_its_last_call(ranks2: RankPool) -> None:
    """A refused call has a number and no name of its own."""
    text, _ = ranks2.run(refuse_and_stay_away)
    assert re.search(r"no answer from rank 1 \(pid .*, last at a refused call #\d+\) within 0.6 s", text), (
        text
    )


def go_ahead(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Stay away, or wait in a barrier; rank 1 is one call ahead, as if it had all data of that one, and expires."""
    with world(rank, world_size, directory) as everyone, new_group(everyone) as group:
        group.barrier()
        found: dict[str, Any] = {}
        if rank == 1:
            group._health.begin("host", "barrier")
            found = outcome_of(lambda: group.barrier(2.5))
        elif rank == 2:
            found = outcome_of(lambda: group.barrier(60.0))
        meet(rank, range(world_size), directory, "expired")
        return found


@pytest.mark.guarantee("D6")
def test_a_rank_that_waits_in_an_earlier_call_for_the_absent_one_is_not_named(tmp_path: Path) -> None:
    """Where only the status store knows, the rank that has gone ahead sees where the other one waits."""
    body = (go_ahead.__module__, go_ahead.__qualname__)
    _, ahead, behind = run_ranks(run_at, 3, ["one", "two", "three"], *body)
    assert (ahead["kind"], ahead["missing"]) == ("CommTimeoutError", [0]), ahead
    assert (behind["kind"], behind["missing"]) == ("CommTimeoutError", [0]), behind
    assert "found by rank 1 in barrier" in behind["text"], behind
