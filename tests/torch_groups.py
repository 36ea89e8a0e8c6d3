"""Start torch.distributed in a rank's body with one of two backends, to compare them."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import coordinator.torch_backend

__all__ = ["BACKENDS", "OURS", "torch_world"]

OURS = coordinator.torch_backend.BACKEND

BACKENDS = ("gloo", OURS)
"""What a test compares: Gloo first."""


@contextmanager
def torch_world(
    rank: int, world_size: int, directory: Path, backend: str = OURS, timeout_s: float = 60.0
) -> Iterator[dist.ProcessGroup]:
    """Initialise torch.distributed with `backend`, yield the default group, and destroy it."""
    store = dist.FileStore(
        str(directory / f"store of {backend}".replace(" ", "_").replace(":", "_")), world_size
    )
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    world = dist.group.WORLD
    assert world is not None
    try:
        yield world
    finally:
        del world
        dist.destroy_process_group()
