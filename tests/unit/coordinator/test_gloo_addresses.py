"""How often the ranks of a Gloo group ask the store for each other's addresses. The ranks are threads here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator.host.gloo_addresses import GatheredAddresses
from coordinator.host.process_groups import LOOPBACK, GlooOptions, new_unregistered_gloo_group

SIZE = 4
LIMIT_S = 60.0


class Asked(dist.Store):
    """Passes on to another store, and notes the names of the operations."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self.store = store
        self.names: list[str] = []

    def set(self, key: str, value: str | bytes) -> None:
        self.names.append("set")
        self.store.set(key, value)

    def get(self, key: str) -> bytes:
        self.names.append("get")
        return bytes(self.store.get(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self.names.append("wait")
        self.store.wait(keys, timeout)

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self.names.append("multi_get")
        return list(self.store.multi_get(keys))


def connect(is_lazy: bool) -> list[list[str]]:
    """Create a group, let all its ranks meet in it, and return what each has asked."""
    shared = dist.HashStore()
    made = threading.Barrier(SIZE)

    def be(rank: int) -> list[str]:
        store = Asked(shared)
        options = GlooOptions(LOOPBACK, is_lazy)
        _group, gloo = new_unregistered_gloo_group(store, rank, SIZE, "g", LIMIT_S, options)
        total = torch.ones(2)
        gloo.allreduce([total]).wait()
        assert total.tolist() == [SIZE, SIZE]
        made.wait(LIMIT_S)  # none leaves while another one is still connected to it
        return store.names

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(be, range(SIZE)))


@pytest.mark.guarantee("D94")
def test_the_ranks_of_a_mesh_find_each_other_with_three_operations_each() -> None:
    """They are as many for any number of ranks: Gloo by itself asks twice for each."""
    assert connect(is_lazy=False) == [["set", "wait", "multi_get"]] * SIZE


def test_a_lazy_group_asks_for_the_address_of_each_rank_when_it_connects() -> None:
    """What the test above compares with, and whether torch still asks in this way."""
    for names in connect(is_lazy=True):
        assert names[0] == "set"
        assert names[1:] == ["wait", "get"] * ((len(names) - 1) // 2)
        assert len(names) > 1


def test_a_rank_that_does_not_come_is_a_time_out_of_the_store() -> None:
    """It is the store's own error, raised within the group's timeout."""
    with pytest.raises(RuntimeError, match="timeout"):
        new_unregistered_gloo_group(dist.HashStore(), 0, 2, "g", 0.2, GlooOptions(LOOPBACK))


def test_other_keys_and_a_second_question_go_to_the_store_below() -> None:
    """An address is handed out once from what was fetched."""
    below = Asked(dist.HashStore())
    store = GatheredAddresses(below, 0, 2)
    for rank in range(2):
        below.store.set(f"0/{rank}", f"address {rank}")
    store.set("0/0", b"address 0")
    store.set("more", b"x")
    store.wait(["more"], timedelta(seconds=1))
    assert store.get("more") == b"x"
    assert below.names == ["set", "set", "wait", "get"]
    below.names.clear()
    for _ in range(2):
        for rank in range(2):
            store.wait([f"0/{rank}"], timedelta(seconds=1))
            assert store.get(f"0/{rank}") == f"address {rank}".encode()
    assert below.names == ["wait", "multi_get"] * 2
    assert store.get("0/1") == b"address 1"
    assert below.names[-1] == "get"
    with pytest.raises(RuntimeError):
        store.wait(["0/7"], timedelta(seconds=0.01))


@pytest.mark.thorough
def test_a_first_receive_in_a_lazy_group_keeps_its_thread_in_the_backend() -> None:
    """Why our own meshes are not lazy: one rank of a pair waits in `recv` itself, for longer than the group's timeout.

    If this fails, torch connects in another way, and meshes that connect at the first message may be possible.
    """
    limit_s = 0.4
    # Gloo lets the one of the pair wait whose address is the lower one, and ports are random: about every other try.
    took_s = (_first_receive_s(limit_s) for _ in range(40))
    assert any(seconds > 2 * limit_s for seconds in took_s)


def _first_receive_s(limit_s: float) -> float:
    """Return how long rank 0 is inside of the first receive of a new lazy group, whose other rank does nothing."""
    shared = dist.HashStore()
    options = [GlooOptions(LOOPBACK, is_lazy=True) for _ in range(2)]
    groups = [new_unregistered_gloo_group(shared, rank, 2, "g", limit_s, options[rank]) for rank in range(2)]
    start = time.monotonic()
    with suppress(RuntimeError):
        groups[0][1].recv([torch.empty(1)], 1, 7)
    return time.monotonic() - start


@pytest.mark.guarantee("G37")
def test_a_rank_that_has_given_up_waits_no_longer_for_addresses_in_a_file(tmp_path: Path) -> None:
    """Torch's own wait goes on until the deadline of the store once the file is gone."""
    path, is_over = tmp_path / "store", threading.Event()
    store = dist.FileStore(str(path), -1)
    store.set_timeout(timedelta(seconds=LIMIT_S))
    addresses = GatheredAddresses(dist.PrefixStore("g", store), 0, 2, is_over.is_set)
    addresses.set("mesh/0", b"here")
    with pytest.raises(dist.DistStoreError, match="mesh/1"):
        addresses.wait(["mesh/1"], timedelta(seconds=0.1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(addresses.wait, ["mesh/1"], timedelta(seconds=LIMIT_S))
        with pytest.raises(TimeoutError):
            waiting.result(0.1)
        began = time.monotonic()
        is_over.set()
        with pytest.raises(dist.DistStoreError, match="nobody"):
            waiting.result()
        assert time.monotonic() - began < LIMIT_S / 2
    other = GatheredAddresses(dist.PrefixStore("g", store), 1, 2)
    other.set("mesh/1", b"there")
    addresses = GatheredAddresses(dist.PrefixStore("g", store), 0, 2, is_over.is_set)
    is_over.clear()
    addresses.set("mesh/0", b"here")
    addresses.wait(["mesh/1"], timedelta(seconds=LIMIT_S))
    assert addresses.get("mesh/1") == b"there"
