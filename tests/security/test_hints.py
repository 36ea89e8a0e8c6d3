"""The hint, by which ranks behind a launcher's store find the store of rank 0: what it costs, and hints that lie."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from coordinator.bootstrap import secured as meeting
from coordinator.bootstrap.secured import meet_by_hint
from coordinator.security.secret import Secret
from coordinator.settings import CoordinatorSettings
from shm_broadcast.errors import CommTimeoutError, DecodeError
from tests.counting_store import CountingStore, Traffic
from tests.ports import free_port
from tests.secured import DEADLINE_S, HERE, SECRET, check_nothing, place, ranks_of, served
from tests.waiting import sleeping_in, wait_until

SHORT_S = 0.4


def by_hint(outer: dist.Store, rank: int, timeout_s: float = 30.0, secret: Secret = SECRET) -> Any:
    settings = CoordinatorSettings.resolve({}, create_timeout_s=timeout_s)
    return meet_by_hint(place(rank, secret=secret), outer, HERE, settings, check_nothing)


def a_silent_listener(listener: socket.socket) -> str:
    return json.dumps({"address": HERE, "port": listener.getsockname()[1]})


@pytest.mark.guarantee("K7")
def test_a_hint_to_a_stranger_gives_a_timeout_that_names_it() -> None:
    """A process that says nothing, a store of another run, and a port where nobody listens: none is joined."""
    with socket.create_server((HERE, 0)) as silent, served(run="other") as other:
        ports = {
            "said nothing": silent.getsockname()[1],
            "does not hold this job's secret": other.port,
            "nobody listens": free_port(),
        }
        for reason, port in ports.items():
            outer = dist.HashStore()
            outer.set(meeting._HINT, json.dumps({"address": HERE, "port": port}))
            with pytest.raises(CommTimeoutError, match=reason) as caught:
                by_hint(outer, 1, SHORT_S)
            assert f"{HERE}:{port}, which the launcher's store names as rank 0's endpoint" in str(
                caught.value
            )
            assert caught.value.missing == (0,)


@pytest.mark.guarantee("K7")
def test_a_hint_that_is_overwritten_keeps_out_only_who_reads_it_then() -> None:
    """Rank 1 has read what rank 0 wrote, and works; rank 2 is led to a stranger, and does not join."""
    outer = dist.HashStore()
    with socket.create_server((HERE, 0)) as stranger:
        first = by_hint(outer, 0)
        second = by_hint(outer, 1)
        outer.set(meeting._HINT, a_silent_listener(stranger))
        with pytest.raises(CommTimeoutError, match=f"{HERE}:{stranger.getsockname()[1]}"):
            by_hint(outer, 2, SHORT_S)
        second.set("a", "1")
        assert first.get("a") == b"1"
        second.close()
        first.close()


NO_HINTS = {
    "text": "10.0.0.1:29500",
    "a name": json.dumps({"address": "localhost", "port": 5}),
    "a wildcard": json.dumps({"address": "0.0.0.0", "port": 5}),
    "no port": json.dumps({"address": HERE, "port": 0}),
    "a large port": json.dumps({"address": HERE, "port": 65536}),
    "more": json.dumps({"address": HERE, "port": 5, "run": "x"}),
    "long": json.dumps({"address": HERE, "port": 5}) + " " * 1000 + "x",
    "bytes": "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
}


@pytest.mark.guarantee("K7")
@pytest.mark.parametrize("what", NO_HINTS)
def test_what_is_no_endpoint_is_refused_at_once(what: str) -> None:
    """The error says that whoever reaches the launcher's store may have changed it."""
    outer = dist.HashStore()
    outer.set(meeting._HINT, NO_HINTS[what])
    if what == "long":  # only the beginning of it is looked at
        with pytest.raises(CommTimeoutError):
            by_hint(outer, 1, 0.1)
        return
    with pytest.raises(DecodeError, match="is no endpoint of rank 0 .whoever reaches that store"):
        by_hint(outer, 1)


def test_a_rank_that_finds_no_hint_names_rank_0() -> None:
    """Rank 0 has not come."""
    with pytest.raises(CommTimeoutError) as caught:
        by_hint(dist.HashStore(), 1, SHORT_S)
    assert caught.value.missing == (0,)


# --- what it costs --------------------------------------------------------------------------------------------


@pytest.fixture
def agent() -> Iterator[int]:
    """Yield the port of the store of a launcher's agent."""
    kept = [dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False, use_libuv=False)]
    yield kept[0].port
    kept.clear()


def connected(agent: int) -> dist.Store:
    """Return what a rank's process uses of the agent's store."""
    client = dist.TCPStore(HERE, agent, is_master=False, wait_for_workers=False, use_libuv=False)
    return dist.PrefixStore("run/0/0", client)


@pytest.mark.guarantee("D92")
@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.0, 2.5])
def test_a_rank_seldom_asks_the_launchers_store_for_the_hint(agent: int, late_s: float) -> None:
    """Four times in the first second, then once in each, and for the hint itself: thousands may wait at once."""
    traffic = {rank: Traffic() for rank in range(4)}
    stores: dict[int, Any] = {
        rank: CountingStore(lambda: connected(agent), traffic[rank]) for rank in traffic
    }
    found: dict[int, Any] = {}
    waited_s: dict[int, float] = {}

    def meet(rank: int) -> None:
        time.sleep(0.0 if rank else late_s)
        start = time.monotonic()
        found[rank] = by_hint(stores[rank], rank)
        waited_s[rank] = time.monotonic() - start

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in traffic]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    assert found.keys() == traffic.keys()
    for store in found.values():
        store.close()
    assert len(traffic[0].names) == 1
    for rank in (1, 2, 3):
        looks = 1 + sum(waited_s[rank] >= past_s for past_s in (0.1, 0.3, 0.7)) + int(waited_s[rank] - 0.7)
        assert 2 <= len(traffic[rank].names) <= looks + 1, traffic


def test_a_rank_that_waits_in_the_launchers_store_names_rank_0_at_the_deadline(agent: int) -> None:
    """As one that finds no hint in a file."""
    with pytest.raises(CommTimeoutError, match="rank 0 has not told the launcher's store") as caught:
        by_hint(connected(agent), 1, SHORT_S)
    assert caught.value.missing == (0,)


def test_a_rank_that_is_interrupted_while_it_waits_does_not_join_when_the_hint_comes(
    agent: int,
) -> None:
    """The call and its thread end at once, and rank 0 never hears of this rank."""
    outer = connected(agent)

    def strike() -> None:
        if sleeping_in("_await_hint"):
            raise KeyboardInterrupt

    with served() as store:
        with pytest.raises(KeyboardInterrupt):
            meet_by_hint(
                place(1), outer, HERE, CoordinatorSettings.resolve({}, create_timeout_s=DEADLINE_S), strike
            )
        wait_until(lambda: not sleeping_in("_await_hint"), "the end of the thread", DEADLINE_S)
        connected(agent).set(meeting._HINT, json.dumps({"address": HERE, "port": store.port}))
        assert ranks_of(store) == [0]
