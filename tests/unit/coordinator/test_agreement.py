"""Ranks agree on the facts of a group; threads stand for ranks, over each of torch's stores."""

import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import torch.distributed as dist

from coordinator.bootstrap.agreement.agreeing import agree
from coordinator.bootstrap.agreement.attendance import Attendance
from coordinator.bootstrap.agreement.views import View, write_view
from device_comm.cpu.shared_memory import Preparation
from shm_broadcast.errors import CommTimeoutError, DisagreementError, NativeError, PeerLostError
from shm_broadcast.liveness import PeerWatch, process_state, this_process
from tests.asked import identity_of
from tests.counting_store import CountingStore, Traffic
from tests.waiting import wait_until

FACTS = {"world_size": "3", "backend": "gloo"}
# What must happen at once may take this long on a busy machine; deadlines that must not matter are a minute.
PROMPT_S = 20.0

StoreOf = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "file"])
def store_of(request: pytest.FixtureRequest, tmp_path: Path) -> StoreOf:
    """Return a function that gives each rank its view of one store."""
    if request.param == "hash":
        store = dist.HashStore()
        return lambda: store
    return lambda: dist.FileStore(str(tmp_path / "store"), -1)


def view(address: str = "127.0.0.1", **facts: str) -> View:
    return View({**FACTS, **facts}, this_process(), address)


def agree_in_threads(
    store_of: StoreOf,
    views: dict[int, View],
    ranks: list[int],
    timeout_s: float = 60.0,
    delay_s: float = 0.0,
    *,
    in_order: bool = False,
) -> dict[int, Any]:
    """Let each rank of `views` agree in a thread, some later; return each result or error.

    With `in_order` each comes once those before it are there.
    """
    store = store_of()
    outcomes: dict[int, Any] = {}

    def body(rank: int, number: int) -> None:
        time.sleep(number * delay_s)
        try:
            outcomes[rank] = agree(store_of(), "group 'tp:0'", rank, ranks, views[rank], timeout_s)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(rank, number)) for number, rank in enumerate(views)]
    for rank, thread in zip(views, threads, strict=True):
        thread.start()
        if in_order and thread is not threads[-1]:
            wait_until(lambda: rank in Attendance(store, rank, ranks).present(), f"rank {rank}")  # noqa: B023
    for thread in threads:
        thread.join(PROMPT_S)
        assert not thread.is_alive()
    return outcomes


def test_ranks_that_hold_the_same_get_everybodys_view(store_of: StoreOf) -> None:
    """Each rank gets the views on its kernel, here all, by rank; facts that may differ do."""
    views = {rank: view(f"10.0.0.{rank}") for rank in (4, 5, 7)}
    outcomes = agree_in_threads(store_of, views, [4, 5, 7])
    for outcome in outcomes.values():
        assert {rank: (seen.process, seen.address) for rank, seen in outcome.near.items()} == {
            rank: (own.process, own.address) for rank, own in views.items()
        }


def test_ranks_may_come_in_any_order(store_of: StoreOf) -> None:
    """A rank that arrives many polls later is waited for."""
    views = {rank: view() for rank in (2, 0, 1)}
    outcomes = agree_in_threads(store_of, views, [0, 1, 2], delay_s=0.3)
    assert all(outcome.near.keys() == views.keys() for outcome in outcomes.values())


def test_one_that_holds_something_else_makes_all_raise(store_of: StoreOf) -> None:
    """All ranks raise; the error names the fact, the values, and which ranks hold each."""
    views = {0: view(), 1: view(), 2: view(backend="nccl")}
    outcomes = agree_in_threads(store_of, views, [0, 1, 2], in_order=True)
    for error in outcomes.values():
        assert isinstance(error, DisagreementError)
        assert "backend: 'gloo' (ranks 0, 1), 'nccl' (rank 2)" in str(error)
        assert "world_size" not in str(error)
        assert set(error.views) == {0, 1, 2}
        assert "nccl" in error.views[2]


