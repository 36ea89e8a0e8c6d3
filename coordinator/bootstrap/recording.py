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

    A run is one world: the first rank that comes names it in `store`, and the others take that name. Processes that
    join a world whose members change come to the run of those that were there. A rank that records nothing takes no
    part, so that nobody waits. Called before a group is prepared, whose ranks keep each other's pages.

    Args:
        store: Of the world; if its members may change, the one in which those of all epochs meet.
        rank: Of this process, for the name of its file.
        settings: Where to record, and for how long to wait for the store.

    Raises:
        SettingsError: The record directory cannot be made, or other users may reach into it.
        CapabilityError: Its file system is full.
        CommTimeoutError: The store does not answer.
        NativeError: The store is gone.
    """
    if settings.record_dir is None:
        return
    dumps = own_page().dumps
    # The run of a process that records already is named, too: others may join this world later.
    own = new_run() if dumps is None else dumps.run
    where = f"beginning the record of rank {rank}"
    name = ask_store(lambda: store.compare_set(_RUN, "", own), where, settings.create_timeout_s)
    if dumps is None:
        record_own_page(Path(settings.record_dir), name.decode(), rank)
