"""Begin the record of a run: the ranks agree on its name, and each keeps its status page in a file from then on."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch.distributed as dist

from coordinator.bootstrap.blocking_calls import ask_store
from coordinator.settings import CoordinatorSettings
from shm_broadcast.status.page import own_page, record_own_page
from shm_broadcast.status.record_file import new_run

__all__ = ["begin_record"]

_RUN: Final = "group_coordinator/run"


def begin_record(store: dist.Store, rank: int, settings: CoordinatorSettings) -> None:
    """Record what this process does if the settings say so; a process that records goes on in its run.

    A run is one world: the first rank that comes names it in the world's store, and the others take that name. A rank
    that records nothing takes no part, so that nobody waits. Called before a group is prepared, whose ranks keep each
    other's pages.

    Raises:
        SettingsError: The record directory cannot be made, or other users may reach into it.
        CapabilityError: Its file system is full.
        NativeError: The store is gone.
    """
    if settings.record_dir is None or own_page().dumps is not None:
        return
    where = f"beginning the record of rank {rank}"
    name = ask_store(lambda: store.compare_set(_RUN, "", new_run()), where, settings.create_timeout_s)
    record_own_page(Path(settings.record_dir), name.decode(), rank)
