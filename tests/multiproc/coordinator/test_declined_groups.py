"""A rank that cannot take part in a group which would be its first tells the others why."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import coordinator.torch_backend  # noqa: F401 - registers the backend
from coordinator import GroupCoordinator
from tests.harness import RankPool
from tests.worlds import outcome_of


def unaddressed(rank: int, world_size: int, directory: Path, way: str) -> tuple[str, str]:
    """Let rank 1 name an interface that is not there, and create a group in a world of the application."""

    def join(backend: str) -> None:
        store = dist.FileStore(str(directory / "store"), world_size)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)

    def create() -> Any:
        if way == "group":
            return GroupCoordinator([[0, 1]], 0, "gloo", True)
        return join("group_coordinator")

    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            patched.setenv("GROUP_COORDINATOR_INTERFACE", "nosuch0")
        if way == "group":
            join("gloo")
        found = outcome_of(create)
    if dist.is_initialized():
        dist.destroy_process_group()
    return found["cause"] if found["kind"].startswith("Backend") else found["kind"], found["text"]


@pytest.mark.guarantee("G8")
@pytest.mark.parametrize("way", ["group", "backend of torch"])
def test_a_rank_without_an_address_tells_those_that_create_a_group_with_it(
    ranks2: RankPool, way: str
) -> None:
    """They do not wait for it until their deadline, which is five minutes."""
    (kind, text), (own_kind, own_text) = ranks2.run(unaddressed, way)
    assert (kind, own_kind) == ("CapabilityError", "SettingsError")
    assert "rank 1 cannot take part: " in text
    assert own_text in text
