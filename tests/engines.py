"""Helpers for tests of groups: they start and stop like an engine, use every plane once, or expect an error."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator import (
    GroupCoordinator,
    UsageError,
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    init_distributed_environment,
)

__all__ = ["Layer", "engine", "refusal", "works"]


@contextlib.contextmanager
def engine(rank: int, world_size: int, directory: Path, tp: int = 1, pp: int = 1) -> Iterator[None]:
    """Join a world and create groups as an engine's worker does, and destroy them afterwards."""
    init_distributed_environment(
        world_size=world_size,
        rank=rank,
        distributed_init_method=f"file://{directory}/init",
        local_rank=rank,
        backend="gloo",
    )
    try:
        ensure_model_parallel_initialized(tp, pp)
        yield
    finally:
        destroy_model_parallel()
        destroy_distributed_environment()


def works(group: GroupCoordinator) -> None:
    """Use each plane of a group once and check the results."""
    assert group.all_reduce(torch.tensor([float(group.rank)])).item() == sum(group.ranks)
    assert group.all_gather_object(group.rank) == group.ranks
    assert group.broadcast_object("x" if group.rank_in_group == 0 else None) == "x"
    got = group.broadcast_tensor_dict({"x": torch.ones(5000)} if group.is_first_rank else None)
    assert got is not None
    assert got["x"].sum() == 5000
    group.barrier()


def refusal(call: Callable[[], Any], kind: type[Exception] = UsageError) -> str:
    """Return the text of the error that `call` must raise; its class must be `kind` and no subclass."""
    with pytest.raises(kind) as raised:
        call()
    assert type(raised.value) is kind
    return str(raised.value)


class Layer(torch.nn.Module):
    """A layer with a hook that is told over which group the layer communicates."""

    prepared_for: GroupCoordinator | None = None

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 64))

    def prepare_communication_buffer(self, group: GroupCoordinator) -> None:
        self.prepared_for = group
