"""Before a group exists its ranks agree on its members and on its settings."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from coordinator import (
    ClosedError,
    CoordinatorSettings,
    DisagreementError,
    GroupCoordinator,
    ParallelGroups,
    ParallelLayout,
    SettingsError,
    destroy_distributed_environment,
    get_tp_group,
    get_world_group,
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from coordinator.bootstrap import creation
from coordinator.bootstrap.agreement.agreeing import agree
from coordinator.bootstrap.agreement.views import View
from shm_broadcast.liveness import this_process
from tests.engines import refusal, works
from tests.harness import RankPool, run_ranks
from tests.worlds import meet, outcome_of, world

DIFFERENT: dict[str, Callable[[int], dict[str, Any]]] = {
    "rank lists": lambda rank: {"group_ranks": [[0, 1], [2, 3]] if rank < 3 else [[0, 2], [1, 3]]},
    "rank order": lambda rank: {"group_ranks": [[0, 1, 2, 3] if rank else [3, 2, 1, 0]]},
    "settings": lambda rank: {
        "settings": CoordinatorSettings(timeout_s=30.0 + (rank == 2), create_timeout_s=20.0)
    },
    "backend": lambda rank: {"torch_distributed_backend": "gloo" if rank != 1 else "cpu:gloo"},
    "communicator": lambda rank: {"use_device_communicator": rank != 1},
}


# --- agreement --------------------------------------------------------------------------------------------------


def disagreeing(rank: int, world_size: int, directory: Path, what: str) -> str:
    arguments: dict[str, Any] = {
        "group_ranks": [[0, 1, 2, 3]],
        "local_rank": rank,
        "torch_distributed_backend": "gloo",
        "use_device_communicator": True,
        "group_name": "tp",
    }
    with world(rank, world_size, directory, create_timeout_s=20.0) as everyone:
        different = arguments | DIFFERENT[what](rank)
        text = refusal(lambda: GroupCoordinator(**different), DisagreementError)
        works(everyone)
        group = GroupCoordinator(**arguments)
        works(group)
        group.destroy()
        return text


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_create_different_groups_all_raise_at_once(ranks4: RankPool, what: str) -> None:
    """Every rank gets a DisagreementError long before any deadline. The world is intact, and a retry works."""
    for text in ranks4.run(disagreeing, what):
        assert "creating group 'tp:" in text
        assert "ranks disagree" in text


def different_versions(rank: int, world_size: int, directory: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(creation, "PROTOCOL_VERSION", creation.PROTOCOL_VERSION - 1)
        settings = CoordinatorSettings.resolve({}, create_timeout_s=20.0)
        method = f"file://{directory}/rendezvous"
        found = outcome_of(
            lambda: init_distributed_environment(world_size, rank, method, backend="gloo", settings=settings)
        )
    meet(rank, range(world_size), directory, "end")
    return found


@pytest.mark.guarantee("G6")
def test_ranks_of_different_versions_are_refused(ranks4: RankPool) -> None:
    """A host that was not upgraded is found before anything else is exchanged. The error shows both versions."""
    new, old = creation.PROTOCOL_VERSION, creation.PROTOCOL_VERSION - 1
    for found in ranks4.run(different_versions):
        assert found["kind"] == "DisagreementError", found
        for text in ("ranks disagree: protocol: ", f"'{new}' (rank", f"'{old}' (rank 2)"):
            assert text in found["text"]


def different_layouts(rank: int, world_size: int, directory: Path) -> str:
    with world(rank, world_size, directory, create_timeout_s=20.0) as everyone:
        sizes = (2, 2) if rank != 3 else (4, 1)
        text = refusal(lambda: initialize_model_parallel(*sizes), DisagreementError)
        assert not model_parallel_is_initialized()
        works(everyone)
        initialize_model_parallel(2, 2)
        works(get_tp_group())
    return text


def test_ranks_with_different_layouts_all_raise(ranks4: RankPool) -> None:
    """No rank waits for groups that another one never creates, and nothing is left of the attempt."""
    for text in ranks4.run(different_layouts):
        assert "ranks disagree" in text


def different_worlds(rank: int, world_size: int, directory: Path) -> str:
    def start(seconds: float) -> None:
        settings = CoordinatorSettings(timeout_s=seconds, create_timeout_s=20.0)
        init_distributed_environment(
            world_size, rank, f"file://{directory}/meet", backend="gloo", settings=settings
        )

    text = refusal(lambda: start(30.0 + (rank == 1)), DisagreementError)
    assert not dist.is_initialized()
    # Without this wait a late rank would join the others' next attempt.
    meet(rank, range(world_size), directory, "refused")
    start(30.0)
    works(get_world_group())
    destroy_distributed_environment()
    return text


@pytest.mark.guarantee("G6")
def test_a_world_of_different_settings_is_refused_on_every_rank(ranks4: RankPool) -> None:
    """The error shows the field, its values and their ranks. The same directory then serves a new attempt."""
    for text in ranks4.run(different_worlds):
        assert "the world" in text
        assert "timeout_s" in text
        assert "31.0" in text
        assert "rank 1" in text


def bad_groups(rank: int, world_size: int, directory: Path) -> list[str]:
    calls: list[dict[str, Any]] = [
        {"group_ranks": [[0, 1], [1, 0]]},
        {"group_ranks": [[0, 0, 1]]},
        {"group_ranks": [[1 - rank]]},
        {"group_ranks": [[0, 1, 2]]},
        {"group_ranks": [[0, -1]]},
        {"group_ranks": [[0, 1], []]},
        {"group_ranks": [[0, True]]},
        {"local_rank": -1},
        {"local_rank": None},
        {"torch_distributed_backend": "glo0"},
        {"torch_distributed_backend": 7},
        {"group_name": "a:b"},
        {"group_name": ""},
    ]
    good: dict[str, Any] = {
        "group_ranks": [[0, 1]],
        "local_rank": rank,
        "torch_distributed_backend": "gloo",
        "use_device_communicator": True,
    }
    refusal(lambda: GroupCoordinator(**good))
    with world(rank, world_size, directory, create_timeout_s=20.0):
        texts = []
        if rank == 0:
            # Meanwhile the other rank waits for the group that this one finally creates.
            texts = [refusal(lambda bad=bad: GroupCoordinator(**(good | bad))) for bad in calls]  # type: ignore[misc]
        with GroupCoordinator(**good) as group:
            works(group)
            name = group.unique_name
        assert isinstance(refusal(group.barrier, ClosedError), str)
    return [name, *texts]


@pytest.mark.guarantee("G7")
def test_a_mistake_on_one_rank_is_found_before_anything_is_sent(ranks2: RankPool) -> None:
    """A bad rank list, device, backend or name is a UsageError. The corrected call joins the rank that waits."""
    first, second = ranks2.run(bad_groups)
    assert first[0] == second[0]
    for text, part in zip(
        first[1:], ["rank 1 appears in", "rank 0 appears", "in none of the groups"], strict=False
    ):
        assert part in text


def wrong_world(rank: int, world_size: int, directory: Path) -> None:
    with world(rank, world_size, directory):
        assert "the layout needs 4 ranks, the world has 2" in refusal(
            lambda: ParallelGroups.create(ParallelLayout(tensor=4))
        )
        assert "2 ranks cannot be divided" in refusal(lambda: initialize_model_parallel(3))
        assert "decode_context" in refusal(lambda: initialize_model_parallel(2, 1, 1, 3))


def test_a_layout_must_fit_the_world(ranks2: RankPool) -> None:
    """Sizes that do not match the world raise a UsageError that gives the right number."""
    ranks2.run(wrong_world)


# --- the environment --------------------------------------------------------------------------------------------


def from_environment(rank: int, world_size: int, directory: Path) -> None:
    init_distributed_environment(world_size, rank, f"file://{directory}/meet", backend="gloo")
    try:
        everyone = get_world_group()
        assert everyone.settings.timeout_s == 7.5
        os.environ["GROUP_COORDINATOR_TIMEOUT_S"] = "8.5"
        assert everyone.settings.timeout_s == 7.5
        with GroupCoordinator([[0, 1]], rank, "gloo", True) as later:
            assert later.settings.timeout_s == 8.5
        given = CoordinatorSettings(timeout_s=9.5)
        with GroupCoordinator([[0, 1]], rank, "gloo", True, settings=given) as told:
            assert told.settings.timeout_s == 9.5
        initialize_model_parallel(2)
        assert get_tp_group().settings.timeout_s == 7.5
        works(get_tp_group())
    finally:
        destroy_distributed_environment()


def test_settings_are_read_when_a_group_is_created() -> None:
    """The environment is read at that moment, an argument overrides it, and a group keeps its settings."""
    run_ranks(from_environment, 2, environ={"GROUP_COORDINATOR_TIMEOUT_S": "7.5"})


def misspelt(rank: int, world_size: int, directory: Path) -> str:
    text = refusal(
        lambda: init_distributed_environment(world_size, rank, f"file://{directory}/meet", backend="gloo"),
        SettingsError,
    )
    assert not dist.is_initialized()
    return text


def test_a_misspelt_variable_is_an_error() -> None:
    """It raises before any rank is waited for, and the text suggests the right name."""
    for text in run_ranks(misspelt, 2, environ={"GROUP_COORDINATOR_TIMEOUTS": "7"}):
        assert "unknown environment variable 'GROUP_COORDINATOR_TIMEOUTS'" in text
        assert "GROUP_COORDINATOR_TIMEOUT_S" in text


def others_agreed(rank: int, world_size: int, directory: Path) -> str:
    store = dist.FileStore(str(directory / "store"), -1)
    view = View({"groups": "a"}, this_process(), "")
    if rank < 2:
        agree(store, "a", rank, [0, 1], view, 10.0)
        meet(rank, (0, 1), directory, "done")
        return ""
    meet(rank, (0, 1), directory, "done")
    with pytest.raises(DisagreementError) as caught:
        agree(store, "b", rank, [2, 3], View({"groups": "b"}, this_process(), ""), 10.0)
    return str(caught.value)


def test_an_agreement_of_other_ranks_is_not_taken_for_ones_own() -> None:
    """The others hold other facts, and their agreement is not about this rank's groups."""
    assert "rank 2" in run_ranks(others_agreed, 3)[2]
