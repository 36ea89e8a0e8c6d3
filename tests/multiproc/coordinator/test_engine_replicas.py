"""Replicas of an engine leave, join and die while the others serve: every request is answered once, and right."""

from pathlib import Path
from typing import Any

import pytest

from tests.engine_replicas import Scheduler, expected, work
from tests.harness import run_ranks

# Answers between two changes.
EACH = 12


def be(
    rank: int, world_size: int, directory: Path, tensor: int, replicas: int, changes: list[str]
) -> dict[str, Any] | str:
    """Run the scheduler in the last process, and ranks in the others."""
    if rank == world_size - 1:
        return Scheduler(directory, tensor, replicas, "new").serve(changes, EACH)
    return work(rank, directory, tensor, replicas, "new")


@pytest.mark.guarantee("E5")
@pytest.mark.guarantee("E8")
@pytest.mark.parametrize(
    ("tensor", "replicas", "newcomers", "changes", "ends"),
    [
        pytest.param(1, 2, 1, ["join", "leave r0", "kill new"], ["left", "end", None], id="one-rank-each"),
        pytest.param(
            2,
            2,
            1,
            ["join", "kill r1", "leave r0"],
            ["left", "left", "excluded", None, "end", "end"],
            marks=pytest.mark.thorough,
            id="two-ranks-each",
        ),
        pytest.param(
            1,
            3,
            0,
            ["leave r2, kill r1"],
            ["end", None, "left"],
            marks=pytest.mark.thorough,
            id="killed-while-prepared",
        ),
        pytest.param(
            1,
            2,
            1,
            ["join, kill r0"],
            [None, "end", "end"],
            marks=pytest.mark.thorough,
            id="killed-while-another-joins",
        ),
    ],
)
def test_every_request_is_answered_once_and_right(
    tensor: int, replicas: int, newcomers: int, changes: list[str], ends: list[str | None]
) -> None:
    """Requests of a replica that was killed are asked again, and only those; planned changes ask nothing again."""
    dead = [rank for rank, how in enumerate(ends) if how is None]
    processes = tensor * (replicas + newcomers) + 1
    *told, found = run_ranks(be, processes, tensor, replicas, changes, expect_dead=dead, timeout_s=120.0)
    assert told == ends
    assert len(found["answers"]) == found["asked"]
    for request, value in found["answers"].items():
        assert value == expected(int(request), tensor), request
    assert 0 <= found["asked_again"] <= 2 * len(dead)
    assert set(found["by"]) == {f"r{number}" for number in range(replicas)} | (
        {"new"} if newcomers else set()
    )
    assert found["epochs"] == sorted(found["epochs"])
    assert len(found["epochs"]) == 1 + len([word for change in changes for word in change.split(", ")])