def test_a_disagreement_does_not_wait_for_ranks_that_are_still_to_come(store_of: StoreOf) -> None:
    """Two ranks that disagree raise although a third never arrives."""
    start = time.monotonic()
    outcomes = agree_in_threads(store_of, {0: view(), 1: view(world_size="2")}, [0, 1, 2])
    assert all(isinstance(error, DisagreementError) for error in outcomes.values())
    assert time.monotonic() - start < PROMPT_S


def test_a_rank_that_comes_after_a_disagreement_is_told_of_it(store_of: StoreOf) -> None:
    """A late rank raises the same error, whatever it holds itself."""
    agree_in_threads(store_of, {0: view(), 1: view(world_size="2")}, [0, 1, 2])
    (error,) = agree_in_threads(store_of, {2: view()}, [0, 1, 2]).values()
    assert isinstance(error, DisagreementError)


@pytest.mark.slow
def test_ranks_that_do_not_come_are_named_by_all_that_came(store_of: StoreOf) -> None:
    """The first deadline holds for all: later ranks blame nobody else and wait no longer."""
    outcomes = agree_in_threads(store_of, {0: view(), 2: view()}, [0, 1, 2, 3], timeout_s=1.0, delay_s=0.5)
    for error in outcomes.values():
        assert isinstance(error, CommTimeoutError)
        assert error.missing == (1, 3)
        assert "group 'tp:0'" in str(error)
        assert "within 1.0 s" in str(error)


def test_a_rank_that_comes_too_late_is_told_so(store_of: StoreOf) -> None:
    """A late rank does not wait for ranks that have given up."""
    agree_in_threads(store_of, {0: view()}, [0, 1], timeout_s=0.2)
    (error,) = agree_in_threads(store_of, {1: view()}, [0, 1]).values()
    assert isinstance(error, CommTimeoutError)
    assert error.missing == (1,)


def test_two_processes_with_one_rank_are_refused(store_of: StoreOf) -> None:
    """The second process raises and names the first, which goes on waiting."""
    agree_in_threads(store_of, {0: view()}, [0, 1], timeout_s=0.2)
    (error,) = agree_in_threads(store_of, {0: view()}, [0, 1]).values()
    assert isinstance(error, DisagreementError)
    assert f"pid {this_process().pid}" in str(error)


def test_a_rank_that_has_died_is_named(store_of: StoreOf) -> None:
    """A rank that waits looks who else has come, and raises if the process behind a view no longer exists."""
    dead = view()
    dead = msgspec.structs.replace(dead, process=msgspec.structs.replace(dead.process, start_ticks=1))
    # As `Attendance` writes them.
    store: Any = store_of()
    store.set("view/1", write_view(dead))
    store.append(f"kernel/{dead.process.boot_id}", "1 ")
    (error,) = agree_in_threads(store_of, {0: view()}, [0, 1, 2]).values()
    assert isinstance(error, PeerLostError)
    assert error.peers == (1,)


class FailingStore:
    """A store whose host disappears after two requests, or is stopped for a while then."""

    def __init__(self, hang_s: float | None) -> None:
        self._store = dist.HashStore()
        self._hang_s = hang_s
        self._asked = 0
        self._answers_at = float("inf")

    def clone(self) -> "FailingStore":
        return self

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self._asked += 1
            if self._asked > 2 and self._hang_s is None:
                raise RuntimeError("Connection reset by peer")
            if self._asked == 3:
                self._answers_at = time.monotonic() + (self._hang_s or 0.0)
            if self._asked >= 3:
                time.sleep(max(self._answers_at - time.monotonic(), 0.0))
            return getattr(self._store, name)(*args)

        return ask


@pytest.mark.guarantee("G37")
def test_a_rank_that_leaves_while_it_connects_does_not_come(store_of: StoreOf) -> None:
    """Its thread may be in the connection for seconds. The others must not take it for one that has agreed."""
    store, connecting, left, ended = store_of(), threading.Event(), threading.Event(), threading.Event()

    @contextmanager
    def connect() -> Iterator[dist.Store]:
        connecting.set()
        left.wait()
        try:
            yield store
        finally:
            ended.set()

    def interrupt() -> None:
        connecting.wait()
        raise KeyboardInterrupt

    with closing(PeerWatch(this_process(), {})) as watch:
        watch.look_with(interrupt)
        with pytest.raises(KeyboardInterrupt):
            agree(store, "group 'tp:0'", 1, [0, 1], view(), 60.0, watch, connect=connect)
        left.set()
        assert ended.wait(PROMPT_S)
    assert Attendance(store, 1, [0, 1]).present() == []
    assert not store.check(["view/1"])


