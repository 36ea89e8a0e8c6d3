"""The store of a job does what torch's stores do, for several threads and for Gloo, and its waits end."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from coordinator.bootstrap.connections import connection_of_its_own
from coordinator.host.process_groups import GlooOptions, new_unregistered_gloo_group
from coordinator.security import client as client_module
from coordinator.security import store_thread
from coordinator.security.opening import _pings, connect_to
from coordinator.security.place import Place
from coordinator.security.records import LONGEST_QUESTION
from coordinator.security.store import SecuredStore, generation_facts, secured
from shm_broadcast.endpoint import RemoteSettings
from shm_broadcast.errors import CommTimeoutError, UsageError
from tests.handlers import alarm_in
from tests.leaks import Snapshot, leaked_since
from tests.ports import free_port, listening_addresses
from tests.relay import relay_to
from tests.secured import HERE, SECRET, check_nothing, joined, place, served, server_of
from tests.waiting import wait_until

SHORT = timedelta(milliseconds=50)


@pytest.fixture
def pair() -> Iterator[tuple[SecuredStore, SecuredStore]]:
    """Yield the stores of ranks 0 and 1."""
    with served() as first, joined(first.port, 1) as (second,):
        yield first, second


# --- what torch's stores do -----------------------------------------------------------------------------------

Step = Callable[[Any], Any]

STEPS: dict[str, Step] = {
    "set text": lambda store: store.set("a", "1"),
    "set what torch takes for text": lambda store: store.set("umlaut", "ä"),
    "get": lambda store: store.get("a"),
    "get text": lambda store: store.get("umlaut"),
    "overwrite": lambda store: (store.set("a", "2"), store.get("a")),
    "an empty value": lambda store: (store.set("empty", ""), store.get("empty")),
    "check one": lambda store: store.check(["a"]),
    "check a missing one": lambda store: store.check(["a", "nothing"]),
    "check none": lambda store: store.check([]),
    "add to a new key": lambda store: store.add("count", 5),
    "add again": lambda store: store.add("count", -7),
    "read a number": lambda store: store.get("count"),
    "add to text that is a number": lambda store: store.add("a", 3),
    "add a bit of 62": lambda store: store.add("bits", 1 << 61),
    "swap a new key": lambda store: store.compare_set("swap", "", "one"),
    "swap with what it has": lambda store: store.compare_set("swap", "one", "two"),
    "swap with something else": lambda store: store.compare_set("swap", "three", "four"),
    "swap a key as if it were new": lambda store: store.compare_set("swap", "", "five"),
    "swap a missing key": lambda store: store.compare_set("missing", "six", "seven"),
    "a swap that failed sets nothing": lambda store: store.check(["missing"]),
    "append to a new key": lambda store: (store.append("list", "x"), store.get("list")),
    "append": lambda store: (store.append("list", "y"), store.get("list")),
    "several at once": lambda store: (store.multi_set(["m", "n"], ["1", "2"]), store.multi_get(["n", "m"])),
    "wait for what is there": lambda store: store.wait(["a", "m"], timedelta(seconds=5)),
    "delete": lambda store: store.delete_key("m"),
    "delete again": lambda store: store.delete_key("m"),
    "is deleted": lambda store: store.check(["m"]),
    "extended": lambda store: store.has_extended_api(),
}


def test_it_answers_as_a_store_of_torch_does(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """Every operation, called through C++ with a prefix on one rank and plainly on the other, has torch's result."""
    given = dist.TCPStore(HERE, free_port(), is_master=True, wait_for_workers=False, use_libuv=False)
    own, plain = dist.PrefixStore("p", pair[1]), dist.PrefixStore("p", given)
    for name, step in STEPS.items():
        assert step(own) == step(plain), name
    direct = pair[0]
    for name, step in STEPS.items():
        assert step(direct) == step(given), name
    assert direct.get("p/a") == plain.get("a")
    assert direct.num_keys() == len({"a", "umlaut", "empty", "count", "bits", "swap", "list", "n"}) * 2


