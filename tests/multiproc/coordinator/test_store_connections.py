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

from coordinator.bootstrap.blocking_calls import finish_calls
from coordinator.bootstrap.status_store import ANSWER_S, WorldStatusStore
from coordinator.groups import ParallelGroups
from coordinator.parallel_state import init_distributed_environment
from shm_broadcast.errors import PeerLostError
from tests.harness import run_ranks
from tests.multiproc.coordinator.test_rebuild_in_torch_world import served, store_at, torch_world
from tests.worlds import run_at

# Longer than a status store waits for an answer.
SLOW_S = ANSWER_S + 0.3
# What must not matter.
LONG_S = 60.0


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
    with asked.own_connection(lending(dist.HashStore(), 2 * SLOW_S), ANSWER_S):
        assert not asked.is_reachable
        assert asked.left() == ()
    assert time.monotonic() - began < 2 * SLOW_S
    finish_calls(LONG_S)


def test_a_rank_that_ends_ends_the_wait_for_a_connection() -> None:
    """The error that names it is raised at once."""
    asked, gone = WorldStatusStore(dist.HashStore(), 0, (0, 1)), PeerLostError("rank 1 is gone", peers=(1,))
    began = time.monotonic()
    lent = asked.own_connection(lending(dist.HashStore(), SLOW_S), LONG_S, mock.Mock(side_effect=gone))
    with pytest.raises(PeerLostError) as raised, lent:
        raise AssertionError("the block does not begin")
    assert raised.value is gone
    assert time.monotonic() - began < SLOW_S
    finish_calls(LONG_S)


def test_a_store_that_is_gone_is_asked_nothing_more() -> None:
    """The caller goes on with what it knows itself."""

    @contextmanager
    def refused() -> Iterator[dist.Store]:
        raise RuntimeError("connection refused")
        yield

    asked = WorldStatusStore(dist.HashStore(), 0, (0, 1))
    with asked.own_connection(refused, LONG_S):
        assert not asked.is_reachable


@pytest.mark.parametrize("value", [b"no JSON", b'{"rank":1,"reason":"\xff"}'])
def test_a_store_with_values_of_others_is_asked_nothing_more(value: bytes) -> None:
    """Nor does what is no text in them end a call that waits."""
    store = dist.HashStore()
    asked = WorldStatusStore(store, 0, (0, 1))
    store.set("refused/host/7", value)  # type: ignore[arg-type] # torch takes bytes, too
    assert asked.refusal("host", 7) is None
    assert not asked.is_reachable


def opens(rank: int, world_size: int, directory: Path, port: int) -> int:
    """Create groups over Gloo, and return how many connections that took."""
    clone: Any = dist.PrefixStore.clone  # type: ignore[attr-defined]
    opened = list[dist.Store]()

    def counting(store: dist.Store) -> dist.Store:
        opened.append(store)
        cloned: dist.Store = clone(store)
        return cloned

    counted = mock.patch.object(dist.PrefixStore, "clone", counting)
    with counted, torch_world(store_at(port), rank, world_size):
        init_distributed_environment(world_size, rank, backend="gloo", timeout=30.0)
        with ParallelGroups.from_sizes(tensor_parallel_size=2) as groups:
            total = torch.tensor([rank])
            for group in (groups.world, groups.tp, groups.dp):
                group.all_reduce(total)
    return len(opened)


def test_all_groups_over_gloo_share_one_connection_to_the_store() -> None:
    """To open one may take seconds, and each took its own."""
    with served() as port:
        found = run_ranks(run_at, 4, ["one", "two", "one", "two"], __name__, "opens", port)
    assert found == [1] * 4