def test_a_store_that_is_gone_is_a_native_error() -> None:
    """The error carries torch's text, as nothing is known about the store's host."""
    store: Any = FailingStore(None)
    with pytest.raises(NativeError, match="Connection reset by peer"):
        agree(store, "group 'tp:0'", 0, [0, 1], view(), 60.0)


@contextmanager
def stopped_process() -> Iterator[int]:
    """Yield the pid of a process that is stopped."""
    process = subprocess.Popen(["/bin/sleep", "1000"])
    try:
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: process_state(identity_of(process.pid)) == "stopped", "the stop")
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.mark.guarantee("G8")
@pytest.mark.slow
def test_a_store_that_hangs_does_not_outlast_the_deadline() -> None:
    """The call raises at its deadline although the stopped host never answers, and names the rank that is stopped."""
    store: Any = FailingStore(4.0)
    start = time.monotonic()
    with stopped_process() as pid, closing(PeerWatch(this_process(), {1: identity_of(pid)})) as watch:
        with pytest.raises(CommTimeoutError, match="did not answer within 0.2 s; rank 1 .*stopped") as caught:
            agree(store, "group 'tp:0'", 0, [0, 1], view(), 0.2, watch)
        assert caught.value.missing == (1,)
    assert time.monotonic() - start >= 0.2
    # The asking thread ends when the store answers.
    for thread in threading.enumerate():
        if thread.name.startswith("group-coordinator"):
            thread.join(PROMPT_S)


@pytest.mark.parametrize("key", ["proposal", "outcome", "view/1"])
def test_a_value_that_no_rank_has_written_is_a_native_error(store_of: StoreOf, key: str) -> None:
    """Whoever reaches the store can write to it; no error of a library comes out."""
    store_of().set(key, "{}")
    if key == "view/1":
        store_of().add("come/0", 2)  # rank 1 has come, so rank 0 reads all views
    (error,) = agree_in_threads(store_of, {0: view()}, [0, 1]).values()
    assert isinstance(error, NativeError)
    assert "no rank of this version has written" in str(error)


@cache
def note_of(offers: int) -> str:
    """Return the note of a rank that makes eight groups at once, of which it offers memory for some."""
    with closing(Preparation(2, 0)) as region:
        region.prepare()
        return msgspec.json.encode([region.offer] * offers + [b""] * (8 - offers)).decode()


def host_view(host: int, offers: int = 0, **facts: str) -> View:
    """Return the view of a rank on one of several hosts; only this one's processes can be watched from here.

    It is as large as a real one of a rank that offers memory for so many of eight groups.
    """
    own = view(f"10.200.100.{host + 100}", **facts)
    place = {"boot_id": str(UUID(int=host)), "hostname": f"node-{host:05d}"}
    return msgspec.structs.replace(
        own,
        process=msgspec.structs.replace(own.process, **place),
        host_id=f"{host:032x}",
        note=note_of(offers),
    )


