"""Links between hosts in tests: ranks that are threads of one process, each on a host of its own."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist

from coordinator.heartbeats.joining import join_heartbeats
from coordinator.heartbeats.watching import Heartbeats

__all__ = ["LOST_AFTER_S", "PROMPT_S", "join", "joined", "no_check"]

LOST_AFTER_S = 0.8
# What must happen at once may take this long on a busy machine.
PROMPT_S = 20.0


def no_check() -> None:
    """Raise nothing."""


def join(
    store: dist.Store | list[dist.Store],
    all_beats: dict[int, Heartbeats],
    ranks: Sequence[int],
    user: str = "first",
) -> dict[int, BaseException]:
    """Let each of `ranks`, each on a host of its own, join with all others in a thread; return the errors.

    They share a store, or each has its own view of it. `user` uses the links of each.
    """
    errors: dict[int, BaseException] = {}

    def body(rank: int) -> None:
        partners = [each for each in ranks if each != rank]
        try:
            join_heartbeats(
                all_beats[rank],
                rank,
                partners,
                store[rank] if isinstance(store, list) else store,
                "127.0.0.1",
                serves_store=rank == 0,
                check=no_check,
                where=f"test (rank {rank})",
                timeout_s=PROMPT_S,
            )
        except BaseException as error:
            errors[rank] = error

    for rank in ranks:
        all_beats[rank].use(user, [each for each in ranks if each != rank])
    threads = [threading.Thread(target=body, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PROMPT_S)
        assert not thread.is_alive()
    return errors


@contextmanager
def joined(count: int, store: dist.Store | None = None) -> Iterator[dict[int, Heartbeats]]:
    ranks = range(count)
    beats = {rank: Heartbeats(LOST_AFTER_S) for rank in ranks}
    assert join(store or dist.HashStore(), beats, ranks) == {}
    try:
        yield beats
    finally:
        for rank in ranks:
            beats[rank].release("first")