def test_a_late_key_raises_torchs_error(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """`wait` takes its timeout, `get` that of the store; both raise `DistStoreError`, and the store is usable after."""
    store = dist.PrefixStore("p", pair[1])
    with pytest.raises(dist.DistStoreError, match=r"wait\(\['p/never'\]\): timed out"):
        store.wait(["never"], SHORT)
    store.set_timeout(SHORT)
    with pytest.raises(dist.DistStoreError, match=r"get\(\['p/never'\]\): timed out"):
        store.get("never")
    store.set("never", "now")
    store.wait(["never"])


def test_what_it_cannot_do_is_refused_by_name(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """A sum of something that is no number, of more than 64 bits, and a value that no record holds."""
    store = pair[1]
    store.set("text", "x")
    store.set("most", str((1 << 63) - 1))
    with pytest.raises(UsageError, match="'text' holds no number"):
        store.add("text", 1)
    with pytest.raises(UsageError, match="does not fit into 64 bits"):
        store.add("most", 1)
    with pytest.raises(UsageError, match=f"more than the {LONGEST_QUESTION} of a question"):
        store.set("long", bytes(LONGEST_QUESTION))
    assert store.get("text") == b"x"


# --- threads, waits and Gloo ----------------------------------------------------------------------------------


@pytest.mark.guarantee("K5")
def test_a_wait_holds_up_nobody(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """Threads wait in one store for keys that another thread sets through the same store, plain or as a clone."""
    store = dist.PrefixStore("p", pair[1])
    came: list[bytes] = []
    stores = [store, connection_of_its_own(store), store, connection_of_its_own(store)]
    threads = [
        threading.Thread(target=lambda key=f"k{n}", store=each: came.append(store.get(key)))
        for n, each in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    server: Any = server_of(pair[0])
    wait_until(lambda: server._table.waiting == 4, "four waits at the server")
    assert not store.check(["k0"])
    for number in (3, 1, 0, 2):
        store.set(f"k{number}", str(number))
    for thread in threads:
        thread.join()
    assert sorted(came) == [b"0", b"1", b"2", b"3"]


def test_a_key_that_is_deleted_while_others_wait_is_waited_for_again(
    pair: tuple[SecuredStore, SecuredStore],
) -> None:
    """Whoever waits for two keys gets both as they are at one moment."""
    first, second = pair
    found: list[list[bytes]] = []
    first.set("a", "old")
    thread = threading.Thread(target=lambda: found.append(second.multi_get(["a", "b"])))
    thread.start()
    server: Any = server_of(first)
    wait_until(lambda: server._table.waiting == 1, "the wait at the server")
    first.delete_key("a")
    first.set("b", "1")
    assert not found
    first.set("a", "new")
    thread.join()
    assert found == [[b"new", b"1"]]


def test_the_server_forgets_those_that_gave_up(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """A wait that is over for its caller does not stay in the server's memory."""
    for number in range(5):
        with pytest.raises(dist.DistStoreError):
            pair[1].wait([f"never/{number}"], timedelta(milliseconds=1))
    server: Any = server_of(pair[0])
    wait_until(lambda: server._table.waiting == 0, "the server to forget")


@pytest.mark.guarantee("K5")
def test_gloo_connects_through_it(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """Two ranks of C++ Gloo find each other in it, and their sum is right; they use it from threads of their own."""
    sums: dict[int, list[float]] = {}

    def rank(number: int) -> None:
        store = dist.PrefixStore("gloo", pair[number])
        group, _ = new_unregistered_gloo_group(store, number, 2, "pair", 30.0, GlooOptions(HERE))
        tensor = torch.tensor([1.0, number])
        group.allreduce([tensor]).wait()
        sums[number] = tensor.tolist()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {0: [2.0, 1.0], 1: [2.0, 1.0]}


@pytest.mark.guarantee("K5")
def test_the_end_of_rank_0_ends_every_wait(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """Waits, and each later call, raise torch's error for a lost connection; that rank 0 leaves is no loss."""
    failures: list[BaseException] = []
    lost: list[int] = []
    pair[1].watch(lambda rank, how: lost.append(rank))

    def wait() -> None:
        try:
            pair[1].wait(["never"])
        except dist.DistError as error:
            failures.append(error)

    threads = [threading.Thread(target=wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    server: Any = server_of(pair[0])
    wait_until(lambda: server._table.waiting == 3, "three waits at the server")
    pair[0].close()
    for thread in threads:
        thread.join()
    assert [type(each) for each in failures] == [dist.DistNetworkError] * 3
    with pytest.raises(dist.DistNetworkError, match="rank 0 has left"):
        pair[1].check(["a"])
    assert lost == []


@pytest.mark.guarantee("K5")
def test_a_server_that_fails_ends_every_connection(
    pair: tuple[SecuredStore, SecuredStore], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says what was wrong, nobody hangs, and the store can be closed."""
    server: Any = server_of(pair[0])

    def fail(*args: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(server._table, "ask", fail)
    for store in (pair[1], pair[0]):
        with pytest.raises(dist.DistNetworkError, match="connection to rank 0 broke"):
            store.check(["a"])
    assert "planted" in caplog.text


def test_nothing_is_left_of_a_store(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """Closing, once or twice, ends threads and descriptors on both sides, also where joining failed."""
    before = Snapshot.take()
    with served(run="other") as first, joined(first.port, 1, 2, run="other") as others:
        others[0].set("a", "1")
        assert listening_addresses() == [HERE]
        with pytest.raises(CommTimeoutError), joined(first.port, 3, timeout_s=0.2):
            pass
        for each in (*others, first):
            each.close()
    assert leaked_since(before) == []


def test_it_says_where_rank_0_is_and_which_start_it_is(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """What torch wraps keeps the object; the generation is a fact that ranks compare."""
    first, second = pair
    wrapped = dist.PrefixStore("a", dist.PrefixStore("b", second))
    assert secured(wrapped) is second
    assert secured(dist.PrefixStore("a", dist.HashStore())) is None
    assert (second.host, second.port) == (HERE, first.port)
    assert generation_facts(wrapped) == generation_facts(first) == {"store generation": first.generation}
    assert len(bytes.fromhex(first.generation)) == 16
    with served(run="next") as other:
        assert other.generation != first.generation


def test_rank_0_may_come_last() -> None:
    """A rank tries until its deadline."""
    port = free_port()
    found: list[bytes] = []

    def wait() -> None:
        with joined(port, 1) as (store,):
            found.append(store.get("a"))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    with served(port=port) as store:
        store.set("a", "1")
        thread.join()
    assert found == [b"1"]


def test_a_rank_that_a_smaller_start_refuses_joins_the_next_one() -> None:
    """The store of two ranks, which is about to leave the address, does not keep rank 3 from the store of four."""
    found: list[bytes] = []
    with served(world_size=2) as first:
        port = first.port

        def join_late() -> None:
            with joined(port, 3) as (store,):
                found.append(store.get("a"))

        thread = threading.Thread(target=join_late)
        thread.start()
        server: Any = server_of(first)
        wait_until(lambda: server._gatekeeper.refused >= 2, "rank 3 to be refused twice")
    with served(port=port) as second:
        second.set("a", "1")
        thread.join()
    assert found == [b"1"]


def test_a_port_that_is_taken_is_named() -> None:
    """Rank 0 says which address and port it cannot have."""
    with socket.create_server((HERE, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"cannot listen on {HERE}:{port}"), served(port=port):
            pass


def test_what_a_caller_checks_ends_the_attempt_to_join() -> None:
    """As a rank that is known to be lost."""

    def lost() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        connect_to(place(1), HERE, free_port(), 60.0, lost)
    with pytest.raises(CommTimeoutError, match="nobody listens there") as caught:
        connect_to(place(1), HERE, free_port(), 0.2, check_nothing)
    assert caught.value.missing == (0,)


# --- signals and forks ----------------------------------------------------------------------------------------


class StruckError(Exception):
    """Raised by a signal handler."""


def strike() -> None:
    raise StruckError


def test_a_signal_handler_may_raise_in_a_wait(pair: tuple[SecuredStore, SecuredStore]) -> None:
    """The exception arrives as it is, also through C++, and the store answers the next question."""
    for store in (pair[1], dist.PrefixStore("p", pair[1])):
        with alarm_in("wait", strike), pytest.raises(StruckError):
            store.wait(["never"], timedelta(seconds=60))
        assert not store.check(["never"])


def test_a_forked_child_cannot_use_it(
    pair: tuple[SecuredStore, SecuredStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has neither the threads nor the connection; the parent's is not disturbed."""
    with monkeypatch.context() as patched:
        for module in (client_module, store_thread):
            patched.setattr(module, "fork_count", lambda: 99)
        with pytest.raises(UsageError, match="belongs to the process that forked this one"):
            pair[1].check(["a"])
        pair[1].close()
        pair[0].close()
    assert not pair[1].check(["a"])


# --- losses ---------------------------------------------------------------------------------------------------


@pytest.mark.guarantee("K10")
def test_a_connection_that_breaks_is_told_to_all_and_one_that_is_closed_is_not(
    pair: tuple[SecuredStore, SecuredStore],
) -> None:
    """Ranks learn of it once it happens, or when they ask; a rank that joins later learns it too."""
    first, second = pair
    told: dict[int, list[tuple[int, str]]] = {0: [], 1: [], 3: []}
    first.watch(lambda rank, how: told[0].append((rank, how)))
    with joined(first.port, 3) as (third,), relay_to(first.port) as relay:
        with joined(first.port, 2):  # and closes it
            pass
        with joined(relay.port, 2) as (lost,):
            relay.close()
            wait_until(lambda: told[0], "rank 0 to learn it")
            with pytest.raises(dist.DistNetworkError):
                lost.check(["a"])
        second.watch(lambda rank, how: told[1].append((rank, how)))
        wait_until(lambda: told[1], "rank 1 to learn it")
        assert third.num_keys() == 0
    with joined(first.port, 3) as (late,):
        late.watch(lambda rank, how: told[3].append((rank, how)))
        wait_until(lambda: told[3], "a later rank to learn it")
    assert second.num_keys() == 0
    assert list(told.values()) == [[(2, "its connection to the store of rank 0 broke")]] * 3


@pytest.mark.guarantee("K10")
def test_a_broken_connection_to_rank_0_is_its_loss() -> None:
    """Whoever is cut off counts rank 0 as lost."""
    with served() as first, relay_to(first.port) as relay, joined(relay.port, 1) as (rank,):
        told: list[int] = []
        rank.watch(lambda lost, how: told.append(lost))
        relay.close()
        wait_until(lambda: told == [0], "the rank to learn it")


def test_silence_counts_after_lost_after_s_except_at_home() -> None:
    """Zmq drops a silent connection between hosts after `lost_after_s`; on loopback it waits for a debugger."""
    given = RemoteSettings(heartbeat_s=0.2, lost_after_s=0.8)
    apart = _pings(Place(SECRET, "run", 1, 2, given), "10.0.0.1")
    assert (apart.ping_ms, apart.silence_ms) == (200, 800)
    assert _pings(Place(SECRET, "run", 1, 2, given), HERE).silence_ms == 22_500