@pytest.fixture
def tcp_store() -> Iterator[Callable[[], dist.Store]]:
    """Return a function that connects to a store over TCP."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    kept = [
        dist.TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=False,
        )
    ]
    yield lambda: dist.TCPStore("127.0.0.1", port, 1, False, wait_for_workers=False)
    kept.clear()


@pytest.fixture
def memory_store() -> Callable[[], dist.Store]:
    """Return a function that gives each rank the same store in memory, for which torch looks up no names."""
    store = dist.HashStore()
    return lambda: store


def prefixed(connect: Callable[[], dist.Store], prefix: str) -> dist.Store:
    return dist.PrefixStore(prefix, connect())


def agree_counted(
    connect: Callable[[], dist.Store], views: dict[int, View], late_s: float
) -> tuple[dict[int, Any], dict[int, Traffic]]:
    """Let ranks agree, the last one late; return each result or error, and what each asked the store."""
    traffic = {rank: Traffic() for rank in views}
    stores: dict[int, Any] = {rank: CountingStore(connect, traffic[rank]) for rank in views}
    last = max(views)
    outcomes: dict[int, Any] = {}

    def body(rank: int) -> None:
        time.sleep(late_s if rank == last else 0.0)
        try:
            outcomes[rank] = agree(stores[rank], "the world", rank, list(views), views[rank], 60.0)
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=body, args=(rank,)) for rank in views]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT_S)
        assert not thread.is_alive()
    return outcomes, traffic


@pytest.mark.guarantee("D92")
@pytest.mark.parametrize("late_s", [0.0, 2.5])
def test_a_rank_asks_the_store_for_few_things_however_late_the_last_one_comes(
    tcp_store: Callable[[], dist.Store], late_s: float
) -> None:
    """Twenty ranks on four hosts: eight questions each, and while they wait one a second and one more.

    On each host the first rank offers memory for three groups of a layout that its ranks share, such as tp, ep and dcp.
    """
    views = {rank: host_view(rank // 5, 0 if rank % 5 else 3) for rank in range(20)}
    outcomes, traffic = agree_counted(tcp_store, views, late_s)
    for rank, found in outcomes.items():
        assert found.near == {
            other: msgspec.structs.replace(found.near[other], facts={})
            for other in range(rank // 5 * 5, rank // 5 * 5 + 5)
        }
        assert list(found.host_ids) == list(views)
        assert len(set(found.host_ids.values())) == 4
        # Which of them is the last to come, and therefore writes for all, is a matter of time.
        if not traffic[rank].wrote_outcome:
            assert len(traffic[rank].names) <= 8 + int(late_s) + 1, traffic[rank].names
            assert traffic[rank].received <= 1024 + 300 * 5


@pytest.mark.guarantee("D92")
def test_what_a_rank_receives_does_not_grow_with_other_hosts(memory_store: Callable[[], dist.Store]) -> None:
    """With twelve hosts a rank gets a few bytes more than with three: their names."""
    received = []
    for hosts in (3, 12):
        views = {rank: host_view(rank // 4) for rank in range(4 * hosts)}
        connect = partial(prefixed, memory_store, str(hosts))
        outcomes, traffic = agree_counted(connect, views, 0.0)
        assert all(len(found.near) == 4 for found in outcomes.values())
        received.append(min(each.received for each in traffic.values()))
    assert received[1] - received[0] < 9 * 40


def test_facts_are_shown_only_where_they_differ(memory_store: Callable[[], dist.Store]) -> None:
    """Facts are long; a rank that holds those of the first one sends their digest alone."""
    long = "x" * 5000
    views = {rank: host_view(0, groups=long) for rank in range(6)}
    _, traffic = agree_counted(memory_store, views, 0.0)
    assert sorted(each.sent > 5000 for each in traffic.values()) == [False] * 5 + [True]


@pytest.mark.guarantee("D92")
def test_missing_ranks_are_listed_by_one_rank(tcp_store: Callable[[], dist.Store]) -> None:
    """Ranks that meet their deadline at once do not all list who is missing: three questions per rank in all.

    These are all that the ranks ask behind the first five: each proposes, claims, introduces itself, comes and waits.
    Once a rank knows it looks whether all do, and asks for twelve things in all, and for one more in each second.
    """
    ranks = list(range(20))
    traffic = {rank: Traffic() for rank in ranks[:-1]}
    stores: dict[int, Any] = {rank: CountingStore(tcp_store, traffic[rank]) for rank in traffic}
    errors: dict[int, CommTimeoutError] = {}
    took_s: dict[int, float] = {}

    def body(rank: int) -> None:
        start = time.monotonic()
        with pytest.raises(CommTimeoutError) as caught:
            agree(stores[rank], "the world", rank, ranks, host_view(0), 1.0)
        errors[rank], took_s[rank] = caught.value, time.monotonic() - start

    threads = [threading.Thread(target=body, args=(rank,)) for rank in traffic]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PROMPT_S)
        assert not thread.is_alive()
    # On a busy machine some threads may come too late themselves; all are told the same.
    (missing,) = {error.missing for error in errors.values()}
    assert 19 in missing
    naming = 0
    for rank, each in traffic.items():
        naming += len([key for key in each.keys[5:] if key != "told"])
        assert len(each.names) <= 12 + int(took_s[rank]), each
    assert naming <= 3 * len(ranks), traffic


@pytest.mark.guarantee("D93")
def test_a_death_is_told_to_ranks_that_cannot_see_it(tcp_store: Callable[[], dist.Store]) -> None:
    """Rank 0 shares a kernel with the dead one and writes the outcome; rank 1 on another host names it too."""
    dead = view()
    dead = msgspec.structs.replace(dead, process=msgspec.structs.replace(dead.process, start_ticks=1))
    store: Any = tcp_store()
    store.set("view/2", write_view(dead))
    store.append(f"kernel/{dead.process.boot_id}", "2 ")
    outcomes = agree_in_threads(tcp_store, {0: view(), 1: host_view(1)}, [0, 1, 2, 3])
    assert all(isinstance(error, PeerLostError) and error.peers == (2,) for error in outcomes.values())


@pytest.mark.guarantee("D93")
def test_all_ranks_that_are_lost_at_once_are_named(tcp_store: Callable[[], dist.Store]) -> None:
    """Rank 0 has heard that a host has vanished; rank 1 reads the ranks and the reason from the outcome."""
    own, errors = view(), dict[int, PeerLostError]()
    watches = [PeerWatch(own.process, {}) for _ in range(2)]

    def body(rank: int) -> None:
        with closing(watches[rank]) as watch, pytest.raises(PeerLostError) as caught:
            agree(tcp_store(), "the world", rank, [0, 1, 2, 3], host_view(rank), PROMPT_S, watch)
        errors[rank] = caught.value

    threads = [threading.Thread(target=body, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    wait_until(lambda: tcp_store().check(["view/0"]), "rank 0 has joined", PROMPT_S)
    watches[0].report_all({3: "no answer", 2: "no answer"})
    for thread in threads:
        thread.join(2 * PROMPT_S)
        assert not thread.is_alive()
    assert [errors[rank].peers for rank in (0, 1)] == [(2, 3)] * 2
    assert "ranks 2, 3 are lost: no answer" in str(errors[1])


def test_a_store_whose_host_is_lost_is_asked_no_more(tcp_store: Callable[[], dist.Store]) -> None:
    """A rank that would tell the others of a loss does not wait for the store then."""
    asked = list[int]()

    def check() -> None:
        asked.append(1)
        raise NativeError("lost", library="test", function="check")

    store = tcp_store()
    with closing(PeerWatch(this_process(), {})) as watch:
        # Once this rank has joined.
        watch.look_with(lambda: watch.report(1, "no answer") if store.check(["view/0"]) else None)
        with pytest.raises(PeerLostError):
            agree(tcp_store(), "the world", 0, [0, 1], view(), PROMPT_S, watch, check_store=check)
    assert asked
    assert not store.check(["outcome"])


def test_another_rank_completes_what_the_last_one_did_not(store_of: StoreOf) -> None:
    """Rank 1 comes last and ends before it writes the outcome: rank 0 does behind its deadline, and names nobody."""
    own = view()

    def come() -> None:
        last = Attendance(store_of(), 1, [0, 1])
        while not last.present():
            time.sleep(0.01)
        assert last.claim(own) is None
        assert last.come()

    thread = threading.Thread(target=come)
    thread.start()
    (found,) = agree_in_threads(store_of, {0: own}, [0, 1], timeout_s=1.0).values()
    thread.join()
    assert found.near.keys() == {0, 1}


def test_a_rank_that_dies_while_it_lists_is_replaced(tcp_store: Callable[[], dist.Store]) -> None:
    """The claim of the first second after the deadline is taken; the rank claims the next one."""
    store = tcp_store()
    store.add("lists/0", 1)
    (error,) = agree_in_threads(tcp_store, {0: view()}, [0, 1], timeout_s=0.2).values()
    assert isinstance(error, CommTimeoutError)
    assert error.missing == (1,)
