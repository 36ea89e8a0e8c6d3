"""Which connections to the world's store the groups of one creation use, and what a slow one changes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from coordinator.bootstrap import connections, status_store
from coordinator.bootstrap.status_store import WorldStatusStore
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import init_distributed_environment
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild_in_torch_world import served, store_at, torch_world
from tests.worlds import run_at

# Longer than the status store's usual patience in these tests, and short enough for one of them.
SLOW_S = 0.5
PATIENCE_S = 0.1
# What must not matter.
LONG_S = 60.0


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a status store give up early."""
    monkeypatch.setattr(status_store, "ANSWER_S", PATIENCE_S)


def lending(store: dist.Store, after_s: float = 0.0, given_back: list[dist.Store] | None = None) -> Any:
    """Return what lends `store`, after a while."""

    @contextmanager
    def lend() -> Iterator[dist.Store]:
        time.sleep(after_s)
        yield store
        if given_back is not None:
            given_back.append(store)

    return lend


def has(store: dist.Store) -> bool:
    """Return whether rank 0 has said in `store` that it leaves."""
    return bool(store.check(["left/0"]))


def test_a_connection_that_opens_slowly_leaves_the_status_store_in_reach() -> None:
    """The look-up of a name takes seconds on some machines; the store answers as before."""
    usual, own, given_back = dist.HashStore(), dist.HashStore(), list[dist.Store]()
    asked = WorldStatusStore(usual, 0, (0, 1))
    with asked.own_connection(lending(own, SLOW_S, given_back), LONG_S):
        asked.leave()
        assert has(own)
        assert not has(usual)
        assert not given_back
    assert given_back == [own]
    assert asked.is_reachable
    asked.leave()
    assert has(usual)


def test_a_connection_that_does_not_open_in_time_ends_the_questions() -> None:
    """Whoever has waited for it for as long as the creation may take waits for no other answer."""
    asked = WorldStatusStore(dist.HashStore(), 0, (0, 1))
    began = time.monotonic()
    with asked.own_connection(lending(dist.HashStore(), SLOW_S), PATIENCE_S):
        assert not asked.is_reachable
        assert asked.left() == ()
    assert time.monotonic() - began < SLOW_S


def test_a_store_that_is_gone_is_asked_nothing_more() -> None:
    """The caller goes on with what it knows itself."""

    @contextmanager
    def refused() -> Iterator[dist.Store]:
        raise RuntimeError("connection refused")
        yield

    asked = WorldStatusStore(dist.HashStore(), 0, (0, 1))
    with asked.own_connection(refused, LONG_S):
        assert not asked.is_reachable


def opens(rank: int, world_size: int, directory: Path, port: int) -> int:
    """Create groups over Gloo, and return how many connections that took."""
    opened = mock.Mock(side_effect=connections.connection_of_its_own)
    counted = mock.patch.object(connections, "connection_of_its_own", opened)
    with counted, torch_world(store_at(port), rank, world_size):
        init_distributed_environment(world_size, rank, backend="gloo", timeout=30.0)
        with ParallelGroups.from_sizes(tensor_parallel_size=2) as groups:
            total = torch.tensor([rank])
            for group in (groups.world, groups.tp, groups.dp):
                group.all_reduce(total)
    return int(opened.call_count)


def test_all_groups_over_gloo_share_one_connection_to_the_store() -> None:
    """To open one may take seconds, and each took its own."""
    with served() as port:
        found = run_ranks(run_at, 4, ["one", "two", "one", "two"], __name__, "opens", port)
    assert found == [1] * 4
