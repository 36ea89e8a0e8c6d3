"""Names of groups that several ranks create: equal on all ranks, and never those of another group."""

import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from coordinator import ParallelGroups, ParallelLayout
from coordinator.bootstrap import creation
from coordinator.group import GroupCoordinator
from tests.harness import run_ranks
from tests.waiting import wait_until
from tests.worlds import meet, outcome_of, world


def create_by_two_threads(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    """Let ranks 0 and 1 create a group "tp" while a thread of theirs waits for rank 2 to create a layout."""
    made: dict[str, GroupCoordinator] = {}

    def create_layout() -> None:
        layout = ParallelLayout(tensor=3)
        groups = ParallelGroups.create(layout, use_message_queue_broadcaster=False)
        end.callback(groups.destroy)
        made["layout"] = groups.tp

    def create_again() -> None:
        with ParallelGroups.create(ParallelLayout(tensor=3), use_message_queue_broadcaster=False) as groups:
            groups.tp.barrier()

    with world(rank, world_size, directory) as group, ExitStack() as end:
        thread = threading.Thread(target=create_layout)
        if rank == 2:
            wait_until(lambda: all((directory / f"made-{other}").exists() for other in (0, 1)), "the group")
            create_layout()
        else:
            agree, waits = creation._agree, threading.Event()

            def agree_and_tell(*args: Any) -> Any:
                waits.set()
                return agree(*args)

            with mock.patch.object(creation, "_agree", agree_and_tell):
                thread.start()
                wait_until(waits.is_set, "the layout")
                made["group"] = GroupCoordinator([[0, 1]], 0, "gloo", True, group_name="tp")
                end.enter_context(made["group"])
            (directory / f"made-{rank}").touch()
            thread.join()
        found: dict[str, Any] = {name: each.unique_name for name, each in made.items()}
        if rank < 2:
            operation = torch.ops.group_coordinator.all_reduce
            found["sum"] = operation(torch.ones(1), made["group"].unique_name, "sum").item()
        for each in made.values():
            each.barrier()
        meet(rank, range(world_size), directory, "named")
        found["again"] = [outcome_of(create_again)["kind"] for _ in range(2)]
        group.barrier()
        return found


@pytest.mark.guarantee("G21")
def test_groups_that_two_threads_create_have_different_names() -> None:
    """A compiled graph finds its group by name, so its sum is that of the group's ranks.

    Rank 2 has then counted a name less than the others, which the next layout tells all ranks, and the one behind it
    works.
    """
    *found, other = run_ranks(create_by_two_threads, 3)
    for each in found:
        assert each["layout"] == other["layout"] == "tp:0"
        assert each["group"] == "tp:1"
        assert each["sum"] == 2.0
    for each in (*found, other):
        assert each["again"] == ["DisagreementError", "NoneType"]
